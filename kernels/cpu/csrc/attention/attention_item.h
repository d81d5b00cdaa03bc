/* An item: the part of a call that one thread computes, some queries of a sequence, some KV heads, a span of keys. */
#ifndef PAGODA_ATTENTION_ITEM_H
#define PAGODA_ATTENTION_ITEM_H

#include "attention/attention.h"
#include "attention/attention_words.h"

/* The queries that share a KV head are its rows: query by query, and of each the heads of the group. */
typedef struct {
    const int32_t *block_table;
    int64_t result;         /* where the rows' unfinished results go, in floats; -1: the item has all of its keys */
    int64_t result_stride;  /* from a tile's results to the next one's; 0: all tiles are merged here */
    int32_t first_token;   /* row of call->query and call->output */
    int32_t num_queries;
    int32_t first_position; /* of the first query in its sequence */
    int32_t seq_len;        /* of the sequence */
    int32_t first_head, num_heads; /* KV heads */
    int32_t first_key, end_key; /* tiles begin at multiples of KEYS_PER_TILE, even where keys before are not read */
    int32_t first_unit, num_units; /* whose rows these are, in order: several if they share these keys */
} attention_item;

enum {
    LARGEST_VALUE_DIM = 512,
    KEYS_PER_TILE = 64,
    MOST_ROWS = 256, /* of an item: its sums, 128 KiB at 128 dimensions, stay in L2 */
    MOST_ROWS_IN_PLACE = 8,
    BLOCK_VECTORS = 4,   /* that one row of a block has in registers */
    BLOCK_LANES = BLOCK_VECTORS * LANES,
};

/* Where the tile that holds a key begins. */
INLINE int32_t tile_of(int32_t key) { return key / KEYS_PER_TILE * KEYS_PER_TILE; }

/* The first key that a query at `position` sees. */
INLINE int32_t first_key_of(const pagoda_attention_call *call, int32_t position) {
    if (call->chunk) return position / call->chunk * call->chunk;
    return call->sliding_window && position >= call->sliding_window ? position - call->sliding_window + 1 : 0;
}

/* The key after the last that a query at `position` sees. */
INLINE int32_t end_key_of(const pagoda_attention_call *call, int32_t position, int32_t seq_len) {
    return call->right < seq_len - position ? position + call->right + 1 : seq_len;
}

/* What a row's sums so far, and those of the next tile, are multiplied by before they are added: each is relative to
 * the largest score of its own keys. */
typedef struct {
    float so_far, tile;
} merge_factors;

/* The factors for these largest scores; minus infinity: no key was visible. */
INLINE merge_factors factors_of(float so_far, float tile) {
    if (tile > so_far) return (merge_factors){exp2_of(f32x16_set(so_far - tile))[0], 1.0f};
    if (tile < so_far) return (merge_factors){1.0f, exp2_of(f32x16_set(tile - so_far))[0]};
    return (merge_factors){1.0f, 1.0f};
}

/* Sums so far and those of the next tile. */
INLINE f32x16 merged(f32x16 so_far, f32x16 tile, merge_factors factors) {
    return f32x16_fma(tile, f32x16_set(factors.tile), so_far * factors.so_far);
}

/* A thread's state while it computes an item. Words and sums have one line per row, and all rows of a KV head lie
 * together. */
typedef struct {
    const pagoda_attention_call *call;
    const attention_item *item;
    int rows, padded_rows; /* of one KV head */
    int query_rows;        /* of one KV head, padded as `query` is */
    int words, padded_words; /* of one row */
    size_t token_bytes, head_bytes; /* of the cache */
    float scale;           /* of a product, or its tanh; makes it a power of 2, which is cheaper than one of e */
    float tanh_scale;      /* of a product before the tanh of a soft-cap; 0: there is none */
    uint32_t *query;       /* [num_heads, query_rows, padded_words]; AMX's are transposed by pack_queries */
    float *sums;           /* [num_heads, padded_rows, value_dim]: weights times values */
    float *totals;         /* [num_heads, padded_rows, 16]: of weights; their sum is the softmax's denominator. With AMX
                            * only that, [num_heads, padded_rows] */
    float *largest;        /* [num_heads, padded_rows]: score so far, in powers of 2 */
    f32x16 (*products)[BLOCK_VECTORS]; /* [num_heads, padded_rows, BLOCK_VECTORS]: of a tile; of few rows only */
    merge_factors *factors; /* [padded_rows]: of the current tile */
    int32_t *first_keys;   /* [padded_rows]: the first that each row sees */
    int32_t *end_keys;     /* [padded_rows]: after the last one */
    uint32_t *weights;     /* [padded_rows, KEYS_PER_TILE words at most] */
    uint32_t *keys;        /* [padded_words, KEYS_PER_TILE]: a tile's keys, transposed */
    uint32_t *values;      /* [value_dim / 64, words of keys, 64]: a tile's values, interleaved */
} attention_work;

/* Prefetches bytes of the cache, as the processor cannot predict block tables. Callers do this little by little: a
 * burst would fill its queue of misses and stall it. */
INLINE void fetch_ahead(const char *from, size_t bytes) {
    for (size_t line = 0; line < bytes; line += 64) __builtin_prefetch(from + line, 0, 2);
}

/* The keys of a tile that a row sees: first <= index < end. */
typedef struct {
    int first, end;
} key_range;

/* The keys that a row sees, of `num_keys` from tile_key on. */
INLINE key_range visible_keys(const attention_work *work, int row, int tile_key, int num_keys) {
    int32_t first = work->first_keys[row] - tile_key, end = work->end_keys[row] - tile_key; /* indices in the tile */
    key_range range = {first < 0 ? 0 : first > num_keys ? num_keys : first, end < 0 ? 0 : end > num_keys ? num_keys : end};
    return range;
}

/* Replaces the products of `rows` rows with `vectors` times 16 keys by the tanh that a soft-cap scales. Not inlined:
 * without a soft-cap the loops around it would be slower. */
static __attribute__((noinline, unused)) void cap_products(f32x16 (*products)[BLOCK_VECTORS], int rows, int vectors,
                                                           float scale) {
    for (int row = 0; row < rows; row++)
        for (int v = 0; v < vectors; v++) products[row][v] = f32x16_tanh(products[row][v] * scale);
}

/* Softmax over the first `vectors` times 16 keys of a tile, for one row: turns the products into weights relative to
 * the tile's largest score, takes them into account in the row's largest score and total, and returns the factors for
 * its sums. */
SPECIALIZED merge_factors weigh(const int kind, const int vectors, const f32x16 *products, float scale,
                                key_range visible, float *largest, float *total, uint32_t *weights) {
    const f32x16 nothing = f32x16_set(-INFINITY);
    const i32x16 lane = lane_indices();
    f32x16 scores[BLOCK_VECTORS + 1], most = nothing, sum = {0};
    for (int v = 0; v < vectors; v++) scores[v] = products[v] * scale;
    if (visible.first > 0 || visible.end < vectors * LANES)
        for (int v = 0; v < vectors; v++) {
            i32x16 key = lane + v * LANES;
            scores[v] = f32x16_select((key >= visible.first) & (key < visible.end), scores[v], nothing);
        }
    for (int v = 0; v < vectors; v++) most = f32x16_max(most, scores[v]);
    float of_tile = f32x16_largest(most), relative_to = of_tile == -INFINITY ? 0.0f : of_tile;
    for (int v = 0; v < vectors; v++) {
        scores[v] = exp2_of(scores[v] - relative_to);
        sum += scores[v];
    }
    merge_factors factors = factors_of(*largest, of_tile);
    f32x16_store(total, merged(f32x16_load(total), sum, factors));
    if (of_tile > *largest) *largest = of_tile;
    scores[vectors] = (f32x16){0}; /* an odd vector's pair */
    for (int v = 0; v < vectors; weights += LANES) v += store_weights(kind, weights, scores + v);
    return factors;
}

#endif
