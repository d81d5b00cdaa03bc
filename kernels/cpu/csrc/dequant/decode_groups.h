/* Decoding quantised weights: codes of a table, with a scale for each group of neighbouring columns. */
#ifndef PAGODA_DECODE_GROUPS_H
#define PAGODA_DECODE_GROUPS_H

#include <stdint.h>

/* Rows of codes, and where their numbers go: (table[code] - zero) * scale + bias, rounded to float32 each time. */
typedef struct {
    void *output;             /* [num_rows, columns], float32 or bfloat16 */
    const uint8_t *codes;     /* rows of bytes; each holds one code or two */
    const float *table;       /* [256], numbers that bfloat16 has; or [16], any numbers, if a byte holds two codes */
    const void *scales;       /* [num_rows, num_groups], float32; or bytes */
    const float *scale_table; /* [256]: the scales that bytes stand for, or NULL */
    const float *zeros;       /* [num_rows, num_groups], or NULL */
    const float *biases;      /* of the zeros' shape, or NULL */
    int64_t num_rows, columns, num_groups;
    int64_t group_size;  /* neighbouring columns with one scale */
    int64_t first;       /* columns of the first group that come before the row */
    int64_t code_stride; /* bytes from one row to the next */
    int32_t is_bf16, has_nibbles, is_high_first;
} pagoda_grouped_codes;

/* Writes the numbers. The caller's thread does it alone: weights are read on several threads already. */
void pagoda_decode_groups(const pagoda_grouped_codes *weight);

#endif
