/* See truncated_draw.h. */
#include "sampling/truncated_draw.h"

#include <float.h>

#include "runtime/maximum.h"
#include "sampling/noise.h"
#include "runtime/scratch.h"
#include "runtime/threads.h"
#include "sampling/top_k.h"

enum {
    /* How many tokens top-p looks at first, and how many times as many when these are not enough. */
    FIRST_TOKENS = 1024,
    TIMES_AS_MANY = 8,
    TOKENS_OF_PART = 2048, /* whose weights are summed first, as in exact_math.py */
};

/* Scores from here on may have a weight: e^-24 is less than 2^-34. */
static const float LOWEST_WITH_WEIGHT = -24;

/* Arguments of pagoda_truncated_draw. */
typedef struct {
    float *values;
    int64_t *tokens;
    const float *rows, *temperatures;
    const int32_t *keys;
    const pagoda_limits *limits;
    int64_t width, stride;
} truncated_draw_call;

/* Writes (row - largest) / temperature. */
static void scale_row(float *scores, const float *row, int64_t width, float largest, float temperature) {
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) /* never -0, which would come after 0 */
        f32x16_store(scores + i, (f32x16_load(row + i) - largest) / temperature + 0);
    for (; i < width; i++) scores[i] = (row[i] - largest) / temperature + 0;
}

/* e^score in units of 2^-34, rounded down. */
INLINE f32x16 weights_of(f32x16 scores) {
    f32x16 units = f32x16_exp(scores) * 0x1p34f;
    i32x16 has_fraction = units < 0x1p24f; /* floats from there on are integers */
    i32x16 whole = __builtin_convertvector(f32x16_select(has_fraction, units, (f32x16){0}), i32x16);
    return f32x16_select(has_fraction, __builtin_convertvector(whole, f32x16), units);
}

typedef double f64x8 __attribute__((vector_size(64)));
typedef float f32x8 __attribute__((vector_size(32)));

/* Adds the weights of some scores. */
INLINE void add_weights(f64x8 sums[2], f32x16 scores) {
    f32x16 weights = weights_of(scores);
    f32x8 halves[2];
    memcpy(halves, &weights, sizeof weights);
    for (int half = 0; half < 2; half++) sums[half] += __builtin_convertvector(halves[half], f64x8);
}

INLINE double sum_of(const f64x8 sums[2]) {
    f64x8 both = sums[0] + sums[1];
    double total = 0;
    for (int lane = 0; lane < LANES / 2; lane++) total += both[lane];
    return total;
}

/* The sum of the weights of all tokens of a row, as exact_math.py's total_weights rounds it: tokens are weighed
 * relative to the largest logit of their part, and parts relative to that of the row. */
static double total_weight(const float *row, int64_t width, float largest, float temperature) {
    double total = 0;
    for (int64_t first = 0; first < width; first += TOKENS_OF_PART) {
        const float *part = row + first;
        const int64_t count = width - first < TOKENS_OF_PART ? width - first : TOKENS_OF_PART;
        const float highest = largest_of_row(part, count), score = (highest - largest) / temperature;
        if (!(score >= LOWEST_WITH_WEIGHT)) continue;
        f64x8 sums[2] = {{0}, {0}};
        for (int64_t i = 0; i < count; i += LANES) {
            f32x16 x = f32x16_set(-INFINITY);
            if (i + LANES <= count) x = f32x16_load(part + i);
            else memcpy(&x, part + i, (size_t)(count - i) * sizeof *part);
            f32x16 scores = (x - highest) / temperature + 0;
            if (any_of(scores >= LOWEST_WITH_WEIGHT)) add_weights(sums, scores);
        }
        total += floor(sum_of(sums) * weights_of(f32x16_set(score))[0] * 0x1p-34);
    }
    return total;
}

/* The sum of the weights of some tokens. */
static double weight_of(const ranked *items, int64_t count) {
    f64x8 sums[2] = {{0}, {0}};
    for (int64_t i = 0; i < count; i += LANES) {
        float scores[LANES];
        for (int64_t j = 0; j < LANES; j++) scores[j] = i + j < count ? score_of(items[i + j]) : -INFINITY;
        add_weights(sums, f32x16_load(scores));
    }
    return sum_of(sums);
}

/* Moves the fewest of the highest items that have enough weight to the beginning, in any order, and returns how many.
 * Together they have enough. */
static int64_t move_enough_first(ranked *items, int64_t count, double enough) {
    int64_t low = 0, high = count - 1;
    double before = 0; /* the weight of those before `low`, which is not enough */
    while (low < high) {
        int64_t middle = pagoda_partition(items, low, high);
        double sum = before + weight_of(items + low, middle - low);
        if (sum >= enough) high = middle - 1;
        else before = sum, low = middle;
    }
    return low + 1;
}

/* Writes the tokens that top_k and top_p keep, and returns how many. Tokens with the score -inf, which can never be
 * drawn, are missing; with top_p so are those without weight, which it does not keep. */
static int64_t find_kept(ranked *found, const float *scores, const truncated_draw_call *call, int64_t index,
                         float largest) {
    const int64_t width = call->width, k = call->limits->top_k[index];
    const float p = call->limits->top_p[index];
    if (!(p < 1)) return pagoda_find_highest(found, scores, width, k, key_of(-FLT_MAX));
    const int32_t lowest = key_of(LOWEST_WITH_WEIGHT);
    if (k < width) {
        int64_t count = pagoda_find_highest(found, scores, width, k, lowest);
        return move_enough_first(found, count, (double)p * weight_of(found, count));
    }
    const float *row = call->rows + index * call->stride;
    const double enough = (double)p * total_weight(row, width, largest, call->temperatures[index]);
    for (int64_t limit = FIRST_TOKENS;; limit *= TIMES_AS_MANY) {
        int64_t count = pagoda_find_highest(found, scores, width, limit < width ? limit : width, lowest);
        if (limit >= width || weight_of(found, count) >= enough) return move_enough_first(found, count, enough);
    }
}

/* Draws a token for one row. */
static void draw_row(void *args, int64_t index) {
    const truncated_draw_call *call = args;
    const float *row = call->rows + index * call->stride;
    const float largest = largest_of_row(row, call->width), temperature = call->temperatures[index];
    float *value = call->values + index;
    int64_t *token = call->tokens + index;
    *value = NAN;
    *token = 0;
    if (!isfinite(largest)) return;
    ranked *found = pagoda_scratch(SCRATCH_TOP_K, (size_t)call->width * (sizeof *found + sizeof(float)));
    float *scores = (float *)(found + call->width);
    scale_row(scores, row, call->width, largest, temperature);
    int64_t count = find_kept(found, scores, call, index, largest);
    *value = -INFINITY;
    for (int64_t i = 0; i < count; i += LANES) {
        float logits[LANES] = {0};
        uint32_t ids[LANES] = {0};
        for (int64_t lane = 0; lane < LANES && i + lane < count; lane++) {
            ids[lane] = (uint32_t)index_of(found[i + lane]);
            logits[lane] = row[ids[lane]];
        }
        f32x16 noisy = noisy_logits(f32x16_load(logits), temperature, u32x16_load(ids), call->keys + 2 * index);
        for (int64_t lane = 0; lane < LANES && i + lane < count; lane++) {
            bool is_better = noisy[lane] > *value || (noisy[lane] == *value && ids[lane] < *token);
            if (!is_better || score_of(found[i + lane]) < call->limits->floors[index]) continue;
            *value = noisy[lane];
            *token = ids[lane];
        }
    }
}

void pagoda_truncated_draw(float *values, int64_t *tokens, const float *rows, const float *temperatures,
                           const int32_t *keys, const pagoda_limits *limits, int64_t num_rows, int64_t width,
                           int64_t stride) {
    truncated_draw_call call = {values, tokens, rows, temperatures, keys, limits, width, stride};
    pagoda_parallel_for(num_rows, draw_row, &call);
}
