/* A tile is 128 rows of 128 codes. Codes are turned as words of eight, and looked up for 16 rows at once, one scale a
 * lane. So nothing that is wider than a code is turned. A tile writes four cache lines of each row of the output, and
 * the next tile writes the lines that follow. */
#include "dequant/decode_turned.h"

#include <stdbool.h>

#include "runtime/integers.h"
#include "runtime/stream.h"
#include "runtime/vector.h"

enum { GROUP = 32, PAIR = 2 * LANES, TILE = 128, WORDS = GROUP / 8 };

/* Rows of codes that are decoded at once, and where their numbers go. */
typedef struct {
    uint16_t *to;
    int64_t to_stride;
    const uint8_t *codes;
    int64_t stride;      /* bytes from one row of codes to the next */
    int num_rows;        /* at most TILE, a multiple of PAIR */
    int num_groups;      /* of each row, at most TILE / GROUP */
    const uint8_t *next; /* codes that are read ahead, or NULL */
    float scales[TILE / GROUP][TILE]; /* of each group, for each row */
} tile;

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

/* Stores 32 normal numbers. */
INLINE void store_pair(uint16_t *to, f32x16 low, f32x16 high) {
#if defined(__AVX512BF16__)
    __m512bh both = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    stream_store(to, (u32x16)both);
#else
    u16x16 halves[2] = {__builtin_convertvector(bf16_round(low), u16x16),
                        __builtin_convertvector(bf16_round(high), u16x16)};
    stream_store(to, u32x16_load(halves));
#endif
}

/* Turns the words of 16 rows: word i of all rows is vector i. */
INLINE void turn_rows(uint32_t *turned, const uint8_t *codes, int64_t stride, int num_groups) {
    u32x16 rows[LANES] = {0};
    for (int i = 0; i < LANES; i++)
        if (num_groups == TILE / GROUP) rows[i] = u32x16_load(codes + i * stride);
        else memcpy(rows + i, codes + i * stride, (size_t)num_groups * WORDS * sizeof *turned);
    store_transposed(turned, LANES, rows);
}

INLINE void decode_tile(const tile *own, const float *table) {
    uint32_t turned[TILE * LANES];
    uint16_t *to = own->to;
    for (int row = 0; row < own->num_rows; row += LANES)
        turn_rows(turned + row * LANES, own->codes + row * own->stride, own->stride, own->num_groups);
    for (int column = 0; column < own->num_groups * GROUP; column++, to += own->to_stride) {
        if (own->next) __builtin_prefetch(own->next + column * own->stride);
        const float *scales = own->scales[column / GROUP];
        const uint32_t *words = turned + column / 8 * LANES;
        for (int row = 0; row < own->num_rows; row += PAIR) {
            u32x16 low = u32x16_load(words + row * LANES) >> column % 8 * 4;
            u32x16 high = u32x16_load(words + (row + LANES) * LANES) >> column % 8 * 4;
            store_pair(to + row, look_up_codes(table, low) * f32x16_load(scales + row),
                       look_up_codes(table, high) * f32x16_load(scales + row + LANES));
        }
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
    if (num_rows % PAIR || columns % GROUP || !are_scales_normal(scales, num_rows * num_groups, scale_table)) return 0;
    for (int64_t first = 0; first < num_groups; first += TILE / GROUP)
        for (int64_t row = 0; row < num_rows; row += TILE) {
            tile own;
            own.to = to + first * GROUP * to_stride + row;
            own.to_stride = to_stride;
            own.stride = stride;
            own.codes = codes + row * stride + first * GROUP / 2;
            own.num_rows = (int)min(TILE, num_rows - row);
            own.num_groups = (int)min(TILE / GROUP, num_groups - first);
            own.next = row + 2 * TILE <= num_rows ? own.codes + TILE * stride : NULL;
            for (int i = 0; i < own.num_rows; i++)
                for (int group = 0; group < own.num_groups; group++)
                    own.scales[group][i] = scale_table[scales[(row + i) * num_groups + first + group]];
            decode_tile(&own, table);
        }
    stream_end();
    return 1;
}
