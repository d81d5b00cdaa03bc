/* See pagoda_multiply_coded_tiles in codes.h.
 *
 * A segment of two panels is decoded to the first cache, and then multiplied with all rows. Tiles sum the products of a
 * block exactly, as dot.h does. These are stored, and added to sums in registers as in every other loop: so a row has the
 * same bits in each. */
#include "coded/dot.h"
#include "runtime/integers.h"
#include "runtime/scratch.h"
#include "runtime/tiles.h"

#if PAGODA_HAS_TILES

enum {
    PANELS_AT_ONCE = 2,
    SEGMENTS_AHEAD = 2,     /* from a segment to the one that is fetched to the second cache meanwhile */
    LINES_OF_PRODUCT = 2,   /* of the cache, that are fetched with each product */
    LINES_OF_BLOCK = 3,     /* and with each block that is decoded */
    NUM_PRODUCTS = 4,       /* that wait to be added: as many as there are tiles of sums */
    BLOCKS_AT_ONCE = 2 * NUM_PRODUCTS,
    DECODED_BYTES = (BLOCK_WORDS + 2) * LANES * 4, /* of a block: levels, scales, minima */
};

/* --- products -------------------------------------------------------------------------------------------------- */

/* Some blocks of a tile of rows, and of a decoded panel. */
typedef struct {
    const uint32_t *rows; /* of each block [rows, 8] words of bytes, then [4, rows] scales and sums */
    const uint8_t *blocks, *fetched;
} operands;

/* Multiplies a block; a macro, as the tiles' names must be constants. */
#define MULTIPLY(SUMS, ROWS, LEVELS, AT)                                                                              \
    do {                                                                                                              \
        TILE_LOAD(ROWS, own.rows + (AT) * ROW_BLOCK_WORDS * num_rows, BLOCK_WORDS * 4);                               \
        TILE_LOAD(LEVELS, own.blocks + (AT) * DECODED_BYTES, TILE_STRIDE);                                            \
        TILE_ZERO(SUMS);                                                                                              \
        for (int line = 0; line < LINES_OF_PRODUCT; line++)                                                           \
            __builtin_prefetch(own.fetched + ((AT) * LINES_OF_PRODUCT + line) * TILE_STRIDE, 0, 2);                   \
        TILE_DOT_CODES(SUMS, ROWS, LEVELS);                                                                           \
    } while (0)

/* Adds the products of a block [num_rows, 16] to sums. */
INLINE void add_products(f32_register *sums, const int32_t *products, operands own, int64_t at, int num_rows) {
    const float *scales = (const float *)(own.blocks + at * DECODED_BYTES) + BLOCK_WORDS * LANES;
    const f32_register scale = register_load(scales), minimum = register_load(scales + LANES);
    const uint32_t *factors = own.rows + (at * ROW_BLOCK_WORDS + ROW_SCALE) * num_rows;
    const uint32_t *row_sums = factors + (ROW_SUMS + 2 - ROW_SCALE) * num_rows;
    _Pragma("GCC unroll 16") for (int r = 0; r < num_rows; r++)
        sums[r] = add_granule(sums[r], load_levels((const uint8_t *)(products + r * LANES)), scale, minimum,
                              float_of_word(factors[r]), float_of_word(row_sums[r]), false);
}

/* Sums of rows, in registers. */
INLINE void load_sums(f32_register *sums, const float *from, int num_rows) {
    _Pragma("GCC unroll 16") for (int r = 0; r < num_rows; r++) sums[r] = register_load(from + r * LANES);
}

INLINE void store_sums(float *to, const f32_register *sums, int num_rows) {
    _Pragma("GCC unroll 16") for (int r = 0; r < num_rows; r++) register_store(to + r * LANES, sums[r]);
}

/* Adds the products of eight blocks to [num_rows, 16]. Each is stored two products later, and added after two more; other
 * orders that were tried take up to an eighth longer. */
INLINE void multiply_blocks(float *to, operands own, int num_rows) {
#define ADD(AT) add_products(sums, products[(AT) % NUM_PRODUCTS], own, AT, num_rows)
    _Alignas(64) int32_t products[NUM_PRODUCTS][TILE_ROWS * LANES];
    f32_register sums[TILE_ROWS];
    load_sums(sums, to, num_rows);
    MULTIPLY(SUMS_00, ROWS_0, WEIGHTS_0, 0);
    MULTIPLY(SUMS_01, ROWS_1, WEIGHTS_1, 1);
    MULTIPLY(SUMS_10, ROWS_0, WEIGHTS_0, 2);
    TILE_STORE(SUMS_00, products[0], TILE_STRIDE);
    MULTIPLY(SUMS_11, ROWS_1, WEIGHTS_1, 3);
    TILE_STORE(SUMS_01, products[1], TILE_STRIDE);
    MULTIPLY(SUMS_00, ROWS_0, WEIGHTS_0, 4);
    TILE_STORE(SUMS_10, products[2], TILE_STRIDE);
    ADD(0);
    MULTIPLY(SUMS_01, ROWS_1, WEIGHTS_1, 5);
    TILE_STORE(SUMS_11, products[3], TILE_STRIDE);
    ADD(1);
    MULTIPLY(SUMS_10, ROWS_0, WEIGHTS_0, 6);
    TILE_STORE(SUMS_00, products[0], TILE_STRIDE);
    ADD(2);
    MULTIPLY(SUMS_11, ROWS_1, WEIGHTS_1, 7);
    TILE_STORE(SUMS_01, products[1], TILE_STRIDE);
    ADD(3);
    TILE_STORE(SUMS_10, products[2], TILE_STRIDE);
    TILE_STORE(SUMS_11, products[3], TILE_STRIDE);
    ADD(4);
    ADD(5);
    ADD(6);
    ADD(7);
    store_sums(to, sums, num_rows);
#undef ADD
}

/* Adds the products of one block. */
INLINE void multiply_block(float *to, operands own, int64_t at, int num_rows) {
    _Alignas(64) int32_t products[TILE_ROWS * LANES];
    f32_register sums[TILE_ROWS];
    load_sums(sums, to, num_rows);
    MULTIPLY(SUMS_00, ROWS_0, WEIGHTS_0, at);
    TILE_STORE(SUMS_00, products, TILE_STRIDE);
    add_products(sums, products, own, at, num_rows);
    store_sums(to, sums, num_rows);
}

/* Adds the products of a tile of rows with some blocks to [num_rows, 16]. */
INLINE void multiply_tile(float *to, operands own, int64_t num_blocks, int num_rows) {
    for (; num_blocks >= BLOCKS_AT_ONCE; num_blocks -= BLOCKS_AT_ONCE) {
        multiply_blocks(to, own, num_rows);
        own.rows += BLOCKS_AT_ONCE * ROW_BLOCK_WORDS * num_rows;
        own.blocks += BLOCKS_AT_ONCE * DECODED_BYTES;
        own.fetched += BLOCKS_AT_ONCE * LINES_OF_PRODUCT * TILE_STRIDE;
    }
    for (int64_t at = 0; at < num_blocks; at++) multiply_block(to, own, at, num_rows);
}

/* What the panels of a segment are multiplied with. */
typedef struct {
    const uint8_t *panels, *later; /* decoded; codes that are fetched meanwhile */
    int64_t panel_bytes; /* from a panel's codes to the next one's */
    int64_t num_blocks;
    const uint32_t *rows; /* tiles of rows, from the segment's first block on */
    int64_t num_tiles, tile_words; /* from a tile to the next one */
    float *sums; /* [tiles][4][rows][16] */
} segment_call;

/* Multiplies tiles of rows with the panels of a segment. */
INLINE void multiply_tiles(const segment_call *call, int num_rows) {
    float *sums = call->sums;
    for (int64_t tile = 0; tile < call->num_tiles; tile++, sums += PANELS_OF_GROUP * num_rows * LANES)
        for (int p = 0; p < PANELS_AT_ONCE; p++) {
            const uint32_t *rows = call->rows + tile * call->tile_words;
            const uint8_t *codes = call->later + p * call->panel_bytes;
            const uint8_t *fetched = tile ? (const uint8_t *)(rows + call->tile_words) : codes;
            const operands own = {rows, call->panels + p * SEGMENT_BLOCKS * DECODED_BYTES, fetched};
            multiply_tile(sums + p * num_rows * LANES, own, call->num_blocks, num_rows);
        }
}

/* The same for any number of rows. It is called once a segment: the jump takes as long as a product. */
static void multiply_segment(const segment_call *call, int num_rows) {
    switch (num_rows) {
#define CASE(ROWS)                                                                                                    \
    case ROWS: multiply_tiles(call, ROWS); return;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
        CASE(9) CASE(10) CASE(11) CASE(12) CASE(13) CASE(14) CASE(15) CASE(16)
#undef CASE
    }
}

/* --- loops around them ----------------------------------------------------------------------------------------- */

/* Arguments of pagoda_multiply_coded_tiles. */
typedef struct {
    float *sums;
    const uint32_t *rows;
    const uint8_t *panels;
    const pagoda_panel_layout *layout;
    int64_t num_blocks, num_segments; /* of an output */
    int tile_rows; /* for which tiles are configured. That takes as long as tens of products */
} tiles_call;

/* Where the codes of a step begin: steps go over the segments of two panels, and then of the next ones. */
INLINE const uint8_t *codes_of_step(const tiles_call *call, int64_t step) {
    return call->panels + step / call->num_segments * PANELS_AT_ONCE * call->layout->panel_bytes +
           step % call->num_segments * call->layout->segment_bytes;
}

/* Multiplies some tiles of `num_rows` rows each, from `row` on, with the panels of a step. */
static void multiply_some_rows(tiles_call *call, segment_call segment, int64_t step, int64_t row, int num_rows) {
    const int64_t panel = step / call->num_segments * PANELS_AT_ONCE, row_words = call->num_blocks * ROW_BLOCK_WORDS;
    const int64_t first_word = step % call->num_segments * SEGMENT_BLOCKS * ROW_BLOCK_WORDS;
    segment.rows = call->rows + row * row_words + first_word * num_rows;
    segment.tile_words = row_words * num_rows;
    segment.sums = call->sums + (row * PANELS_OF_GROUP + panel * num_rows) * LANES;
    if (num_rows != call->tile_rows) tiles_configure_words(num_rows, num_rows, BLOCK_WORDS);
    call->tile_rows = num_rows;
    multiply_segment(&segment, num_rows);
}

void pagoda_multiply_coded_tiles(float *sums, const uint32_t *rows, int64_t num_rows, const uint8_t *panels,
                                 const pagoda_code_format *format, const pagoda_panel_layout *layout,
                                 int64_t in_features) {
    const int64_t all_blocks = divide_up(in_features, BLOCK_INPUTS);
    tiles_call call = {sums, rows, panels, layout, all_blocks, divide_up(all_blocks, SEGMENT_BLOCKS), 0};
    const int64_t num_whole = num_rows / TILE_ROWS, num_others = num_rows % TILE_ROWS;
    uint8_t *decoded = pagoda_scratch(SCRATCH_CODES, PANELS_AT_ONCE * SEGMENT_BLOCKS * DECODED_BYTES);
    for (int64_t step = 0; step < PANELS_OF_GROUP / PANELS_AT_ONCE * call.num_segments; step++) {
        const uint8_t *codes = codes_of_step(&call, step), *later = codes_of_step(&call, step + SEGMENTS_AHEAD);
        const int64_t num_blocks = min(all_blocks - step % call.num_segments * SEGMENT_BLOCKS, SEGMENT_BLOCKS);
        for (int p = 0; p < PANELS_AT_ONCE; p++)
            pagoda_decode_segment(decoded + p * SEGMENT_BLOCKS * DECODED_BYTES, codes + p * layout->panel_bytes, format,
                                  layout, num_blocks, later + p * layout->panel_bytes, LINES_OF_BLOCK);
        segment_call segment = {
            .panels = decoded, .num_blocks = num_blocks, .num_tiles = num_whole,
            .later = later + num_blocks * LINES_OF_BLOCK * TILE_STRIDE, .panel_bytes = layout->panel_bytes,
        };
        if (num_whole) multiply_some_rows(&call, segment, step, 0, TILE_ROWS);
        segment.num_tiles = 1;
        if (num_others) multiply_some_rows(&call, segment, step, num_whole * TILE_ROWS, (int)num_others);
    }
    tiles_release();
}

#endif
