/* See top_k.h. */
#include "top_k.h"

#include <stdlib.h>

#include "maximum.h"
#include "scratch.h"
#include "threads.h"

enum { BIN_BITS = 12, NUM_BINS = 1 << BIN_BITS };

/* Arguments of pagoda_top_k. */
typedef struct {
    float *scores;
    int64_t *indices;
    float *log_totals;
    const float *rows, *temperatures;
    int64_t width, stride, k;
} top_k_call;

/* An integer for each float, in the order of the floats. */
INLINE uint32_t ordered(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/* The float of such an integer. */
INLINE float unordered(uint32_t key) {
    uint32_t bits = key & 0x80000000u ? key & 0x7fffffffu : ~key;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Writes (row - largest) / temperature and returns the logarithm of the sum of its exponentials. */
static float scale_row(float *scaled, const float *row, int64_t width, float temperature) {
    float largest = largest_of_row(row, width);
    f32x16 sum = {0};
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        f32x16 x = (f32x16_load(row + i) - largest) / temperature;
        f32x16_store(scaled + i, x);
        sum += f32x16_exp(x);
    }
    float total = f32x16_sum(sum);
    for (; i < width; i++) {
        scaled[i] = (row[i] - largest) / temperature;
        total += expf(scaled[i]);
    }
    return logf(total);
}

/* The highest bin such that it and those above hold at least k keys. */
static uint32_t lowest_bin(const float *row, int64_t width, int64_t k) {
    uint32_t counts[NUM_BINS] = {0};
    for (int64_t i = 0; i < width; i++) counts[ordered(row[i]) >> (32 - BIN_BITS)]++;
    uint32_t bin = NUM_BINS;
    for (int64_t above = 0; above < k;) above += counts[--bin];
    return bin;
}

/* Compares two keys for qsort. */
static int highest_first(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? 1 : x > y ? -1 : 0;
}

/* Moves the k highest of `keys` to its beginning, in any order (Hoare's FIND, 1961). */
static void move_highest_first(uint64_t *keys, int64_t count, int64_t k) {
    int64_t low = 0, high = count - 1;
    while (low < high) {
        uint64_t pivot = keys[low + (high - low) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (keys[i] > pivot) i++;
            while (keys[j] < pivot) j--;
            if (i <= j) {
                uint64_t swapped = keys[i];
                keys[i++] = keys[j];
                keys[j--] = swapped;
            }
        }
        if (k - 1 <= j) high = j;
        else if (k - 1 >= i) low = i;
        else return;
    }
}

/* Finds the highest scores of one row. */
static void find_top_k(void *args, int64_t index) {
    const top_k_call *call = args;
    const int64_t width = call->width, k = call->k;
    const float *row = call->rows + index * call->stride;
    /* A key and its index in one integer, so that of equal keys the first is the highest. */
    uint64_t *found = pagoda_scratch(SCRATCH_TOP_K, (size_t)width * (sizeof *found + sizeof(float)));
    if (call->temperatures) {
        float *scaled = (float *)(found + width);
        call->log_totals[index] = scale_row(scaled, row, width, call->temperatures[index]);
        row = scaled;
    }
    uint32_t lowest = lowest_bin(row, width, k) << (32 - BIN_BITS);
    int64_t count = 0;
    for (int64_t i = 0; i < width; i++) {
        uint32_t key = ordered(row[i]);
        found[count] = (uint64_t)key << 32 | (uint32_t)~i;
        count += key >= lowest;
    }
    move_highest_first(found, count, k);
    qsort(found, (size_t)k, sizeof *found, highest_first);
    for (int64_t i = 0; i < k; i++) {
        call->scores[index * k + i] = unordered((uint32_t)(found[i] >> 32));
        call->indices[index * k + i] = (uint32_t)~found[i];
    }
}

void pagoda_top_k(float *scores, int64_t *indices, float *log_totals, const float *rows, const float *temperatures,
                  int64_t num_rows, int64_t width, int64_t stride, int64_t k) {
    top_k_call call = {scores, indices, log_totals, rows, temperatures, width, stride, k};
    pagoda_parallel_for(num_rows, find_top_k, &call);
}
