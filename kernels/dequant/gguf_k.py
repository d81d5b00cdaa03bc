"""GGUF's K formats: super-blocks of 256 elements, whose sub-blocks have scales of a few bits.

Each function maps uint8 [num_blocks, block_bytes] to a CodedMatrix [num_blocks, 256].
"""

from __future__ import annotations

import torch

from kernels.coded_weight import CodedMatrix, CodeFormat
from kernels.dequant.bit_fields import fields, half_floats

__all__ = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k"]

Q2_K = CodeFormat(bits=2, granule=16, granules_per_outer=16, has_inner=True, zero_kind="minima")
Q3_K = CodeFormat(bits=3, granule=16, granules_per_outer=16, has_inner=True, zero=4.0)
Q4_K = CodeFormat(bits=4, granules_per_outer=8, has_inner=True, zero_kind="minima")
Q5_K = CodeFormat(bits=5, granules_per_outer=8, has_inner=True, zero_kind="minima")
Q6_K = CodeFormat(bits=6, granule=16, granules_per_outer=16, has_inner=True, zero=32.0)


def q2_k(blocks: torch.Tensor) -> CodedMatrix:
    """Read 16 scales and minima, a nibble each | 64 bytes of 2-bit codes | scale f16 | scale of minima f16."""
    return CodedMatrix(
        format=Q2_K,
        codes=fields(blocks[:, 16:80], 2, 32),
        outer_scales=half_floats(blocks, 80),
        outer_minima=half_floats(blocks, 82),
        inner_scales=(blocks[:, :16] & 15).view(torch.int8),
        inner_minima=blocks[:, :16] >> 4,
    )


def q3_k(blocks: torch.Tensor) -> CodedMatrix:
    """Read third bits, 32 bytes | 64 bytes of 2-bit codes | 16 scales of six bits, 12 bytes | scale f16.

    A third bit that is set adds four; codes have the offset 4, and the sub-blocks' scales 32.
    """
    low = fields(blocks[:, 96:104], 4, 8)
    high = fields(blocks[:, 104:108], 2, 4)
    third = fields(blocks[:, :32], 1, 32)
    return CodedMatrix(
        format=Q3_K,
        codes=fields(blocks[:, 32:96], 2, 32).bitwise_or_(third.mul_(4)),
        outer_scales=half_floats(blocks, 108),
        inner_scales=(low | (high << 4)).view(torch.int8) - 32,
    )


def q4_k(blocks: torch.Tensor) -> CodedMatrix:
    """Read scale f16 | scale of minima f16 | 8 scales and minima, 12 bytes | 128 bytes of nibbles."""
    scales, minima = _scales_and_minima(blocks)
    return CodedMatrix(
        format=Q4_K,
        codes=fields(blocks[:, 16:], 4, 32),
        outer_scales=half_floats(blocks, 0),
        outer_minima=half_floats(blocks, 2),
        inner_scales=scales,
        inner_minima=minima,
    )


def q5_k(blocks: torch.Tensor) -> CodedMatrix:
    """Read scale f16 | scale of minima f16 | 8 scales and minima, 12 bytes | fifth bits, 32 bytes | nibbles."""
    scales, minima = _scales_and_minima(blocks)
    fifth = fields(blocks[:, 16:48], 1, 32)
    return CodedMatrix(
        format=Q5_K,
        codes=fields(blocks[:, 48:], 4, 32).bitwise_or_(fifth.mul_(16)),
        outer_scales=half_floats(blocks, 0),
        outer_minima=half_floats(blocks, 2),
        inner_scales=scales,
        inner_minima=minima,
    )


def q6_k(blocks: torch.Tensor) -> CodedMatrix:
    """Read 128 bytes of nibbles | 64 bytes of two high bits | 16 signed scales | scale f16; codes - 32."""
    low = fields(blocks[:, :128], 4, 64)
    high = fields(blocks[:, 128:192], 2, 32)
    return CodedMatrix(
        format=Q6_K,
        codes=low.bitwise_or_(high.mul_(16)),
        outer_scales=half_floats(blocks, 208),
        inner_scales=blocks[:, 192:208].contiguous().view(torch.int8),
    )


def _scales_and_minima(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales and minima of Q4_K's and Q5_K's 8 sub-blocks, int8 and uint8 [num_blocks, 8].

    They have six bits each. Bytes 0 to 3 hold the first four scales, bytes 4 to 7 the first four minima. The nibbles of
    bytes 8 to 11 are the low bits of the last four, whose high bits are the two high ones of bytes 0 to 7.
    """
    first, second, third = blocks[:, 4:16].reshape(-1, 3, 4).unbind(1)
    scales = torch.cat((first & 63, (third & 15) | ((first >> 2) & 48)), dim=1)
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 2) & 48)), dim=1)
    return scales.view(torch.int8), minima
