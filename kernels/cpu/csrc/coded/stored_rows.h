/* Reading of a segment of one output from what files have (stored.h): its codes, a byte each, and its factors. */
#ifndef PAGODA_STORED_ROWS_H
#define PAGODA_STORED_ROWS_H

#include "coded/stored.h"
#include "dequant/gguf_codes.h"
#include "runtime/integers.h"

enum { SEGMENT_INPUTS = SEGMENT_BLOCKS * BLOCK_INPUTS, MOST_GRANULES = SEGMENT_INPUTS / 16 };

/* What is read: of its factors as many as the format has. Outer ones are bits of 16 or 32. */
typedef struct {
    uint8_t *codes;                                /* [256] */
    uint8_t *outer_scales, *outer_minima;          /* one output's, of 16 outputs' */
    uint8_t *zero_points, *inner_scales, *inner_minima;
} segment_row;

INLINE uint16_t half_bits(const uint8_t *from) { return (uint16_t)(from[0] | from[1] << 8); }

INLINE void put_half(uint8_t *factors, int i, uint16_t bits) { memcpy(factors + 2 * i * LANES, &bits, sizeof bits); }

/* --- codes of one or two a byte ----------------------------------------------------------------------------------- */

/* Unpacks 256 codes of 128 bytes; at the end of an output `count` codes are left, and only their bytes are read. */
INLINE void unpack_pairs(uint8_t *codes, const uint8_t *from, int64_t count, bool is_high_first) {
    typedef uint8_t u8x32 __attribute__((vector_size(32)));
    typedef uint16_t u16x32 __attribute__((vector_size(64)));
    uint8_t octets[SEGMENT_INPUTS / 2];
    if (count < SEGMENT_INPUTS) {
        memset(octets, 0, sizeof octets);
        memcpy(octets, from, (size_t)divide_up(count, 2));
        from = octets;
    }
    for (int i = 0; i < SEGMENT_INPUTS / 64; i++) {
        u8x32 packed;
        memcpy(&packed, from + 32 * i, sizeof packed);
        const u16x32 wide = __builtin_convertvector(packed, u16x32);
        const u16x32 pairs = (is_high_first ? wide >> 4 | wide << 8 : wide | wide << 4) & 0x0f0f;
        memcpy(codes + 64 * i, &pairs, sizeof pairs);
    }
    if (count < SEGMENT_INPUTS) memset(codes + count, 0, (size_t)(SEGMENT_INPUTS - count));
}

INLINE void copy_octets(uint8_t *codes, const uint8_t *from, int64_t count, uint8_t changed_bits) {
    if (count < SEGMENT_INPUTS) memset(codes + count, 0, (size_t)(SEGMENT_INPUTS - count));
    for (int64_t i = 0; i < min(count, SEGMENT_INPUTS); i++) codes[i] = from[i] ^ changed_bits;
}

/* --- GGUF's blocks of 32: a segment has eight, or fewer at the end ----------------------------------------- */

/* What follows the scale, and maybe the minimum, of a block. */
enum { NO_FIFTH = 0, HAS_FIFTH = 1 };

INLINE void read_nibble_blocks(const segment_row *to, const uint8_t *block, int num_blocks, bool has_minima, bool has_fifth) {
    const int halves = has_minima ? 2 : 1, start = 2 * halves + (has_fifth ? 4 : 0);
    for (int b = 0; b < num_blocks; b++, block += start + 16) {
        uint8_t *codes = to->codes + b * BLOCK_INPUTS;
        nibbles(codes, block + start, 16, 0);
        if (has_fifth) add_fifth(codes, block + 2 * halves, 0);
        put_half(to->outer_scales, b, half_bits(block));
        if (has_minima) put_half(to->outer_minima, b, half_bits(block + 2) ^ 0x8000);
    }
}

INLINE void read_q8_0(const segment_row *to, const uint8_t *block, int num_blocks) {
    for (int b = 0; b < num_blocks; b++, block += 34) {
        for (int i = 0; i < BLOCK_INPUTS; i += 16)
            put_octets(to->codes + b * BLOCK_INPUTS + i, octets_at(block + 2 + i) ^ 128);
        put_half(to->outer_scales, b, half_bits(block));
    }
}

INLINE void read_mxfp4(const segment_row *to, const uint8_t *block, int num_blocks) {
    for (int b = 0; b < num_blocks; b++, block += 17) {
        nibbles(to->codes + b * BLOCK_INPUTS, block + 1, 16, 0);
        put_half(to->outer_scales, b, (uint16_t)(bits_of_mxfp4_scale(block[0]) >> 16));
    }
}

/* --- GGUF's blocks of 256: a segment is one block ----------------------------------------------------------------- */

INLINE void put_inner(uint8_t *factors, const uint8_t *from, int count) {
    for (int i = 0; i < count; i++) factors[i * LANES] = from[i];
}

INLINE void read_q2_k(const segment_row *to, const uint8_t *block) {
    for (int part = 0; part < 2; part++) quarters(to->codes + 128 * part, block + 16 + 32 * part);
    put_half(to->outer_scales, 0, half_bits(block + 80));
    put_half(to->outer_minima, 0, half_bits(block + 82));
    for (int i = 0; i < 16; i++) {
        to->inner_scales[i * LANES] = block[i] & 15;
        to->inner_minima[i * LANES] = block[i] >> 4;
    }
}

INLINE void read_q3_k(const segment_row *to, const uint8_t *block) {
    for (int part = 0; part < 2; part++) quarters(to->codes + 128 * part, block + 32 + 32 * part);
    add_bits(to->codes, block, 2, 0);
    put_half(to->outer_scales, 0, half_bits(block + 108));
    for (int i = 0; i < 16; i++) to->inner_scales[i * LANES] = (uint8_t)scale_of_q3_k(block, i);
}

INLINE void read_q4_or_q5_k(const segment_row *to, const uint8_t *block, bool has_fifth) {
    uint8_t scales[8], minima[8];
    for (int part = 0; part < 4; part++)
        nibbles(to->codes + 64 * part, block + (has_fifth ? 48 : 16) + 32 * part, 32, 0);
    if (has_fifth) add_bits(to->codes, block + 16, 4, 0);
    put_half(to->outer_scales, 0, half_bits(block));
    put_half(to->outer_minima, 0, half_bits(block + 2));
    six_bit_factors(scales, minima, block);
    put_inner(to->inner_scales, scales, 8);
    put_inner(to->inner_minima, minima, 8);
}

INLINE void read_q6_k(const segment_row *to, const uint8_t *block) {
    codes_of_q6_k(to->codes, block, 0);
    put_half(to->outer_scales, 0, half_bits(block + 208));
    put_inner(to->inner_scales, block + 192, 16);
}

INLINE void read_iq4_xs(const segment_row *to, const uint8_t *block) {
    for (int i = 0; i < 8; i++) nibbles(to->codes + 32 * i, block + 8 + 16 * i, 16, 0);
    put_half(to->outer_scales, 0, half_bits(block));
    for (int i = 0; i < 8; i++) to->inner_scales[i * LANES] = (uint8_t)scale_of_iq4_xs(block, i);
}

/* --- all layouts ------------------------------------------------------------------------------------------------------ */

/* Bytes of a block of GGUF's type, and its elements. */
typedef struct {
    int bytes, elements;
} gguf_block;

INLINE gguf_block block_of_type(int type) {
    switch (type) {
        case 2: case 20: return (gguf_block){18, 32};
        case 3: return (gguf_block){20, 32};
        case 6: return (gguf_block){22, 32};
        case 7: return (gguf_block){24, 32};
        case 8: return (gguf_block){34, 32};
        case 39: return (gguf_block){17, 32};
        case 10: return (gguf_block){84, 256};
        case 11: return (gguf_block){110, 256};
        case 12: return (gguf_block){144, 256};
        case 13: return (gguf_block){176, 256};
        case 14: return (gguf_block){210, 256};
        case 23: return (gguf_block){136, 256};
    }
    return (gguf_block){0, 1};
}

/* Reads the segment that begins at input `first` of a row; `count` inputs are left. */
INLINE void read_gguf(const segment_row *to, const uint8_t *row, int64_t first, int64_t count, int type) {
    const gguf_block own = block_of_type(type);
    const uint8_t *block = row + first / own.elements * own.bytes;
    const int num_blocks = (int)min(SEGMENT_BLOCKS, count / BLOCK_INPUTS);
    if (count < SEGMENT_INPUTS) memset(to->codes + count, 0, (size_t)(SEGMENT_INPUTS - count));
    switch (type) {
        case 2: case 20: read_nibble_blocks(to, block, num_blocks, false, false); break;
        case 3: read_nibble_blocks(to, block, num_blocks, true, false); break;
        case 6: read_nibble_blocks(to, block, num_blocks, false, true); break;
        case 7: read_nibble_blocks(to, block, num_blocks, true, true); break;
        case 8: read_q8_0(to, block, num_blocks); break;
        case 39: read_mxfp4(to, block, num_blocks); break;
        case 10: read_q2_k(to, block); break;
        case 11: read_q3_k(to, block); break;
        case 12: read_q4_or_q5_k(to, block, false); break;
        case 13: read_q4_or_q5_k(to, block, true); break;
        case 14: read_q6_k(to, block); break;
        case 23: read_iq4_xs(to, block); break;
    }
}

INLINE void read_codes(uint8_t *codes, const uint8_t *row, int64_t first, int64_t count, int layout) {
    if (layout == STORED_NIBBLES) unpack_pairs(codes, row + first / 2, count, false);
    else if (layout == STORED_HIGH_NIBBLES) unpack_pairs(codes, row + first / 2, count, true);
    else copy_octets(codes, row + first, count, layout == STORED_SIGNED_BYTES ? 128 : 0);
}

#endif
