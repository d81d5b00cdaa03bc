/* The inner loops of linear.c (linear/) for coded weights: rows of signed bytes with decoded blocks (see codes.h).
 *
 * Products of bytes are summed exactly, so only the order of blocks counts for the bits of a sum, and that is always the
 * same. */
#ifndef PAGODA_CODED_TILES_H
#define PAGODA_CODED_TILES_H

#include "coded/dot.h"
#include "runtime/tiles.h"

enum {
#if PAGODA_HALF_REGISTERS
    MOST_CODED_ROWS = 3,
#else
    MOST_CODED_ROWS = 6,
#endif
};

/* What is read to the second cache meanwhile: of each panel so many lines for a block. */
typedef struct {
    const uint8_t *start;
    int64_t panel_stride; /* from what is read of a panel to that of the next one */
    int64_t lines;
} coded_fetch;

/* Multiplies some rows of a tile, from `first` on, with blocks of some panels, which are `panel_bytes` apart, and adds
 * the products to the sums, [panels][row_step][16]. */
typedef void (*coded_tile)(float *sums, const uint32_t *rows, int64_t first, int64_t row_step, const uint8_t *panels,
                           int64_t panel_bytes, int64_t num_blocks, coded_fetch fetch);

/* From a row's words of bytes to those of the next row, and from a word to the next one; see codes.h. */
#define ROW_STRIDE (PAGODA_HAS_TILES ? BLOCK_WORDS : 1)
#define WORD_STRIDE (PAGODA_HAS_TILES ? 1 : row_step)

/* GRANULES of a block: 1 or 2. */
#define DEFINE_TILE(NAME, GRANULES, IS_WIDE, ROWS, PANELS)                                                            \
    static void NAME##_##ROWS(float *sums, const uint32_t *rows, int64_t first, int64_t row_step,                     \
                              const uint8_t *panels, int64_t panel_bytes, int64_t num_blocks, coded_fetch fetch) {    \
        enum { WORDS = BLOCK_WORDS / GRANULES, BLOCK_BYTES = (BLOCK_WORDS + 2 * GRANULES) * LANES * 4 };              \
        for (int lane = 0; lane < LANES; lane += REGISTER_LANES) {                                                    \
            f32_register sum[PANELS][ROWS];                                                                           \
            _Pragma("GCC unroll 4") for (int p = 0; p < PANELS; p++)                                                  \
                _Pragma("GCC unroll 8") for (int r = 0; r < ROWS; r++)                                                \
                    sum[p][r] = register_load(sums + (p * row_step + first + r) * LANES + lane);                      \
            const uint8_t *block = panels + lane * 4;                                                                 \
            const uint32_t *row = rows + first, *words = rows + first * ROW_STRIDE;                                   \
            for (int64_t b = 0; b < num_blocks; b++, block += BLOCK_BYTES) {                                          \
                for (int64_t i = 0; i < fetch.lines; i++, fetch.start += 64)                                          \
                    _Pragma("GCC unroll 4") for (int p = 0; p < PANELS; p++)                                          \
                        __builtin_prefetch(fetch.start + p * fetch.panel_stride, 0, 2);                               \
                _Pragma("GCC unroll 2") for (int g = 0; g < GRANULES; g++) {                                          \
                    i32_register dots[PANELS][ROWS] = {0};                                                            \
                    _Pragma("GCC unroll 8") for (int k = g * WORDS; k < (g + 1) * WORDS; k++) {                       \
                        i32_register levels[PANELS];                                                                  \
                        _Pragma("GCC unroll 4") for (int p = 0; p < PANELS; p++)                                      \
                            levels[p] = load_levels(block + p * panel_bytes + k * LANES * 4);                         \
                        _Pragma("GCC unroll 8") for (int r = 0; r < ROWS; r++)                                        \
                            _Pragma("GCC unroll 4") for (int p = 0; p < PANELS; p++)                                  \
                                dots[p][r] = dot_bytes(dots[p][r], levels[p],                                         \
                                                       words[r * ROW_STRIDE + k * WORD_STRIDE], IS_WIDE);             \
                    }                                                                                                 \
                    _Pragma("GCC unroll 4") for (int p = 0; p < PANELS; p++) {                                        \
                        const float *scales = (const float *)(block + p * panel_bytes) + BLOCK_WORDS * LANES;         \
                        const f32_register scale = register_load(scales + g * LANES);                                 \
                        const f32_register minimum = register_load(scales + (GRANULES + g) * LANES);                  \
                        _Pragma("GCC unroll 8") for (int r = 0; r < ROWS; r++) {                                      \
                            const int at = ROW_SUMS + (GRANULES == 1 ? 2 : g);                                        \
                            sum[p][r] = add_granule(sum[p][r], dots[p][r], scale, minimum,                            \
                                                    float_of_word(row[ROW_SCALE * row_step + r]),                     \
                                                    float_of_word(row[at * row_step + r]), IS_WIDE);                  \
                        }                                                                                             \
                    }                                                                                                 \
                }                                                                                                     \
                row += ROW_BLOCK_WORDS * row_step;                                                                    \
                words += ROW_BLOCK_WORDS * row_step;                                                                  \
            }                                                                                                         \
            _Pragma("GCC unroll 4") for (int p = 0; p < PANELS; p++)                                                  \
                _Pragma("GCC unroll 8") for (int r = 0; r < ROWS; r++)                                                \
                    register_store(sums + (p * row_step + first + r) * LANES + lane, sum[p][r]);                      \
        }                                                                                                             \
    }

#if PAGODA_HALF_REGISTERS
enum { CODED_PANELS_AT_ONCE = 1 };
#define DEFINE_TILES(NAME, GRANULES, IS_WIDE)                                                                         \
    DEFINE_TILE(NAME, GRANULES, IS_WIDE, 1, 1)                                                                        \
    DEFINE_TILE(NAME, GRANULES, IS_WIDE, 2, 1)                                                                        \
    DEFINE_TILE(NAME, GRANULES, IS_WIDE, 3, 1)                                                                        \
    static const coded_tile NAME[MOST_CODED_ROWS + 1] = {NULL, NAME##_1, NAME##_2, NAME##_3};
#else
enum { CODED_PANELS_AT_ONCE = 2 };
#define DEFINE_TILES(NAME, GRANULES, IS_WIDE)                                                                         \
    DEFINE_TILE(NAME, GRANULES, IS_WIDE, 1, 2)                                                                        \
    DEFINE_TILE(NAME, GRANULES, IS_WIDE, 2, 2)                                                                        \
    DEFINE_TILE(NAME, GRANULES, IS_WIDE, 3, 2)                                                                        \
    DEFINE_TILE(NAME, GRANULES, IS_WIDE, 4, 2)                                                                        \
    DEFINE_TILE(NAME, GRANULES, IS_WIDE, 5, 2)                                                                        \
    DEFINE_TILE(NAME, GRANULES, IS_WIDE, 6, 2)                                                                        \
    static const coded_tile NAME[MOST_CODED_ROWS + 1] = {NULL,     NAME##_1, NAME##_2, NAME##_3,                      \
                                                         NAME##_4, NAME##_5, NAME##_6};
#endif

DEFINE_TILES(of_32, 1, 0)
DEFINE_TILES(of_16, 2, 0)
#if !PAGODA_WIDE_IS_FREE
DEFINE_TILES(wide_of_32, 1, 1)
DEFINE_TILES(wide_of_16, 2, 1)
#endif

/* The loops for codes of a format. */
static const coded_tile *coded_tiles_for(const pagoda_code_format *format) {
    const bool is_of_16 = format->granule == 16;
#if !PAGODA_WIDE_IS_FREE
    if (format->bits == 8 || format->has_levels) return is_of_16 ? wide_of_16 : wide_of_32;
#endif
    return is_of_16 ? of_16 : of_32;
}

#undef ROW_STRIDE
#undef WORD_STRIDE
#undef DEFINE_TILE
#undef DEFINE_TILES

#endif
