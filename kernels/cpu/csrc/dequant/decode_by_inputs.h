/* GPTQ's and AWQ's 4-bit codes, which are stored with the inputs as rows, to rows of numbers in bfloat16. */
#ifndef PAGODA_DECODE_BY_INPUTS_H
#define PAGODA_DECODE_BY_INPUTS_H

#include <stdint.h>

/* Words of 8 codes, and where their numbers go: (code - zero) * scale, rounded to float32 each time. */
typedef struct {
    uint16_t *output;      /* [num_rows, columns], bfloat16 */
    const uint32_t *words; /* GPTQ: [columns / 8, num_rows], of 8 columns; AWQ: [columns, num_rows / 8], of 8 rows */
    const float *scales;   /* [num_rows, num_groups] */
    const float *zeros;    /* of the scales' shape */
    int64_t num_rows, columns, num_groups;
    int64_t group_size; /* neighbouring columns with one scale */
    int64_t stride;     /* words from one row of words to the next */
    int32_t is_awq;
} pagoda_codes_by_inputs;

/* Writes the numbers. Returns 0 and writes nothing unless rows are a multiple of 16, of AWQ's 128, and the columns and
 * those of a group multiples of 32. */
int32_t pagoda_decode_by_inputs(const pagoda_codes_by_inputs *weight);

#endif
