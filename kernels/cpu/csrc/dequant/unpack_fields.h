/* Fields of 1, 2 or 4 bits of packed bytes, one a byte. */
#ifndef PAGODA_UNPACK_FIELDS_H
#define PAGODA_UNPACK_FIELDS_H

#include <stdint.h>

/* Writes the fields of [num_rows, num_octets] bytes, whose rows are `stride` apart: [num_rows, num_octets * 8 / bits]. Of each
 * `width` neighbouring bytes come first the lowest bits of all, then the next ones; with `is_high_first`, the highest. */
void pagoda_unpack_fields(uint8_t *to, const uint8_t *from, int64_t num_rows, int64_t num_octets, int64_t stride,
                          int64_t width, int32_t bits, int32_t is_high_first);

#endif
