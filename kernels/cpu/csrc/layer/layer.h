/* Decoder layers: all of them in one call, or for tensor-parallel ranks each in two halves, between which the ranks sum.
 *
 * The first half mixes tokens, by attention, by a recurrent layer, or by both side by side; the second one is a
 * feed-forward. A layer has at least one of them.
 *
 * `hidden`, the residual stream, is float32. The caller's scratch buffers hold what a step of num_tokens tokens needs;
 * attention and packing have memory of their own, see scratch.h.
 */
#ifndef PAGODA_LAYER_H
#define PAGODA_LAYER_H

#include <stdint.h>

#include "experts/experts.h"
#include "layer/altup.h"
#include "layer/latent.h"
#include "linear/linear.h"
#include "recurrent/recurrent_layer.h"

/* One layer's weights and sizes: CLayer in kernels/cpu/bindings.py. */
typedef struct {
    pagoda_weight qkv;        /* outputs: gate_width of the gate of attention's output, then queries, keys, values;
                               * only queries if the layer reads the cache of another one */
    pagoda_weight output;
    pagoda_weight gate_up;    /* panels alternate between the gate's and up's; without a gate they are all up's */
    pagoda_weight down;
    pagoda_weight own_gate;       /* own_width outputs, of the gate of the layer's own input */
    pagoda_weight own_projection; /* reads own_width numbers */
    pagoda_weight laurel_left, laurel_right; /* of a branch beside attention, if it has a norm */
    const float *input_norm;                  /* [hidden_size], of the first half's input, or NULL */
    const float *post_attention_norm;         /* [hidden_size], of the feed-forward's input, or NULL; beside experts
                                               * of the dense one's */
    const float *attention_output_norm;       /* [hidden_size], or NULL */
    const float *mlp_output_norm;             /* [hidden_size], or NULL */
    const float *experts_norm;                /* [hidden_size], of experts' input, beside a dense feed-forward only */
    const float *dense_output_norm, *experts_output_norm; /* [hidden_size], likewise, of each output before their sum */
    const float *own_output_norm;             /* [hidden_size], of what the own input adds */
    const float *laurel_norm;                 /* [hidden_size], of the branch; NULL: there is none */
    const float *query_norm;                  /* [head_dim], or with norms_all_heads of all heads; or NULL */
    const float *key_norm;
    const float *rope;                        /* [positions, 2, head_dim / 2]; NULL: no position embedding */
    const float *growth;                      /* [positions], factors of queries; or NULL. Those of latents are theirs */
    const pagoda_experts *experts;            /* NULL: the feed-forward is dense, gate_up and down. With an
                                               * intermediate_size both are computed, side by side. Experts alone
                                               * have neither an output norm nor an output scale */
    const pagoda_latent *latent;              /* NULL: the cache has keys and values. Else qkv gives queries, or what
                                               * they are computed from, and latents; head_dim is that of the cache */
    const pagoda_recurrent_layer *recurrent;  /* NULL: tokens are mixed by attention alone */
    const pagoda_altup *altup;                /* NULL: there is one residual stream */
    int32_t num_heads, num_kv_heads, head_dim; /* no heads: there is no attention */
    int32_t gate_width;        /* num_heads * head_dim if sigmoids of a gate multiply attention's output; else 0 */
    int32_t hidden_size;
    int32_t intermediate_size; /* a multiple of 16: padded with zeros; 0 without experts: there is no feed-forward */
    int32_t num_gates;         /* of the feed-forward, without padding, if it is 0 below their cut-off; 0: all count */
    int32_t own_width, own_index; /* of the layer's own input, and where it is in the step's; 0: there is none */
    int32_t sliding_window;    /* 0: none */
    int32_t chunk;             /* that a query's keys are in; 0: none */
    int32_t is_bf16;           /* the KV cache; else float32 */
    int32_t norms_all_heads;   /* query_norm and key_norm are over a token's heads together; else over each head */
    int32_t norms_values;      /* values are divided by the root mean square of their head */
    int32_t activation;        /* of the feed-forward: PAGODA_SILU, PAGODA_GELU; PAGODA_RELU_SQUARED has no gate */
    float eps, scale;
    float softcap;             /* of attention's scores; 0: none */
    float residual_multiplier; /* of what is added to the residual stream */
    float gate_cutoff;         /* of gates, see pagoda_gate_sparsely */
    float attention_output_scale; /* of the residual stream after attention */
    float output_scale;        /* of the residual stream after the feed-forward */
    float own_output_scale;    /* of the residual stream after the own input */
} pagoda_layer;

/* One step's batch and scratch memory: CStep in kernels/cpu/bindings.py. */
typedef struct {
    float *hidden;  /* [num_tokens, hidden_size]; with several streams of the active one */
    float *streams; /* [num_streams, num_tokens, hidden_size]; NULL: there is one */
    float *addend;  /* [num_tokens, hidden_size]: takes what tensor-parallel ranks must sum; NULL: hidden takes it. Of
                     * layers with experts beside a dense feed-forward twice as much, for the experts' outputs */
    const int64_t *positions;
    const int32_t *cu_seqlens_q;
    const int32_t *seq_lens;
    int32_t num_tokens, num_seqs, max_blocks, block_size;
    int32_t most_chosen;         /* columns of `chosen` */
    int32_t *chosen;             /* [num_tokens, most_chosen], the slots that tokens attend to in sparse latent
                                  * attention; NULL: all, because there are no more */
    int32_t *num_chosen;         /* [num_tokens] */
    const int32_t *token_starts; /* 0, 1, ... num_tokens */
    const pagoda_sequences *sequences; /* of recurrent layers; NULL: there are none */
    const float *own_inputs; /* of each layer [num_tokens, own_width], one after another; NULL: there are none */
    const float *mixer_input;  /* [num_tokens, inputs of qkv], what attention reads in place of norm(hidden); NULL */
    const int32_t *aux_layers; /* [num_aux], ascending: pagoda_layers copies the hidden states before each of them */
    float *aux_states;         /* [num_tokens, num_aux, hidden_size] */
    int32_t num_aux;           /* at most one more than there are layers; 0: none are copied */
    /* Scratch. */
    uint32_t *words;   /* [num_tokens, the widest row's words] */
    float *row_scales; /* [num_tokens] */
    float *wide;       /* [num_tokens, the widest linear's outputs] */
    void *query;       /* [num_tokens, num_heads, head_dim], the cache's type */
    void *attended;
    float *mixed;      /* [num_tokens, the widest recurrent layer's heads], or hidden_size of experts beside others, or
                        * intermediate_size of feed-forwards with cut-offs */
} pagoda_step;

/* What a layer caches: CLayerCache in kernels/cpu/bindings.py. NULL: it has no such cache. */
typedef struct {
    void *keys, *values;
    const int64_t *slot_mapping; /* of the step's tokens; NULL: another layer writes these keys and values */
    const int32_t *block_tables;
    void *index_keys;            /* [slots, the indexer's head_dim] */
    float *conv_state, *state; /* as pagoda_recurrent_call has them */
} pagoda_layer_cache;

/* hidden += output(attention(qkv(norm(hidden)))), and stores the step's keys and values before the attention. With an
 * output norm that is first applied to what is added, and so is the multiplier. A recurrent layer takes the place of
 * attention, or its output is added too. */
void pagoda_mixer_half(const pagoda_layer *layer, const pagoda_step *step, const pagoda_layer_cache *cache);

/* hidden += down(activation(gate(norm(hidden))) * up(norm(hidden))), likewise; without a gate, down(activation(up(...))).
 * Experts are computed instead, or beside it. */
void pagoda_mlp_half(const pagoda_layer *layer, const pagoda_step *step);

/* Adds what a dense feed-forward and experts side by side have written, [num_tokens, hidden_size] each, to the hidden
 * states: hidden = scale * (hidden + multiplier * norm(norm(dense) + norm(experts))). Changes `dense`. */
void pagoda_add_dense_and_experts(const pagoda_layer *layer, float *hidden, float *dense, const float *experts,
                                  int32_t num_tokens);

/* hidden = scale * (hidden + norm(projection(gelu(gate(hidden)) * own input))), after the feed-forward; nothing if the
 * layer has no such input. With several streams the active one gates, and all but the first are added to. No rank sums:
 * all compute the same. */
void pagoda_add_own_input(const pagoda_layer *layer, const pagoda_step *step);

/* All of every layer; the caches are each layer's. One call, because between calls a Python program's
 * other threads could delay the next one. So it copies the auxiliary hidden states, too: those before a layer with the
 * number of layers are those after the last one. */
void pagoda_layers(const pagoda_layer *const *layers, int32_t num_layers, const pagoda_step *step,
                   const pagoda_layer_cache *caches);

/* logits [num_rows, out_features] = head(norm(hidden)), float32; with a soft-cap C (0: none), C * tanh(logits / C). */
void pagoda_logits(float *logits, const float *hidden, int32_t num_rows, const float *norm, float eps,
                   const pagoda_weight *head, float softcap, uint32_t *words, float *row_scales);

#endif
