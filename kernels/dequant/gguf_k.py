"""GGUF's K formats to float32: super-blocks of 256 elements, whose sub-blocks have scales of a few bits.

Each function maps uint8 [num_blocks, block_bytes] to float32 [num_blocks, 256].
"""

from __future__ import annotations

import torch

from kernels.dequant.gguf_bits import fields, half_floats

__all__ = ["q2_k", "q3_k", "q4_k", "q5_k", "q6_k"]


def q2_k(blocks: torch.Tensor) -> torch.Tensor:
    """Decode 16 scales and minima, a nibble each | 64 bytes of 2-bit codes | scale f16 | scale of minima f16."""
    scales = half_floats(blocks, 80) * (blocks[:, :16] & 15).float()
    minima = half_floats(blocks, 82) * (blocks[:, :16] >> 4).float()
    codes = fields(blocks[:, 16:80].reshape(-1, 2, 32), 2).reshape(-1, 16, 16).float()
    return (scales.unsqueeze(2) * codes - minima.unsqueeze(2)).flatten(1)


def q3_k(blocks: torch.Tensor) -> torch.Tensor:
    """Decode third bits, 32 bytes | 64 bytes of 2-bit codes | 16 scales of six bits, 12 bytes | scale f16.

    A third bit that is set adds four; codes have the offset 4, and the sub-blocks' scales 32.
    """
    low = fields(blocks[:, 96:104], 4).reshape(-1, 16)
    high = fields(blocks[:, 104:108], 2).reshape(-1, 16)
    scales = half_floats(blocks, 108) * ((low | (high << 4)).to(torch.int8) - 32).float()
    third = fields(blocks[:, :32], 1).reshape(-1, 16, 16)
    codes = fields(blocks[:, 32:96].reshape(-1, 2, 32), 2).reshape(-1, 16, 16) | (third << 2)
    return (scales.unsqueeze(2) * (codes.to(torch.int8) - 4).float()).flatten(1)


def q4_k(blocks: torch.Tensor) -> torch.Tensor:
    """Decode scale f16 | scale of minima f16 | 8 scales and minima, 12 bytes | 128 bytes of nibbles."""
    scales, minima = _scales_and_minima(blocks)
    codes = fields(blocks[:, 16:].reshape(-1, 4, 32), 4).reshape(-1, 8, 32).float()
    return (scales * codes - minima).flatten(1)


def q5_k(blocks: torch.Tensor) -> torch.Tensor:
    """Decode scale f16 | scale of minima f16 | 8 scales and minima, 12 bytes | fifth bits, 32 bytes | nibbles."""
    scales, minima = _scales_and_minima(blocks)
    fifth = fields(blocks[:, 16:48], 1)
    codes = (fields(blocks[:, 48:].reshape(-1, 4, 32), 4).reshape(-1, 8, 32) | (fifth << 4)).float()
    return (scales * codes - minima).flatten(1)


def q6_k(blocks: torch.Tensor) -> torch.Tensor:
    """Decode 128 bytes of nibbles | 64 bytes of two high bits | 16 signed scales | scale f16; codes - 32."""
    scales = half_floats(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    low = fields(blocks[:, :128].reshape(-1, 2, 64), 4).reshape(-1, 16, 16)
    high = fields(blocks[:, 128:192].reshape(-1, 2, 32), 2).reshape(-1, 16, 16)
    codes = ((low | (high << 4)).to(torch.int8) - 32).float()
    return (scales.unsqueeze(2) * codes).flatten(1)


def _scales_and_minima(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales and minima of Q4_K's and Q5_K's 8 sub-blocks, float32 [num_blocks, 8, 1] each.

    They have six bits each. Bytes 0 to 3 hold the first four scales, bytes 4 to 7 the first four minima. The nibbles of
    bytes 8 to 11 are the low bits of the last four, whose high bits are the two high ones of bytes 0 to 7.
    """
    first, second, third = blocks[:, 4:16].reshape(-1, 3, 4).unbind(1)
    scales = torch.cat((first & 63, (third & 15) | ((first >> 2) & 48)), dim=1)
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 2) & 48)), dim=1)
    return (
        (half_floats(blocks, 0) * scales.float()).unsqueeze(2),
        (half_floats(blocks, 2) * minima.float()).unsqueeze(2),
    )
