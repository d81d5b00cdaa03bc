/* Decoding of coded weights (codes.h) in registers. */
#ifndef PAGODA_CODED_DECODE_H
#define PAGODA_CODED_DECODE_H

#include "coded/codes.h"
#include "runtime/register.h"

enum { REGISTER_BYTES = REGISTER_LANES * 4, VECTOR_BYTES = LANES * 4 };

typedef uint8_t u8_register __attribute__((vector_size(REGISTER_BYTES)));
typedef uint32_t u32_register __attribute__((vector_size(REGISTER_BYTES)));

/* --- levels ---------------------------------------------------------------------------------------------------- */

/* The bits from `shift` on that `mask` has, of every byte. */
INLINE u8_register bits_of(u8_register bytes, int shift, uint8_t mask) {
    return (u8_register)((u32_register)bytes >> shift) & (mask - (u8_register){0});
}

/* What a table of 16 levels, repeated in `table`, has for every byte. */
INLINE u8_register levels_of(u8_register codes, u8_register table) {
#if defined(__AVX512BW__)
    return (u8_register)_mm512_shuffle_epi8((__m512i)table, (__m512i)codes);
#elif PAGODA_HALF_REGISTERS
    return (u8_register)_mm256_shuffle_epi8((__m256i)table, (__m256i)codes);
#else
    u8_register levels;
    for (int i = 0; i < REGISTER_BYTES; i++) levels[i] = table[codes[i]];
    return levels;
#endif
}

/* Decodes the levels of a block, or the part of its vectors that a register holds, from `from` bytes on. With constant
 * `bits` the compiler leaves out what they do not have. */
INLINE void decode_levels(u8_register *levels, const uint8_t *codes, int bits, bool has_levels, u8_register table,
                          int from) {
    u8_register plane;
    int shift = 0;
    for (int word = 0; word < BLOCK_WORDS; word++) levels[word] = (u8_register){0};
    if (bits == 8) {
        for (int word = 0; word < BLOCK_WORDS; word++)
            memcpy(&levels[word], codes + word * VECTOR_BYTES + from, sizeof plane);
    } else {
        _Pragma("GCC unroll 3") for (int width = 4; width; width /= 2) {
            if (!(bits & width)) continue;
            const int words = 8 / width; /* that share a vector */
            _Pragma("GCC unroll 4") for (int i = 0; i < width; i++, codes += VECTOR_BYTES) {
                memcpy(&plane, codes + from, sizeof plane);
                _Pragma("GCC unroll 8") for (int j = 0; j < words; j++) {
                    u8_register part = bits_of(plane, j * width, (uint8_t)((1 << width) - 1));
                    levels[i * words + j] |= shift ? (u8_register)((u32_register)part << shift) : part;
                }
            }
            shift += width;
        }
    }
    if (has_levels)
        for (int word = 0; word < BLOCK_WORDS; word++) levels[word] = levels_of(levels[word], table);
}

/* A table of 16 levels, repeated. */
INLINE u8_register repeated(const uint8_t *levels) {
    u8_register table;
    for (int i = 0; i < REGISTER_BYTES; i++) table[i] = levels[i % 16];
    return table;
}

/* --- scales and minima ------------------------------------------------------------------------------------------- */

/* A float16 as a float. */
INLINE float float_of_f16(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, magnitude = half & 0x7fff;
    uint32_t bits = (magnitude << 13) + (112u << 23);
    float value;
    if (magnitude >= 0x7c00) bits += 112u << 23; /* infinite, or not a number */
    memcpy(&value, &bits, sizeof value);
    if (magnitude < 0x0400) value = (float)magnitude * 0x1p-24f; /* subnormal */
    memcpy(&bits, &value, sizeof bits);
    bits |= sign;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The number of a code. Its bits, shifted to those of a float16, are the number, or 2^-8 of it if the exponent has four
 * bits. That is true of subnormal numbers, too. */
INLINE float number_of_float(uint8_t code, int floats) {
    const uint16_t half = (uint16_t)(code << 8);
    return floats == FLOATS_E5M2 ? float_of_f16(half) : float_of_f16((half >> 1 & 0x3f80) | (half & 0x8000)) * 256;
}

/* Outer factors of a register's outputs, from `lane` on. */
INLINE f32_register load_outer(const uint8_t *from, int type, int lane) {
    if (type == OUTER_F32) return register_load((const float *)from + lane);
    const uint8_t *halves = from + 2 * lane;
#if defined(__AVX512F__)
    const __m256i words = _mm256_loadu_si256((const __m256i *)halves);
    if (type == OUTER_F16) return (f32_register)_mm512_cvtph_ps(words);
    return (f32_register)_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16);
#elif PAGODA_HALF_REGISTERS && defined(__F16C__)
    const __m128i words = _mm_loadu_si128((const __m128i *)halves);
    if (type == OUTER_F16) return (f32_register)_mm256_cvtph_ps(words);
    return (f32_register)_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16);
#else
    f32_register values;
    uint16_t words[REGISTER_LANES];
    memcpy(words, halves, sizeof words);
    for (int i = 0; i < REGISTER_LANES; i++)
        values[i] = type == OUTER_F16 ? float_of_f16(words[i]) : bf16_to_float(words[i]);
    return values;
#endif
}

/* Bytes of a register's outputs as floats, from `lane` on. GCC converts vectors of bytes one by one. */
INLINE f32_register load_bytes(const uint8_t *from, bool is_signed, int lane) {
    from += lane;
#if defined(__AVX512F__)
    const __m128i bytes = _mm_loadu_si128((const __m128i *)from);
    return (f32_register)_mm512_cvtepi32_ps(is_signed ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#elif PAGODA_HALF_REGISTERS
    const __m128i bytes = _mm_loadl_epi64((const __m128i *)from);
    return (f32_register)_mm256_cvtepi32_ps(is_signed ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#else
    f32_register values;
    for (int i = 0; i < REGISTER_LANES; i++) values[i] = (float)(is_signed ? (int8_t)from[i] : from[i]);
    return values;
#endif
}

/* Which granule of a segment is next, and which outer factors it has. */
typedef struct {
    int granule, outer, next_outer; /* next_outer: the granule that has other ones */
} granule_cursor;

INLINE granule_cursor first_granule(const pagoda_code_format *format) {
    return (granule_cursor){0, 0, format->granules_per_outer};
}

/* Goes to the next granule, and returns the one before. */
INLINE granule_cursor advance(granule_cursor *cursor, const pagoda_code_format *format) {
    if (cursor->granule == cursor->next_outer) cursor->outer++, cursor->next_outer += format->granules_per_outer;
    const granule_cursor at = *cursor;
    cursor->granule++;
    return at;
}

/* Scale and minimum of a granule, of a register's outputs from `lane` on. */
INLINE void load_scale(granule_cursor at, const uint8_t *segment, const pagoda_code_format *format,
                       const pagoda_panel_layout *layout, int lane, f32_register *scale, f32_register *minimum) {
    const uint8_t *outer = segment + at.outer * LANES * (format->outer_type == OUTER_F32 ? 4 : 2);
    *scale = load_outer(outer, format->outer_type, lane);
    if (format->has_inner) *scale *= load_bytes(segment + layout->inner_scales + at.granule * LANES, true, lane);
    if (format->zero_kind == ZERO_CONSTANT) {
        *minimum = *scale * format->zero;
    } else if (format->zero_kind == ZERO_POINTS) {
        *minimum = *scale * load_bytes(segment + layout->zero_points + at.outer * LANES, false, lane);
    } else {
        *minimum = load_outer(outer + layout->outer_minima, format->outer_type, lane);
        if (format->has_inner) *minimum *= load_bytes(segment + layout->inner_minima + at.granule * LANES, false, lane);
    }
}

/* Calls MACRO(bits, has_levels) for every kind of codes. */
#define FOR_EACH_CODE(MACRO)                                                                                          \
    MACRO(2, 0) MACRO(3, 0) MACRO(4, 0) MACRO(4, 1) MACRO(5, 0) MACRO(6, 0) MACRO(7, 0) MACRO(8, 0)

#endif
