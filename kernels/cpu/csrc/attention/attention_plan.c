/* See attention_plan.h. The plan depends on lengths and block tables alone; no query, key or value is read. */
#include "attention/attention_plan.h"

#include "runtime/integers.h"
#include "runtime/scratch.h"

enum {
    ITEMS_PER_THREAD = 4,     /* so that other threads take the items of one that is slowed down */
    COST_OF_READING = 5,      /* a key and a value; multiplying them with one row costs 1, about 0.04 ns a dimension */
    SMALL_COST = 500 * 1000,  /* 20 us */
    FEWEST_TILES_OF_SPAN = 2,
    MOST_FLOATS_OF_SUMS = 32 * 1024, /* of the rows of all KV heads, where one item does them all */
    MOST_FLOATS_OF_ROWS = 64 * 1024,  /* of the sums of an item's rows, which stay in L2 */
    MOST_FLOATS_OF_RESULTS = 4 * 1024 * 1024, /* of many rows; with more, one item computes all keys */
};

/* The cost of an item, in products of one dimension. */
static int64_t cost_of(const pagoda_attention_call *call, const attention_item *item) {
    int64_t num_keys = max(0, item->end_key - item->first_key);
    return num_keys * item->num_heads * call->head_dim * (COST_OF_READING + rows_of(call, item));
}

/* Adds queries of one sequence with all the keys they see. */
static void add_unit(attention_plan *plan, attention_item whole) {
    const pagoda_attention_call *call = plan->call;
    whole.first_key = first_key_of(call, whole.first_position);
    whole.end_key = end_key_of(call, whole.first_position + whole.num_queries - 1, whole.seq_len);
    whole.first_unit = (int32_t)plan->num_units;
    whole.num_units = 1;
    plan->units = pagoda_scratch(SCRATCH_ATTENTION_UNITS, (size_t)(plan->num_units + 1) * sizeof *plan->units);
    plan->units[plan->num_units++] = (attention_unit){.whole = whole};
}

/* Adds one unit for all KV heads, or one for each. Heads are adjacent in the cache, so an item that is limited by
 * reading computes all of them. */
static void add_unit_or_heads(attention_plan *plan, attention_item whole) {
    const pagoda_attention_call *call = plan->call;
    int64_t rows = rows_of(call, &whole);
    int32_t heads = rows <= MOST_ROWS_IN_PLACE || rows * call->num_kv_heads * call->value_dim <= MOST_FLOATS_OF_SUMS
                        ? call->num_kv_heads
                        : 1;
    for (whole.first_head = 0; whole.first_head < call->num_kv_heads; whole.first_head += heads) {
        whole.num_heads = heads;
        add_unit(plan, whole);
    }
}

/* Divides a sequence's queries into tiles. The last come first: they see most keys, and long items should start
 * early. */
static void add_sequence(attention_plan *plan, attention_item sequence) {
    int64_t most_rows = min(MOST_ROWS, MOST_FLOATS_OF_ROWS / plan->call->value_dim);
    int64_t most_queries = max(1, most_rows / group_size(plan->call));
    int64_t num_tiles = divide_up(sequence.num_queries, most_queries);
    int32_t queries = (int32_t)divide_up(sequence.num_queries, num_tiles);
    for (int32_t start = (int32_t)(num_tiles - 1) * queries; start >= 0; start -= queries) {
        attention_item tile = sequence;
        tile.first_token += start;
        tile.first_position += start;
        tile.num_queries = (int32_t)min(queries, sequence.num_queries - start);
        if (tile.num_queries > 0) add_unit_or_heads(plan, tile);
    }
}

/* Writes the output of a padding sequence. */
static void write_zeros(const pagoda_attention_call *call, int32_t first_token, int32_t num_tokens) {
    size_t row = (size_t)call->num_heads * (size_t)call->value_dim * element_size(call->is_bf16 ? BFLOAT16 : FLOAT32);
    memset((char *)call->output + row * (size_t)first_token, 0, row * (size_t)num_tokens);
}

/* Whether a sequence has no tokens or no blocks. */
static int is_padding(const pagoda_attention_call *call, int32_t sequence) {
    int32_t seq_len = call->seq_lens[sequence], last_block = (seq_len - 1) / call->block_size;
    return seq_len < 1 || last_block >= call->max_blocks ||
           call->block_tables[(int64_t)sequence * call->max_blocks + last_block] < 0;
}

/* Adds the batch's prefills or, with are_long 0, its decodes and other short queries. */
static void add_sequences(attention_plan *plan, int are_long) {
    const pagoda_attention_call *call = plan->call;
    for (int32_t i = 0; i < call->num_seqs; i++) {
        int32_t num_queries = call->cu_seqlens_q[i + 1] - call->cu_seqlens_q[i];
        if (num_queries < 1 || (num_queries * group_size(call) > MOST_ROWS_IN_PLACE) != are_long) continue;
        if (is_padding(call, i)) {
            write_zeros(call, call->cu_seqlens_q[i], num_queries);
            continue;
        }
        add_sequence(plan, (attention_item){
                               .block_table = call->block_tables + (int64_t)i * call->max_blocks,
                               .first_token = call->cu_seqlens_q[i],
                               .num_queries = num_queries,
                               .first_position = call->seq_lens[i] - num_queries,
                               .seq_len = call->seq_lens[i],
                           });
    }
}

/* How many leading keys, in the same blocks, every query of two units sees, in whole tiles. 0 unless both have as few
 * rows, and the batch has the units' queries in order. */
static int32_t shared_keys(const attention_plan *plan, int32_t first, int32_t second) {
    const attention_item *one = &plan->units[first].whole, *other = &plan->units[second].whole;
    if (rows_of(plan->call, one) > MOST_ROWS_IN_PLACE || one->num_queries != other->num_queries) return 0;
    if (other->first_token != one->first_token + (second - first) * one->num_queries) return 0;
    if (plan->call->sliding_window || plan->call->chunk) return 0; /* queries may begin at different keys */
    int32_t end = (int32_t)min(one->first_position, other->first_position) + 1;
    int32_t size = plan->call->block_size, block = 0;
    while ((block + 1) * size <= end && one->block_table[block] == other->block_table[block]) block++;
    return tile_of(block * size);
}

/* An item for the keys that a run of units shares, with all of their rows, as if they were one sequence's queries. */
static attention_item shared_item(const attention_plan *plan, int32_t first) {
    const attention_unit *unit = &plan->units[first];
    attention_item item = unit->whole;
    item.num_units = unit->end_of_run - first;
    item.num_queries *= item.num_units;
    item.first_key = 0;
    item.first_position = item.end_key = unit->shared_keys;
    return item;
}

/* Finds the run of units that begin with the same keys as this one, and adds their cost; returns the unit after it. */
static int32_t add_run(attention_plan *plan, int32_t first) {
    attention_unit *unit = &plan->units[first];
    int64_t most_units = MOST_ROWS / rows_of(plan->call, &unit->whole);
    int32_t end = first + 1;
    for (; end < plan->num_units && end - first < most_units; end++) {
        int32_t keys = shared_keys(plan, first, end);
        /* A unit that shares few keys would reduce what the others share. */
        if (keys == 0 || keys < unit->shared_keys / 2) break;
        unit->shared_keys = end == first + 1 ? keys : (int32_t)min(keys, unit->shared_keys);
    }
    unit->end_of_run = end;
    for (int32_t index = first; index < end; index++) {
        attention_item *whole = &plan->units[index].whole;
        whole->first_key = (int32_t)max(whole->first_key, unit->shared_keys);
        plan->cost += cost_of(plan->call, whole);
    }
    if (unit->shared_keys) {
        attention_item shared = shared_item(plan, first);
        plan->cost += cost_of(plan->call, &shared);
    }
    return end;
}

/* How many items an item's keys are divided into. */
static int64_t num_spans(const attention_plan *plan, const attention_item *whole, int64_t cost_of_item) {
    int64_t num_tiles = divide_up(whole->end_key - tile_of(whole->first_key), KEYS_PER_TILE);
    int64_t rows = rows_of(plan->call, whole);
    int64_t floats = num_tiles * rows * whole->num_heads * (int64_t)result_size(plan->call);
    if (rows > MOST_ROWS_IN_PLACE && floats > MOST_FLOATS_OF_RESULTS) return 1;
    return max(1, min(divide_up(cost_of(plan->call, whole), cost_of_item), num_tiles / FEWEST_TILES_OF_SPAN));
}

/* Adds an item, or one for each of several spans of its keys; returns where their results will be. With `is_first`
 * these are the first keys that the rows see. An item that has all keys of one unit writes the output; there are no
 * results. */
static row_results add_items(attention_plan *plan, attention_item whole, int64_t cost_of_item, int is_first) {
    int64_t num_tiles = divide_up(whole.end_key - tile_of(whole.first_key), KEYS_PER_TILE);
    int64_t spans = num_spans(plan, &whole, cost_of_item);
    int32_t keys = (int32_t)divide_up(num_tiles, spans) * KEYS_PER_TILE;
    size_t head_stride = result_size(plan->call) * (size_t)rows_of(plan->call, &whole);
    row_results results = {
        .at = (int64_t)plan->num_result_floats,
        .head_stride = head_stride,
        .stride = head_stride * (size_t)whole.num_heads,
    };
    attention_item item = whole;
    item.result = -1;
    do {
        item.end_key = (int32_t)min(tile_of(item.first_key) + keys, whole.end_key);
        if (!is_first || whole.num_units > 1 || item.end_key - item.first_key < whole.end_key - whole.first_key) {
            int is_by_tile = !is_first || item.first_key > whole.first_key;
            int64_t count = is_by_tile ? divide_up(item.end_key - item.first_key, KEYS_PER_TILE) : 1;
            item.result = (int64_t)plan->num_result_floats;
            item.result_stride = is_by_tile ? (int64_t)results.stride : 0;
            plan->num_result_floats += (size_t)count * results.stride;
            results.count += (int32_t)count;
        }
        plan->items = pagoda_scratch(SCRATCH_ATTENTION_ITEMS, (size_t)(plan->num_items + 1) * sizeof *plan->items);
        plan->items[plan->num_items++] = item;
        results.num_items++;
        item.first_key = item.end_key;
    } while (item.end_key < whole.end_key);
    return results;
}

/* How many KV heads an item of shared keys computes: all or one. Many rows that are to be divided are divided by heads,
 * since spans of keys leave results to be merged. Few rows are limited by reading, and heads are adjacent. */
static int32_t heads_of_shared_item(const attention_plan *plan, const attention_item *shared, int64_t cost_of_item) {
    int64_t rows = rows_of(plan->call, shared);
    if (rows * shared->num_heads * plan->call->value_dim > MOST_FLOATS_OF_SUMS) return 1;
    return rows <= MOST_ROWS_IN_PLACE || cost_of(plan->call, shared) <= cost_of_item ? shared->num_heads : 1;
}

/* Adds the items of the keys that a run of units shares. */
static row_results add_shared_items(attention_plan *plan, int32_t first, int64_t cost_of_item) {
    attention_item item = shared_item(plan, first);
    int32_t heads = heads_of_shared_item(plan, &item, cost_of_item), end_head = item.num_heads;
    row_results results = {0};
    item.num_heads = heads;
    for (item.first_head = 0; item.first_head < end_head; item.first_head += heads) {
        row_results of_heads = add_items(plan, item, cost_of_item, 1);
        if (item.first_head == 0) results = of_heads;
        else if (item.first_head == heads) results.head_stride = (size_t)(of_heads.at - results.at);
    }
    return results;
}

/* Adds the items of a run of units that share keys; returns the unit after it. */
static int32_t add_items_of_run(attention_plan *plan, int32_t first, int64_t cost_of_item) {
    int32_t end = plan->units[first].end_of_run;
    int64_t num_items = plan->num_items;
    row_results shared = {0};
    if (plan->units[first].shared_keys) shared = add_shared_items(plan, first, cost_of_item);
    int64_t num_shared_items = plan->num_items - num_items;
    for (int32_t index = first; index < end; index++) {
        attention_unit *unit = &plan->units[index];
        unit->shared = shared;
        shared.at += (int64_t)result_size(plan->call) * rows_of(plan->call, &unit->whole);
        if (unit->whole.first_key < unit->whole.end_key || !num_shared_items)
            unit->own = add_items(plan, unit->whole, cost_of_item, !num_shared_items);
        atomic_init(&unit->unfinished, (int)num_shared_items + unit->own.num_items);
    }
    return end;
}

attention_plan pagoda_plan_attention(const pagoda_attention_call *call, int num_threads) {
    attention_plan plan = {.call = call};
    add_sequences(&plan, 1);
    add_sequences(&plan, 0);
    for (int32_t unit = 0; unit < plan.num_units;) unit = add_run(&plan, unit);
    int64_t cost_of_item =
        num_threads > 1 ? max(plan.cost / (ITEMS_PER_THREAD * num_threads), SMALL_COST) : INT64_MAX / 2;
    for (int32_t unit = 0; unit < plan.num_units;) unit = add_items_of_run(&plan, unit, cost_of_item);
    plan.results = pagoda_scratch(SCRATCH_ATTENTION_RESULTS, plan.num_result_floats * sizeof *plan.results);
    return plan;
}

int pagoda_plan_is_small(const attention_plan *plan) { return plan->cost < 2 * SMALL_COST; }
