/* Packing the weights of linear layers. */
#ifndef PAGODA_PACK_WEIGHT_H
#define PAGODA_PACK_WEIGHT_H

#include <stdint.h>

#include "linear/linear.h"

/* Packs rows [num_rows, in_features] of a weight matrix as outputs first_output and following; output i goes to panel
 * (i / 16) * panel_step + panel_offset. For int8, scales and sums are written as well. The source is float32 or
 * bfloat16; lanes of a panel that get no row must have been zeroed. */
void pagoda_pack_weight(uint32_t *words, float *scales, int32_t *sums, const void *source, int32_t source_is_bf16,
                        int32_t kind, int32_t num_rows, int32_t in_features, int32_t first_output,
                        int32_t panel_step, int32_t panel_offset);

#endif
