"""Codes become the levels that they stand for, in the dtype of activations, which has each of them exactly.

On a GPU a conversion of integers to floats takes eight times as long as an addition. So the bits of floats are put
together from those of codes: beside the exponent of 2**7 the bits of a code are 2**7 plus the code in bfloat16, beside
that of 2**10 in float16, and beside that of 2**23 in float32. In 16 bits a few instructions of a pair make two levels
(PTX ISA, ``prmt``, ``lop3``, ``fma.rn.bf16x2``); Triton's interpreter, and other codes, use float32.
"""

# ruff: noqa: N803 - Triton's users write compile-time constants in capitals

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.coded_weight import CodeFormat
from kernels.dequant.fp4 import FP4_LEVELS

__all__ = ["instructions", "levels_of"]

_SPREAD = {"low": (0x4140, 0x4342), "high": (0x1404, 0x3424)}  # two bytes, to that byte of two 16-bit numbers


@triton.jit
def levels_of(
    octets,  # uint8 [BLOCK_OUTPUTS, WIDTH]
    zero,  # float32 [BLOCK_OUTPUTS]; not of floats
    PART: tl.constexpr,  # of a byte
    PER_BYTE: tl.constexpr,
    LOW_LEVELS: tl.constexpr,  # of the codes 0 to 7, a byte each; None: the codes are the levels
    HIGH_LEVELS: tl.constexpr,  # of the codes 8 to 15
    FLOATS: tl.constexpr,  # which ones the codes are, or None
    INSTRUCTIONS: tl.constexpr,  # of `instructions`
    BIAS: tl.constexpr,  # what they add to the levels
    DTYPE: tl.constexpr,
):
    """Return the levels, less their zero, in DTYPE [BLOCK_OUTPUTS, WIDTH]."""
    if INSTRUCTIONS[PART] is not None:
        bias = tl.broadcast_to((-(zero + BIAS)).to(DTYPE)[:, None], octets.shape)
        level = tl.inline_asm_elementwise(
            INSTRUCTIONS[PART], "=r,=r,r,r,r", [octets, bias], dtype=bias.dtype, is_pure=True, pack=4
        )
    else:
        code = octets.to(tl.int32) >> (8 // PER_BYTE * PART)
        if PART < PER_BYTE - 1:
            code &= (1 << 8 // PER_BYTE) - 1
        if FLOATS == "e4m3":
            # Its bits, at their place in a float16, are 2**-8 of a number, also of the smallest ones.
            half = ((code & 127) << 7) | ((code & 128) << 8)
            level = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        elif FLOATS == "e5m2":
            level = (code << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        else:
            if LOW_LEVELS is not None:
                eight = tl.where(code < 8, tl.full((), LOW_LEVELS, tl.int64), tl.full((), HIGH_LEVELS, tl.int64))
                code = ((eight >> ((code & 7) * 8).to(tl.int64)) & 255).to(tl.int32)
            level = (code | 0x4B000000).to(tl.float32, bitcast=True) - (zero + 8388608.0)[:, None]
        level = level.to(DTYPE)
    return level


def instructions(form: CodeFormat, per_byte: int, dtype: torch.dtype) -> tuple[tuple[str | None, ...], float]:
    """Return, for each part of a byte, PTX that makes 4 levels of 4 bytes, and what it adds to them.

    There is none for float32, for codes of integers of more than 4 bits, and for tables other than FP4's.
    """
    is_fp4 = form.levels == FP4_LEVELS and form.zero == 12
    if dtype not in (torch.bfloat16, torch.float16) or (form.levels and not is_fp4):
        return per_byte * (None,), 0.0
    if form.floats is not None:
        return (_of_float8(form.floats, dtype),), 0.0
    if is_fp4:
        return tuple(_of_fp4(4 * part, dtype) for part in range(per_byte)), -12.0
    if per_byte == 1:
        return (None,), 0.0
    bits, bias = 8 // per_byte, 2.0 ** (7 if dtype == torch.bfloat16 else 10)
    return tuple(_of_integers(bits * part, bits, dtype) for part in range(per_byte)), bias


def _of_integers(shift: int, bits: int, dtype: torch.dtype) -> str:
    exponent, one = (0x43, 0x3F80) if dtype == torch.bfloat16 else (0x64, 0x3C00)
    lines = _extract(shift, bits)
    for index, selector in enumerate(_SPREAD["low"]):
        lines += [f"prmt.b32 v, t, {_of_bytes(exponent)}, {selector};", _multiplied(index, one, dtype, f"${3 + index}")]
    return _block(lines)


def _of_fp4(shift: int, dtype: torch.dtype) -> str:
    # Bits of exponent and mantissa, at their place, are a power of two of the number; subnormal ones, too.
    place, factor = (6, 0x7F00) if dtype == torch.bfloat16 else (9, 0x7800)
    lines = _extract(shift, 4)
    for index, selector in enumerate(_SPREAD["low"]):
        lines += [
            f"prmt.b32 v, t, 0, {selector};",
            "and.b32 m, v, 0x00070007;",
            f"shl.b32 m, m, {place};",
            "shl.b32 v, v, 12;",
            "lop3.b32 v, v, 0x80008000, m, 0xEA;",  # (v & mask) | m
            _multiplied(index, factor, dtype, f"${3 + index}"),
        ]
    return _block(lines)


def _of_float8(floats: str, dtype: torch.dtype) -> str:
    shifts_and_factors = {
        ("e4m3", torch.bfloat16): (4, 0x7B80),
        ("e4m3", torch.float16): (1, 0x5C00),
        ("e5m2", torch.bfloat16): (3, 0x7780),
        ("e5m2", torch.float16): (0, 0x3C00),
    }
    shift, factor = shifts_and_factors[floats, dtype]
    lines = ["mov.b32 z, 0x80008000;"]  # minus zero, which keeps a zero's sign
    for index, selector in enumerate(_SPREAD["high"]):
        lines += [
            f"prmt.b32 v, $2, 0, {selector};",
            "and.b32 m, v, 0x7F007F00;",
            f"shr.b32 m, m, {shift};",
            "lop3.b32 v, v, 0x80008000, m, 0xEA;",
            _multiplied(index, factor, dtype, "z"),
        ]
    return _block(lines)


def _extract(shift: int, bits: int) -> list[str]:
    mask = _of_bytes((1 << bits) - 1)
    return [f"shr.b32 t, $2, {shift};", f"and.b32 t, t, {mask};"] if shift else [f"and.b32 t, $2, {mask};"]


def _multiplied(index: int, factor: int, dtype: torch.dtype, addend: str) -> str:
    kind = "bf16x2" if dtype == torch.bfloat16 else "f16x2"
    return f"mov.b32 f, {factor << 16 | factor:#x}; fma.rn.{kind} ${index}, v, f, {addend};"


def _of_bytes(octet: int) -> str:
    return f"{octet * 0x01010101:#x}"


def _block(lines: list[str]) -> str:
    return "{ .reg .b32 t, v, m, f, z; " + " ".join(lines) + " }"
