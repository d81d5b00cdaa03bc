/* Attention of many rows (prefills): limited by multiplication. FlashAttention-2 (Dao, 2023) on tiles of rows and keys,
 * with softmax relative to each tile's own largest score.
 *
 * A tile's keys are transposed and its values interleaved once, into memory that stays in the first cache, and then
 * multiplied with blocks of rows whose results stay in registers: scores become weights before they are ever stored.
 */
#ifndef PAGODA_ATTENTION_PACKED_H
#define PAGODA_ATTENTION_PACKED_H

#include "attention/attention_item.h"

enum { ROWS_PER_BLOCK = 6, ROWS_OF_REST = 2 };

#if PAGODA_HALF_REGISTERS
#include "attention/attention_avx2.h"
_Static_assert((int)ROWS_OF_COLUMNS == (int)ROWS_PER_BLOCK, "a block of rows has its sums in registers");

SPECIALIZED void multiply_block(const int kind, const int rows, const int vectors, f32x16 sums[][BLOCK_VECTORS],
                                const uint32_t *left, size_t left_stride, const uint32_t *right, int words) {
    (void)kind;
    add_block_of_columns(rows, vectors, sums[0], BLOCK_VECTORS, left, left_stride, 1, right, BLOCK_LANES, words);
}

SPECIALIZED void multiply_every_fourth(const int kind, const int rows, const int vectors, const attention_work *work,
                                       const uint32_t *query, const uint32_t *keys, int word, f32x16 sums[][2]) {
    (void)kind;
    for (int row = 0; row < rows; row++)
        for (int v = 0; v < vectors; v++) sums[row][v] = (f32x16){0};
    add_block_of_columns(rows, vectors, sums[0], 2, query + word, (size_t)work->padded_words, SUMS_OF_PRODUCT,
                         keys + word * KEYS_PER_TILE, SUMS_OF_PRODUCT * KEYS_PER_TILE,
                         (work->words - word + SUMS_OF_PRODUCT - 1) / SUMS_OF_PRODUCT);
}
#else
/* sums += left [rows, words] times the first `vectors` times 16 columns of right [words, 64]. */
SPECIALIZED void multiply_block(const int kind, const int rows, const int vectors, f32x16 sums[][BLOCK_VECTORS],
                                const uint32_t *left, size_t left_stride, const uint32_t *right, int words) {
    for (int word = 0; word < words; word++, right += BLOCK_LANES) {
        u32x16 columns[BLOCK_VECTORS];
        for (int v = 0; v < vectors; v++) columns[v] = u32x16_load(right + v * LANES);
        for (int row = 0; row < rows; row++) {
            u32x16 value = u32x16_set(left[(size_t)row * left_stride + (size_t)word]);
            for (int v = 0; v < vectors; v++) sums[row][v] = dot(kind, sums[row][v], value, columns[v]);
        }
    }
}

/* sums = the products of `rows` queries with `vectors` times 16 keys over every fourth word from `word` on. */
SPECIALIZED void multiply_every_fourth(const int kind, const int rows, const int vectors, const attention_work *work,
                                       const uint32_t *query, const uint32_t *keys, int word, f32x16 sums[][2]) {
    for (int row = 0; row < rows; row++)
        for (int v = 0; v < vectors; v++) sums[row][v] = (f32x16){0};
    for (; word < work->words; word += SUMS_OF_PRODUCT) {
        u32x16 columns[2];
        for (int v = 0; v < vectors; v++) columns[v] = u32x16_load(keys + word * KEYS_PER_TILE + v * LANES);
        for (int row = 0; row < rows; row++) {
            u32x16 value = u32x16_set(query[(size_t)row * (size_t)work->padded_words + (size_t)word]);
            for (int v = 0; v < vectors; v++) sums[row][v] = dot(kind, sums[row][v], value, columns[v]);
        }
    }
}
#endif

/* The products of a block of rows with 1 or 2 vectors of packed keys, from vector `first` on: SUMS_OF_PRODUCT sums one
 * after another. With 2 vectors those of a sum and of a product so far are in registers. */
SPECIALIZED void multiply_keys(const int kind, const int rows, const int first, const int vectors,
                               const attention_work *work, const uint32_t *query, f32x16 products[][BLOCK_VECTORS]) {
    f32x16 added[ROWS_PER_BLOCK][2], sums[ROWS_PER_BLOCK][2];
    const uint32_t *keys = work->keys + first * LANES;
    multiply_every_fourth(kind, rows, vectors, work, query, keys, 0, added);
    for (int word = 1; word < SUMS_OF_PRODUCT; word++) {
        multiply_every_fourth(kind, rows, vectors, work, query, keys, word, sums);
        for (int row = 0; row < rows; row++)
            for (int v = 0; v < vectors; v++) added[row][v] += sums[row][v];
    }
    for (int row = 0; row < rows; row++)
        for (int v = 0; v < vectors; v++) products[row][first + v] = added[row][v];
}

/* Weighs the first `vectors` times 16 keys of the tile for a block of rows. */
SPECIALIZED void weigh_block(const int kind, const int rows, const int vectors, attention_work *work, int head, int row,
                             int tile_key, int num_keys) {
    f32x16 products[ROWS_PER_BLOCK][BLOCK_VECTORS];
    int index = head * work->padded_rows + row;
    const uint32_t *query = work->query + (size_t)index * (size_t)work->padded_words;
    multiply_keys(kind, rows, 0, vectors < 2 ? 1 : 2, work, query, products);
    if (vectors > 2) multiply_keys(kind, rows, 2, vectors - 2, work, query, products);
    if (work->tanh_scale > 0) cap_products(products, rows, vectors, work->tanh_scale);
    for (int i = 0; i < rows; i++)
        work->factors[row + i] =
            weigh(kind, vectors, products[i], work->scale,
                  visible_keys(work, row + i, tile_key, num_keys), work->largest + index + i,
                  work->totals + (index + i) * LANES, work->weights + (row + i) * KEYS_PER_TILE);
}

/* Adds the weighted values of `words` words of keys to `vectors` times 16 dimensions of a block of rows. */
SPECIALIZED void add_block(const int kind, const int rows, const int vectors, attention_work *work, int head, int row,
                           int dim, int words) {
    size_t value_dim = (size_t)work->call->value_dim;
    float *to = work->sums + (size_t)(head * work->padded_rows + row) * value_dim + dim;
    const uint32_t *values = work->values + (size_t)dim * (KEYS_PER_TILE / keys_per_word(kind));
    f32x16 sums[ROWS_PER_BLOCK][BLOCK_VECTORS] = {0};
    multiply_block(kind, rows, vectors, sums, work->weights + row * KEYS_PER_TILE, KEYS_PER_TILE, values, words);
    for (int i = 0; i < rows; i++, to += value_dim)
        for (int v = 0; v < vectors; v++)
            f32x16_store(to + v * LANES, merged(f32x16_load(to + v * LANES), sums[i][v], work->factors[row + i]));
}

/* One function for each size of block, so that all of it lives in registers. */
#define FOR_VECTORS(function, kind, rows, vectors, ...)                \
    switch (vectors) {                                                 \
    case 4: function(kind, rows, 4, __VA_ARGS__); break;               \
    case 3: function(kind, rows, 3, __VA_ARGS__); break;               \
    case 2: function(kind, rows, 2, __VA_ARGS__); break;               \
    case 1: function(kind, rows, 1, __VA_ARGS__); break;               \
    default: break;                                                    \
    }

/* How many vectors of a tile's keys a block of rows needs: none where causality or the window hides all. */
INLINE int block_vectors(const attention_work *work, int row, int rows, int tile_key, int num_keys) {
    int last = row + rows - 1 < work->rows ? row + rows - 1 : work->rows - 1;
    key_range of_first = visible_keys(work, row, tile_key, num_keys);
    key_range of_last = visible_keys(work, last, tile_key, num_keys);
    return of_first.first >= num_keys ? 0 : whole_vectors(of_last.end) / LANES;
}

/* The size of the block of rows that begins at `row`. */
INLINE int rows_of_block(const attention_work *work, int row) {
    return row + ROWS_PER_BLOCK <= work->padded_rows ? ROWS_PER_BLOCK : ROWS_OF_REST;
}

/* Transposes a tile's keys of one head. */
SPECIALIZED void pack_keys(const int kind, attention_work *work, const char *cache, const size_t *offsets) {
    for (int word = 0; word < work->words; word += LANES)
        for (int key = 0; key < KEYS_PER_TILE; key += LANES) {
            u32x16 rows[LANES];
            for (int i = 0; i < LANES; i++)
                rows[i] = load_some_words(kind, cache + offsets[key + i], word, work->words);
            store_transposed(work->keys + (size_t)word * KEYS_PER_TILE + key, KEYS_PER_TILE, rows);
        }
}

/* Interleaves a tile's values of one head. */
SPECIALIZED void pack_values(const int kind, attention_work *work, const char *cache, const size_t *offsets) {
    const int per_word = keys_per_word(kind), words = KEYS_PER_TILE / per_word;
    for (int word = 0; word < words; word++) {
        const char *first = cache + offsets[word * per_word], *second = cache + offsets[word * per_word + per_word - 1];
        for (int dim = 0; dim < work->call->value_dim;) {
            u32x16 values[2];
            const int vectors = dim + 2 * LANES <= work->call->value_dim ? 2 : 1;
            if (vectors == 2) load_values(kind, 2, values, first, second, dim);
            else load_values(kind, 1, values, first, second, dim);
            int panel = dim / BLOCK_LANES * BLOCK_LANES;
            uint32_t *to = work->values + (size_t)panel * (size_t)words + word * BLOCK_LANES + (dim - panel);
            for (int v = 0; v < vectors; v++) memcpy(to + v * LANES, &values[v], sizeof values[v]);
            dim += vectors * LANES;
        }
    }
}

/* Prefetches a block's share of the next tile: while the block multiplies, memory is idle. */
INLINE void fetch_share(const attention_work *work, int row, const char *cache, const size_t *next, size_t bytes) {
    int first = row * KEYS_PER_TILE / work->padded_rows;
    int end = (row + rows_of_block(work, row)) * KEYS_PER_TILE / work->padded_rows;
    for (int key = first; key < end; key++) fetch_ahead(cache + next[key], bytes);
}

/* One KV head's rows with one tile of keys; offsets past the tile's end repeat its last key. `next` are those of the
 * tile that comes after this one, perhaps another item's. */
SPECIALIZED void attend_packed(const int kind, attention_work *work, int head, int tile_key, int num_keys,
                               const size_t *offsets, const size_t *next) {
    const pagoda_attention_call *call = work->call;
    size_t cache_head = (size_t)(work->item->first_head + head) * work->head_bytes;
    const char *keys = (const char *)call->key_cache + cache_head;
    const char *values = (const char *)call->value_cache + cache_head;
    pack_keys(kind, work, keys, offsets);
    pack_values(kind, work, values, offsets);
    for (int row = 0, rows; row < work->padded_rows; row += rows) {
        rows = rows_of_block(work, row);
        fetch_share(work, row, keys, next, work->head_bytes);
        int vectors = block_vectors(work, row, rows, tile_key, num_keys);
        if (rows == ROWS_PER_BLOCK)
            FOR_VECTORS(weigh_block, kind, ROWS_PER_BLOCK, vectors, work, head, row, tile_key, num_keys)
        else
            FOR_VECTORS(weigh_block, kind, ROWS_OF_REST, vectors, work, head, row, tile_key, num_keys)
    }
    for (int dim = 0; dim < call->value_dim; dim += BLOCK_LANES) {
        int left = call->value_dim - dim, dim_vectors = left < BLOCK_LANES ? left / LANES : BLOCK_VECTORS;
        for (int row = 0, rows; row < work->padded_rows; row += rows) {
            rows = rows_of_block(work, row);
            fetch_share(work, row, values + (size_t)dim * element_size(kind), next,
                        (size_t)(dim_vectors * LANES) * element_size(kind));
            int words = block_vectors(work, row, rows, tile_key, num_keys) * LANES / keys_per_word(kind);
            if (!words) continue;
            if (rows == ROWS_PER_BLOCK)
                FOR_VECTORS(add_block, kind, ROWS_PER_BLOCK, dim_vectors, work, head, row, dim, words)
            else
                FOR_VECTORS(add_block, kind, ROWS_OF_REST, dim_vectors, work, head, row, dim, words)
        }
    }
}

#endif
