/* The inner loops of linear.c where a register holds half a panel, as AVX2's do. GCC keeps vectors that are wider than a
 * register in memory, and the loops of linear_tiles.h are ten times slower then. A sum's products are added in the same
 * order.
 *
 * Sums of six rows with one panel, or of three with two, take twelve of the 16 registers. */
#ifndef PAGODA_LINEAR_TILES_AVX2_H
#define PAGODA_LINEAR_TILES_AVX2_H

#include "linear/linear.h"
#include "runtime/vector.h"

enum {
    MOST_ROWS_PER_PART = 6,
    MOST_ROWS_UNDIVIDED = MOST_ROWS_PER_PART,
    WORDS_AHEAD = 64, /* of weights, fetched to the second cache */
};

/* The floats in eight words: one each in float32, and in bfloat16 one in each of two passes. */
INLINE __m256 f32_floats(__m256i words, int pass) { return (void)pass, _mm256_castsi256_ps(words); }
INLINE __m256 bf16_floats(__m256i words, int pass) {
    const __m256i upper = _mm256_set1_epi32((int)0xffff0000);
    return _mm256_castsi256_ps(pass ? _mm256_and_si256(words, upper) : _mm256_slli_epi32(words, 16));
}

/* Arguments and result are those of DEFINE_TILE in linear_tiles.h, with the passes over a word in place of a product. */
#define DEFINE_TILE(NAME, FLOATS, PASSES, ROWS, PANELS, FETCHES)                                                      \
    static void NAME##_##ROWS(void *sums, const uint32_t *rows, int64_t row_step, const uint32_t *weights,            \
                              int64_t num_words, const uint32_t *fetched) {                                           \
        __m256 sum[PANELS][ROWS][2];                                                                                  \
        _Pragma("GCC unroll 16") for (int p = 0; p < PANELS; p++)                                                     \
            _Pragma("GCC unroll 16") for (int r = 0; r < ROWS; r++)                                                   \
                sum[p][r][0] = sum[p][r][1] = _mm256_setzero_ps();                                                    \
        const int64_t stride = num_words * LANES;                                                                     \
        for (int64_t k = 0; k < num_words; k++, rows += row_step, weights += LANES, fetched += LANES) {               \
            if (FETCHES) __builtin_prefetch(fetched, 0, 2);                                                           \
            _Pragma("GCC unroll 16") for (int p = 0; p < PANELS; p++) {                                               \
                const __m256i *weight = (const __m256i *)(weights + p * stride);                                      \
                __builtin_prefetch(weights + p * stride + WORDS_AHEAD * LANES, 0, 2);                                 \
                _Pragma("GCC unroll 2") for (int pass = 0; pass < PASSES; pass++) {                                   \
                    const __m256 left = FLOATS(_mm256_loadu_si256(weight), pass);                                     \
                    const __m256 right = FLOATS(_mm256_loadu_si256(weight + 1), pass);                                \
                    _Pragma("GCC unroll 16") for (int r = 0; r < ROWS; r++) {                                         \
                        const __m256 row = FLOATS(_mm256_set1_epi32((int)rows[r]), pass);                             \
                        sum[p][r][0] = _mm256_fmadd_ps(row, left, sum[p][r][0]);                                      \
                        sum[p][r][1] = _mm256_fmadd_ps(row, right, sum[p][r][1]);                                     \
                    }                                                                                                 \
                }                                                                                                     \
            }                                                                                                         \
        }                                                                                                             \
        _Pragma("GCC unroll 16") for (int p = 0; p < PANELS; p++)                                                     \
            _Pragma("GCC unroll 16") for (int r = 0; r < ROWS; r++)                                                   \
                memcpy((float *)sums + (p * row_step + r) * LANES, sum[p][r], sizeof sum[p][r]);                      \
    }

#define DEFINE_TILES(NAME, FLOATS, PASSES, FETCHES)                                                                   \
    DEFINE_TILE(NAME, FLOATS, PASSES, 1, 4, FETCHES)                                                                  \
    DEFINE_TILE(NAME, FLOATS, PASSES, 2, 2, FETCHES)                                                                  \
    DEFINE_TILE(NAME, FLOATS, PASSES, 3, 2, FETCHES)                                                                  \
    DEFINE_TILE(NAME, FLOATS, PASSES, 4, 1, FETCHES)                                                                  \
    DEFINE_TILE(NAME, FLOATS, PASSES, 5, 1, FETCHES)                                                                  \
    DEFINE_TILE(NAME, FLOATS, PASSES, 6, 1, FETCHES)                                                                  \
    static const tile_function NAME[MOST_ROWS_PER_PART + 1] = {NULL,     NAME##_1, NAME##_2, NAME##_3,                \
                                                               NAME##_4, NAME##_5, NAME##_6};

/* Panels whose sums with num_rows rows fit into the registers. */
static int panels_at_once(int num_rows) { return num_rows == 1 ? 4 : num_rows <= 3 ? 2 : 1; }

DEFINE_TILES(f32_tiles, f32_floats, 1, 0)
DEFINE_TILES(f32_parts, f32_floats, 1, 1)
DEFINE_TILES(bf16_tiles, bf16_floats, 2, 0)
DEFINE_TILES(bf16_parts, bf16_floats, 2, 1)

#endif
