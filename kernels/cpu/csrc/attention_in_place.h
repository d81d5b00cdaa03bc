/* Attention of a few rows (decodes, and the few tokens that speculation verifies): limited by reading the cache.
 *
 * Keys and values are read from the cache once for all rows, without packing. All KV heads of a strip of keys are
 * computed before the next strip, because they are adjacent; the next strip is prefetched meanwhile.
 */
#ifndef PAGODA_ATTENTION_IN_PLACE_H
#define PAGODA_ATTENTION_IN_PLACE_H

#include "attention_item.h"

/* products[row] = the products of 16 keys with each of `rows` (at most 4) rows. */
SPECIALIZED void multiply_16_keys(const int kind, const int rows, const attention_work *work, const uint32_t *query,
                                  const char *cache, const size_t *offsets, const size_t *next, f32x16 *products,
                                  size_t stride) {
    f32x16 quads[4][4];
    for (int quad = 0; quad < 4; quad++) {
        const size_t *at = offsets + 4 * quad;
        f32x16 sums[4][4] = {0};
        for (int i = 0; i < 4; i++) fetch_ahead(cache + next[4 * quad + i], work->head_bytes);
        for (int word = 0; word < work->words; word += LANES) {
            u32x16 keys[4];
            for (int i = 0; i < 4; i++) keys[i] = load_some_words(kind, cache + at[i], word, work->words);
            for (int row = 0; row < rows; row++) {
                u32x16 q = u32x16_load(query + row * work->padded_words + word);
                for (int i = 0; i < 4; i++) sums[row][i] = dot(kind, sums[row][i], q, keys[i]);
            }
        }
        for (int row = 0; row < rows; row++) quads[row][quad] = add_lanes_of_4(sums[row]);
    }
    for (int row = 0; row < rows; row++) products[(size_t)row * stride] = join_sums(quads[row]);
}

/* sums[row] = sums[row] * factors[row] + the weighted values, for `vectors` times 16 dimensions from `dim` on. */
SPECIALIZED void add_values(const int kind, const int rows, const int vectors, const attention_work *work, float *sums,
                            int dim, const char *cache, const size_t *offsets, const size_t *next, int num_keys) {
    const int per_word = keys_per_word(kind), words = (num_keys + per_word - 1) / per_word;
    f32x16 added[MOST_ROWS_IN_PLACE][BLOCK_VECTORS]; /* a variable length would keep it out of registers */
    for (int row = 0; row < rows; row++)
        for (int v = 0; v < vectors; v++)
            added[row][v] =
                f32x16_load(sums + row * work->call->head_dim + dim + v * LANES) * work->factors[row];
    for (int word = 0; word < words; word++) {
        u32x16 values[BLOCK_VECTORS];
        const size_t *at = offsets + word * per_word, *next_at = next + word * per_word;
        for (int i = 0; i < per_word; i++)
            fetch_ahead(cache + next_at[i] + (size_t)dim * element_size(kind),
                        (size_t)(vectors * LANES) * element_size(kind));
        load_values(kind, vectors, values, cache + at[0], cache + at[per_word - 1], dim);
        for (int row = 0; row < rows; row++) {
            u32x16 weight = u32x16_set(work->weights[row * KEYS_PER_STRIP + word]);
            for (int v = 0; v < vectors; v++) added[row][v] = dot(kind, added[row][v], weight, values[v]);
        }
    }
    for (int row = 0; row < rows; row++)
        for (int v = 0; v < vectors; v++)
            f32x16_store(sums + row * work->call->head_dim + dim + v * LANES, added[row][v]);
}

/* One KV head's rows with one strip of keys; offsets past the strip's end repeat its last key. `next` are the offsets
 * of the strip that comes after this one, perhaps another item's. */
SPECIALIZED void attend_in_place(const int kind, const int rows, attention_work *work, int head, int strip_key,
                                 int num_keys, const size_t *offsets, const size_t *next) {
    enum { VECTORS = KEYS_PER_STRIP / LANES };
    const pagoda_attention_call *call = work->call;
    size_t cache_head = (size_t)(work->item->first_head + head) * work->head_bytes;
    const char *keys = (const char *)call->key_cache + cache_head;
    const char *values = (const char *)call->value_cache + cache_head;
    const uint32_t *query = work->query + (size_t)(head * work->padded_rows * work->padded_words);
    float *sums = work->sums + (size_t)(head * work->padded_rows * call->head_dim);
    f32x16 products[MOST_ROWS_IN_PLACE][VECTORS] = {0};
    for (int v = 0; v * LANES < num_keys; v++) {
        const int half = rows > 4 ? 4 : rows;
        const size_t *at = offsets + v * LANES, *next_at = next + v * LANES;
        multiply_16_keys(kind, half, work, query, keys, at, next_at, &products[0][v], VECTORS);
        if (rows > 4) {
            const uint32_t *others = query + 4 * work->padded_words;
            multiply_16_keys(kind, rows - 4, work, others, keys, at, next_at, &products[4][v], VECTORS);
        }
    }
    for (int row = 0; row < rows; row++) {
        int index = head * work->padded_rows + row;
        work->factors[row] =
            weigh(kind, VECTORS, products[row], work->scale, visible_keys(work, row, strip_key, num_keys),
                  work->largest + index, work->totals + index * LANES, work->weights + row * KEYS_PER_STRIP);
    }
    int dim = 0;
    const int wide = rows > 4 ? 2 : 4;
    for (; dim + wide * LANES <= call->head_dim; dim += wide * LANES)
        add_values(kind, rows, wide, work, sums, dim, values, offsets, next, num_keys);
    for (; dim + 2 * LANES <= call->head_dim; dim += 2 * LANES)
        add_values(kind, rows, 2, work, sums, dim, values, offsets, next, num_keys);
    if (dim < call->head_dim) add_values(kind, rows, 1, work, sums, dim, values, offsets, next, num_keys);
}

#endif
