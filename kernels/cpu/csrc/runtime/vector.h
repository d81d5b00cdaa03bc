/* Vectors of 16 floats in the notation of GCC and clang, which compiles for any processor.
 *
 * A "word" is 32 bits of one weight row or activation row along the dimension that a product sums over: a float, two
 * bfloat16 or four int8. pagoda_dot_* adds the products of 16 words with 16 others, lane by lane.
 */
#ifndef PAGODA_VECTOR_H
#define PAGODA_VECTOR_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#if defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

enum { LANES = 16 };

/* Whether a register holds half of 16 lanes. GCC keeps wider vectors in memory, so the innermost loops are written twice. */
#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
#define PAGODA_HALF_REGISTERS 1
#else
#define PAGODA_HALF_REGISTERS 0
#endif

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef uint16_t bf16; /* the upper half of a float's bits */

#define INLINE static inline __attribute__((always_inline))

/* The same number in every lane. */
INLINE f32x16 f32x16_set(float value) { return value - (f32x16){0}; }
INLINE u32x16 u32x16_set(uint32_t value) { return value - (u32x16){0}; }

/* 0, 1, ... 15. */
INLINE i32x16 lane_indices(void) { return (i32x16){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

/* Loads and stores at any address. */
INLINE f32x16 f32x16_load(const float *from) {
    f32x16 value;
    memcpy(&value, from, sizeof value);
    return value;
}
INLINE void f32x16_store(float *to, f32x16 value) { memcpy(to, &value, sizeof value); }
INLINE u32x16 u32x16_load(const void *from) {
    u32x16 value;
    memcpy(&value, from, sizeof value);
    return value;
}

/* Lane by lane `a` where the mask (a comparison's result) is set, else `b`. */
INLINE f32x16 f32x16_select(i32x16 mask, f32x16 a, f32x16 b) {
    return (f32x16)((mask & (i32x16)a) | (~mask & (i32x16)b));
}

/* Whether any lane of a mask is set. */
INLINE bool any_of(i32x16 mask) {
    uint64_t parts[8], any = 0;
    memcpy(parts, &mask, sizeof mask);
    for (int i = 0; i < 8; i++) any |= parts[i];
    return any != 0;
}

/* Lane by lane the larger; `b` where either is a NaN. */
INLINE f32x16 f32x16_max(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return f32x16_select(a > b, a, b);
#endif
}

/* a * b + c, rounded once where the processor can. The library is compiled with -ffp-contract=off: were the compiler to
 * choose where it fuses, a row's bits would depend on the loop around them, and so on the batch. */
INLINE f32x16 f32x16_fma(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    __m256 x[2], y[2], z[2];
    memcpy(x, &a, sizeof a);
    memcpy(y, &b, sizeof b);
    memcpy(z, &c, sizeof c);
    for (int half = 0; half < 2; half++) z[half] = _mm256_fmadd_ps(x[half], y[half], z[half]);
    memcpy(&c, z, sizeof c);
    return c;
#elif defined(__aarch64__)
    float32x4_t x[4], y[4], z[4];
    memcpy(x, &a, sizeof a);
    memcpy(y, &b, sizeof b);
    memcpy(z, &c, sizeof c);
    for (int quarter = 0; quarter < 4; quarter++) z[quarter] = vfmaq_f32(z[quarter], x[quarter], y[quarter]);
    memcpy(&c, z, sizeof c);
    return c;
#else
    return a * b + c;
#endif
}

/* The sum of all lanes. */
INLINE float f32x16_sum(f32x16 value) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)value);
#else
    float parts[LANES];
    f32x16_store(parts, value);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) parts[i] += parts[i + half];
    return parts[0];
#endif
}

/* The largest lane; see maximum.h for rows that may contain a NaN. */
INLINE float f32x16_largest(f32x16 value) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)value);
#else
    float parts[LANES];
    f32x16_store(parts, value);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) parts[i] = parts[i] > parts[i + half] ? parts[i] : parts[i + half];
    return parts[0];
#endif
}

/* 16 bfloat16 in memory, as floats. */
INLINE f32x16 bf16_load(const bf16 *from) {
    u16x16 half;
    memcpy(&half, from, sizeof half);
    return (f32x16)(__builtin_convertvector(half, u32x16) << 16);
}

/* Floats rounded to the nearest bfloat16, ties to even, in the lower halves; a NaN stays one. */
INLINE u32x16 bf16_round(f32x16 value) {
    u32x16 bits = (u32x16)value;
    u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    u32x16 is_number = (u32x16)(value == value);
    return (is_number & rounded) | (~is_number & 0x7fc0);
}

/* Stores floats as bfloat16, rounded. */
INLINE void bf16_store(bf16 *to, f32x16 value) {
#if defined(__AVX512BF16__)
    __m256bh half = _mm512_cvtneps_pbh((__m512)value);
#else
    u16x16 half = __builtin_convertvector(bf16_round(value), u16x16);
#endif
    memcpy(to, &half, sizeof half);
}

/* One float as bfloat16, rounded. */
INLINE bf16 bf16_from(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (value != value) return 0x7fc0;
    return (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

/* One bfloat16 as a float. */
INLINE float bf16_to_float(bf16 value) {
    uint32_t bits = (uint32_t)value << 16;
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

/* 16 elements of a row of float32 or bfloat16, from `at` on; of the last ones `count` are left, and zeros follow. */
INLINE f32x16 load_some(const void *row, bool is_bf16, int64_t at, int64_t count) {
    if (count >= LANES) return is_bf16 ? bf16_load((const bf16 *)row + at) : f32x16_load((const float *)row + at);
    float parts[LANES] = {0};
    for (int64_t i = 0; i < count; i++)
        parts[i] = is_bf16 ? bf16_to_float(((const bf16 *)row)[at + i]) : ((const float *)row)[at + i];
    return f32x16_load(parts);
}

/* Stores 16 elements of a row of float32 or bfloat16, from `at` on, or only the first `count` of them. */
INLINE void store_some(void *row, bool is_bf16, int64_t at, f32x16 value, int64_t count) {
    if (count >= LANES) {
        if (is_bf16) bf16_store((bf16 *)row + at, value);
        else f32x16_store((float *)row + at, value);
        return;
    }
    float parts[LANES];
    f32x16_store(parts, value);
    for (int64_t i = 0; i < count; i++) {
        if (is_bf16) ((bf16 *)row)[at + i] = bf16_from(parts[i]);
        else ((float *)row)[at + i] = parts[i];
    }
}

/* sum + a * b, of words that are floats. */
INLINE f32x16 pagoda_dot_f32(f32x16 sum, u32x16 a, u32x16 b) { return f32x16_fma((f32x16)a, (f32x16)b, sum); }

/* sum + a * b over the words' parts, two bfloat16 each. */
INLINE f32x16 pagoda_dot_bf16(f32x16 sum, u32x16 a, u32x16 b) {
#if defined(__AVX512BF16__)
    return (f32x16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    sum = f32x16_fma((f32x16)(a << 16), (f32x16)(b << 16), sum);
    return f32x16_fma((f32x16)(a & 0xffff0000u), (f32x16)(b & 0xffff0000u), sum);
#endif
}

#if defined(__AVX512VNNI__)
#define PAGODA_HAS_INT8 1
/* sum + a * b over the words' parts, four bytes each: unsigned ones in `a`, signed ones in `b`. */
INLINE i32x16 pagoda_dot_int8(i32x16 sum, u32x16 a, u32x16 b) {
    return (i32x16)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
}
#else
#define PAGODA_HAS_INT8 0
#endif

/* Transposes 16 vectors of 16 words and stores them `stride` words apart. */
INLINE void store_transposed(uint32_t *to, size_t stride, u32x16 *rows) {
#if defined(__AVX512F__)
    __m512i pairs[LANES], quads[LANES];
    for (int i = 0; i < LANES; i += 2) {
        pairs[i] = _mm512_unpacklo_epi32((__m512i)rows[i], (__m512i)rows[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_epi32((__m512i)rows[i], (__m512i)rows[i + 1]);
    }
    for (int i = 0; i < LANES; i += 4) { /* quads[i + k]: word 4q + k of rows i..i+3, in quarter q */
        quads[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
        quads[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
        quads[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
        quads[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
    }
    for (int k = 0; k < 4; k++) {
        __m512i even = _mm512_shuffle_i32x4(quads[k], quads[k + 4], 0x88);
        __m512i odd = _mm512_shuffle_i32x4(quads[k], quads[k + 4], 0xdd);
        __m512i even_after = _mm512_shuffle_i32x4(quads[k + 8], quads[k + 12], 0x88);
        __m512i odd_after = _mm512_shuffle_i32x4(quads[k + 8], quads[k + 12], 0xdd);
        _mm512_storeu_si512(to + stride * (size_t)k, _mm512_shuffle_i32x4(even, even_after, 0x88));
        _mm512_storeu_si512(to + stride * (size_t)(k + 4), _mm512_shuffle_i32x4(odd, odd_after, 0x88));
        _mm512_storeu_si512(to + stride * (size_t)(k + 8), _mm512_shuffle_i32x4(even, even_after, 0xdd));
        _mm512_storeu_si512(to + stride * (size_t)(k + 12), _mm512_shuffle_i32x4(odd, odd_after, 0xdd));
    }
#else
    for (int i = 0; i < LANES; i++)
        for (int word = 0; word < LANES; word++) to[stride * (size_t)word + (size_t)i] = rows[i][word];
#endif
}

/* e^x to about one unit in the last place for -87 < x < 88, 0 below and e^88 above. */
INLINE f32x16 f32x16_exp(f32x16 x) {
    const f32x16 low = f32x16_set(-87.3f), high = f32x16_set(88.0f);
    i32x16 is_zero = x < low;
    x = f32x16_select(x > high, high, f32x16_max(low, x)); /* in this order a NaN stays one */
    /* x = n ln 2 + r: 1.5 * 2^23 rounds to an integer, and ln 2 in two parts keeps r exact. */
    f32x16 shifted = f32x16_fma(x, f32x16_set(1.44269504f), f32x16_set(12582912.0f));
    f32x16 n = shifted - 12582912.0f;
    f32x16 r = f32x16_fma(n, f32x16_set(2.12194440e-4f), f32x16_fma(n, f32x16_set(-0.693359375f), x));
    f32x16 p = f32x16_set(1.9875691500e-4f); /* the minimax polynomial of Cephes' expf (Moshier, 1992) */
    p = f32x16_fma(p, r, f32x16_set(1.3981999507e-3f));
    p = f32x16_fma(p, r, f32x16_set(8.3334519073e-3f));
    p = f32x16_fma(p, r, f32x16_set(4.1665795894e-2f));
    p = f32x16_fma(p, r, f32x16_set(1.6666665459e-1f));
    p = f32x16_fma(p, r, f32x16_set(5.0000001201e-1f));
    p = f32x16_fma(p, r * r, r + 1.0f);
    f32x16 scale = (f32x16)(((u32x16)shifted - 0x4b400000u + 127) << 23);
    f32x16 result = p * scale;
    return (f32x16)(~is_zero & (i32x16)result);
}

/* The hyperbolic tangent, to about two units in the last place: its Taylor series near 0, where e^2x - 1 would lose
 * digits. */
INLINE f32x16 f32x16_tanh(f32x16 x) {
    f32x16 square = x * x;
    f32x16 p = f32x16_set(-1382.0f / 155925);
    p = f32x16_fma(p, square, f32x16_set(62.0f / 2835));
    p = f32x16_fma(p, square, f32x16_set(-17.0f / 315));
    p = f32x16_fma(p, square, f32x16_set(2.0f / 15));
    p = f32x16_fma(p, square, f32x16_set(-1.0f / 3));
    p = f32x16_fma(p * square, x, x);
    return f32x16_select(square < 0.09f, p, 1 - 2 / (1 + f32x16_exp(x + x)));
}

/* gelu(x) by its approximation 0.5 x (1 + tanh(u)) with u = sqrt(2 / pi) (x + 0.044715 x^3), which is x / (1 + e^-2u). */
INLINE f32x16 f32x16_gelu(f32x16 x) {
    f32x16 doubled = 1.5957691216f * x * (1 + 0.044715f * x * x); /* 2u */
    return x / (1 + f32x16_exp(-doubled));
}

#endif
