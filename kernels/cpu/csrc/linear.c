/* See linear.h. */
#include "linear.h"

#include <math.h>
#include <stdbool.h>

#include "threads.h"
#include "vector.h"

enum {
    MAX_PANELS_AT_ONCE = 4,
    BYTES_PER_PART = 256 * 1024,
    WORDS_IN_L1 = 128,
    MOST_ROWS_PER_BLOCK = 256, /* which all panels use in turn: more would come from memory for every few of them.
                                * Measured on Zen 4, where 128 and 512 are slower */
};

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

int32_t pagoda_has_int8(void) { return PAGODA_HAS_INT8; }

int32_t pagoda_num_words(int32_t kind, int32_t in_features) {
    int32_t per_word = kind == PAGODA_INT8 ? 4 : kind == PAGODA_BF16 ? 2 : 1;
    return (in_features + per_word - 1) / per_word;
}

/* --- the inner loops ------------------------------------------------------------------------------------------- */

/* How many words ahead weights are fetched, to the second cache (the first is soon full of what is not needed yet):
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

static int panels_at_once(int num_rows) { return num_rows <= 6 ? 4 : num_rows <= 14 ? 2 : 1; }

static tile_function tile_for(int kind, int num_rows) {
#if PAGODA_HAS_INT8
    if (kind == PAGODA_INT8) return int8_tiles[num_rows];
#endif
    return kind == PAGODA_BF16 ? bf16_tiles[num_rows] : f32_tiles[num_rows];
}

/* --- what becomes of the sums ---------------------------------------------------------------------------------- */

typedef struct {
    float *output;
    int64_t stride;
    const pagoda_rows *rows;
    const pagoda_weight *weight;
    pagoda_epilogue epilogue;
    int64_t num_words, num_panels, panels_per_part;
    int64_t rows_per_block, parts_per_block;
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

/* The lanes beyond the last output are nobody's. */
INLINE void put(float *to, f32x16 value, int64_t count, bool is_added) {
    if (count >= LANES) {
        f32x16_store(to, is_added ? f32x16_load(to) + value : value);
        return;
    }
    float parts[LANES];
    f32x16_store(parts, value);
    for (int64_t i = 0; i < count; i++) to[i] = is_added ? to[i] + parts[i] : parts[i];
}

static void finish(const linear_call *call, const float *sums, int64_t first_row, int num_rows, int64_t panel,
                   int num_panels) {
    int64_t width = call->weight->out_features;
    const int step = call->epilogue == PAGODA_SILU_MUL ? 2 : 1; /* a panel that is a gate, and what it lets through */
    for (int p = 0; p < num_panels; p += step)
        for (int r = 0; r < num_rows; r++) {
            const float *sum = sums + (p * num_rows + r) * LANES;
            float *row = call->output + (first_row + r) * call->stride;
            f32x16 value = product(call, sum, first_row + r, panel + p);
            if (call->epilogue != PAGODA_SILU_MUL) {
                put(row + (panel + p) * LANES, value, width - (panel + p) * LANES, call->epilogue == PAGODA_ADD);
            } else {
                f32x16 up = product(call, sum + num_rows * LANES, first_row + r, panel + p + 1);
                int64_t column = (panel + p) / 2 * LANES;
                put(row + column, value / (1 + f32x16_exp(-value)) * up, width / 2 - column, false);
            }
        }
}

/* --- the loops around them ------------------------------------------------------------------------------------- */

static void multiply_panels(const linear_call *call, int64_t panel, int num_panels, int64_t row, int64_t end_row) {
    _Alignas(64) float sums[MAX_PANELS_AT_ONCE * ROWS_PER_TILE * LANES];
    int64_t num_words = call->num_words;
    /* Of many rows a piece that fits L1 is used by all panels; of few, weights are best read straight through. */
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

static void multiply_part(void *args, int64_t index) {
    const linear_call *call = args;
    int64_t row = index / call->parts_per_block * call->rows_per_block;
    int64_t end_row = least(row + call->rows_per_block, call->rows->num_rows);
    int64_t panel = index % call->parts_per_block * call->panels_per_part;
    int64_t end_panel = least(panel + call->panels_per_part, call->num_panels);
    for (; panel < end_panel; panel += MAX_PANELS_AT_ONCE)
        multiply_panels(call, panel, MAX_PANELS_AT_ONCE, row, end_row);
}

void pagoda_linear(float *output, int64_t stride, const pagoda_rows *rows, const pagoda_weight *weight,
                   pagoda_epilogue epilogue) {
    if (rows->num_rows < 1) return;
    linear_call call = {output, stride, rows, weight, epilogue, 0, 0, 0, 0, 0};
    call.num_words = pagoda_num_words(weight->kind, weight->in_features);
    call.num_panels = divide_up(weight->out_features, LANES);
    int64_t group_bytes = MAX_PANELS_AT_ONCE * LANES * call.num_words * 4;
    int64_t groups = rows->num_rows > ROWS_PER_TILE ? 1 : BYTES_PER_PART / group_bytes; /* many rows: long parts */
    call.panels_per_part = (groups < 1 ? 1 : groups) * MAX_PANELS_AT_ONCE;
    call.parts_per_block = divide_up(call.num_panels, call.panels_per_part);
    int64_t blocks = divide_up(rows->num_rows, MOST_ROWS_PER_BLOCK);
    call.rows_per_block = divide_up(divide_up(rows->num_rows, blocks), ROWS_PER_TILE) * ROWS_PER_TILE;
    pagoda_parallel_for(blocks * call.parts_per_block, multiply_part, &call);
}

/* --- packing --------------------------------------------------------------------------------------------------- */

typedef struct {
    uint32_t *words;
    float *scales;
    int32_t *sums;
    const void *source;
    int32_t source_is_bf16, kind, num_rows, in_features, first_output, panel_step, panel_offset;
} pack_call;

INLINE float element(const pack_call *call, const void *row, int64_t i) {
    return call->source_is_bf16 ? bf16_to_float(((const bf16 *)row)[i]) : ((const float *)row)[i];
}

/* 16 elements from the i-th on; zeros behind the last one. */
INLINE f32x16 elements(const pack_call *call, const void *row, int64_t i) {
    return load_some(row, call->source_is_bf16, i, call->in_features - i);
}

static void pack_int8(const pack_call *call, const void *row, uint32_t *lane, int64_t output) {
    typedef int8_t i8x16 __attribute__((vector_size(16)));
    f32x16 most = {0};
    i32x16 is_number = ~(i32x16){0};
    for (int64_t i = 0; i < call->in_features; i += LANES) {
        f32x16 x = elements(call, row, i);
        is_number &= x == x;
        most = f32x16_max(most, f32x16_max(x, -x));
    }
    float largest = f32x16_largest(most), inverse = largest > 0 ? 127 / largest : 0;
    for (int lane = 0; lane < LANES; lane++) largest = is_number[lane] ? largest : NAN; /* its outputs are NaN too */
    i32x16 sums = {0};
    int32_t num_words = pagoda_num_words(PAGODA_INT8, call->in_features);
    for (int64_t i = 0; i < call->in_features; i += LANES) {
        /* Adding 1.5 * 2^23 rounds to an integer, which is then in the low bits. */
        i32x16 values = (i32x16)(elements(call, row, i) * inverse + 12582912.0f) - 0x4b400000;
        sums += values;
        i8x16 bytes = __builtin_convertvector(values, i8x16);
        for (int64_t word = 0; word < LANES / 4 && i / 4 + word < num_words; word++)
            memcpy(lane + (i / 4 + word) * LANES, (const char *)&bytes + 4 * word, 4);
    }
    int32_t sum = 0;
    for (int part = 0; part < LANES; part++) sum += sums[part];
    call->scales[output] = largest / 127;
    call->sums[output] = sum;
}

static void pack_floats(const pack_call *call, const void *row, uint32_t *lane) {
    int32_t num_words = pagoda_num_words(call->kind, call->in_features);
    for (int64_t k = 0; k < num_words; k++) {
        uint32_t word;
        if (call->kind == PAGODA_BF16) {
            float second = 2 * k + 1 < call->in_features ? element(call, row, 2 * k + 1) : 0;
            word = bf16_from(element(call, row, 2 * k)) | (uint32_t)bf16_from(second) << 16;
        } else {
            float value = element(call, row, k);
            memcpy(&word, &value, sizeof word);
        }
        lane[k * LANES] = word;
    }
}

/* 16 rows of bfloat16 into a whole panel, word by word as they are: what nearly all packing is. */
static void copy_panel(const uint16_t *source, int64_t in_features, uint32_t *panel) {
    int64_t k = 0;
    for (; k + LANES <= in_features / 2; k += LANES) {
        u32x16 rows[LANES];
        for (int lane = 0; lane < LANES; lane++) rows[lane] = u32x16_load(source + lane * in_features + 2 * k);
        store_transposed(panel + k * LANES, LANES, rows);
    }
    for (; k < in_features / 2; k++)
        for (int lane = 0; lane < LANES; lane++) memcpy(panel + k * LANES + lane, source + lane * in_features + 2 * k, 4);
}

static void pack_part(void *args, int64_t index) {
    const pack_call *call = args;
    int64_t first = index * LANES, end = first + LANES < call->num_rows ? first + LANES : call->num_rows;
    int64_t row_bytes = (int64_t)call->in_features * (call->source_is_bf16 ? 2 : 4);
    int64_t num_words = pagoda_num_words(call->kind, call->in_features);
    for (int64_t row = first; row < end; row++) {
        int64_t output = call->first_output + row;
        int64_t panel = output / LANES * call->panel_step + call->panel_offset;
        uint32_t *words = call->words + panel * LANES * num_words;
        const char *source = (const char *)call->source + row * row_bytes;
        bool is_whole = output % LANES == 0 && row + LANES <= end && call->in_features % 2 == 0;
        if (is_whole && call->kind == PAGODA_BF16 && call->source_is_bf16) {
            copy_panel((const uint16_t *)source, call->in_features, words);
            return;
        }
        if (call->kind == PAGODA_INT8) pack_int8(call, source, words + output % LANES, panel * LANES + output % LANES);
        else pack_floats(call, source, words + output % LANES);
    }
}

void pagoda_pack_weight(uint32_t *words, float *scales, int32_t *sums, const void *source, int32_t source_is_bf16,
                        int32_t kind, int32_t num_rows, int32_t in_features, int32_t first_output,
                        int32_t panel_step, int32_t panel_offset) {
    pack_call call = {words,    scales,      sums,         source,     source_is_bf16, kind,
                      num_rows, in_features, first_output, panel_step, panel_offset};
    pagoda_parallel_for((num_rows + LANES - 1) / LANES, pack_part, &call);
}
