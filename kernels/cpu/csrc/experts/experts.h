/* Mixture of experts: each token is computed by the few experts that a router chooses for it (Shazeer et al., 2017). */
#ifndef PAGODA_EXPERTS_H
#define PAGODA_EXPERTS_H

#include <stdint.h>

#include "linear/linear.h"

/* One layer's experts: CExperts in kernels/cpu/bindings.py. The weights of all experts are one matrix, in which each
 * expert's outputs begin at a multiple of 64; gate_up's panels alternate between the gate's and up's, or without a gate
 * they are all up's. Between the latent projections, if there are any, routed experts read and write latent_in's
 * outputs instead of hidden_size features. */
typedef struct {
    pagoda_weight router;         /* float32; with gates_shared the last output is the logit of the shared expert's gate */
    pagoda_weight gate_up, down;  /* of num_experts experts */
    pagoda_weight shared_gate_up; /* of the expert that computes every token; without one its words are NULL */
    pagoda_weight shared_down;
    pagoda_weight latent_in, latent_out; /* before and after all routed experts; without them their words are NULL */
    const float *router_norm;     /* [hidden_size], of the router's input; NULL: it reads what the experts read */
    const float *expert_scales;   /* [num_experts], of each one's weight once it is chosen; or NULL */
    const float *choice_bias;     /* [num_experts], is added to the scores for the choice alone; or NULL */
    int32_t num_experts, top_k, hidden_size;
    int32_t intermediate_size;  /* of an expert; a multiple of 32, without a gate of 64: padded with zeros */
    int32_t normalizes_weights; /* the chosen experts' scores are divided by their sum and epsilon */
    int32_t is_sigmoid;         /* scores are sigmoids of the router's logits; else their softmax */
    int32_t activation;         /* of an expert: PAGODA_SILU, PAGODA_GELU; PAGODA_RELU_SQUARED has no gate */
    int32_t num_groups, top_groups; /* equally many experts are a group, of which a token first chooses the best; 1: all */
    int32_t groups_sum_two;     /* a group's score is the sum of its two best experts'; else the best one's */
    int32_t gates_shared;       /* the sigmoid of a logit multiplies the shared expert */
    int32_t scales_inputs;      /* the weights multiply what the chosen experts read; else what they return */
    float epsilon, weight_scale; /* weight_scale: of the chosen experts' weights */
} pagoda_experts;

/* Computes experts(norm(hidden)) of rows [num_tokens, hidden_size], times a multiplier, and stores it in output, or
 * adds it with is_added. A token gets the same bits whatever the other tokens are: its experts' outputs are summed in
 * the order of their probabilities. `output` may be `hidden`. */
void pagoda_compute_experts(const pagoda_experts *experts, float *output, const float *hidden, int32_t num_tokens,
                            const float *norm, float eps, float multiplier, int32_t is_added);

#endif
