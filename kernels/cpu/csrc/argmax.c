/* See argmax.h. */
#include "argmax.h"

#include <math.h>

#include "threads.h"
#include "vector.h"

enum { UNROLLED = 4 }; /* independent maxima, so that none waits for the one before */

typedef struct {
    float *values;
    int64_t *indices;
    const float *rows;
    int64_t width, stride;
} argmax_call;

static void take(argmax_call *call, int64_t row, float value, int64_t index) {
    float best = call->values[row];
    if (value > best || (value == best && index < call->indices[row]) || value != value) {
        call->values[row] = value;
        call->indices[row] = index;
    }
}

static void find_in_row(void *args, int64_t row) {
    argmax_call *call = args;
    const float *elements = call->rows + row * call->stride;
    const int64_t step = UNROLLED * LANES, whole = call->width / step * step;
    f32x16 best[UNROLLED];
    i32x16 where[UNROLLED], is_number[UNROLLED]; /* where: the number of the step */
    for (int u = 0; u < UNROLLED; u++) {
        best[u] = f32x16_set(-INFINITY);
        where[u] = (i32x16){0};
        is_number[u] = ~(i32x16){0};
    }
    for (int64_t i = 0; i < whole; i += step)
        for (int u = 0; u < UNROLLED; u++) {
            f32x16 x = f32x16_load(elements + i + u * LANES);
            i32x16 larger = x > best[u];
            is_number[u] &= x == x;
            best[u] = f32x16_select(larger, x, best[u]);
            where[u] = (larger & (int32_t)(i / step)) | (~larger & where[u]);
        }
    call->values[row] = elements[0];
    call->indices[row] = 0;
    for (int u = 0; u < UNROLLED && whole; u++)
        for (int lane = 0; lane < LANES; lane++) {
            take(call, row, best[u][lane], where[u][lane] * step + u * LANES + lane);
            if (!is_number[u][lane]) take(call, row, NAN, 0);
        }
    for (int64_t i = whole; i < call->width; i++) take(call, row, elements[i], i);
    if (elements[0] != elements[0]) call->values[row] = elements[0];
}

void pagoda_argmax(float *values, int64_t *indices, const float *rows, int64_t num_rows, int64_t width,
                   int64_t stride) {
    argmax_call call = {values, indices, rows, width, stride};
    pagoda_parallel_for(num_rows, find_in_row, &call);
}
