/* See gate.h. */
#include "layer/gate.h"

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
