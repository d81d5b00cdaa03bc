/* See draw.h. */
#include "sampling/draw.h"

#include "runtime/maximum.h"
#include "sampling/noise.h"
#include "runtime/threads.h"

/* Arguments of pagoda_draw. */
typedef struct {
    float *values;
    int64_t *tokens;
    const float *rows, *temperatures, *floors;
    const int32_t *keys;
    int64_t width, stride;
} draw_call;

/* Draws a token for one row; with a constant `has_floors` the loop does not test it. */
INLINE void draw_row(const draw_call *call, int64_t index, bool has_floors) {
    const float *row = call->rows + index * call->stride;
    const float temperature = call->temperatures[index], floor = has_floors ? call->floors[index] : 0;
    const float largest = has_floors ? largest_of_row(row, call->width) : 0;
    const i32x16 lanes = lane_indices();
    f32x16 best = f32x16_set(-INFINITY);
    i32x16 where = lanes, is_number = ~(i32x16){0};
    for (int64_t i = 0; i < call->width; i += LANES) {
        f32x16 logits = f32x16_set(-INFINITY);
        if (i + LANES <= call->width) logits = f32x16_load(row + i);
        else memcpy(&logits, row + i, (size_t)(call->width - i) * sizeof *row);
        is_number &= logits == logits;
        i32x16 is_kept = ~(i32x16){0};
        if (has_floors) {
            is_kept = ~((logits - largest) / temperature < floor); /* also +inf, whose score is a NaN: it must win */
            if (!any_of(is_kept)) continue;
        }
        i32x16 tokens = lanes + (int32_t)i;
        f32x16 noisy = noisy_logits(logits, temperature, (u32x16)tokens, call->keys + 2 * index);
        i32x16 better = is_kept & (noisy > best);
        best = f32x16_select(better, noisy, best);
        where = (better & tokens) | (~better & where);
    }
    call->values[index] = -INFINITY;
    call->tokens[index] = 0;
    for (int lane = 0; lane < LANES; lane++) {
        bool is_first = best[lane] == call->values[index] && where[lane] < call->tokens[index];
        if (best[lane] > call->values[index] || is_first) {
            call->values[index] = best[lane];
            call->tokens[index] = where[lane];
        }
    }
    if (!all_numbers(is_number)) call->values[index] = NAN;
}

/* Draws a token for one row. */
static void draw_plain(void *args, int64_t index) { draw_row(args, index, false); }

/* The same from the tokens whose probability is not below a floor. */
static void draw_above_floor(void *args, int64_t index) { draw_row(args, index, true); }

void pagoda_draw(float *values, int64_t *tokens, const float *rows, const float *temperatures, const float *floors,
                 const int32_t *keys, int64_t num_rows, int64_t width, int64_t stride) {
    draw_call call = {values, tokens, rows, temperatures, floors, keys, width, stride};
    pagoda_parallel_for(num_rows, floors ? draw_above_floor : draw_plain, &call);
}
