/* Packing activations as linear layers read them, after an RMSNorm or as they are. */
#ifndef PAGODA_PACK_ROWS_H
#define PAGODA_PACK_ROWS_H

#include <stdint.h>

#include "linear.h"

/* Packs rows [num_rows, width] for a linear layer whose weights are of this kind; the source is float32 or bfloat16.
 * With `norm` [width] each row is first divided by its root mean square and multiplied by `norm` (RMSNorm, Zhang and
 * Sennrich, 2019). int8 rows are quantized by their largest element. */
void pagoda_pack_rows(pagoda_rows *rows, const void *source, int32_t source_is_bf16, int32_t kind, int32_t width,
                      const float *norm, float eps);

#endif
