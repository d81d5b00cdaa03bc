/* Codes are looked up for a chunk of a row at a time, which stays in the first cache, and then scaled group by group. */
#include "dequant/decode_groups.h"

#include "runtime/vector.h"

enum { CHUNK = 1024 }; /* columns; even, so that each chunk begins with a byte */

typedef struct {
    float first, second;
} pair;

/* What each byte with two codes stands for. */
static void fill_pairs(pair *pairs, const float *table, int32_t is_high_first) {
    for (int octet = 0; octet < 256; octet++) {
        float low = table[octet & 15], high = table[octet >> 4];
        pairs[octet] = is_high_first ? (pair){high, low} : (pair){low, high};
    }
}

/* Stores floats as bfloat16. bf16_store would not do: the processor's instruction makes zeros of subnormal numbers. */
INLINE void store_rounded(bf16 *to, f32x16 value) {
    u16x16 half = __builtin_convertvector(bf16_round(value), u16x16);
    memcpy(to, &half, sizeof half);
}

/* Scales columns of one group. Without zero points and biases these are 0 and -0, which change no number. */
INLINE void scale_group(void *output, bool is_bf16, const float *values, int64_t count, float scale, float zero,
                        float bias) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        f32x16 result = (f32x16_load(values + i) - zero) * scale + bias;
        if (is_bf16) store_rounded((bf16 *)output + i, result);
        else f32x16_store((float *)output + i, result);
    }
    for (; i < count; i++) {
        float result = (values[i] - zero) * scale + bias;
        if (is_bf16) ((bf16 *)output)[i] = bf16_from(result);
        else ((float *)output)[i] = result;
    }
}

/* Scales `count` columns of a row from `start` on, which begin at `output`. */
INLINE void scale_columns(const pagoda_grouped_codes *weight, char *output, bool is_bf16, const float *values,
                          int64_t row, int64_t start, int64_t count) {
    const int64_t size = is_bf16 ? sizeof(bf16) : sizeof(float);
    int64_t group = (weight->first + start) / weight->group_size;
    int64_t left = (group + 1) * weight->group_size - (weight->first + start); /* columns of the group */
    for (int64_t at = 0; at < count; at += left, left = weight->group_size, group++) {
        int64_t own = left < count - at ? left : count - at, index = row * weight->num_groups + group;
        scale_group(output + at * size, is_bf16, values + at, own, weight->scales[index],
                    weight->zeros ? weight->zeros[index] : 0.0f, weight->biases ? weight->biases[index] : -0.0f);
    }
}

void pagoda_decode_groups(const pagoda_grouped_codes *weight) {
    pair pairs[256];
    float values[CHUNK];
    if (weight->has_nibbles) fill_pairs(pairs, weight->table, weight->is_high_first);
    for (int64_t row = 0; row < weight->num_rows; row++)
        for (int64_t start = 0; start < weight->columns; start += CHUNK) {
            int64_t count = weight->columns - start < CHUNK ? weight->columns - start : CHUNK;
            const uint8_t *codes = weight->codes + row * weight->code_stride;
            if (weight->has_nibbles) {
                codes += start / 2;
                for (int64_t i = 0; i < (count + 1) / 2; i++) memcpy(values + 2 * i, pairs + codes[i], sizeof *pairs);
            } else {
                codes += start;
                for (int64_t i = 0; i < count; i++) values[i] = weight->table[codes[i]];
            }
            int64_t element = row * weight->columns + start;
            if (weight->is_bf16)
                scale_columns(weight, (char *)weight->output + element * 2, true, values, row, start, count);
            else scale_columns(weight, (char *)weight->output + element * 4, false, values, row, start, count);
        }
}
