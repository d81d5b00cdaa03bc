/* See selective_scan.h.
 *
 * A part is a slice of some rows of one head's state of one sequence. It is copied to memory that the first cache holds,
 * where the sequence's tokens go over it one after another, and back. A row's bits depend neither on the slice nor on the
 * tokens that are computed in the same step.
 */
#include "recurrent/selective_scan.h"

#include "runtime/integers.h"
#include "runtime/register.h"
#include "runtime/scratch.h"
#include "runtime/threads.h"

enum { ROWS = 16 };

/* A slice of the state, [ROWS, width]; rows are padded with zeros to whole registers. */
typedef struct {
    const pagoda_scan_call *call;
    float *values;
    int64_t head, row, count, width;
} state_slice;

/* Where the slice is in a slot's state. */
static float *slice_in(const state_slice *slice, int64_t slot) {
    const pagoda_scan_call *call = slice->call;
    return call->state + ((slot * call->num_heads + slice->head) * call->head_dim + slice->row) * call->state_size;
}

/* Reads the state before a sequence's first token. */
static void read_slice(const state_slice *slice, const pagoda_sequence *sequence) {
    const int64_t state_size = slice->call->state_size;
    if (sequence->starts || slice->width > state_size)
        memset(slice->values, 0, (size_t)(slice->count * slice->width) * sizeof *slice->values);
    if (sequence->starts) return;
    const float *from = slice_in(slice, sequence->slot);
    for (int64_t row = 0; row < slice->count; row++)
        memcpy(slice->values + row * slice->width, from + row * state_size, (size_t)state_size * sizeof *from);
}

/* Writes the slice to a slot. */
static void write_slice(const state_slice *slice, int64_t slot) {
    const int64_t state_size = slice->call->state_size;
    float *to = slice_in(slice, slot);
    for (int64_t row = 0; row < slice->count; row++)
        memcpy(to + row * state_size, slice->values + row * slice->width, (size_t)state_size * sizeof *to);
}

/* One row: S = factor S + change key; returns S query. */
INLINE float update(float *row, int64_t width, float factor, float change, const float *key, const float *query) {
    f32_register sum = {0};
    for (int64_t i = 0; i < width; i += REGISTER_LANES) {
        f32_register value = register_fma(register_set(change), register_load(key + i), register_load(row + i) * factor);
        register_store(row + i, value);
        sum = register_fma(value, register_load(query + i), sum);
    }
    return register_sum(sum);
}

/* A group's row of keys or queries: the one in memory, or a padded copy in `padded` if it does not fill registers. */
static const float *padded_row(const state_slice *slice, const float *row, float *padded) {
    if (slice->width == slice->call->state_size) return row;
    memcpy(padded, row, (size_t)slice->call->state_size * sizeof *row); /* zeros follow it, from the beginning */
    return padded;
}

/* Computes one token. */
static void compute_token(const state_slice *slice, int64_t token, float *padded) {
    const pagoda_scan_call *call = slice->call;
    const int64_t group = slice->head / (call->num_heads / call->num_groups);
    const float *mixed = call->mixed + token * call->stride;
    const float *inputs = mixed + slice->head * call->head_dim + slice->row;
    const float *key = mixed + call->num_heads * call->head_dim + group * call->state_size;
    const float *query = key + call->num_groups * call->state_size;
    key = padded_row(slice, key, padded);
    query = padded_row(slice, query, padded + slice->width);
    const float step = call->steps[token * call->step_stride + slice->head], skip = call->skip[slice->head];
    const float factor = f32x16_exp(f32x16_set(step * call->decay[slice->head]))[0];
    float *output = call->output + (token * call->num_heads + slice->head) * call->head_dim + slice->row;
    for (int64_t row = 0; row < slice->count; row++) {
        float read = update(slice->values + row * slice->width, slice->width, factor, step * inputs[row], key, query);
        output[row] = read + skip * inputs[row];
    }
}

/* Computes one part: the tokens of one sequence with one slice. */
static void compute_part(void *args, int64_t index) {
    const pagoda_scan_call *call = args;
    const int64_t num_slices = divide_up(call->head_dim, ROWS);
    pagoda_sequence sequence = pagoda_sequence_at(call->sequences, index / num_slices / call->num_heads);
    if (sequence.end <= sequence.first) return;
    state_slice slice = {.call = call, .head = index / num_slices % call->num_heads};
    slice.row = index % num_slices * ROWS;
    slice.count = min(call->head_dim - slice.row, ROWS);
    slice.width = divide_up(call->state_size, REGISTER_LANES) * REGISTER_LANES;
    slice.values = pagoda_scratch(SCRATCH_STATE, (size_t)((ROWS + 2) * slice.width) * sizeof *slice.values);
    float *padded = slice.values + ROWS * slice.width;
    memset(padded, 0, (size_t)(2 * slice.width) * sizeof *padded);
    read_slice(&slice, &sequence);
    for (int64_t token = sequence.first; token < sequence.end; token++) {
        compute_token(&slice, token, padded);
        int64_t save_slot = pagoda_save_slot(call->sequences, &sequence, token);
        if (save_slot >= 0) write_slice(&slice, save_slot);
    }
    write_slice(&slice, sequence.slot);
}

void pagoda_selective_scan(const pagoda_scan_call *call) {
    int64_t num_slices = divide_up(call->head_dim, ROWS);
    pagoda_parallel_for(call->sequences->num_seqs * call->num_heads * num_slices, compute_part, (void *)call);
}
