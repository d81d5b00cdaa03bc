/* See rope.h. */
#include "layer/rope.h"

#include "layer/rotate.h"
#include "runtime/rms_norm.h"
#include "runtime/threads.h"
#include "runtime/vector.h"

/* Normalizes `num_heads` heads of a token, multiplies them by `scale` and rotates them into `to`, from element `at`
 * on. */
static void rotate_heads(const pagoda_rope_call *call, const float *head, int64_t num_heads, const float *norm,
                         float scale, const float *cosines, void *to, int64_t at) {
    int64_t width = call->head_dim;
    float factor = scale;
    if (norm && call->norms_all_heads) factor = scale * rms_norm_factor(head, false, num_heads * width, call->eps);
    for (int64_t i = 0; i < num_heads; i++, head += width, at += width) {
        if (norm && !call->norms_all_heads) factor = scale * rms_norm_factor(head, false, width, call->eps);
        rotate_row(head, width, norm, factor, cosines, to, call->is_bf16, at);
        if (norm && call->norms_all_heads) norm += width;
    }
}

/* Stores the values of a token, from element `at` of the cache on. */
static void store_values(const pagoda_rope_call *call, const float *head, int64_t at) {
    int64_t width = call->head_dim;
    for (int64_t i = 0; i < call->num_kv_heads; i++, head += width, at += width) {
        float factor = call->norms_values ? rms_norm_factor(head, false, width, call->eps) : 1;
        for (int64_t j = 0; j < width; j += LANES)
            store_some(call->value_cache, call->is_bf16, at + j, load_some(head, false, j, width - j) * factor,
                       width - j);
    }
}

/* Rotates the queries and keys of one token, and stores its keys and values. */
static void rope_token(void *args, int64_t token) {
    const pagoda_rope_call *call = args;
    int64_t width = call->head_dim;
    const float *head = call->qkv + token * call->stride;
    const float *cosines = angles_of(call->rope, width, call->positions[token]);
    int64_t size = call->num_kv_heads * width;
    float growth = call->growth ? call->growth[call->positions[token]] : 1;
    rotate_heads(call, head, call->num_heads, call->query_norm, growth, cosines, call->query,
                 token * call->num_heads * width);
    int64_t slot = call->slot_mapping ? call->slot_mapping[token] : -1;
    if (slot < 0) return;
    head += call->num_heads * width;
    rotate_heads(call, head, call->num_kv_heads, call->key_norm, 1, cosines, call->key_cache, slot * size);
    store_values(call, head + size, slot * size);
}

void pagoda_rope_and_store(const pagoda_rope_call *call) {
    int64_t elements = (int64_t)call->num_tokens * (call->num_heads + 2 * call->num_kv_heads) * call->head_dim;
    pagoda_for_each_row(call->num_tokens, elements, rope_token, (void *)call);
}
