/* Attention over a paged cache of keys and values, for decodes, chunks of prefills and whole texts in one batch. */
#ifndef PAGODA_ATTENTION_H
#define PAGODA_ATTENTION_H

#include <stdint.h>

/* Arguments of one call: CAttentionCall in kernels/cpu/bindings.py. */
typedef struct {
    void *output;             /* [num_tokens, num_heads, value_dim], the cache's type */
    const void *query;        /* [num_tokens, num_heads, head_dim], the cache's type, contiguous; NOT yet scaled */
    const void *key_cache;    /* [num_blocks, block_size, num_kv_heads, head_dim] */
    const void *value_cache;  /* likewise, of which the first value_dim elements are read; of latents it is key_cache */
    const int32_t *cu_seqlens_q; /* [num_seqs + 1] */
    const int32_t *seq_lens;     /* [num_seqs]; this step's tokens included: the queries are the last ones */
    const int32_t *block_tables; /* [num_seqs, max_blocks], -1: none */
    int32_t num_seqs, max_blocks, num_heads, num_kv_heads, head_dim, value_dim, block_size;
    int32_t sliding_window;   /* 0: none; else a query at p sees keys j with p - j < sliding_window */
    int32_t chunk;            /* 0: none; else it sees keys from p / chunk * chunk on */
    int32_t right;            /* it sees keys up to p + right of its sequence; 0: attention is causal */
    int32_t is_bf16;          /* else float32 */
    float scale;
    float softcap;            /* C of C * tanh(score / C), which replaces each score; 0: none */
} pagoda_attention_call;

/* Computes AttentionBackend.forward of kernels/attention/base.py; head_dim and value_dim are
 * multiples of 16; value_dim is at most head_dim and 512. A sequence
 * whose seq_lens is 0, or whose last token has no block, is padding: its output is zero. Several threads may call at
 * once. */
void pagoda_attention(const pagoda_attention_call *call);

#endif
