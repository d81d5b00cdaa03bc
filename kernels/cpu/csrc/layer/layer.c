/* See layer.h. */
#include "layer/layer.h"

#include <stddef.h>

#include "attention/attention.h"
#include "linear/pack_rows.h"
#include "layer/residual.h"
#include "layer/rope.h"

/* Multiplies rows and adds them to the residual stream, or leaves that to the caller, which sums the ranks' first. */
static void add_to_hidden(const pagoda_layer *layer, const pagoda_step *step, const pagoda_rows *rows,
                          const pagoda_weight *weight, const float *norm) {
    if (step->addend) {
        pagoda_linear(step->addend, layer->hidden_size, rows, weight, PAGODA_STORE);
    } else if (!norm && layer->residual_multiplier == 1) {
        pagoda_linear(step->hidden, layer->hidden_size, rows, weight, PAGODA_ADD);
    } else {
        pagoda_linear(step->wide, layer->hidden_size, rows, weight, PAGODA_STORE);
        pagoda_add_to_residual(step->hidden, step->wide, step->num_tokens, layer->hidden_size, norm, layer->eps,
                               layer->residual_multiplier);
    }
}

void pagoda_attention_half(const pagoda_layer *layer, const pagoda_step *step, void *key_cache, void *value_cache) {
    pagoda_rows rows = {step->words, step->row_scales, step->num_tokens};
    pagoda_pack_rows(&rows, step->hidden, 0, layer->qkv.kind, layer->hidden_size, layer->input_norm, layer->eps);
    pagoda_linear(step->wide, layer->qkv.out_features, &rows, &layer->qkv, PAGODA_STORE);
    pagoda_rope_call rope = {
        .query = step->query, .key_cache = key_cache, .value_cache = value_cache, .qkv = step->wide,
        .rope = layer->rope, .query_norm = layer->query_norm, .key_norm = layer->key_norm,
        .positions = step->positions, .slot_mapping = step->slot_mapping, .num_tokens = step->num_tokens,
        .num_heads = layer->num_heads, .num_kv_heads = layer->num_kv_heads, .head_dim = layer->head_dim,
        .is_bf16 = layer->is_bf16, .norms_all_heads = layer->norms_all_heads, .eps = layer->eps,
    };
    pagoda_rope_and_store(&rope);
    pagoda_attention_call attention = {
        .output = step->attended, .query = step->query, .key_cache = key_cache, .value_cache = value_cache,
        .cu_seqlens_q = step->cu_seqlens_q, .seq_lens = step->seq_lens, .block_tables = step->block_tables,
        .num_seqs = step->num_seqs, .max_blocks = step->max_blocks, .num_heads = layer->num_heads,
        .num_kv_heads = layer->num_kv_heads, .head_dim = layer->head_dim, .block_size = step->block_size,
        .sliding_window = layer->sliding_window, .is_bf16 = layer->is_bf16, .scale = layer->scale,
        .softcap = layer->softcap,
    };
    pagoda_attention(&attention);
    pagoda_pack_rows(&rows, step->attended, layer->is_bf16, layer->output.kind, layer->output.in_features, NULL, 0);
    add_to_hidden(layer, step, &rows, &layer->output, layer->attention_output_norm);
}

void pagoda_mlp_half(const pagoda_layer *layer, const pagoda_step *step) {
    if (layer->experts) {
        pagoda_compute_experts(layer->experts, step->addend ? step->addend : step->hidden, step->hidden,
                               step->num_tokens, layer->post_attention_norm, layer->eps, step->addend == NULL);
        return;
    }
    pagoda_rows rows = {step->words, step->row_scales, step->num_tokens};
    pagoda_pack_rows(&rows, step->hidden, 0, layer->gate_up.kind, layer->hidden_size, layer->post_attention_norm,
                     layer->eps);
    pagoda_linear(step->wide, layer->intermediate_size, &rows, &layer->gate_up,
                  layer->activation == PAGODA_GELU ? PAGODA_GELU_MUL : PAGODA_SILU_MUL);
    pagoda_pack_rows(&rows, step->wide, 0, layer->down.kind, layer->down.in_features, NULL, 0);
    add_to_hidden(layer, step, &rows, &layer->down, layer->mlp_output_norm);
}

void pagoda_layers(const pagoda_layer *const *layers, int32_t num_layers, const pagoda_step *step,
                   void *const *key_caches, void *const *value_caches) {
    for (int32_t i = 0; i < num_layers; i++) {
        pagoda_attention_half(layers[i], step, key_caches[i], value_caches[i]);
        pagoda_mlp_half(layers[i], step);
    }
}

void pagoda_logits(float *logits, const float *hidden, int32_t num_rows, const float *norm, float eps,
                   const pagoda_weight *head, float softcap, uint32_t *words, float *row_scales) {
    pagoda_rows rows = {words, row_scales, num_rows};
    pagoda_pack_rows(&rows, hidden, 0, head->kind, head->in_features, norm, eps);
    pagoda_linear(logits, head->out_features, &rows, head, PAGODA_STORE);
    if (softcap > 0) pagoda_cap_rows(logits, num_rows, head->out_features, softcap);
}
