/* See causal_conv.h.
 *
 * A part is a block of channels of one sequence. It goes from token to token with the inputs of the last ones in the
 * first cache, because a token's output replaces its input, which the tokens after it need.
 */
#include "recurrent/causal_conv.h"

#include "runtime/integers.h"
#include "runtime/threads.h"
#include "runtime/vector.h"

enum { CHANNELS_PER_PART = 256, MAX_WIDTH = 16, USUAL_WIDTH = 4, FLOATS_PER_LINE = 16, TOKENS_AHEAD = 4 };

/* A block of channels of one sequence. */
typedef struct {
    const pagoda_conv_call *call;
    pagoda_sequence sequence;
    int64_t channel, count;
    float (*past)[CHANNELS_PER_PART]; /* [width - 1]: the last inputs, as a ring */
} conv_part;

/* The row of `past` after another one. */
INLINE int64_t row_after(int64_t row, int width) { return row + 1 < width - 1 ? row + 1 : 0; }

/* A row of a slot's state. */
static float *state_row(const conv_part *part, int64_t slot, int64_t row) {
    const pagoda_conv_call *call = part->call;
    return call->state + (slot * (call->width - 1) + row) * call->channels + part->channel;
}

/* The last inputs before the first token; `oldest` is their row in `past`. */
static void read_state(const conv_part *part, int64_t oldest) {
    const int64_t width = part->call->width - 1;
    const size_t bytes = (size_t)part->count * sizeof **part->past;
    for (int64_t row = 0; row < width; row++) {
        float *to = part->past[(oldest + row) % width];
        if (part->sequence.starts) memset(to, 0, bytes);
        else memcpy(to, state_row(part, part->sequence.slot, row), bytes);
    }
}

/* Writes the last inputs to a slot; `oldest` is the row of the first of them. */
static void write_state(const conv_part *part, int64_t slot, int64_t oldest) {
    const int64_t width = part->call->width - 1;
    for (int64_t row = 0; row < width; row++)
        memcpy(state_row(part, slot, row), part->past[(oldest + row) % width], (size_t)part->count * sizeof(float));
}

/* Replaces a token's inputs by its outputs, and the oldest of the past ones by the token's. The inputs of a later token
 * are prefetched meanwhile: the processor's own prefetchers do not cross pages. */
INLINE void convolve(const conv_part *part, int64_t token, int64_t oldest, const int width) {
    const pagoda_conv_call *call = part->call;
    const float *weight = call->weight + part->channel, *bias = call->bias ? call->bias + part->channel : NULL;
    const float *rows[MAX_WIDTH];
    for (int tap = 0; tap < width - 1; tap++) {
        rows[tap] = part->past[oldest];
        oldest = row_after(oldest, width);
    }
    float *newest = part->past[oldest], *own = call->inputs + token * call->stride + part->channel;
    const float *later = own + min(TOKENS_AHEAD, part->sequence.end - 1 - token) * call->stride;
    for (int64_t i = 0; i < part->count; i += LANES) {
        __builtin_prefetch(later + i, 1, 3);
        const int64_t count = part->count - i;
        const f32x16 input = load_some(own, false, i, count);
        f32x16 sum = bias ? load_some(bias, false, i, count) : (f32x16){0};
        for (int tap = 0; tap < width - 1; tap++)
            sum = f32x16_fma(load_some(weight + tap * call->channels, false, i, count),
                             load_some(rows[tap], false, i, count), sum);
        sum = f32x16_fma(load_some(weight + (width - 1) * call->channels, false, i, count), input, sum);
        if (call->has_silu) sum = sum / (1 + f32x16_exp(-sum));
        f32x16_store(newest + i, input);
        store_some(own, false, i, sum, count);
    }
}

/* Computes a sequence's tokens, of `width` taps each. */
INLINE void convolve_all(conv_part *part, const int width) {
    const pagoda_conv_call *call = part->call;
    int64_t oldest = 0;
    read_state(part, oldest);
    for (int64_t token = part->sequence.first; token < part->sequence.end; token++) {
        convolve(part, token, oldest, width);
        oldest = row_after(oldest, width);
        const int64_t slot = pagoda_save_slot(call->sequences, &part->sequence, token);
        if (slot >= 0) write_state(part, slot, oldest);
    }
    write_state(part, part->sequence.slot, oldest);
}

/* Prefetches the state that a later part reads: a decode reads a little of each of many rows. */
static void fetch_state(const pagoda_conv_call *call, int64_t index, int64_t num_blocks) {
    if (index >= call->sequences->num_seqs * num_blocks) return;
    const conv_part part = {.call = call, .channel = index % num_blocks * CHANNELS_PER_PART};
    const int64_t slot = call->sequences->slots[index / num_blocks];
    const int64_t count = min(call->channels - part.channel, CHANNELS_PER_PART);
    for (int64_t row = 0; slot >= 0 && row < call->width - 1; row++)
        for (int64_t i = 0; i < count; i += FLOATS_PER_LINE) __builtin_prefetch(state_row(&part, slot, row) + i, 1, 2);
}

/* Computes one part. */
static void conv_one_part(void *args, int64_t index) {
    const pagoda_conv_call *call = args;
    int64_t num_blocks = divide_up(call->channels, CHANNELS_PER_PART);
    _Alignas(64) float past[MAX_WIDTH - 1][CHANNELS_PER_PART];
    conv_part part = {.call = call, .channel = index % num_blocks * CHANNELS_PER_PART, .past = past};
    part.sequence = pagoda_sequence_at(call->sequences, index / num_blocks);
    part.count = min(call->channels - part.channel, CHANNELS_PER_PART);
    if (part.sequence.end <= part.sequence.first) return;
    fetch_state(call, index + pagoda_num_threads(), num_blocks); /* which this thread probably computes next */
    if (call->width == USUAL_WIDTH) convolve_all(&part, USUAL_WIDTH);
    else convolve_all(&part, call->width);
}

void pagoda_causal_conv(const pagoda_conv_call *call) {
    int64_t num_parts = call->sequences->num_seqs * divide_up(call->channels, CHANNELS_PER_PART);
    pagoda_for_each_row(num_parts, (int64_t)call->num_tokens * call->channels, conv_one_part, (void *)call);
}
