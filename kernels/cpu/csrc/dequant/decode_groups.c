/* Two codes a byte: the numbers of a group's 16 codes are computed once, and looked up. Codes of a byte are looked up
 * first, and each number is computed. */
#include "dequant/decode_groups.h"

#include "dequant/code_tables.h"
#include "dequant/store_rounded.h"
#include "runtime/integers.h"

/* What the codes of one group are changed by. */
typedef struct {
    float scale, zero, bias;
} group;

/* Without zero points and biases these are 0 and -0, which change no number. */
INLINE group group_at(const pagoda_grouped_codes *weight, int64_t index) {
    float scale = weight->scale_table ? weight->scale_table[((const uint8_t *)weight->scales)[index]]
                                      : ((const float *)weight->scales)[index];
    return (group){scale, weight->zeros ? weight->zeros[index] : 0.0f, weight->biases ? weight->biases[index] : -0.0f};
}

INLINE f32x16 scaled(group own, f32x16 values, bool is_plain) {
    return is_plain ? values * own.scale : (values - own.zero) * own.scale + own.bias;
}

/* Decodes a few codes from the one at `start` on, two of which are in a byte. */
static void decode_few(void *output, bool is_bf16, const uint8_t *codes, int64_t start, int64_t count,
                       const float *numbers, bool is_high_first) {
    for (int64_t i = 0; i < count; i++) {
        float number = numbers[nibble_at(codes, start + i, is_high_first)];
        if (is_bf16) ((bf16 *)output)[i] = bf16_from(number);
        else ((float *)output)[i] = number;
    }
}

/* Decodes `count` codes from the one at `start` on, two of which are in a byte. */
INLINE void decode_nibbles(void *output, bool is_bf16, const uint8_t *codes, int64_t start, int64_t count,
                           f32x16 numbers, bool is_high_first) {
    int64_t done = 0, vectors = 0;
    if (is_bf16) {
        u16x16 table = bf16_exact(numbers);
        done = start & 1; /* until a byte begins */
        vectors = (count - done) / LANES;
        for (int64_t i = 0; i < vectors; i++)
            look_up_nibbles((bf16 *)output + done + LANES * i, codes + (start + done) / 2 + LANES / 2 * i, table,
                            is_high_first);
    }
    if (!done && LANES * vectors == count) return;
    float several[LANES];
    f32x16_store(several, numbers);
    decode_few(output, is_bf16, codes, start, min(done, count), several, is_high_first);
    done += LANES * vectors;
    char *rest = (char *)output + done * (is_bf16 ? sizeof(bf16) : sizeof(float));
    decode_few(rest, is_bf16, codes, start + done, count - done, several, is_high_first);
}

/* Decodes `count` codes of a byte each. */
INLINE void decode_octets(void *output, bool is_bf16, const uint8_t *codes, int64_t count, const bf16 *table, group own,
                          bool is_plain) {
    int64_t i = 0;
    for (; i + 2 * LANES <= count; i += 2 * LANES) {
        u32x16 pairs = look_up_octets(codes + i, table);
        f32x16 even = scaled(own, (f32x16)(pairs << 16), is_plain);
        f32x16 odd = scaled(own, (f32x16)(pairs & 0xffff0000u), is_plain);
        pairs = bf16_round(even) | bf16_round(odd) << 16;
        if (is_bf16) memcpy((bf16 *)output + i, &pairs, sizeof pairs);
        for (int lane = 0; lane < 2 * LANES && !is_bf16; lane++)
            ((float *)output)[i + lane] = lane % 2 ? odd[lane / 2] : even[lane / 2];
    }
    for (; i < count; i++) {
        float number = (bf16_to_float(table[codes[i]]) - own.zero) * own.scale + own.bias;
        if (is_bf16) ((bf16 *)output)[i] = bf16_from(number);
        else ((float *)output)[i] = number;
    }
}

/* Decodes a row of two codes a byte, in bfloat16, that consists of whole groups of `group_size` columns, as most do. */
INLINE void decode_whole_groups(const pagoda_grouped_codes *weight, int64_t row, int64_t group_size, bool is_plain) {
    const uint8_t *codes = weight->codes + row * weight->code_stride;
    bf16 *output = (bf16 *)weight->output + row * weight->columns;
    f32x16 table = f32x16_load(weight->table);
    int64_t index = row * weight->num_groups;
    for (int64_t start = 0; start < weight->columns; start += max(group_size, 2 * LANES)) {
        u16x16 numbers = bf16_exact(scaled(group_at(weight, index++), table, is_plain)), others = numbers;
        if (group_size == LANES) others = bf16_exact(scaled(group_at(weight, index++), table, is_plain));
        for (int64_t at = start; at < start + max(group_size, 2 * LANES); at += 2 * LANES) {
            u32x16 pairs = look_up_pairs(codes + at / 2, numbers, others, weight->is_high_first);
            memcpy(output + at, &pairs, sizeof pairs);
        }
    }
}

/* Whether `decode_whole_groups` decodes the rows. */
INLINE bool has_whole_groups(const pagoda_grouped_codes *weight) {
    return weight->is_bf16 && weight->has_nibbles && weight->first == 0 && weight->columns % (2 * LANES) == 0 &&
           (weight->group_size == LANES || weight->group_size % (2 * LANES) == 0) &&
           weight->columns % weight->group_size == 0;
}

/* Decodes one row; `is_plain`: there are neither zero points nor biases. */
INLINE void decode_row(const pagoda_grouped_codes *weight, int64_t row, bool is_bf16, bool has_nibbles, bool is_plain,
                       const bf16 *octet_table) {
    const uint8_t *codes = weight->codes + row * weight->code_stride;
    const int64_t size = is_bf16 ? sizeof(bf16) : sizeof(float), columns = weight->columns;
    char *output = (char *)weight->output + row * columns * size;
    f32x16 table = f32x16_load(weight->table);
    int64_t index = row * weight->num_groups;
    for (int64_t start = 0, end = weight->group_size - weight->first; start < columns;
         start = end, end += weight->group_size, index++) {
        int64_t count = min(end, columns) - start;
        group own = group_at(weight, index);
        if (has_nibbles)
            decode_nibbles(output + start * size, is_bf16, codes, start, count, scaled(own, table, is_plain),
                           weight->is_high_first);
        else decode_octets(output + start * size, is_bf16, codes + start, count, octet_table, own, is_plain);
    }
}

/* The same for all kinds of rows. Each is compiled apart, without what it does not need. */
INLINE void decode_any_row(const pagoda_grouped_codes *weight, int64_t row, bool is_bf16, bool is_plain,
                           const bf16 *octet_table) {
    if (is_bf16 && has_whole_groups(weight)) {
        if (weight->group_size == 16) decode_whole_groups(weight, row, 16, is_plain);
        else if (weight->group_size == 32) decode_whole_groups(weight, row, 32, is_plain);
        else decode_whole_groups(weight, row, weight->group_size, is_plain);
    } else if (weight->has_nibbles) decode_row(weight, row, is_bf16, true, is_plain, octet_table);
    else decode_row(weight, row, is_bf16, false, is_plain, octet_table);
}

/* Rows that are decoded side by side, and codes for whose group a table of its 256 numbers pays. */
enum { STRIP = 16, MANY = 1024 };

/* Decodes columns of a group that `num_rows` rows have in common, of a byte each, in bfloat16. */
static void decode_common_group(const pagoda_grouped_codes *weight, int64_t row, int64_t num_rows, int64_t start,
                                int64_t count, const bf16 *octet_table, group own) {
    bf16 numbers[256];
    for (int code = 0; code < 256; code += LANES)
        store_exact(numbers, true, code, scaled(own, bf16_load(octet_table + code), false));
    for (; num_rows; num_rows--, row++) {
        const uint8_t *codes = weight->codes + row * weight->code_stride + start;
        bf16 *output = (bf16 *)weight->output + row * weight->columns + start;
        int64_t i = 0;
        for (; i + 2 * LANES <= count; i += 2 * LANES) {
            u32x16 pairs = look_up_octets(codes + i, numbers);
            memcpy(output + i, &pairs, sizeof pairs);
        }
        for (; i < count; i++) output[i] = numbers[codes[i]];
    }
}

/* Decodes the rows from `row` to `last`, of codes of a byte, in bfloat16. Blocks of rows may have one scale. */
INLINE void decode_strip(const pagoda_grouped_codes *weight, int64_t row, int64_t last, bool is_plain,
                         const bf16 *octet_table) {
    int64_t index = 0, next;
    for (int64_t start = 0, end = weight->group_size - weight->first; start < weight->columns;
         start = end, end += weight->group_size, index++)
        for (int64_t from = row, count = min(end, weight->columns) - start; from < last; from = next) {
            group own = group_at(weight, from * weight->num_groups + index);
            for (next = from + 1; next < last; next++) {
                group other = group_at(weight, next * weight->num_groups + index);
                if (memcmp(&own, &other, sizeof own)) break;
            }
            if ((next - from) * count >= MANY) {
                decode_common_group(weight, from, next - from, start, count, octet_table, own);
                continue;
            }
            next = from + 1;
            decode_octets((bf16 *)weight->output + from * weight->columns + start, true,
                          weight->codes + from * weight->code_stride + start, count, octet_table, own, is_plain);
        }
}

void pagoda_decode_groups(const pagoda_grouped_codes *weight) {
    bool is_plain = !weight->zeros && !weight->biases;
    bf16 octet_table[256];
    for (int code = 0; code < 256 && !weight->has_nibbles; code++) octet_table[code] = bf16_from(weight->table[code]);
    bool is_in_strips = weight->is_bf16 && !weight->has_nibbles && weight->group_size >= MANY / STRIP;
    for (int64_t row = 0; row < weight->num_rows && is_in_strips; row += STRIP)
        if (is_plain) decode_strip(weight, row, min(row + STRIP, weight->num_rows), true, octet_table);
        else decode_strip(weight, row, min(row + STRIP, weight->num_rows), false, octet_table);
    if (is_in_strips) return;
    for (int64_t row = 0; row < weight->num_rows; row++)
        if (!weight->is_bf16) decode_any_row(weight, row, false, false, octet_table);
        else if (is_plain) decode_any_row(weight, row, true, true, octet_table);
        else decode_any_row(weight, row, true, false, octet_table);
}
