/* See sampling.h. */
#include "sampling.h"

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>

#include "scratch.h"
#include "threads.h"
#include "vector.h"

/* --- the highest scores ---------------------------------------------------------------------------------------- */

enum { BIN_BITS = 12, NUM_BINS = 1 << BIN_BITS };

typedef struct {
    float *scores;
    int64_t *places;
    float *log_totals;
    const float *rows, *temperatures;
    int64_t width, stride, k;
} top_k_call;

/* Integers in the order of the floats. */
INLINE uint32_t ordered(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
INLINE float unordered(uint32_t key) {
    uint32_t bits = key & 0x80000000u ? key & 0x7fffffffu : ~key;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The largest element, or NaN if there is one. */
static float largest_of(const float *row, int64_t width) {
    f32x16 largest = f32x16_set(-INFINITY);
    i32x16 is_number = ~(i32x16){0};
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        f32x16 x = f32x16_load(row + i);
        is_number &= x == x;
        largest = f32x16_max(largest, x);
    }
    float most = f32x16_largest(largest);
    for (int lane = 0; lane < LANES; lane++) most = is_number[lane] ? most : NAN;
    for (; i < width; i++) most = row[i] > most || row[i] != row[i] ? row[i] : most;
    return most;
}

/* Writes (row - largest) / temperature and returns the logarithm of the sum of its exponentials. */
static float scale_row(float *scaled, const float *row, int64_t width, float temperature) {
    float largest = largest_of(row, width);
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

/* The lowest bin such that it and those above hold at least k keys. */
static uint32_t lowest_bin(const float *row, int64_t width, int64_t k) {
    uint32_t counts[NUM_BINS] = {0};
    for (int64_t i = 0; i < width; i++) counts[ordered(row[i]) >> (32 - BIN_BITS)]++;
    uint32_t bin = NUM_BINS;
    for (int64_t above = 0; above < k;) above += counts[--bin];
    return bin;
}

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

static void find_top_k(void *args, int64_t index) {
    const top_k_call *call = args;
    const int64_t width = call->width, k = call->k;
    const float *row = call->rows + index * call->stride;
    /* A key and its place in one integer, so that of equal keys the first is the highest. */
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
        call->places[index * k + i] = (uint32_t)~found[i];
    }
}

void pagoda_top_k(float *scores, int64_t *places, float *log_totals, const float *rows, const float *temperatures,
                  int64_t num_rows, int64_t width, int64_t stride, int64_t k) {
    top_k_call call = {scores, places, log_totals, rows, temperatures, width, stride, k};
    pagoda_parallel_for(num_rows, find_top_k, &call);
}

/* --- draws ----------------------------------------------------------------------------------------------------- */

typedef struct {
    float *values;
    int64_t *tokens;
    const float *rows, *temperatures, *floors;
    const int32_t *keys;
    int64_t width, stride;
} draw_call;

/* ln x for normal x > 0: x = 2^e m with m in [sqrt(1/2), sqrt(2)), and the polynomial of Cephes' logf (Moshier). */
INLINE f32x16 log_of(f32x16 x) {
    i32x16 bits = (i32x16)x;
    i32x16 exponent = (bits - 0x3f3504f3) >> 23;
    f32x16 m = (f32x16)(bits - (exponent << 23)) - 1, e = __builtin_convertvector(exponent, f32x16), z = m * m;
    f32x16 p = f32x16_set(7.0376836292e-2f);
    p = p * m - 1.1514610310e-1f;
    p = p * m + 1.1676998740e-1f;
    p = p * m - 1.2420140846e-1f;
    p = p * m + 1.4249322787e-1f;
    p = p * m - 1.6668057665e-1f;
    p = p * m + 2.0000714765e-1f;
    p = p * m - 2.4999993993e-1f;
    p = p * m + 3.3333331174e-1f;
    return e * 0.693359375f + (m + (p * m * z - e * 2.12194440e-4f - 0.5f * z));
}

/* Standard Gumbel noise of 16 tokens: MurmurHash3's finaliser, keyed before and within, as in noise.py. */
INLINE f32x16 gumbel(u32x16 tokens, const int32_t keys[2]) {
    u32x16 x = tokens * 0x9E3779B1u + (uint32_t)keys[0];
    x = (x ^ (x >> 16)) * 0x85EBCA6Bu + (uint32_t)keys[1];
    x = (x ^ (x >> 13)) * 0xC2B2AE35u;
    x ^= x >> 16;
    f32x16 uniform = (__builtin_convertvector((i32x16)(x >> 9), f32x16) + 0.5f) * 0x1p-23f;
    return -log_of(-log_of(uniform));
}

static void draw_row(void *args, int64_t index) {
    const draw_call *call = args;
    const float *row = call->rows + index * call->stride;
    const float largest = largest_of(row, call->width), temperature = call->temperatures[index];
    const float floor = call->floors ? call->floors[index] : -INFINITY;
    const i32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    f32x16 best = f32x16_set(-INFINITY);
    i32x16 where = lanes;
    for (int64_t i = 0; i < call->width; i += LANES) {
        f32x16 logits = f32x16_set(-INFINITY);
        if (i + LANES <= call->width) logits = f32x16_load(row + i);
        else memcpy(&logits, row + i, (size_t)(call->width - i) * sizeof *row);
        f32x16 scaled = (logits - largest) / temperature;
        i32x16 tokens = lanes + (int32_t)i;
        scaled = f32x16_select(scaled < floor, f32x16_set(-INFINITY), scaled);
        f32x16 noisy = scaled + gumbel((u32x16)tokens, call->keys + 2 * index);
        i32x16 better = noisy > best;
        best = f32x16_select(better, noisy, best);
        where = (better & tokens) | (~better & where);
    }
    call->values[index] = -INFINITY;
    call->tokens[index] = 0;
    for (int lane = 0; lane < LANES; lane++) {
        bool is_first = best[lane] == call->values[index] && where[lane] < call->tokens[index];
        if (best[lane] > call->values[index] || is_first) {
            call->values[index] = best[lane];
            call->tokens[index] = where[lane];
        }
    }
    if (largest != largest) call->values[index] = NAN;
}

void pagoda_draw(float *values, int64_t *tokens, const float *rows, const float *temperatures, const float *floors,
                 const int32_t *keys, int64_t num_rows, int64_t width, int64_t stride) {
    draw_call call = {values, tokens, rows, temperatures, floors, keys, width, stride};
    pagoda_parallel_for(num_rows, draw_row, &call);
}
