"""GGUF's block formats to float32: a table of decoders, and `dequantise_gguf`, which decodes rows of any of them.

A row is a sequence of blocks, and a block has its scales in it. The authority is ggml; its Python package `gguf` has
the same arithmetic in numpy, which every function here equals bit by bit. Each maps [num_blocks, block_bytes] of uint8
to float32 [num_blocks, block_elements].
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.cpu.grouped_codes import decode_gguf
from kernels.dequant.gguf_bits import codebook, fields, half_floats
from kernels.dequant.gguf_k import q2_k, q3_k, q4_k, q5_k, q6_k
from kernels.dequant.gguf_types import GGUF_TYPES, GgufType

__all__ = ["DECODERS", "dequantise_gguf"]

Decoder = Callable[[torch.Tensor], torch.Tensor]

_NUMBERS = {kind.name: number for number, kind in GGUF_TYPES.items()}
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
    values = DECODERS[gguf_type.name](blocks)
    return values.reshape(len(rows), -1)


def _floats(dtype: torch.dtype) -> Decoder:
    def decode(blocks: torch.Tensor) -> torch.Tensor:
        return blocks.view(dtype).float()

    return decode


# --- 32 elements a block ------------------------------------------------------------------------------------------
# Low nibbles are elements 0 to 15, high nibbles elements 16 to 31.


def q4_0(blocks: torch.Tensor) -> torch.Tensor:
    """Decode scale f16 | 16 bytes of nibbles: (code - 8) * scale."""
    codes = fields(blocks[:, 2:], 4).flatten(1).to(torch.int8) - 8
    return half_floats(blocks, 0) * codes.float()


def q4_1(blocks: torch.Tensor) -> torch.Tensor:
    """Decode scale f16 | minimum f16 | 16 bytes of nibbles: code * scale + minimum."""
    codes = fields(blocks[:, 4:], 4).flatten(1).float()
    return half_floats(blocks, 0) * codes + half_floats(blocks, 2)


def q5_0(blocks: torch.Tensor) -> torch.Tensor:
    """Decode scale f16 | the codes' fifth bits, 4 bytes | 16 bytes of nibbles: (code - 16) * scale."""
    codes = _five_bits(blocks[:, 2:6], blocks[:, 6:]).to(torch.int8) - 16
    return half_floats(blocks, 0) * codes.float()


def q5_1(blocks: torch.Tensor) -> torch.Tensor:
    """Decode scale f16 | minimum f16 | fifth bits, 4 bytes | 16 bytes of nibbles: code * scale + minimum."""
    codes = _five_bits(blocks[:, 4:8], blocks[:, 8:]).float()
    return half_floats(blocks, 0) * codes + half_floats(blocks, 2)


def q8_0(blocks: torch.Tensor) -> torch.Tensor:
    """Decode scale f16 | 32 signed bytes."""
    return half_floats(blocks, 0) * blocks[:, 2:].view(torch.int8).float()


def iq4_nl(blocks: torch.Tensor) -> torch.Tensor:
    """Decode scale f16 | 16 bytes of nibbles, which are indices into a table of 16 levels."""
    return half_floats(blocks, 0) * codebook(fields(blocks[:, 2:], 4).flatten(1), _IQ4)


def mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    """Decode a scale of 8 exponent bits (E8M0) | 16 bytes of nibbles, which are E2M1: code * 2 ** (scale - 127)."""
    exponents = blocks[:, :1].int()  # half the scale, as the table has twice the codes' values
    bits = torch.where(exponents < 2, (exponents + 1) << 21, (exponents - 1) << 23)  # the two smallest are subnormal
    return bits.view(torch.float32) * codebook(fields(blocks[:, 1:], 4).flatten(1), _E2M1_DOUBLED)


def _five_bits(high: torch.Tensor, nibbles: torch.Tensor) -> torch.Tensor:
    """Return codes of five bits, uint8 [num_blocks, 32]; bit i of the 4 bytes ``high`` belongs to element i."""
    fifth = fields(high.unsqueeze(2), 1).flatten(1)
    return fields(nibbles, 4).flatten(1) | (fifth << 4)


# --- 256 elements a block: see also gguf_k.py -----------------------------------------------------------------------


def iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    """Decode scale f16 | high 2 bits of 8 sub-scales, u16 | their nibbles, 4 bytes | 8 * 16 bytes of nibbles.

    Elements are indices into IQ4_NL's table, and 32 share a sub-scale, of six bits and offset 32.
    """
    num_blocks = len(blocks)
    high = fields(blocks[:, 2:4].unsqueeze(2), 2).reshape(num_blocks, 8)
    low = fields(blocks[:, 4:8].unsqueeze(2), 4).reshape(num_blocks, 8)
    scales = ((low | (high << 4)).to(torch.int8) - 32).float()
    codes = fields(blocks[:, 8:].reshape(num_blocks, 8, 16), 4).reshape(num_blocks, 8, 32)
    return ((half_floats(blocks, 0) * scales).unsqueeze(2) * codebook(codes, _IQ4)).flatten(1)


DECODERS: dict[str, Decoder] = {
    "F32": _floats(torch.float32),
    "F16": _floats(torch.float16),
    "BF16": _floats(torch.bfloat16),
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
