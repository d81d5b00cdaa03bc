"""exact_math.py in Triton, and floats as integers in their order. Launch with ``enable_fp_fusion=False``.

Otherwise the compiler would fuse other products and sums than those that are fused here, and in the C kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["from_ordered", "is_finite_key", "noisy_logits", "ordered", "scores_of", "weights_of"]

_NAN_KEY = tl.constexpr(0x7FFFFFFF)
_INFINITY_KEY = tl.constexpr(0x7F800000)  # of +inf; -inf has its complement, because 0 and -0 are neighbours


@triton.jit
def ordered(x):
    """Return int32 keys in the order of float32 numbers; -0 comes before 0, and a NaN after everything."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x != x, _NAN_KEY, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def from_ordered(key):
    """Return the numbers of such keys."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def is_finite_key(key):
    """Return whether a key is that of a finite number."""
    return (key < _INFINITY_KEY) & (key > -_INFINITY_KEY - 1)


@triton.jit
def _log(x):
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23
    m = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    e = exponent.to(tl.float32)
    z = m * m
    p = tl.fma(tl.full(x.shape, 7.0376836292e-2, tl.float32), m, -1.1514610310e-1)
    p = tl.fma(p, m, 1.1676998740e-1)
    p = tl.fma(p, m, -1.2420140846e-1)
    p = tl.fma(p, m, 1.4249322787e-1)
    p = tl.fma(p, m, -1.6668057665e-1)
    p = tl.fma(p, m, 2.0000714765e-1)
    p = tl.fma(p, m, -2.4999993993e-1)
    p = tl.fma(p, m, 3.3333331174e-1)
    rest = tl.fma(e, -2.12194440e-4, p * m * z) - 0.5 * z
    return tl.fma(e, 0.693359375, m + rest)


@triton.jit
def noisy_logits(logits, temperature, tokens, first_key, second_key):
    """Return logits plus ``temperature`` times the noise of their tokens; the keys are uint32."""
    x = tokens.to(tl.uint32) * 0x9E3779B1 + first_key
    x = (x ^ (x >> 16)) * 0x85EBCA6B + second_key
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    x = x ^ (x >> 16)
    uniform = ((x >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2^-23
    return tl.fma(-_log(-_log(uniform)), temperature, logits)


@triton.jit
def scores_of(logits, largest, temperature):
    """Return logits relative to the largest one, divided by the temperature: 0 and less, and never -0."""
    return tl.div_rn(logits - largest, temperature) + 0.0


@triton.jit
def weights_of(scores):
    """Return e^x of scores x <= 0 in units of 2^-34, rounded down, as int64."""
    x = tl.maximum(scores, -87.3)
    shifted = tl.fma(x, 1.44269504, 12582912.0)
    n = shifted - 12582912.0
    r = tl.fma(n, 2.12194440e-4, tl.fma(n, -0.693359375, x))
    p = tl.fma(tl.full(x.shape, 1.9875691500e-4, tl.float32), r, 1.3981999507e-3)
    p = tl.fma(p, r, 8.3334519073e-3)
    p = tl.fma(p, r, 4.1665795894e-2)
    p = tl.fma(p, r, 1.6666665459e-1)
    p = tl.fma(p, r, 5.0000001201e-1)
    p = tl.fma(p, r * r, r + 1.0)
    power = ((shifted.to(tl.int32, bitcast=True) - 0x4B400000 + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(scores < -87.3, 0.0, p * power * 17179869184.0).to(tl.int64)  # 2^34
