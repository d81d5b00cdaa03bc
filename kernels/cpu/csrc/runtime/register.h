/* Vectors of floats that fill a register, for loops whose sums must stay in registers: GCC keeps 16 lanes in memory where
 * a register holds half of them. */
#ifndef PAGODA_REGISTER_H
#define PAGODA_REGISTER_H

#include "runtime/vector.h"

#if PAGODA_HALF_REGISTERS
enum { REGISTER_LANES = 8 };
typedef float f32_register __attribute__((vector_size(32)));
#else
enum { REGISTER_LANES = 16 };
typedef f32x16 f32_register;
#endif

/* The same number in every lane. */
INLINE f32_register register_set(float value) { return value - (f32_register){0}; }

/* Loads and stores at any address. */
INLINE f32_register register_load(const float *from) {
    f32_register value;
    memcpy(&value, from, sizeof value);
    return value;
}
INLINE void register_store(float *to, f32_register value) { memcpy(to, &value, sizeof value); }

/* a * b + c, rounded once where the processor can. */
INLINE f32_register register_fma(f32_register a, f32_register b, f32_register c) {
#if PAGODA_HALF_REGISTERS
    return (f32_register)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return f32x16_fma(a, b, c);
#endif
}

/* The sum of all lanes. */
INLINE float register_sum(f32_register value) {
#if PAGODA_HALF_REGISTERS
    float parts[REGISTER_LANES];
    register_store(parts, value);
    for (int half = REGISTER_LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) parts[i] += parts[i + half];
    return parts[0];
#else
    return f32x16_sum(value);
#endif
}

#endif
