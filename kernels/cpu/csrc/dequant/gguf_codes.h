/* The codes of GGUF's blocks, one a byte, as kernels/dequant/gguf.py describes them. */
#ifndef PAGODA_GGUF_CODES_H
#define PAGODA_GGUF_CODES_H

#include "runtime/vector.h"

/* 16 bytes. GCC writes loops over bytes as it sees fit, and these as one instruction. */
typedef uint8_t u8x16 __attribute__((vector_size(16)));

INLINE u8x16 octets_at(const void *from) {
    u8x16 octets;
    memcpy(&octets, from, sizeof octets);
    return octets;
}
INLINE void put_octets(void *to, u8x16 octets) { memcpy(to, &octets, sizeof octets); }

/* The low nibbles of `count` bytes, then the high ones. */
INLINE void nibbles(void *to, const uint8_t *from, int count, int offset) {
    for (int i = 0; i < count; i += 16) {
        u8x16 octets = octets_at(from + i);
        put_octets((uint8_t *)to + i, (octets & 15) - (uint8_t)offset);
        put_octets((uint8_t *)to + count + i, (octets >> 4) - (uint8_t)offset);
    }
}

/* The lowest two bits of 32 bytes, then the next ones, and so on. */
INLINE void quarters(void *to, const uint8_t *from) {
    for (int part = 0; part < 4; part++)
        for (int i = 0; i < 32; i += 16)
            put_octets((uint8_t *)to + 32 * part + i, octets_at(from + i) >> 2 * part & 3);
}

/* Adds bit i of 32 bytes to the codes 32 i to 32 i + 31, as bit `to_bit`, and subtracts `offset`. */
INLINE void add_bits(void *codes, const uint8_t *from, int to_bit, int offset) {
    for (int part = 0; part < 8; part++)
        for (int i = 0; i < 32; i += 16) {
            uint8_t *own = (uint8_t *)codes + 32 * part + i;
            put_octets(own, (octets_at(own) | (octets_at(from + i) >> part & 1) << to_bit) - (uint8_t)offset);
        }
}

/* Adds the bits of four bytes, one to each of 32 codes, as their fifth, and subtracts `offset`. */
INLINE void add_fifth(void *codes, const uint8_t *from, int offset) {
    typedef uint64_t u64x2 __attribute__((vector_size(16)));
    const u8x16 bits = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    for (int i = 0; i < 2; i++) {
        uint8_t *own = (uint8_t *)codes + 16 * i;
        u8x16 spread = (u8x16)((u64x2){from[2 * i], from[2 * i + 1]} * 0x0101010101010101u);
        u8x16 fifth = (u8x16)((spread & bits) == bits) & 16;
        put_octets(own, (octets_at(own) | fifth) - (uint8_t)offset);
    }
}

/* The codes of Q6_K's block, less `offset`. */
INLINE void codes_of_q6_k(void *to, const uint8_t *block, int offset) {
    for (int part = 0; part < 2; part++) {
        uint8_t high[128], *codes = (uint8_t *)to + 128 * part;
        nibbles(codes, block + 64 * part, 64, 0);
        quarters(high, block + 128 + 32 * part);
        for (int i = 0; i < 128; i += 16)
            put_octets(codes + i, (octets_at(codes + i) | octets_at(high + i) << 4) - (uint8_t)offset);
    }
}

/* Factor `i` of Q3_K's 16, which are signed. */
INLINE int scale_of_q3_k(const uint8_t *block, int i) {
    const int low = block[96 + i % 8] >> (i < 8 ? 0 : 4) & 15, high = block[104 + i % 4] >> 2 * (i / 4) & 3;
    return (low | high << 4) - 32;
}

/* Factor `i` of IQ4_XS's 8, which are signed. */
INLINE int scale_of_iq4_xs(const uint8_t *block, int i) {
    const int low = block[4 + i / 2] >> 4 * (i % 2) & 15, high = block[2 + i / 4] >> 2 * (i % 4) & 3;
    return (low | high << 4) - 32;
}

/* The factors of Q4_K's and Q5_K's 8 scales and 8 minima, six bits each, [8] and [8]. */
INLINE void six_bit_factors(uint8_t *scales, uint8_t *minima, const uint8_t *block) {
    const uint8_t *first = block + 4, *second = block + 8, *third = block + 12;
    for (int i = 0; i < 4; i++) {
        scales[i] = first[i] & 63;
        minima[i] = second[i] & 63;
        scales[4 + i] = (uint8_t)((third[i] & 15) | (first[i] >> 2 & 48));
        minima[4 + i] = (uint8_t)((third[i] >> 4) | (second[i] >> 2 & 48));
    }
}

/* The bits of half of MXFP4's scale of a block as float32: the two smallest are subnormal. */
INLINE uint32_t bits_of_mxfp4_scale(uint8_t exponent) {
    return exponent < 2 ? (exponent + 1u) << 21 : (exponent - 1u) << 23;
}

#endif
