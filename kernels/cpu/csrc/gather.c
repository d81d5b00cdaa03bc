/* See gather.h. */
#include "gather.h"

#include "threads.h"
#include "vector.h"

/* Arguments of pagoda_gather_rows. */
typedef struct {
    float *output;
    const void *table;
    const int64_t *rows;
    int32_t table_is_bf16, width;
    float multiplier;
} gather_call;

/* Copies one row. */
static void gather_row(void *args, int64_t index) {
    const gather_call *call = args;
    int64_t width = call->width, first = call->rows[index] * width;
    for (int64_t i = 0; i < width; i += LANES)
        store_some(call->output, false, index * width + i,
                   load_some(call->table, call->table_is_bf16, first + i, width - i) * call->multiplier, width - i);
}

int32_t pagoda_gather_rows(float *output, const void *table, int32_t table_is_bf16, int64_t table_rows,
                           const int64_t *rows, int32_t num_rows, int32_t width, float multiplier) {
    gather_call call = {output, table, rows, table_is_bf16, width, multiplier};
    for (int64_t i = 0; i < num_rows; i++)
        if (rows[i] < 0 || rows[i] >= table_rows) return 0;
    pagoda_for_each_row(num_rows, (int64_t)num_rows * width, gather_row, &call);
    return 1;
}
