"""GGUF's block formats: a table of what reads their codes and scales, and `dequantise_gguf`, which decodes rows.

A row is a sequence of blocks, and a block has its scales in it. The authority is ggml; its Python package `gguf` has
the same arithmetic in numpy, which every function here equals bit by bit. Each maps [num_blocks, block_bytes] of uint8
to a CodedMatrix [num_blocks, block_elements].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from kernels.coded_weight import CodedMatrix, CodeFormat, decode
from kernels.cpu.grouped_codes import decode_gguf
from kernels.dequant.bit_fields import fields, half_floats
from kernels.dequant.gguf_k import Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, q2_k, q3_k, q4_k, q5_k, q6_k
from kernels.dequant.gguf_types import GGUF_TYPES, GgufType

__all__ = ["CODERS", "FORMATS", "coded_gguf", "dequantise_gguf"]

Coder = Callable[[torch.Tensor], CodedMatrix]

_NUMBERS = {kind.name: number for number, kind in GGUF_TYPES.items()}
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # its -0 is 0 in ggml, too


def dequantise_gguf(rows: torch.Tensor, gguf_type: GgufType, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return stored rows as float32 [num_rows, columns]; or ``out``, if they could be written there.

    Args:
        rows: uint8 [num_rows, row_bytes], contiguous.
        gguf_type: what they are stored as.
        out: [num_rows, columns], of any dtype.
    """
    blocks = rows.reshape(-1, gguf_type.block_bytes)
    has_room = out is not None and out.numel() == len(blocks) * gguf_type.block_elements
    if out is not None and has_room and decode_gguf(out, blocks, _NUMBERS[gguf_type.name]):
        return out
    columns = rows.shape[1] // gguf_type.block_bytes * gguf_type.block_elements
    if gguf_type.name in _FLOATS:
        return blocks.view(_FLOATS[gguf_type.name]).float().reshape(len(rows), columns)
    return decode(CODERS[gguf_type.name](blocks)).reshape(len(rows), columns)


def coded_gguf(rows: torch.Tensor, gguf_type: GgufType) -> CodedMatrix:
    """Return stored rows, uint8 [num_rows, row_bytes], as codes and scales [num_rows, columns]."""
    matrix = CODERS[gguf_type.name](rows.reshape(-1, gguf_type.block_bytes))
    columns = rows.shape[1] // gguf_type.block_bytes
    return matrix.with_parts(
        {name: part.reshape(len(rows), columns * part.shape[1]) for name, part in matrix.parts.items()}
    )


# --- 32 elements a block ------------------------------------------------------------------------------------------
# Low nibbles are elements 0 to 15, high nibbles elements 16 to 31.

_Q4_0 = CodeFormat(bits=4, zero=8.0)
_Q4_1 = CodeFormat(bits=4, zero_kind="minima")
_Q5_0 = CodeFormat(bits=5, zero=16.0)
_Q5_1 = CodeFormat(bits=5, zero_kind="minima")
_Q8_0 = CodeFormat(bits=8, zero=128.0)
_IQ4_NL = CodeFormat(bits=4, zero=128.0, levels=tuple(level + 128 for level in _IQ4))
_IQ4_XS = replace(_IQ4_NL, granules_per_outer=8, has_inner=True)
_MXFP4 = CodeFormat(bits=4, outer_type="bfloat16", zero=12.0, levels=tuple(level + 12 for level in _E2M1_DOUBLED))


def q4_0(blocks: torch.Tensor) -> CodedMatrix:
    """Read scale f16 | 16 bytes of nibbles: (code - 8) * scale."""
    return CodedMatrix(format=_Q4_0, codes=fields(blocks[:, 2:], 4, 16), outer_scales=half_floats(blocks, 0))


def q4_1(blocks: torch.Tensor) -> CodedMatrix:
    """Read scale f16 | minimum f16 | 16 bytes of nibbles: code * scale + minimum."""
    codes, minima = fields(blocks[:, 4:], 4, 16), -half_floats(blocks, 2)
    return CodedMatrix(format=_Q4_1, codes=codes, outer_scales=half_floats(blocks, 0), outer_minima=minima)


def q5_0(blocks: torch.Tensor) -> CodedMatrix:
    """Read scale f16 | the codes' fifth bits, 4 bytes | 16 bytes of nibbles: (code - 16) * scale."""
    codes = _five_bits(blocks[:, 2:6], blocks[:, 6:])
    return CodedMatrix(format=_Q5_0, codes=codes, outer_scales=half_floats(blocks, 0))


def q5_1(blocks: torch.Tensor) -> CodedMatrix:
    """Read scale f16 | minimum f16 | fifth bits, 4 bytes | 16 bytes of nibbles: code * scale + minimum."""
    codes, minima = _five_bits(blocks[:, 4:8], blocks[:, 8:]), -half_floats(blocks, 2)
    return CodedMatrix(format=_Q5_1, codes=codes, outer_scales=half_floats(blocks, 0), outer_minima=minima)


def q8_0(blocks: torch.Tensor) -> CodedMatrix:
    """Read scale f16 | 32 signed bytes."""
    return CodedMatrix(format=_Q8_0, codes=blocks[:, 2:] ^ 128, outer_scales=half_floats(blocks, 0))


def iq4_nl(blocks: torch.Tensor) -> CodedMatrix:
    """Read scale f16 | 16 bytes of nibbles, which are indices into a table of 16 levels."""
    return CodedMatrix(format=_IQ4_NL, codes=fields(blocks[:, 2:], 4, 16), outer_scales=half_floats(blocks, 0))


def mxfp4(blocks: torch.Tensor) -> CodedMatrix:
    """Read a scale of 8 exponent bits (E8M0) | 16 bytes of nibbles, which are E2M1: code * 2 ** (scale - 127)."""
    exponents = blocks[:, :1].int()  # half the scale, as the table has twice the codes' values
    bits = torch.where(exponents < 2, (exponents + 1) << 21, (exponents - 1) << 23)  # the two smallest are subnormal
    codes = fields(blocks[:, 1:], 4, 16)
    return CodedMatrix(format=_MXFP4, codes=codes, outer_scales=bits.view(torch.float32).bfloat16())


def _five_bits(high: torch.Tensor, nibbles: torch.Tensor) -> torch.Tensor:
    """Return codes of five bits, uint8 [num_blocks, 32]; bit i of the 4 bytes ``high`` belongs to element i."""
    return fields(nibbles, 4, 16).bitwise_or_(fields(high, 1, 1).mul_(16))


# --- 256 elements a block: see also gguf_k.py -----------------------------------------------------------------------


def iq4_xs(blocks: torch.Tensor) -> CodedMatrix:
    """Read scale f16 | high 2 bits of 8 sub-scales, u16 | their nibbles, 4 bytes | 8 * 16 bytes of nibbles.

    Elements are indices into IQ4_NL's table, and 32 share a sub-scale, of six bits and offset 32.
    """
    high = fields(blocks[:, 2:4], 2, 1)
    low = fields(blocks[:, 4:8], 4, 1)
    return CodedMatrix(
        format=_IQ4_XS,
        codes=fields(blocks[:, 8:], 4, 16),
        outer_scales=half_floats(blocks, 0),
        inner_scales=(low | (high << 4)).view(torch.int8) - 32,
    )


CODERS: dict[str, Coder] = {
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q5_0": q5_0,
    "Q5_1": q5_1,
    "Q8_0": q8_0,
    "Q2_K": q2_k,
    "Q3_K": q3_k,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
    "IQ4_NL": iq4_nl,
    "IQ4_XS": iq4_xs,
    "MXFP4": mxfp4,
}

FORMATS: Mapping[str, CodeFormat] = {
    "Q4_0": _Q4_0,
    "Q4_1": _Q4_1,
    "Q5_0": _Q5_0,
    "Q5_1": _Q5_1,
    "Q8_0": _Q8_0,
    "Q2_K": Q2_K,
    "Q3_K": Q3_K,
    "Q4_K": Q4_K,
    "Q5_K": Q5_K,
    "Q6_K": Q6_K,
    "IQ4_NL": _IQ4_NL,
    "IQ4_XS": _IQ4_XS,
    "MXFP4": _MXFP4,
}
