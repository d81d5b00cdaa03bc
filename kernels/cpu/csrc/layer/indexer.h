/* The indexer of sparse latent attention (DeepSeek-V3.2, 2025), which chooses the tokens that a query attends to: those
 * with the highest sums over its heads of weight * relu(scale * query . key), of equal ones the first, up to its own.
 * Each query is computed by itself, so its choice depends on no other. */
#ifndef PAGODA_INDEXER_H
#define PAGODA_INDEXER_H

#include <stdint.h>

#include "linear/linear.h"

/* One layer's weights and sizes: CIndexer in kernels/cpu/bindings.py. */
typedef struct {
    pagoda_weight query;        /* from the queries' latent to num_heads * head_dim outputs */
    pagoda_weight key;          /* from the layer's input to head_dim outputs */
    pagoda_weight head_weights; /* from the layer's input to num_heads outputs, float32 */
    const float *key_norm, *key_bias; /* [head_dim], of the LayerNorm of keys */
    int32_t num_heads, head_dim, top_k;
    float eps;                  /* of this norm */
} pagoda_indexer;

/* A step through one layer. */
typedef struct {
    const float *hidden, *input_norm;        /* [num_tokens, hidden_size], and the norm of the layer's input, or NULL */
    const float *query_latent, *query_norm;  /* [num_tokens, query_width], and its norm */
    float input_eps, query_eps;
    const float *rope;                       /* [positions, 2, rope_dim / 2]; NULL: nothing is rotated */
    int32_t rope_dim;                        /* first elements of keys and queries that are rotated */
    void *cache;                             /* [slots, head_dim]: written at slot_mapping */
    const int64_t *positions, *slot_mapping;
    const int32_t *cu_seqlens_q, *seq_lens, *block_tables; /* as pagoda_attention_call has them */
    int32_t num_tokens, num_seqs, max_blocks, block_size, is_bf16;
    uint32_t *words;                         /* scratch for a packed row of each token */
    float *row_scales;
    int32_t *chosen, *num_chosen;            /* written: [num_tokens, top_k], each token's slots in the order of their
                                              * positions, and how many */
} pagoda_indexer_call;

/* Writes the step's keys to the cache. */
void pagoda_store_index_keys(const pagoda_indexer *indexer, const pagoda_indexer_call *call);

/* Chooses each token's slots; the step's keys have been stored. */
void pagoda_choose_tokens(const pagoda_indexer *indexer, const pagoda_indexer_call *call);

#endif
