/* The inputs that layers have of their own beside the residual stream (Gemma 3n, 2025). */
#ifndef PAGODA_OWN_INPUT_H
#define PAGODA_OWN_INPUT_H

#include <stdint.h>

/* gate [num_tokens, width] = gelu(gate) * own_input [num_tokens, width], all float32. */
void pagoda_gate_own_input(float *gate, const float *own_input, int32_t num_tokens, int32_t width);

#endif
