/* Attention over a cache of bfloat16 with AMX's tiles (runtime/tiles.h): what few rows and many have in common.
 *
 * A group is 16 of a tile's keys. A register multiplies a group's keys, as they lie in memory, with 16 rows' queries:
 *
 *     products [16 keys, 16 rows]  +=  keys [16 keys, 16 words]  x  queries [16 words, 16 rows]
 *
 * A word of weights is a key of one group and the key 16 after it. So a product over 32 keys adds those of the first 16
 * in order, those of the others in order, and then both sums. All arithmetic treats denormals as zeros, as AMX's does:
 * some of it adds what AMX would.
 */
#ifndef PAGODA_ATTENTION_AMX_H
#define PAGODA_ATTENTION_AMX_H

#include "attention/attention_item.h"
#include "runtime/tiles.h"

#if PAGODA_HAS_TILES
enum { GROUPS = KEYS_PER_TILE / TILE_ROWS, TILE_NUMBERS = TILE_ROWS * TILE_WORDS, DENORMALS_ARE_ZERO = 0x8040 };

/* Where the rows of each group of keys are. */
typedef struct {
    const char *rows[GROUPS];
    size_t strides[GROUPS];
} key_groups;

/* 2^x for a weight, to 2^-18: 2^floor(x) times a polynomial of the rest, the one of least relative error. */
INLINE f32x16 exp2_of_score(f32x16 x) {
    const float coefficients[] = {0.013534167781f, 0.052011460066f, 0.24144275486f, 0.69300383329f, 1.0000026226f};
    const f32x16 rest = (f32x16)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    f32x16 p = f32x16_set(coefficients[0]);
    for (int i = 1; i < 5; i++) p = f32x16_fma(p, rest, f32x16_set(coefficients[i]));
    return (f32x16)_mm512_scalef_ps((__m512)p, (__m512)x);
}

/* The score that a tile's weights are relative to. */
INLINE f32x16 score_of_weight_1(f32x16 largest) {
    return f32x16_select(largest == f32x16_set(-INFINITY), (f32x16){0}, largest);
}

/* Transposes the words of up to 16 rows, [16 words, 16 rows] a register. Rows that do not exist are zero. */
INLINE void pack_queries(uint32_t *to, int words, const char *const *rows, int num_rows) {
    for (int word = 0; word < words; word += TILE_WORDS, to += TILE_NUMBERS) {
        u32x16 of_rows[TILE_ROWS] = {0};
        for (int row = 0; row < num_rows; row++) of_rows[row] = load_some_words(BFLOAT16, rows[row], word, words);
        store_transposed(to, TILE_WORDS, of_rows);
    }
}

/* Copies rows of the cache, `stride` words apart, and zeros after their last word. */
INLINE void copy_cache_rows(uint32_t *to, size_t stride, const char *cache, const size_t *offsets, int num_rows,
                            int words) {
    for (int row = 0; row < num_rows; row++, to += stride)
        for (int word = 0; word < words; word += LANES) {
            const u32x16 some = load_some_words(BFLOAT16, cache + offsets[row], word, words);
            memcpy(to + word, &some, sizeof some);
        }
}

/* Prefetches a line of each key of a group. */
INLINE void fetch_group(const char *cache, const size_t *offsets, size_t at) {
    for (int key = 0; key < TILE_ROWS; key++) fetch_ahead(cache + offsets[key] + at, 64);
}

/* products [groups, 16 keys, 16 rows]. What is at `offsets` of `fetched`, if anything, is prefetched meanwhile. */
INLINE void multiply_groups(const int groups, const key_groups *keys, const uint32_t *query, int words, float *products,
                            const char *fetched, const size_t *offsets) {
#define MULTIPLY_GROUP(GROUP, SUMS, ROWS)                                                                         \
    if (groups > GROUP) {                                                                                         \
        TILE_LOAD(ROWS, keys->rows[GROUP] + at, keys->strides[GROUP]);                                            \
        TILE_DOT_BF16(SUMS, ROWS, WEIGHTS_0);                                                                     \
        if (fetched && word + TILE_WORDS < words) fetch_group(fetched, offsets + GROUP * TILE_ROWS, at);           \
    }
    TILE_ZERO(SUMS_00);
    TILE_ZERO(SUMS_01);
    TILE_ZERO(SUMS_10);
    TILE_ZERO(SUMS_11);
    for (int word = 0; word < words; word += TILE_WORDS, query += TILE_NUMBERS) {
        const size_t at = (size_t)word * sizeof(uint32_t);
        TILE_LOAD(WEIGHTS_0, query, TILE_STRIDE);
        MULTIPLY_GROUP(0, SUMS_00, ROWS_0)
        MULTIPLY_GROUP(1, SUMS_01, ROWS_1)
        MULTIPLY_GROUP(2, SUMS_10, ROWS_0)
        MULTIPLY_GROUP(3, SUMS_11, ROWS_1)
    }
#undef MULTIPLY_GROUP
    TILE_STORE(SUMS_00, products, TILE_STRIDE);
    if (groups > 1) TILE_STORE(SUMS_01, products + TILE_NUMBERS, TILE_STRIDE);
    if (groups > 2) TILE_STORE(SUMS_10, products + 2 * TILE_NUMBERS, TILE_STRIDE);
    if (groups > 3) TILE_STORE(SUMS_11, products + 3 * TILE_NUMBERS, TILE_STRIDE);
}

/* Groups that hold keys before `end`. */
INLINE int groups_before(int end) { return (end + TILE_ROWS - 1) / TILE_ROWS; }

/* Replaces products by what a soft-cap scales. */
static __attribute__((noinline, unused)) void cap_groups(float *products, int groups, float scale) {
    for (float *at = products; at < products + groups * TILE_NUMBERS; at += LANES)
        f32x16_store(at, f32x16_tanh(f32x16_load(at) * scale));
}
#endif

#endif
