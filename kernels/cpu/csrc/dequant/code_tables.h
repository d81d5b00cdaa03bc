/* What codes stand for, looked up in tables that registers hold. */
#ifndef PAGODA_CODE_TABLES_H
#define PAGODA_CODE_TABLES_H

#include "runtime/vector.h"

/* The code at `index` of bytes with two codes each. */
INLINE int nibble_at(const uint8_t *octets, int64_t index, bool is_high_first) {
    return (index % 2 != 0) == is_high_first ? octets[index / 2] & 15 : octets[index / 2] >> 4;
}

#if defined(__AVX2__) && defined(__FMA__)
/* The low bytes of a table's numbers, and the high ones. */
INLINE __m256i table_octets(u16x16 table) {
    __m256i both = _mm256_packus_epi16(_mm256_and_si256((__m256i)table, _mm256_set1_epi16(255)),
                                       _mm256_srli_epi16((__m256i)table, 8));
    return _mm256_permute4x64_epi64(both, 0xd8);
}
#endif

/* The numbers of the 16 codes of 8 bytes. */
INLINE void look_up_nibbles(bf16 *to, const uint8_t *octets, u16x16 table, bool is_high_first) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    /* Each byte becomes a pair of indices, of which only the low four bits count. */
    __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)octets));
    __m256i index = _mm256_or_si256(_mm256_srlv_epi32(wide, _mm256_set1_epi32(is_high_first ? 4 : 0)),
                                    _mm256_sllv_epi32(wide, _mm256_set1_epi32(is_high_first ? 16 : 12)));
    _mm256_storeu_si256((void *)to, _mm256_permutexvar_epi16(index, (__m256i)table));
#elif defined(__AVX2__) && defined(__FMA__)
    __m256i both = table_octets(table);
    __m128i packed = _mm_loadl_epi64((const void *)octets), mask = _mm_set1_epi8(15);
    __m128i low = _mm_and_si128(packed, mask), high = _mm_and_si128(_mm_srli_epi16(packed, 4), mask);
    __m128i codes = is_high_first ? _mm_unpacklo_epi8(high, low) : _mm_unpacklo_epi8(low, high);
    low = _mm_shuffle_epi8(_mm256_castsi256_si128(both), codes);
    high = _mm_shuffle_epi8(_mm256_extracti128_si256(both, 1), codes);
    _mm_storeu_si128((void *)to, _mm_unpacklo_epi8(low, high));
    _mm_storeu_si128((void *)(to + 8), _mm_unpackhi_epi8(low, high));
#else
    for (int i = 0; i < LANES; i++) to[i] = table[nibble_at(octets, i, is_high_first)];
#endif
}

/* The numbers of the 32 codes of 16 bytes; the first 16 have one table, and the others another. */
INLINE u32x16 look_up_pairs(const uint8_t *octets, u16x16 first, u16x16 second, bool is_high_first) {
#if defined(__AVX512BW__)
    /* Each byte becomes a pair of indices. Of an index five bits count: the code, and which table. */
    __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)octets));
    __m512i index = is_high_first ? _mm512_or_si512(_mm512_srli_epi32(wide, 4), _mm512_slli_epi32(wide, 16))
                                  : _mm512_or_si512(wide, _mm512_slli_epi32(wide, 12));
    const __m512i is_second = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(LANES), 1);
    index = _mm512_ternarylogic_epi32(index, _mm512_set1_epi16(15), is_second, 0xea); /* index & 15 | is_second */
    __m512i tables = _mm512_inserti64x4(_mm512_castsi256_si512((__m256i)first), (__m256i)second, 1);
    return (u32x16)_mm512_permutexvar_epi16(index, tables);
#else
    bf16 numbers[2 * LANES];
    look_up_nibbles(numbers, octets, first, is_high_first);
    look_up_nibbles(numbers + LANES, octets + LANES / 2, second, is_high_first);
    return u32x16_load(numbers);
#endif
}

/* The numbers of the low nibbles of 16 bytes, then those of the high ones. */
INLINE void look_up_halves(bf16 *to, const uint8_t *octets, u16x16 table) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    /* Of an index only the low four bits count. */
    __m256i index = _mm256_cvtepu8_epi16(_mm_loadu_si128((const void *)octets));
    _mm256_storeu_si256((void *)to, _mm256_permutexvar_epi16(index, (__m256i)table));
    _mm256_storeu_si256((void *)(to + 16), _mm256_permutexvar_epi16(_mm256_srli_epi16(index, 4), (__m256i)table));
#elif defined(__AVX2__) && defined(__FMA__)
    __m256i both = table_octets(table);
    __m128i packed = _mm_loadu_si128((const void *)octets), mask = _mm_set1_epi8(15);
    for (int i = 0; i < 2; i++) {
        __m128i codes = _mm_and_si128(i ? _mm_srli_epi16(packed, 4) : packed, mask);
        __m128i low = _mm_shuffle_epi8(_mm256_castsi256_si128(both), codes);
        __m128i high = _mm_shuffle_epi8(_mm256_extracti128_si256(both, 1), codes);
        _mm_storeu_si128((void *)(to + LANES * i), _mm_unpacklo_epi8(low, high));
        _mm_storeu_si128((void *)(to + LANES * i + 8), _mm_unpackhi_epi8(low, high));
    }
#else
    for (int i = 0; i < LANES; i++) to[i] = table[octets[i] & 15], to[LANES + i] = table[octets[i] >> 4];
#endif
}

/* The numbers of 32 codes of a byte each, two in a word. */
INLINE u32x16 look_up_octets(const uint8_t *codes, const bf16 *table) {
#if defined(__AVX512BW__)
    __m512i index = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const void *)codes)), quarters[4];
    for (int i = 0; i < 4; i++)
        quarters[i] = _mm512_permutex2var_epi16(_mm512_loadu_si512(table + 64 * i), index,
                                                _mm512_loadu_si512(table + 64 * i + 32));
    __mmask32 is_odd = _mm512_test_epi16_mask(index, _mm512_set1_epi16(64));
    __mmask32 is_upper = _mm512_test_epi16_mask(index, _mm512_set1_epi16(128));
    __m512i lower = _mm512_mask_blend_epi16(is_odd, quarters[0], quarters[1]);
    __m512i upper = _mm512_mask_blend_epi16(is_odd, quarters[2], quarters[3]);
    return (u32x16)_mm512_mask_blend_epi16(is_upper, lower, upper);
#else
    bf16 numbers[2 * LANES];
    for (int i = 0; i < 2 * LANES; i++) numbers[i] = table[codes[i]];
    return u32x16_load(numbers);
#endif
}

#endif
