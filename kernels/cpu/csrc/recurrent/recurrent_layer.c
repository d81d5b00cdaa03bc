/* See recurrent_layer.h. */
#include "recurrent/recurrent_layer.h"

#include <math.h>

#include "recurrent/causal_conv.h"
#include "recurrent/gated_delta_rule.h"
#include "recurrent/gated_norm.h"
#include "linear/pack_rows.h"
#include "recurrent/selective_scan.h"
#include "runtime/threads.h"
#include "runtime/vector.h"

/* A step through a layer, and where its numbers are in a token's row of `wide`. */
typedef struct {
    const pagoda_recurrent_layer *layer;
    const pagoda_recurrent_call *call;
    int64_t stride, inner; /* elements of a row, and of all heads */
} mixer;

/* The rows of `wide` from an element on. */
static float *from_element(const mixer *mixer, int64_t element) { return mixer->call->wide + element; }

/* Calls a task for each token. */
static void for_each_token(const mixer *mixer, int64_t elements_per_token, pagoda_task task) {
    int64_t num_tokens = mixer->call->rows->num_rows;
    pagoda_for_each_row(num_tokens, num_tokens * elements_per_token, task, (void *)mixer);
}

/* Convolves the channels from an element of each row on. */
static void convolve(const mixer *mixer, int64_t element, int64_t channels, int32_t has_silu) {
    const pagoda_recurrent_layer *layer = mixer->layer;
    pagoda_conv_call conv = {
        .sequences = mixer->call->sequences, .inputs = from_element(mixer, element), .weight = layer->conv_weight,
        .bias = layer->conv_bias, .state = mixer->call->conv_state, .stride = mixer->stride,
        .num_tokens = mixer->call->rows->num_rows, .channels = (int32_t)channels, .width = layer->conv_width,
        .has_silu = has_silu,
    };
    pagoda_causal_conv(&conv);
}

/* Multiplies the output by the gate from an element of each row on, and normalizes it. */
static void gate_output(const mixer *mixer, int64_t element) {
    const pagoda_recurrent_layer *layer = mixer->layer;
    pagoda_gated_norm_call norm = {
        .rows = mixer->call->mixed, .gate = from_element(mixer, element), .norm = layer->norm, .stride = mixer->stride,
        .num_tokens = mixer->call->rows->num_rows, .width = (int32_t)mixer->inner, .group = layer->norm_group,
        .gates_first = layer->gates_first, .has_sigmoid = layer->has_sigmoid, .eps = layer->eps,
    };
    pagoda_gated_norm(&norm);
}

/* --- short convolutions ---------------------------------------------------------------------------------------- */

/* Multiplies a token's inputs by the gate before the convolution. */
static void gate_inputs(void *args, int64_t token) {
    const mixer *mixer = args;
    const int64_t width = mixer->inner;
    float *gate = from_element(mixer, token * mixer->stride), *inputs = gate + 2 * width;
    for (int64_t i = 0; i < width; i += LANES)
        store_some(inputs, false, i, load_some(gate, false, i, width - i) * load_some(inputs, false, i, width - i),
                   width - i);
}

/* Multiplies what was convolved by the gate after it. */
static void gate_convolved(void *args, int64_t token) {
    const mixer *mixer = args;
    const int64_t width = mixer->inner;
    const float *gate = from_element(mixer, token * mixer->stride) + width, *convolved = gate + width;
    float *output = mixer->call->mixed + token * width;
    for (int64_t i = 0; i < width; i += LANES)
        store_some(output, false, i, load_some(gate, false, i, width - i) * load_some(convolved, false, i, width - i),
                   width - i);
}

/* Computes a short convolution. */
static void compute_short_conv(const mixer *mixer) {
    for_each_token(mixer, mixer->inner, gate_inputs);
    convolve(mixer, 2 * mixer->inner, mixer->inner, false);
    for_each_token(mixer, mixer->inner, gate_convolved);
}

/* --- the gated delta rule ----------------------------------------------------------------------------------------- */

/* ln(1 + e^x), as torch computes it. */
static float softplus(float x) { return x > 20 ? x : log1pf(expf(x)); }

/* Replaces what a token's betas are computed of by them. */
static void prepare_betas(const pagoda_recurrent_layer *layer, float *beta) {
    const int64_t count = layer->num_heads;
    for (int64_t i = 0; i < count; i += LANES)
        store_some(beta, false, i, layer->largest_beta / (1 + f32x16_exp(-load_some(beta, false, i, count - i))),
                   count - i);
}

/* Replaces what a token's betas are computed of by them, and its steps by the decays. */
static void prepare_delta_token(void *args, int64_t token) {
    const mixer *mixer = args;
    const pagoda_recurrent_layer *layer = mixer->layer;
    const int64_t num_heads = layer->num_heads;
    float *step = from_element(mixer, (token + 1) * mixer->stride - num_heads);
    for (int64_t head = 0; head < num_heads; head++)
        step[head] = layer->decay[head] * softplus(step[head] + layer->step_bias[head]);
    prepare_betas(layer, step - num_heads);
}

/* Computes the gated delta rule. */
static void compute_gated_delta(const mixer *mixer) {
    const pagoda_recurrent_layer *layer = mixer->layer;
    const int64_t channels = 2 * layer->num_groups * layer->state_size + mixer->inner;
    const int64_t step = mixer->stride - layer->num_heads;
    convolve(mixer, 0, channels, true);
    for_each_token(mixer, 2 * layer->num_heads, prepare_delta_token);
    pagoda_delta_rule_call rule = {
        .sequences = mixer->call->sequences, .output = mixer->call->mixed, .mixed = mixer->call->wide,
        .decay = from_element(mixer, step), .beta = from_element(mixer, step - layer->num_heads),
        .state = mixer->call->state, .stride = mixer->stride, .decay_stride = mixer->stride,
        .beta_stride = mixer->stride, .num_tokens = mixer->call->rows->num_rows, .num_key_heads = layer->num_groups,
        .num_heads = layer->num_heads, .key_dim = layer->state_size, .value_dim = layer->head_dim,
    };
    pagoda_gated_delta_rule(&rule);
    gate_output(mixer, channels);
}

/* --- Kimi delta attention ----------------------------------------------------------------------------------------- */

/* A section of each row, and where it is copied to. */
typedef struct {
    const mixer *mixer;
    int64_t element, width;
} section;

/* Copies a token's section. */
static void copy_section(void *args, int64_t token) {
    const section *from = args;
    memcpy(from->mixer->call->mixed + token * from->width,
           from_element(from->mixer, token * from->mixer->stride + from->element), (size_t)from->width * sizeof(float));
}

/* Computes a linear layer of a section of each row, from an element on; its outputs begin at another element. */
static void project(const mixer *mixer, const pagoda_weight *weight, int64_t element, int64_t output) {
    section from = {mixer, element, weight->in_features};
    pagoda_rows rows = *mixer->call->rows;
    pagoda_for_each_row(rows.num_rows, rows.num_rows * from.width, copy_section, &from);
    pagoda_pack_rows(&rows, mixer->call->mixed, 0, weight->kind, weight->in_features, NULL, 0);
    pagoda_linear(from_element(mixer, output), mixer->stride, &rows, weight, PAGODA_STORE);
}

/* Replaces what a token's betas are computed of by them, and its steps by the decays. */
static void prepare_kimi_token(void *args, int64_t token) {
    const mixer *mixer = args;
    const pagoda_recurrent_layer *layer = mixer->layer;
    float *row = from_element(mixer, token * mixer->stride), *step = row + layer->input.out_features;
    for (int64_t i = 0; i < mixer->inner; i++)
        step[i] = layer->decay[i / layer->head_dim] * softplus(step[i] + layer->step_bias[i]);
    prepare_betas(layer, row + 3 * mixer->inner);
}

/* Computes Kimi delta attention. */
static void compute_kimi_delta(const mixer *mixer) {
    const pagoda_recurrent_layer *layer = mixer->layer;
    const int64_t inner = mixer->inner, beta = 3 * inner, of_steps = beta + layer->num_heads;
    const int64_t step = layer->input.out_features, gate = step + inner;
    project(mixer, &layer->steps, of_steps, step);
    project(mixer, &layer->gates, of_steps + layer->steps.in_features, gate);
    convolve(mixer, 0, 3 * inner, true);
    for_each_token(mixer, inner, prepare_kimi_token);
    pagoda_delta_rule_call rule = {
        .sequences = mixer->call->sequences, .output = mixer->call->mixed, .mixed = mixer->call->wide,
        .decay = from_element(mixer, step), .beta = from_element(mixer, beta), .state = mixer->call->state,
        .stride = mixer->stride, .decay_stride = mixer->stride, .beta_stride = mixer->stride,
        .num_tokens = mixer->call->rows->num_rows, .num_key_heads = layer->num_heads, .num_heads = layer->num_heads,
        .key_dim = layer->head_dim, .value_dim = layer->head_dim, .decays_rows = true,
    };
    pagoda_gated_delta_rule(&rule);
    gate_output(mixer, gate);
}

/* --- Mamba -------------------------------------------------------------------------------------------------------- */

/* Replaces a token's steps by their softplus within the limits. */
static void prepare_mamba_token(void *args, int64_t token) {
    const mixer *mixer = args;
    const pagoda_recurrent_layer *layer = mixer->layer;
    float *step = from_element(mixer, (token + 1) * mixer->stride - layer->num_heads);
    for (int64_t head = 0; head < layer->num_heads; head++)
        step[head] = fminf(fmaxf(softplus(step[head] + layer->step_bias[head]), layer->smallest_step),
                           layer->largest_step);
}

/* Computes Mamba's selective scan. */
static void compute_mamba(const mixer *mixer) {
    const pagoda_recurrent_layer *layer = mixer->layer;
    convolve(mixer, mixer->inner, mixer->inner + 2 * layer->num_groups * layer->state_size, true);
    for_each_token(mixer, layer->num_heads, prepare_mamba_token);
    pagoda_scan_call scan = {
        .sequences = mixer->call->sequences, .output = mixer->call->mixed, .mixed = from_element(mixer, mixer->inner),
        .steps = from_element(mixer, mixer->stride - layer->num_heads), .decay = layer->decay, .skip = layer->skip,
        .state = mixer->call->state, .stride = mixer->stride, .step_stride = mixer->stride,
        .num_heads = layer->num_heads, .num_groups = layer->num_groups, .head_dim = layer->head_dim,
        .state_size = layer->state_size,
    };
    pagoda_selective_scan(&scan);
    gate_output(mixer, 0);
}

void pagoda_compute_recurrent(const pagoda_recurrent_layer *layer, const pagoda_recurrent_call *call) {
    mixer mixer = {layer, call, layer->input.out_features, (int64_t)layer->num_heads * layer->head_dim};
    if (layer->kind == PAGODA_KIMI_DELTA) mixer.stride += 2 * mixer.inner;
    pagoda_linear(call->wide, mixer.stride, call->rows, &layer->input, PAGODA_STORE);
    switch (layer->kind) {
    case PAGODA_SHORT_CONV: compute_short_conv(&mixer); break;
    case PAGODA_GATED_DELTA: compute_gated_delta(&mixer); break;
    case PAGODA_MAMBA: compute_mamba(&mixer); break;
    case PAGODA_KIMI_DELTA: compute_kimi_delta(&mixer); break;
    }
}
