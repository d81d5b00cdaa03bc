/* See rope.h. */
#include "rope.h"

#include "rms_norm.h"
#include "threads.h"
#include "vector.h"

/* Normalizes and rotates one head into element `at` of `to`. */
static void rotate(const pagoda_rope_call *call, const float *head, const float *norm, const float *cosines, void *to,
                   int64_t at) {
    int64_t half = call->head_dim / 2;
    const float *sines = cosines + half;
    float factor = norm ? rms_norm_factor(head, false, call->head_dim, call->eps) : 1;
    for (int64_t i = 0; i < half; i += LANES) {
        int64_t count = half - i;
        f32x16 first = load_some(head, false, i, count), second = load_some(head, false, half + i, count);
        f32x16 cosine = load_some(cosines, false, i, count), sine = load_some(sines, false, i, count);
        if (norm) {
            first *= factor * load_some(norm, false, i, count);
            second *= factor * load_some(norm, false, half + i, count);
        }
        store_some(to, call->is_bf16, at + i, first * cosine - second * sine, count);
        store_some(to, call->is_bf16, at + half + i, second * cosine + first * sine, count);
    }
}

/* Rotates the queries and keys of one token, and stores its keys and values. */
static void rope_token(void *args, int64_t token) {
    const pagoda_rope_call *call = args;
    int64_t width = call->head_dim;
    const float *head = call->qkv + token * (call->num_heads + 2 * call->num_kv_heads) * width;
    const float *cosines = call->rope + call->positions[token] * width;
    for (int64_t i = 0; i < call->num_heads; i++, head += width)
        rotate(call, head, call->query_norm, cosines, call->query, (token * call->num_heads + i) * width);
    int64_t slot = call->slot_mapping[token];
    if (slot < 0) return;
    for (int64_t i = 0; i < call->num_kv_heads; i++, head += width)
        rotate(call, head, call->key_norm, cosines, call->key_cache, (slot * call->num_kv_heads + i) * width);
    int64_t size = call->num_kv_heads * width;
    for (int64_t i = 0; i < size; i += LANES)
        store_some(call->value_cache, call->is_bf16, slot * size + i, load_some(head, false, i, size - i), size - i);
}

void pagoda_rope_and_store(const pagoda_rope_call *call) {
    int64_t elements = (int64_t)call->num_tokens * (call->num_heads + 2 * call->num_kv_heads) * call->head_dim;
    pagoda_for_each_row(call->num_tokens, elements, rope_token, (void *)call);
}
