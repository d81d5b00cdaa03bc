/* Attention of a few rows with AMX's tiles: groups of keys and values are read from the cache as they lie there.
 *
 * A row of values as it lies in the cache has two dimensions in a word, where a product over keys needs two keys. So a
 * row's weights are multiplied twice, with zeros above or below each:
 *
 *     even dimensions [rows, 16]        weights, 0
 *     odd dimensions  [rows, 16]   =    0, weights     x   values [16 keys, 32 dimensions]
 *
 * The sums of groups are then added as those of words of two groups' keys would be.
 */
#ifndef PAGODA_ATTENTION_AMX_IN_PLACE_H
#define PAGODA_ATTENTION_AMX_IN_PLACE_H

#include "attention/attention_amx.h"

#if PAGODA_HAS_TILES
/* Finds a group's rows in the cache. Copies them if they are not adjacent, or no multiple of a register's words: what
 * follows them in memory would be multiplied. */
INLINE void find_group(const attention_work *work, key_groups *groups, int group, const char *cache,
                       const size_t *offsets, uint32_t *copies, int words) {
    const pagoda_attention_call *call = work->call;
    const size_t stride = (size_t)whole_vectors(words), *of_group = offsets + group * TILE_ROWS;
    groups->rows[group] = cache + of_group[0];
    groups->strides[group] = work->token_bytes;
    if (call->block_size % TILE_ROWS == 0 && words % TILE_WORDS == 0 &&
        of_group[TILE_ROWS - 1] - of_group[0] == (TILE_ROWS - 1) * work->token_bytes)
        return;
    copies += (size_t)(group * TILE_ROWS) * stride;
    copy_cache_rows(copies, stride, cache, of_group, TILE_ROWS, words);
    groups->rows[group] = (const char *)copies;
    groups->strides[group] = stride * sizeof(uint32_t);
}

/* The products of one KV head's rows with a tile of keys; their values are prefetched. */
static void multiply_head_with_amx(attention_work *work, int head, int num_keys, const size_t *offsets) {
    const size_t cache_head = (size_t)(work->item->first_head + head) * work->head_bytes;
    const char *values = (const char *)work->call->value_cache + cache_head;
    const uint32_t *query = work->query + (size_t)(head * TILE_ROWS * work->padded_words);
    const int groups = groups_before(num_keys);
    _Alignas(64) float products[GROUPS * TILE_NUMBERS];
    key_groups keys = {0};
    const char *cache_keys = (const char *)work->call->key_cache + cache_head;
    for (int group = 0; group < groups; group++)
        find_group(work, &keys, group, cache_keys, offsets, work->keys, work->words);
    multiply_groups(groups, &keys, query, work->words, products, values, offsets);
    for (int group = 0; group < groups; group++) /* the last lines now, so that memory is busy meanwhile */
        fetch_group(values, offsets + group * TILE_ROWS, (size_t)(work->words - 1) / TILE_WORDS * TILE_STRIDE);
    if (work->tanh_scale > 0) cap_groups(products, groups, work->tanh_scale);
    const __m512i lanes = (__m512i)(lane_indices() * LANES);
    for (int row = 0; row < work->rows; row++)
        for (int group = 0; group < groups; group++)
            work->products[head * work->padded_rows + row][group] =
                (f32x16)_mm512_i32gather_ps(lanes, products + group * TILE_NUMBERS + row, sizeof(float));
}

/* Softmax of one row: see weigh. */
INLINE merge_factors weigh_row_for_amx(attention_work *work, int index, key_range visible, int groups,
                                       uint32_t (*weights)[TILE_NUMBERS], int row) {
    f32x16 *products = work->products[index], most = f32x16_set(-INFINITY), sum = {0};
    for (int group = 0; group < groups; group++) {
        const i32x16 key = lane_indices() + group * LANES;
        products[group] = f32x16_select((key >= visible.first) & (key < visible.end), products[group],
                                        f32x16_set(-INFINITY));
        most = f32x16_max(most, products[group]);
    }
    const float of_tile = f32x16_largest(most) * work->scale;
    const f32x16 relative_to = -score_of_weight_1(f32x16_set(of_tile)), scale = f32x16_set(work->scale);
    for (int group = 0; group < groups; group++) {
        const f32x16 weight = exp2_of_score(f32x16_fma(products[group], scale, relative_to));
        const u32x16 word = (u32x16)_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)weight));
        memcpy(weights[group] + row * TILE_WORDS, &word, sizeof word);
        const u32x16 upper = word << 16;
        memcpy(weights[group] + (work->rows + row) * TILE_WORDS, &upper, sizeof upper);
        sum += weight;
    }
    const merge_factors factors = factors_of(work->largest[index], of_tile);
    work->totals[index] = merged(f32x16_set(work->totals[index]), f32x16_set(f32x16_sum(sum)), factors)[0];
    if (of_tile > work->largest[index]) work->largest[index] = of_tile;
    return factors;
}

/* added[group] = the weighted values of each group, in 32 dimensions: even ones of all rows, then odd ones. What
 * follows them at `offsets` of `fetched`, whose rows have `bytes`, is prefetched meanwhile. */
INLINE void weigh_groups(int groups, uint32_t (*weights)[TILE_NUMBERS], const key_groups *values, size_t at,
                         float (*added)[TILE_NUMBERS], const char *fetched, const size_t *offsets, size_t bytes) {
#define WEIGH_GROUP(GROUP, SUMS, ROWS, WEIGHTS)                               \
    if (groups > GROUP) {                                                                                  \
        TILE_ZERO(SUMS);                                                                                   \
        TILE_LOAD(ROWS, weights[GROUP], TILE_STRIDE);                                                      \
        TILE_LOAD(WEIGHTS, values->rows[GROUP] + at, values->strides[GROUP]);                              \
        TILE_DOT_BF16(SUMS, ROWS, WEIGHTS);                                                                \
        if (at + TILE_STRIDE < bytes) fetch_group(fetched, offsets + GROUP * TILE_ROWS, at + TILE_STRIDE); \
    }
    WEIGH_GROUP(0, SUMS_00, ROWS_0, WEIGHTS_0)
    WEIGH_GROUP(1, SUMS_01, ROWS_1, WEIGHTS_1)
    WEIGH_GROUP(2, SUMS_10, ROWS_0, WEIGHTS_0)
    WEIGH_GROUP(3, SUMS_11, ROWS_1, WEIGHTS_1)
#undef WEIGH_GROUP
    TILE_STORE(SUMS_00, added[0], TILE_STRIDE);
    if (groups > 1) TILE_STORE(SUMS_01, added[1], TILE_STRIDE);
    if (groups > 2) TILE_STORE(SUMS_10, added[2], TILE_STRIDE);
    if (groups > 3) TILE_STORE(SUMS_11, added[3], TILE_STRIDE);
}

/* The sum of the groups' sums in one row of `added`. */
INLINE f32x16 add_groups(int groups, float (*added)[TILE_NUMBERS], int row) {
    f32x16 of_group[GROUPS] = {0};
    for (int group = 0; group < groups; group++) of_group[group] = f32x16_load(added[group] + row * LANES);
    return (f32x16){0} + (of_group[0] + of_group[1]) + (of_group[2] + of_group[3]);
}

/* The first and the last 16 of 32 dimensions. */
INLINE f32x16 first_pairs(f32x16 even, f32x16 odd) {
    return __builtin_shufflevector(even, odd, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
INLINE f32x16 last_pairs(f32x16 even, f32x16 odd) {
    return __builtin_shufflevector(even, odd, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}

/* Merges the weighted values of a tile into the sums of one KV head's rows; the next tile's keys are prefetched. */
static void add_head_with_amx(attention_work *work, int head, int num_keys, const size_t *offsets, const size_t *next,
                              uint32_t (*weights)[TILE_NUMBERS]) {
    const int value_dim = work->call->value_dim, groups = groups_before(num_keys);
    const size_t cache_head = (size_t)(work->item->first_head + head) * work->head_bytes;
    const char *next_keys = (const char *)work->call->key_cache + cache_head;
    float *sums = work->sums + (size_t)(head * work->padded_rows * value_dim);
    _Alignas(64) float added[GROUPS][TILE_NUMBERS];
    key_groups values = {0};
    for (int group = 0; group < groups; group++)
        find_group(work, &values, group, (const char *)work->call->value_cache + cache_head, offsets, work->values,
                   value_dim / 2);
    for (int dim = 0; dim < value_dim; dim += 2 * LANES) {
        weigh_groups(groups, weights, &values, (size_t)dim * sizeof(bf16), added, next_keys, next,
                     (size_t)value_dim * sizeof(bf16));
        for (int row = 0; row < work->rows; row++) {
            float *sum = sums + row * value_dim + dim;
            const f32x16 even = add_groups(groups, added, row), odd = add_groups(groups, added, work->rows + row);
            f32x16_store(sum, merged(f32x16_load(sum), first_pairs(even, odd), work->factors[row]));
            if (dim + LANES == value_dim) continue;
            f32x16_store(sum + LANES, merged(f32x16_load(sum + LANES), last_pairs(even, odd), work->factors[row]));
        }
    }
}

/* As attend_in_place. */
static void attend_in_place_with_amx(attention_work *work, int tile_key, int num_keys, const size_t *offsets,
                                     const size_t *next) {
    _Alignas(64) uint32_t weights[GROUPS][TILE_NUMBERS];
    const int groups = groups_before(num_keys);
    tiles_configure(TILE_ROWS, TILE_ROWS);
    for (int head = 0; head < work->item->num_heads; head++) multiply_head_with_amx(work, head, num_keys, offsets);
    tiles_configure(2 * work->rows, 2 * work->rows);
    for (int head = 0; head < work->item->num_heads; head++) {
        const size_t cache_head = (size_t)(work->item->first_head + head) * work->head_bytes;
        for (int group = 0; group < groups; group++)
            fetch_group((const char *)work->call->key_cache + cache_head, next + group * TILE_ROWS, 0);
        for (int row = 0; row < work->rows; row++)
            work->factors[row] = weigh_row_for_amx(work, head * work->padded_rows + row,
                                                   visible_keys(work, row, tile_key, num_keys), groups, weights, row);
        add_head_with_amx(work, head, num_keys, offsets, next, weights);
    }
}
#endif

#endif
