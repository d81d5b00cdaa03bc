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

/* Rows of several linear layers, one group after another. */
typedef struct {
    const int32_t *first_rows; /* [num_tiles + 1], of each tile and the end; a tile holds rows of one group */
    int32_t num_tiles;
    const int32_t *sources; /* the source's row of each row; NULL: the same */
} pagoda_tiles;

/* Packs such rows, in the same way; the source is float32. */
void pagoda_pack_tiles(const pagoda_rows *rows, const pagoda_tiles *tiles, const float *source, int32_t kind,
                       int32_t width, const float *norm, float eps);

#endif
