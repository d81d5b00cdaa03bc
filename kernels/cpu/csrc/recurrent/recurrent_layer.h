/* A recurrent layer between its two projections, and the first of them. */
#ifndef PAGODA_RECURRENT_LAYER_H
#define PAGODA_RECURRENT_LAYER_H

#include "linear/linear.h"
#include "recurrent/sequences.h"

enum { PAGODA_SHORT_CONV = 0, PAGODA_GATED_DELTA = 1, PAGODA_MAMBA = 2, PAGODA_KIMI_DELTA = 3 };

/* One layer's weights and sizes: CRecurrentLayer in kernels/cpu/bindings.py. The gated delta rule has num_groups heads
 * of keys, of state_size elements, and so has Kimi delta attention, where they are those of values. A short convolution
 * has one head, and no state but the convolution's. */
typedef struct {
    /* The outputs of `input`. Short convolution: the gate before it | the gate after it | inputs.
     * Gated delta rule: queries | keys | values | gate | beta of each head | step of each head.
     * Mamba: gate | inputs | keys | queries | step of each head.
     * Kimi delta attention: queries | keys | values | beta of each head | what steps | and what gates are computed of. */
    pagoda_weight input, output;
    pagoda_weight steps, gates; /* from head_dim to num_heads * head_dim elements; Kimi delta attention only */
    const float *conv_weight; /* [conv_width, channels]; the last row is of the token itself */
    const float *conv_bias;   /* [channels], or NULL */
    const float *step_bias;   /* [num_heads], Kimi delta attention: [num_heads * head_dim]; is added to the steps before
                               * their softplus */
    const float *decay;       /* [num_heads], negative, multiplies the steps */
    const float *skip;        /* [num_heads]; Mamba only */
    const float *norm;        /* [num_heads * head_dim], or NULL */
    int32_t kind, conv_width, num_heads, num_groups, head_dim, state_size;
    int32_t norm_group;  /* elements that are normalized together */
    int32_t gates_first; /* the gate is multiplied before the norm */
    int32_t has_sigmoid; /* the gate is activated by a sigmoid; else by SiLU */
    float eps, smallest_step, largest_step;
    float largest_beta; /* what their sigmoids are multiplied by; delta rules only */
} pagoda_recurrent_layer;

/* A step through one layer. */
typedef struct {
    const pagoda_sequences *sequences;
    const pagoda_rows *rows; /* the layer's inputs, packed; Kimi delta attention packs others in their place */
    float *wide;             /* [num_tokens, outputs of `input`, and of `steps` and `gates`]: scratch */
    float *mixed;            /* [num_tokens, num_heads * head_dim]: written, what `output` is to read */
    float *conv_state;       /* [slots, conv_width - 1, channels] */
    float *state;            /* [slots, num_heads, state_size, head_dim], Mamba: [..., head_dim, state_size]; or NULL */
} pagoda_recurrent_call;

/* Computes everything before the output projection, and updates the states. */
void pagoda_compute_recurrent(const pagoda_recurrent_layer *layer, const pagoda_recurrent_call *call);

#endif
