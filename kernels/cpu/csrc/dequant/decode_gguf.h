/* Decoding GGUF's block formats, whose scales are among the codes. */
#ifndef PAGODA_DECODE_GGUF_H
#define PAGODA_DECODE_GGUF_H

#include <stdint.h>

/* Writes the numbers of `num_blocks` blocks of ggml's type `type`, float32 or bfloat16; returns 0, and writes nothing,
 * if it is none of the types with codes. */
int32_t pagoda_decode_gguf(void *output, const uint8_t *blocks, int64_t num_blocks, int32_t type, int32_t is_bf16);

#endif
