/* See experts.h. The rows of a step are the pairs of a token and one of its experts, sorted by expert, so that an
 * expert's rows are adjacent and its weights are read once. All experts' products are one loop of the thread pool. */
#include "experts/experts.h"

#include <math.h>
#include <stdbool.h>

#include "runtime/integers.h"
#include "runtime/maximum.h"
#include "linear/pack_rows.h"
#include "runtime/scratch.h"
#include "runtime/threads.h"
#include "runtime/vector.h"

enum {
    MOST_TOKENS_AT_ONCE = 1024, /* scratch memory holds all experts' results for this many */
    MOST_GROUPS = 4096,
};

/* The chosen experts of some tokens, and memory for their results. */
typedef struct {
    const pagoda_experts *experts;
    float *output;
    const float *hidden, *norm;
    float eps, multiplier;
    int32_t num_tokens, is_added, num_logits;
    int32_t width;             /* features that routed experts read and write */
    float *logits;             /* [num_tokens, num_logits], of the router */
    float *weights;            /* [num_tokens, top_k] */
    int32_t *ids;              /* [num_tokens, top_k], the chosen experts */
    int32_t *rows;             /* [num_tokens, top_k], where each pair is computed */
    float *factors;            /* [num_tokens * top_k], of each row's input; only with scales_inputs */
    int32_t *tokens;           /* [num_tokens * top_k], of each row */
    int32_t *starts;           /* [num_experts + 1], each expert's first row */
    int32_t *cursors;          /* [num_experts] */
    int32_t *tiles;            /* first row of each tile of an expert's rows, and the number of rows */
    int32_t num_tiles, num_jobs;
    pagoda_linear_job *jobs;   /* [num_experts] */
    uint32_t *words;           /* packed rows: of the router's input, then of the experts' */
    float *row_scales;         /* [num_tokens * top_k] */
    pagoda_rows packed;        /* every token's row, apart, as experts read it */
    pagoda_rows latent_packed; /* the same of the latent features, if there are any */
    float *latent;             /* [num_tokens, width], of the projection before experts, then their sums */
    float *routed;             /* [num_tokens, hidden_size], of the projection after them */
    float *wide;               /* [num_tokens * top_k, intermediate_size], or of the shared expert */
    float *results;            /* [num_tokens * top_k, width] */
    float *shared;             /* [num_tokens, hidden_size] */
} batch;

static bool has_latent(const pagoda_experts *e) {
    return e->latent_in.words != NULL;
}

/* The kind of the weights that first read a token's row. */
static int32_t input_kind(const pagoda_experts *e) {
    return has_latent(e) ? e->latent_in.kind : e->gate_up.kind;
}

/* --- memory ---------------------------------------------------------------------------------------------------- */

/* Takes `bytes` from a block of memory, whole vectors of them; with a NULL block only the size counts. */
static void *take(char *block, size_t *used, int64_t bytes) {
    char *taken = block ? block + *used : NULL;
    *used += (size_t)divide_up(bytes, 64) * 64;
    return taken;
}

/* Words of a row of `width` elements, packed for whichever of the weights reads it. */
static int64_t words_of_row(const pagoda_experts *e, int64_t width) {
    const pagoda_weight *weights[] = {&e->gate_up, &e->down, &e->shared_gate_up, &e->shared_down, &e->latent_in,
                                      &e->latent_out};
    int64_t most = 0;
    for (size_t i = 0; i < sizeof weights / sizeof *weights; i++)
        most = max(most, pagoda_num_words(weights[i]->kind, (int32_t)width));
    return most;
}

/* Divides a block among the arrays of a batch, and returns the bytes that they need. */
static size_t divide_memory(batch *b, char *block) {
    const pagoda_experts *e = b->experts;
    const int64_t tokens = b->num_tokens, pairs = tokens * e->top_k, width = e->hidden_size;
    const bool has_shared = e->shared_gate_up.words != NULL;
    const int64_t shared_width = has_shared ? e->shared_down.in_features : 0;
    const int64_t latents = has_latent(e) ? tokens : 0;
    int64_t row_words = max(words_of_row(e, b->width), words_of_row(e, e->intermediate_size));
    int64_t token_words = max(words_of_row(e, width), has_shared ? words_of_row(e, shared_width) : 0);
    int64_t num_words = max(tokens * max(width, token_words), pairs * row_words);
    size_t used = 0;
    b->logits = take(block, &used, tokens * b->num_logits * 4);
    b->weights = take(block, &used, pairs * 4);
    b->ids = take(block, &used, pairs * 4);
    b->rows = take(block, &used, pairs * 4);
    b->factors = take(block, &used, e->scales_inputs ? pairs * 4 : 0);
    b->tokens = take(block, &used, pairs * 4);
    b->starts = take(block, &used, (e->num_experts + 1) * 4);
    b->cursors = take(block, &used, e->num_experts * 4);
    b->tiles = take(block, &used, (pairs / ROWS_PER_TILE + e->num_experts + 1) * 4);
    b->jobs = take(block, &used, e->num_experts * (int64_t)sizeof *b->jobs);
    b->words = take(block, &used, num_words * 4);
    b->row_scales = take(block, &used, pairs * 4);
    b->packed.num_rows = b->num_tokens;
    b->packed.words = take(block, &used, tokens * words_of_row(e, width) * 4);
    b->packed.scales = take(block, &used, tokens * 4);
    b->wide = take(block, &used, max(pairs * e->intermediate_size, tokens * shared_width) * 4);
    b->latent_packed.num_rows = b->num_tokens;
    b->latent_packed.words = take(block, &used, latents * words_of_row(e, b->width) * 4);
    b->latent_packed.scales = take(block, &used, latents * 4);
    b->latent = take(block, &used, latents * b->width * 4);
    b->routed = take(block, &used, latents * width * 4);
    b->results = take(block, &used, pairs * b->width * 4);
    b->shared = take(block, &used, has_shared ? tokens * width * 4 : 0);
    return used;
}

/* --- routing --------------------------------------------------------------------------------------------------- */

/* Computes the exponentials of some logits, and returns their sum. */
static float compute_exponentials(const float *logits, float *exponentials, int64_t padded) {
    const float largest = largest_of_row(logits, padded);
    f32x16 sums = {0};
    for (int64_t i = 0; i < padded; i += LANES) {
        f32x16 exponential = f32x16_exp(f32x16_load(logits + i) - largest);
        f32x16_store(exponentials + i, exponential);
        sums += exponential;
    }
    return f32x16_sum(sums);
}

/* Computes the sigmoids of some logits, and replaces the logits by what experts are chosen by: of sigmoids alone they
 * have the order, and differ where these are rounded to 1. */
static void compute_sigmoids(const pagoda_experts *e, float *logits, float *sigmoids) {
    const bool by_logits = !e->choice_bias && e->num_groups <= 1;
    for (int64_t i = 0; i < e->num_experts; i += LANES) {
        const int64_t count = e->num_experts - i;
        f32x16 sigmoid = 1 / (1 + f32x16_exp(-f32x16_load(logits + i)));
        f32x16_store(sigmoids + i, sigmoid);
        if (by_logits) continue;
        store_some(logits, false, i, e->choice_bias ? sigmoid + load_some(e->choice_bias, false, i, count) : sigmoid, count);
    }
}

/* The score of a group of experts, by the scores of those in it. */
static float score_of_group(const float *scores, int64_t count, bool sums_two) {
    float best = -INFINITY, second = -INFINITY;
    for (int64_t i = 0; i < count; i++) {
        if (scores[i] > best) {
            second = best;
            best = scores[i];
        } else if (scores[i] > second) {
            second = scores[i];
        }
    }
    return sums_two ? best + second : best;
}

/* Replaces what experts are chosen by with minus infinity, except in the groups with the best scores: of equal ones the
 * first. */
static void choose_groups(const pagoda_experts *e, const float *scores, float *choice) {
    const int64_t size = e->num_experts / e->num_groups;
    bool is_chosen[MOST_GROUPS] = {false};
    float of_group[MOST_GROUPS];
    for (int64_t group = 0; group < e->num_groups; group++)
        of_group[group] = score_of_group(scores + group * size, size, e->groups_sum_two);
    for (int32_t i = 0; i < e->top_groups; i++) {
        int64_t best = -1;
        for (int64_t group = 0; group < e->num_groups; group++)
            if (!is_chosen[group] && (best < 0 || of_group[group] > of_group[best])) best = group;
        is_chosen[best] = true;
    }
    for (int64_t i = 0; i < e->num_experts; i++)
        if (!is_chosen[i / size]) choice[i] = -INFINITY;
}

/* Chooses the experts of one token: of equal ones the first. */
static void choose_experts(void *args, int64_t token) {
    const batch *b = args;
    const pagoda_experts *e = b->experts;
    const int32_t top_k = e->top_k;
    const int64_t num_experts = e->num_experts, padded = divide_up(num_experts, LANES) * LANES;
    float *logits = pagoda_scratch(SCRATCH_ROW, (size_t)(2 * padded) * sizeof *logits), *scores = logits + padded;
    float *weights = b->weights + token * top_k, chosen = 0, total = 1;
    int32_t *ids = b->ids + token * top_k;
    memcpy(logits, b->logits + token * b->num_logits, (size_t)num_experts * sizeof *logits);
    for (int64_t i = num_experts; i < padded; i++) logits[i] = -INFINITY;
    if (e->is_sigmoid) compute_sigmoids(e, logits, scores);
    else total = compute_exponentials(logits, scores, padded);
    if (e->num_groups > 1) choose_groups(e, e->is_sigmoid ? logits : scores, logits);
    for (int32_t choice = 0; choice < top_k; choice++) {
        ids[choice] = first_index_of(logits, largest_of_row(logits, padded), padded);
        weights[choice] = scores[ids[choice]] / total;
        chosen += weights[choice];
        logits[ids[choice]] = -INFINITY;
    }
    const float divisor = e->normalizes_weights ? chosen + e->epsilon : 1;
    for (int32_t choice = 0; choice < top_k; choice++) {
        weights[choice] = weights[choice] / divisor * e->weight_scale;
        if (e->expert_scales) weights[choice] *= e->expert_scales[ids[choice]];
    }
}

/* Computes the router and chooses each token's experts. */
static void route(batch *b) {
    const pagoda_experts *e = b->experts;
    pagoda_rows rows = {b->words, b->row_scales, b->num_tokens};
    pagoda_pack_rows(&rows, b->hidden, false, e->router.kind, e->hidden_size,
                     e->router_norm ? e->router_norm : b->norm, b->eps);
    pagoda_linear(b->logits, b->num_logits, &rows, &e->router, PAGODA_STORE);
    pagoda_for_each_row(b->num_tokens, (int64_t)b->num_tokens * e->num_experts, choose_experts, b);
}

/* Gives each pair of a token and an expert its row, and divides each expert's rows into tiles. */
static void sort_by_expert(batch *b) {
    const pagoda_experts *e = b->experts;
    const int32_t num_pairs = b->num_tokens * e->top_k;
    for (int32_t i = 0; i <= e->num_experts; i++) b->starts[i] = 0;
    for (int32_t pair = 0; pair < num_pairs; pair++) b->starts[b->ids[pair] + 1]++;
    for (int32_t i = 0; i < e->num_experts; i++) {
        b->starts[i + 1] += b->starts[i];
        b->cursors[i] = b->starts[i];
        for (int32_t row = b->starts[i]; row < b->starts[i + 1]; row += ROWS_PER_TILE) b->tiles[b->num_tiles++] = row;
    }
    b->tiles[b->num_tiles] = num_pairs;
    for (int32_t pair = 0; pair < num_pairs; pair++) {
        int32_t row = b->cursors[b->ids[pair]]++;
        b->rows[pair] = row;
        if (e->scales_inputs) b->factors[row] = b->weights[pair];
        b->tokens[row] = pair / e->top_k;
    }
}

/* --- the experts' feed-forward ------------------------------------------------------------------------------------ */

/* Multiplies every expert's rows, which have been packed, with its part of `weights`, and with factors unless these are
 * NULL. */
static void multiply(batch *b, float *output, int64_t width, const pagoda_weight *weights, int64_t outputs,
                     const float *factors, pagoda_epilogue epilogue) {
    const pagoda_experts *e = b->experts;
    const int64_t num_words = pagoda_num_words(weights->kind, weights->in_features);
    const int64_t stride = weights->out_features / e->num_experts;
    int32_t num_jobs = 0;
    for (int64_t expert = 0; expert < e->num_experts; expert++) {
        const int64_t first = b->starts[expert];
        const int32_t num_rows = b->starts[expert + 1] - (int32_t)first;
        if (num_rows)
            b->jobs[num_jobs++] = (pagoda_linear_job){
                .output = output + first * width,
                .rows = {b->words + first * num_words, b->row_scales + first, num_rows},
                .weight = pagoda_part_of_weight(weights, expert, stride, outputs),
                .factors = factors ? factors + first : NULL,
            };
    }
    pagoda_grouped_linear(b->jobs, num_jobs, width, epilogue);
}

/* Computes what routed experts read. */
static void compute_latent(batch *b) {
    const pagoda_experts *e = b->experts;
    pagoda_rows rows = {b->words, b->row_scales, b->num_tokens};
    pagoda_gather_tiles(&rows, NULL, NULL, &b->packed, e->latent_in.kind, e->hidden_size);
    pagoda_linear(b->latent, b->width, &rows, &e->latent_in, PAGODA_STORE);
    pagoda_pack_rows_apart(&b->latent_packed, b->latent, e->gate_up.kind, b->width, NULL, 0);
}

/* Computes the chosen experts of all rows. */
static void compute_routed(batch *b) {
    const pagoda_experts *e = b->experts;
    const pagoda_rows rows = {b->words, b->row_scales, b->num_tokens * e->top_k};
    const pagoda_tiles tiles = {b->tiles, b->num_tiles};
    const int halves = e->activation == PAGODA_RELU_SQUARED ? 1 : 2;
    const pagoda_rows *inputs = has_latent(e) ? &b->latent_packed : &b->packed;
    pagoda_gather_tiles(&rows, &tiles, b->tokens, inputs, e->gate_up.kind, b->width);
    multiply(b, b->wide, e->intermediate_size, &e->gate_up, halves * (int64_t)e->intermediate_size,
             e->scales_inputs ? b->factors : NULL, pagoda_epilogue_of(e->activation));
    pagoda_pack_tiles(&rows, &tiles, b->wide, e->down.kind, e->intermediate_size);
    multiply(b, b->results, b->width, &e->down, b->width, NULL, PAGODA_STORE);
}

/* Computes the expert that every token has. */
static void compute_shared(batch *b) {
    const pagoda_experts *e = b->experts;
    const int32_t width = e->shared_down.in_features;
    pagoda_rows rows = {b->words, b->row_scales, b->num_tokens};
    if (e->shared_gate_up.kind == input_kind(e) && !e->shared_gate_up.order)
        pagoda_gather_tiles(&rows, NULL, NULL, &b->packed, e->shared_gate_up.kind, e->hidden_size);
    else
        pagoda_pack_rows_for(&rows, b->hidden, false, &e->shared_gate_up, b->norm, b->eps);
    pagoda_linear(b->wide, width, &rows, &e->shared_gate_up, pagoda_epilogue_of(e->activation));
    pagoda_pack_rows_for(&rows, b->wide, false, &e->shared_down, NULL, 0);
    pagoda_linear(b->shared, e->hidden_size, &rows, &e->shared_down, PAGODA_STORE);
}

/* Sums one token's chosen experts, from feature i on. */
static f32x16 sum_of_experts(const batch *b, int64_t token, int64_t i) {
    const int32_t top_k = b->experts->top_k;
    const int64_t width = b->width;
    f32x16 sum = {0};
    for (int32_t choice = 0; choice < top_k; choice++) {
        const int64_t pair = token * top_k + choice;
        f32x16 result = load_some(b->results + b->rows[pair] * width, false, i, width - i);
        sum = f32x16_fma(f32x16_set(b->experts->scales_inputs ? 1 : b->weights[pair]), result, sum);
    }
    return sum;
}

/* Sums one token's chosen experts in the latent features. */
static void combine_latent(void *args, int64_t token) {
    const batch *b = args;
    float *sums = b->latent + token * b->width;
    for (int64_t i = 0; i < b->width; i += LANES) store_some(sums, false, i, sum_of_experts(b, token, i), b->width - i);
}

/* Computes the routed experts' part of the output from the sums of their latent features. */
static void project_latent(batch *b) {
    const pagoda_experts *e = b->experts;
    pagoda_rows rows = {b->words, b->row_scales, b->num_tokens};
    pagoda_for_each_row(b->num_tokens, (int64_t)b->num_tokens * e->top_k * b->width, combine_latent, b);
    pagoda_pack_rows_for(&rows, b->latent, false, &e->latent_out, NULL, 0);
    pagoda_linear(b->routed, e->hidden_size, &rows, &e->latent_out, PAGODA_STORE);
}

/* Sums one token's results. */
static void combine(void *args, int64_t token) {
    const batch *b = args;
    const pagoda_experts *e = b->experts;
    const int64_t width = e->hidden_size;
    const bool has_shared = e->shared_gate_up.words != NULL;
    float gate = 1; /* of the shared expert */
    if (e->gates_shared) gate = 1 / (1 + expf(-b->logits[token * b->num_logits + e->num_experts]));
    const float *shared = b->shared + token * width;
    float *output = b->output + token * width;
    for (int64_t i = 0; i < width; i += LANES) {
        f32x16 sum = has_latent(e) ? load_some(b->routed + token * width, false, i, width - i) : sum_of_experts(b, token, i);
        if (has_shared) sum = f32x16_fma(f32x16_set(gate), load_some(shared, false, i, width - i), sum);
        sum *= b->multiplier;
        if (b->is_added) sum += load_some(output, false, i, width - i);
        store_some(output, false, i, sum, width - i);
    }
}

void pagoda_compute_experts(const pagoda_experts *experts, float *output, const float *hidden, int32_t num_tokens,
                            const float *norm, float eps, float multiplier, int32_t is_added) {
    const int64_t width = experts->hidden_size;
    for (int64_t first = 0; first < num_tokens; first += MOST_TOKENS_AT_ONCE) {
        batch b = {
            .experts = experts, .output = output + first * width, .hidden = hidden + first * width, .norm = norm,
            .eps = eps, .multiplier = multiplier, .num_tokens = (int32_t)min(num_tokens - first, MOST_TOKENS_AT_ONCE), .is_added = is_added,
            .num_logits = experts->router.out_features,
            .width = has_latent(experts) ? experts->latent_in.out_features : experts->hidden_size,
        };
        divide_memory(&b, pagoda_scratch(SCRATCH_EXPERTS, divide_memory(&b, NULL)));
        route(&b);
        sort_by_expert(&b);
        pagoda_pack_rows_apart(&b.packed, b.hidden, input_kind(experts), experts->hidden_size, norm, eps);
        if (has_latent(experts)) compute_latent(&b);
        compute_routed(&b);
        if (has_latent(experts)) project_latent(&b);
        if (experts->shared_gate_up.words) compute_shared(&b);
        pagoda_for_each_row(b.num_tokens, b.num_tokens * (experts->top_k + 1) * width, combine, &b);
    }
}
