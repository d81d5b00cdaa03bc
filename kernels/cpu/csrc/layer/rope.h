/* Rotary position embedding (RoPE), and writing keys and values to the cache. */
#ifndef PAGODA_ROPE_H
#define PAGODA_ROPE_H

#include <stdint.h>

typedef struct {
    void *query;             /* [num_tokens, num_heads, head_dim], the cache's type: written */
    void *key_cache;         /* [slots, num_kv_heads, head_dim]: written at slot_mapping */
    void *value_cache;
    const float *qkv;        /* [num_tokens, (num_heads + 2 num_kv_heads) * head_dim], `stride` from token to token */
    const float *rope;       /* [positions, 2, head_dim / 2]: cosines, then sines; NULL: nothing is rotated */
    const float *growth;     /* [positions], factors of queries; or NULL */
    const float *query_norm; /* [head_dim] of an RMSNorm of each head, or [num_heads, head_dim] of all; or NULL */
    const float *key_norm;
    const int64_t *positions;    /* [num_tokens] */
    const int64_t *slot_mapping; /* [num_tokens]; -1: not written; NULL: qkv has only queries, and nothing is written */
    int64_t stride;
    int32_t num_tokens, num_heads, num_kv_heads, head_dim;
    int32_t is_bf16; /* the cache and the query; else float32 */
    int32_t norms_all_heads; /* a norm divides by the root mean square of a token's heads together */
    int32_t norms_values;    /* values are divided by the root mean square of their head */
    float eps;
} pagoda_rope_call;

/* Rotates queries and keys (RoPE, Su et al., 2021, in the half-split layout), and stores keys and values. */
void pagoda_rope_and_store(const pagoda_rope_call *call);

#endif
