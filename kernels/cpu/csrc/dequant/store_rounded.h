/* Rounding to bfloat16 with the bits of torch. bf16_store would not do: the processor's instruction makes zeros of
 * subnormal numbers. */
#ifndef PAGODA_STORE_ROUNDED_H
#define PAGODA_STORE_ROUNDED_H

#include "runtime/vector.h"

/* 16 floats as bfloat16. */
INLINE u16x16 bf16_exact(f32x16 value) {
#if defined(__AVX512BF16__) && defined(__AVX512DQ__)
    enum { SUBNORMAL = 0x20 };
    if (__builtin_expect(!_mm512_fpclass_ps_mask((__m512)value, SUBNORMAL), 1))
        return (u16x16)_mm512_cvtneps_pbh((__m512)value);
#endif
    return __builtin_convertvector(bf16_round(value), u16x16);
}

/* Stores 16 numbers of a row of float32 or bfloat16, from `at` on. */
INLINE void store_exact(void *row, bool is_bf16, int64_t at, f32x16 value) {
    u16x16 half = bf16_exact(value);
    if (is_bf16) memcpy((bf16 *)row + at, &half, sizeof half);
    else f32x16_store((float *)row + at, value);
}

#endif
