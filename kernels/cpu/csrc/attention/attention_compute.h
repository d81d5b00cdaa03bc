/* Computing one item of attention's plan. Functions that depend on the cache's type take it as a constant.
 * attention_float32.c and attention_bfloat16.c include this file for one type each: each takes seconds to compile.
 */
#ifndef PAGODA_ATTENTION_COMPUTE_H
#define PAGODA_ATTENTION_COMPUTE_H

#include "attention/attention_amx_in_place.h"
#include "attention/attention_amx_packed.h"
#include "attention/attention_in_place.h"
#include "attention/attention_item.h"
#include "attention/attention_packed.h"
#include "attention/attention_plan.h"
#include "runtime/scratch.h"
#include "runtime/threads.h"

/* A count rounded up to a multiple. */
INLINE int rounded_up(int count, int multiple) { return (count + multiple - 1) / multiple * multiple; }

/* Whether an item's keys are packed: it has too many rows to read them in place. */
INLINE bool is_packed(const attention_work *work) { return work->rows > MOST_ROWS_IN_PLACE; }

/* Reserves `bytes` of the memory that begins at `start` (NULL: only counts them). */
static void *take(char *start, size_t *used, size_t bytes) {
    size_t at = *used;
    *used += (bytes + 63) / 64 * 64;
    return start ? start + at : NULL;
}

/* Points the work's arrays into memory from `start` on; returns how much they take. With NULL it only measures. */
static size_t lay_out(attention_work *work, char *start) {
    size_t rows = (size_t)work->padded_rows, all_rows = rows * (size_t)work->item->num_heads;
    size_t value_dim = (size_t)work->call->value_dim, words = (size_t)work->padded_words;
    size_t panels = (value_dim + BLOCK_LANES - 1) / BLOCK_LANES;
    size_t used = 0;
    size_t query_rows = (size_t)(work->query_rows * work->item->num_heads);
    work->query = take(start, &used, query_rows * words * sizeof(uint32_t));
    work->sums = take(start, &used, all_rows * value_dim * sizeof(float));
    work->totals = take(start, &used, all_rows * LANES * sizeof(float));
    work->largest = take(start, &used, all_rows * sizeof(float));
    work->products = take(start, &used, is_packed(work) ? 0 : all_rows * sizeof *work->products);
    work->factors = take(start, &used, rows * sizeof(merge_factors));
    work->first_keys = take(start, &used, rows * sizeof(int32_t));
    work->end_keys = take(start, &used, rows * sizeof(int32_t));
    work->weights = take(start, &used, rows * KEYS_PER_TILE * sizeof(uint32_t));
    work->keys = take(start, &used, words * KEYS_PER_TILE * sizeof(uint32_t));
    work->values = take(start, &used, panels * KEYS_PER_TILE * BLOCK_LANES * sizeof(uint32_t));
    return used;
}

/* Copies one query as words, padded to whole vectors. */
INLINE void copy_query(const int kind, const attention_work *work, uint32_t *to, const char *from) {
    int word = 0;
    for (; word < work->words; word += LANES) {
        u32x16 words = load_some_words(kind, from, word, work->words);
        memcpy(to + word, &words, sizeof words);
    }
}

/* Where the query of one row is. */
INLINE const char *query_row(const attention_work *work, int head, int row) {
    const pagoda_attention_call *call = work->call;
    int group = group_size(call);
    size_t token = (size_t)(work->item->first_token + row / group);
    size_t query_head = (size_t)((work->item->first_head + head) * group + row % group);
    return (const char *)call->query + (token * (size_t)call->num_heads + query_head) * work->head_bytes;
}

#if PAGODA_HAS_TILES
/* Packs the queries of an item in blocks of 16 rows. */
static void pack_query_blocks(const attention_work *work, int head, uint32_t *to) {
    for (int first = 0; first < work->query_rows; first += TILE_ROWS, to += TILE_ROWS * work->padded_words) {
        const char *rows[TILE_ROWS];
        const int num_rows = work->rows - first < TILE_ROWS ? work->rows - first : TILE_ROWS;
        for (int row = 0; row < num_rows; row++) rows[row] = query_row(work, head, first + row);
        pack_queries(to, work->words, rows, num_rows);
    }
}
#endif

/* Copies the item's queries, row by row, and zeros for the padding rows. */
INLINE void load_queries(const int kind, attention_work *work) {
    for (int head = 0; head < work->item->num_heads; head++) {
        uint32_t *to = work->query + (size_t)(head * work->query_rows * work->padded_words);
#if PAGODA_HAS_TILES
        if (uses_amx(kind)) {
            pack_query_blocks(work, head, to);
            continue;
        }
#endif
        for (int row = 0; row < work->rows; row++, to += work->padded_words)
            copy_query(kind, work, to, query_row(work, head, row));
        memset(to, 0, (size_t)(work->padded_rows - work->rows) * (size_t)work->padded_words * sizeof *to);
    }
}

/* Makes the sums of all rows those of no key. */
static void forget_keys(attention_work *work) {
    size_t rows = (size_t)(work->padded_rows * work->item->num_heads);
    memset(work->sums, 0, rows * (size_t)work->call->value_dim * sizeof *work->sums);
    memset(work->totals, 0, rows * LANES * sizeof *work->totals);
    for (size_t row = 0; row < rows; row++) work->largest[row] = -INFINITY;
}

/* Returns the state of an item before its first key is computed. */
INLINE attention_work begin(const int kind, const attention_plan *plan, const attention_item *item) {
    const pagoda_attention_call *call = plan->call;
    attention_work work = {.call = call, .item = item, .rows = rows_of(call, item)};
    work.padded_rows = rounded_up(work.rows, !uses_amx(kind) ? ROWS_OF_REST : is_packed(&work) ? LANES : 1);
    work.query_rows = uses_amx(kind) ? rounded_up(work.rows, LANES) : work.padded_rows;
    work.scale = call->scale * 1.44269504f; /* log2 e */
    if (call->softcap > 0) {
        work.tanh_scale = call->scale / call->softcap;
        work.scale = call->softcap * 1.44269504f;
    }
    work.words = words_of(kind, call->head_dim);
    work.padded_words = whole_vectors(work.words);
    work.head_bytes = (size_t)call->head_dim * element_size(kind);
    work.token_bytes = work.head_bytes * (size_t)call->num_kv_heads;
    attention_work measured = work;
    lay_out(&work, pagoda_scratch(SCRATCH_ATTENTION_WORK, lay_out(&measured, NULL)));
    load_queries(kind, &work);
    forget_keys(&work);
    int group = group_size(call);
    for (int row = 0; row < work.padded_rows; row++) {
        int32_t position = item->first_position + (row < work.rows ? row : work.rows - 1) / group;
        work.first_keys[row] = first_key_of(call, position);
        work.end_keys[row] = end_key_of(call, position, item->seq_len);
    }
    return work;
}

/* Finds where the keys of an item's tile lie in the caches, in bytes. Returns how many keys there are up to the item's
 * end; places after it repeat the last key, those before the item's first key, which no row sees, the first one. */
static int locate(const attention_work *work, const attention_item *item, int tile_key, size_t *offsets) {
    int block_size = work->call->block_size, left = item->end_key - tile_key;
    int num_keys = left < KEYS_PER_TILE ? left : KEYS_PER_TILE;
    if (num_keys <= 0) return 0;
    int first = item->first_key > tile_key ? item->first_key - tile_key : 0;
    int block = (tile_key + first) / block_size, within = (tile_key + first) % block_size;
    for (int i = first; i < num_keys; block++, within = 0) {
        size_t at = ((size_t)item->block_table[block] * (size_t)block_size + (size_t)within) * work->token_bytes;
        for (; within < block_size && i < num_keys; within++, at += work->token_bytes) offsets[i++] = at;
    }
    for (int i = 0; i < first; i++) offsets[i] = offsets[first];
    for (int i = num_keys; i < KEYS_PER_TILE; i++) offsets[i] = offsets[num_keys - 1];
    return num_keys;
}

/* Computes an item's rows with a tile of keys, by the kernel for that many rows. */
INLINE void attend(const int kind, attention_work *work, int key, int num_keys, const size_t *offsets,
                   const size_t *next) {
#if PAGODA_HAS_TILES
    if (uses_amx(kind)) {
        if (!is_packed(work)) attend_in_place_with_amx(work, key, num_keys, offsets, next);
        for (int head = 0; is_packed(work) && head < work->item->num_heads; head++)
            attend_packed_with_amx(work, head, key, num_keys, offsets, next);
        return;
    }
#endif
    switch (work->rows) {
    case 1: attend_in_place(kind, 1, work, key, num_keys, offsets, next); break;
    case 2: attend_in_place(kind, 2, work, key, num_keys, offsets, next); break;
    case 3: attend_in_place(kind, 3, work, key, num_keys, offsets, next); break;
    case 4: attend_in_place(kind, 4, work, key, num_keys, offsets, next); break;
    case 5: attend_in_place(kind, 5, work, key, num_keys, offsets, next); break;
    case 6: attend_in_place(kind, 6, work, key, num_keys, offsets, next); break;
    case 7: attend_in_place(kind, 7, work, key, num_keys, offsets, next); break;
    case 8: attend_in_place(kind, 8, work, key, num_keys, offsets, next); break;
    default:
        for (int head = 0; head < work->item->num_heads; head++)
            attend_packed(kind, work, head, key, num_keys, offsets, next);
    }
}

/* Where the output of one row goes. */
INLINE char *output_row(const int kind, const pagoda_attention_call *call, const attention_item *item, int head,
                        int row) {
    int group = group_size(call);
    size_t token = (size_t)(item->first_token + row / group);
    size_t query_head = (size_t)((item->first_head + head) * group + row % group);
    return (char *)call->output +
           (token * (size_t)call->num_heads + query_head) * (size_t)call->value_dim * element_size(kind);
}

/* 1 / total; a row that has seen no key has a total of 0, and its output is zero. */
INLINE float reciprocal(float total) { return total == 0.0f ? 0.0f : 1.0f / total; }

/* The totals of a row's weights. */
INLINE f32x16 totals_of(const int kind, const attention_work *work, int index) {
    return uses_amx(kind) ? (f32x16){work->totals[index]} : f32x16_load(work->totals + index * LANES);
}

/* Writes the outputs of an item that has seen all keys. Zeros lose their sign: it depends on how keys are divided. */
INLINE void write_outputs(const int kind, const attention_work *work) {
    int value_dim = work->call->value_dim;
    for (int head = 0; head < work->item->num_heads; head++)
        for (int row = 0; row < work->rows; row++) {
            int index = head * work->padded_rows + row;
            float factor = reciprocal(f32x16_sum(totals_of(kind, work, index)));
            char *output = output_row(kind, work->call, work->item, head, row);
            for (int dim = 0; dim < value_dim; dim += LANES)
                store_output(kind, output, dim, f32x16_load(work->sums + index * value_dim + dim) * factor + 0.0f);
        }
}

/* Writes the unfinished results of an item's rows, for `merge`. */
INLINE void write_results(const int kind, const attention_work *work, float *to) {
    size_t value_dim = (size_t)work->call->value_dim;
    for (int head = 0; head < work->item->num_heads; head++)
        for (int row = 0; row < work->rows; row++, to += result_size(work->call)) {
            size_t index = (size_t)(head * work->padded_rows + row);
            memcpy(to, work->sums + index * value_dim, value_dim * sizeof *to);
            f32x16_store(to + value_dim, totals_of(kind, work, (int)index));
            to[value_dim + LANES] = work->largest[index];
        }
}

/* Computes all keys of an item, tile by tile, and writes the results that are to be merged with others. `following` is
 * the item that this thread probably computes next, or NULL: its first keys are prefetched at the end. */
INLINE void attend_all(const int kind, attention_work *work, const attention_item *following, float *results) {
    const attention_item *item = work->item;
    size_t offsets[2][KEYS_PER_TILE];
    int now = 0, key = tile_of(item->first_key), num_keys = locate(work, item, key, offsets[now]);
    for (; key < item->end_key; key += KEYS_PER_TILE, now = !now) {
        int num_next = locate(work, item, key + KEYS_PER_TILE, offsets[!now]);
        if (!num_next && following) num_next = locate(work, following, tile_of(following->first_key), offsets[!now]);
        attend(kind, work, key, num_keys, offsets[now], offsets[num_next ? !now : now]);
        num_keys = num_next;
        if (!item->result_stride) continue;
        write_results(kind, work, results);
        forget_keys(work);
        results += item->result_stride;
    }
    if (results && !item->result_stride) write_results(kind, work, results);
}

/* A row's sums, the total of its weights and its largest score, over some of its keys. */
typedef struct {
    f32x16 sums[LARGEST_VALUE_DIM / LANES], total;
    float largest;
} row_state;

/* Merges a row's results, one after another, into its state. */
INLINE void add_results(const attention_plan *plan, const row_results *results, int head, int row, row_state *state) {
    const int value_dim = plan->call->value_dim;
    const float *result = plan->results + results->at + (size_t)head * results->head_stride +
                          (size_t)row * result_size(plan->call);
    for (int i = 0; i < results->count; i++, result += results->stride) {
        float largest = result[value_dim + LANES];
        merge_factors factors = factors_of(state->largest, largest);
        if (largest > state->largest) state->largest = largest;
        for (int dim = 0; dim < value_dim; dim += LANES)
            state->sums[dim / LANES] = merged(state->sums[dim / LANES], f32x16_load(result + dim), factors);
        state->total = merged(state->total, f32x16_load(result + value_dim), factors);
    }
}

/* Merges the results of a unit's rows, in the order of their keys, and writes their outputs. */
INLINE void merge(const int kind, const attention_plan *plan, const attention_unit *unit) {
    const pagoda_attention_call *call = plan->call;
    for (int head = 0; head < unit->whole.num_heads; head++)
        for (int row = 0; row < rows_of(call, &unit->whole); row++) {
            row_state state = {.largest = -INFINITY};
            add_results(plan, &unit->shared, head, row, &state);
            add_results(plan, &unit->own, head, row, &state);
            float factor = reciprocal(f32x16_sum(state.total));
            char *output = output_row(kind, call, &unit->whole, head, row);
            for (int dim = 0; dim < call->value_dim; dim += LANES)
                store_output(kind, output, dim, state.sums[dim / LANES] * factor + 0.0f);
        }
}

/* Computes one item; merges each unit whose last item this is. */
INLINE void compute_item(const int kind, const attention_plan *plan, int64_t index) {
    const attention_item *item = plan->items + index;
    int64_t following = index + pagoda_num_threads();
    attention_work work = begin(kind, plan, item);
    float *results = item->result < 0 ? NULL : plan->results + item->result;
    attend_all(kind, &work, following < plan->num_items ? plan->items + following : NULL, results);
    if (!results) {
        write_outputs(kind, &work);
        return;
    }
    for (int32_t i = item->first_unit; i < item->first_unit + item->num_units; i++) {
        attention_unit *unit = &plan->units[i];
        if (atomic_fetch_sub_explicit(&unit->unfinished, 1, memory_order_acq_rel) == 1) merge(kind, plan, unit);
    }
}

#if PAGODA_HAS_TILES
/* compute_item with tiles. Not inlined: its arithmetic may not move out of where denormals are zeros. */
static __attribute__((noinline, unused)) void compute_item_with_amx(const attention_plan *plan, int64_t index) {
    tiles_configure(TILE_ROWS, TILE_ROWS);
    compute_item(BFLOAT16, plan, index);
    tiles_release();
}
#endif

/* Computes one item of a plan. */
INLINE void compute(const int kind, const attention_plan *plan, int64_t index) {
#if PAGODA_HAS_TILES
    if (uses_amx(kind)) {
        const unsigned int state = _mm_getcsr();
        _mm_setcsr(state | DENORMALS_ARE_ZERO);
        compute_item_with_amx(plan, index);
        _mm_setcsr(state);
        return;
    }
#endif
    compute_item(kind, plan, index);
}

#endif
