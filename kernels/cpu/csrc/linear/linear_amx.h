/* The inner loops of linear.c with AMX's tiles (runtime/tiles.h): two tiles of rows are multiplied with two panels, so that
 * every load serves two products; a single tile with four panels. Both add to a sum in the same order. */
#ifndef PAGODA_LINEAR_AMX_H
#define PAGODA_LINEAR_AMX_H

#include "linear/linear.h"
#include "runtime/tiles.h"

enum {
    TWO_TILES = 2 * TILE_ROWS,       /* rows */
    TILE_LANES = TILE_WORDS * LANES, /* words of a tile of weights */
    LINES_OF_TILE = 16,              /* of the cache */
    TILES_AHEAD = 4,                 /* of a panel, that are fetched to the second cache */
};

/* What is fetched meanwhile, a little with each product: all at once would keep its own loads waiting. */
typedef struct {
    const uint32_t *weights; /* to the second cache */
    int64_t lines;           /* of the cache, with each product */
    const float *outputs;    /* where the sums of a row's two panels go; then the next row's */
    int64_t stride, num_rows, rows_at_once;
} amx_fetch;

/* Fetches what one product takes. */
INLINE void fetch_some(amx_fetch *fetch) {
    for (int64_t i = 0; i < fetch->lines; i++, fetch->weights += LANES) __builtin_prefetch(fetch->weights, 0, 2);
    for (int64_t i = 0; i < fetch->rows_at_once && fetch->num_rows; i++, fetch->num_rows--) {
        __builtin_prefetch(fetch->outputs, 1, 3);
        __builtin_prefetch(fetch->outputs + LANES, 1, 3);
        fetch->outputs += fetch->stride;
    }
}

/* Adds to sums the product of tiles of the weights' kind. A macro, as the tiles' names must be constants. */
#define TILE_DOT(SUMS, ROWS, WEIGHTS)                                                                                 \
    do {                                                                                                              \
        if (is_int8) TILE_DOT_INT8(SUMS, ROWS, WEIGHTS);                                                              \
        else TILE_DOT_BF16(SUMS, ROWS, WEIGHTS);                                                                      \
    } while (0)

/* Sets the sums to 0. */
INLINE void zero_sums(void) {
    TILE_ZERO(SUMS_00);
    TILE_ZERO(SUMS_01);
    TILE_ZERO(SUMS_10);
    TILE_ZERO(SUMS_11);
}

/* Multiplies a whole tile of rows, and one of `second_rows`, with two panels. The sums are [2][16 + second_rows][16]. */
INLINE void multiply_two_tiles(float *sums, const uint32_t *rows, int64_t second_rows, const uint32_t *weights,
                               int64_t num_words, amx_fetch *fetch, bool is_int8) {
    const uint32_t *second = rows + TILE_ROWS * num_words;
    const int64_t panel = num_words * LANES;
    zero_sums();
    for (int64_t k = 0; k < num_words; k += TILE_WORDS, weights += TILE_LANES) {
        fetch_some(fetch);
        TILE_LOAD(ROWS_0, rows, TILE_STRIDE);
        TILE_LOAD(WEIGHTS_0, weights, TILE_STRIDE);
        TILE_LOAD(WEIGHTS_1, weights + panel, TILE_STRIDE);
        TILE_LOAD(ROWS_1, second, TILE_STRIDE);
        TILE_DOT(SUMS_00, ROWS_0, WEIGHTS_0);
        TILE_DOT(SUMS_01, ROWS_0, WEIGHTS_1);
        TILE_DOT(SUMS_10, ROWS_1, WEIGHTS_0);
        TILE_DOT(SUMS_11, ROWS_1, WEIGHTS_1);
        rows += TILE_ROWS * TILE_WORDS;
        second += second_rows * TILE_WORDS;
    }
    float *second_panel = sums + (TILE_ROWS + second_rows) * LANES;
    TILE_STORE(SUMS_00, sums, TILE_STRIDE);
    TILE_STORE(SUMS_10, sums + TILE_ROWS * LANES, TILE_STRIDE);
    TILE_STORE(SUMS_01, second_panel, TILE_STRIDE);
    TILE_STORE(SUMS_11, second_panel + TILE_ROWS * LANES, TILE_STRIDE);
}

/* Fetches the 16 words of a panel that a loop needs soon. */
INLINE void fetch_ahead(const uint32_t *weights) {
    for (int i = 0; i < LINES_OF_TILE; i++) __builtin_prefetch(weights + TILES_AHEAD * TILE_LANES + i * LANES, 0, 2);
}

/* Multiplies one tile of rows with four panels, which are fetched ahead or in the first cache. The sums are
 * [4][num_rows][16]. */
INLINE void multiply_one_tile(float *sums, const uint32_t *rows, int64_t num_rows, const uint32_t *weights,
                              int64_t num_words, bool is_int8, bool is_fetched) {
    const int64_t panel = num_words * LANES, step = num_rows * LANES;
    zero_sums();
    for (int64_t k = 0; k < num_words; k += TILE_WORDS, weights += TILE_LANES, rows += num_rows * TILE_WORDS) {
        for (int p = 0; p < MAX_PANELS_AT_ONCE && !is_fetched; p++) fetch_ahead(weights + p * panel);
        TILE_LOAD(ROWS_0, rows, TILE_STRIDE);
        TILE_LOAD(WEIGHTS_0, weights, TILE_STRIDE);
        TILE_DOT(SUMS_00, ROWS_0, WEIGHTS_0);
        TILE_LOAD(WEIGHTS_1, weights + panel, TILE_STRIDE);
        TILE_DOT(SUMS_01, ROWS_0, WEIGHTS_1);
        TILE_LOAD(WEIGHTS_0, weights + 2 * panel, TILE_STRIDE);
        TILE_DOT(SUMS_10, ROWS_0, WEIGHTS_0);
        TILE_LOAD(WEIGHTS_1, weights + 3 * panel, TILE_STRIDE);
        TILE_DOT(SUMS_11, ROWS_0, WEIGHTS_1);
    }
    TILE_STORE(SUMS_00, sums, TILE_STRIDE);
    TILE_STORE(SUMS_01, sums + step, TILE_STRIDE);
    TILE_STORE(SUMS_10, sums + 2 * step, TILE_STRIDE);
    TILE_STORE(SUMS_11, sums + 3 * step, TILE_STRIDE);
}

#endif
