/* See gated_norm.h. */
#include "recurrent/gated_norm.h"

#include <stddef.h>

#include "runtime/rms_norm.h"
#include "runtime/threads.h"
#include "runtime/vector.h"

/* Multiplies a row by its activated gate. */
static void multiply_by_gate(const pagoda_gated_norm_call *call, float *row, const float *gate) {
    const int64_t width = call->width;
    for (int64_t i = 0; i < width; i += LANES) {
        f32x16 x = load_some(gate, false, i, width - i), factor = call->has_sigmoid ? f32x16_set(1) : x;
        store_some(row, false, i, load_some(row, false, i, width - i) * (factor / (1 + f32x16_exp(-x))), width - i);
    }
}

/* Divides a group by its root mean square and multiplies it by the norm's weights. */
static void normalize(float *row, const float *norm, int64_t width, float eps) {
    float factor = rms_norm_factor(row, false, width, eps);
    for (int64_t i = 0; i < width; i += LANES) {
        f32x16 x = load_some(row, false, i, width - i) * factor;
        store_some(row, false, i, x * load_some(norm, false, i, width - i), width - i);
    }
}

/* Computes one token. */
static void gate_token(void *args, int64_t token) {
    const pagoda_gated_norm_call *call = args;
    float *row = call->rows + token * call->width;
    const float *gate = call->gate + token * call->stride;
    if (!call->norm || call->gates_first) multiply_by_gate(call, row, gate);
    if (!call->norm) return;
    for (int64_t i = 0; i < call->width; i += call->group) normalize(row + i, call->norm + i, call->group, call->eps);
    if (!call->gates_first) multiply_by_gate(call, row, gate);
}

void pagoda_gated_norm(const pagoda_gated_norm_call *call) {
    pagoda_for_each_row(call->num_tokens, (int64_t)call->num_tokens * call->width, gate_token, (void *)call);
}
