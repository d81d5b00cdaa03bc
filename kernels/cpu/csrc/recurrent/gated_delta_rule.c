/* See gated_delta_rule.h.
 *
 * A part is a slice of some columns of one head's state of one sequence. It is copied to memory that the first cache
 * holds, where the sequence's tokens go over it one after another, and back. A decode's single token goes over the whole
 * rows of the state where it is instead. A column's sums go over its rows in order, so its bits depend neither on the
 * slice nor on the tokens that are computed in the same step.
 */
#include "recurrent/gated_delta_rule.h"

#include <math.h>

#include "runtime/integers.h"
#include "runtime/register.h"
#include "runtime/scratch.h"
#include "runtime/threads.h"

/* Of a slice: sums of several registers, so that one's latency hides behind the others'. A slice stays in the first
 * cache. */
enum { REGISTERS = 4, COLUMNS = REGISTERS * REGISTER_LANES };
enum { TOKENS_AHEAD = 3, FLOATS_PER_LINE = 16 }; /* of what is prefetched, and of a line of the caches */
enum { WIDE_REGISTERS = 8, WIDE_COLUMNS = WIDE_REGISTERS * REGISTER_LANES }; /* of a row, for a single token */

/* A slice of the state, [key_dim, COLUMNS]; columns beyond value_dim are zero. */
typedef struct {
    const pagoda_delta_rule_call *call;
    float *values;
    int64_t head, key_head, column, count;
} state_slice;

/* What a token has of the slice's head. */
typedef struct {
    const float *query, *key, *value;
    const float *decay; /* the factor of all rows, or of each */
    float beta;
} head_input;

/* Divides a query or key by its length, and multiplies it. */
static void normalize(float *x, int64_t width, float multiplier) {
    f32x16 squares = {0};
    for (int64_t i = 0; i < width; i += LANES) {
        f32x16 part = load_some(x, false, i, width - i);
        squares = f32x16_fma(part, part, squares);
    }
    float factor = multiplier / sqrtf(f32x16_sum(squares) + 1e-6f);
    for (int64_t i = 0; i < width; i += LANES)
        store_some(x, false, i, load_some(x, false, i, width - i) * factor, width - i);
}

/* Prepares what the heads and slices of a token share. */
static void prepare_token(void *args, int64_t token) {
    const pagoda_delta_rule_call *call = args;
    float *head = call->mixed + token * call->stride, *decay = call->decay + token * call->decay_stride;
    const int64_t num_decays = (int64_t)call->num_heads * (call->decays_rows ? call->key_dim : 1);
    const float query_multiplier = 1 / sqrtf((float)call->key_dim);
    for (int64_t i = 0; i < 2 * call->num_key_heads; i++, head += call->key_dim)
        normalize(head, call->key_dim, i < call->num_key_heads ? query_multiplier : 1);
    for (int64_t i = 0; i < num_decays; i += LANES)
        store_some(decay, false, i, f32x16_exp(load_some(decay, false, i, num_decays - i)), num_decays - i);
}

/* A token's input of the slice's head. */
INLINE head_input input_at(const state_slice *slice, int64_t token) {
    const pagoda_delta_rule_call *call = slice->call;
    const int64_t key_dim = call->key_dim, key_width = call->num_key_heads * key_dim;
    const float *row = call->mixed + token * call->stride, *query = row + slice->key_head * key_dim;
    return (head_input){
        .query = query, .key = query + key_width,
        .value = row + 2 * key_width + slice->head * call->value_dim + slice->column,
        .decay = call->decay + token * call->decay_stride + slice->head * (call->decays_rows ? key_dim : 1),
        .beta = call->beta[token * call->beta_stride + slice->head],
    };
}

/* Where the slice is in a slot's state. */
static float *slice_in(const state_slice *slice, int64_t slot) {
    const pagoda_delta_rule_call *call = slice->call;
    return call->state + (slot * call->num_heads + slice->head) * call->key_dim * call->value_dim + slice->column;
}

/* Reads the state before a sequence's first token. */
static void read_slice(const state_slice *slice, const pagoda_sequence *sequence) {
    const int64_t key_dim = slice->call->key_dim, value_dim = slice->call->value_dim;
    if (sequence->starts || slice->count < COLUMNS)
        memset(slice->values, 0, (size_t)(key_dim * COLUMNS) * sizeof *slice->values);
    if (sequence->starts) return;
    const float *from = slice_in(slice, sequence->slot);
    for (int64_t row = 0; row < key_dim; row++, from += value_dim)
        memcpy(slice->values + row * COLUMNS, from, (size_t)slice->count * sizeof *from);
}

/* Writes the slice to a slot. */
static void write_slice(const state_slice *slice, int64_t slot) {
    float *to = slice_in(slice, slot);
    for (int64_t row = 0; row < slice->call->key_dim; row++, to += slice->call->value_dim)
        memcpy(to, slice->values + row * COLUMNS, (size_t)slice->count * sizeof *to);
}

/* What a row of the state is multiplied by for a sum with keys: the key, and the row's decay if it has one. */
INLINE f32_register recalling(const head_input *input, int64_t row, bool decays_rows) {
    return register_set(decays_rows ? input->key[row] * input->decay[row] : input->key[row]);
}

/* recalled = key S, or key decay S. */
INLINE void recall(const float *values, int64_t key_dim, const head_input *input, bool decays_rows,
                   f32_register *recalled) {
    f32_register sums[REGISTERS] = {0};
    for (int64_t row = 0; row < key_dim; row++, values += COLUMNS) {
        const f32_register key = recalling(input, row, decays_rows);
#pragma GCC unroll 4
        for (int i = 0; i < REGISTERS; i++)
            sums[i] = register_fma(key, register_load(values + i * REGISTER_LANES), sums[i]);
    }
    memcpy(recalled, sums, sizeof sums);
}

/* S = decay S + key change; output = query S; and what the token that follows recalls. */
INLINE void update(float *values, int64_t key_dim, const head_input *input, const head_input *next, bool decays_rows,
                   const f32_register *change, f32_register *output, f32_register *recalled) {
    f32_register read[REGISTERS] = {0}, sums[REGISTERS] = {0}, changes[REGISTERS];
    memcpy(changes, change, sizeof changes);
    f32_register decay = register_set(*input->decay);
    for (int64_t row = 0; row < key_dim; row++, values += COLUMNS) {
        const f32_register key = register_set(input->key[row]), query = register_set(input->query[row]);
        const f32_register next_key = recalling(next, row, decays_rows);
        if (decays_rows) decay = register_set(input->decay[row]);
#pragma GCC unroll 4
        for (int i = 0; i < REGISTERS; i++) {
            float *at = values + i * REGISTER_LANES;
            const f32_register value = register_fma(key, changes[i], register_load(at) * decay);
            register_store(at, value);
            read[i] = register_fma(query, value, read[i]);
            sums[i] = register_fma(next_key, value, sums[i]);
        }
    }
    memcpy(output, read, sizeof read);
    memcpy(recalled, sums, sizeof sums);
}

/* change = beta (value - factor recalled); columns that do not exist have none. */
INLINE void compute_change(const state_slice *slice, const head_input *input, float factor,
                           const f32_register *recalled, f32_register *change) {
    float values[COLUMNS] = {0};
    if (slice->count == COLUMNS) memcpy(values, input->value, sizeof values);
    else memcpy(values, input->value, (size_t)slice->count * sizeof *values);
    for (int i = 0; i < REGISTERS; i++)
        change[i] = (register_load(values + i * REGISTER_LANES) - recalled[i] * factor) * input->beta;
}

/* Stores a token's output of the slice. */
INLINE void store_output(const state_slice *slice, int64_t token, const f32_register *output) {
    const pagoda_delta_rule_call *call = slice->call;
    float *to = call->output + (token * call->num_heads + slice->head) * call->value_dim + slice->column;
    if (slice->count == COLUMNS) memcpy(to, output, COLUMNS * sizeof *to);
    else memcpy(to, output, (size_t)slice->count * sizeof *to);
}

/* Prefetches what a later token has of the slice's head: the processor cannot predict rows that are pages apart. */
INLINE void fetch_input(const state_slice *slice, int64_t token) {
    const head_input input = input_at(slice, token);
    for (int64_t i = 0; i < slice->call->key_dim; i += FLOATS_PER_LINE) {
        __builtin_prefetch(input.query + i, 0, 3);
        __builtin_prefetch(input.key + i, 0, 3);
    }
    for (int64_t i = 0; i < COLUMNS; i += FLOATS_PER_LINE) __builtin_prefetch(input.value + i, 0, 3);
}

/* Computes the tokens of a sequence with a slice of its state. */
INLINE void compute_slice(const state_slice *slice, pagoda_sequence *sequence, bool decays_rows) {
    const pagoda_delta_rule_call *call = slice->call;
    f32_register recalled[REGISTERS], change[REGISTERS], output[REGISTERS];
    head_input input = input_at(slice, sequence->first);
    recall(slice->values, call->key_dim, &input, decays_rows, recalled);
    for (int64_t token = sequence->first; token < sequence->end; token++) {
        head_input next = input_at(slice, min(token + 1, sequence->end - 1)); /* the last one's is not used */
        fetch_input(slice, min(token + TOKENS_AHEAD, sequence->end - 1));
        compute_change(slice, &input, decays_rows ? 1 : *input.decay, recalled, change);
        update(slice->values, call->key_dim, &input, &next, decays_rows, change, output, recalled);
        store_output(slice, token, output);
        int64_t save_slot = pagoda_save_slot(call->sequences, sequence, token);
        if (save_slot >= 0) write_slice(slice, save_slot);
        input = next;
    }
}

/* Computes one token with WIDE_COLUMNS columns of a slot's state, by the sums of compute_slice. The state at `later` is
 * prefetched meanwhile, when this one's comes from the second cache. */
INLINE void compute_one(const state_slice *slice, int64_t token, float *state, const float *later, bool decays_rows) {
    const pagoda_delta_rule_call *call = slice->call;
    const int64_t value_dim = call->value_dim;
    const head_input input = input_at(slice, token);
    f32_register sums[WIDE_REGISTERS] = {0}, change[WIDE_REGISTERS], read[WIDE_REGISTERS] = {0};
    const float *from = state;
    for (int64_t row = 0; row < call->key_dim; row++, from += value_dim)
#pragma GCC unroll 8
        for (int i = 0; i < WIDE_REGISTERS; i++) {
            f32_register value = register_load(from + i * REGISTER_LANES);
            sums[i] = register_fma(recalling(&input, row, decays_rows), value, sums[i]);
        }
    const float factor = decays_rows ? 1 : *input.decay;
#pragma GCC unroll 8
    for (int i = 0; i < WIDE_REGISTERS; i++)
        change[i] = (register_load(input.value + i * REGISTER_LANES) - sums[i] * factor) * input.beta;
    for (int64_t row = 0; row < call->key_dim; row++, state += value_dim, later += value_dim)
#pragma GCC unroll 8
        for (int i = 0; i < WIDE_REGISTERS; i++) {
            float *at = state + i * REGISTER_LANES;
            if (i * REGISTER_LANES % FLOATS_PER_LINE == 0) __builtin_prefetch(later + i * REGISTER_LANES, 0, 2);
            f32_register decayed = register_load(at) * input.decay[decays_rows ? row : 0];
            f32_register value = register_fma(register_set(input.key[row]), change[i], decayed);
            register_store(at, value);
            read[i] = register_fma(register_set(input.query[row]), value, read[i]);
        }
    float *to = call->output + (token * call->num_heads + slice->head) * value_dim + slice->column;
#pragma GCC unroll 8
    for (int i = 0; i < WIDE_REGISTERS; i++) register_store(to + i * REGISTER_LANES, read[i]);
}

/* Whether a sequence has one token, which changes the state of its slot and no other. */
static bool is_decode(const pagoda_delta_rule_call *call, const pagoda_sequence *sequence) {
    return sequence->end == sequence->first + 1 && !sequence->starts && sequence->save == sequence->end_save &&
           call->value_dim % WIDE_COLUMNS == 0;
}

/* Computes one part: the tokens of one sequence with one slice; the first slice's part computes a decode whole. */
static void compute_part(void *args, int64_t index) {
    const pagoda_delta_rule_call *call = args;
    const int64_t num_slices = divide_up(call->value_dim, COLUMNS);
    pagoda_sequence sequence = pagoda_sequence_at(call->sequences, index / num_slices / call->num_heads);
    if (sequence.end <= sequence.first) return;
    state_slice slice = {.call = call, .head = index / num_slices % call->num_heads};
    slice.key_head = slice.head / (call->num_heads / call->num_key_heads);
    if (is_decode(call, &sequence)) {
        if (index % num_slices > 0) return;
        const int64_t later_head = slice.head + pagoda_num_threads(); /* which this thread probably computes next */
        const bool has_later = later_head < call->num_heads;
        const int64_t to_later = has_later ? (later_head - slice.head) * call->key_dim * call->value_dim : 0;
        for (; slice.column < call->value_dim; slice.column += WIDE_COLUMNS) {
            float *state = slice_in(&slice, sequence.slot);
            if (call->decays_rows)
                compute_one(&slice, sequence.first, state, state + to_later, true);
            else
                compute_one(&slice, sequence.first, state, state + to_later, false);
        }
        return;
    }
    slice.column = index % num_slices * COLUMNS;
    slice.count = min(call->value_dim - slice.column, COLUMNS);
    slice.values = pagoda_scratch(SCRATCH_STATE, (size_t)(call->key_dim * COLUMNS) * sizeof *slice.values);
    read_slice(&slice, &sequence);
    if (call->decays_rows)
        compute_slice(&slice, &sequence, true);
    else
        compute_slice(&slice, &sequence, false);
    write_slice(&slice, sequence.slot);
}

void pagoda_gated_delta_rule(const pagoda_delta_rule_call *call) {
    int64_t elements = (int64_t)call->num_tokens * 2 * call->num_key_heads * call->key_dim;
    if (call->decays_rows) elements += (int64_t)call->num_tokens * call->num_heads * call->key_dim;
    pagoda_for_each_row(call->num_tokens, elements, prepare_token, (void *)call);
    int64_t num_slices = divide_up(call->value_dim, COLUMNS);
    pagoda_parallel_for(call->sequences->num_seqs * call->num_heads * num_slices, compute_part, (void *)call);
}
