/* What a recurrent layer's output is multiplied by: a gate, and maybe an RMSNorm of groups of elements. */
#ifndef PAGODA_GATED_NORM_H
#define PAGODA_GATED_NORM_H

#include <stdint.h>

typedef struct {
    float *rows;       /* [num_tokens, width]: replaced */
    const float *gate; /* [num_tokens, width], `stride` from one token to the next */
    const float *norm; /* [width]; NULL: there is only the gate */
    int64_t stride;
    int32_t num_tokens, width;
    int32_t group;       /* elements that are normalized together; divides the width */
    int32_t gates_first; /* the activated gate is multiplied before the norm; else after it */
    int32_t has_sigmoid; /* the gate is activated by a sigmoid; else by SiLU */
    float eps;
} pagoda_gated_norm_call;

/* Multiplies rows by an activated gate, and normalizes them before or after that. */
void pagoda_gated_norm(const pagoda_gated_norm_call *call);

#endif
