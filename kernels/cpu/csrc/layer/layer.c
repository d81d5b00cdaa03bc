/* See layer.h. */
#include "layer/layer.h"

#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#include "attention/attention.h"
#include "layer/gate.h"
#include "layer/own_input.h"
#include "linear/pack_rows.h"
#include "layer/residual.h"
#include "layer/rope.h"

/* Multiplies rows and adds them to the residual stream, which is then scaled, or leaves that to the caller, which sums
 * the ranks' first. */
static void add_to_hidden(const pagoda_layer *layer, const pagoda_step *step, const pagoda_rows *rows,
                          const pagoda_weight *weight, const float *norm, float scale,
                          pagoda_epilogue addend_epilogue) {
    if (step->addend) {
        pagoda_linear(step->addend, layer->hidden_size, rows, weight, addend_epilogue);
    } else if (!norm && layer->residual_multiplier == 1 && scale == 1) {
        pagoda_linear(step->hidden, layer->hidden_size, rows, weight, PAGODA_ADD);
    } else {
        pagoda_linear(step->wide, layer->hidden_size, rows, weight, PAGODA_STORE);
        pagoda_add_to_residual(step->hidden, step->wide, step->num_tokens, layer->hidden_size, norm, layer->eps,
                               layer->residual_multiplier, scale);
    }
}

/* Attends to the paged cache. */
static void attend(const pagoda_layer *layer, const pagoda_step *step, const pagoda_layer_cache *cache,
                   int32_t value_dim) {
    pagoda_attention_call attention = {
        .output = step->attended, .query = step->query, .key_cache = cache->keys, .value_cache = cache->values,
        .cu_seqlens_q = step->cu_seqlens_q, .seq_lens = step->seq_lens, .block_tables = cache->block_tables,
        .num_seqs = step->num_seqs, .max_blocks = step->max_blocks, .num_heads = layer->num_heads,
        .num_kv_heads = layer->num_kv_heads, .head_dim = layer->head_dim, .value_dim = value_dim,
        .block_size = step->block_size, .sliding_window = layer->sliding_window, .chunk = layer->chunk,
        .is_bf16 = layer->is_bf16, .scale = layer->scale, .softcap = layer->softcap,
    };
    pagoda_attention(&attention);
}

/* Attends to the slots of the cache of latents that are chosen: each token as a sequence of blocks of one token. */
static void attend_to_chosen(const pagoda_layer *layer, const pagoda_step *step, const pagoda_layer_cache *cache) {
    pagoda_attention_call attention = {
        .output = step->attended, .query = step->query, .key_cache = cache->keys, .value_cache = cache->values,
        .cu_seqlens_q = step->token_starts, .seq_lens = step->num_chosen, .block_tables = step->chosen,
        .num_seqs = step->num_tokens, .max_blocks = step->most_chosen, .num_heads = layer->num_heads,
        .num_kv_heads = layer->num_kv_heads, .head_dim = layer->head_dim, .value_dim = layer->latent->rank,
        .block_size = 1, .is_bf16 = layer->is_bf16, .scale = layer->scale, .softcap = layer->softcap,
    };
    pagoda_attention(&attention);
}

/* Stores the keys of a layer's indexer, and chooses the tokens to attend to, unless these are all. */
static void index_tokens(const pagoda_layer *layer, const pagoda_step *step, const pagoda_layer_cache *cache) {
    const pagoda_latent *latent = layer->latent;
    pagoda_indexer_call call = {
        .hidden = step->hidden, .input_norm = layer->input_norm, .query_latent = step->mixed,
        .query_norm = latent->query_norm, .input_eps = layer->eps, .query_eps = latent->eps, .rope = layer->rope,
        .rope_dim = latent->rope_dim, .cache = cache->index_keys, .positions = step->positions,
        .slot_mapping = cache->slot_mapping, .cu_seqlens_q = step->cu_seqlens_q, .seq_lens = step->seq_lens,
        .block_tables = cache->block_tables, .num_tokens = step->num_tokens, .num_seqs = step->num_seqs,
        .max_blocks = step->max_blocks, .block_size = step->block_size, .is_bf16 = layer->is_bf16,
        .words = step->words, .row_scales = step->row_scales, .chosen = step->chosen, .num_chosen = step->num_chosen,
    };
    pagoda_store_index_keys(latent->indexer, &call);
    if (step->chosen) pagoda_choose_tokens(latent->indexer, &call);
}

/* Adds latent attention of the packed rows. */
static void add_latent_attention(const pagoda_layer *layer, const pagoda_step *step, pagoda_rows *rows,
                                 const pagoda_layer_cache *cache) {
    const pagoda_latent *latent = layer->latent;
    pagoda_latent_call call = {
        .wide = step->wide, .stride = layer->qkv.out_features, .words = step->words, .row_scales = step->row_scales,
        .mixed = step->mixed, .query = step->query, .cache = cache->keys, .rope = layer->rope,
        .positions = step->positions, .slot_mapping = cache->slot_mapping, .num_tokens = step->num_tokens,
        .num_heads = layer->num_heads, .is_bf16 = layer->is_bf16,
    };
    pagoda_linear(step->wide, call.stride, rows, &layer->qkv, PAGODA_STORE);
    pagoda_store_latents(latent, &call);
    if (latent->indexer) index_tokens(layer, step, cache); /* mixed has the queries' latent still */
    if (step->chosen) attend_to_chosen(layer, step, cache);
    else attend(layer, step, cache, latent->rank);
    pagoda_values_of_latents(latent, &call, step->attended);
    pagoda_pack_rows_for(rows, step->wide, 0, &layer->output, NULL, 0);
    add_to_hidden(layer, step, rows, &layer->output, layer->attention_output_norm, 1, PAGODA_STORE);
}

/* hidden += norm(hidden) + norm(right(left(norm(hidden)))): learned augmented residual (Menghani et al., 2025). */
static void add_laurel(const pagoda_layer *layer, const pagoda_step *step) {
    pagoda_rows rows = {step->words, step->row_scales, step->num_tokens};
    pagoda_pack_rows_for(&rows, step->hidden, 0, &layer->laurel_left, layer->input_norm, layer->eps);
    pagoda_linear(step->wide, layer->laurel_left.out_features, &rows, &layer->laurel_left, PAGODA_STORE);
    pagoda_pack_rows_for(&rows, step->wide, 0, &layer->laurel_right, NULL, 0);
    pagoda_linear(step->wide, layer->hidden_size, &rows, &layer->laurel_right, PAGODA_STORE);
    pagoda_add_normed(step->hidden, step->wide, step->num_tokens, layer->hidden_size, layer->input_norm,
                      layer->laurel_norm, layer->eps);
}

/* Adds attention of the packed rows. */
static void add_attention(const pagoda_layer *layer, const pagoda_step *step, pagoda_rows *rows,
                          const pagoda_layer_cache *cache) {
    const int64_t stride = layer->qkv.out_features;
    pagoda_linear(step->wide, stride, rows, &layer->qkv, PAGODA_STORE);
    pagoda_rope_call rope = {
        .query = step->query, .key_cache = cache->keys, .value_cache = cache->values,
        .qkv = step->wide + layer->gate_width, .rope = layer->rope, .growth = layer->growth,
        .query_norm = layer->query_norm,
        .key_norm = layer->key_norm, .positions = step->positions, .slot_mapping = cache->slot_mapping,
        .stride = stride, .num_tokens = step->num_tokens, .num_heads = layer->num_heads,
        .num_kv_heads = layer->num_kv_heads, .head_dim = layer->head_dim, .is_bf16 = layer->is_bf16,
        .norms_all_heads = layer->norms_all_heads, .norms_values = layer->norms_values, .eps = layer->eps,
    };
    pagoda_rope_and_store(&rope);
    attend(layer, step, cache, layer->head_dim);
    if (layer->gate_width)
        pagoda_gate_attended(step->attended, layer->is_bf16, step->wide, stride, step->num_tokens, layer->gate_width);
    if (layer->laurel_norm) add_laurel(layer, step); /* while nothing else needs the packed rows and wide */
    pagoda_pack_rows_for(rows, step->attended, layer->is_bf16, &layer->output, NULL, 0);
    add_to_hidden(layer, step, rows, &layer->output, layer->attention_output_norm, layer->attention_output_scale,
                  PAGODA_STORE);
}

void pagoda_mixer_half(const pagoda_layer *layer, const pagoda_step *step, const pagoda_layer_cache *cache) {
    const pagoda_recurrent_layer *recurrent = layer->recurrent;
    const bool has_attention = layer->num_heads > 0;
    if (!has_attention && !recurrent) return;
    pagoda_rows rows = {step->words, step->row_scales, step->num_tokens};
    const pagoda_weight *first = recurrent ? &recurrent->input : &layer->qkv;
    if (step->mixer_input) pagoda_pack_rows_for(&rows, step->mixer_input, 0, first, NULL, 0);
    else pagoda_pack_rows_for(&rows, step->hidden, 0, first, layer->input_norm, layer->eps);
    if (recurrent) {
        pagoda_recurrent_call call = {step->sequences, &rows, step->wide, step->mixed, cache->conv_state, cache->state};
        pagoda_compute_recurrent(recurrent, &call);
    }
    if (has_attention && (layer->qkv.kind != first->kind || layer->qkv.order != first->order))
        pagoda_pack_rows_for(&rows, step->hidden, 0, &layer->qkv, layer->input_norm, layer->eps);
    if (has_attention) /* changes the rows and the hidden states */
        (layer->latent ? add_latent_attention : add_attention)(layer, step, &rows, cache);
    if (!recurrent) return;
    pagoda_pack_rows_for(&rows, step->mixed, 0, &recurrent->output, NULL, 0);
    add_to_hidden(layer, step, &rows, &recurrent->output, layer->attention_output_norm, 1,
                  has_attention ? PAGODA_ADD : PAGODA_STORE);
}

/* Packs what the second matrix of the dense feed-forward reads. */
static void compute_activations(const pagoda_layer *layer, const pagoda_step *step, pagoda_rows *rows) {
    pagoda_pack_rows_for(rows, step->hidden, 0, &layer->gate_up, layer->post_attention_norm, layer->eps);
    const int32_t width = layer->intermediate_size;
    if (layer->num_gates) {
        pagoda_linear(step->wide, 2 * (int64_t)width, rows, &layer->gate_up, PAGODA_STORE);
        pagoda_gate_sparsely(step->mixed, step->wide, step->num_tokens, width, layer->num_gates, layer->gate_cutoff);
    } else {
        pagoda_linear(step->wide, width, rows, &layer->gate_up, pagoda_epilogue_of(layer->activation));
    }
    pagoda_pack_rows_for(rows, layer->num_gates ? step->mixed : step->wide, 0, &layer->down, NULL, 0);
}

/* Computes both feed-forwards of the same hidden states, and adds them, or leaves that to the caller. */
static void compute_dense_and_experts(const pagoda_layer *layer, const pagoda_step *step) {
    float *dense = step->addend ? step->addend : step->wide;
    float *experts = step->addend ? step->addend + (int64_t)step->num_tokens * layer->hidden_size : step->mixed;
    pagoda_rows rows = {step->words, step->row_scales, step->num_tokens};
    pagoda_compute_experts(layer->experts, experts, step->hidden, step->num_tokens, layer->experts_norm, layer->eps, 1, 0);
    compute_activations(layer, step, &rows);
    pagoda_linear(dense, layer->hidden_size, &rows, &layer->down, PAGODA_STORE);
    if (!step->addend) pagoda_add_dense_and_experts(layer, step->hidden, dense, experts, step->num_tokens);
}

void pagoda_add_dense_and_experts(const pagoda_layer *layer, float *hidden, float *dense, const float *experts,
                                  int32_t num_tokens) {
    const int32_t width = layer->hidden_size;
    pagoda_sum_normed(dense, experts, num_tokens, width, layer->dense_output_norm, layer->experts_output_norm, layer->eps);
    pagoda_add_to_residual(hidden, dense, num_tokens, width, layer->mlp_output_norm, layer->eps,
                           layer->residual_multiplier, layer->output_scale);
}

void pagoda_mlp_half(const pagoda_layer *layer, const pagoda_step *step) {
    if (layer->experts && layer->intermediate_size) {
        compute_dense_and_experts(layer, step);
    } else if (layer->experts) {
        pagoda_compute_experts(layer->experts, step->addend ? step->addend : step->hidden, step->hidden,
                               step->num_tokens, layer->post_attention_norm, layer->eps,
                               step->addend ? 1 : layer->residual_multiplier, step->addend == NULL);
    } else if (layer->intermediate_size) {
        pagoda_rows rows = {step->words, step->row_scales, step->num_tokens};
        compute_activations(layer, step, &rows);
        add_to_hidden(layer, step, &rows, &layer->down, layer->mlp_output_norm, layer->output_scale, PAGODA_STORE);
    }
}

void pagoda_add_own_input(const pagoda_layer *layer, const pagoda_step *step) {
    const int64_t width = layer->own_width;
    if (!width) return;
    pagoda_rows rows = {step->words, step->row_scales, step->num_tokens};
    pagoda_pack_rows_for(&rows, step->hidden, 0, &layer->own_gate, NULL, 0);
    pagoda_linear(step->wide, width, &rows, &layer->own_gate, PAGODA_STORE);
    pagoda_gate_own_input(step->wide, step->own_inputs + layer->own_index * step->num_tokens * width, step->num_tokens,
                          layer->own_width);
    pagoda_pack_rows_for(&rows, step->wide, 0, &layer->own_projection, NULL, 0);
    pagoda_linear(step->wide, layer->hidden_size, &rows, &layer->own_projection, PAGODA_STORE);
    const int64_t stream = (int64_t)step->num_tokens * layer->hidden_size;
    float *first = layer->altup ? step->streams + stream : step->hidden;
    float *end = first + stream * (layer->altup ? layer->altup->num_streams - 1 : 1);
    for (float *to = first; to < end; to += stream)
        pagoda_add_to_residual(to, step->wide, step->num_tokens, layer->hidden_size, layer->own_output_norm,
                               layer->eps, 1, layer->own_output_scale);
}

/* Copies the hidden states before a layer, if they are auxiliary ones. */
static void copy_aux_states(const pagoda_step *step, int32_t layer, int64_t width) {
    for (int32_t aux = 0; aux < step->num_aux; aux++) {
        if (step->aux_layers[aux] != layer) continue;
        for (int64_t token = 0; token < step->num_tokens; token++)
            memcpy(step->aux_states + (token * step->num_aux + aux) * width, step->hidden + token * width,
                   width * sizeof(float));
    }
}

void pagoda_layers(const pagoda_layer *const *layers, int32_t num_layers, const pagoda_step *step,
                   const pagoda_layer_cache *caches) {
    for (int32_t i = 0; i < num_layers; i++) {
        const pagoda_altup *altup = layers[i]->altup;
        const int32_t width = layers[i]->hidden_size;
        copy_aux_states(step, i, width);
        if (altup) pagoda_predict_streams(altup, step->streams, step->hidden, step->num_tokens, width);
        pagoda_mixer_half(layers[i], step, &caches[i]);
        pagoda_mlp_half(layers[i], step);
        if (altup) pagoda_correct_streams(altup, step->streams, step->hidden, step->num_tokens, width);
        pagoda_add_own_input(layers[i], step);
        if (i + 1 == num_layers) copy_aux_states(step, num_layers, width);
    }
}

void pagoda_logits(float *logits, const float *hidden, int32_t num_rows, const float *norm, float eps,
                   const pagoda_weight *head, float softcap, uint32_t *words, float *row_scales) {
    pagoda_rows rows = {words, row_scales, num_rows};
    pagoda_pack_rows_for(&rows, hidden, 0, head, norm, eps);
    pagoda_linear(logits, head->out_features, &rows, head, PAGODA_STORE);
    if (softcap > 0) pagoda_cap_rows(logits, num_rows, head->out_features, softcap);
}
