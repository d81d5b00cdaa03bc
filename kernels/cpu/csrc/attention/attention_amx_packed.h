/* Attention of many rows with AMX's tiles: FlashAttention-2 (Dao, 2023) on blocks of 16 rows. A block's scores have a
 * row in each lane, so the softmax over its keys needs no sums or maxima across lanes. */
#ifndef PAGODA_ATTENTION_AMX_PACKED_H
#define PAGODA_ATTENTION_AMX_PACKED_H

#include "attention/attention_amx.h"
#include "attention/attention_packed.h"

#if PAGODA_HAS_TILES
enum { DIMS_AT_ONCE = 4 * LANES };

/* A block of 16 rows with a tile of keys. */
typedef struct {
    float products[GROUPS * TILE_NUMBERS];        /* [64 keys, 16 rows] */
    uint32_t weights[GROUPS / 2 * TILE_NUMBERS];  /* [2, 16 rows, 16 words] */
    float added[TILE_ROWS * DIMS_AT_ONCE];        /* weighted values */
    float so_far[TILE_ROWS], of_tile[TILE_ROWS];  /* factors */
} __attribute__((aligned(64))) row_block;

/* Interleaves a tile's values as [32 keys, 16 dimensions] a register. */
static void pack_values_for_amx(const attention_work *work, const char *cache, const size_t *offsets, int groups) {
    const int value_dim = work->call->value_dim;
    uint32_t *to = work->values;
    for (int group = 0; group < groups; group += 2, to += (size_t)value_dim * TILE_WORDS)
        for (int word = 0; word < TILE_WORDS; word++) {
            const char *first = cache + offsets[group * TILE_ROWS + word];
            const char *second = cache + offsets[(group + 1) * TILE_ROWS + word];
            uint32_t *at = to + word * TILE_WORDS;
            int dim = 0;
            for (; dim + 2 * LANES <= value_dim; dim += 2 * LANES, at += 2 * TILE_NUMBERS) {
                u32x16 values[2];
                load_values(BFLOAT16, 2, values, first, second, dim);
                memcpy(at, &values[0], sizeof values[0]);
                memcpy(at + TILE_NUMBERS, &values[1], sizeof values[1]);
            }
            if (dim == value_dim) continue;
            u32x16 last;
            load_values(BFLOAT16, 1, &last, first, second, dim);
            memcpy(at, &last, sizeof last);
        }
}

/* Makes the products with keys that a row does not see minus infinity. */
static void hide_keys(const attention_work *work, row_block *block, int row, int tile_key, int groups) {
    i32x16 first, end;
    memcpy(&first, work->first_keys + row, sizeof first);
    memcpy(&end, work->end_keys + row, sizeof end);
    for (int key = 0; key < groups * TILE_ROWS; key++) {
        const i32x16 position = (i32x16)u32x16_set((uint32_t)(tile_key + key));
        float *at = block->products + key * LANES;
        f32x16_store(at, f32x16_select((position >= first) & (position < end), f32x16_load(at),
                                       f32x16_set(-INFINITY)));
    }
}

/* Whether all rows of a block see all keys of the groups. */
INLINE bool sees_all(const attention_work *work, int row, int tile_key, int groups) {
    return work->end_keys[row] >= tile_key + groups * TILE_ROWS && work->first_keys[row + TILE_ROWS - 1] <= tile_key;
}

/* The sum of 16 vectors, in the order of f32x16_sum. */
INLINE f32x16 sum_of(f32x16 *parts) {
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) parts[i] += parts[i + half];
    return parts[0];
}

/* Words of two groups' weights. */
INLINE u32x16 weight_words(f32x16 first, f32x16 second) {
    const u16x32 order = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
                          8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512bh rounded = _mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    return (u32x16)_mm512_permutexvar_epi16((__m512i)order, (__m512i)rounded);
}

/* Softmax of a block: see weigh. */
INLINE void weigh_block_for_amx(const int groups, attention_work *work, row_block *block, int index) {
    const f32x16 scale = f32x16_set(work->scale), one = f32x16_set(1.0f);
    f32x16 most[4];
    for (int i = 0; i < 4; i++) most[i] = f32x16_set(-INFINITY);
    for (int key = 0; key < groups * TILE_ROWS; key += 4)
        for (int i = 0; i < 4; i++)
            most[i] = f32x16_max(most[i], f32x16_load(block->products + (key + i) * LANES));
    const f32x16 of_tile = f32x16_max(f32x16_max(most[0], most[1]), f32x16_max(most[2], most[3])) * scale;
    const f32x16 relative_to = -score_of_weight_1(of_tile);
    f32x16 sums[TILE_ROWS];
    u32x16 words[2][TILE_ROWS];
    for (int key = 0; key < TILE_ROWS; key++) {
        f32x16 weights[GROUPS] = {0};
        for (int group = 0; group < groups; group++)
            weights[group] = exp2_of_score(
                f32x16_fma(f32x16_load(block->products + (group * TILE_ROWS + key) * LANES), scale, relative_to));
        sums[key] = weights[0];
        for (int group = 1; group < groups; group++) sums[key] += weights[group];
        words[0][key] = weight_words(weights[0], weights[1]);
        if (groups > 2) words[1][key] = weight_words(weights[2], weights[3]);
    }
    store_transposed(block->weights, TILE_WORDS, words[0]);
    if (groups > 2) store_transposed(block->weights + TILE_NUMBERS, TILE_WORDS, words[1]);
    const f32x16 largest = f32x16_load(work->largest + index), total = f32x16_load(work->totals + index);
    const f32x16 so_far_factor = f32x16_select(of_tile > largest, exp2_of(largest - of_tile), one);
    const f32x16 of_tile_factor = f32x16_select(of_tile < largest, exp2_of(of_tile - largest), one);
    f32x16_store(block->so_far, so_far_factor);
    f32x16_store(block->of_tile, of_tile_factor);
    f32x16_store(work->totals + index, f32x16_fma(sum_of(sums), of_tile_factor, total * so_far_factor));
    f32x16_store(work->largest + index, f32x16_select(of_tile > largest, of_tile, largest));
}

/* Merges weighted values in `vectors` times 16 dimensions into the sums of a block. */
INLINE void merge_added(const int vectors, const row_block *block, float *sums, int value_dim) {
    for (int row = 0; row < TILE_ROWS; row++, sums += value_dim) {
        const merge_factors factors = {block->so_far[row], block->of_tile[row]};
        const float *added = block->added + row * DIMS_AT_ONCE;
        for (int v = 0; v < vectors; v++) {
            const f32x16 so_far = f32x16_load(sums + v * LANES);
            f32x16_store(sums + v * LANES, merged(so_far, f32x16_load(added + v * LANES), factors));
        }
    }
}

/* sums += weights, in ROWS_0 and ROWS_1, times 16 dimensions of values; `second` are those of the last two groups. */
#define WEIGH_DIMS(SUMS, WEIGHTS, FIRST, SECOND)    \
    TILE_ZERO(SUMS);                                \
    TILE_LOAD(WEIGHTS, FIRST, TILE_STRIDE);         \
    TILE_DOT_BF16(SUMS, ROWS_0, WEIGHTS);           \
    if (groups > 2) {                               \
        TILE_LOAD(WEIGHTS, SECOND, TILE_STRIDE);    \
        TILE_DOT_BF16(SUMS, ROWS_1, WEIGHTS);       \
    }

/* Adds a tile's weighted values to the sums of a block. */
INLINE void add_values_for_amx(const int groups, const attention_work *work, row_block *block, float *sums) {
    const int value_dim = work->call->value_dim;
    const uint32_t *first = work->values, *second = first + (size_t)value_dim * TILE_WORDS;
    TILE_LOAD(ROWS_0, block->weights, TILE_STRIDE);
    if (groups > 2) TILE_LOAD(ROWS_1, block->weights + TILE_NUMBERS, TILE_STRIDE);
    for (int dim = 0; dim < value_dim; dim += DIMS_AT_ONCE) {
        const int vectors = (value_dim - dim) / LANES;
        float *added = block->added;
        WEIGH_DIMS(SUMS_00, WEIGHTS_0, first, second)
        if (vectors > 1) { WEIGH_DIMS(SUMS_01, WEIGHTS_1, first + TILE_NUMBERS, second + TILE_NUMBERS) }
        if (vectors > 2) { WEIGH_DIMS(SUMS_10, WEIGHTS_0, first + 2 * TILE_NUMBERS, second + 2 * TILE_NUMBERS) }
        if (vectors > 3) { WEIGH_DIMS(SUMS_11, WEIGHTS_1, first + 3 * TILE_NUMBERS, second + 3 * TILE_NUMBERS) }
        TILE_STORE(SUMS_00, added, sizeof(float) * DIMS_AT_ONCE);
        if (vectors > 1) TILE_STORE(SUMS_01, added + LANES, sizeof(float) * DIMS_AT_ONCE);
        if (vectors > 2) TILE_STORE(SUMS_10, added + 2 * LANES, sizeof(float) * DIMS_AT_ONCE);
        if (vectors > 3) TILE_STORE(SUMS_11, added + 3 * LANES, sizeof(float) * DIMS_AT_ONCE);
        first += 4 * TILE_NUMBERS;
        second += 4 * TILE_NUMBERS;
        if (vectors > 3) merge_added(4, block, sums + dim, value_dim);
        else merge_added(vectors, block, sums + dim, value_dim);
    }
}
#undef WEIGH_DIMS

/* One block of a head's rows with `groups` of a tile's keys. */
SPECIALIZED void attend_block_for_amx(const int groups, attention_work *work, const key_groups *keys, int head, int row,
                                      int tile_key) {
    row_block block;
    const int index = head * work->padded_rows + row;
    multiply_groups(groups, keys, work->query + (size_t)index * (size_t)work->padded_words, work->words, block.products,
                    NULL, NULL);
    if (work->tanh_scale > 0) cap_groups(block.products, groups, work->tanh_scale);
    if (!sees_all(work, row, tile_key, groups)) hide_keys(work, &block, row, tile_key, groups);
    weigh_block_for_amx(groups, work, &block, index);
    add_values_for_amx(groups, work, &block, work->sums + (size_t)index * (size_t)work->call->value_dim);
}

/* As attend_packed. */
static void attend_packed_with_amx(attention_work *work, int head, int tile_key, int num_keys, const size_t *offsets,
                                   const size_t *next) {
    const size_t cache_head = (size_t)(work->item->first_head + head) * work->head_bytes;
    const char *cache_keys = (const char *)work->call->key_cache + cache_head;
    const char *cache_values = (const char *)work->call->value_cache + cache_head;
    const size_t stride = (size_t)work->padded_words;
    const int num_blocks = work->padded_rows / TILE_ROWS;
    key_groups keys;
    for (int group = 0; group < GROUPS; group++) {
        keys.rows[group] = (const char *)(work->keys + (size_t)(group * TILE_ROWS) * stride);
        keys.strides[group] = stride * sizeof(uint32_t);
    }
    copy_cache_rows(work->keys, stride, cache_keys, offsets, groups_before(num_keys) * TILE_ROWS, work->words);
    pack_values_for_amx(work, cache_values, offsets, groups_before(num_keys));
    for (int block = 0; block < num_blocks; block++) {
        const int row = block * TILE_ROWS;
        for (int key = block * KEYS_PER_TILE / num_blocks; key < (block + 1) * KEYS_PER_TILE / num_blocks; key++) {
            fetch_ahead(cache_keys + next[key], work->head_bytes);
            fetch_ahead(cache_values + next[key], (size_t)work->call->value_dim * sizeof(bf16));
        }
        switch (block_vectors(work, row, TILE_ROWS, tile_key, num_keys)) {
        case 4: attend_block_for_amx(4, work, &keys, head, row, tile_key); break;
        case 3: attend_block_for_amx(3, work, &keys, head, row, tile_key); break;
        case 2: attend_block_for_amx(2, work, &keys, head, row, tile_key); break;
        case 1: attend_block_for_amx(1, work, &keys, head, row, tile_key); break;
        default: break;
        }
    }
}
#endif

#endif
