/* See top_k.h. */
#include "sampling/top_k.h"

#include <stdlib.h>

#include "runtime/scratch.h"
#include "runtime/threads.h"

enum { BIN_BITS = 12, NUM_BINS = 1 << BIN_BITS, BLOCK = 16 * LANES };

/* Arguments of pagoda_top_k. */
typedef struct {
    float *scores;
    int64_t *indices;
    const float *rows;
    int64_t width, stride, k;
} top_k_call;

/* A key that at least k scores of a row reach, and few more. The row is divided into groups, a lane of 16 vectors each:
 * if k of their largest scores reach a key, then k scores do. */
static int32_t bound_of(int32_t *maxima, const float *row, int64_t width, int64_t k) {
    const int64_t num_groups = width / BLOCK * LANES;
    if (num_groups < k) return INT32_MIN;
    uint32_t counts[NUM_BINS] = {0};
    for (int64_t group = 0; group < num_groups; group += LANES, row += BLOCK) {
        i32x16 largest = keys_of(f32x16_load(row));
        for (int64_t i = LANES; i < BLOCK; i += LANES) {
            i32x16 keys = keys_of(f32x16_load(row + i)), larger = keys > largest;
            largest = (keys & larger) | (largest & ~larger);
        }
        memcpy(maxima + group, &largest, sizeof largest);
    }
    for (int64_t group = 0; group < num_groups; group++) counts[(maxima[group] >> (32 - BIN_BITS)) + NUM_BINS / 2]++;
    int32_t bin = NUM_BINS;
    for (int64_t above = 0; above < k;) above += counts[--bin];
    return (bin - NUM_BINS / 2) * (1 << (32 - BIN_BITS));
}

/* Writes the scores from a bound on, by index, and returns how many. */
static int64_t collect(ranked *found, const float *row, int64_t width, int32_t bound) {
    int64_t count = 0, i = 0;
    for (; i + LANES <= width; i += LANES) {
        i32x16 keys = keys_of(f32x16_load(row + i)), is_in = keys >= bound;
        if (!any_of(is_in)) continue;
        for (int lane = 0; lane < LANES; lane++) { /* each is written, and overwritten if it is not to stay */
            found[count] = ranked_from(keys[lane], i + lane);
            count -= is_in[lane];
        }
    }
    for (; i < width; i++) {
        int32_t key = key_of(row[i]);
        if (key >= bound) found[count++] = ranked_from(key, i);
    }
    return count;
}

int64_t pagoda_partition(ranked *items, int64_t low, int64_t high) {
    const ranked pivot = items[low + (high - low) / 2];
    int64_t i = low, j = high;
    while (i <= j) {
        while (items[i] > pivot) i++;
        while (items[j] < pivot) j--;
        if (i <= j) {
            ranked swapped = items[i];
            items[i++] = items[j];
            items[j--] = swapped;
        }
    }
    return i;
}

/* Moves the k highest items to the beginning, in any order (Hoare's FIND, 1961). */
static void move_highest_first(ranked *items, int64_t count, int64_t k) {
    int64_t low = 0, high = count - 1;
    while (low < high) {
        int64_t middle = pagoda_partition(items, low, high);
        if (k <= middle) high = middle - 1;
        else low = middle;
    }
}

int64_t pagoda_find_highest(ranked *found, const float *row, int64_t width, int64_t k, int32_t lowest) {
    int32_t bound = bound_of((int32_t *)found, row, width, k);
    int64_t count = collect(found, row, width, bound > lowest ? bound : lowest);
    if (count <= k) return count;
    move_highest_first(found, count, k);
    return k;
}

/* Compares two items for qsort. */
static int highest_first(const void *a, const void *b) {
    ranked x = *(const ranked *)a, y = *(const ranked *)b;
    return x < y ? 1 : x > y ? -1 : 0;
}

/* Finds the highest scores of one row. */
static void find_top_k(void *args, int64_t index) {
    const top_k_call *call = args;
    const int64_t k = call->k;
    ranked *found = pagoda_scratch(SCRATCH_TOP_K, (size_t)call->width * sizeof *found);
    pagoda_find_highest(found, call->rows + index * call->stride, call->width, k, INT32_MIN);
    qsort(found, (size_t)k, sizeof *found, highest_first);
    for (int64_t i = 0; i < k; i++) {
        call->scores[index * k + i] = score_of(found[i]);
        call->indices[index * k + i] = index_of(found[i]);
    }
}

void pagoda_top_k(float *scores, int64_t *indices, const float *rows, int64_t num_rows, int64_t width, int64_t stride,
                  int64_t k) {
    top_k_call call = {scores, indices, rows, width, stride, k};
    pagoda_parallel_for(num_rows, find_top_k, &call);
}
