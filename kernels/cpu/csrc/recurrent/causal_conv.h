/* Causal convolutions of each channel with weights of its own. */
#ifndef PAGODA_CAUSAL_CONV_H
#define PAGODA_CAUSAL_CONV_H

#include "recurrent/sequences.h"

/* CConvCall in kernels/cpu/bindings.py. */
typedef struct {
    const pagoda_sequences *sequences;
    float *inputs;       /* [num_tokens, channels], `stride` from one token to the next: replaced by the outputs */
    const float *weight; /* [width, channels]; the last row is of the token itself */
    const float *bias;   /* [channels], or NULL */
    float *state;        /* [slots, width - 1, channels]: the last inputs, the newest last */
    int64_t stride;
    int32_t num_tokens, channels, width;
    int32_t has_silu; /* whether SiLU is applied to the sums */
} pagoda_conv_call;

/* Convolves the sequences of a step in place, and updates their states. width is at most 16. */
void pagoda_causal_conv(const pagoda_conv_call *call);

#endif
