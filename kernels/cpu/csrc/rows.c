/* See rows.h. */
#include "rows.h"

#include <math.h>
#include <stdbool.h>

#include "scratch.h"
#include "threads.h"
#include "vector.h"

enum { FEW_ELEMENTS = 1 << 14 }; /* below this, waking other threads costs more than they save */

/* Does a task for each of `count` rows, by all threads if that is worth it. */
static void for_each_row(int64_t count, int64_t elements, pagoda_task task, void *args) {
    if (elements >= FEW_ELEMENTS) {
        pagoda_parallel_for(count, task, args);
        return;
    }
    for (int64_t row = 0; row < count; row++) task(args, row);
}

static void write(void *to, bool is_bf16, int64_t at, f32x16 value, int64_t count) {
    if (count >= LANES) {
        if (is_bf16) bf16_store((bf16 *)to + at, value);
        else f32x16_store((float *)to + at, value);
        return;
    }
    float parts[LANES];
    f32x16_store(parts, value);
    for (int64_t i = 0; i < count; i++) {
        if (is_bf16) ((bf16 *)to)[at + i] = bf16_from(parts[i]);
        else ((float *)to)[at + i] = parts[i];
    }
}

/* --- gathering ------------------------------------------------------------------------------------------------- */

typedef struct {
    float *output;
    const void *table;
    const int64_t *rows;
    int32_t table_is_bf16, width;
} gather_call;

static void gather_row(void *args, int64_t index) {
    const gather_call *call = args;
    int64_t width = call->width, first = call->rows[index] * width;
    for (int64_t i = 0; i < width; i += LANES)
        write(call->output, false, index * width + i, load_some(call->table, call->table_is_bf16, first + i, width - i),
              width - i);
}

int32_t pagoda_gather_rows(float *output, const void *table, int32_t table_is_bf16, int64_t table_rows,
                           const int64_t *rows, int32_t num_rows, int32_t width) {
    gather_call call = {output, table, rows, table_is_bf16, width};
    for (int64_t i = 0; i < num_rows; i++)
        if (rows[i] < 0 || rows[i] >= table_rows) return 0;
    for_each_row(num_rows, (int64_t)num_rows * width, gather_row, &call);
    return 1;
}

/* --- packing --------------------------------------------------------------------------------------------------- */

typedef struct {
    pagoda_rows *rows;
    const void *source;
    const float *norm;
    int32_t source_is_bf16, kind, width;
    float eps;
} pack_call;

/* The factor that RMSNorm multiplies a row by, before its weights. */
static float norm_factor(const void *source, bool is_bf16, int64_t width, float eps) {
    f32x16 squares = {0};
    for (int64_t i = 0; i < width; i += LANES) {
        f32x16 x = load_some(source, is_bf16, i, width - i);
        squares += x * x;
    }
    return 1 / sqrtf(f32x16_sum(squares) / (float)width + eps);
}

/* A row as floats, padded with zeros to whole vectors. */
static void read_row(const pack_call *call, const void *source, float *row) {
    float factor = call->norm ? norm_factor(source, call->source_is_bf16, call->width, call->eps) : 1;
    for (int64_t i = 0; i < call->width; i += LANES) {
        f32x16 x = load_some(source, call->source_is_bf16, i, call->width - i);
        if (call->norm) x = x * factor * load_some(call->norm, false, i, call->width - i);
        f32x16_store(row + i, x);
    }
}

/* The largest absolute value, or NaN if there is one: a row that holds it must not look sound. */
static float largest_absolute(const float *row, int64_t width) {
    f32x16 largest = {0};
    i32x16 is_number = ~(i32x16){0};
    for (int64_t i = 0; i < width; i += LANES) {
        f32x16 x = f32x16_load(row + i);
        is_number &= x == x;
        largest = f32x16_max(largest, f32x16_max(x, -x));
    }
    float most = f32x16_largest(largest);
    for (int lane = 0; lane < LANES; lane++) most = is_number[lane] ? most : NAN;
    return most;
}

/* The words of a row, one after the other. */
static void make_words(const pack_call *call, const float *row, uint32_t *words, float *scale) {
    int64_t width = call->width;
    if (call->kind == PAGODA_F32) {
        memcpy(words, row, (size_t)width * sizeof *row);
    } else if (call->kind == PAGODA_BF16) {
        for (int64_t i = 0; i < width; i += LANES) bf16_store((bf16 *)words + i, f32x16_load(row + i));
    } else {
        float most = largest_absolute(row, width);
        float inverse = most > 0 ? 127 / most : 0;
        typedef uint8_t u8x16 __attribute__((vector_size(16)));
        for (int64_t i = 0; i < width; i += LANES) {
            /* Adding 1.5 * 2^23 rounds to an integer, which is then in the low bits. */
            f32x16 shifted = f32x16_load(row + i) * inverse + 12582912.0f;
            u8x16 bytes = __builtin_convertvector((u32x16)shifted + 128, u8x16);
            memcpy((uint8_t *)words + i, &bytes, sizeof bytes);
        }
        *scale = most / 127;
    }
}

/* Rows of words, `stride` apart, to the tile's words, each of which holds one of every row. */
static void interleave(uint32_t *tile, const uint32_t *words, int64_t num_rows, int64_t num_words, int64_t stride) {
    _Static_assert(ROWS_PER_TILE == LANES, "a whole tile's rows are turned about as one square");
    int64_t k = 0;
    if (num_rows == LANES) {
        for (; k + LANES <= num_words; k += LANES) {
            u32x16 rows[LANES];
            for (int64_t r = 0; r < LANES; r++) rows[r] = u32x16_load(words + r * stride + k);
            store_transposed(tile + k * LANES, LANES, rows);
        }
    }
    for (; k < num_words; k++)
        for (int64_t r = 0; r < num_rows; r++) tile[k * num_rows + r] = words[r * stride + k];
}

static void pack_tile(void *args, int64_t index) {
    const pack_call *call = args;
    int64_t width = call->width, padded = (width + LANES - 1) / LANES * LANES;
    int64_t num_words = pagoda_num_words(call->kind, call->width);
    int64_t first = index * ROWS_PER_TILE, left = call->rows->num_rows - first;
    int64_t num_rows = left < ROWS_PER_TILE ? left : ROWS_PER_TILE;
    float *row = pagoda_scratch(SCRATCH_ROW, (size_t)(padded * (1 + num_rows)) * sizeof *row);
    uint32_t *words = (uint32_t *)(row + padded); /* of all rows; padded to what the widest kind takes */
    for (int64_t r = 0; r < num_rows; r++) {
        const char *source = (const char *)call->source + (first + r) * width * (call->source_is_bf16 ? 2 : 4);
        read_row(call, source, row);
        make_words(call, row, words + r * padded, call->kind == PAGODA_INT8 ? call->rows->scales + first + r : NULL);
    }
    interleave(call->rows->words + first * num_words, words, num_rows, num_words, padded);
}

void pagoda_pack_rows(pagoda_rows *rows, const void *source, int32_t source_is_bf16, int32_t kind, int32_t width,
                      const float *norm, float eps) {
    pack_call call = {rows, source, norm, source_is_bf16, kind, width, eps};
    pagoda_parallel_for((rows->num_rows + ROWS_PER_TILE - 1) / ROWS_PER_TILE, pack_tile, &call);
}

/* --- rotary embedding and slot writes -------------------------------------------------------------------------- */

/* Normalizes and rotates one head into element `at` of `to`. */
static void rotate(const pagoda_rope_call *call, const float *head, const float *norm, const float *cosines, void *to,
                   int64_t at) {
    int64_t half = call->head_dim / 2;
    const float *sines = cosines + half;
    float factor = norm ? norm_factor(head, false, call->head_dim, call->eps) : 1;
    for (int64_t i = 0; i < half; i += LANES) {
        int64_t count = half - i;
        f32x16 first = load_some(head, false, i, count), second = load_some(head, false, half + i, count);
        f32x16 cosine = load_some(cosines, false, i, count), sine = load_some(sines, false, i, count);
        if (norm) {
            first *= factor * load_some(norm, false, i, count);
            second *= factor * load_some(norm, false, half + i, count);
        }
        write(to, call->is_bf16, at + i, first * cosine - second * sine, count);
        write(to, call->is_bf16, at + half + i, second * cosine + first * sine, count);
    }
}

static void rope_token(void *args, int64_t token) {
    const pagoda_rope_call *call = args;
    int64_t width = call->head_dim;
    const float *head = call->qkv + token * (call->num_heads + 2 * call->num_kv_heads) * width;
    const float *cosines = call->rope + call->positions[token] * width;
    for (int64_t i = 0; i < call->num_heads; i++, head += width)
        rotate(call, head, call->query_norm, cosines, call->query, (token * call->num_heads + i) * width);
    int64_t slot = call->slot_mapping[token];
    if (slot < 0) return;
    for (int64_t i = 0; i < call->num_kv_heads; i++, head += width)
        rotate(call, head, call->key_norm, cosines, call->key_cache, (slot * call->num_kv_heads + i) * width);
    int64_t size = call->num_kv_heads * width;
    for (int64_t i = 0; i < size; i += LANES)
        write(call->value_cache, call->is_bf16, slot * size + i, load_some(head, false, i, size - i), size - i);
}

void pagoda_rope_and_store(const pagoda_rope_call *call) {
    int64_t elements = (int64_t)call->num_tokens * (call->num_heads + 2 * call->num_kv_heads) * call->head_dim;
    for_each_row(call->num_tokens, elements, rope_token, (void *)call);
}
