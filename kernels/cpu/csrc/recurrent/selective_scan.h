/* Mamba 2's recurrence (Dao and Gu, 2024). */
#ifndef PAGODA_SELECTIVE_SCAN_H
#define PAGODA_SELECTIVE_SCAN_H

#include "recurrent/sequences.h"

/* CScanCall in kernels/cpu/bindings.py. */
typedef struct {
    const pagoda_sequences *sequences;
    float *output;      /* [num_tokens, num_heads, head_dim] */
    const float *mixed; /* [num_tokens, x | B | C], `stride` from one token to the next; x is [num_heads, head_dim],
                         * B and C are [num_groups, state_size] each */
    const float *steps; /* [num_tokens, num_heads], `step_stride` from one token to the next */
    const float *decay; /* [num_heads], negative */
    const float *skip;  /* [num_heads] */
    float *state;       /* [slots, num_heads, head_dim, state_size] */
    int64_t stride, step_stride;
    int32_t num_heads, num_groups, head_dim, state_size;
} pagoda_scan_call;

/* For each token and head S = e^(step decay) S + step x B, output = S C + skip x, and updates the states. */
void pagoda_selective_scan(const pagoda_scan_call *call);

#endif
