/* Gumbel noise. Its bits, and those of the logits that it is added to, are the same in the Triton kernels (kernels/sampling)
 * wherever the processor rounds a * b + c once; see f32x16_fma. */
#ifndef PAGODA_NOISE_H
#define PAGODA_NOISE_H

#include "runtime/vector.h"

/* ln x for normal x > 0: x = 2^e m with m in [sqrt(1/2), sqrt(2)), and the polynomial of Cephes' logf (Moshier). */
INLINE f32x16 log_of(f32x16 x) {
    i32x16 bits = (i32x16)x;
    i32x16 exponent = (bits - 0x3f3504f3) >> 23;
    f32x16 m = (f32x16)(bits - (exponent << 23)) - 1, e = __builtin_convertvector(exponent, f32x16), z = m * m;
    f32x16 p = f32x16_set(7.0376836292e-2f);
    p = f32x16_fma(p, m, f32x16_set(-1.1514610310e-1f));
    p = f32x16_fma(p, m, f32x16_set(1.1676998740e-1f));
    p = f32x16_fma(p, m, f32x16_set(-1.2420140846e-1f));
    p = f32x16_fma(p, m, f32x16_set(1.4249322787e-1f));
    p = f32x16_fma(p, m, f32x16_set(-1.6668057665e-1f));
    p = f32x16_fma(p, m, f32x16_set(2.0000714765e-1f));
    p = f32x16_fma(p, m, f32x16_set(-2.4999993993e-1f));
    p = f32x16_fma(p, m, f32x16_set(3.3333331174e-1f));
    f32x16 rest = f32x16_fma(e, f32x16_set(-2.12194440e-4f), p * m * z) - 0.5f * z;
    return f32x16_fma(e, f32x16_set(0.693359375f), m + rest);
}

/* Standard Gumbel noise of 16 tokens: MurmurHash3's finaliser, keyed twice, as in kernels/sampling/exact_math.py. */
INLINE f32x16 gumbel(u32x16 tokens, const int32_t keys[2]) {
    u32x16 x = tokens * 0x9E3779B1u + (uint32_t)keys[0];
    x = (x ^ (x >> 16)) * 0x85EBCA6Bu + (uint32_t)keys[1];
    x = (x ^ (x >> 13)) * 0xC2B2AE35u;
    x ^= x >> 16;
    f32x16 uniform = (__builtin_convertvector((i32x16)(x >> 9), f32x16) + 0.5f) * 0x1p-23f;
    return -log_of(-log_of(uniform));
}

/* Logits plus `temperature` times the noise of their tokens: their argmax is a draw. A division of the logits by a tiny
 * temperature would make several infinite. */
INLINE f32x16 noisy_logits(f32x16 logits, float temperature, u32x16 tokens, const int32_t keys[2]) {
    return f32x16_fma(f32x16_set(temperature), gumbel(tokens, keys), logits);
}

#endif
