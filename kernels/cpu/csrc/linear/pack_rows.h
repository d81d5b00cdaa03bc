/* Packing activations as linear layers read them, after an RMSNorm or as they are. */
#ifndef PAGODA_PACK_ROWS_H
#define PAGODA_PACK_ROWS_H

#include <stdint.h>

#include "linear/linear.h"

/* Packs rows [num_rows, width] for a linear layer whose weights are of this kind, in order; the source is float32 or
 * bfloat16.
 * With `norm` [width] each row is first divided by its root mean square and multiplied by `norm` (RMSNorm, Zhang and
 * Sennrich, 2019). int8 rows are quantized by their largest element. */
void pagoda_pack_rows(pagoda_rows *rows, const void *source, int32_t source_is_bf16, int32_t kind, int32_t width,
                      const float *norm, float eps);

/* Packs rows for this weight, in the order that its inputs have. */
void pagoda_pack_rows_for(pagoda_rows *rows, const void *source, int32_t source_is_bf16, const pagoda_weight *weight,
                          const float *norm, float eps);

/* Packs rows for the same, but keeps each row's words together, [num_rows, num_words], as pagoda_gather_tiles reads
 * them. The source is float32. */
void pagoda_pack_rows_apart(const pagoda_rows *rows, const float *source, int32_t kind, int32_t width,
                            const float *norm, float eps);

/* Rows of several linear layers, one group after another. */
typedef struct {
    const int32_t *first_rows; /* [num_tiles + 1], of each tile and the end; a tile holds rows of one group */
    int32_t num_tiles;
} pagoda_tiles;

/* Packs such rows, without a norm; the source is float32. */
void pagoda_pack_tiles(const pagoda_rows *rows, const pagoda_tiles *tiles, const float *source, int32_t kind,
                       int32_t width);

/* Packs rows that pagoda_pack_rows_apart has packed: row i is row sources[i] of `from`; NULL: row i. Without `tiles`
 * the rows are those of one linear layer. */
void pagoda_gather_tiles(const pagoda_rows *rows, const pagoda_tiles *tiles, const int32_t *sources,
                         const pagoda_rows *from, int32_t kind, int32_t width);

#endif
