/* Drawing a token from the softmax of logits. */
#ifndef PAGODA_DRAW_H
#define PAGODA_DRAW_H

#include <stdint.h>

/* Draws a token from the softmax of each row of logits divided by its temperature, by the Gumbel-max trick. Tokens whose
 * score, (logit - the row's largest) / temperature, is below floors [num_rows] (NULL: no floor) are excluded. The noise
 * is that of noise.h, from two keys for each row; `values` receives the noisy logit of the token. */
void pagoda_draw(float *values, int64_t *tokens, const float *rows, const float *temperatures, const float *floors,
                 const int32_t *keys, int64_t num_rows, int64_t width, int64_t stride);

#endif
