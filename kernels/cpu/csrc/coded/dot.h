/* Products of unsigned bytes with signed ones, summed exactly, and what follows for a granule of a coded weight. */
#ifndef PAGODA_CODED_DOT_H
#define PAGODA_CODED_DOT_H

#include "coded/codes.h"
#include "runtime/register.h"

typedef int32_t i32_register __attribute__((vector_size(REGISTER_LANES * 4)));

/* Whether pairs of products of levels up to 255 fit the instructions; else they need others than levels up to 127. */
#if defined(__AVX512VNNI__) || (PAGODA_HALF_REGISTERS && defined(__AVXVNNI__)) || !defined(__AVX2__)
#define PAGODA_WIDE_IS_FREE 1
#else
#define PAGODA_WIDE_IS_FREE 0
#endif

/* sum + a * b over the words' parts: unsigned bytes in `a`, and signed ones in `b`, the same in all lanes. */
INLINE i32_register dot_bytes(i32_register sum, i32_register a, uint32_t b, bool is_wide) {
#if defined(__AVX512VNNI__)
    return (void)is_wide, (i32_register)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, _mm512_set1_epi32((int)b));
#elif PAGODA_HALF_REGISTERS && defined(__AVXVNNI__)
    return (void)is_wide, (i32_register)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)a, _mm256_set1_epi32((int)b));
#elif defined(__AVX512BW__)
    const __m512i levels = (__m512i)a, row = _mm512_set1_epi32((int)b), low = _mm512_set1_epi16(0xff);
    if (!is_wide) {
        const __m512i pairs = _mm512_maddubs_epi16(levels, row);
        return sum + (i32_register)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
    }
    const __m512i even = _mm512_madd_epi16(_mm512_and_si512(levels, low), _mm512_srai_epi16(_mm512_slli_epi16(row, 8), 8));
    const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(levels, 8), _mm512_srai_epi16(row, 8));
    return sum + (i32_register)_mm512_add_epi32(even, odd);
#elif PAGODA_HALF_REGISTERS
    const __m256i levels = (__m256i)a, row = _mm256_set1_epi32((int)b), low = _mm256_set1_epi16(0xff);
    if (!is_wide) {
        const __m256i pairs = _mm256_maddubs_epi16(levels, row);
        return sum + (i32_register)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    }
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(levels, low), _mm256_srai_epi16(_mm256_slli_epi16(row, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(levels, 8), _mm256_srai_epi16(row, 8));
    return sum + (i32_register)_mm256_add_epi32(even, odd);
#else
    (void)is_wide;
    for (int byte = 0; byte < 4; byte++)
        sum += (a >> 8 * byte & 0xff) * (int32_t)(int8_t)(b >> 8 * byte);
    return sum;
#endif
}

/* Lanes from `lane` on, as a register holds them. */
INLINE i32_register load_levels(const uint8_t *from) {
    i32_register levels;
    memcpy(&levels, from, sizeof levels);
    return levels;
}

INLINE float float_of_word(uint32_t word) {
    float value;
    memcpy(&value, &word, sizeof value);
    return value;
}

/* sum + the product of a granule with a row, from the sum of products of bytes. Every loop ends a granule like this, so
 * that a row has the same bits in each. */
INLINE f32_register add_granule(f32_register sum, i32_register dots, f32_register scale, f32_register minimum,
                                float row_scale, float row_sum) {
    const f32_register value = __builtin_convertvector(dots, f32_register) * row_scale;
    return register_fma(-minimum, register_set(row_sum), register_fma(scale, value, sum));
}

#endif
