/* Rows of a cache as vectors of 16 words of 32 bits, and attention's arithmetic on them.
 *
 * A product over head_dim takes words of a row as memory has them; a product over keys takes words across rows:
 *
 *   float32                  a word is a float
 *   bfloat16, paired         a word is two bfloat16, multiplied by one instruction: two dimensions, or two keys
 *   bfloat16, widened        a word is a float, for processors without that instruction
 *
 * Every function takes the kind of cache as a constant, and is compiled for that kind alone.
 */
#ifndef PAGODA_ATTENTION_WORDS_H
#define PAGODA_ATTENTION_WORDS_H

#include <math.h>
#include <stdbool.h>
#include <stddef.h>

#include "runtime/tiles.h"
#include "runtime/vector.h"

/* A function that is compiled once for each of its constants, so that its results stay in registers. A processor whose
 * registers are too few gets one function that serves all: it would only be slow to compile. */
#if defined(__AVX512F__)
#define SPECIALIZED INLINE
#else
#define SPECIALIZED static __attribute__((noinline, noclone, unused))
#endif

enum { FLOAT32, BFLOAT16 };
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
enum { PAIRS_BFLOAT16 = 1 };
#else
enum { PAIRS_BFLOAT16 = 0 };
#endif

typedef double f64x8 __attribute__((vector_size(64)));
#if defined(__AVX512BW__)
typedef uint16_t u16x32 __attribute__((vector_size(64)));
#endif

/* Of a query and a key: each is over every fourth word, and they are added in order. One would be fastest where keys
 * are packed; where they are read in place, a vector holds four adjacent words of each of four keys. */
enum { SUMS_OF_PRODUCT = 4 };

/* Whether AMX's tiles compute: see attention_amx.h. */
INLINE bool uses_amx(const int kind) { return kind == BFLOAT16 && PAGODA_HAS_TILES; }

/* Whether a word is two bfloat16. */
INLINE bool is_paired(const int kind) { return kind == BFLOAT16 && PAIRS_BFLOAT16; }

/* Bytes of an element of the cache. */
INLINE size_t element_size(const int kind) { return kind == BFLOAT16 ? sizeof(bf16) : sizeof(float); }

/* Keys of a word in products over keys. */
INLINE int keys_per_word(const int kind) { return is_paired(kind) ? 2 : 1; }

/* Words of a row. */
INLINE int words_of(const int kind, int head_dim) { return is_paired(kind) ? head_dim / 2 : head_dim; }

/* `words` rounded up to whole vectors. */
INLINE int whole_vectors(int words) { return (words + LANES - 1) / LANES * LANES; }

/* sum + a * b over the words' parts. */
INLINE f32x16 dot(const int kind, f32x16 sum, u32x16 a, u32x16 b) {
    return is_paired(kind) ? pagoda_dot_bf16(sum, a, b) : pagoda_dot_f32(sum, a, b);
}

/* 16 words of a row, from `word` on. */
INLINE u32x16 load_words(const int kind, const char *row, int word) {
    if (kind == BFLOAT16 && !is_paired(kind)) return (u32x16)bf16_load((const bf16 *)row + word);
    return u32x16_load(row + sizeof(uint32_t) * (size_t)word);
}

/* The last 8 words of a row whose head_dim is not a multiple of 32, then zeros. Only pairs leave such a rest. */
INLINE u32x16 load_last_words(const char *row, int word) {
    const char *from = row + sizeof(uint32_t) * (size_t)word;
#if defined(__AVX512F__)
    return (u32x16)_mm512_zextsi256_si512(_mm256_loadu_si256((const __m256i *)from));
#else
    u32x16 value = {0};
    memcpy(&value, from, sizeof value / 2);
    return value;
#endif
}

/* 16 words of a row, or the last 8 and zeros. */
INLINE u32x16 load_some_words(const int kind, const char *row, int word, int words) {
    return word + LANES <= words ? load_words(kind, row, word) : load_last_words(row, word);
}

/* `vectors` times 16 dimensions of a word of keys: of one row, or of two rows interleaved. */
INLINE void load_values(const int kind, const int vectors, u32x16 *values, const char *first, const char *second,
                        int dim) {
    if (!is_paired(kind)) {
        for (int v = 0; v < vectors; v++) values[v] = load_words(kind, first, dim + v * LANES);
        return;
    }
    first += sizeof(bf16) * (size_t)dim;
    second += sizeof(bf16) * (size_t)dim;
#if defined(__AVX512BW__)
    const u16x32 low = {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39,
                        8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    for (int v = 0; v + 1 < vectors; v += 2) {
        __m512i a = _mm512_loadu_si512(first + 32 * v), b = _mm512_loadu_si512(second + 32 * v);
        values[v] = (u32x16)_mm512_permutex2var_epi16(a, (__m512i)low, b);
        values[v + 1] = (u32x16)_mm512_permutex2var_epi16(a, (__m512i)(low + 16), b);
    }
    if (vectors % 2) {
        __m512i a = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(first + 32 * (vectors - 1))));
        __m512i b = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(second + 32 * (vectors - 1))));
        values[vectors - 1] = (u32x16)_mm512_or_si512(a, _mm512_slli_epi32(b, 16));
    }
#endif
}

/* Rounds 16 or 32 weights of consecutive keys to words; returns how many vectors of weights it took. */
INLINE int store_weights(const int kind, uint32_t *to, const f32x16 *weights) {
#if defined(__AVX512BF16__)
    if (is_paired(kind)) {
        __m512bh words = _mm512_cvtne2ps_pbh((__m512)weights[1], (__m512)weights[0]);
        memcpy(to, &words, sizeof words);
        return 2;
    }
#endif
    (void)kind;
    memcpy(to, weights, sizeof *weights);
    return 1;
}

/* Stores 16 dimensions of an output, rounded to the cache's type. */
INLINE void store_output(const int kind, char *row, int dim, f32x16 value) {
    if (kind == BFLOAT16) bf16_store((bf16 *)row + dim, value);
    else f32x16_store((float *)row + dim, value);
}

/* The coefficients of 2^x on [-1/2, 1/2], highest degree first: the polynomial of least relative error. */
#define EXP2_COEFFICIENTS 1.3276472e-3f, 9.6755410e-3f, 0.055507131f, 0.24022120f, 0.69314694f, 1.0000001f

#if PAGODA_HALF_REGISTERS
/* exp2_of in one register. */
INLINE __m256 exp2_of_half(__m256 x) {
    const float coefficients[] = {EXP2_COEFFICIENTS};
    x = _mm256_max_ps(_mm256_set1_ps(-200.0f), x);
    const __m256 whole = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m256 rest = _mm256_sub_ps(x, whole);
    __m256 p = _mm256_set1_ps(coefficients[0]);
    for (int i = 1; i < 6; i++) p = _mm256_fmadd_ps(p, rest, _mm256_set1_ps(coefficients[i]));
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127));
    const __m256 power = _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
    const __m256 is_normal = _mm256_cmp_ps(whole, _mm256_set1_ps(-126.0f), _CMP_GT_OQ);
    const __m256 value = _mm256_and_ps(is_normal, _mm256_mul_ps(p, power));
    return _mm256_blendv_ps(value, x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}
#endif

/* 2^x for x < 127, to a float's precision; 0 for anything below -150, minus infinity included. */
INLINE f32x16 exp2_of(f32x16 x) {
#if PAGODA_HALF_REGISTERS
    __m256 halves[2];
    memcpy(halves, &x, sizeof x);
    for (int i = 0; i < 2; i++) halves[i] = exp2_of_half(halves[i]);
    memcpy(&x, halves, sizeof x);
    return x;
#else
    const float coefficients[] = {EXP2_COEFFICIENTS};
    x = f32x16_max(f32x16_set(-200.0f), x); /* in this order a NaN stays one */
#if defined(__AVX512F__)
    f32x16 whole = (f32x16)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    f32x16 whole = x + 12582912.0f - 12582912.0f; /* 1.5 * 2^23 rounds to an integer */
#endif
    f32x16 rest = x - whole;
    f32x16 p = f32x16_set(coefficients[0]);
    for (int i = 1; i < 6; i++) p = f32x16_fma(p, rest, f32x16_set(coefficients[i]));
#if defined(__AVX512F__)
    return (f32x16)_mm512_scalef_ps((__m512)p, (__m512)whole);
#else
    i32x16 is_number = whole == whole, is_normal = whole > -126.0f;
    u32x16 exponent = (u32x16)__builtin_convertvector(f32x16_select(is_number, whole, (f32x16){0}), i32x16) + 127;
    return f32x16_select(is_number, (f32x16)(is_normal & (i32x16)(p * (f32x16)(exponent << 23))), x);
#endif
#endif
}

/* Four words, four times. */
INLINE u32x16 repeat_4_words(const uint32_t *words) {
#if defined(__AVX512F__)
    return (u32x16)_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)words));
#else
    u32x16 repeated;
    for (int i = 0; i < 4; i++) memcpy((uint32_t *)&repeated + 4 * i, words, 4 * sizeof *words);
    return repeated;
#endif
}

/* Transposes four rows of 16 words, in quarters: quarter i of columns[k] is quarter k of rows[i]. */
INLINE void transpose_quarters(const u32x16 *rows, u32x16 *columns) {
#define FIRST(x, y) __builtin_shufflevector(x, y, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
#define LAST(x, y) __builtin_shufflevector(x, y, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31)
#define EVEN(x, y) __builtin_shufflevector(x, y, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27)
#define ODD(x, y) __builtin_shufflevector(x, y, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31)
    u32x16 first_ab = FIRST(rows[0], rows[1]), first_cd = FIRST(rows[2], rows[3]);
    u32x16 last_ab = LAST(rows[0], rows[1]), last_cd = LAST(rows[2], rows[3]);
    columns[0] = EVEN(first_ab, first_cd);
    columns[1] = ODD(first_ab, first_cd);
    columns[2] = EVEN(last_ab, last_cd);
    columns[3] = ODD(last_ab, last_cd);
#undef FIRST
#undef LAST
#undef EVEN
#undef ODD
}

/* Adds the four lanes of each quarter of four vectors, in order. Lane 4 * i + k of the result is the sum of quarter i
 * of sums[k]. */
INLINE f32x16 add_lanes_of_quarters(const f32x16 *sums) {
#define LOW(x, y) (f64x8)__builtin_shufflevector(x, y, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29)
#define HIGH(x, y) (f64x8)__builtin_shufflevector(x, y, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31)
#define EVEN(x, y) (f32x16)__builtin_shufflevector(x, y, 0, 8, 2, 10, 4, 12, 6, 14)
#define ODD(x, y) (f32x16)__builtin_shufflevector(x, y, 1, 9, 3, 11, 5, 13, 7, 15)
    f64x8 low_ab = LOW(sums[0], sums[1]), low_cd = LOW(sums[2], sums[3]);
    f64x8 high_ab = HIGH(sums[0], sums[1]), high_cd = HIGH(sums[2], sums[3]);
    return EVEN(low_ab, low_cd) + ODD(low_ab, low_cd) + EVEN(high_ab, high_cd) + ODD(high_ab, high_cd);
#undef LOW
#undef HIGH
#undef EVEN
#undef ODD
}

#endif
