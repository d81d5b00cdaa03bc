/* Weights that stay codes of 2 to 8 bits, as quantised checkpoints store them.
 *
 * A weight is scale * (level - zero), or scale * level - minimum. The level is the code, or what a table has for it.
 * Neighbouring inputs, a granule of 16 or 32, share scale and minimum. Both may have two factors: an outer one, a float
 * of 16 or 32 bits for some granules, and an inner one of a byte.
 *
 *     panel of 16 outputs   segments, of 256 inputs each; the last one may have fewer
 *     segment               outer scales    [outers, 16]
 *                           outer minima    [outers, 16]     of the same type; with minima only
 *                           zero points     [outers, 16]     bytes; with zero points only
 *                           inner scales    [granules, 16]   signed bytes; with inner factors only
 *                           inner minima    [granules, 16]   bytes; with inner factors and minima only
 *                           codes           [blocks, bits, 64]
 *
 * A segment has room for the factors of 256 inputs, rounded up to whole cache lines. An outer factor of more inputs is
 * repeated in each segment. So the weights are read in the order of their addresses.
 *
 * A block is 32 inputs: eight words of four bytes (see vector.h) for each output. Its codes are stored in planes of
 * 4, 2 and 1 bits, as many as make up the bits of a code, the low bits first. Of the plane of 4 bits, byte i of the
 * vectors 0 to 3 has byte i of two words; of the plane of 2 bits, byte i of two vectors has byte i of four words, and so
 * on. Codes of 8 bits are bytes.
 *
 * Some blocks of a panel are decoded at a time, to what is alike for all formats, and are then multiplied:
 *
 *     decoded block   levels   [8, 16]           words of four unsigned bytes
 *                     scales   [granules, 16]    float32; one granule of 32 inputs, or two of 16
 *                     minima   [granules, 16]    float32
 *
 * A block of a row of activations is twelve words: eight of signed bytes, their scale, and three sums times the scale, of
 * the first 16 inputs, of the others, and of all. A block of a tile of rows is their first words, then their second ones,
 * and so on; with AMX (runtime/tiles.h) it is all rows' words of bytes, and then their scales and sums as before.
 *
 * Codes of 8 bits may be floats instead (FP8, MXFP8). They have a scale, and nothing is subtracted. They are decoded to
 * words of two bfloat16, the activations are those of bfloat16 weights, and sums of products are multiplied by scales.
 */
#ifndef PAGODA_CODES_H
#define PAGODA_CODES_H

#include <stdint.h>

enum { BLOCK_INPUTS = 32, BLOCK_WORDS = BLOCK_INPUTS / 4, SEGMENT_BLOCKS = 8 };
enum { ROW_SCALE = BLOCK_WORDS, ROW_SUMS = BLOCK_WORDS + 1, ROW_BLOCK_WORDS = BLOCK_WORDS + 4 };
enum { OUTER_F16 = 0, OUTER_BF16 = 1, OUTER_F32 = 2 };
enum { FLOATS_NONE = 0, FLOATS_E4M3 = 1, FLOATS_E5M2 = 2 };
enum { ZERO_CONSTANT = 0, ZERO_POINTS = 1, ZERO_MINIMA = 2 };

/* How the codes of a weight are stored: CCodeFormat in kernels/cpu/bindings.py. */
typedef struct {
    int32_t bits;
    int32_t granule;            /* inputs with a scale of their own: 16 or 32 */
    int32_t granules_per_outer; /* with the same outer factors: a power of two, or a multiple of a segment's granules */
    int32_t outer_type;
    int32_t has_inner;
    int32_t zero_kind;  /* what is subtracted: `zero` from levels, the zero points from levels, or minima */
    int32_t has_levels; /* of codes of 4 bits */
    int32_t floats;     /* which floats codes of 8 bits are; or FLOATS_NONE */
    float zero;
    uint8_t levels[16];
} pagoda_code_format;

/* Where the parts of a segment begin, and what they take, in bytes. */
typedef struct {
    int64_t outer_minima, zero_points, inner_scales, inner_minima, codes, segment_bytes, panel_bytes;
} pagoda_panel_layout;

enum { PANELS_OF_GROUP = 4 };

/* Four panels that are read together: CCodedPanels in kernels/cpu/bindings.py. */
typedef struct {
    int64_t start; /* of the first, in bytes from the weight's words on; the others follow */
    const pagoda_code_format *format;
} pagoda_coded_panels;

/* The layout of a panel with `in_features` inputs. */
pagoda_panel_layout pagoda_layout_of_panel(const pagoda_code_format *format, int64_t in_features);

/* Its bytes. */
int64_t pagoda_panel_bytes(const pagoda_code_format *format, int64_t in_features);

/* Bytes of a decoded block. */
int64_t pagoda_decoded_block_bytes(const pagoda_code_format *format);

/* Decodes the `num_blocks` blocks of a segment. For each, `num_fetched` cache lines are read to the second cache from
 * `fetched` on. */
void pagoda_decode_segment(uint8_t *blocks, const uint8_t *segment, const pagoda_code_format *format,
                           const pagoda_panel_layout *layout, int64_t num_blocks, const uint8_t *fetched,
                           int64_t num_fetched);

/* Multiplies the only row of a tile with a panel, to sums [16]; nothing of it is stored in between. */
void pagoda_multiply_coded_row(float *sums, const uint32_t *row, const uint8_t *panel, const pagoda_code_format *format,
                               const pagoda_panel_layout *layout, int64_t in_features);

/* Multiplies rows with four panels whose granules have 32 inputs, to sums [tiles of rows][4][rows][16], with AMX's tiles
 * (runtime/tiles.h). */
void pagoda_multiply_coded_tiles(float *sums, const uint32_t *rows, int64_t num_rows, const uint8_t *panels,
                                 const pagoda_code_format *format, const pagoda_panel_layout *layout,
                                 int64_t in_features);

/* The most words of floats that are decoded and multiplied at a time: four panels' fit the first cache. */
enum { FLOAT_WORDS = 64 };

/* How many words of floats are multiplied before the sums are multiplied by a scale. */
int64_t pagoda_words_of_scale(const pagoda_code_format *format);

/* Addresses to prefetch to the second cache: from each on, one cache line for each decoded word of a panel; or NULL. */
typedef struct {
    const uint8_t *first, *second;
} pagoda_later_codes;

/* Where the codes are that are decoded one segment later than `first_word`. Their scales are prefetched. */
pagoda_later_codes pagoda_codes_after(const uint8_t *panels, const pagoda_code_format *format,
                                      const pagoda_panel_layout *layout, int64_t first_word);

/* Decodes `num_words` words of four panels from `first_word` on, a block's first one, to [4][num_words][16]; `words` has
 * room for all words of the last block, and `fetched` is prefetched meanwhile. */
void pagoda_decode_floats(uint32_t *words, const uint8_t *panels, const pagoda_code_format *format,
                          const pagoda_panel_layout *layout, int64_t first_word, int64_t num_words,
                          pagoda_later_codes fetched);

/* Adds products with these words [4][num_rows][16], times their scales, to sums of the same shape. */
void pagoda_add_scaled(float *sums, const float *products, int64_t num_rows, const uint8_t *panels,
                       const pagoda_code_format *format, const pagoda_panel_layout *layout, int64_t first_word);

/* Multiplies the only row of a tile with four panels of floats, to sums [4][16]. */
void pagoda_multiply_float_row(float *sums, const uint32_t *row, const uint8_t *panels,
                               const pagoda_code_format *format, const pagoda_panel_layout *layout, int64_t num_words);

/* Decodes one output of a panel to float32 [in_features], times `multiplier`. */
void pagoda_decode_output(float *output, const uint8_t *panel, int64_t lane, const pagoda_code_format *format,
                          int64_t in_features, float multiplier);

#endif
