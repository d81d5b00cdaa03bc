/* The gate of attention's output (Qiu et al., 2025), and the gates of feed-forwards that drop small ones. */
#ifndef PAGODA_GATE_H
#define PAGODA_GATE_H

#include <stdint.h>

/* attended [num_tokens, width], float32 or bfloat16, times the sigmoid of a gate [num_tokens, width], which lies `stride`
 * elements apart. */
void pagoda_gate_attended(void *attended, int32_t is_bf16, const float *gate, int64_t stride, int32_t num_tokens,
                          int32_t width);

/* output [num_tokens, width] = gelu(max(gate - cut-off, 0)) * up. The panels of 16 numbers of gate_up [num_tokens, 2 *
 * width] alternate between gates and ups. A token's cut-off is `deviations` standard deviations above the mean of its
 * first num_gates gates; those that follow are padding (statistical top-k, You et al., 2025). */
void pagoda_gate_sparsely(float *output, const float *gate_up, int32_t num_tokens, int32_t width, int32_t num_gates,
                          float deviations);

#endif
