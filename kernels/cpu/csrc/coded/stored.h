/* Weights as files have them, which are packed for the kernels (see codes.h) in one pass. */
#ifndef PAGODA_STORED_H
#define PAGODA_STORED_H

#include "coded/codes.h"

/* How an output's codes are stored. GGUF's blocks have their scales in them; their numbers are ggml's, plus STORED_GGUF. */
enum {
    STORED_BYTES = 0,
    STORED_SIGNED_BYTES = 1, /* code - 128 */
    STORED_NIBBLES = 2,      /* two codes a byte, the first one in the low half */
    STORED_HIGH_NIBBLES = 3, /* the first one in the high half */
    STORED_GGUF = 16,
};

/* Scales, minima or zero points of all outputs. */
typedef struct {
    const uint8_t *first; /* NULL: there are none */
    int64_t stride;       /* bytes from an output's factors to the next one's; 0: all have the same */
    int64_t count;        /* factors of an output; zeros follow */
} pagoda_stored_factors;

/* Rows of a weight, and where they go: CStoredCodes in kernels/cpu/bindings.py. */
typedef struct {
    const uint8_t *codes; /* [num_rows, row_bytes] */
    pagoda_stored_factors outer_scales, outer_minima, zero_points, inner_scales, inner_minima;
    const uint8_t *scale_table; /* [256] of the format's outer type: outer scales are bytes; or NULL */
    int64_t row_bytes, num_rows;
    int64_t num_inputs;   /* that are stored; codes of 0 follow */
    int64_t in_features;  /* that are packed */
    int64_t first_output; /* output i goes to panel (i / 16) * panel_step + panel_offset */
    int64_t panel_step, panel_offset;
    int32_t layout;
} pagoda_stored_codes;

/* Packs rows. `panels` begins at a weight's words or at a part of them; lanes of other outputs stay as they are. */
void pagoda_pack_stored(uint8_t *panels, const pagoda_code_format *format, const pagoda_stored_codes *stored);

/* The largest byte; only the bits of `mask` count. */
int32_t pagoda_largest_octet(const uint8_t *octets, int64_t count, int32_t mask);

/* The largest bits, but for their signs, of floats of 16 or 32 bits: those of the largest one, or of a NaN. 0 of none. */
int32_t pagoda_largest_magnitude(const void *floats, int64_t count, int32_t has_16_bits);

/* Whether the scales and minima of GGUF's blocks are finite in float32, and far enough below the largest number that all
 * products with codes are. */
int32_t pagoda_gguf_is_finite(const uint8_t *blocks, int64_t num_blocks, int32_t type);

#endif
