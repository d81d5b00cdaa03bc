/* See residual.h. */
#include "layer/residual.h"

#include "runtime/rms_norm.h"
#include "runtime/threads.h"
#include "runtime/vector.h"

/* Arguments of pagoda_add_to_residual. */
typedef struct {
    float *hidden;
    const float *addend, *norm;
    int64_t width;
    float eps, multiplier, scale;
} residual_call;

/* Adds one row. */
static void add_row(void *args, int64_t index) {
    const residual_call *call = args;
    float *hidden = call->hidden + index * call->width;
    const float *addend = call->addend + index * call->width;
    float factor = call->norm ? rms_norm_factor(addend, false, call->width, call->eps) : 1;
    for (int64_t i = 0; i < call->width; i += LANES) {
        int64_t count = call->width - i;
        f32x16 x = load_some(addend, false, i, count);
        if (call->norm) x = x * factor * load_some(call->norm, false, i, count);
        store_some(hidden, false, i, (load_some(hidden, false, i, count) + x * call->multiplier) * call->scale, count);
    }
}

void pagoda_add_to_residual(float *hidden, const float *addend, int32_t num_rows, int32_t width, const float *norm,
                            float eps, float multiplier, float scale) {
    residual_call call = {hidden, addend, norm, width, eps, multiplier, scale};
    pagoda_for_each_row(num_rows, (int64_t)num_rows * width, add_row, &call);
}

/* Arguments of pagoda_sum_normed and pagoda_add_normed. */
typedef struct {
    float *sum;
    const float *other, *norm, *other_norm;
    int64_t width;
    float eps;
} normed_call;

/* Sums one row. */
static void sum_row(void *args, int64_t index) {
    const normed_call *call = args;
    float *sum = call->sum + index * call->width;
    const float *other = call->other + index * call->width;
    const float factor = rms_norm_factor(sum, false, call->width, call->eps);
    const float other_factor = rms_norm_factor(other, false, call->width, call->eps);
    for (int64_t i = 0; i < call->width; i += LANES) {
        int64_t count = call->width - i;
        f32x16 x = load_some(sum, false, i, count) * factor * load_some(call->norm, false, i, count);
        f32x16 y = load_some(other, false, i, count) * other_factor * load_some(call->other_norm, false, i, count);
        store_some(sum, false, i, x + y, count);
    }
}

void pagoda_sum_normed(float *sum, const float *other, int32_t num_rows, int32_t width, const float *norm,
                       const float *other_norm, float eps) {
    normed_call call = {sum, other, norm, other_norm, width, eps};
    pagoda_for_each_row(num_rows, (int64_t)num_rows * width, sum_row, &call);
}

/* Adds to one row. */
static void add_normed_row(void *args, int64_t index) {
    const normed_call *call = args;
    float *hidden = call->sum + index * call->width;
    const float *addend = call->other + index * call->width;
    const float factor = rms_norm_factor(hidden, false, call->width, call->eps);
    const float addend_factor = rms_norm_factor(addend, false, call->width, call->eps);
    for (int64_t i = 0; i < call->width; i += LANES) {
        int64_t count = call->width - i;
        f32x16 x = load_some(hidden, false, i, count);
        f32x16 y = load_some(addend, false, i, count) * addend_factor * load_some(call->other_norm, false, i, count);
        store_some(hidden, false, i, x + (x * factor * load_some(call->norm, false, i, count) + y), count);
    }
}

void pagoda_add_normed(float *hidden, const float *addend, int32_t num_rows, int32_t width, const float *norm,
                       const float *addend_norm, float eps) {
    normed_call call = {hidden, addend, norm, addend_norm, width, eps};
    pagoda_for_each_row(num_rows, (int64_t)num_rows * width, add_normed_row, &call);
}

/* Arguments of pagoda_cap_rows. */
typedef struct {
    float *scores;
    int64_t width;
    float softcap;
} cap_call;

/* Caps one row. */
static void cap_row(void *args, int64_t index) {
    const cap_call *call = args;
    float *scores = call->scores + index * call->width;
    for (int64_t i = 0; i < call->width; i += LANES) {
        f32x16 score = load_some(scores, false, i, call->width - i);
        store_some(scores, false, i, f32x16_tanh(score / call->softcap) * call->softcap, call->width - i);
    }
}

void pagoda_cap_rows(float *scores, int32_t num_rows, int32_t width, float softcap) {
    cap_call call = {scores, width, softcap};
    pagoda_for_each_row(num_rows, (int64_t)num_rows * width, cap_row, &call);
}
