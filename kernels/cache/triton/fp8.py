"""Conversions to and from FP8 in Triton, by integer operations: GPUs before compute capability 8.9 have no others.

Two neighbours are one word of 16 bits, the first of them in its low byte. Tensor cores take 16-bit numbers, so words
have the layout of their operands, while single bytes would be moved one at a time.

    FP8        s eeee mmm
    bfloat16   s 0000eeee mmm0000   the same bits, at their place in a number of 16 bits: 2**-120 of the number
    float16    s 0eeee mmm0000000   likewise, 2**-8 of it
"""

# ruff: noqa: N803 - Triton's users write compile-time constants in capitals

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

__all__ = ["decode_fp8", "encode_fp8"]

_INTERPRETED = tl.constexpr(knobs.runtime.interpret)  # the interpreter knows no PTX
_BFLOAT16_FACTOR = tl.constexpr(2.0**120)
_FLOAT16_FACTOR = tl.constexpr(2.0**8)

# Two words in a register at a time: the compiler would unpack them. $2 are the words, $0 and $1 the numbers of their
# low and high bytes.
_BFLOAT16_PTX = tl.constexpr("""{
    .reg .b32 t, s;
    shl.b32 t, $2, 4;
    and.b32 t, t, 0x07F007F0;
    shl.b32 s, $2, 8;
    and.b32 s, s, 0x80008000;
    or.b32 $0, t, s;
    shr.b32 t, $2, 4;
    and.b32 t, t, 0x07F007F0;
    and.b32 s, $2, 0x80008000;
    or.b32 $1, t, s;
}""")
_FLOAT16_PTX = tl.constexpr("""{
    .reg .b32 t, s;
    shl.b32 t, $2, 7;
    and.b32 t, t, 0x3F803F80;
    shl.b32 s, $2, 8;
    and.b32 s, s, 0x80008000;
    or.b32 $0, t, s;
    shr.b32 t, $2, 1;
    and.b32 t, t, 0x3F803F80;
    and.b32 s, $2, 0x80008000;
    or.b32 $1, t, s;
}""")


@triton.jit
def _number(code):
    """Return the number of each code, 0 to 255, as float32; the code of NaN is read as 480."""
    bits = ((code & 0x7F) << 20) | ((code & 0x80) << 24)
    return bits.to(tl.float32, bitcast=True) * _BFLOAT16_FACTOR


@triton.jit
def decode_fp8(words, DTYPE: tl.constexpr):
    """Return the numbers in the low and in the high bytes of ``words``, uint16, which DTYPE has exactly."""
    if _INTERPRETED or tl.float32 == DTYPE:
        code = words.to(tl.int32)
        low = _number(code & 0xFF).to(DTYPE)
        high = _number(code >> 8).to(DTYPE)
    elif tl.bfloat16 == DTYPE:
        low, high = tl.inline_asm_elementwise(
            _BFLOAT16_PTX, "=&r,=r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
        low *= _BFLOAT16_FACTOR
        high *= _BFLOAT16_FACTOR
    else:
        low, high = tl.inline_asm_elementwise(
            _FLOAT16_PTX, "=&r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
        low *= _FLOAT16_FACTOR
        high *= _FLOAT16_FACTOR
    return low, high


@triton.jit
def encode_fp8(numbers, inverse_scale):
    """Return the codes of ``numbers * inverse_scale`` as uint8, as ``kernels.cache.fp8.to_fp8`` rounds them."""
    bits = (numbers.to(tl.float32) * inverse_scale).to(tl.int32, bitcast=True)
    size = tl.minimum(bits & 0x7FFFFFFF, 0x43E00000)  # at most the bits of 448.0
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # An addition rounds numbers below 2**-6 to multiples of 2**-9.
    sum_bits = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True)
    code = tl.where(size < 0x3C800000, sum_bits - 0x46800000, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
