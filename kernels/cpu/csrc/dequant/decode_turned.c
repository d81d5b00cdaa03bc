/* A tile is 32 rows of a group's 32 codes. Codes are turned as words of eight, and looked up for 16 rows at once, each
 * of which has its scale in a lane. So nothing that is wider than a code is turned. */
#include "dequant/decode_turned.h"

#include <stdbool.h>

#include "runtime/vector.h"

enum { TILE = 2 * LANES, GROUP = 32, GROUPS_AT_ONCE = 4 }; /* as many groups as a line of the cache holds */

/* The same word of 16 rows. */
INLINE u32x16 word_of_rows(const uint8_t *codes, int64_t stride) {
#if defined(__AVX512F__)
    __m512i lanes = _mm512_mullo_epi32((__m512i)lane_indices(), _mm512_set1_epi32((int)stride));
    return (u32x16)_mm512_i32gather_epi32(lanes, codes, 1);
#else
    uint32_t words[LANES];
    for (int i = 0; i < LANES; i++) memcpy(words + i, codes + i * stride, sizeof *words);
    return u32x16_load(words);
#endif
}

/* The numbers of 16 codes, of which the low four bits count. */
INLINE f32x16 look_up_codes(const float *table, u32x16 codes) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_permutexvar_ps((__m512i)codes, _mm512_loadu_ps(table));
#else
    float numbers[LANES];
    for (int i = 0; i < LANES; i++) numbers[i] = table[codes[i] & 15];
    return f32x16_load(numbers);
#endif
}

/* Stores 32 normal numbers. `is_line`: they are a line of the cache, which need not be read before it is written: rows
 * of the output are so far apart that few lines stay in a cache. */
INLINE void store_pair(uint16_t *to, f32x16 low, f32x16 high, bool is_line) {
#if defined(__AVX512BF16__)
    __m512bh both = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    if (is_line) _mm512_stream_si512((void *)to, (__m512i)both);
    else memcpy(to, &both, sizeof both);
#else
    (void)is_line;
    u16x16 halves[2] = {__builtin_convertvector(bf16_round(low), u16x16),
                        __builtin_convertvector(bf16_round(high), u16x16)};
    memcpy(to, halves, sizeof halves);
#endif
}

/* Decodes one tile; `stride` bytes are between rows of codes. */
INLINE void decode_tile(uint16_t *to, int64_t to_stride, const uint8_t *codes, int64_t stride, const float *scales,
                        const float *table, bool is_line) {
    f32x16 low_scales = f32x16_load(scales), high_scales = f32x16_load(scales + LANES);
    for (int word = 0; word < GROUP / 8; word++) {
        u32x16 low = word_of_rows(codes + 4 * word, stride);
        u32x16 high = word_of_rows(codes + LANES * stride + 4 * word, stride);
        for (int code = 0; code < 8; code++, to += to_stride)
            store_pair(to, look_up_codes(table, low >> 4 * code) * low_scales,
                       look_up_codes(table, high >> 4 * code) * high_scales, is_line);
    }
}

static bool are_scales_normal(const uint8_t *scales, int64_t count, const float *scale_table) {
    bool is_normal[256], all = true;
    for (int i = 0; i < 256; i++) is_normal[i] = scale_table[i] >= 0x1p-120f && scale_table[i] <= 0x1p120f;
    for (int64_t i = 0; i < count; i++) all = all && is_normal[scales[i]];
    return all;
}

int32_t pagoda_decode_turned(uint16_t *to, int64_t to_stride, const uint8_t *codes, const uint8_t *scales,
                             int64_t num_rows, int64_t columns, const float *table, const float *scale_table) {
    const int64_t num_groups = columns / GROUP, stride = columns / 2;
    if (num_rows % TILE || columns % GROUP || !are_scales_normal(scales, num_rows * num_groups, scale_table)) return 0;
    const bool is_line = ((uintptr_t)to | (uintptr_t)to_stride * sizeof *to) % sizeof(u32x16) == 0;
    for (int64_t first = 0; first < num_groups; first += GROUPS_AT_ONCE)
        for (int64_t row = 0; row < num_rows; row += TILE)
            for (int64_t group = first; group < num_groups && group < first + GROUPS_AT_ONCE; group++) {
                float own[TILE];
                for (int i = 0; i < TILE; i++) own[i] = scale_table[scales[(row + i) * num_groups + group]];
                uint16_t *tile = to + group * GROUP * to_stride + row;
                const uint8_t *its_codes = codes + row * stride + group * GROUP / 2;
                if (is_line) decode_tile(tile, to_stride, its_codes, stride, own, table, true);
                else decode_tile(tile, to_stride, its_codes, stride, own, table, false);
            }
#if defined(__AVX512BF16__)
    _mm_sfence(); /* before another thread is told that the numbers are there */
#endif
    return 1;
}
