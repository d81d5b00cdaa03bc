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

/* 16 outer factors. */
INLINE f32x16 load_outer(const uint8_t *from, int type) {
    if (type == OUTER_F32) return f32x16_load((const float *)from);
    if (type == OUTER_BF16) return bf16_load((const bf16 *)from);
    f32x16 values;
#if defined(__AVX512F__)
    values = (f32x16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif defined(__F16C__) && defined(__FMA__)
    const __m256 halves[2] = {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from)),
                              _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from + 1))};
    memcpy(&values, halves, sizeof values);
#else
    uint16_t parts[LANES];
    memcpy(parts, from, sizeof parts);
    for (int lane = 0; lane < LANES; lane++) values[lane] = float_of_f16(parts[lane]);
#endif
    return values;
}

/* 16 bytes as floats. GCC converts vectors of bytes one by one. */
INLINE f32x16 load_bytes(const uint8_t *from, bool is_signed) {
#if defined(__AVX512F__)
    const __m128i bytes = _mm_loadu_si128((const __m128i *)from);
    return (f32x16)_mm512_cvtepi32_ps(is_signed ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#elif PAGODA_HALF_REGISTERS
    __m256 halves[2];
    f32x16 values;
    for (int half = 0; half < 2; half++) {
        const __m128i bytes = _mm_loadl_epi64((const __m128i *)(from + 8 * half));
        halves[half] = _mm256_cvtepi32_ps(is_signed ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
    }
    memcpy(&values, halves, sizeof values);
    return values;
#else
    f32x16 values;
    for (int lane = 0; lane < LANES; lane++) values[lane] = (float)(is_signed ? (int8_t)from[lane] : from[lane]);
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

/* Scale and minimum of the next granule of a segment. */
INLINE void next_scale(granule_cursor *cursor, const uint8_t *segment, const pagoda_code_format *format,
                       const pagoda_panel_layout *layout, f32x16 *scale, f32x16 *minimum) {
    const int64_t outer_bytes = LANES * (format->outer_type == OUTER_F32 ? 4 : 2);
    const int granule = cursor->granule++;
    if (granule == cursor->next_outer) cursor->outer++, cursor->next_outer += format->granules_per_outer;
    const uint8_t *outer = segment + cursor->outer * outer_bytes;
    *scale = load_outer(outer, format->outer_type);
    if (format->has_inner) *scale *= load_bytes(segment + layout->inner_scales + granule * LANES, true);
    if (format->zero_kind == ZERO_CONSTANT) {
        *minimum = *scale * format->zero;
    } else if (format->zero_kind == ZERO_POINTS) {
        *minimum = *scale * load_bytes(segment + layout->zero_points + cursor->outer * LANES, false);
    } else {
        *minimum = load_outer(outer + layout->outer_minima, format->outer_type);
        if (format->has_inner) *minimum *= load_bytes(segment + layout->inner_minima + granule * LANES, false);
    }
}

/* Calls MACRO(bits, has_levels) for every kind of codes. */
#define FOR_EACH_CODE(MACRO)                                                                                          \
    MACRO(2, 0) MACRO(3, 0) MACRO(4, 0) MACRO(4, 1) MACRO(5, 0) MACRO(6, 0) MACRO(7, 0) MACRO(8, 0)

#endif
