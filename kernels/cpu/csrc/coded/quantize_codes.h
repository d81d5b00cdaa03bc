/* Quantizing weights to codes with scales for groups of inputs. */
#ifndef PAGODA_QUANTIZE_CODES_H
#define PAGODA_QUANTIZE_CODES_H

#include <stdint.h>

/* Quantizes rows [num_rows, in_features], float32 or bfloat16, to codes of `bits`, [num_rows, in_features] bytes, and
 * bfloat16 scales [num_rows, ceil(in_features / 32)]: (code - 2 ** (bits - 1)) * scale.
 *
 * Of several scales near the one that maps a group's largest number to the lowest code, the one with the least squared
 * error is taken; the best scale for given codes is that of least squares. */
void pagoda_quantize_codes(uint8_t *codes, uint16_t *scales, const void *source, int32_t source_is_bf16,
                           int64_t num_rows, int64_t in_features, int32_t bits);

#endif
