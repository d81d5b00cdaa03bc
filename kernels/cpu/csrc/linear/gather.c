/* See gather.h. */
#include "linear/gather.h"

#include "runtime/scratch.h"
#include "runtime/threads.h"
#include "runtime/vector.h"

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

/* Arguments of pagoda_gather_packed_rows. */
typedef struct {
    float *output;
    const pagoda_weight *table;
    const int64_t *rows;
    float multiplier;
} packed_call;

/* Copies one row, which is a lane of a panel. */
static void gather_packed_row(void *args, int64_t index) {
    const packed_call *call = args;
    const pagoda_weight *table = call->table;
    const int64_t width = table->in_features, num_words = pagoda_num_words(table->kind, table->in_features);
    const int64_t row = call->rows[index];
    if (table->coded) {
        const pagoda_coded_panels *group = &table->coded[row / (PANELS_OF_GROUP * LANES)];
        const int64_t panel_bytes = pagoda_layout_of_panel(group->format, width).panel_bytes;
        const int64_t start = group->start + row / LANES % PANELS_OF_GROUP * panel_bytes;
        const uint8_t *panel = (const uint8_t *)table->words + start;
        const float multiplier = call->multiplier * (table->scales ? table->scales[row] : 1);
        float *to = call->output + index * width;
        float *decoded = table->order ? pagoda_scratch(SCRATCH_ROW, (size_t)width * sizeof *decoded) : to;
        pagoda_decode_output(decoded, panel, row % LANES, group->format, width, multiplier);
        for (int64_t i = 0; table->order && i < width; i++) to[table->order[i]] = decoded[i];
        return;
    }
    const uint32_t *lane = table->words + row / LANES * num_words * LANES + row % LANES;
    float *output = call->output + index * width;
    const int64_t per_word = table->kind == PAGODA_F32 ? 1 : 2;
    for (int64_t k = 0; k * per_word < width; k++) {
        uint32_t word = lane[k * LANES];
        if (table->kind == PAGODA_F32) {
            float value;
            memcpy(&value, &word, sizeof value);
            output[k] = value * call->multiplier;
        } else {
            output[2 * k] = bf16_to_float((bf16)word) * call->multiplier;
            if (2 * k + 1 < width) output[2 * k + 1] = bf16_to_float((bf16)(word >> 16)) * call->multiplier;
        }
    }
}

/* Whether a table has all the rows. */
static bool has_rows(int64_t table_rows, const int64_t *rows, int32_t num_rows) {
    for (int64_t i = 0; i < num_rows; i++)
        if (rows[i] < 0 || rows[i] >= table_rows) return false;
    return true;
}

int32_t pagoda_gather_packed_rows(float *output, const pagoda_weight *table, const int64_t *rows, int32_t num_rows,
                                  float multiplier) {
    packed_call call = {output, table, rows, multiplier};
    if (!has_rows(table->out_features, rows, num_rows)) return 0;
    pagoda_for_each_row(num_rows, (int64_t)num_rows * table->in_features * LANES, gather_packed_row, &call);
    return 1;
}

int32_t pagoda_gather_rows(float *output, const void *table, int32_t table_is_bf16, int64_t table_rows,
                           const int64_t *rows, int32_t num_rows, int32_t width, float multiplier) {
    gather_call call = {output, table, rows, table_is_bf16, width, multiplier};
    if (!has_rows(table_rows, rows, num_rows)) return 0;
    pagoda_for_each_row(num_rows, (int64_t)num_rows * width, gather_row, &call);
    return 1;
}
