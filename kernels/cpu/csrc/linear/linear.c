/* See linear.h. */
#include "linear/linear.h"

#include "coded/tiles.h"
#include "runtime/integers.h"
#include "runtime/scratch.h"
#include "runtime/threads.h"
#include "runtime/tiles.h"
#include "runtime/vector.h"

enum {
    MAX_PANELS_AT_ONCE = PANELS_OF_GROUP,
    BYTES_PER_PART = 256 * 1024,
    MOST_ROWS_PER_BLOCK = 256, /* every panel reads a block. On Zen 4, 128 to 512 rows are as fast */
    MOST_GROUPS_PER_PART = 4,
    MIN_PARTS_PER_THREAD = 2,
    CACHE_LINE = 64,
    SEGMENTS_AHEAD = 2,
    MOST_ROWS_WITHOUT_TILES = 6, /* of codes: they have the same bits with and without AMX's tiles */
};

int32_t pagoda_has_int8(void) { return PAGODA_HAS_INT8; }

int32_t pagoda_has_tiles(void) { return PAGODA_HAS_TILES; }

int32_t pagoda_num_words(int32_t kind, int32_t in_features) {
    if (kind == PAGODA_CODED) return (int32_t)divide_up(in_features, BLOCK_INPUTS) * ROW_BLOCK_WORDS;
    const bool has_pairs = kind == PAGODA_BF16 || kind == PAGODA_FLOAT_CODED;
    const int64_t num_words = divide_up(in_features, kind == PAGODA_INT8 ? 4 : has_pairs ? 2 : 1);
    return (int32_t)(pagoda_is_tiled(kind) ? divide_up(num_words, LANES) * LANES : num_words);
}

pagoda_epilogue pagoda_epilogue_of(int32_t activation) {
    static const pagoda_epilogue epilogues[] = {PAGODA_SILU_MUL, PAGODA_GELU_MUL, PAGODA_STORE_RELU_SQUARED};
    return epilogues[activation];
}

pagoda_weight pagoda_part_of_weight(const pagoda_weight *all, int64_t index, int64_t stride, int64_t outputs) {
    pagoda_weight weight = *all;
    if (all->coded) weight.coded += index * stride / (LANES * PANELS_OF_GROUP);
    else weight.words += index * stride * pagoda_num_words(all->kind, all->in_features);
    if (all->scales) weight.scales += index * stride;
    if (all->sums) weight.sums += index * stride;
    weight.out_features = (int32_t)outputs;
    return weight;
}

/* --- the inner loops ------------------------------------------------------------------------------------------- */

/* Multiplies some rows of a tile with some panels. They are stored as [panels][row_step][16]; `row_step` is the number of
 * rows of the tile. A part of a tile fetches one other panel to the second cache meanwhile. */
typedef void (*tile_function)(void *sums, const uint32_t *rows, int64_t row_step, const uint32_t *weights,
                              int64_t num_words, const uint32_t *fetched);

#if PAGODA_HALF_REGISTERS
#include "linear/linear_tiles_avx2.h"
#else
#include "linear/linear_tiles.h"
#endif
#if PAGODA_HAS_TILES
#include "linear/linear_amx.h"
#endif

/* The inner loop for num_rows rows, a whole tile or part of one. */
static tile_function tile_for(int kind, int num_rows, bool is_part) {
#if PAGODA_HAS_INT8
    if (kind == PAGODA_INT8) return is_part ? int8_parts[num_rows] : int8_tiles[num_rows];
#endif
    if (kind == PAGODA_BF16) return is_part ? bf16_parts[num_rows] : bf16_tiles[num_rows];
    return is_part ? f32_parts[num_rows] : f32_tiles[num_rows];
}

/* --- from sums to outputs -------------------------------------------------------------------------------- */

/* Arguments of pagoda_linear, and how the loop is divided. */
typedef struct {
    float *output;
    int64_t stride;
    const pagoda_rows *rows;
    const pagoda_weight *weight;
    const float *factors; /* of a job; or NULL */
    pagoda_epilogue epilogue;
    int64_t num_words, num_panels, panels_per_part;
    int64_t rows_per_block, parts_per_block;
    int64_t num_parts, first_part; /* first_part: in a loop over several calls */
} linear_call;

/* The product of a row with a panel, from their sum. */
INLINE f32x16 product(const linear_call *call, const void *sum, int64_t row, int64_t panel) {
    const pagoda_weight *weight = call->weight;
    f32x16 value = f32x16_load(sum);
    if (weight->kind == PAGODA_INT8) {
        i32x16 offset, total;
        memcpy(&total, sum, sizeof total);
        memcpy(&offset, weight->sums + panel * LANES, sizeof offset);
        value = __builtin_convertvector(total - 128 * offset, f32x16); /* the rows are offset by 128 */
        value *= f32x16_load(weight->scales + panel * LANES) * call->rows->scales[row];
    }
    if (weight->coded && weight->scales) value *= f32x16_load(weight->scales + panel * LANES);
    if (call->factors) value *= call->factors[row];
    return weight->bias ? value + f32x16_load(weight->bias + panel * LANES) : value;
}

/* Stores or adds a panel's lanes; `count` outputs are left, and lanes beyond the last one are dropped. */
INLINE void put(float *to, f32x16 value, int64_t count, bool is_added) {
    if (count >= LANES) {
        f32x16_store(to, is_added ? f32x16_load(to) + value : value);
        return;
    }
    float parts[LANES];
    f32x16_store(parts, value);
    for (int64_t i = 0; i < count; i++) to[i] = is_added ? to[i] + parts[i] : parts[i];
}

/* max(x, 0)^2; a NaN stays one. */
INLINE f32x16 relu_squared(f32x16 x) {
    f32x16 positive = f32x16_max((f32x16){0}, x);
    return positive * positive;
}

/* Whether pairs of panels give the outputs of one: a panel of gates, and the panel it multiplies. */
INLINE bool is_gated(const linear_call *call) {
    return call->epilogue == PAGODA_SILU_MUL || call->epilogue == PAGODA_GELU_MUL;
}

/* Turns the sums of a tile into outputs. */
static void finish(const linear_call *call, const float *sums, int64_t first_row, int num_rows, int64_t panel,
                   int num_panels) {
    int64_t width = call->weight->out_features;
    const int step = is_gated(call) ? 2 : 1;
    for (int p = 0; p < num_panels; p += step)
        for (int r = 0; r < num_rows; r++) {
            const float *sum = sums + (p * num_rows + r) * LANES;
            float *row = call->output + (first_row + r) * call->stride;
            f32x16 value = product(call, sum, first_row + r, panel + p);
            if (call->epilogue == PAGODA_STORE_RELU_SQUARED) value = relu_squared(value);
            if (!is_gated(call)) {
                put(row + (panel + p) * LANES, value, width - (panel + p) * LANES, call->epilogue == PAGODA_ADD);
            } else {
                f32x16 up = product(call, sum + num_rows * LANES, first_row + r, panel + p + 1);
                int64_t column = (panel + p) / 2 * LANES;
                f32x16 gate = call->epilogue == PAGODA_GELU_MUL ? f32x16_gelu(value) : value / (1 + f32x16_exp(-value));
                put(row + column, gate * up, width / 2 - column, false);
            }
        }
}

/* Prefetches where some rows' outputs of some panels go: they are written once, after the products. */
INLINE void fetch_outputs(const linear_call *call, int64_t first_row, int num_rows, int64_t panel, int num_panels) {
    const int step = is_gated(call) ? 2 : 1;
    for (int r = 0; r < num_rows; r++) {
        const float *row = call->output + (first_row + r) * call->stride;
        for (int p = 0; p < num_panels; p += step) __builtin_prefetch(row + (panel + p) / step * LANES, 1, 3);
    }
}

/* --- the loops around them ------------------------------------------------------------------------------------- */

/* If there are several tiles, or rows for which the registers do not suffice, tiles are divided, so that every load of
 * weights is used several times, and one of a row's word four times: with AVX-512, 5 and 6 rows have 2.4 products a
 * load, and 16 rows and one panel only 0.94. The other parts of a tile find the weights in the second cache. Returns
 * the number of parts. */
static int divide_tile(bool is_divided, int64_t num_rows) {
    return is_divided ? (int)divide_up(num_rows, MOST_ROWS_PER_PART) : 1;
}

/* Multiplies a group of MAX_PANELS_AT_ONCE panels with a range of rows. The next group is fetched meanwhile, panel by
 * panel, since the group's first rows would wait for memory and the others would leave it idle. */
static void multiply_group(const linear_call *call, int64_t panel, int64_t row, int64_t end_row) {
    _Alignas(64) float sums[MAX_PANELS_AT_ONCE * ROWS_PER_TILE * LANES];
    const int64_t num_words = call->num_words, panel_words = num_words * LANES;
    const bool is_divided = call->rows->num_rows > MOST_ROWS_UNDIVIDED;
    const uint32_t *words = call->weight->words + panel * panel_words;
    const bool has_next = panel + MAX_PANELS_AT_ONCE < call->num_panels;
    const int64_t last_rows = (end_row - row - 1) % ROWS_PER_TILE + 1;
    const int64_t num_steps = (end_row - row - last_rows) / ROWS_PER_TILE * divide_tile(is_divided, ROWS_PER_TILE) +
                              divide_tile(is_divided, last_rows);
    for (int64_t step = 0; row < end_row; row += ROWS_PER_TILE) {
        const int num_rows = (int)min(end_row - row, ROWS_PER_TILE), num_parts = divide_tile(is_divided, num_rows);
        const uint32_t *rows = call->rows->words + row * num_words;
        for (int part = 0; part < num_parts; part++, step++) {
            const int first = num_rows * part / num_parts, count = num_rows * (part + 1) / num_parts - first;
            const int64_t share = step * MAX_PANELS_AT_ONCE; /* in 1 / num_steps of a panel */
            const bool fetches = has_next && share % num_steps < MAX_PANELS_AT_ONCE;
            const uint32_t *fetched = fetches ? words + (MAX_PANELS_AT_ONCE + share / num_steps) * panel_words : words;
            const tile_function tile = tile_for(call->weight->kind, count, is_divided);
            for (int p = 0; p < MAX_PANELS_AT_ONCE; p += panels_at_once(count)) {
                fetch_outputs(call, row + first, count, panel + p, panels_at_once(count));
                tile(sums + (p * num_rows + first) * LANES, rows + first, num_rows, words + p * panel_words, num_words,
                     fetched);
            }
        }
        finish(call, sums, row, num_rows, panel, MAX_PANELS_AT_ONCE);
    }
}

#if PAGODA_HAS_TILES
/* Multiplies more than one tile of rows, at most two, with two panels. */
static void multiply_amx_pair(const linear_call *call, int64_t panel, int64_t row, int num_rows, amx_fetch *fetch) {
    _Alignas(64) float sums[2 * TWO_TILES * LANES];
    const int64_t num_words = call->num_words, second_rows = num_rows - TILE_ROWS;
    const uint32_t *rows = call->rows->words + row * num_words;
    const uint32_t *weights = call->weight->words + panel * num_words * LANES;
    fetch->outputs = call->output + row * call->stride + panel / (is_gated(call) ? 2 : 1) * LANES;
    fetch->stride = call->stride;
    fetch->num_rows = num_rows;
    fetch->rows_at_once = divide_up(num_rows * TILE_WORDS, num_words);
    if (call->weight->kind == PAGODA_INT8)
        multiply_two_tiles(sums, rows, second_rows, weights, num_words, fetch, true);
    else
        multiply_two_tiles(sums, rows, second_rows, weights, num_words, fetch, false);
    finish(call, sums, row, num_rows, panel, 2);
}

/* Multiplies a tile of rows with a group of panels. */
static void multiply_amx_tile(const linear_call *call, int64_t panel, int64_t row, int num_rows) {
    _Alignas(64) float sums[MAX_PANELS_AT_ONCE * TILE_ROWS * LANES];
    const int64_t num_words = call->num_words;
    const uint32_t *rows = call->rows->words + row * num_words;
    const uint32_t *weights = call->weight->words + panel * num_words * LANES;
    fetch_outputs(call, row, num_rows, panel, MAX_PANELS_AT_ONCE);
    if (call->weight->kind == PAGODA_INT8) multiply_one_tile(sums, rows, num_rows, weights, num_words, true, false);
    else multiply_one_tile(sums, rows, num_rows, weights, num_words, false, false);
    finish(call, sums, row, num_rows, panel, MAX_PANELS_AT_ONCE);
}

/* Does what multiply_group does, with AMX's tiles. */
static void multiply_amx_group(const linear_call *call, int64_t panel, int64_t row, int64_t end_row) {
    const int64_t num_pairs = (end_row - row + TILE_ROWS - 1) / TWO_TILES;
    const bool has_next = panel + MAX_PANELS_AT_ONCE < call->num_panels;
    amx_fetch fetch = {call->weight->words + (panel + MAX_PANELS_AT_ONCE) * call->num_words * LANES, 0, NULL, 0, 0, 0};
    if (has_next && num_pairs) fetch.lines = divide_up(LINES_OF_TILE * MAX_PANELS_AT_ONCE / 2, num_pairs);
    for (int64_t pair = 0; pair < num_pairs; pair++, row += TWO_TILES) {
        const int num_rows = (int)min(end_row - row, TWO_TILES);
        tiles_configure(TILE_ROWS, num_rows - TILE_ROWS);
        for (int p = 0; p < MAX_PANELS_AT_ONCE; p += 2) multiply_amx_pair(call, panel + p, row, num_rows, &fetch);
    }
    if (row < end_row) {
        tiles_configure((int)(end_row - row), (int)(end_row - row));
        multiply_amx_tile(call, panel, row, (int)(end_row - row));
    }
    tiles_release();
}
#endif

/* Four coded panels. */
typedef struct {
    const uint8_t *panels;
    const pagoda_code_format *format;
    pagoda_panel_layout layout;
} coded_group;

/* Multiplies a range of rows with a segment of some coded panels, from `panel` of the group on, and adds to sums
 * [tiles of rows][4][rows][16]. The next segments are fetched meanwhile, as evenly as possible. */
static void multiply_segment(const linear_call *call, float *sums, const coded_group *group, int64_t panel,
                             int64_t segment, int64_t row, int64_t end_row) {
    const pagoda_panel_layout *layout = &group->layout;
    const uint8_t *panels = group->panels + panel * layout->panel_bytes;
    const int64_t all_blocks = divide_up(call->weight->in_features, BLOCK_INPUTS);
    const int64_t first_block = segment * SEGMENT_BLOCKS;
    const int64_t num_segments = divide_up(all_blocks, SEGMENT_BLOCKS), later = segment + SEGMENTS_AHEAD;
    const int64_t num_blocks = min(all_blocks - first_block, SEGMENT_BLOCKS);
    const int64_t decoded_bytes = num_blocks * pagoda_decoded_block_bytes(group->format);
    const coded_tile *tiles = coded_tiles_for(group->format);
    uint8_t *decoded = pagoda_scratch(SCRATCH_CODES, (size_t)(CODED_PANELS_AT_ONCE * decoded_bytes));
    const bool is_of_next = later >= num_segments; /* what is fetched is of the next panels */
    coded_fetch fetch = {panels + (is_of_next ? later - num_segments : later) * layout->segment_bytes,
                         layout->panel_bytes, 0};
    if (is_of_next) fetch.start += CODED_PANELS_AT_ONCE * layout->panel_bytes;
    fetch.lines = divide_up(layout->segment_bytes, 2 * SEGMENT_BLOCKS * CACHE_LINE);
    for (int p = 0; p < CODED_PANELS_AT_ONCE; p++)
        pagoda_decode_segment(decoded + p * decoded_bytes,
                              panels + p * layout->panel_bytes + segment * layout->segment_bytes, group->format, layout,
                              num_blocks, fetch.start + p * fetch.panel_stride, fetch.lines);
    fetch.start += num_blocks * fetch.lines * CACHE_LINE;
    for (; row < end_row; row += ROWS_PER_TILE, sums += MAX_PANELS_AT_ONCE * ROWS_PER_TILE * LANES) {
        const int num_rows = (int)min(end_row - row, ROWS_PER_TILE), parts = (int)divide_up(num_rows, MOST_CODED_ROWS);
        const uint32_t *rows = call->rows->words + row * call->num_words + first_block * ROW_BLOCK_WORDS * num_rows;
        for (int part = 0; part < parts; part++) {
            const int first = num_rows * part / parts, count = num_rows * (part + 1) / parts - first;
            tiles[count](sums + panel * num_rows * LANES, rows, first, num_rows, decoded, decoded_bytes, num_blocks,
                         fetch);
            fetch.lines = 0;
        }
    }
}

#if PAGODA_HAS_TILES
/* Multiplies a range of rows with words of four panels of floats, from `first_word` on, with AMX's tiles, and adds to
 * sums as multiply_segment does. Tiles are configured for `tile_rows`: that takes as long as tens of products, and is
 * repeated only for another number. */
static void multiply_floats(const linear_call *call, float *sums, const coded_group *group, int64_t first_word,
                            int64_t num_words, int64_t row, int64_t end_row, int64_t *tile_rows) {
    _Alignas(64) float products[MAX_PANELS_AT_ONCE * TILE_ROWS * LANES];
    uint32_t *words = pagoda_scratch(SCRATCH_CODES, (size_t)(MAX_PANELS_AT_ONCE * num_words * LANES) * sizeof *words);
    const pagoda_later_codes later = pagoda_codes_after(group->panels, group->format, &group->layout, first_word);
    pagoda_decode_floats(words, group->panels, group->format, &group->layout, first_word, num_words, later);
    for (; row < end_row; row += TILE_ROWS, sums += MAX_PANELS_AT_ONCE * TILE_ROWS * LANES) {
        const int64_t num_rows = min(end_row - row, TILE_ROWS);
        if (num_rows != *tile_rows) tiles_configure((int)num_rows, (int)num_rows), *tile_rows = num_rows;
        multiply_one_tile(products, call->rows->words + row * call->num_words + first_word * num_rows, num_rows, words,
                          num_words, false, true);
        pagoda_add_scaled(sums, products, num_rows, group->panels, group->format, &group->layout, first_word);
    }
}

/* Multiplies a range of rows with four panels of floats. */
static void multiply_float_group(const linear_call *call, float *sums, const coded_group *group, int64_t row,
                                 int64_t end_row) {
    const int64_t step = pagoda_words_of_scale(group->format);
    int64_t tile_rows = 0;
    for (int64_t word = 0; word < call->num_words; word += step)
        multiply_floats(call, sums, group, word, min(step, call->num_words - word), row, end_row, &tile_rows);
    tiles_release();
}
#else
/* Does what multiply_segment does with words of four panels of floats, from `first_word` on. */
static void multiply_floats(const linear_call *call, float *sums, const coded_group *group, int64_t first_word,
                            int64_t num_words, int64_t row, int64_t end_row) {
    _Alignas(64) float products[MAX_PANELS_AT_ONCE * ROWS_PER_TILE * LANES];
    const size_t bytes = (size_t)(MAX_PANELS_AT_ONCE * num_words * LANES + BLOCK_INPUTS / 2 * LANES) * sizeof(uint32_t);
    uint32_t *words = pagoda_scratch(SCRATCH_CODES, bytes);
    const bool has_one_tile = end_row - row <= MOST_ROWS_PER_PART && panels_at_once((int)(end_row - row)) == 4;
    const pagoda_later_codes later = pagoda_codes_after(group->panels, group->format, &group->layout, first_word);
    pagoda_decode_floats(words, group->panels, group->format, &group->layout, first_word, num_words,
                         (pagoda_later_codes){NULL, has_one_tile ? later.second : NULL});
    const void *fetched[] = {later.first, has_one_tile ? words : later.second};
    int num_tiles = 0;
    for (; row < end_row; row += ROWS_PER_TILE, sums += MAX_PANELS_AT_ONCE * ROWS_PER_TILE * LANES) {
        const int num_rows = (int)min(end_row - row, ROWS_PER_TILE), parts = divide_tile(true, num_rows);
        const uint32_t *rows = call->rows->words + row * call->num_words + first_word * num_rows;
        for (int part = 0; part < parts; part++) {
            const int first = num_rows * part / parts, count = num_rows * (part + 1) / parts - first;
            const tile_function tile = tile_for(PAGODA_BF16, count, true);
            for (int p = 0; p < MAX_PANELS_AT_ONCE; p += panels_at_once(count), num_tiles++)
                tile(products + (p * num_rows + first) * LANES, rows + first, num_rows, words + p * num_words * LANES,
                     num_words, num_tiles < 2 ? fetched[num_tiles] : words);
        }
        pagoda_add_scaled(sums, products, num_rows, group->panels, group->format, &group->layout, first_word);
    }
}

/* Multiplies a range of rows with four panels of floats. */
static void multiply_float_group(const linear_call *call, float *sums, const coded_group *group, int64_t row,
                                 int64_t end_row) {
    const int64_t step = pagoda_words_of_scale(group->format);
    if (end_row - row == 1)
        pagoda_multiply_float_row(sums, call->rows->words + row * call->num_words, group->panels, group->format,
                                  &group->layout, call->num_words);
    else
        for (int64_t word = 0; word < call->num_words; word += step)
            multiply_floats(call, sums, group, word, min(step, call->num_words - word), row, end_row);
}
#endif

/* Does what multiply_group does with coded panels. A segment of them is decoded once for all rows, to the first cache;
 * one row is multiplied without that, unless they are floats and AMX's tiles do it. Tiles multiply integers for many rows
 * only, and in granules of 32 inputs: one of 16 would take as long. */
static void multiply_coded_group(const linear_call *call, int64_t panel, int64_t row, int64_t end_row) {
    const pagoda_coded_panels *own = &call->weight->coded[panel / MAX_PANELS_AT_ONCE];
    const int32_t in_features = call->weight->in_features;
    const coded_group group = {(const uint8_t *)call->weight->words + own->start, own->format,
                               pagoda_layout_of_panel(own->format, in_features)};
    const pagoda_panel_layout *layout = &group.layout;
    const int64_t num_segments = divide_up(in_features, SEGMENT_BLOCKS * BLOCK_INPUTS);
    const int64_t tile_sums = MAX_PANELS_AT_ONCE * ROWS_PER_TILE * LANES;
    const size_t bytes = (size_t)(divide_up(end_row - row, ROWS_PER_TILE) * tile_sums) * sizeof(float);
    float *sums = memset(pagoda_scratch(SCRATCH_CODED_SUMS, bytes), 0, bytes);
    if (call->weight->kind == PAGODA_FLOAT_CODED) {
        multiply_float_group(call, sums, &group, row, end_row);
    } else if (end_row - row == 1) {
        const uint32_t *only_row = call->rows->words + row * call->num_words;
        for (int64_t p = 0; p < MAX_PANELS_AT_ONCE; p++)
            pagoda_multiply_coded_row(sums + p * LANES, only_row, group.panels + p * layout->panel_bytes, group.format,
                                      layout, in_features);
#if PAGODA_HAS_TILES
    } else if (end_row - row > MOST_ROWS_WITHOUT_TILES && own->format->granule == BLOCK_INPUTS) {
        pagoda_multiply_coded_tiles(sums, call->rows->words + row * call->num_words, end_row - row, group.panels,
                                    group.format, layout, in_features);
#endif
    } else {
        for (int64_t p = 0; p < MAX_PANELS_AT_ONCE; p += CODED_PANELS_AT_ONCE)
            for (int64_t segment = 0; segment < num_segments; segment++)
                multiply_segment(call, sums, &group, p, segment, row, end_row);
    }
    fetch_outputs(call, row, (int)min(end_row - row, ROWS_PER_TILE), panel, MAX_PANELS_AT_ONCE);
    for (; row < end_row; row += ROWS_PER_TILE, sums += tile_sums) {
        const int64_t next = row + ROWS_PER_TILE;
        fetch_outputs(call, next, (int)min(end_row - next, ROWS_PER_TILE), panel, MAX_PANELS_AT_ONCE);
        finish(call, sums, row, (int)min(end_row - row, ROWS_PER_TILE), panel, MAX_PANELS_AT_ONCE);
    }
}

/* Multiplies one part: a block of rows with some panels. */
static void multiply_part(void *args, int64_t index) {
    const linear_call *call = args;
    int64_t row = index / call->parts_per_block * call->rows_per_block;
    int64_t end_row = min(row + call->rows_per_block, call->rows->num_rows);
    int64_t panel = index % call->parts_per_block * call->panels_per_part;
    int64_t end_panel = min(panel + call->panels_per_part, call->num_panels);
    const bool is_coded = call->weight->coded != NULL;
    for (; panel < end_panel; panel += MAX_PANELS_AT_ONCE) {
        if (is_coded) multiply_coded_group(call, panel, row, end_row);
#if PAGODA_HAS_TILES
        else if (pagoda_is_tiled(call->weight->kind)) multiply_amx_group(call, panel, row, end_row);
#endif
        else multiply_group(call, panel, row, end_row);
    }
}

/* Multiplies one part of one of several calls. */
static void multiply_part_of_group(void *args, int64_t index) {
    const linear_call *calls = args;
    while (index >= calls->first_part + calls->num_parts) calls++;
    multiply_part((void *)calls, index - calls->first_part);
}

/* Bytes of a panel; of coded ones, which may differ, of the first. */
static int64_t panel_bytes(const pagoda_weight *weight) {
    if (weight->coded)
        return pagoda_layout_of_panel(weight->coded->format, weight->in_features).panel_bytes;
    return (int64_t)pagoda_num_words(weight->kind, weight->in_features) * LANES * 4;
}

/* Groups of panels per part. Few rows: by the bytes that are read. Many: several groups, whose weights a thread fetches
 * for itself, if enough parts are left for every thread. */
static int64_t groups_per_part(const linear_call *call, int64_t num_blocks) {
    if (call->rows->num_rows <= ROWS_PER_TILE)
        return max(1, BYTES_PER_PART / (MAX_PANELS_AT_ONCE * panel_bytes(call->weight)));
    int64_t num_groups = num_blocks * divide_up(call->num_panels, MAX_PANELS_AT_ONCE);
    return min(MOST_GROUPS_PER_PART, max(1, num_groups / (MIN_PARTS_PER_THREAD * pagoda_num_threads())));
}

/* Divides a linear layer into parts. */
static linear_call divide(float *output, int64_t stride, const pagoda_rows *rows, const pagoda_weight *weight,
                          pagoda_epilogue epilogue) {
    linear_call call = {
        .output = output, .stride = stride, .rows = rows, .weight = weight, .epilogue = epilogue,
        .num_words = pagoda_num_words(weight->kind, weight->in_features),
        .num_panels = divide_up(weight->out_features, LANES),
    };
    int64_t blocks = divide_up(rows->num_rows, MOST_ROWS_PER_BLOCK);
    call.panels_per_part = groups_per_part(&call, blocks) * MAX_PANELS_AT_ONCE;
    call.parts_per_block = divide_up(call.num_panels, call.panels_per_part);
    call.rows_per_block = divide_up(divide_up(rows->num_rows, blocks), ROWS_PER_TILE) * ROWS_PER_TILE;
    call.num_parts = blocks * call.parts_per_block;
    return call;
}

void pagoda_linear(float *output, int64_t stride, const pagoda_rows *rows, const pagoda_weight *weight,
                   pagoda_epilogue epilogue) {
    if (rows->num_rows < 1) return;
    linear_call call = divide(output, stride, rows, weight, epilogue);
    pagoda_parallel_for(call.num_parts, multiply_part, &call);
}

void pagoda_grouped_linear(const pagoda_linear_job *jobs, int32_t num_jobs, int64_t stride, pagoda_epilogue epilogue) {
    linear_call *calls = pagoda_scratch(SCRATCH_LINEAR_CALLS, (size_t)num_jobs * sizeof *calls);
    int64_t num_parts = 0;
    for (int32_t i = 0; i < num_jobs; i++) {
        calls[i] = divide(jobs[i].output, stride, &jobs[i].rows, &jobs[i].weight, epilogue);
        calls[i].factors = jobs[i].factors;
        calls[i].first_part = num_parts;
        num_parts += calls[i].num_parts;
    }
    pagoda_parallel_for(num_parts, multiply_part_of_group, calls);
}
