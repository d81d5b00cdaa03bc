/* RMSNorm (Zhang and Sennrich, 2019). */
#ifndef PAGODA_RMS_NORM_H
#define PAGODA_RMS_NORM_H

#include <math.h>

#include "runtime/vector.h"

/* The factor that RMSNorm multiplies a row of float32 or bfloat16 by, before its weights. */
static float rms_norm_factor(const void *source, bool is_bf16, int64_t width, float eps) {
    f32x16 squares = {0};
    for (int64_t i = 0; i < width; i += LANES) {
        f32x16 x = load_some(source, is_bf16, i, width - i);
        squares = f32x16_fma(x, x, squares);
    }
    return 1 / sqrtf(f32x16_sum(squares) / (float)width + eps);
}

#endif
