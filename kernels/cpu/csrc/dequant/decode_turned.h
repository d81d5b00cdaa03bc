/* Two codes a byte to numbers in bfloat16, where a matrix is stored the other way round. */
#ifndef PAGODA_DECODE_TURNED_H
#define PAGODA_DECODE_TURNED_H

#include <stdint.h>

/* Decodes rows of codes, the low one of a byte first, with one byte for the scale of 32 codes of a row, to columns:
 * to[column * to_stride + row] = table[code] * scale_table[scale]. Both tables are looked up by all their indices.
 * Returns 0 and writes nothing unless rows and columns are multiples of 32, and all scales of a kind whose products
 * with numbers from 0.5 to 6 are normal: from 2^-120 to 2^120. */
int32_t pagoda_decode_turned(uint16_t *to, int64_t to_stride, const uint8_t *codes, const uint8_t *scales,
                             int64_t num_rows, int64_t columns, const float *table, const float *scale_table);

#endif
