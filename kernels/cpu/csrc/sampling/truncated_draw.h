/* Drawing a token from the most likely ones. */
#ifndef PAGODA_TRUNCATED_DRAW_H
#define PAGODA_TRUNCATED_DRAW_H

#include <stdint.h>

/* Which tokens of each row may be drawn. A score is (logit - the row's largest) / temperature, its weight is e^score in
 * units of 2^-34, rounded down, so that sums are exact in any order. Of equal scores the smaller id comes first.
 *
 * top_k   [num_rows]: how many of the first tokens, at least 1; the width: all
 * top_p   [num_rows]: of these the fewest that have this share of their weight, more than 0; 1 or more: all. The weight
 *         of all tokens is rounded a little differently, like total_weights of exact_math.py
 * floors  [num_rows]: of these the ones with at least this score, at most 0 */
typedef struct {
    const int64_t *top_k;
    const float *top_p, *floors;
} pagoda_limits;

/* Draws as pagoda_draw does, from the tokens within the limits. `values` receives the noisy logit of the token, or NaN
 * if the row holds a NaN or +inf or no finite logit. */
void pagoda_truncated_draw(float *values, int64_t *tokens, const float *rows, const float *temperatures,
                           const int32_t *keys, const pagoda_limits *limits, int64_t num_rows, int64_t width,
                           int64_t stride);

#endif
