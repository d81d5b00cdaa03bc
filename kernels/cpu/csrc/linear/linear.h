/* Linear layers: activations [rows, in_features] times packed weights.
 *
 * Both operands are packed as words (see vector.h), so that one inner loop serves float32, bfloat16 and int8:
 *
 *     weights      [panels, num_words, 16]   a panel is 16 outputs; a load gives all of them the same word
 *     activations  tiles of up to 16 rows, each [num_words, rows of the tile]; a load is broadcast to 16 outputs
 *
 * AMX multiplies 16 words of 16 rows with a panel at once (runtime/tiles.h). There bfloat16 and int8 rows have multiples
 * of 16 words, and a tile of rows is [num_words / 16, rows of the tile, 16]. So have those for codes that are floats; those
 * for other codes are in codes.h.
 *
 * int8 weights have a scale per output, activations one per row, and both are symmetric; activations are kept as
 * unsigned bytes, offset by 128, because that is what the processor's instruction multiplies.
 *
 * Coded weights have panels of their own (codes.h), and the activations for them are quantized in blocks of 32 inputs.
 * Those for codes that are floats are bfloat16.
 */
#ifndef PAGODA_LINEAR_H
#define PAGODA_LINEAR_H

#include <stdbool.h>
#include <stdint.h>

#include "coded/codes.h"
#include "runtime/tiles.h"

enum { PAGODA_F32 = 0, PAGODA_BF16 = 1, PAGODA_INT8 = 2, PAGODA_CODED = 3, PAGODA_FLOAT_CODED = 4 };
enum { ROWS_PER_TILE = 16 };
enum { PAGODA_SILU = 0, PAGODA_GELU = 1, PAGODA_RELU_SQUARED = 2 }; /* of a feed-forward; the last has no gate */

/* Packed weights: CWeight in kernels/cpu/bindings.py. */
typedef struct {
    const uint32_t *words; /* [panels, num_words, 16]; coded: see codes.h */
    const float *scales;   /* [panels * 16]; of int8 and, or NULL, of coded weights */
    const int32_t *sums;   /* [panels * 16], of each output's int8 weights; int8 only */
    const float *bias;     /* [panels * 16], or NULL */
    const pagoda_coded_panels *coded; /* [panels / 4]; coded ones only, of either kind */
    const int32_t *order;  /* [in_features], the input that each weight of an output multiplies; NULL: in order */
    int32_t kind;
    int32_t in_features;
    int32_t out_features;
} pagoda_weight;

/* Packed activations: CRows in kernels/cpu/bindings.py. */
typedef struct {
    uint32_t *words;
    float *scales; /* [rows]; int8 only */
    int32_t num_rows;
} pagoda_rows;

/* How a linear layer ends. */
typedef enum {
    PAGODA_STORE,    /* output [rows, out_features] = product */
    PAGODA_ADD,      /* output += product */
    PAGODA_SILU_MUL, /* output [rows, out_features / 2] = silu(even panels) * odd panels */
    PAGODA_GELU_MUL, /* the same with gelu, as its approximation by tanh (Hendrycks and Gimpel, 2016) */
    PAGODA_STORE_RELU_SQUARED, /* output = max(product, 0)^2 (So et al., 2021) */
} pagoda_epilogue;

/* Whether the library was built with the int8 instruction (AVX-512 VNNI). If not, no weight may be PAGODA_INT8. */
int32_t pagoda_has_int8(void);

/* Whether it was built with AMX's tiles (runtime/tiles.h), and may use them. Then they multiply bfloat16, int8 and
 * codes. */
int32_t pagoda_has_tiles(void);

/* Whether rows for weights of this kind are multiples of 16 words, as AMX's tiles multiply them. */
static inline bool pagoda_is_tiled(int32_t kind) {
    return PAGODA_HAS_TILES && (kind == PAGODA_BF16 || kind == PAGODA_INT8 || kind == PAGODA_FLOAT_CODED);
}

/* Words of one row of in_features elements, and zeros that complete a tile's; of weights that are coded, this is about
 * their activations only. */
int32_t pagoda_num_words(int32_t kind, int32_t in_features);

/* Part `index` of weights that lie one after another, `stride` outputs apart: the first `outputs` of them. A stride of
 * coded weights is a multiple of 64. */
pagoda_weight pagoda_part_of_weight(const pagoda_weight *all, int64_t index, int64_t stride, int64_t outputs);

/* How the first product of a feed-forward with this activation ends. */
pagoda_epilogue pagoda_epilogue_of(int32_t activation);

/* One linear layer of several that are computed together. */
typedef struct {
    float *output;
    pagoda_rows rows;
    pagoda_weight weight;
    const float *factors; /* [rows], of the products; NULL: 1 */
} pagoda_linear_job;

/* Computes a linear layer; output is float32 with `stride` elements from one row to the next. */
void pagoda_linear(float *output, int64_t stride, const pagoda_rows *rows, const pagoda_weight *weight,
                   pagoda_epilogue epilogue);

/* Computes several in one loop of the thread pool; all have the same stride and epilogue. */
void pagoda_grouped_linear(const pagoda_linear_job *jobs, int32_t num_jobs, int64_t stride, pagoda_epilogue epilogue);

#endif
