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

_FLOAT8 = {  # how far their bits are moved, and what the numbers are multiplied by then
    ("e4m3", torch.bfloat16): (4, 0x7B80),
    ("e4m3", torch.float16): (1, 0x5C00),
    ("e5m2", torch.bfloat16): (3, 0x7780),
    ("e5m2", torch.float16): (0, 0x3C00),
}
_SPREAD = {"low": (0x4140, 0x4342), "high": (0x1404, 0x3424)}  # two bytes, to that byte of two 16-bit numbers


@triton.jit
def levels_of(
    words,  # uint8 or uint16 [BLOCK_OUTPUTS, WIDTH]
    zero,  # float32 [BLOCK_OUTPUTS]; not of floats
    PART: tl.constexpr,  # of a word
    PER_WORD: tl.constexpr,
    LOW_LEVELS: tl.constexpr,  # of the codes 0 to 7, a byte each; None: the codes are the levels
    HIGH_LEVELS: tl.constexpr,  # of the codes 8 to 15
    FLOATS: tl.constexpr,  # which ones the codes are, or None
    INSTRUCTIONS: tl.constexpr,  # of `instructions`
    BIAS: tl.constexpr,  # what they add to the levels
    DTYPE: tl.constexpr,
):
    """Return the levels, less their zero, in DTYPE [BLOCK_OUTPUTS, WIDTH]."""
    if INSTRUCTIONS[PART] is not None:
        bias = tl.broadcast_to((-(zero + BIAS)).to(DTYPE)[:, None], words.shape)
        if words.dtype == tl.uint16:
            level = tl.inline_asm_elementwise(
                INSTRUCTIONS[PART], "=r,r,r", [words, bias], dtype=bias.dtype, is_pure=True, pack=2
            )
        else:
            level = tl.inline_asm_elementwise(
                INSTRUCTIONS[PART], "=r,=r,r,r,r", [words, bias], dtype=bias.dtype, is_pure=True, pack=4
            )
    else:
        BITS: tl.constexpr = words.dtype.primitive_bitwidth // PER_WORD  # noqa: N806 - a compile-time constant
        code = words.to(tl.int32) >> (BITS * PART)
        if PART < PER_WORD - 1:
            code &= (1 << BITS) - 1
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


def instructions(
    form: CodeFormat, per_word: int, word_bytes: int, dtype: torch.dtype
) -> tuple[tuple[str | None, ...], float]:
    """Return, for each part of a word, PTX that makes levels, and what it adds to them: 4 of 4 bytes, 2 of 2 words.

    There is none for float32, for codes of integers of more than 4 bits, and for tables other than FP4's.
    """
    is_fp4 = form.levels == FP4_LEVELS and form.zero == 12
    bits, has_words = 8 * word_bytes // per_word, word_bytes == 2
    if dtype not in (torch.bfloat16, torch.float16) or (form.levels and not is_fp4):
        return per_word * (None,), 0.0
    if form.floats is not None:
        makes_float8 = _float8_of_words if has_words else _of_float8
        return tuple(makes_float8(form.floats, part, dtype) for part in range(per_word)), 0.0
    if is_fp4:
        makes_fp4 = _fp4_of_words if has_words else _of_fp4
        return tuple(makes_fp4(4 * part, dtype) for part in range(per_word)), -12.0
    if bits == 8:
        return per_word * (None,), 0.0
    makes_integers, bias = (
        _integers_of_words if has_words else _of_integers,
        2.0 ** (7 if dtype == torch.bfloat16 else 10),
    )
    return tuple(makes_integers(bits * part, bits, dtype) for part in range(per_word)), bias


def _integers_of_words(shift: int, bits: int, dtype: torch.dtype) -> str:
    exponent, one = (0x4300, 0x3F80) if dtype == torch.bfloat16 else (0x6400, 0x3C00)
    mask = _twice((1 << bits) - 1)
    return _block(
        [
            f"shr.b32 t, $1, {shift};",
            f"lop3.b32 v, t, {mask}, {_twice(exponent)}, 0xEA;",
            _fma_of_words(one, dtype, "$2"),
        ]
    )


def _fp4_of_words(shift: int, dtype: torch.dtype) -> str:
    place, factor = (6, 0x7F00) if dtype == torch.bfloat16 else (9, 0x7800)
    lines = [f"shr.b32 t, $1, {shift};", "and.b32 m, t, 0x00070007;", f"shl.b32 m, m, {place};", "shl.b32 t, t, 12;"]
    return _block([*lines, "lop3.b32 v, t, 0x80008000, m, 0xEA;", _fma_of_words(factor, dtype, "$2")])


def _float8_of_words(floats: str, part: int, dtype: torch.dtype) -> str:
    shift, factor = _FLOAT8[floats, dtype]
    lines = ["shl.b32 t, $1, 8;" if part == 0 else "mov.b32 t, $1;", "mov.b32 z, 0x80008000;"]
    lines += ["and.b32 m, t, 0x7F007F00;", f"shr.b32 m, m, {shift};", "lop3.b32 v, t, 0x80008000, m, 0xEA;"]
    return _block([*lines, _fma_of_words(factor, dtype, "z")])


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


def _of_float8(floats: str, _part: int, dtype: torch.dtype) -> str:
    shift, factor = _FLOAT8[floats, dtype]
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
    return f"mov.b32 f, {_twice(factor)}; fma.rn.{kind} ${index}, v, f, {addend};"


def _fma_of_words(factor: int, dtype: torch.dtype, addend: str) -> str:
    return _multiplied(0, factor, dtype, addend)


def _twice(half: int) -> str:
    return f"{half << 16 | half:#x}"


def _of_bytes(octet: int) -> str:
    return f"{octet * 0x01010101:#x}"


def _block(lines: list[str]) -> str:
    return "{ .reg .b32 t, v, m, f, z; " + " ".join(lines) + " }"
