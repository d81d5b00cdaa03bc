/* Whether stored weights have only finite numbers: their largest codes and scales. See stored.h. */
#include "coded/stored_rows.h"

/* The exponent of a float16's infinity and NaN; and the largest of MXFP4's scales whose products are finite, for sure:
 * coded_reading.py says which scales are too large. */
enum { HALF_INFINITY = 0x7c00, MOST_EXPONENT = 239 };

int32_t pagoda_largest_octet(const uint8_t *octets, int64_t count, int32_t mask) {
    uint8_t largest = 0;
    for (int64_t i = 0; i < count; i++) {
        const uint8_t own = octets[i] & (uint8_t)mask;
        largest = own > largest ? own : largest;
    }
    return largest;
}

int32_t pagoda_largest_magnitude(const void *floats, int64_t count, int32_t has_16_bits) {
    const uint16_t *halves = floats;
    const uint32_t *words = floats;
    uint16_t largest_half = 0;
    uint32_t largest_word = 0;
    for (int64_t i = 0; i < count && has_16_bits; i++) {
        const uint16_t own = halves[i] & 0x7fff;
        largest_half = own > largest_half ? own : largest_half;
    }
    for (int64_t i = 0; i < count && !has_16_bits; i++) {
        const uint32_t own = words[i] & 0x7fffffff;
        largest_word = own > largest_word ? own : largest_word;
    }
    return has_16_bits ? largest_half : (int32_t)largest_word;
}

/* Whether the float16 at byte `at` of each block is finite, and the one after it where there are two. */
INLINE bool have_finite_halves(const uint8_t *block, int64_t num_blocks, int block_bytes, int at, bool has_two) {
    int are_infinite = 0;
    for (; num_blocks; num_blocks--, block += block_bytes) {
        are_infinite |= (half_bits(block + at) & HALF_INFINITY) == HALF_INFINITY;
        if (has_two) are_infinite |= (half_bits(block + at + 2) & HALF_INFINITY) == HALF_INFINITY;
    }
    return !are_infinite;
}

int32_t pagoda_gguf_is_finite(const uint8_t *blocks, int64_t num_blocks, int32_t type) {
    switch (type) {
        case 2: case 20: return have_finite_halves(blocks, num_blocks, 18, 0, false);
        case 3: return have_finite_halves(blocks, num_blocks, 20, 0, true);
        case 6: return have_finite_halves(blocks, num_blocks, 22, 0, false);
        case 7: return have_finite_halves(blocks, num_blocks, 24, 0, true);
        case 8: return have_finite_halves(blocks, num_blocks, 34, 0, false);
        case 10: return have_finite_halves(blocks, num_blocks, 84, 80, true);
        case 11: return have_finite_halves(blocks, num_blocks, 110, 108, false);
        case 12: return have_finite_halves(blocks, num_blocks, 144, 0, true);
        case 13: return have_finite_halves(blocks, num_blocks, 176, 0, true);
        case 14: return have_finite_halves(blocks, num_blocks, 210, 208, false);
        case 23: return have_finite_halves(blocks, num_blocks, 136, 0, false);
        case 39:
            for (int64_t i = 0; i < num_blocks; i++)
                if (blocks[17 * i] > MOST_EXPONENT) return 0;
            return 1;
    }
    return 0;
}
