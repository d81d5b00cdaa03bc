/* The largest element of a row, or NaN if the row contains one: a row that contains a NaN must not look sound. */
#ifndef PAGODA_MAXIMUM_H
#define PAGODA_MAXIMUM_H

#include <math.h>

#include "runtime/vector.h"

/* A maximum of vectors so far. Vector maxima drop NaNs, so a mask keeps track of them. */
typedef struct {
    f32x16 largest;
    i32x16 is_number; /* lane by lane: no NaN so far */
} running_maximum;

/* A maximum that is at least `lowest`. */
INLINE running_maximum maximum_from(float lowest) {
    return (running_maximum){.largest = f32x16_set(lowest), .is_number = ~(i32x16){0}};
}

/* Takes 16 more elements into account. */
INLINE void maximum_add(running_maximum *maximum, f32x16 x) {
    maximum->is_number &= x == x;
    maximum->largest = f32x16_max(maximum->largest, x);
}

/* Whether no lane has seen a NaN. */
INLINE bool all_numbers(i32x16 is_number) {
    int32_t all = -1;
    for (int lane = 0; lane < LANES; lane++) all &= is_number[lane];
    return all != 0;
}

/* The largest element of all lanes, or NaN. */
INLINE float maximum_of(const running_maximum *maximum) {
    return all_numbers(maximum->is_number) ? f32x16_largest(maximum->largest) : NAN;
}

/* The largest element of a row, or NaN. */
INLINE float largest_of_row(const float *row, int64_t width) {
    running_maximum maximum = maximum_from(-INFINITY);
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) maximum_add(&maximum, f32x16_load(row + i));
    float largest = maximum_of(&maximum);
    for (; i < width; i++) largest = row[i] > largest || row[i] != row[i] ? row[i] : largest;
    return largest;
}

/* Where a value is first in a row of whole vectors, or 0 if it is nowhere. */
INLINE int32_t first_index_of(const float *row, float value, int64_t width) {
    for (int64_t i = 0; i < width; i += LANES) {
        i32x16 is_equal = f32x16_load(row + i) == f32x16_set(value);
        if (!any_of(is_equal)) continue;
        for (int64_t lane = 0; lane < LANES; lane++)
            if (is_equal[lane]) return (int32_t)(i + lane);
    }
    return 0;
}

/* The largest absolute value of a row of float32 or bfloat16, or NaN. */
INLINE float largest_absolute_of_row(const void *row, bool is_bf16, int64_t width) {
    running_maximum maximum = maximum_from(0);
    for (int64_t i = 0; i < width; i += LANES) {
        f32x16 x = load_some(row, is_bf16, i, width - i);
        maximum_add(&maximum, f32x16_max(x, -x));
    }
    return maximum_of(&maximum);
}

#endif
