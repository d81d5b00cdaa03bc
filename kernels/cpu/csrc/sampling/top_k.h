/* The highest scores of a row, without sorting the row. */
#ifndef PAGODA_TOP_K_H
#define PAGODA_TOP_K_H

#include "runtime/vector.h"

/* The k highest scores of each row [num_rows, width], `stride` elements apart, in order, with their indices; equal
 * scores are ordered by index. k <= width < 2^31. */
void pagoda_top_k(float *scores, int64_t *indices, const float *rows, int64_t num_rows, int64_t width, int64_t stride,
                  int64_t k);

/* A key is an integer for each float, in the order of the floats; a negative NaN comes before and another after all. */
INLINE i32x16 keys_of(f32x16 values) {
    i32x16 bits = (i32x16)values;
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

/* The key of one float. */
INLINE int32_t key_of(float value) { return keys_of(f32x16_set(value))[0]; }

/* A score's key in the upper half, the complement of its index in the lower one: of equal scores the first is the
 * higher. */
typedef int64_t ranked;
INLINE ranked ranked_from(int32_t key, int64_t index) { return (int64_t)key * ((int64_t)1 << 32) | (uint32_t)~index; }
INLINE int64_t index_of(ranked item) { return (uint32_t)~item; }
INLINE float score_of(ranked item) {
    int32_t key = (int32_t)(item >> 32), bits = key ^ ((key >> 31) & 0x7fffffff);
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Writes the k highest scores of a row in any order, or fewer if fewer have at least the key `lowest`, and returns how
 * many. `found` has room for all scores: [width]. */
int64_t pagoda_find_highest(ranked *found, const float *row, int64_t width, int64_t k, int32_t lowest);

/* Moves high ones of the items from `low` to `high`, which all differ, before the others, and returns where those
 * begin: low < result <= high. */
int64_t pagoda_partition(ranked *items, int64_t low, int64_t high);

#endif
