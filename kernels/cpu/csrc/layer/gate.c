/* See gate.h. */
#include "layer/gate.h"

#include <math.h>

#include "runtime/threads.h"
#include "runtime/vector.h"

/* Arguments of pagoda_gate_attended. */
typedef struct {
    void *attended;
    const float *gate;
    int64_t stride, width;
    bool is_bf16;
} gate_call;

/* Multiplies one row. */
static void gate_row(void *args, int64_t token) {
    const gate_call *call = args;
    const float *gate = call->gate + token * call->stride;
    for (int64_t i = 0; i < call->width; i += LANES) {
        int64_t at = token * call->width + i, count = call->width - i;
        f32x16 value = load_some(call->attended, call->is_bf16, at, count);
        store_some(call->attended, call->is_bf16, at, value / (1 + f32x16_exp(-load_some(gate, false, i, count))), count);
    }
}

void pagoda_gate_attended(void *attended, int32_t is_bf16, const float *gate, int64_t stride, int32_t num_tokens,
                          int32_t width) {
    gate_call call = {attended, gate, stride, width, is_bf16};
    pagoda_for_each_row(num_tokens, (int64_t)num_tokens * width, gate_row, &call);
}

/* Arguments of pagoda_gate_sparsely. */
typedef struct {
    float *output;
    const float *gate_up;
    int64_t width, num_gates;
    float deviations;
} sparse_call;

/* The mean of one token's gates plus `deviations` times their standard deviation. */
static float cutoff_of(const sparse_call *call, const float *gate_up) {
    const float count = (float)call->num_gates;
    f32x16 sum = {0}, squares = {0};
    for (int64_t i = 0; i < call->num_gates; i += LANES) sum += f32x16_load(gate_up + 2 * i);
    const float mean = f32x16_sum(sum) / count;
    for (int64_t i = 0; i < call->num_gates; i += LANES) {
        f32x16 distance = f32x16_load(gate_up + 2 * i) - mean;
        distance = f32x16_select(lane_indices() < (int32_t)(call->num_gates - i), distance, f32x16_set(0));
        squares = f32x16_fma(distance, distance, squares);
    }
    return mean + call->deviations * sqrtf(f32x16_sum(squares) / count);
}

/* Gates one token. */
static void gate_sparse_row(void *args, int64_t token) {
    const sparse_call *call = args;
    const float *gate_up = call->gate_up + token * 2 * call->width, cutoff = cutoff_of(call, gate_up);
    for (int64_t i = 0; i < call->width; i += LANES) {
        f32x16 gate = f32x16_max(f32x16_set(0), f32x16_load(gate_up + 2 * i) - cutoff); /* a NaN stays one */
        f32x16_store(call->output + token * call->width + i, f32x16_gelu(gate) * f32x16_load(gate_up + 2 * i + LANES));
    }
}

void pagoda_gate_sparsely(float *output, const float *gate_up, int32_t num_tokens, int32_t width, int32_t num_gates,
                          float deviations) {
    sparse_call call = {output, gate_up, width, num_gates, deviations};
    pagoda_for_each_row(num_tokens, (int64_t)num_tokens * width, gate_sparse_row, &call);
}
