/* Decoding of codes that are floats of 8 bits (see codes.h) to words of two bfloat16, which have them exactly. */
#ifndef PAGODA_CODED_FLOATS_H
#define PAGODA_CODED_FLOATS_H

#include "coded/decode.h"

enum { WORDS_OF_CODES = 2 }; /* that four codes of an output become */

#if defined(__AVX512VBMI__)

/* The bytes of the numbers of the codes from 0 to 127: the low ones, and the high ones. */
typedef struct {
    __m512i low[2], high[2];
} float_table;

static uint8_t bytes_of_floats[FLOATS_E5M2 + 1][2][128];

/* Is called when the library is loaded. */
__attribute__((constructor)) static void fill_bytes_of_floats(void) {
    for (int floats = FLOATS_E4M3; floats <= FLOATS_E5M2; floats++)
        for (int code = 0; code < 128; code++) {
            const bf16 number = bf16_from(number_of_float((uint8_t)code, floats));
            bytes_of_floats[floats][0][code] = (uint8_t)number;
            bytes_of_floats[floats][1][code] = (uint8_t)(number >> 8);
        }
}

INLINE float_table table_of_floats(int floats) {
    float_table table;
    memcpy(table.low, bytes_of_floats[floats][0], sizeof table.low);
    memcpy(table.high, bytes_of_floats[floats][1], sizeof table.high);
    return table;
}

/* Decodes two words of 16 outputs from their four codes each. */
INLINE void decode_words(u32_register *words, const uint8_t *codes, const float_table *table) {
    /* Of four outputs, first the codes of their first words, and then those of the others. */
    const __m128i byte_order = _mm_set_epi8(15, 14, 11, 10, 7, 6, 3, 2, 13, 12, 9, 8, 5, 4, 1, 0);
    const __m512i own = _mm512_shuffle_epi8(_mm512_loadu_si512(codes), _mm512_broadcast_i32x4(byte_order));
    const __m512i low = _mm512_permutex2var_epi8(table->low[0], own, table->low[1]); /* they ignore the sign */
    const __m512i magnitudes = _mm512_permutex2var_epi8(table->high[0], own, table->high[1]);
    const __m512i high = _mm512_ternarylogic_epi32(magnitudes, own, _mm512_set1_epi8((char)0x80), 0xf8); /* a | b & c */
    words[0] = (u32_register)_mm512_unpacklo_epi8(low, high);
    words[1] = (u32_register)_mm512_unpackhi_epi8(low, high);
}

#else

typedef struct {
    int floats;
} float_table;

INLINE float_table table_of_floats(int floats) { return (float_table){floats}; }

/* Decodes two words of a register's outputs from their four codes each. */
INLINE void decode_words(u32_register *words, const uint8_t *codes, const float_table *table) {
    u8_register octets;
    memcpy(&octets, codes, sizeof octets);
    for (int i = 0; i < WORDS_OF_CODES; i++) {
#if defined(__AVX512BW__) || (PAGODA_HALF_REGISTERS && defined(__F16C__))
        /* Codes become the upper halves of 16 bits, and float16. */
        const __m128i byte_order = _mm_set_epi8(13, -1, 12, -1, 9, -1, 8, -1, 5, -1, 4, -1, 1, -1, 0, -1);
        const __m128i own = _mm_add_epi8(byte_order, _mm_set1_epi16((int16_t)(i * 0x200)));
        const bool is_e4m3 = table->floats == FLOATS_E4M3;
        const float factor = is_e4m3 ? 256 : 1;
#endif
#if defined(__AVX512BW__)
        __m512i halves = _mm512_shuffle_epi8((__m512i)octets, _mm512_broadcast_i32x4(own));
        if (is_e4m3) halves = _mm512_and_si512(_mm512_srai_epi16(halves, 1), _mm512_set1_epi16((int16_t)0xbfff));
        const __m512 first = _mm512_cvtph_ps(_mm512_castsi512_si256(halves)) * factor;
        const __m512 last = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1)) * factor;
        const __m256i low = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(first), 16));
        const __m256i high = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(last), 16));
        words[i] = (u32_register)_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
#elif PAGODA_HALF_REGISTERS && defined(__F16C__)
        __m256i halves = _mm256_shuffle_epi8((__m256i)octets, _mm256_broadcastsi128_si256(own));
        if (is_e4m3) halves = _mm256_and_si256(_mm256_srai_epi16(halves, 1), _mm256_set1_epi16((int16_t)0xbfff));
        const __m256 first = _mm256_cvtph_ps(_mm256_castsi256_si128(halves)) * factor;
        const __m256 last = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)) * factor;
        const __m256i low = _mm256_srli_epi32(_mm256_castps_si256(first), 16);
        const __m256i high = _mm256_srli_epi32(_mm256_castps_si256(last), 16);
        words[i] = (u32_register)_mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
#else
        for (int lane = 0; lane < REGISTER_LANES; lane++) {
            const uint8_t *own = (const uint8_t *)&octets + 4 * lane + 2 * i;
            const bf16 first = bf16_from(number_of_float(own[0], table->floats));
            words[i][lane] = first | (uint32_t)bf16_from(number_of_float(own[1], table->floats)) << 16;
        }
#endif
    }
}

#endif

#endif
