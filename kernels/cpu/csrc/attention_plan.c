/* See attention_plan.h. Follows from lengths alone; no query, key or value is read. */
#include "attention_plan.h"

#include "scratch.h"

enum {
    ITEMS_PER_THREAD = 4,     /* so that threads which are slowed down leave their share to others */
    COST_OF_READING = 5,      /* a key and a value; multiplying them with one row costs 1, about 0.04 ns a dimension */
    SMALL_COST = 500 * 1000,  /* 20 us */
    FEWEST_KEYS_OF_SPAN = 2 * KEYS_PER_TILE,
    KEYS_OF_SHARED_SPAN = 2 * KEYS_PER_TILE, /* 512 KiB of 8 heads of 128 in bfloat16: half of a core's L2 */
    MOST_FLOATS_OF_SUMS = 32 * 1024, /* of the rows of all KV heads, where one item does them all */
};

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

static void add_unit(attention_plan *plan, attention_item whole) {
    const pagoda_attention_call *call = plan->call;
    int64_t window = call->sliding_window ? call->sliding_window : INT32_MAX;
    whole.first_key = (int32_t)most(0, whole.first_position - window + 1);
    whole.end_key = whole.first_position + whole.num_queries;
    int64_t num_keys = most(0, whole.end_key - whole.first_key);
    int64_t cost = num_keys * whole.num_heads * call->head_dim * (COST_OF_READING + rows_of(call, &whole));
    plan->units = pagoda_scratch(SCRATCH_ATTENTION_UNITS, (size_t)(plan->num_units + 1) * sizeof *plan->units);
    plan->units[plan->num_units++] = (attention_unit){.whole = whole, .cost = cost};
    plan->cost += cost;
}

/* KV heads lie side by side in the cache, so an item that is limited by reading does all of them. */
static void add_unit_or_heads(attention_plan *plan, attention_item whole) {
    const pagoda_attention_call *call = plan->call;
    int64_t rows = rows_of(call, &whole);
    int32_t heads = rows <= MOST_ROWS_IN_PLACE || rows * call->num_kv_heads * call->head_dim <= MOST_FLOATS_OF_SUMS
                        ? call->num_kv_heads
                        : 1;
    for (whole.first_head = 0; whole.first_head < call->num_kv_heads; whole.first_head += heads) {
        whole.num_heads = heads;
        add_unit(plan, whole);
    }
}

/* The last queries first: they see most keys, and what is long should not be begun last. */
static void add_sequence(attention_plan *plan, attention_item sequence) {
    int64_t most_queries = most(1, MOST_ROWS / group_size(plan->call));
    int64_t num_tiles = divide_up(sequence.num_queries, most_queries);
    int32_t queries = (int32_t)divide_up(sequence.num_queries, num_tiles);
    for (int32_t start = (int32_t)(num_tiles - 1) * queries; start >= 0; start -= queries) {
        attention_item tile = sequence;
        tile.first_token += start;
        tile.first_position += start;
        tile.num_queries = (int32_t)least(queries, sequence.num_queries - start);
        if (tile.num_queries > 0) add_unit_or_heads(plan, tile);
    }
}

static void write_zeros(const pagoda_attention_call *call, int32_t first_token, int32_t num_tokens) {
    size_t row = (size_t)call->num_heads * (size_t)call->head_dim * element_size(call->is_bf16 ? BFLOAT16 : FLOAT32);
    memset((char *)call->output + row * (size_t)first_token, 0, row * (size_t)num_tokens);
}

static int is_padding(const pagoda_attention_call *call, int32_t sequence) {
    int32_t seq_len = call->seq_lens[sequence], last_block = (seq_len - 1) / call->block_size;
    return seq_len < 1 || last_block >= call->max_blocks ||
           call->block_tables[(int64_t)sequence * call->max_blocks + last_block] < 0;
}

/* Prefills (or, in another round, decodes and other short queries) of the batch. */
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
                           });
    }
}

static void add_item(attention_plan *plan, attention_item item, int has_partial) {
    if (has_partial) {
        item.partial = (int64_t)plan->num_partials;
        plan->num_partials += partial_row(plan->call) * (size_t)(item.num_heads * rows_of(plan->call, &item));
    }
    plan->items = pagoda_scratch(SCRATCH_ATTENTION_ITEMS, (size_t)(plan->num_items + 1) * sizeof *plan->items);
    plan->items[plan->num_items++] = item;
}

static void add_spans(attention_plan *plan, int32_t index, int64_t cost_of_item) {
    attention_unit *unit = &plan->units[index];
    attention_item item = unit->whole;
    int64_t num_keys = item.end_key - item.first_key;
    int64_t num_spans = least(divide_up(unit->cost, cost_of_item), divide_up(num_keys, FEWEST_KEYS_OF_SPAN));
    int64_t keys = divide_up(divide_up(num_keys, most(num_spans, 1)), KEYS_PER_TILE) * KEYS_PER_TILE;
    item.unit = index;
    item.partial = -1;
    unit->first_item = (int32_t)plan->num_items;
    do {
        item.end_key = (int32_t)least(item.first_key + keys, unit->whole.end_key);
        add_item(plan, item, item.first_key > unit->whole.first_key || item.end_key < unit->whole.end_key);
        item.first_key = item.end_key;
    } while (item.end_key < unit->whole.end_key);
    unit->num_items = (int32_t)plan->num_items - unit->first_item;
    atomic_init(&unit->unfinished, unit->num_items);
}

/* Leading keys that two units read from the same blocks, if they are alike: both of few rows, and of as many. */
static int32_t shared_keys(const attention_plan *plan, int32_t first, int32_t second) {
    const attention_item *one = &plan->units[first].whole, *other = &plan->units[second].whole;
    if (rows_of(plan->call, one) > MOST_ROWS_IN_PLACE || one->num_queries != other->num_queries) return 0;
    if (one->first_key || other->first_key) return 0; /* of a sliding window, which begins elsewhere for each */
    int32_t end = (int32_t)least(one->end_key, other->end_key), size = plan->call->block_size, block = 0;
    while ((block + 1) * size <= end && one->block_table[block] == other->block_table[block]) block++;
    return block * size;
}

/* Items for units that share their first `num_spans` spans: each span is read by all of them, while it is in the cache,
 * before the next one. The partial results of a unit lie together all the same. */
static void add_shared_spans(attention_plan *plan, int32_t first, int32_t end, int32_t num_spans) {
    const attention_item *alike = &plan->units[first].whole;
    int64_t size = (int64_t)partial_row(plan->call) * alike->num_heads * rows_of(plan->call, alike);
    int64_t partials = (int64_t)plan->num_partials;
    plan->num_partials += (size_t)(size * (end - first) * (num_spans + 1));
    for (int32_t index = first; index < end; index++) {
        attention_unit *unit = &plan->units[index];
        unit->first_item = (int32_t)plan->num_items + index - first;
        unit->num_items = num_spans + (unit->whole.end_key > num_spans * KEYS_OF_SHARED_SPAN);
        atomic_init(&unit->unfinished, unit->num_items);
    }
    for (int32_t span = 0; span <= num_spans; span++)
        for (int32_t index = first; index < end; index++) {
            attention_item item = plan->units[index].whole;
            item.unit = index;
            item.partial = partials + size * ((int64_t)(index - first) * (num_spans + 1) + span);
            item.first_key = span * KEYS_OF_SHARED_SPAN;
            if (span < num_spans) item.end_key = item.first_key + KEYS_OF_SHARED_SPAN;
            if (item.first_key < item.end_key) add_item(plan, item, 0);
        }
}

/* Adds the items of a unit, and of those behind it that begin with the same blocks; returns the next unit. */
static int32_t add_alike(attention_plan *plan, int32_t unit, int64_t cost_of_item) {
    int32_t end = unit + 1, num_spans = INT32_MAX;
    for (; end < plan->num_units; end++) {
        int32_t spans = shared_keys(plan, unit, end) / KEYS_OF_SHARED_SPAN;
        if (!spans) break;
        num_spans = (int32_t)least(num_spans, spans);
    }
    if (end > unit + 1) add_shared_spans(plan, unit, end, num_spans);
    else add_spans(plan, unit, cost_of_item);
    return end;
}

attention_plan pagoda_plan_attention(const pagoda_attention_call *call, int num_threads) {
    attention_plan plan = {.call = call};
    add_sequences(&plan, 1);
    add_sequences(&plan, 0);
    int64_t cost_of_item =
        num_threads > 1 ? most(plan.cost / (ITEMS_PER_THREAD * num_threads), SMALL_COST) : INT64_MAX / 2;
    for (int32_t unit = 0; unit < plan.num_units;) unit = add_alike(&plan, unit, cost_of_item);
    plan.partials = pagoda_scratch(SCRATCH_ATTENTION_PARTIALS, plan.num_partials * sizeof *plan.partials);
    return plan;
}

int pagoda_plan_is_small(const attention_plan *plan) { return plan->cost < 2 * SMALL_COST; }
