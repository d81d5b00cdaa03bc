/* What follows a linear layer of some model families: norms of outputs, multipliers of the residual stream, soft-caps. */
#ifndef PAGODA_RESIDUAL_H
#define PAGODA_RESIDUAL_H

#include <stdint.h>

/* hidden = scale * (hidden + multiplier * addend), both float32 [num_rows, width]; with `norm` [width] the addend's rows are first divided
 * by their root mean square and multiplied by `norm` (RMSNorm, Zhang and Sennrich, 2019). */
void pagoda_add_to_residual(float *hidden, const float *addend, int32_t num_rows, int32_t width, const float *norm,
                            float eps, float multiplier, float scale);

/* sum = norm(sum) + norm(other), all float32 [num_rows, width]; the norms are RMSNorms with weights [width]. */
void pagoda_sum_normed(float *sum, const float *other, int32_t num_rows, int32_t width, const float *norm,
                       const float *other_norm, float eps);

/* hidden += norm(hidden) + norm(addend), likewise. */
void pagoda_add_normed(float *hidden, const float *addend, int32_t num_rows, int32_t width, const float *norm,
                       const float *addend_norm, float eps);

/* scores [num_rows, width] = softcap * tanh(scores / softcap) (Gemma 2, 2024). */
void pagoda_cap_rows(float *scores, int32_t num_rows, int32_t width, float softcap);

#endif
