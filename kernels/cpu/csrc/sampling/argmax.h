/* The largest element of each row. */
#ifndef PAGODA_ARGMAX_H
#define PAGODA_ARGMAX_H

#include <stdint.h>

/* For rows [num_rows, width], `stride` elements apart: the largest element and where it is, the first of equal ones.
 * A row with a NaN has that for its largest. width >= 1. */
void pagoda_argmax(float *values, int64_t *indices, const float *rows, int64_t num_rows, int64_t width, int64_t stride);

#endif
