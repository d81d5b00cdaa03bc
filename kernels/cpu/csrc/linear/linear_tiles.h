/* The inner loops of linear.c where a register holds the 16 lanes of a panel, as AVX-512's do, or the compiler has to cope:
 * sums of up to six rows with four panels, seven to fourteen with two, and sixteen with one fit into 32 registers. */
#ifndef PAGODA_LINEAR_TILES_H
#define PAGODA_LINEAR_TILES_H

#include "linear/linear.h"
#include "runtime/vector.h"

enum {
    MOST_ROWS_PER_PART = 6,
    MOST_ROWS_UNDIVIDED = ROWS_PER_TILE,
};

/* How many words ahead weights are fetched, to the second cache (the first would be full too early):
 * panels that are read together need less each. Measured on Zen 4. */
#define WORDS_AHEAD(PANELS) ((PANELS) == 4 ? 16 : (PANELS) == 2 ? 64 : 128)

/* Sums of ROWS rows with PANELS panels: everything stays in registers until the end. They are stored as
 * [PANELS][row_step][16]; `row_step` is the number of rows of the tile, which may be more than ROWS. With FETCHES one
 * other panel is fetched to the second cache meanwhile. */
#define DEFINE_TILE(NAME, SUM, DOT, ROWS, PANELS, FETCHES)                                                            \
    static void NAME##_##ROWS##_##PANELS(void *sums, const uint32_t *rows, int64_t row_step, const uint32_t *weights, \
                                         int64_t num_words, const uint32_t *fetched) {                                \
        SUM sum[PANELS][ROWS];                                                                                        \
        _Pragma("GCC unroll 16") for (int p = 0; p < PANELS; p++)                                                     \
            _Pragma("GCC unroll 16") for (int r = 0; r < ROWS; r++) sum[p][r] = (SUM){0};                             \
        const int64_t stride = num_words * LANES;                                                                     \
        for (int64_t k = 0; k < num_words; k++, rows += row_step, weights += LANES, fetched += LANES) {               \
            u32x16 weight[PANELS];                                                                                    \
            if (FETCHES) __builtin_prefetch(fetched, 0, 2);                                                           \
            _Pragma("GCC unroll 16") for (int p = 0; p < PANELS; p++) {                                               \
                weight[p] = u32x16_load(weights + p * stride);                                                        \
                __builtin_prefetch(weights + p * stride + WORDS_AHEAD(PANELS) * LANES, 0, 2);                         \
            }                                                                                                         \
            _Pragma("GCC unroll 16") for (int r = 0; r < ROWS; r++) {                                                 \
                u32x16 row = u32x16_set(rows[r]);                                                                     \
                _Pragma("GCC unroll 16") for (int p = 0; p < PANELS; p++) sum[p][r] = DOT(sum[p][r], row, weight[p]); \
            }                                                                                                         \
        }                                                                                                             \
        _Pragma("GCC unroll 16") for (int p = 0; p < PANELS; p++)                                                     \
            _Pragma("GCC unroll 16") for (int r = 0; r < ROWS; r++)                                                   \
                memcpy((char *)sums + (p * row_step + r) * sizeof(SUM), &sum[p][r], sizeof(SUM));                     \
    }

/* Whole tiles, when there is only one and each weight is read once. */
#define DEFINE_TILES(NAME, SUM, DOT)                                                                                  \
    DEFINE_TILE(NAME, SUM, DOT, 1, 4, 0) DEFINE_TILE(NAME, SUM, DOT, 2, 4, 0)                                         \
    DEFINE_TILE(NAME, SUM, DOT, 3, 4, 0) DEFINE_TILE(NAME, SUM, DOT, 4, 4, 0)                                         \
    DEFINE_TILE(NAME, SUM, DOT, 5, 4, 0) DEFINE_TILE(NAME, SUM, DOT, 6, 4, 0)                                         \
    DEFINE_TILE(NAME, SUM, DOT, 7, 2, 0) DEFINE_TILE(NAME, SUM, DOT, 8, 2, 0)                                         \
    DEFINE_TILE(NAME, SUM, DOT, 9, 2, 0) DEFINE_TILE(NAME, SUM, DOT, 10, 2, 0)                                        \
    DEFINE_TILE(NAME, SUM, DOT, 11, 2, 0) DEFINE_TILE(NAME, SUM, DOT, 12, 2, 0)                                       \
    DEFINE_TILE(NAME, SUM, DOT, 13, 2, 0) DEFINE_TILE(NAME, SUM, DOT, 14, 2, 0)                                       \
    DEFINE_TILE(NAME, SUM, DOT, 15, 1, 0) DEFINE_TILE(NAME, SUM, DOT, 16, 1, 0)                                       \
    static const tile_function NAME[ROWS_PER_TILE + 1] = {                                                            \
        NULL,       NAME##_1_4,  NAME##_2_4,  NAME##_3_4,  NAME##_4_4,  NAME##_5_4,  NAME##_6_4,  NAME##_7_2,         \
        NAME##_8_2, NAME##_9_2,  NAME##_10_2, NAME##_11_2, NAME##_12_2, NAME##_13_2, NAME##_14_2, NAME##_15_1,        \
        NAME##_16_1};

/* Parts of tiles. */
#define DEFINE_PARTS(NAME, SUM, DOT)                                                                                  \
    DEFINE_TILE(NAME, SUM, DOT, 1, 4, 1) DEFINE_TILE(NAME, SUM, DOT, 2, 4, 1)                                         \
    DEFINE_TILE(NAME, SUM, DOT, 3, 4, 1) DEFINE_TILE(NAME, SUM, DOT, 4, 4, 1)                                         \
    DEFINE_TILE(NAME, SUM, DOT, 5, 4, 1) DEFINE_TILE(NAME, SUM, DOT, 6, 4, 1)                                         \
    static const tile_function NAME[MOST_ROWS_PER_PART + 1] = {                                                       \
        NULL, NAME##_1_4, NAME##_2_4, NAME##_3_4, NAME##_4_4, NAME##_5_4, NAME##_6_4};

/* Panels whose sums with num_rows rows fit into the registers. */
static int panels_at_once(int num_rows) { return num_rows <= 6 ? 4 : num_rows <= 14 ? 2 : 1; }

DEFINE_TILES(f32_tiles, f32x16, pagoda_dot_f32)
DEFINE_PARTS(f32_parts, f32x16, pagoda_dot_f32)
DEFINE_TILES(bf16_tiles, f32x16, pagoda_dot_bf16)
DEFINE_PARTS(bf16_parts, f32x16, pagoda_dot_bf16)
#if PAGODA_HAS_INT8
DEFINE_TILES(int8_tiles, i32x16, pagoda_dot_int8)
DEFINE_PARTS(int8_parts, i32x16, pagoda_dot_int8)
#endif

#endif
