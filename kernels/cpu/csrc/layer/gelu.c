/* See gelu.h. */
#include "layer/gelu.h"

#include "runtime/threads.h"
#include "runtime/vector.h"

/* Arguments of pagoda_gelu. */
typedef struct {
    void *output;
    const void *input;
    int64_t width;
    bool is_bf16;
} gelu_call;

/* x times the normal distribution's share below x, for which erfc is approximated to 1.5e-7 (Abramowitz and Stegun,
 * 1964, 7.1.26). */
INLINE f32x16 exact_gelu(f32x16 x) {
    f32x16 size = f32x16_max(x, -x), t = 1 / (1 + 0.23164189f * size); /* 0.3275911 / sqrt(2) */
    f32x16 p = f32x16_set(1.061405429f);
    p = f32x16_fma(p, t, f32x16_set(-1.453152027f));
    p = f32x16_fma(p, t, f32x16_set(1.421413741f));
    p = f32x16_fma(p, t, f32x16_set(-0.284496736f));
    p = f32x16_fma(p, t, f32x16_set(0.254829592f));
    f32x16 above = 0.5f * p * t * f32x16_exp(-0.5f * x * x); /* the share above |x| */
    f32x16 most = f32x16_select(x > 100, f32x16_set(100), x); /* infinity times 0 is none */
    return f32x16_select(x > 0, x - most * above, x * above);
}

static void gelu_row(void *args, int64_t row) {
    const gelu_call *call = args;
    for (int64_t i = 0; i < call->width; i += LANES) {
        int64_t at = row * call->width + i, count = call->width - i;
        store_some(call->output, call->is_bf16, at, exact_gelu(load_some(call->input, call->is_bf16, at, count)), count);
    }
}

void pagoda_gelu(void *output, const void *input, int32_t is_bf16, int64_t num_rows, int64_t width) {
    gelu_call call = {output, input, width, is_bf16};
    pagoda_for_each_row(num_rows, num_rows * width, gelu_row, &call);
}
