/* The inner loops of attention where a register holds half of 16 lanes, as AVX2's do: see linear_tiles_avx2.h. They add in
 * the order of the loops that they replace. A word is a float here: no such processor multiplies pairs of bfloat16. */
#ifndef PAGODA_ATTENTION_AVX2_H
#define PAGODA_ATTENTION_AVX2_H

#include "attention/attention_item.h"

/* Rows whose products with 16 columns, and with 32, are in registers. */
enum { ROWS_OF_COLUMNS = 6, ROWS_OF_WIDE_COLUMNS = 3 };

/* Eight numbers of a row of the cache, from `at` on. */
INLINE __m256 load_half(const int kind, const char *row, int at) {
    if (kind == FLOAT32) return _mm256_loadu_ps((const float *)row + at);
    __m128i half = _mm_loadu_si128((const __m128i *)((const bf16 *)row + at));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

/* sums[row] += left[row] times right over `words`, which lie `left_step` and `right_step` apart: 16 columns. */
INLINE void add_columns(const int rows, f32x16 *sums, size_t sum_stride, const uint32_t *left, size_t left_stride,
                        size_t left_step, const uint32_t *right, size_t right_step, int words) {
    __m256 sum[ROWS_OF_COLUMNS][2];
#pragma GCC unroll 6
    for (int row = 0; row < rows; row++) memcpy(sum[row], sums + (size_t)row * sum_stride, sizeof sum[row]);
    for (int word = 0; word < words; word++, left += left_step, right += right_step) {
        const __m256 low = _mm256_loadu_ps((const float *)right), high = _mm256_loadu_ps((const float *)right + 8);
#pragma GCC unroll 6
        for (int row = 0; row < rows; row++) {
            const __m256 value = _mm256_broadcast_ss((const float *)left + (size_t)row * left_stride);
            sum[row][0] = _mm256_fmadd_ps(value, low, sum[row][0]);
            sum[row][1] = _mm256_fmadd_ps(value, high, sum[row][1]);
        }
    }
#pragma GCC unroll 6
    for (int row = 0; row < rows; row++) memcpy(sums + (size_t)row * sum_stride, sum[row], sizeof sum[row]);
}

/* sums += left [rows, words] times the first `vectors` times 16 columns of right [words, 64]; for both sizes of a
 * block of rows, see attention_packed.h. */
static void add_block_of_columns(const int rows, const int vectors, f32x16 *sums, size_t sum_stride,
                                 const uint32_t *left, size_t left_stride, size_t left_step, const uint32_t *right,
                                 size_t right_step, int words) {
    for (int v = 0; v < vectors; v++, sums++, right += LANES)
        if (rows == ROWS_OF_COLUMNS)
            add_columns(ROWS_OF_COLUMNS, sums, sum_stride, left, left_stride, left_step, right, right_step, words);
        else
            for (int row = 0; row < rows; row++)
                add_columns(1, sums + (size_t)row * sum_stride, sum_stride, left + (size_t)row * left_stride, left_stride,
                            left_step, right, right_step, words);
}

/* Four numbers of each of two rows of the cache. */
INLINE __m256 load_quarters(const int kind, const char *first, const char *second, int at) {
    if (kind == FLOAT32)
        return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps((const float *)first + at)),
                                    _mm_loadu_ps((const float *)second + at), 1);
    __m128i pair = _mm_unpacklo_epi64(_mm_loadl_epi64((const __m128i *)((const bf16 *)first + at)),
                                      _mm_loadl_epi64((const __m128i *)((const bf16 *)second + at)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(pair), 16));
}

/* products[row] = the products of `count` (4 or 8) adjacent keys with each of `rows` rows: four lanes for each key. */
INLINE void multiply_some_keys(const int kind, const int rows, const int count, const attention_work *work,
                               const uint32_t *query, const char *keys, const char *values, const size_t *offsets,
                               float *products) {
    const int per_line = 64 / (int)element_size(kind);
    __m256 sums[4][4];
#pragma GCC unroll 4
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 4
        for (int pair = 0; pair < count / 2; pair++) sums[row][pair] = _mm256_setzero_ps();
    for (int word = 0; word < work->words; word += 4) {
        if (word % per_line == 0)
            for (int k = 0; k < count; k++)
                fetch_ahead(values + offsets[k] + (size_t)word * element_size(kind), 64);
        __m256 key[4];
#pragma GCC unroll 4
        for (int pair = 0; pair < count / 2; pair++)
            key[pair] = load_quarters(kind, keys + offsets[2 * pair], keys + offsets[2 * pair + 1], word);
#pragma GCC unroll 4
        for (int row = 0; row < rows; row++) {
            const __m256 q = _mm256_broadcast_ps((const __m128 *)(query + row * work->padded_words + word));
#pragma GCC unroll 4
            for (int pair = 0; pair < count / 2; pair++) sums[row][pair] = _mm256_fmadd_ps(q, key[pair], sums[row][pair]);
        }
    }
#pragma GCC unroll 4
    for (int row = 0; row < rows; row++, products += BLOCK_LANES) {
        float lanes[4 * 8];
        memcpy(lanes, sums[row], (size_t)count * 4 * sizeof *lanes);
        for (int k = 0; k < count; k++)
            products[k] = lanes[4 * k] + lanes[4 * k + 1] + lanes[4 * k + 2] + lanes[4 * k + 3];
    }
}

/* products[row][0] = the products of 16 keys with each of `rows` (at most 4) rows; see attention_in_place.h. */
SPECIALIZED void multiply_16_keys(const int kind, const int rows, const attention_work *work, const uint32_t *query,
                                  const char *keys, const char *values, const size_t *offsets,
                                  f32x16 products[][BLOCK_VECTORS]) {
    const int count = rows <= 2 ? 8 : 4; /* their sums fit into the registers */
    for (int first = 0; first < LANES; first += count) {
        float *to = (float *)products + first;
        const size_t *at = offsets + first;
#define OF_KIND(ROWS, COUNT)                                                                         \
    if (kind == FLOAT32) multiply_some_keys(FLOAT32, ROWS, COUNT, work, query, keys, values, at, to); \
    else multiply_some_keys(BFLOAT16, ROWS, COUNT, work, query, keys, values, at, to)
        switch (rows) {
        case 1: OF_KIND(1, 8); break;
        case 2: OF_KIND(2, 8); break;
        case 3: OF_KIND(3, 4); break;
        default: OF_KIND(4, 4);
        }
#undef OF_KIND
    }
}

/* sums[row] = the weighted values of `num_keys` keys in `vectors` (1 or 2) times 16 dimensions from `dim` on. */
INLINE void weigh_some_values(const int kind, const int rows, const int vectors, const uint32_t *weights, int dim,
                              const char *values, const size_t *offsets, int num_keys, f32x16 added[][BLOCK_VECTORS]) {
    __m256 sums[ROWS_OF_WIDE_COLUMNS][4];
#pragma GCC unroll 3
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 4
        for (int half = 0; half < 2 * vectors; half++) sums[row][half] = _mm256_setzero_ps();
    for (int key = 0; key < num_keys; key++) {
        __m256 value[4];
#pragma GCC unroll 4
        for (int half = 0; half < 2 * vectors; half++) value[half] = load_half(kind, values + offsets[key], dim + 8 * half);
#pragma GCC unroll 3
        for (int row = 0; row < rows; row++) {
            const __m256 weight = _mm256_broadcast_ss((const float *)weights + row * KEYS_PER_TILE + key);
#pragma GCC unroll 4
            for (int half = 0; half < 2 * vectors; half++)
                sums[row][half] = _mm256_fmadd_ps(weight, value[half], sums[row][half]);
        }
    }
#pragma GCC unroll 3
    for (int row = 0; row < rows; row++) memcpy(added[row], sums[row], (size_t)vectors * sizeof added[row][0]);
}

/* added[row] = the weighted values of a tile for each of `rows` rows; see attention_in_place.h. */
SPECIALIZED void weigh_values(const int kind, const int rows, const int vectors, const uint32_t *weights, int dim,
                              const char *values, const size_t *offsets, const char *keys, const size_t *next,
                              int num_keys, f32x16 added[][BLOCK_VECTORS]) {
    const size_t at = (size_t)dim * element_size(kind), bytes = (size_t)(vectors * LANES) * element_size(kind);
    for (int key = 0; key < num_keys; key++) fetch_ahead(keys + next[key] + at, bytes);
    for (int v = 0, wide; v < vectors; v += wide) {
        wide = v + 2 <= vectors ? 2 : 1;
        for (int row = 0, some; row < rows; row += some) {
            some = rows - row < ROWS_OF_WIDE_COLUMNS ? rows - row : ROWS_OF_WIDE_COLUMNS;
            const uint32_t *from = weights + row * KEYS_PER_TILE;
            f32x16(*to)[BLOCK_VECTORS] = (f32x16(*)[BLOCK_VECTORS])&added[row][v];
            const int first = dim + v * LANES;
#define OF_KIND(ROWS, VECTORS)                                                                                 \
    if (kind == FLOAT32) weigh_some_values(FLOAT32, ROWS, VECTORS, from, first, values, offsets, num_keys, to); \
    else weigh_some_values(BFLOAT16, ROWS, VECTORS, from, first, values, offsets, num_keys, to)
            switch (2 * some + wide) {
            case 3: OF_KIND(1, 1); break;
            case 4: OF_KIND(1, 2); break;
            case 5: OF_KIND(2, 1); break;
            case 6: OF_KIND(2, 2); break;
            case 7: OF_KIND(3, 1); break;
            default: OF_KIND(3, 2);
            }
#undef OF_KIND
        }
    }
}

#endif
