/* The rotation of one row by the angles of a position (RoPE, Su et al., 2021, in the half-split layout). */
#ifndef PAGODA_ROTATE_H
#define PAGODA_ROTATE_H

#include "runtime/vector.h"

/* The cosines and sines of a position in a table [positions, 2, width / 2]; NULL if that is: nothing is rotated. */
static inline const float *angles_of(const float *rope, int64_t width, int64_t position) {
    return rope ? rope + position * width : NULL;
}

/* Multiplies a row of `width` elements by `factor`, and by `norm` unless it is NULL, and rotates it into element `at` of
 * `to`, by `cosines` [width / 2] and the sines after them; NULL: it is not rotated. */
static inline void rotate_row(const float *row, int64_t width, const float *norm, float factor, const float *cosines,
                              void *to, bool is_bf16, int64_t at) {
    const int64_t half = width / 2;
    for (int64_t i = 0; i < half; i += LANES) {
        const int64_t count = half - i;
        f32x16 first = load_some(row, false, i, count), second = load_some(row, false, half + i, count);
        f32x16 cosine = f32x16_set(1), sine = f32x16_set(0);
        if (cosines) {
            cosine = load_some(cosines, false, i, count);
            sine = load_some(cosines, false, half + i, count);
        }
        if (norm) {
            first *= factor * load_some(norm, false, i, count);
            second *= factor * load_some(norm, false, half + i, count);
        } else {
            first *= factor;
            second *= factor;
        }
        store_some(to, is_bf16, at + i, first * cosine - second * sine, count);
        store_some(to, is_bf16, at + half + i, second * cosine + first * sine, count);
    }
}

#endif
