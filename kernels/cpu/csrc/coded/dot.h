/* Products of unsigned bytes with signed ones, summed exactly, and what follows for a granule of a coded weight. */
#ifndef PAGODA_CODED_DOT_H
#define PAGODA_CODED_DOT_H

#include "coded/codes.h"
#include "runtime/register.h"

typedef int32_t i32_register __attribute__((vector_size(REGISTER_LANES * 4)));

/* Whether pairs of products of levels up to 255 fit the instructions. Else 128 is subtracted from wide levels, above 127:
 * signs go over to the other factor, and the minimum makes up for it. */
#if defined(__AVX512VNNI__) || (PAGODA_HALF_REGISTERS && defined(__AVXVNNI__)) || !defined(__AVX2__)
#define PAGODA_WIDE_IS_FREE 1
#else
#define PAGODA_WIDE_IS_FREE 0
#endif

enum { WIDE_OFFSET = PAGODA_WIDE_IS_FREE ? 0 : 128 };

/* sum + a * b over the words' parts: unsigned bytes in `a`, and signed ones in `b`, the same in all lanes. WIDE_OFFSET is
 * subtracted from wide levels. */
INLINE i32_register dot_bytes(i32_register sum, i32_register a, uint32_t b, bool is_wide) {
#if defined(__AVX512VNNI__)
    return (void)is_wide, (i32_register)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, _mm512_set1_epi32((int)b));
#elif PAGODA_HALF_REGISTERS && defined(__AVXVNNI__)
    return (void)is_wide, (i32_register)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)a, _mm256_set1_epi32((int)b));
#elif defined(__AVX512BW__)
    __m512i levels = (__m512i)a, row = _mm512_set1_epi32((int)b);
    if (is_wide) {
        levels = _mm512_xor_si512(levels, _mm512_set1_epi8((char)0x80));
        row = _mm512_mask_sub_epi8(row, _mm512_movepi8_mask(levels), _mm512_setzero_si512(), row);
        levels = _mm512_abs_epi8(levels);
    }
    return sum + (i32_register)_mm512_madd_epi16(_mm512_maddubs_epi16(levels, row), _mm512_set1_epi16(1));
#elif PAGODA_HALF_REGISTERS
    __m256i levels = (__m256i)a, row = _mm256_set1_epi32((int)b);
    if (is_wide) {
        levels = _mm256_xor_si256(levels, _mm256_set1_epi8((char)0x80));
        row = _mm256_sign_epi8(row, levels);
        levels = _mm256_abs_epi8(levels);
    }
    return sum + (i32_register)_mm256_madd_epi16(_mm256_maddubs_epi16(levels, row), _mm256_set1_epi16(1));
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
                                float row_scale, float row_sum, bool is_wide) {
    if (is_wide && WIDE_OFFSET) minimum -= scale * WIDE_OFFSET;
    const f32_register value = __builtin_convertvector(dots, f32_register) * row_scale;
    return register_fma(-minimum, register_set(row_sum), register_fma(scale, value, sum));
}

#endif
