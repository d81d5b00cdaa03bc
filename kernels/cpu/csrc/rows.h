/* What is done to rows of activations between two linear layers. */
#ifndef PAGODA_ROWS_H
#define PAGODA_ROWS_H

#include <stdint.h>

#include "linear.h"

/* Copies rows of a table [table_rows, width], float32 or bfloat16, to output [num_rows, width]. Returns 1; 0, having
 * written nothing, if there is a row that the table does not have. */
int32_t pagoda_gather_rows(float *output, const void *table, int32_t table_is_bf16, int64_t table_rows,
                           const int64_t *rows, int32_t num_rows, int32_t width);

/* Packs rows [num_rows, width] for a linear layer whose weights are of this kind; the source is float32 or bfloat16.
 * With `norm` [width] each row is first divided by its root mean square and multiplied by `norm` (RMSNorm, Zhang and
 * Sennrich, 2019). int8 rows are quantized by their largest element. */
void pagoda_pack_rows(pagoda_rows *rows, const void *source, int32_t source_is_bf16, int32_t kind, int32_t width,
                      const float *norm, float eps);

typedef struct {
    void *query;             /* [num_tokens, num_heads, head_dim], the cache's type: written */
    void *key_cache;         /* [slots, num_kv_heads, head_dim]: written where slot_mapping says */
    void *value_cache;
    const float *qkv;        /* [num_tokens, (num_heads + 2 num_kv_heads) * head_dim] */
    const float *rope;       /* [positions, 2, head_dim / 2]: cosines, then sines */
    const float *query_norm; /* [head_dim] of an RMSNorm of each head, or NULL */
    const float *key_norm;
    const int64_t *positions;    /* [num_tokens] */
    const int64_t *slot_mapping; /* [num_tokens]; -1: not written */
    int32_t num_tokens, num_heads, num_kv_heads, head_dim;
    int32_t is_bf16; /* the cache and the query; else float32 */
    float eps;
} pagoda_rope_call;

/* Rotates queries and keys (RoPE, Su et al., 2021, in the half-split layout), and stores keys and values. */
void pagoda_rope_and_store(const pagoda_rope_call *call);

#endif
