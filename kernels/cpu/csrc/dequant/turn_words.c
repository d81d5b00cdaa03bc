#include "dequant/turn_words.h"

#include "dequant/turn_nibbles.h"
#include "runtime/integers.h"
#include "runtime/vector.h"

/* The first `count` of 16 words; zeros follow. */
INLINE u32x16 load_words(const uint32_t *from, int64_t count) {
    uint32_t words[LANES] = {0};
    if (count >= LANES) return u32x16_load(from);
    memcpy(words, from, (size_t)count * sizeof *words);
    return u32x16_load(words);
}

/* Writes 16 vectors of words as rows: word i of each to row i, `stride` words apart. Of the vectors `num_rows` count,
 * and of their words `columns`. */
INLINE void store_turned(uint32_t *to, int64_t stride, u32x16 *vectors, int64_t num_rows, int64_t columns) {
    if (num_rows >= LANES && columns >= LANES) {
        store_transposed(to, (size_t)stride, vectors);
        return;
    }
    uint32_t tile[LANES * LANES];
    store_transposed(tile, LANES, vectors);
    for (int64_t i = 0; i < min(columns, LANES); i++)
        memcpy(to + i * stride, tile + i * LANES, (size_t)min(num_rows, LANES) * sizeof *to);
}

void pagoda_turn_words(uint32_t *to, int64_t to_stride, const uint32_t *from, int64_t num_rows, int64_t columns,
                       int64_t stride) {
    for (int64_t column = 0; column < columns; column += LANES)
        for (int64_t row = 0; row < num_rows; row += LANES) {
            u32x16 vectors[LANES] = {0};
            for (int64_t i = 0; i < min(LANES, num_rows - row); i++)
                vectors[i] = load_words(from + (row + i) * stride + column, columns - column);
            store_turned(to + column * to_stride + row, to_stride, vectors, num_rows - row, columns - column);
        }
}

/* Turns 32 x 32 bfloat16, whose rows are `stride` apart. */
INLINE void turn_tile(uint16_t *to, int64_t to_stride, const uint16_t *from, int64_t stride) {
    u32x16 even[LANES], odd[LANES]; /* rows, of two numbers a word */
    uint32_t turned[2][LANES * LANES];
    for (int i = 0; i < LANES; i++) {
        even[i] = u32x16_load(from + 2 * i * stride);
        odd[i] = u32x16_load(from + (2 * i + 1) * stride);
    }
    store_transposed(turned[0], LANES, even);
    store_transposed(turned[1], LANES, odd);
    for (int i = 0; i < LANES; i++) {
        u32x16 a = u32x16_load(turned[0] + LANES * i), b = u32x16_load(turned[1] + LANES * i);
        u32x16 first = (a & 0xffff) | b << 16, second = a >> 16 | (b & 0xffff0000u);
        memcpy(to + 2 * i * to_stride, &first, sizeof first);
        memcpy(to + (2 * i + 1) * to_stride, &second, sizeof second);
    }
}

void pagoda_turn_halves(uint16_t *to, int64_t to_stride, const uint16_t *from, int64_t num_rows, int64_t columns) {
    enum { TILE = 2 * LANES };
    for (int64_t column = 0; column < columns; column += TILE) /* whose rows are written from their beginning on */
        for (int64_t row = 0; row < num_rows; row += TILE)
            if (row + TILE <= num_rows && column + TILE <= columns)
                turn_tile(to + column * to_stride + row, to_stride, from + row * columns + column, columns);
            else
                for (int64_t i = column; i < min(column + TILE, columns); i++)
                    for (int64_t j = row; j < min(row + TILE, num_rows); j++) to[i * to_stride + j] = from[j * columns + i];
}

void pagoda_turn_awq(uint32_t *to, const uint32_t *from, int64_t num_rows, int64_t columns, int64_t stride) {
    int64_t row_words = divide_up(num_rows, 8);
    for (int64_t column = 0; column < columns; column += LANES)
        for (int64_t word = 0; word < row_words; word += LANES) { /* of the written rows */
            u32x16 turned[8][LANES] = {0};
            for (int64_t i = 0; i < min(LANES, row_words - word); i++) {
                u32x16 vectors[8] = {0};
                int64_t row = 8 * (word + i);
                for (int64_t j = 0; j < min(8, num_rows - row); j++)
                    vectors[j] = load_words(from + (row + j) * stride + column, columns - column);
                turn_nibbles(vectors);
                for (int nibble = 0; nibble < 8; nibble++) turned[nibble][i] = vectors[nibble];
            }
            for (int nibble = 0; nibble < 8; nibble++)
                store_turned(to + (8 * column + AWQ_ORDER[nibble]) * row_words + word, 8 * row_words, turned[nibble],
                             row_words - word, columns - column);
        }
}
