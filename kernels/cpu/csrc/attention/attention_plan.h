/* How a call is divided among threads. */
#ifndef PAGODA_ATTENTION_PLAN_H
#define PAGODA_ATTENTION_PLAN_H

#include <stdatomic.h>

#include "attention/attention_item.h"

/* Where items write their results for the same rows, in the order of the keys. Results are merged one after another,
 * just as an item merges its tiles: so the item of the first keys writes one result, and the others one for each tile.
 * A row's bits then do not depend on how its keys are divided. */
typedef struct {
    int64_t at;         /* the first result's, of its first head, in floats */
    size_t stride;      /* from one result to the next one */
    size_t head_stride; /* from one KV head's rows to the next one's */
    int32_t count;
    int32_t num_items;
} row_results;

/* Queries of one sequence with all the keys they see. Keys that begin several units may be computed for all of them
 * together, and the rest of a unit's keys in one item or in several. */
typedef struct {
    attention_item whole;
    int32_t end_of_run;  /* of the first unit of a run that shares keys: the unit after the run */
    int32_t shared_keys; /* of the same unit: how many keys the run shares */
    row_results shared, own;
    atomic_int unfinished; /* items */
} attention_unit;

/* The units and items of one call. */
typedef struct {
    const pagoda_attention_call *call;
    attention_unit *units;
    attention_item *items;
    float *results;
    int64_t num_units, num_items, cost;
    size_t num_result_floats;
} attention_plan;

/* Query heads that share a KV head. */
INLINE int group_size(const pagoda_attention_call *call) { return call->num_heads / call->num_kv_heads; }

/* Rows of an item, for one KV head. */
INLINE int rows_of(const pagoda_attention_call *call, const attention_item *item) {
    return item->num_queries * group_size(call);
}

/* Floats of one row's unfinished result: its sums, the 16 totals of its weights, its largest score. */
INLINE size_t result_size(const pagoda_attention_call *call) { return (size_t)call->value_dim + LANES + 1; }

/* Divides the call for `num_threads` threads; the plan's memory is the calling thread's scratch. */
attention_plan pagoda_plan_attention(const pagoda_attention_call *call, int num_threads);

/* Whether the plan is worth waking other threads for. */
int pagoda_plan_is_small(const attention_plan *plan);

/* Compute an item of a plan whose cache has this type, as tasks of pagoda_parallel_for (attention_compute.h). */
void pagoda_attend_float32(void *plan, int64_t item);
void pagoda_attend_bfloat16(void *plan, int64_t item);

#endif
