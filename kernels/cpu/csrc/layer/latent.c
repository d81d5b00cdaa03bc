/* See latent.h. The matrices of the heads are computed for a few tokens at a time: a head's rows are packed one after
 * another, and the products of all heads are one loop of the thread pool. No bit depends on how many tokens that are. */
#include "layer/latent.h"

#include <stdbool.h>
#include <stddef.h>

#include "layer/rotate.h"
#include "linear/pack_rows.h"
#include "runtime/integers.h"
#include "runtime/rms_norm.h"
#include "runtime/scratch.h"
#include "runtime/threads.h"

enum { MOST_FLOATS_OF_SLICE = 1024 * 1024, MOST_TOKENS_OF_SLICE = 256 };

/* Some tokens of a step, and memory for the rows of all heads. */
typedef struct {
    const pagoda_latent *latent;
    const pagoda_latent_call *call;
    const float *queries;  /* of the step's first token */
    int64_t query_stride;
    const void *attended;
    int64_t first, count;  /* tokens of the slice */
    int64_t num_tiles;     /* of one head's rows */
    float *rows;           /* [num_heads, count, inputs] */
    float *products;       /* [count, num_heads, rank] */
    uint32_t *words;
    int32_t *tiles;        /* first row of each tile, and the end */
    pagoda_linear_job *jobs;
} slice;

/* --- memory ------------------------------------------------------------------------------------------------------ */

static void *take(char *block, size_t *used, int64_t bytes) {
    char *taken = block ? block + *used : NULL;
    *used += (size_t)divide_up(bytes, 64) * 64;
    return taken;
}

/* Divides a block among the arrays of a slice, and returns the bytes that they need. */
static size_t divide_memory(slice *s, char *block) {
    const int64_t rows = s->count * s->call->num_heads, inputs = max(s->latent->nope_dim, s->latent->rank);
    size_t used = 0;
    s->rows = take(block, &used, rows * inputs * 4);
    s->products = take(block, &used, rows * s->latent->rank * 4);
    s->words = take(block, &used, rows * inputs * 4);
    s->tiles = take(block, &used, (s->num_tiles * s->call->num_heads + 1) * 4);
    s->jobs = take(block, &used, s->call->num_heads * (int64_t)sizeof *s->jobs);
    return used;
}

/* The next tokens of a step, from `first` on. */
static slice next_slice(const pagoda_latent *latent, const pagoda_latent_call *call, int64_t first) {
    int64_t most = max(1, MOST_FLOATS_OF_SLICE / ((int64_t)call->num_heads * latent->rank));
    slice s = {.latent = latent, .call = call, .first = first};
    s.count = min(call->num_tokens - first, min(most, MOST_TOKENS_OF_SLICE));
    s.num_tiles = divide_up(s.count, ROWS_PER_TILE);
    divide_memory(&s, pagoda_scratch(SCRATCH_LATENT, divide_memory(&s, NULL)));
    return s;
}

/* --- the matrices of the heads --------------------------------------------------------------------------------- */

/* Multiplies each head's rows [count, inputs] with its matrix; head h's outputs begin at output + h * outputs. */
static void multiply_heads(slice *s, const pagoda_weight *weights, int64_t inputs, int64_t outputs, float *output) {
    const int64_t heads = s->call->num_heads, num_words = pagoda_num_words(weights->kind, (int32_t)inputs);
    int64_t num_tiles = 0;
    for (int64_t head = 0; head < heads; head++) {
        const int64_t first = head * s->count;
        for (int64_t row = 0; row < s->count; row += ROWS_PER_TILE) s->tiles[num_tiles++] = (int32_t)(first + row);
        s->jobs[head] = (pagoda_linear_job){
            .output = output + head * outputs,
            .rows = {s->words + first * num_words, NULL, (int32_t)s->count},
            .weight = pagoda_part_of_weight(weights, head, weights->out_features / heads, outputs),
        };
    }
    s->tiles[num_tiles] = (int32_t)(heads * s->count);
    const pagoda_rows rows = {s->words, NULL, (int32_t)(heads * s->count)};
    const pagoda_tiles tiles = {s->tiles, (int32_t)num_tiles};
    pagoda_pack_tiles(&rows, &tiles, s->rows, weights->kind, (int32_t)inputs);
    pagoda_grouped_linear(s->jobs, (int32_t)heads, heads * outputs, PAGODA_STORE);
}

/* --- before attention -------------------------------------------------------------------------------------------- */

/* Copies the queries' latent of one token, and stores its own latent and key. */
static void store_token(void *args, int64_t token) {
    const slice *s = args;
    const pagoda_latent *latent = s->latent;
    const pagoda_latent_call *call = s->call;
    const float *row = call->wide + token * call->stride;
    const int64_t rank = latent->rank, width = latent->query_width;
    if (latent->query.words) memcpy(call->mixed + token * width, row, (size_t)width * sizeof *row);
    const int64_t slot = call->slot_mapping[token], at = slot * (rank + latent->rope_dim);
    if (slot < 0) return;
    row += width;
    const float factor = rms_norm_factor(row, false, rank, latent->eps);
    for (int64_t i = 0; i < rank; i += LANES)
        store_some(call->cache, call->is_bf16, at + i,
                   load_some(row, false, i, rank - i) * factor * load_some(latent->latent_norm, false, i, rank - i),
                   rank - i);
    const float *angles = angles_of(call->rope, latent->rope_dim, call->positions[token]);
    rotate_row(row + rank, latent->rope_dim, NULL, 1, angles, call->cache, call->is_bf16, at + rank);
}

/* Computes all queries. */
static void compute_queries(slice *s) {
    const pagoda_latent *latent = s->latent;
    const pagoda_latent_call *call = s->call;
    s->queries = call->wide;
    s->query_stride = call->stride;
    if (!latent->query.words) return;
    pagoda_rows rows = {call->words, call->row_scales, call->num_tokens};
    pagoda_pack_rows_for(&rows, call->mixed, 0, &latent->query, latent->query_norm, latent->eps);
    s->query_stride = latent->query.out_features;
    pagoda_linear(call->wide, s->query_stride, &rows, &latent->query, PAGODA_STORE);
}

/* Divides one token's queries: the part without positions goes to the rows of each head, the other is rotated. */
static void divide_queries(void *args, int64_t index) {
    const slice *s = args;
    const pagoda_latent *latent = s->latent;
    const pagoda_latent_call *call = s->call;
    const int64_t nope = latent->nope_dim, rope = latent->rope_dim, width = latent->rank + rope, heads = call->num_heads;
    const int64_t token = s->first + index;
    const float growth = latent->growth ? latent->growth[call->positions[token]] : 1;
    const float *angles = angles_of(call->rope, rope, call->positions[token]);
    const float *query = s->queries + token * s->query_stride;
    for (int64_t head = 0; head < heads; head++, query += nope + rope) {
        float *row = s->rows + (head * s->count + index) * nope;
        for (int64_t i = 0; i < nope; i += LANES)
            store_some(row, false, i, load_some(query, false, i, nope - i) * growth, nope - i);
        rotate_row(query + nope, rope, NULL, growth, angles, call->query, call->is_bf16,
                   (token * heads + head) * width + latent->rank);
    }
}

/* Copies what multiplies latents into one token's queries. */
static void copy_products(void *args, int64_t index) {
    const slice *s = args;
    const pagoda_latent_call *call = s->call;
    const int64_t rank = s->latent->rank, width = rank + s->latent->rope_dim, heads = call->num_heads;
    for (int64_t head = 0; head < heads; head++) {
        const float *product = s->products + (index * heads + head) * rank;
        const int64_t at = ((s->first + index) * heads + head) * width;
        for (int64_t i = 0; i < rank; i += LANES)
            store_some(call->query, call->is_bf16, at + i, load_some(product, false, i, rank - i), rank - i);
    }
}

void pagoda_store_latents(const pagoda_latent *latent, const pagoda_latent_call *call) {
    slice whole = {.latent = latent, .call = call};
    const int64_t heads = call->num_heads;
    pagoda_for_each_row(call->num_tokens, call->num_tokens * call->stride, store_token, &whole);
    compute_queries(&whole);
    for (int64_t first = 0; first < call->num_tokens;) {
        slice s = next_slice(latent, call, first);
        s.queries = whole.queries;
        s.query_stride = whole.query_stride;
        pagoda_for_each_row(s.count, s.count * heads * (latent->nope_dim + latent->rope_dim), divide_queries, &s);
        multiply_heads(&s, &latent->to_latents, latent->nope_dim, latent->rank, s.products);
        pagoda_for_each_row(s.count, s.count * heads * latent->rank, copy_products, &s);
        first += s.count;
    }
}

/* --- after attention --------------------------------------------------------------------------------------------- */

/* Copies one token's weighted latents to the rows of each head. */
static void copy_attended(void *args, int64_t index) {
    const slice *s = args;
    const int64_t rank = s->latent->rank, heads = s->call->num_heads;
    for (int64_t head = 0; head < heads; head++) {
        float *row = s->rows + (head * s->count + index) * rank;
        const int64_t at = ((s->first + index) * heads + head) * rank;
        for (int64_t i = 0; i < rank; i += LANES)
            store_some(row, false, i, load_some(s->attended, s->call->is_bf16, at + i, rank - i), rank - i);
    }
}

void pagoda_values_of_latents(const pagoda_latent *latent, const pagoda_latent_call *call, const void *attended) {
    const int64_t heads = call->num_heads;
    for (int64_t first = 0; first < call->num_tokens;) {
        slice s = next_slice(latent, call, first);
        s.attended = attended;
        pagoda_for_each_row(s.count, s.count * heads * latent->rank, copy_attended, &s);
        multiply_heads(&s, &latent->to_values, latent->rank, latent->value_dim,
                       call->wide + first * heads * latent->value_dim);
        first += s.count;
    }
}
