/* The activation of encoders' feed-forwards. */
#ifndef PAGODA_GELU_H
#define PAGODA_GELU_H

#include <stdint.h>

/* output = gelu(input), [num_rows, width] of float32 or bfloat16; they may be the same. */
void pagoda_gelu(void *output, const void *input, int32_t is_bf16, int64_t num_rows, int64_t width);

#endif
