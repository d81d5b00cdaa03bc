/* Gathering rows of a table, such as the embeddings of a step's tokens. */
#ifndef PAGODA_GATHER_H
#define PAGODA_GATHER_H

#include <stdint.h>

#include "linear/linear.h"

/* Copies rows of a table [table_rows, width], float32 or bfloat16, times `multiplier` to output [num_rows, width].
 * Returns 1; or 0, and writes nothing, if the table lacks one of the rows. */
int32_t pagoda_gather_rows(float *output, const void *table, int32_t table_is_bf16, int64_t table_rows,
                           const int64_t *rows, int32_t num_rows, int32_t width, float multiplier);

/* The same of a table that is packed as the weights of a linear layer, but not int8: its outputs are the rows. */
int32_t pagoda_gather_packed_rows(float *output, const pagoda_weight *table, const int64_t *rows, int32_t num_rows,
                                  float multiplier);

#endif
