/* Attention of a few rows (decodes, and the few tokens that speculation verifies): limited by reading the cache.
 *
 * Keys and values are read from the cache once for all rows, without packing: a tile's keys of all KV heads, because
 * they are adjacent, and then its values. While one is read the other is prefetched: fetched earlier, it would have
 * left the second cache.
 */
#ifndef PAGODA_ATTENTION_IN_PLACE_H
#define PAGODA_ATTENTION_IN_PLACE_H

#include "attention/attention_item.h"

#if PAGODA_HALF_REGISTERS
#include "attention/attention_avx2.h"
#else
/* products[row] = the products of 16 keys with each of `rows` (at most 4) rows. `values` is where the keys' values are,
 * to be prefetched. */
SPECIALIZED void multiply_16_keys(const int kind, const int rows, const attention_work *work, const uint32_t *query,
                                  const char *keys, const char *values, const size_t *offsets,
                                  f32x16 products[][BLOCK_VECTORS]) {
    const size_t word_bytes = is_paired(kind) ? sizeof(uint32_t) : element_size(kind);
    f32x16 sums[4][4] = {0}; /* [row][i]: four lanes for each of the keys i, i + 4, i + 8 and i + 12 */
    for (int word = 0; word < work->words; word += LANES) {
#pragma GCC unroll 4 /* or the sums would not be in registers */
        for (int i = 0; i < 4; i++) {
            u32x16 words[4], columns[4];
            for (int k = 0; k < 4; k++) {
                size_t at = offsets[i + 4 * k];
                fetch_ahead(values + at + (size_t)word * word_bytes, LANES * word_bytes);
                words[k] = load_some_words(kind, keys + at, word, work->words);
            }
            transpose_quarters(words, columns);
            for (int row = 0; row < rows; row++)
                for (int k = 0; k < 4; k++) {
                    u32x16 q = repeat_4_words(query + row * work->padded_words + word + 4 * k);
                    sums[row][i] = dot(kind, sums[row][i], q, columns[k]);
                }
        }
    }
    for (int row = 0; row < rows; row++) products[row][0] = add_lanes_of_quarters(sums[row]);
}
#endif

/* The products of one KV head's rows with a tile of keys. */
SPECIALIZED void multiply_tile(const int kind, const int rows, const attention_work *work, int head, int num_keys,
                               const size_t *offsets) {
    size_t cache_head = (size_t)(work->item->first_head + head) * work->head_bytes;
    const char *keys = (const char *)work->call->key_cache + cache_head;
    const char *values = (const char *)work->call->value_cache + cache_head;
    const uint32_t *query = work->query + (size_t)(head * work->padded_rows * work->padded_words);
    f32x16(*products)[BLOCK_VECTORS] = work->products + head * work->padded_rows;
    const int half = rows > 4 ? 4 : rows;
    for (int v = 0; v * LANES < num_keys; v++) {
        f32x16(*of_keys)[BLOCK_VECTORS] = (f32x16(*)[BLOCK_VECTORS])&products[0][v];
        multiply_16_keys(kind, half, work, query, keys, values, offsets + v * LANES, of_keys);
        if (rows > 4)
            multiply_16_keys(kind, rows - 4, work, query + 4 * work->padded_words, keys, values, offsets + v * LANES,
                             of_keys + 4);
    }
}

/* Weighs the first `vectors` times 16 keys of a tile for all rows of a head. */
SPECIALIZED void weigh_rows(const int kind, const int vectors, attention_work *work, int head, int tile_key,
                            int num_keys) {
    if (work->tanh_scale > 0)
        cap_products(work->products + head * work->padded_rows, work->rows, vectors, work->tanh_scale);
    for (int row = 0; row < work->rows; row++) {
        int index = head * work->padded_rows + row;
        work->factors[row] = weigh(kind, vectors, work->products[index], work->scale,
                                   visible_keys(work, row, tile_key, num_keys), work->largest + index,
                                   work->totals + index * LANES, work->weights + row * KEYS_PER_TILE);
    }
}

#if !PAGODA_HALF_REGISTERS
/* added[row] = the weighted values of a tile, `vectors` times 16 dimensions from `dim` on, for each of `rows` rows. The
 * next tile's `keys` are prefetched. */
SPECIALIZED void weigh_values(const int kind, const int rows, const int vectors, const uint32_t *weights, int dim,
                              const char *values, const size_t *offsets, const char *keys, const size_t *next,
                              int num_keys, f32x16 added[][BLOCK_VECTORS]) {
    const int per_word = keys_per_word(kind), words = (num_keys + per_word - 1) / per_word;
    for (int word = 0; word < words; word++) {
        u32x16 columns[BLOCK_VECTORS];
        const size_t *at = offsets + word * per_word, *next_at = next + word * per_word;
        for (int i = 0; i < per_word; i++)
            fetch_ahead(keys + next_at[i] + (size_t)dim * element_size(kind),
                        (size_t)(vectors * LANES) * element_size(kind));
        load_values(kind, vectors, columns, values + at[0], values + at[per_word - 1], dim);
        for (int row = 0; row < rows; row++) {
            u32x16 weight = u32x16_set(weights[row * KEYS_PER_TILE + word]);
            for (int v = 0; v < vectors; v++) added[row][v] = dot(kind, added[row][v], weight, columns[v]);
        }
    }
}
#endif

/* Merges the weighted values of a tile into the sums of all rows, `vectors` times 16 dimensions from `dim` on. */
SPECIALIZED void add_values(const int kind, const int rows, const int vectors, const attention_work *work, float *sums,
                            int dim, const char *values, const size_t *offsets, const char *keys, const size_t *next,
                            int num_keys) {
    f32x16 added[MOST_ROWS_IN_PLACE][BLOCK_VECTORS] = {0}; /* a variable length would keep it out of registers */
    weigh_values(kind, rows, vectors, work->weights, dim, values, offsets, keys, next, num_keys, added);
    sums += dim;
    for (int row = 0; row < rows; row++, sums += work->call->value_dim)
        for (int v = 0; v < vectors; v++)
            f32x16_store(sums + v * LANES, merged(f32x16_load(sums + v * LANES), added[row][v], work->factors[row]));
}

/* Merges the weighted values of a tile into the sums of one KV head's rows. */
SPECIALIZED void add_tile(const int kind, const int rows, attention_work *work, int head, int num_keys,
                          const size_t *offsets, const size_t *next) {
    const int value_dim = work->call->value_dim, wide = rows > 4 ? 2 : 4;
    size_t cache_head = (size_t)(work->item->first_head + head) * work->head_bytes;
    const char *keys = (const char *)work->call->key_cache + cache_head;
    const char *values = (const char *)work->call->value_cache + cache_head;
    float *sums = work->sums + (size_t)(head * work->padded_rows * value_dim);
    int dim = 0;
    for (; dim + wide * LANES <= value_dim; dim += wide * LANES)
        add_values(kind, rows, wide, work, sums, dim, values, offsets, keys, next, num_keys);
    for (; dim + 2 * LANES <= value_dim; dim += 2 * LANES)
        add_values(kind, rows, 2, work, sums, dim, values, offsets, keys, next, num_keys);
    if (dim < value_dim) add_values(kind, rows, 1, work, sums, dim, values, offsets, keys, next, num_keys);
}

/* All rows with one tile of keys; offsets past the tile's end repeat its last key. `next` are the offsets of the tile
 * that comes after this one, perhaps another item's. */
SPECIALIZED void attend_in_place(const int kind, const int rows, attention_work *work, int tile_key, int num_keys,
                                 const size_t *offsets, const size_t *next) {
    for (int head = 0; head < work->item->num_heads; head++) multiply_tile(kind, rows, work, head, num_keys, offsets);
    for (int head = 0; head < work->item->num_heads; head++) {
        switch (whole_vectors(num_keys) / LANES) {
        case 4: weigh_rows(kind, 4, work, head, tile_key, num_keys); break;
        case 3: weigh_rows(kind, 3, work, head, tile_key, num_keys); break;
        case 2: weigh_rows(kind, 2, work, head, tile_key, num_keys); break;
        default: weigh_rows(kind, 1, work, head, tile_key, num_keys);
        }
        add_tile(kind, rows, work, head, num_keys, offsets, next);
    }
}

#endif
