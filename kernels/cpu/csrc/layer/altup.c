/* See altup.h. */
#include "layer/altup.h"

#include "runtime/rms_norm.h"
#include "runtime/threads.h"
#include "runtime/vector.h"

/* Arguments of a loop over tokens. */
typedef struct {
    const pagoda_altup *altup;
    float *streams, *hidden;
    int64_t num_tokens, width;
} streams_call;

/* Computes the modalities of one token's stream. */
static void route(const pagoda_altup *altup, const float *stream, int64_t width, float *modalities) {
    const float factor = rms_norm_factor(stream, false, width, altup->eps);
    float products[LANES] = {0};
    for (int32_t s = 0; s < altup->num_streams; s++) {
        f32x16 sum = {0};
        for (int64_t i = 0; i < width; i += LANES) {
            f32x16 weight = load_some(altup->router + s * width, false, i, width - i);
            sum = f32x16_fma(load_some(stream, false, i, width - i), weight, sum);
        }
        products[s] = f32x16_sum(sum) * factor;
    }
    f32x16_store(modalities, f32x16_tanh(f32x16_load(products)));
}

/* The sum of weights times modalities. */
static float mixed(const float *weights, const float *modalities, int32_t count) {
    float sum = 0;
    for (int32_t i = 0; i < count; i++) sum += weights[i] * modalities[i];
    return sum;
}

/* Predicts one token's streams. */
static void predict_token(void *args, int64_t token) {
    const streams_call *call = args;
    const pagoda_altup *altup = call->altup;
    const int32_t count = altup->num_streams;
    const int64_t stride = call->num_tokens * call->width;
    float *streams = call->streams + token * call->width, *hidden = call->hidden + token * call->width;
    float modalities[LANES], coefficients[PAGODA_MOST_STREAMS * PAGODA_MOST_STREAMS];
    route(altup, streams + altup->active * stride, call->width, modalities);
    for (int32_t i = 0; i < count * count; i++)
        coefficients[i] = mixed(altup->predictions + i * count, modalities, count);
    for (int64_t i = 0; i < call->width; i += LANES) {
        const int64_t left = call->width - i;
        f32x16 before[PAGODA_MOST_STREAMS];
        for (int32_t s = 0; s < count; s++) before[s] = load_some(streams + s * stride, false, i, left);
        for (int32_t s = 0; s < count; s++) {
            f32x16 sum = before[s];
            for (int32_t from = 0; from < count; from++)
                sum = f32x16_fma(f32x16_set(coefficients[s * count + from]), before[from], sum);
            store_some(streams + s * stride, false, i, sum, left);
            if (s == altup->active) store_some(hidden, false, i, sum, left);
        }
    }
}

void pagoda_predict_streams(const pagoda_altup *altup, float *streams, float *hidden, int32_t num_tokens,
                            int32_t hidden_size) {
    streams_call call = {altup, streams, hidden, num_tokens, hidden_size};
    pagoda_for_each_row(num_tokens, (int64_t)altup->num_streams * num_tokens * hidden_size, predict_token, &call);
}

/* Corrects one token's streams. */
static void correct_token(void *args, int64_t token) {
    const streams_call *call = args;
    const pagoda_altup *altup = call->altup;
    const int32_t count = altup->num_streams;
    const int64_t stride = call->num_tokens * call->width;
    float *streams = call->streams + token * call->width, *hidden = call->hidden + token * call->width;
    float modalities[LANES], factors[PAGODA_MOST_STREAMS];
    route(altup, hidden, call->width, modalities);
    for (int32_t s = 0; s < count; s++) factors[s] = 1 + mixed(altup->corrections + s * count, modalities, count);
    for (int64_t i = 0; i < call->width; i += LANES) {
        const int64_t left = call->width - i;
        f32x16 predicted = load_some(streams + altup->active * stride, false, i, left);
        f32x16 innovation = load_some(hidden, false, i, left) - predicted;
        for (int32_t s = 0; s < count; s++) {
            f32x16 stream = load_some(streams + s * stride, false, i, left);
            store_some(streams + s * stride, false, i, f32x16_fma(f32x16_set(factors[s]), innovation, stream), left);
        }
        f32x16 output = load_some(streams + altup->active * stride, false, i, left);
        if (altup->output_scale) output = output * load_some(altup->output_scale, false, i, left);
        store_some(hidden, false, i, output, left);
    }
}

void pagoda_correct_streams(const pagoda_altup *altup, float *streams, float *hidden, int32_t num_tokens,
                            int32_t hidden_size) {
    streams_call call = {altup, streams, hidden, num_tokens, hidden_size};
    pagoda_for_each_row(num_tokens, (int64_t)altup->num_streams * num_tokens * hidden_size, correct_token, &call);
}

/* Arguments of pagoda_match_rows. */
typedef struct {
    float *rows;
    const float *reference;
    int64_t width;
} match_call;

static float mean_square(const float *row, int64_t width) {
    f32x16 squares = {0};
    for (int64_t i = 0; i < width; i += LANES) {
        f32x16 x = load_some(row, false, i, width - i);
        squares = f32x16_fma(x, x, squares);
    }
    return f32x16_sum(squares) / (float)width;
}

/* Scales one row. */
static void match_row(void *args, int64_t index) {
    const match_call *call = args;
    float *row = call->rows + index * call->width;
    const float own = mean_square(row, call->width), smallest = 1e-5f;
    const float size = mean_square(call->reference + index * call->width, call->width);
    const float factor = sqrtf(size) / sqrtf(own < smallest ? smallest : own);
    for (int64_t i = 0; i < call->width; i += LANES)
        store_some(row, false, i, load_some(row, false, i, call->width - i) * factor, call->width - i);
}

void pagoda_match_rows(float *rows, const float *reference, int32_t num_rows, int32_t width) {
    match_call call = {rows, reference, width};
    pagoda_for_each_row(num_rows, (int64_t)num_rows * width, match_row, &call);
}
