/* The highest scores of a row, in order, without sorting the row. */
#ifndef PAGODA_TOP_K_H
#define PAGODA_TOP_K_H

#include <stdint.h>

/* The k highest scores of each row [num_rows, width], `stride` elements apart, in order, with their indices; equal
 * scores are ordered by index. k <= width < 2^31. With `temperatures` [num_rows] the rows are logits: the scores are
 * (logit - the row's largest) / temperature, and log_totals [num_rows] receives the logarithm of the sum of their
 * exponentials over the whole row. */
void pagoda_top_k(float *scores, int64_t *indices, float *log_totals, const float *rows, const float *temperatures,
                  int64_t num_rows, int64_t width, int64_t stride, int64_t k);

#endif
