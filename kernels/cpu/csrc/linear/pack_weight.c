/* See pack_weight.h. */
#include "linear/pack_weight.h"

#include "runtime/integers.h"
#include "runtime/maximum.h"
#include "runtime/threads.h"

/* Arguments of pagoda_pack_weight. */
typedef struct {
    uint32_t *words;
    float *scales;
    int32_t *sums;
    const void *source;
    int32_t source_is_bf16, kind, num_rows, in_features, first_output, panel_step, panel_offset;
} pack_call;

/* One element of a source row. */
INLINE float element(const pack_call *call, const void *row, int64_t i) {
    return call->source_is_bf16 ? bf16_to_float(((const bf16 *)row)[i]) : ((const float *)row)[i];
}

/* 16 elements from the i-th on; zeros follow the last one. */
INLINE f32x16 elements(const pack_call *call, const void *row, int64_t i) {
    return load_some(row, call->source_is_bf16, i, call->in_features - i);
}

/* Quantizes a row to one lane of a panel, four elements a word. */
static void pack_int8(const pack_call *call, const void *row, uint32_t *lane, int64_t output) {
    typedef int8_t i8x16 __attribute__((vector_size(16)));
    float largest = largest_absolute_of_row(row, call->source_is_bf16, call->in_features); /* a NaN spoils the output */
    float inverse = largest > 0 ? 127 / largest : 0;
    i32x16 sums = {0};
    int32_t num_words = pagoda_num_words(PAGODA_INT8, call->in_features);
    for (int64_t i = 0; i < call->in_features; i += LANES) {
        /* Adding 1.5 * 2^23 rounds to an integer, which is then in the low bits. */
        i32x16 values = (i32x16)(elements(call, row, i) * inverse + 12582912.0f) - 0x4b400000;
        sums += values;
        i8x16 bytes = __builtin_convertvector(values, i8x16);
        for (int64_t word = 0; word < LANES / 4 && i / 4 + word < num_words; word++)
            memcpy(lane + (i / 4 + word) * LANES, (const char *)&bytes + 4 * word, 4);
    }
    int32_t sum = 0;
    for (int part = 0; part < LANES; part++) sum += sums[part];
    call->scales[output] = largest / 127;
    call->sums[output] = sum;
}

/* Copies or rounds a row to one lane of a panel. */
static void pack_floats(const pack_call *call, const void *row, uint32_t *lane) {
    const int64_t per_word = call->kind == PAGODA_BF16 ? 2 : 1;
    for (int64_t k = 0; k * per_word < call->in_features; k++) {
        uint32_t word;
        if (call->kind == PAGODA_BF16) {
            float second = 2 * k + 1 < call->in_features ? element(call, row, 2 * k + 1) : 0;
            word = bf16_from(element(call, row, 2 * k)) | (uint32_t)bf16_from(second) << 16;
        } else {
            float value = element(call, row, k);
            memcpy(&word, &value, sizeof word);
        }
        lane[k * LANES] = word;
    }
}

/* 16 rows into a whole panel, word by word as they are: nearly all packing is this. */
static void copy_panel(const char *source, int64_t num_words, uint32_t *panel) {
    int64_t k = 0;
    for (; k + LANES <= num_words; k += LANES) {
        u32x16 rows[LANES];
        for (int lane = 0; lane < LANES; lane++) rows[lane] = u32x16_load(source + 4 * (lane * num_words + k));
        store_transposed(panel + k * LANES, LANES, rows);
    }
    for (; k < num_words; k++)
        for (int lane = 0; lane < LANES; lane++) memcpy(panel + k * LANES + lane, source + 4 * (lane * num_words + k), 4);
}

/* Whether a source row is a row of the packed words as it is. */
INLINE bool is_packed_as_it_is(const pack_call *call) {
    if (call->source_is_bf16) return call->kind == PAGODA_BF16 && call->in_features % 2 == 0;
    return call->kind == PAGODA_F32;
}

/* Packs 16 rows. */
static void pack_part(void *args, int64_t index) {
    const pack_call *call = args;
    int64_t first = index * LANES, end = min(first + LANES, call->num_rows);
    int64_t row_bytes = (int64_t)call->in_features * (call->source_is_bf16 ? 2 : 4);
    int64_t num_words = pagoda_num_words(call->kind, call->in_features);
    for (int64_t row = first; row < end; row++) {
        int64_t output = call->first_output + row;
        int64_t panel = output / LANES * call->panel_step + call->panel_offset;
        uint32_t *words = call->words + panel * LANES * num_words;
        const char *source = (const char *)call->source + row * row_bytes;
        if (output % LANES == 0 && row + LANES <= end && is_packed_as_it_is(call)) {
            copy_panel(source, row_bytes / 4, words);
            return;
        }
        if (call->kind == PAGODA_INT8) pack_int8(call, source, words + output % LANES, panel * LANES + output % LANES);
        else pack_floats(call, source, words + output % LANES);
    }
}

void pagoda_pack_weight(uint32_t *words, float *scales, int32_t *sums, const void *source, int32_t source_is_bf16,
                        int32_t kind, int32_t num_rows, int32_t in_features, int32_t first_output,
                        int32_t panel_step, int32_t panel_offset) {
    pack_call call = {words,    scales,      sums,         source,     source_is_bf16, kind,
                      num_rows, in_features, first_output, panel_step, panel_offset};
    pagoda_parallel_for(divide_up(num_rows, LANES), pack_part, &call);
}
