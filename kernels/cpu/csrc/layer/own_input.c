/* See own_input.h. */
#include "layer/own_input.h"

#include "runtime/threads.h"
#include "runtime/vector.h"

/* Arguments of pagoda_gate_own_input. */
typedef struct {
    float *gate;
    const float *own_input;
    int64_t width;
} own_input_call;

/* Gates one row. */
static void gate_row(void *args, int64_t token) {
    const own_input_call *call = args;
    for (int64_t i = 0; i < call->width; i += LANES) {
        int64_t at = token * call->width + i, count = call->width - i;
        f32x16 gate = load_some(call->gate, false, at, count), input = load_some(call->own_input, false, at, count);
        store_some(call->gate, false, at, f32x16_gelu(gate) * input, count);
    }
}

void pagoda_gate_own_input(float *gate, const float *own_input, int32_t num_tokens, int32_t width) {
    own_input_call call = {gate, own_input, width};
    pagoda_for_each_row(num_tokens, (int64_t)num_tokens * width, gate_row, &call);
}
