/* See indexer.h. */
#include "layer/indexer.h"

#include <math.h>
#include <stdbool.h>
#include <stddef.h>

#include "layer/rotate.h"
#include "linear/pack_rows.h"
#include "runtime/integers.h"
#include "runtime/scratch.h"
#include "runtime/threads.h"
#include "runtime/vector.h"
#include "sampling/top_k.h"

enum { TOKENS_AT_ONCE = 256 };

/* Some tokens of a step, and what was computed of them. */
typedef struct {
    const pagoda_indexer *indexer;
    const pagoda_indexer_call *call;
    int64_t first;  /* token */
    float *keys;    /* [num_tokens, head_dim] */
    float *queries; /* [tokens, num_heads, head_dim], from the first token on */
    float *weights; /* [tokens, num_heads], likewise */
} choice;

/* --- keys -------------------------------------------------------------------------------------------------------- */

/* Replaces a row by its LayerNorm (Ba et al., 2016). */
static void normalize(float *row, const pagoda_indexer *indexer) {
    const int64_t width = indexer->head_dim;
    f32x16 sums = {0}, squares = {0};
    for (int64_t i = 0; i < width; i += LANES) sums += load_some(row, false, i, width - i);
    const float mean = f32x16_sum(sums) / (float)width;
    for (int64_t i = 0; i < width; i += LANES)
        store_some(row, false, i, load_some(row, false, i, width - i) - mean, width - i);
    for (int64_t i = 0; i < width; i += LANES) {
        f32x16 x = load_some(row, false, i, width - i);
        squares = f32x16_fma(x, x, squares);
    }
    const float factor = 1 / sqrtf(f32x16_sum(squares) / (float)width + indexer->eps);
    for (int64_t i = 0; i < width; i += LANES)
        store_some(row, false, i,
                   load_some(row, false, i, width - i) * factor * load_some(indexer->key_norm, false, i, width - i) +
                       load_some(indexer->key_bias, false, i, width - i),
                   width - i);
}

/* Stores the key of one token. */
static void store_key(void *args, int64_t token) {
    const choice *c = args;
    const pagoda_indexer_call *call = c->call;
    const int64_t width = c->indexer->head_dim, slot = call->slot_mapping[token], at = slot * width;
    float *row = c->keys + token * width;
    if (slot < 0) return;
    const float *angles = angles_of(call->rope, call->rope_dim, call->positions[token]);
    normalize(row, c->indexer);
    rotate_row(row, call->rope_dim, NULL, 1, angles, call->cache, call->is_bf16, at);
    for (int64_t i = call->rope_dim; i < width; i += LANES)
        store_some(call->cache, call->is_bf16, at + i, load_some(row, false, i, width - i), width - i);
}

void pagoda_store_index_keys(const pagoda_indexer *indexer, const pagoda_indexer_call *call) {
    const int64_t elements = (int64_t)call->num_tokens * indexer->head_dim;
    choice c = {.indexer = indexer, .call = call};
    pagoda_rows rows = {call->words, call->row_scales, call->num_tokens};
    c.keys = pagoda_scratch(SCRATCH_INDEXER, (size_t)elements * sizeof *c.keys);
    pagoda_pack_rows_for(&rows, call->hidden, 0, &indexer->key, call->input_norm, call->input_eps);
    pagoda_linear(c.keys, indexer->head_dim, &rows, &indexer->key, PAGODA_STORE);
    pagoda_for_each_row(call->num_tokens, elements, store_key, &c);
}

/* --- the choice -------------------------------------------------------------------------------------------------- */

/* The sequence of a token. */
static int32_t sequence_of(const pagoda_indexer_call *call, int32_t token) {
    int32_t low = 0, high = call->num_seqs - 1;
    while (low < high) {
        const int32_t middle = (low + high + 1) / 2;
        if (call->cu_seqlens_q[middle] <= token) low = middle;
        else high = middle - 1;
    }
    return low;
}

/* The slot of a position of a sequence. */
static int32_t slot_of(const pagoda_indexer_call *call, const int32_t *block_table, int64_t position) {
    return block_table[position / call->block_size] * call->block_size + (int32_t)(position % call->block_size);
}

/* The score of a key, float32 or bfloat16. */
static float score(const pagoda_indexer *indexer, const float *query, const float *weights, const void *cache,
                   bool is_bf16, int64_t at) {
    const int64_t width = indexer->head_dim;
    const float scale = 1 / sqrtf((float)width);
    float total = 0;
    for (int64_t head = 0; head < indexer->num_heads; head++, query += width) {
        f32x16 sums = {0};
        for (int64_t i = 0; i < width; i += LANES)
            sums = f32x16_fma(load_some(query, false, i, width - i), load_some(cache, is_bf16, at + i, width - i), sums);
        const float product = f32x16_sum(sums) * scale;
        if (product > 0) total += weights[head] * product;
    }
    return total;
}

/* Chooses the slots of one token. */
static void choose(void *args, int64_t index) {
    const choice *c = args;
    const pagoda_indexer *indexer = c->indexer;
    const pagoda_indexer_call *call = c->call;
    const int64_t token = c->first + index, width = indexer->head_dim, heads = indexer->num_heads;
    const int32_t sequence = sequence_of(call, (int32_t)token);
    const int64_t num_visible = call->seq_lens[sequence] - (call->cu_seqlens_q[sequence + 1] - 1 - token);
    const int64_t count = min(num_visible, indexer->top_k);
    const int32_t *table = call->block_tables + (int64_t)sequence * call->max_blocks;
    int32_t *chosen = call->chosen + token * indexer->top_k;
    call->num_chosen[token] = (int32_t)count;
    if (num_visible <= indexer->top_k) {
        for (int64_t i = 0; i < count; i++) chosen[i] = slot_of(call, table, i);
        return;
    }
    const float *angles = angles_of(call->rope, call->rope_dim, call->positions[token]);
    float *query = c->queries + index * heads * width;
    for (int64_t head = 0; head < heads; head++)
        rotate_row(query + head * width, call->rope_dim, NULL, 1, angles, query, false, head * width);
    float *scores = pagoda_scratch(SCRATCH_ROW, (size_t)num_visible * (sizeof *scores + 1));
    bool *is_chosen = (bool *)(scores + num_visible);
    for (int64_t i = 0; i < num_visible; i++) {
        scores[i] = score(indexer, query, c->weights + index * heads, call->cache, call->is_bf16,
                          slot_of(call, table, i) * width);
        is_chosen[i] = false;
    }
    ranked *found = pagoda_scratch(SCRATCH_TOP_K, (size_t)num_visible * sizeof *found);
    pagoda_find_highest(found, scores, num_visible, count, INT32_MIN);
    for (int64_t i = 0; i < count; i++) is_chosen[index_of(found[i])] = true;
    for (int64_t i = 0; i < num_visible; i++)
        if (is_chosen[i]) *chosen++ = slot_of(call, table, i);
}

void pagoda_choose_tokens(const pagoda_indexer *indexer, const pagoda_indexer_call *call) {
    const int64_t outputs = indexer->query.out_features, hidden_size = indexer->key.in_features;
    const int64_t most = min(call->num_tokens, TOKENS_AT_ONCE);
    float *memory = pagoda_scratch(SCRATCH_INDEXER, (size_t)(most * (outputs + indexer->num_heads)) * sizeof *memory);
    for (int64_t first = 0; first < call->num_tokens; first += most) {
        const int64_t count = min(most, call->num_tokens - first);
        choice c = {.indexer = indexer, .call = call, .first = first, .queries = memory,
                    .weights = memory + most * outputs};
        pagoda_rows rows = {call->words, call->row_scales, (int32_t)count};
        pagoda_pack_rows_for(&rows, call->query_latent + first * indexer->query.in_features, 0, &indexer->query,
                             call->query_norm, call->query_eps);
        pagoda_linear(c.queries, outputs, &rows, &indexer->query, PAGODA_STORE);
        pagoda_pack_rows_for(&rows, call->hidden + first * hidden_size, 0, &indexer->head_weights, call->input_norm,
                             call->input_eps);
        pagoda_linear(c.weights, indexer->num_heads, &rows, &indexer->head_weights, PAGODA_STORE);
        pagoda_for_each_row(count, count * outputs * LANES, choose, &c);
    }
}
