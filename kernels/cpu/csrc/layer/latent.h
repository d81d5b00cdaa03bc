/* Latent attention (DeepSeek-V2, 2024) around the attention itself, which has one KV head: the cache keeps a latent and a
 * rotated key for each token, and a value is the latent. Each head has a matrix from its queries to what multiplies
 * latents, and one from the weighted sum of latents to its values. */
#ifndef PAGODA_LATENT_H
#define PAGODA_LATENT_H

#include <stdint.h>

#include "layer/indexer.h"
#include "linear/linear.h"

/* One layer's weights and sizes: CLatent in kernels/cpu/bindings.py. */
typedef struct {
    pagoda_weight query;      /* from the queries' latent to queries; NULL words: the first projection gives queries */
    pagoda_weight to_latents; /* of all heads, each of which begins at a multiple of 64 outputs: nope_dim to rank */
    pagoda_weight to_values;  /* likewise: rank to value_dim */
    const float *query_norm;  /* [query_width], of the queries' latent; NULL without one */
    const float *latent_norm; /* [rank] */
    const float *growth;      /* [positions], factors of queries; or NULL */
    const pagoda_indexer *indexer; /* NULL: the layer attends to what the last layer with one has chosen, or to all */
    int32_t query_width;      /* outputs of the first projection before the latent */
    int32_t rank, nope_dim, rope_dim, value_dim;
    float eps;
} pagoda_latent;

/* A step through one layer. */
typedef struct {
    float *wide;            /* [num_tokens, outputs]: those of the first projection, then scratch */
    int64_t stride;         /* outputs of the first projection */
    uint32_t *words;        /* scratch for a packed row of each token */
    float *row_scales;
    float *mixed;           /* [num_tokens, query_width]: scratch */
    void *query;            /* [num_tokens, num_heads, rank + rope_dim], the cache's type: written */
    void *cache;            /* [slots, rank + rope_dim]: written at slot_mapping */
    const float *rope;      /* [positions, 2, rope_dim / 2]; NULL: nothing is rotated */
    const int64_t *positions, *slot_mapping;
    int32_t num_tokens, num_heads, is_bf16;
} pagoda_latent_call;

/* Writes the step's latents to the cache, and what multiplies latents and keys to `query`. */
void pagoda_store_latents(const pagoda_latent *latent, const pagoda_latent_call *call);

/* Writes each head's values of the weighted latents `attended` [num_tokens, num_heads, rank], in the cache's type, to
 * `wide` [num_tokens, num_heads * value_dim]. */
void pagoda_values_of_latents(const pagoda_latent *latent, const pagoda_latent_call *call, const void *attended);

#endif
