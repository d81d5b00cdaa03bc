/* The gated delta rule (Yang et al., 2024). */
#ifndef PAGODA_GATED_DELTA_RULE_H
#define PAGODA_GATED_DELTA_RULE_H

#include "recurrent/sequences.h"

/* CDeltaRuleCall in kernels/cpu/bindings.py. */
typedef struct {
    const pagoda_sequences *sequences;
    float *output; /* [num_tokens, num_heads, value_dim] */
    float *mixed;  /* [num_tokens, queries | keys | values], `stride` from one token to the next; queries and keys,
                    * [num_key_heads, key_dim] each, are normalized in place */
    float *decay;  /* [num_tokens, num_heads], with decays_rows [num_tokens, num_heads, key_dim]: of each row of a head's
                    * state; `decay_stride` from one token to the next: replaced by its exponential */
    const float *beta; /* [num_tokens, num_heads], `beta_stride` from one token to the next */
    float *state;      /* [slots, num_heads, key_dim, value_dim] */
    int64_t stride, decay_stride, beta_stride;
    int32_t num_tokens, num_key_heads, num_heads, key_dim, value_dim;
    int32_t decays_rows;
} pagoda_delta_rule_call;

/* For each token and head S = e^decay S, S += k (beta (v - k S)), output = q S, and updates the states. Queries and keys
 * are first divided by the root of their squares' sum plus 1e-6, and queries by the root of key_dim. */
void pagoda_gated_delta_rule(const pagoda_delta_rule_call *call);

#endif
