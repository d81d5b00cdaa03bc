/* See draw.h. */
#include "draw.h"

#include "maximum.h"
#include "threads.h"

/* Arguments of pagoda_draw. */
typedef struct {
    float *values;
    int64_t *tokens;
    const float *rows, *temperatures, *floors;
    const int32_t *keys;
    int64_t width, stride;
} draw_call;

/* ln x for normal x > 0: x = 2^e m with m in [sqrt(1/2), sqrt(2)), and the polynomial of Cephes' logf (Moshier). */
INLINE f32x16 log_of(f32x16 x) {
    i32x16 bits = (i32x16)x;
    i32x16 exponent = (bits - 0x3f3504f3) >> 23;
    f32x16 m = (f32x16)(bits - (exponent << 23)) - 1, e = __builtin_convertvector(exponent, f32x16), z = m * m;
    f32x16 p = f32x16_set(7.0376836292e-2f);
    p = f32x16_fma(p, m, f32x16_set(-1.1514610310e-1f));
    p = f32x16_fma(p, m, f32x16_set(1.1676998740e-1f));
    p = f32x16_fma(p, m, f32x16_set(-1.2420140846e-1f));
    p = f32x16_fma(p, m, f32x16_set(1.4249322787e-1f));
    p = f32x16_fma(p, m, f32x16_set(-1.6668057665e-1f));
    p = f32x16_fma(p, m, f32x16_set(2.0000714765e-1f));
    p = f32x16_fma(p, m, f32x16_set(-2.4999993993e-1f));
    p = f32x16_fma(p, m, f32x16_set(3.3333331174e-1f));
    f32x16 rest = f32x16_fma(e, f32x16_set(-2.12194440e-4f), p * m * z) - 0.5f * z;
    return f32x16_fma(e, f32x16_set(0.693359375f), m + rest);
}

/* Standard Gumbel noise of 16 tokens: MurmurHash3's finaliser, keyed twice, as in noise.py. */
INLINE f32x16 gumbel(u32x16 tokens, const int32_t keys[2]) {
    u32x16 x = tokens * 0x9E3779B1u + (uint32_t)keys[0];
    x = (x ^ (x >> 16)) * 0x85EBCA6Bu + (uint32_t)keys[1];
    x = (x ^ (x >> 13)) * 0xC2B2AE35u;
    x ^= x >> 16;
    f32x16 uniform = (__builtin_convertvector((i32x16)(x >> 9), f32x16) + 0.5f) * 0x1p-23f;
    return -log_of(-log_of(uniform));
}

/* Draws a token for one row. */
static void draw_row(void *args, int64_t index) {
    const draw_call *call = args;
    const float *row = call->rows + index * call->stride;
    const float largest = largest_of_row(row, call->width), temperature = call->temperatures[index];
    const float floor = call->floors ? call->floors[index] : -INFINITY;
    const i32x16 lanes = lane_indices();
    f32x16 best = f32x16_set(-INFINITY);
    i32x16 where = lanes;
    for (int64_t i = 0; i < call->width; i += LANES) {
        f32x16 logits = f32x16_set(-INFINITY);
        if (i + LANES <= call->width) logits = f32x16_load(row + i);
        else memcpy(&logits, row + i, (size_t)(call->width - i) * sizeof *row);
        f32x16 scaled = (logits - largest) / temperature;
        i32x16 tokens = lanes + (int32_t)i;
        scaled = f32x16_select(scaled < floor, f32x16_set(-INFINITY), scaled);
        f32x16 noisy = scaled + gumbel((u32x16)tokens, call->keys + 2 * index);
        i32x16 better = noisy > best;
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
    if (largest != largest) call->values[index] = NAN;
}

void pagoda_draw(float *values, int64_t *tokens, const float *rows, const float *temperatures, const float *floors,
                 const int32_t *keys, int64_t num_rows, int64_t width, int64_t stride) {
    draw_call call = {values, tokens, rows, temperatures, floors, keys, width, stride};
    pagoda_parallel_for(num_rows, draw_row, &call);
}
