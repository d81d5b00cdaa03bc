/* See pack_rows.h. */
#include "pack_rows.h"

#include "integers.h"
#include "maximum.h"
#include "rms_norm.h"
#include "scratch.h"
#include "threads.h"

/* Arguments of pagoda_pack_rows. */
typedef struct {
    const pagoda_rows *rows;
    const pagoda_tiles *tiles; /* NULL: every ROWS_PER_TILE rows are one, and none is moved */
    const void *source;
    const float *norm;
    int32_t source_is_bf16, kind, width;
    float eps;
} pack_call;

/* A row as floats, padded with zeros to whole vectors. */
static void read_row(const pack_call *call, const void *source, float *row) {
    float factor = call->norm ? rms_norm_factor(source, call->source_is_bf16, call->width, call->eps) : 1;
    for (int64_t i = 0; i < call->width; i += LANES) {
        f32x16 x = load_some(source, call->source_is_bf16, i, call->width - i);
        if (call->norm) x = x * factor * load_some(call->norm, false, i, call->width - i);
        f32x16_store(row + i, x);
    }
}

/* The words of a row, one after another; int8 rows also have a scale. The row is padded to whole vectors. */
static void make_words(const pack_call *call, const float *row, uint32_t *words, float *scale) {
    int64_t width = call->width;
    if (call->kind == PAGODA_F32) {
        memcpy(words, row, (size_t)width * sizeof *row);
    } else if (call->kind == PAGODA_BF16) {
        for (int64_t i = 0; i < width; i += LANES) bf16_store((bf16 *)words + i, f32x16_load(row + i));
    } else {
        float largest = largest_absolute_of_row(row, false, divide_up(width, LANES) * LANES);
        float inverse = largest > 0 ? 127 / largest : 0;
        typedef uint8_t u8x16 __attribute__((vector_size(16)));
        for (int64_t i = 0; i < width; i += LANES) {
            /* Adding 1.5 * 2^23 rounds to an integer, which is then in the low bits. */
            f32x16 shifted = f32x16_load(row + i) * inverse + 12582912.0f;
            u8x16 bytes = __builtin_convertvector((u32x16)shifted + 128, u8x16);
            memcpy((uint8_t *)words + i, &bytes, sizeof bytes);
        }
        *scale = largest / 127;
    }
}

/* Interleaves rows of words, `stride` apart: the tile holds the first word of every row, then the second, ... */
static void interleave(uint32_t *tile, const uint32_t *words, int64_t num_rows, int64_t num_words, int64_t stride) {
    _Static_assert((int)ROWS_PER_TILE == (int)LANES, "a whole tile is transposed as squares");
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

/* Packs one tile of rows. */
static void pack_tile(void *args, int64_t index) {
    const pack_call *call = args;
    int64_t width = call->width, padded = divide_up(width, LANES) * LANES;
    int64_t num_words = pagoda_num_words(call->kind, call->width);
    const pagoda_tiles *tiles = call->tiles;
    int64_t first = tiles ? tiles->first_rows[index] : index * ROWS_PER_TILE;
    int64_t end = tiles ? tiles->first_rows[index + 1] : least(first + ROWS_PER_TILE, call->rows->num_rows);
    int64_t num_rows = end - first;
    float *row = pagoda_scratch(SCRATCH_ROW, (size_t)(padded * (1 + num_rows)) * sizeof *row);
    uint32_t *words = (uint32_t *)(row + padded); /* of all rows; padded to what the widest kind takes */
    for (int64_t r = 0; r < num_rows; r++) {
        int64_t from = tiles && tiles->sources ? tiles->sources[first + r] : first + r;
        read_row(call, (const char *)call->source + from * width * (call->source_is_bf16 ? 2 : 4), row);
        make_words(call, row, words + r * padded, call->kind == PAGODA_INT8 ? call->rows->scales + first + r : NULL);
    }
    interleave(call->rows->words + first * num_words, words, num_rows, num_words, padded);
}

void pagoda_pack_rows(pagoda_rows *rows, const void *source, int32_t source_is_bf16, int32_t kind, int32_t width,
                      const float *norm, float eps) {
    pack_call call = {rows, NULL, source, norm, source_is_bf16, kind, width, eps};
    pagoda_parallel_for(divide_up(rows->num_rows, ROWS_PER_TILE), pack_tile, &call);
}

void pagoda_pack_tiles(const pagoda_rows *rows, const pagoda_tiles *tiles, const float *source, int32_t kind,
                       int32_t width, const float *norm, float eps) {
    pack_call call = {rows, tiles, source, norm, false, kind, width, eps};
    pagoda_for_each_row(tiles->num_tiles, (int64_t)rows->num_rows * width, pack_tile, &call);
}
