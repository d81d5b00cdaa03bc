/* Choosing tokens from rows of logits without sorting the vocabulary. */
#ifndef PAGODA_SAMPLING_H
#define PAGODA_SAMPLING_H

#include <stdint.h>

/* The k highest scores of each row [num_rows, width], `stride` elements apart, in order, with their places: of equal
 * scores the one that comes first. k <= width < 2^31. With `temperatures` [num_rows] the scores are logits: what is
 * given is (logit - the row's largest) / temperature, and in log_totals [num_rows] the logarithm of the sum of their
 * exponentials over the whole row. */
void pagoda_top_k(float *scores, int64_t *places, float *log_totals, const float *rows, const float *temperatures,
                  int64_t num_rows, int64_t width, int64_t stride, int64_t k);

/* Draws a token from the softmax of each row of logits divided by its temperature, by the Gumbel-max trick, leaving out
 * what lies below floors [num_rows] (NULL: nothing) after the division. The noise is engine/sampling/noise.py's, from
 * two keys for each row; `values` is the noisy score of the token. */
void pagoda_draw(float *values, int64_t *tokens, const float *rows, const float *temperatures, const float *floors,
                 const int32_t *keys, int64_t num_rows, int64_t width, int64_t stride);

#endif
