/* See pagoda_multiply_coded_tiles in codes.h.
 *
 * A segment of two panels is decoded to the first cache, and then multiplied with all rows. Tiles sum the products of a
 * granule exactly, as dot.h does. They are stored, and added to sums in registers as in every other loop: so a row has the
 * same bits in each. */
#include "coded/dot.h"
#include "runtime/integers.h"
#include "runtime/scratch.h"
#include "runtime/tiles.h"

#if PAGODA_HAS_TILES

enum {
    PANELS_AT_ONCE = 2,
    SEGMENTS_AHEAD = 2,     /* that are fetched to the second cache, */
    LINES_OF_PRODUCT = 2,   /* so many of their lines with each product, */
    LINES_OF_BLOCK = 3,     /* and with each decoded block */
    NUM_PRODUCTS = 4,       /* that wait to be added: as many as there are tiles of sums */
    GRANULES_OF_TURN = 2 * NUM_PRODUCTS,
};

/* --- products -------------------------------------------------------------------------------------------------- */

/* Some granules of a tile of rows and of a decoded panel, from one on that begins a block. */
typedef struct {
    const uint32_t *rows;
    const uint8_t *blocks;
    const uint8_t *fetched;
} operands;

/* How a tile is multiplied; all of it is constant. */
typedef struct {
    int num_rows;
    int granules; /* of a block */
} tile_kind;

/* The block that a granule is in. */
INLINE const uint8_t *block_of(operands own, int64_t at, tile_kind kind) {
    return own.blocks + at / kind.granules * (BLOCK_WORDS + 2 * kind.granules) * LANES * 4;
}

/* The words of its rows: [rows, 8] of bytes, then [4, rows] scales and sums. */
INLINE const uint32_t *rows_of(operands own, int64_t at, tile_kind kind) {
    return own.rows + at / kind.granules * ROW_BLOCK_WORDS * kind.num_rows;
}

/* Multiplies a granule; a macro, as the tiles' names must be constants. */
#define MULTIPLY(SUMS, ROWS, LEVELS, AT)                                                                              \
    do {                                                                                                              \
        const int64_t word = (AT) % kind.granules * (BLOCK_WORDS / kind.granules);                                    \
        TILE_LOAD(ROWS, rows_of(own, AT, kind) + word, BLOCK_WORDS * 4);                                              \
        TILE_LOAD(LEVELS, block_of(own, AT, kind) + word * LANES * 4, TILE_STRIDE);                                   \
        TILE_ZERO(SUMS);                                                                                              \
        for (int line = 0; line < LINES_OF_PRODUCT; line++)                                                           \
            __builtin_prefetch(own.fetched + ((AT) * LINES_OF_PRODUCT + line) * TILE_STRIDE, 0, 2);                   \
        TILE_DOT_CODES(SUMS, ROWS, LEVELS);                                                                           \
    } while (0)

/* Adds the products of a granule [num_rows, 16] to sums. */
INLINE void add_products(f32_register *sums, const int32_t *products, operands own, int64_t at, tile_kind kind) {
    const float *scales = (const float *)block_of(own, at, kind) + (BLOCK_WORDS + at % kind.granules) * LANES;
    const f32_register scale = register_load(scales), minimum = register_load(scales + kind.granules * LANES);
    const uint32_t *row_scales = rows_of(own, at, kind) + BLOCK_WORDS * kind.num_rows;
    const uint32_t *row_sums = row_scales + (kind.granules == 1 ? 3 : 1 + at % kind.granules) * kind.num_rows;
    _Pragma("GCC unroll 16") for (int r = 0; r < kind.num_rows; r++)
        sums[r] = add_granule(sums[r], load_levels((const uint8_t *)(products + r * LANES)), scale, minimum,
                              float_of_word(row_scales[r]), float_of_word(row_sums[r]), false);
}

/* Sums of rows, in registers. */
INLINE void load_sums(f32_register *sums, const float *from, tile_kind kind) {
    _Pragma("GCC unroll 16") for (int r = 0; r < kind.num_rows; r++) sums[r] = register_load(from + r * LANES);
}

INLINE void store_sums(float *to, const f32_register *sums, tile_kind kind) {
    _Pragma("GCC unroll 16") for (int r = 0; r < kind.num_rows; r++) register_store(to + r * LANES, sums[r]);
}

/* Adds the products of the granules of a turn to [num_rows, 16]. Each is stored two products later, and added after two
 * more; other orders that were tried take up to an eighth longer. */
INLINE void take_turn(float *to, operands own, tile_kind kind) {
#define ADD(AT) add_products(sums, products[(AT) % NUM_PRODUCTS], own, AT, kind)
    _Alignas(64) int32_t products[NUM_PRODUCTS][TILE_ROWS * LANES];
    f32_register sums[TILE_ROWS];
    load_sums(sums, to, kind);
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
    store_sums(to, sums, kind);
#undef ADD
}

/* The same of one granule of a block. */
INLINE void take_granule(float *to, operands own, int64_t at, tile_kind kind) {
    _Alignas(64) int32_t products[TILE_ROWS * LANES];
    f32_register sums[TILE_ROWS];
    load_sums(sums, to, kind);
    MULTIPLY(SUMS_00, ROWS_0, WEIGHTS_0, at);
    TILE_STORE(SUMS_00, products, TILE_STRIDE);
    add_products(sums, products, own, at, kind);
    store_sums(to, sums, kind);
}

/* Adds the products of a tile of rows with some granules to [num_rows, 16]. */
INLINE void multiply_tile(float *to, operands own, int64_t num_granules, tile_kind kind) {
    for (; num_granules >= GRANULES_OF_TURN; num_granules -= GRANULES_OF_TURN) {
        take_turn(to, own, kind);
        own = (operands){rows_of(own, GRANULES_OF_TURN, kind), block_of(own, GRANULES_OF_TURN, kind),
                         own.fetched + GRANULES_OF_TURN * LINES_OF_PRODUCT * TILE_STRIDE};
    }
    for (int64_t at = 0; at < num_granules; at++) take_granule(to, own, at, kind);
}

/* What the panels of a segment are multiplied with. */
typedef struct {
    const uint8_t *panels, *later; /* decoded; codes that are fetched meanwhile */
    int64_t decoded_bytes, panel_bytes; /* from a panel to the next one */
    int64_t num_blocks;
    const uint32_t *rows; /* tiles of rows, from the segment's first block on */
    int64_t num_tiles, tile_words; /* from a tile to the next one */
    float *sums; /* [tiles][4][rows][16] */
} segment_call;

/* Multiplies tiles of rows with the panels of a segment. */
INLINE void multiply_tiles(const segment_call *call, tile_kind kind) {
    float *sums = call->sums;
    for (int64_t tile = 0; tile < call->num_tiles; tile++, sums += PANELS_OF_GROUP * kind.num_rows * LANES)
        for (int p = 0; p < PANELS_AT_ONCE; p++) {
            const uint32_t *rows = call->rows + tile * call->tile_words;
            const uint8_t *codes = call->later + p * call->panel_bytes;
            const uint8_t *fetched = tile ? (const uint8_t *)(rows + call->tile_words) : codes;
            const operands own = {rows, call->panels + p * call->decoded_bytes, fetched};
            multiply_tile(sums + p * kind.num_rows * LANES, own, call->num_blocks * kind.granules, kind);
        }
}

/* The same for any format and number of rows. It is called once a segment: the jump takes as long as a product. */
static void multiply_segment(const segment_call *call, tile_kind kind) {
    switch (kind.num_rows * 2 + kind.granules - 1) {
#define CASE(ROWS)                                                                                                    \
    case ROWS * 2: multiply_tiles(call, (tile_kind){ROWS, 1}); return;                                                \
    case ROWS * 2 + 1: multiply_tiles(call, (tile_kind){ROWS, 2}); return;
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
    const pagoda_code_format *format;
    pagoda_panel_layout layout;
    int64_t num_blocks, num_segments; /* of an output */
    int tile_rows; /* for which tiles are configured. That takes as long as tens of products */
} tiles_call;

/* Where the codes of a step begin: steps go over the segments of two panels, and then of the next ones. */
INLINE const uint8_t *codes_of_step(const tiles_call *call, int64_t step) {
    return call->panels + step / call->num_segments * PANELS_AT_ONCE * call->layout.panel_bytes +
           step % call->num_segments * call->layout.segment_bytes;
}

/* Multiplies some tiles of `num_rows` rows each, from `row` on, with the panels of a step. */
static void multiply_some_rows(tiles_call *call, segment_call segment, int64_t step, int64_t row, int num_rows) {
    const int granules = BLOCK_INPUTS / call->format->granule;
    const int64_t panel = step / call->num_segments * PANELS_AT_ONCE, row_words = call->num_blocks * ROW_BLOCK_WORDS;
    const int64_t first_word = step % call->num_segments * SEGMENT_BLOCKS * ROW_BLOCK_WORDS;
    segment.rows = call->rows + row * row_words + first_word * num_rows;
    segment.tile_words = row_words * num_rows;
    segment.sums = call->sums + (row * PANELS_OF_GROUP + panel * num_rows) * LANES;
    if (num_rows != call->tile_rows) tiles_configure_words(num_rows, num_rows, BLOCK_WORDS / granules);
    call->tile_rows = num_rows;
    multiply_segment(&segment, (tile_kind){num_rows, granules});
}

void pagoda_multiply_coded_tiles(float *sums, const uint32_t *rows, int64_t num_rows, const uint8_t *panels,
                                 const pagoda_code_format *format, const pagoda_panel_layout *layout,
                                 int64_t in_features) {
    const int64_t all_blocks = divide_up(in_features, BLOCK_INPUTS);
    tiles_call call = {sums, rows, panels, format, *layout, all_blocks, divide_up(all_blocks, SEGMENT_BLOCKS), 0};
    const int64_t decoded_bytes = SEGMENT_BLOCKS * pagoda_decoded_block_bytes(format);
    const int64_t num_whole = num_rows / TILE_ROWS, num_others = num_rows % TILE_ROWS;
    uint8_t *decoded = pagoda_scratch(SCRATCH_CODES, (size_t)(PANELS_AT_ONCE * decoded_bytes));
    for (int64_t step = 0; step < PANELS_OF_GROUP / PANELS_AT_ONCE * call.num_segments; step++) {
        const uint8_t *codes = codes_of_step(&call, step), *later = codes_of_step(&call, step + SEGMENTS_AHEAD);
        const int64_t num_blocks = min(all_blocks - step % call.num_segments * SEGMENT_BLOCKS, SEGMENT_BLOCKS);
        for (int p = 0; p < PANELS_AT_ONCE; p++)
            pagoda_decode_segment(decoded + p * decoded_bytes, codes + p * layout->panel_bytes, format, layout,
                                  num_blocks, later + p * layout->panel_bytes, LINES_OF_BLOCK);
        segment_call segment = {
            .panels = decoded, .decoded_bytes = decoded_bytes, .num_blocks = num_blocks, .num_tiles = num_whole,
            .later = later + num_blocks * LINES_OF_BLOCK * TILE_STRIDE, .panel_bytes = layout->panel_bytes,
        };
        if (num_whole) multiply_some_rows(&call, segment, step, 0, TILE_ROWS);
        segment.num_tiles = 1;
        if (num_others) multiply_some_rows(&call, segment, step, num_whole * TILE_ROWS, (int)num_others);
    }
    tiles_release();
}

#endif
