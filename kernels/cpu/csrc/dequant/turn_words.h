/* Turning matrices: packed codes, which GPTQ and AWQ store with the inputs as rows, and numbers in bfloat16. */
#ifndef PAGODA_TURN_WORDS_H
#define PAGODA_TURN_WORDS_H

#include <stdint.h>

/* Writes some columns of a matrix of words as rows: [columns, num_rows], `to_stride` words a row, of [num_rows, columns],
 * `stride` words a row. */
void pagoda_turn_words(uint32_t *to, int64_t to_stride, const uint32_t *from, int64_t num_rows, int64_t columns,
                       int64_t stride);

/* The same for all columns of a matrix of bfloat16. */
void pagoda_turn_halves(uint16_t *to, int64_t to_stride, const uint16_t *from, int64_t num_rows, int64_t columns);

/* As pagoda_turn_words for words of 8 nibbles in AWQ's order, whose nibbles are the columns: [8 * columns, divide_up(num_rows, 8)]
 * words of [num_rows, columns], the nibbles of a row one after another, the low ones first, and zeros at its end. */
void pagoda_turn_awq(uint32_t *to, const uint32_t *from, int64_t num_rows, int64_t columns, int64_t stride);

#endif
