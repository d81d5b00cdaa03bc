#include "dequant/unpack_fields.h"

#include "runtime/vector.h"

typedef struct {
    uint8_t *to;
    const uint8_t *from;
    int64_t num_rows, num_octets, stride;
} Rows;

/* The bits of a byte, one a byte, the lowest first. */
INLINE uint64_t spread_bits(uint8_t octet) {
    uint64_t chosen = octet * 0x0101010101010101u & 0x8040201008040201u; /* byte i has bit i only */
    return (chosen + 0x7f7f7f7f7f7f7f7fu) >> 7 & 0x0101010101010101u;
}

/* The fields of one byte after another. */
INLINE void unpack_singly(Rows rows, int bits, int is_high_first) {
    int mask = (1 << bits) - 1, count = 8 / bits;
    for (int64_t row = 0; row < rows.num_rows; row++, rows.from += rows.stride)
        for (int64_t i = 0; i < rows.num_octets; i++, rows.to += count) {
            uint64_t spread = spread_bits(rows.from[i]);
            if (bits == 1 && !is_high_first) {
                memcpy(rows.to, &spread, sizeof spread);
                continue;
            }
            for (int j = 0; j < count; j++)
                rows.to[j] = rows.from[i] >> bits * (is_high_first ? count - 1 - j : j) & mask;
        }
}

/* Those of `width` bytes after those of `width` others. */
INLINE void unpack_together(Rows rows, int64_t num_octets, int64_t width, int bits, int is_high_first) {
    int mask = (1 << bits) - 1, count = 8 / bits;
    for (int64_t row = 0; row < rows.num_rows; row++, rows.from += rows.stride)
        for (int64_t first = 0; first < num_octets; first += width)
            for (int j = 0; j < count; j++, rows.to += width) {
                int shift = bits * (is_high_first ? count - 1 - j : j);
                for (int64_t i = 0; i < width; i++) rows.to[i] = rows.from[first + i] >> shift & mask;
            }
}

/* With constants, for which the compiler makes vectors. */
INLINE void unpack(Rows rows, int64_t width, int bits, int is_high_first) {
    if (width == 1)
        unpack_singly(rows, bits, is_high_first);
    else if (width == 16 && rows.num_octets == 16)
        unpack_together(rows, 16, 16, bits, is_high_first);
    else if (width == 16)
        unpack_together(rows, rows.num_octets, 16, bits, is_high_first);
    else if (width == 32)
        unpack_together(rows, rows.num_octets, 32, bits, is_high_first);
    else if (width == 64)
        unpack_together(rows, rows.num_octets, 64, bits, is_high_first);
    else
        unpack_together(rows, rows.num_octets, width, bits, is_high_first);
}

void pagoda_unpack_fields(uint8_t *to, const uint8_t *from, int64_t num_rows, int64_t num_octets, int64_t stride,
                          int64_t width, int32_t bits, int32_t is_high_first) {
    Rows rows = {to, from, num_rows, num_octets, stride};
    if (bits == 4 && is_high_first)
        unpack(rows, width, 4, 1);
    else if (bits == 4)
        unpack(rows, width, 4, 0);
    else if (bits == 2)
        unpack(rows, width, 2, is_high_first);
    else
        unpack(rows, width, 1, is_high_first);
}
