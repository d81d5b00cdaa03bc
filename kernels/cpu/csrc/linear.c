/* See linear.h. */
#include "linear.h"

#include "integers.h"
#include "scratch.h"
#include "threads.h"
#include "vector.h"

enum {
    MAX_PANELS_AT_ONCE = 4,
    BYTES_PER_PART = 256 * 1024,
    WORDS_IN_L1 = 128,
    MOST_ROWS_PER_BLOCK = 256, /* every panel reads a block: a larger one would leave the cache. Measured on
                                * Zen 4, where 128 and 512 are slower */
};

int32_t pagoda_has_int8(void) { return PAGODA_HAS_INT8; }

int32_t pagoda_num_words(int32_t kind, int32_t in_features) {
    return (int32_t)divide_up(in_features, kind == PAGODA_INT8 ? 4 : kind == PAGODA_BF16 ? 2 : 1);
}

/* --- the inner loops ------------------------------------------------------------------------------------------- */

/* How many words ahead weights are fetched, to the second cache (the first would be full too early):
 * panels that are read together need less each. Measured on Zen 4. */
#define WORDS_AHEAD(PANELS) ((PANELS) == 4 ? 16 : (PANELS) == 2 ? 64 : 128)

/* Sums of ROWS rows with PANELS panels, as [PANELS][ROWS][16]: everything stays in registers until the end. The panels
 * lie `stride` words apart. With `goes_on` what `sums` holds is added to. */
#define DEFINE_TILE(NAME, SUM, DOT, ROWS, PANELS)                                                                     \
    static void NAME##_##ROWS##_##PANELS(void *sums, const uint32_t *rows, const uint32_t *weights,                   \
                                         int64_t num_words, int64_t stride, bool goes_on) {                           \
        SUM sum[PANELS][ROWS];                                                                                        \
        _Pragma("GCC unroll 16") for (int p = 0; p < PANELS; p++)                                                     \
            _Pragma("GCC unroll 16") for (int r = 0; r < ROWS; r++) {                                                 \
                if (goes_on) memcpy(&sum[p][r], (char *)sums + (p * ROWS + r) * sizeof(SUM), sizeof(SUM));            \
                else sum[p][r] = (SUM){0};                                                                            \
            }                                                                                                         \
        for (int64_t k = 0; k < num_words; k++, rows += ROWS, weights += LANES) {                                     \
            u32x16 weight[PANELS];                                                                                    \
            _Pragma("GCC unroll 16") for (int p = 0; p < PANELS; p++) {                                               \
                weight[p] = u32x16_load(weights + p * stride);                                                        \
                __builtin_prefetch(weights + p * stride + WORDS_AHEAD(PANELS) * LANES, 0, 2);                          \
            }                                                                                                         \
            _Pragma("GCC unroll 16") for (int r = 0; r < ROWS; r++) {                                                 \
                u32x16 row = u32x16_set(rows[r]);                                                                     \
                _Pragma("GCC unroll 16") for (int p = 0; p < PANELS; p++) sum[p][r] = DOT(sum[p][r], row, weight[p]); \
            }                                                                                                         \
        }                                                                                                             \
        _Pragma("GCC unroll 16") for (int p = 0; p < PANELS; p++)                                                     \
            _Pragma("GCC unroll 16") for (int r = 0; r < ROWS; r++)                                                   \
                memcpy((char *)sums + (p * ROWS + r) * sizeof(SUM), &sum[p][r], sizeof(SUM));                         \
    }

#define DEFINE_TILES(NAME, SUM, DOT)                                                                                  \
    DEFINE_TILE(NAME, SUM, DOT, 1, 4) DEFINE_TILE(NAME, SUM, DOT, 2, 4) DEFINE_TILE(NAME, SUM, DOT, 3, 4)             \
    DEFINE_TILE(NAME, SUM, DOT, 4, 4) DEFINE_TILE(NAME, SUM, DOT, 5, 4) DEFINE_TILE(NAME, SUM, DOT, 6, 4)             \
    DEFINE_TILE(NAME, SUM, DOT, 7, 2) DEFINE_TILE(NAME, SUM, DOT, 8, 2) DEFINE_TILE(NAME, SUM, DOT, 9, 2)             \
    DEFINE_TILE(NAME, SUM, DOT, 10, 2) DEFINE_TILE(NAME, SUM, DOT, 11, 2) DEFINE_TILE(NAME, SUM, DOT, 12, 2)          \
    DEFINE_TILE(NAME, SUM, DOT, 13, 2) DEFINE_TILE(NAME, SUM, DOT, 14, 2) DEFINE_TILE(NAME, SUM, DOT, 15, 1)          \
    DEFINE_TILE(NAME, SUM, DOT, 16, 1)                                                                                \
    static const tile_function NAME[ROWS_PER_TILE + 1] = {                                                            \
        NULL,       NAME##_1_4,  NAME##_2_4,  NAME##_3_4,  NAME##_4_4,  NAME##_5_4,  NAME##_6_4,  NAME##_7_2,         \
        NAME##_8_2, NAME##_9_2,  NAME##_10_2, NAME##_11_2, NAME##_12_2, NAME##_13_2, NAME##_14_2, NAME##_15_1,        \
        NAME##_16_1};

typedef void (*tile_function)(void *sums, const uint32_t *rows, const uint32_t *weights, int64_t num_words,
                              int64_t stride, bool goes_on);

DEFINE_TILES(f32_tiles, f32x16, pagoda_dot_f32)
DEFINE_TILES(bf16_tiles, f32x16, pagoda_dot_bf16)
#if PAGODA_HAS_INT8
DEFINE_TILES(int8_tiles, i32x16, pagoda_dot_int8)
#endif

/* Panels whose sums with so many rows fit into the registers. */
static int panels_at_once(int num_rows) { return num_rows <= 6 ? 4 : num_rows <= 14 ? 2 : 1; }

/* The inner loop for so many rows. */
static tile_function tile_for(int kind, int num_rows) {
#if PAGODA_HAS_INT8
    if (kind == PAGODA_INT8) return int8_tiles[num_rows];
#endif
    return kind == PAGODA_BF16 ? bf16_tiles[num_rows] : f32_tiles[num_rows];
}

/* --- from sums to outputs -------------------------------------------------------------------------------- */

/* Arguments of pagoda_linear, and how the loop is divided. */
typedef struct {
    float *output;
    int64_t stride;
    const pagoda_rows *rows;
    const pagoda_weight *weight;
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
    return weight->bias ? value + f32x16_load(weight->bias + panel * LANES) : value;
}

/* Stores or adds a panel's lanes; those beyond the last output, of which `count` are left, are dropped. */
INLINE void put(float *to, f32x16 value, int64_t count, bool is_added) {
    if (count >= LANES) {
        f32x16_store(to, is_added ? f32x16_load(to) + value : value);
        return;
    }
    float parts[LANES];
    f32x16_store(parts, value);
    for (int64_t i = 0; i < count; i++) to[i] = is_added ? to[i] + parts[i] : parts[i];
}

/* gelu(x) by its approximation 0.5 x (1 + tanh(u)) with u = sqrt(2 / pi) (x + 0.044715 x^3), which is x / (1 + e^-2u). */
INLINE f32x16 gelu(f32x16 x) {
    f32x16 doubled = 1.5957691216f * x * (1 + 0.044715f * x * x); /* 2u */
    return x / (1 + f32x16_exp(-doubled));
}

/* Turns the sums of a tile into outputs. */
static void finish(const linear_call *call, const float *sums, int64_t first_row, int num_rows, int64_t panel,
                   int num_panels) {
    int64_t width = call->weight->out_features;
    const bool is_gated = call->epilogue == PAGODA_SILU_MUL || call->epilogue == PAGODA_GELU_MUL;
    const int step = is_gated ? 2 : 1; /* a panel of gates, and the panel it multiplies */
    for (int p = 0; p < num_panels; p += step)
        for (int r = 0; r < num_rows; r++) {
            const float *sum = sums + (p * num_rows + r) * LANES;
            float *row = call->output + (first_row + r) * call->stride;
            f32x16 value = product(call, sum, first_row + r, panel + p);
            if (!is_gated) {
                put(row + (panel + p) * LANES, value, width - (panel + p) * LANES, call->epilogue == PAGODA_ADD);
            } else {
                f32x16 up = product(call, sum + num_rows * LANES, first_row + r, panel + p + 1);
                int64_t column = (panel + p) / 2 * LANES;
                f32x16 gate = call->epilogue == PAGODA_GELU_MUL ? gelu(value) : value / (1 + f32x16_exp(-value));
                put(row + column, gate * up, width / 2 - column, false);
            }
        }
}

/* --- the loops around them ------------------------------------------------------------------------------------- */

/* Multiplies some adjacent panels with a range of rows. */
static void multiply_panels(const linear_call *call, int64_t panel, int num_panels, int64_t row, int64_t end_row) {
    _Alignas(64) float sums[MAX_PANELS_AT_ONCE * ROWS_PER_TILE * LANES];
    int64_t num_words = call->num_words;
    /* Many rows: all panels use a piece that fits L1. Few rows: weights are read in one go. */
    int64_t depth = call->rows->num_rows > ROWS_PER_TILE ? WORDS_IN_L1 : num_words;
    for (; row < end_row; row += ROWS_PER_TILE) {
        int64_t left = end_row - row;
        int num_rows = left < ROWS_PER_TILE ? (int)left : ROWS_PER_TILE;
        int step = panels_at_once(num_rows);
        tile_function tile = tile_for(call->weight->kind, num_rows);
        const uint32_t *rows = call->rows->words + row * num_words;
        const uint32_t *words = call->weight->words + panel * LANES * num_words;
        for (int64_t k = 0; k < num_words; k += depth) {
            int64_t count = num_words - k < depth ? num_words - k : depth;
            for (int p = 0; p < num_panels; p += step)
                tile(sums + p * num_rows * LANES, rows + k * num_rows, words + (p * num_words + k) * LANES, count,
                     num_words * LANES, k > 0);
        }
        finish(call, sums, row, num_rows, panel, num_panels);
    }
}

/* Multiplies one part: a block of rows with some panels. */
static void multiply_part(void *args, int64_t index) {
    const linear_call *call = args;
    int64_t row = index / call->parts_per_block * call->rows_per_block;
    int64_t end_row = least(row + call->rows_per_block, call->rows->num_rows);
    int64_t panel = index % call->parts_per_block * call->panels_per_part;
    int64_t end_panel = least(panel + call->panels_per_part, call->num_panels);
    for (; panel < end_panel; panel += MAX_PANELS_AT_ONCE)
        multiply_panels(call, panel, MAX_PANELS_AT_ONCE, row, end_row);
}

/* Multiplies one part of one of several calls. */
static void multiply_part_of_group(void *args, int64_t index) {
    const linear_call *calls = args;
    while (index >= calls->first_part + calls->num_parts) calls++;
    multiply_part((void *)calls, index - calls->first_part);
}

/* Divides a linear layer into parts. */
static linear_call divide(float *output, int64_t stride, const pagoda_rows *rows, const pagoda_weight *weight,
                          pagoda_epilogue epilogue) {
    linear_call call = {
        .output = output, .stride = stride, .rows = rows, .weight = weight, .epilogue = epilogue,
        .num_words = pagoda_num_words(weight->kind, weight->in_features),
        .num_panels = divide_up(weight->out_features, LANES),
    };
    int64_t group_bytes = MAX_PANELS_AT_ONCE * LANES * call.num_words * 4;
    int64_t groups = rows->num_rows > ROWS_PER_TILE ? 1 : BYTES_PER_PART / group_bytes; /* many rows: long parts */
    call.panels_per_part = (groups < 1 ? 1 : groups) * MAX_PANELS_AT_ONCE;
    call.parts_per_block = divide_up(call.num_panels, call.panels_per_part);
    int64_t blocks = divide_up(rows->num_rows, MOST_ROWS_PER_BLOCK);
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
        calls[i].first_part = num_parts;
        num_parts += calls[i].num_parts;
    }
    pagoda_parallel_for(num_parts, multiply_part_of_group, calls);
}
