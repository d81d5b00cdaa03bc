/* The gate of attention's output (Qiu et al., 2025). */
#ifndef PAGODA_GATE_H
#define PAGODA_GATE_H

#include <stdint.h>

/* attended [num_tokens, width], float32 or bfloat16, times the sigmoid of a gate [num_tokens, width], which lies `stride`
 * elements apart. */
void pagoda_gate_attended(void *attended, int32_t is_bf16, const float *gate, int64_t stride, int32_t num_tokens,
                          int32_t width);

#endif
