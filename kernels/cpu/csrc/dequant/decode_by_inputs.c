/* A tile is at most 128 inputs of 128 outputs. Its words are turned, so that a word has neighbouring inputs of one output, and
 * its codes are looked up while they are in the first cache. Whole lines are written, and tiles of
 * the same outputs follow each other: their lines are neighbours in memory. */
#include "dequant/decode_by_inputs.h"

#include "dequant/code_tables.h"
#include "dequant/store_rounded.h"
#include "dequant/turn_nibbles.h"
#include "runtime/integers.h"
#include "runtime/stream.h"

enum { TILE = 128, PIECE = 2 * LANES, PIECES = TILE / PIECE }; /* codes of a piece are looked up at once */

/* Where a tile begins, and what it has. */
typedef struct {
    int64_t row, column;
    int num_rows, num_pieces;
    bool has_next; /* another one follows in the same rows */
    int64_t groups[PIECES];
} tile;

/* Decodes a tile's codes of one of its rows. */
INLINE void decode_codes(const pagoda_codes_by_inputs *weight, const tile *own, int row, const uint8_t *octets) {
    const f32x16 codes = __builtin_convertvector(lane_indices(), f32x16);
    const int64_t first = (own->row + row) * weight->num_groups;
    bf16 *to = weight->output + (own->row + row) * weight->columns + own->column;
    u16x16 numbers = {0};
    for (int i = 0; i < own->num_pieces; i++, octets += LANES) {
        int64_t index = first + own->groups[i];
        if (i == 0 || own->groups[i] != own->groups[i - 1])
            numbers = bf16_exact((codes - weight->zeros[index]) * weight->scales[index]);
        stream_store(to + i * PIECE, look_up_pairs(octets, numbers, numbers, false));
    }
}

/* Turns the words of 16 rows, from the tile's `row` on. */
INLINE void turn_gptq(const pagoda_codes_by_inputs *weight, const tile *own, int row, uint32_t *turned) {
    const uint32_t *from = weight->words + own->column / 8 * weight->stride + own->row + row;
    u32x16 words[LANES] = {0};
    for (int i = 0; i < own->num_pieces * PIECE / 8; i++) words[i] = u32x16_load(from + i * weight->stride);
    store_transposed(turned, LANES, words);
}

/* Turns the words of all 128 rows. */
INLINE void turn_awq(const pagoda_codes_by_inputs *weight, const tile *own, uint32_t *turned) {
    const uint32_t *from = weight->words + own->column * weight->stride + own->row / 8;
    u32x16 vectors[8][LANES] = {0}; /* of each nibble, 8 columns a word */
    for (int i = 0; i < own->num_pieces * PIECE / 8; i++) {
        u32x16 words[8];
        for (int j = 0; j < 8; j++) words[j] = u32x16_load(from + (8 * i + j) * weight->stride);
        turn_nibbles(words);
        for (int nibble = 0; nibble < 8; nibble++) vectors[nibble][i] = words[nibble];
    }
    for (int nibble = 0; nibble < 8; nibble++)
        store_transposed(turned + AWQ_ORDER[nibble] * LANES, 8 * LANES, vectors[nibble]);
}

/* The line of words of the next tile that is read ahead with a row of this one. */
INLINE const uint32_t *line_of_next(const pagoda_codes_by_inputs *weight, const tile *own, int row) {
    int64_t column = own->column + TILE;
    if (weight->is_awq) return weight->words + (column + row) * weight->stride + own->row / 8;
    return weight->words + (column / 8 + row / 8) * weight->stride + own->row + row % 8 * LANES;
}

INLINE void decode_tile(const pagoda_codes_by_inputs *weight, const tile *own) {
    const int at_once = weight->is_awq ? TILE : LANES;
    uint32_t turned[TILE * LANES];
    for (int start = 0; start < own->num_rows; start += at_once) {
        if (weight->is_awq) turn_awq(weight, own, turned);
        else turn_gptq(weight, own, start, turned);
        for (int i = 0; i < at_once; i++) {
            if (own->has_next) __builtin_prefetch(line_of_next(weight, own, start + i));
            decode_codes(weight, own, start + i, (const uint8_t *)(turned + i * LANES));
        }
    }
}

int32_t pagoda_decode_by_inputs(const pagoda_codes_by_inputs *weight) {
    if (weight->num_rows % (weight->is_awq ? TILE : LANES) || weight->columns % PIECE || weight->group_size % PIECE ||
        weight->columns > weight->num_groups * weight->group_size)
        return 0;
    for (int64_t row = 0; row < weight->num_rows; row += TILE)
        for (int64_t column = 0; column < weight->columns; column += TILE) {
            tile own = {.row = row, .column = column, .has_next = column + 2 * TILE <= weight->columns};
            own.num_rows = (int)min(TILE, weight->num_rows - row);
            own.num_pieces = (int)min(PIECES, (weight->columns - column) / PIECE);
            own.has_next = own.has_next && own.num_rows == TILE;
            for (int i = 0; i < own.num_pieces; i++) own.groups[i] = (column + i * PIECE) / weight->group_size;
            decode_tile(weight, &own);
        }
    stream_end();
    return 1;
}
