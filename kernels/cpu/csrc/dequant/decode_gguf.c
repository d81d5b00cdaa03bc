/* A block is unpacked to codes of a byte, which stay in registers' reach, and then scaled group by group. The layouts and
 * the order of operations are ggml's: kernels/dequant/gguf.py describes them. */
#include "dequant/decode_gguf.h"

#include "dequant/code_tables.h"
#include "dequant/gguf_codes.h"
#include "dequant/store_rounded.h"

enum { BLOCK = 256 }; /* most elements of a block */

/* code * scale + bias, with a scale and a bias for each group of codes. */
typedef struct {
    int8_t codes[BLOCK];
    float scales[16], biases[16];
} unpacked;

typedef void unpacker(unpacked *to, const uint8_t *block);

static const int8_t FROM_MINUS_8[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
static const int8_t FROM_0[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
static const int8_t IQ4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
static const int8_t E2M1_DOUBLED[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

/* The float16 at an address. */
INLINE float half_at(const uint8_t *from) {
#if defined(__F16C__) && defined(__FMA__)
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(from[0] | from[1] << 8)));
#else
    uint32_t half = from[0] | (uint32_t)from[1] << 8, magnitude = half & 0x7fff;
    float subnormal = (float)magnitude * 0x1p-24f, value;
    uint32_t bits = (magnitude << 13) + ((magnitude < 0x7c00 ? 112u : 224u) << 23); /* 224: infinity or NaN */
    if (magnitude < 0x400) memcpy(&bits, &subnormal, sizeof bits);
    bits |= (half & 0x8000) << 16;
    memcpy(&value, &bits, sizeof value);
    return value;
#endif
}

/* Levels for codes of four bits; `count` is a multiple of 16. */
INLINE void look_up(int8_t *codes, int count, const int8_t *levels) {
#if defined(__SSSE3__) && defined(__FMA__)
    for (int i = 0; i < count; i += 16)
        put_octets(codes + i, (u8x16)_mm_shuffle_epi8((__m128i)octets_at(levels), (__m128i)octets_at(codes + i)));
#else
    for (int i = 0; i < count; i++) codes[i] = levels[codes[i]];
#endif
}

/* 16 codes as floats. */
INLINE f32x16 signed_octets(const int8_t *from) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)from)));
#else
    float values[LANES];
    for (int i = 0; i < LANES; i++) values[i] = from[i];
    return f32x16_load(values);
#endif
}

/* --- 32 elements a block ------------------------------------------------------------------------------------------- */

static void q4_0(unpacked *to, const uint8_t *block) {
    nibbles(to->codes, block + 2, 16, 8);
    to->scales[0] = half_at(block);
}

static void q4_1(unpacked *to, const uint8_t *block) {
    nibbles(to->codes, block + 4, 16, 0);
    to->scales[0] = half_at(block), to->biases[0] = half_at(block + 2);
}

static void q5_0(unpacked *to, const uint8_t *block) {
    nibbles(to->codes, block + 6, 16, 0);
    add_fifth(to->codes, block + 2, 16);
    to->scales[0] = half_at(block);
}

static void q5_1(unpacked *to, const uint8_t *block) {
    nibbles(to->codes, block + 8, 16, 0);
    add_fifth(to->codes, block + 4, 0);
    to->scales[0] = half_at(block), to->biases[0] = half_at(block + 2);
}

static void q8_0(unpacked *to, const uint8_t *block) {
    memcpy(to->codes, block + 2, 32);
    to->scales[0] = half_at(block);
}

static void iq4_nl(unpacked *to, const uint8_t *block) {
    nibbles(to->codes, block + 2, 16, 0);
    look_up(to->codes, 32, IQ4);
    to->scales[0] = half_at(block);
}

static void mxfp4(unpacked *to, const uint8_t *block) {
    nibbles(to->codes, block + 1, 16, 0);
    look_up(to->codes, 32, E2M1_DOUBLED);
    const uint32_t bits = bits_of_mxfp4_scale(block[0]);
    memcpy(to->scales, &bits, sizeof bits);
}

/* --- 256 elements a block ------------------------------------------------------------------------------------------ */

static void q2_k(unpacked *to, const uint8_t *block) {
    float scale = half_at(block + 80), of_minima = half_at(block + 82);
    for (int part = 0; part < 2; part++) quarters(to->codes + 128 * part, block + 16 + 32 * part);
    for (int i = 0; i < 16; i++) {
        to->scales[i] = scale * (float)(block[i] & 15);
        to->biases[i] = -(of_minima * (float)(block[i] >> 4));
    }
}

static void q3_k(unpacked *to, const uint8_t *block) {
    float scale = half_at(block + 108);
    for (int part = 0; part < 2; part++) quarters(to->codes + 128 * part, block + 32 + 32 * part);
    add_bits(to->codes, block, 2, 4);
    for (int i = 0; i < 16; i++) to->scales[i] = scale * (float)scale_of_q3_k(block, i);
}

/* The scales and minima of Q4_K's and Q5_K's 8 groups, six bits each. */
INLINE void scales_and_minima(unpacked *to, const uint8_t *block) {
    const float scale = half_at(block), of_minima = half_at(block + 2);
    uint8_t scales[8], minima[8];
    six_bit_factors(scales, minima, block);
    for (int i = 0; i < 8; i++) {
        to->scales[i] = scale * (float)scales[i];
        to->biases[i] = -(of_minima * (float)minima[i]);
    }
}

static void q4_k(unpacked *to, const uint8_t *block) {
    scales_and_minima(to, block);
    for (int part = 0; part < 4; part++) nibbles(to->codes + 64 * part, block + 16 + 32 * part, 32, 0);
}

static void q5_k(unpacked *to, const uint8_t *block) {
    scales_and_minima(to, block);
    for (int part = 0; part < 4; part++) nibbles(to->codes + 64 * part, block + 48 + 32 * part, 32, 0);
    add_bits(to->codes, block + 16, 4, 0);
}

static void q6_k(unpacked *to, const uint8_t *block) {
    float scale = half_at(block + 208);
    codes_of_q6_k(to->codes, block, 32);
    for (int i = 0; i < 16; i++) to->scales[i] = scale * (float)(int8_t)block[192 + i];
}

static void iq4_xs(unpacked *to, const uint8_t *block) {
    float scale = half_at(block);
    for (int i = 0; i < 8; i++) {
        nibbles(to->codes + 32 * i, block + 8 + 16 * i, 16, 0);
        to->scales[i] = scale * (float)scale_of_iq4_xs(block, i);
    }
    look_up(to->codes, BLOCK, IQ4);
}

/* Decodes blocks of one type. Without biases these are -0, which changes no number. */
INLINE void decode(void *output, const uint8_t *blocks, int64_t num_blocks, bool is_bf16, unpacker *unpack,
                   int block_bytes, int elements, int group) {
    unpacked block;
    for (int i = 0; i < 16; i++) block.biases[i] = -0.0f;
    for (int64_t index = 0; index < num_blocks; index++) {
        unpack(&block, blocks + index * block_bytes);
        for (int i = 0; i < elements; i += LANES) {
            f32x16 values = signed_octets(block.codes + i);
            store_exact(output, is_bf16, index * elements + i, values * block.scales[i / group] + block.biases[i / group]);
        }
    }
}

/* The same of blocks with a scale and 32 codes of four bits at their end, in bfloat16: the numbers of a block's 16 codes
 * are computed once, and looked up. */
INLINE void decode_by_table(bf16 *output, const uint8_t *blocks, int64_t num_blocks, unpacker *unpack, int block_bytes,
                            const int8_t *levels) {
    const f32x16 all_levels = signed_octets(levels);
    unpacked block;
    block.biases[0] = -0.0f;
    for (; num_blocks; num_blocks--, blocks += block_bytes, output += 2 * LANES) {
        unpack(&block, blocks); /* of which the codes are not used, so the compiler leaves them out */
        look_up_halves(output, blocks + block_bytes - LANES, bf16_exact(all_levels * block.scales[0] + block.biases[0]));
    }
}

/* The cases of the types: ggml's number, its decoder, and the block's bytes, elements, and elements with one scale. */
#define CASE(type, unpack, block_bytes, elements, group)                                                               \
    case type:                                                                                                         \
        if (is_bf16) decode(output, blocks, num_blocks, true, unpack, block_bytes, elements, group);                   \
        else decode(output, blocks, num_blocks, false, unpack, block_bytes, elements, group);                          \
        return 1

#define TABLE_CASE(type, unpack, block_bytes, levels)                                                                  \
    case type:                                                                                                         \
        if (is_bf16) decode_by_table(output, blocks, num_blocks, unpack, block_bytes, levels);                         \
        else decode(output, blocks, num_blocks, false, unpack, block_bytes, 32, 32);                                   \
        return 1

int32_t pagoda_decode_gguf(void *output, const uint8_t *blocks, int64_t num_blocks, int32_t type, int32_t is_bf16) {
    switch (type) {
        TABLE_CASE(2, q4_0, 18, FROM_MINUS_8);
        TABLE_CASE(3, q4_1, 20, FROM_0);
        CASE(6, q5_0, 22, 32, 32);
        CASE(7, q5_1, 24, 32, 32);
        CASE(8, q8_0, 34, 32, 32);
        CASE(10, q2_k, 84, 256, 16);
        CASE(11, q3_k, 110, 256, 16);
        CASE(12, q4_k, 144, 256, 32);
        CASE(13, q5_k, 176, 256, 32);
        CASE(14, q6_k, 210, 256, 16);
        TABLE_CASE(20, iq4_nl, 18, IQ4);
        CASE(23, iq4_xs, 136, 256, 32);
        TABLE_CASE(39, mxfp4, 17, E2M1_DOUBLED);
        default: return 0;
    }
}
