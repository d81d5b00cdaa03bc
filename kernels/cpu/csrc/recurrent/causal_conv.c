/* See causal_conv.h.
 *
 * A part is a block of channels of one sequence. It goes from the last token to the first, because a token's output
 * replaces its input, which the tokens after it need.
 */
#include "recurrent/causal_conv.h"

#include "runtime/integers.h"
#include "runtime/threads.h"
#include "runtime/vector.h"

enum { CHANNELS_PER_PART = 256, MAX_WIDTH = 16 };

/* A block of channels of one sequence. */
typedef struct {
    const pagoda_conv_call *call;
    pagoda_sequence sequence;
    int64_t channel, count;
    float past[MAX_WIDTH - 1][CHANNELS_PER_PART]; /* the inputs before the first token */
} conv_part;

/* The inputs of a token, which may be one of the last before the sequence's first. */
static const float *row_at(const conv_part *part, int64_t token) {
    int64_t from_first = token - part->sequence.first;
    if (from_first < 0) return part->past[part->call->width - 1 + from_first];
    return part->call->inputs + token * part->call->stride + part->channel;
}

/* Writes the state after a token to a slot. */
static void write_state(const conv_part *part, int64_t token, int64_t slot) {
    const pagoda_conv_call *call = part->call;
    int64_t width = call->width - 1;
    float *to = call->state + slot * width * call->channels + part->channel;
    for (int64_t row = 0; row < width; row++, to += call->channels)
        memcpy(to, row_at(part, token - width + 1 + row), (size_t)part->count * sizeof *to);
}

/* Replaces a token's inputs by its outputs. */
static void convolve(const conv_part *part, int64_t token) {
    const pagoda_conv_call *call = part->call;
    const float *rows[MAX_WIDTH];
    for (int64_t tap = 0; tap < call->width; tap++) rows[tap] = row_at(part, token - call->width + 1 + tap);
    float *output = call->inputs + token * call->stride + part->channel;
    for (int64_t i = 0; i < part->count; i += LANES) {
        int64_t count = part->count - i;
        const float *weight = call->weight + part->channel;
        f32x16 sum = {0};
        if (call->bias) sum = load_some(call->bias + part->channel, false, i, count);
        for (int64_t tap = 0; tap < call->width; tap++, weight += call->channels)
            sum = f32x16_fma(load_some(weight, false, i, count), load_some(rows[tap], false, i, count), sum);
        if (call->has_silu) sum = sum / (1 + f32x16_exp(-sum));
        store_some(output, false, i, sum, count);
    }
}

/* Computes one part. */
static void conv_one_part(void *args, int64_t index) {
    const pagoda_conv_call *call = args;
    int64_t num_blocks = divide_up(call->channels, CHANNELS_PER_PART);
    conv_part part = {.call = call, .channel = index % num_blocks * CHANNELS_PER_PART};
    part.sequence = pagoda_sequence_at(call->sequences, index / num_blocks);
    part.count = min(call->channels - part.channel, CHANNELS_PER_PART);
    if (part.sequence.end <= part.sequence.first) return;
    int64_t width = call->width - 1;
    const float *state = call->state + part.sequence.slot * width * call->channels + part.channel;
    for (int64_t row = 0; row < width && !part.sequence.starts; row++)
        memcpy(part.past[row], state + row * call->channels, (size_t)part.count * sizeof *state);
    for (; part.sequence.save < part.sequence.end_save; part.sequence.save++) {
        int64_t slot = call->sequences->save_slots[part.sequence.save];
        if (slot >= 0) write_state(&part, call->sequences->save_tokens[part.sequence.save], slot);
    }
    write_state(&part, part.sequence.end - 1, part.sequence.slot);
    for (int64_t token = part.sequence.end - 1; token >= part.sequence.first; token--) convolve(&part, token);
}

void pagoda_causal_conv(const pagoda_conv_call *call) {
    int64_t num_parts = call->sequences->num_seqs * divide_up(call->channels, CHANNELS_PER_PART);
    pagoda_for_each_row(num_parts, (int64_t)call->num_tokens * call->channels, conv_one_part, (void *)call);
}
