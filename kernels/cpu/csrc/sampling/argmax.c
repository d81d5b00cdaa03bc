/* See argmax.h. */
#include "sampling/argmax.h"

#include "runtime/maximum.h"
#include "runtime/threads.h"

enum { UNROLLED = 4 }; /* independent maxima, so that none waits for another */

/* Arguments of pagoda_argmax. */
typedef struct {
    float *values;
    int64_t *indices;
    const float *rows;
    int64_t width, stride;
} argmax_call;

/* Compares a row's largest element so far with another one, which wins if it is a NaN. */
static void take(argmax_call *call, int64_t row, float value, int64_t index) {
    float best = call->values[row];
    if (value > best || (value == best && index < call->indices[row]) || value != value) {
        call->values[row] = value;
        call->indices[row] = index;
    }
}

/* Finds the largest element of one row. */
static void find_in_row(void *args, int64_t row) {
    argmax_call *call = args;
    const float *elements = call->rows + row * call->stride;
    const int64_t step = UNROLLED * LANES, whole = call->width / step * step;
    running_maximum best[UNROLLED];
    i32x16 where[UNROLLED]; /* the number of the step */
    for (int u = 0; u < UNROLLED; u++) {
        best[u] = maximum_from(-INFINITY);
        where[u] = (i32x16){0};
    }
    for (int64_t i = 0; i < whole; i += step)
        for (int u = 0; u < UNROLLED; u++) {
            f32x16 x = f32x16_load(elements + i + u * LANES);
            i32x16 larger = x > best[u].largest;
            where[u] = (larger & (int32_t)(i / step)) | (~larger & where[u]);
            best[u].is_number &= x == x;
            best[u].largest = f32x16_select(larger, x, best[u].largest); /* keeps the first of 0 and -0 */
        }
    call->values[row] = elements[0];
    call->indices[row] = 0;
    for (int u = 0; u < UNROLLED && whole; u++) {
        for (int lane = 0; lane < LANES; lane++)
            take(call, row, best[u].largest[lane], where[u][lane] * step + u * LANES + lane);
        if (!all_numbers(best[u].is_number)) take(call, row, NAN, 0);
    }
    for (int64_t i = whole; i < call->width; i++) take(call, row, elements[i], i);
    if (elements[0] != elements[0]) call->values[row] = elements[0];
}

void pagoda_argmax(float *values, int64_t *indices, const float *rows, int64_t num_rows, int64_t width,
                   int64_t stride) {
    argmax_call call = {values, indices, rows, width, stride};
    pagoda_parallel_for(num_rows, find_in_row, &call);
}
