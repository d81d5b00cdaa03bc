/* See pack_rows.h. */
#include "linear/pack_rows.h"

#include "runtime/integers.h"
#include "runtime/maximum.h"
#include "runtime/rms_norm.h"
#include "runtime/scratch.h"
#include "runtime/threads.h"

/* Arguments of pagoda_pack_rows. */
typedef struct {
    const pagoda_rows *rows;
    const pagoda_tiles *tiles; /* NULL: every `rows_per_tile` rows are one */
    int64_t rows_per_tile;
    const void *source;
    const float *norm;
    int32_t source_is_bf16, kind, width;
    float eps;
    const int32_t *order; /* of a row's elements; NULL: as they are */
} pack_call;

/* --- rows of words --------------------------------------------------------------------------------------------- */

/* A row as floats, padded with zeros to whole vectors. */
static void read_row(const pack_call *call, const void *source, float *row) {
    float factor = call->norm ? rms_norm_factor(source, call->source_is_bf16, call->width, call->eps) : 1;
    for (int64_t i = 0; i < call->width; i += LANES) {
        f32x16 x = load_some(source, call->source_is_bf16, i, call->width - i);
        if (call->norm) x = x * factor * load_some(call->norm, false, i, call->width - i);
        f32x16_store(row + i, x);
    }
}

/* Puts a row into another order, padded likewise. */
static void put_in_order(float *ordered, const float *row, const int32_t *order, int64_t width) {
    const int64_t padded = divide_up(width, LANES) * LANES;
    for (int64_t i = 0; i < width; i++) ordered[i] = row[order[i]];
    for (int64_t i = width; i < padded; i++) ordered[i] = 0;
}

/* Blocks without a larger number are zero: the inverse of their scale would be infinite. */
static const float SMALLEST_BLOCK = 1e-35f;

/* Quantizes 16 elements to signed bytes; `to` gets them, and the result is their sum. */
INLINE int32_t quantize_half(int8_t *to, f32x16 values, float inverse) {
    typedef int8_t i8x16 __attribute__((vector_size(16)));
    i32x16 integers = (i32x16)((u32x16)(values * inverse + 12582912.0f) - 0x4b400000u); /* rounds, see below */
    i8x16 bytes = __builtin_convertvector(integers, i8x16);
    memcpy(to, &bytes, sizeof bytes);
    int32_t sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += to[lane];
    return sum;
}

/* The words of a row for coded weights: of each block eight words of bytes, the scale, and three sums times the scale
 * (coded/codes.h). Zeros follow the last element. */
static void make_coded_words(const float *row, int64_t width, uint32_t *words) {
    for (int64_t i = 0; i < width; i += BLOCK_INPUTS, words += ROW_BLOCK_WORDS) {
        const f32x16 halves[2] = {f32x16_load(row + i), i + LANES < width ? f32x16_load(row + i + LANES) : (f32x16){0}};
        running_maximum maximum = maximum_from(0);
        for (int half = 0; half < 2; half++) maximum_add(&maximum, f32x16_max(halves[half], -halves[half]));
        const float largest = maximum_of(&maximum);
        const float scale = largest >= 0 && largest < SMALLEST_BLOCK ? 0 : largest / 127; /* NaN stays NaN */
        const float inverse = scale > 0 ? 127 / largest : 0;
        float sums[3];
        int32_t total = 0;
        for (int half = 0; half < 2; half++) {
            const int32_t sum = quantize_half((int8_t *)words + half * LANES, halves[half], inverse);
            sums[half] = (float)sum * scale;
            total += sum;
        }
        sums[2] = (float)total * scale;
        memcpy(words + ROW_SCALE, &scale, sizeof scale);
        memcpy(words + ROW_SUMS, sums, sizeof sums);
    }
}

/* The words of a row, one after another; int8 rows also have a scale. The row is padded to whole vectors. */
static void make_words(const pack_call *call, const float *row, uint32_t *words, float *scale) {
    int64_t width = call->width;
    if (call->kind == PAGODA_F32) {
        memcpy(words, row, (size_t)width * sizeof *row);
    } else if (call->kind == PAGODA_BF16 || call->kind == PAGODA_FLOAT_CODED) {
        for (int64_t i = 0; i < width; i += LANES) bf16_store((bf16 *)words + i, f32x16_load(row + i));
    } else if (call->kind == PAGODA_CODED) {
        make_coded_words(row, width, words);
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

/* --- tiles of rows --------------------------------------------------------------------------------------------- */

/* Words of a few rows that are interleaved one by one; with a constant `num_rows` the compiler uses vectors. */
INLINE void interleave_few(uint32_t *restrict tile, const uint32_t *const *rows, int64_t num_rows, int64_t num_words) {
    for (int64_t k = 0; k < num_words; k++)
        for (int64_t r = 0; r < num_rows; r++) tile[k * num_rows + r] = rows[r][k];
}

/* Interleaves 16 words of some rows: a square is transposed, and the part of it that has rows is kept. */
static void interleave_square(uint32_t *tile, const uint32_t *const *rows, int64_t num_rows, int64_t k, int64_t end) {
    _Static_assert((int)ROWS_PER_TILE == (int)LANES, "a tile has no more rows than a square");
    u32x16 square[LANES] = {{0}};
    uint32_t columns[LANES * LANES];
    for (int64_t r = 0; r < num_rows; r++) square[r] = u32x16_load(rows[r] + k);
    store_transposed(num_rows == LANES ? tile + k * LANES : columns, LANES, square);
    if (num_rows == LANES) return;
    for (int64_t i = 0; i < LANES; i++, k++) {
        uint32_t *to = tile + k * num_rows;
        if ((end - k) * num_rows >= LANES) /* the next words overwrite the lanes without a row */
            memcpy(to, columns + i * LANES, LANES * sizeof *to);
        else
            for (int64_t r = 0; r < num_rows; r++) to[r] = columns[i * LANES + r];
    }
}

/* Interleaves rows of words: the tile holds the first word of every row, then the second, ... */
static void interleave(uint32_t *tile, const uint32_t *const *rows, int64_t num_rows, int64_t num_words) {
    switch (num_rows) {
    case 1: memcpy(tile, rows[0], (size_t)num_words * sizeof *tile); return;
    case 2: interleave_few(tile, rows, 2, num_words); return;
    case 3: interleave_few(tile, rows, 3, num_words); return;
    case 4: interleave_few(tile, rows, 4, num_words); return;
    }
    int64_t k = 0;
    for (; k + LANES <= num_words; k += LANES) interleave_square(tile, rows, num_rows, k, num_words);
    for (; k < num_words; k++)
        for (int64_t r = 0; r < num_rows; r++) tile[k * num_rows + r] = rows[r][k];
}

/* Puts rows together, 16 words of each row after those of the one before it, as AMX reads them. */
static void join_blocks(uint32_t *tile, const uint32_t *const *rows, int64_t num_rows, int64_t num_words) {
    for (int64_t k = 0; k < num_words; k += LANES)
        for (int64_t r = 0; r < num_rows; r++, tile += LANES) memcpy(tile, rows[r] + k, LANES * sizeof *tile);
}

/* Puts rows for codes together, as AMX reads them: of each block all rows' bytes, and then their scales and sums. */
static void join_coded_blocks(uint32_t *tile, const uint32_t *const *rows, int64_t num_rows, int64_t num_words) {
    for (int64_t k = 0; k < num_words; k += ROW_BLOCK_WORDS) {
        for (int64_t r = 0; r < num_rows; r++, tile += BLOCK_WORDS)
            memcpy(tile, rows[r] + k, BLOCK_WORDS * sizeof *tile);
        for (int64_t i = BLOCK_WORDS; i < ROW_BLOCK_WORDS; i++)
            for (int64_t r = 0; r < num_rows; r++) *tile++ = rows[r][k + i];
    }
}

/* Makes a tile of rows of words for weights of this kind. */
static void make_tile(uint32_t *tile, const uint32_t *const *rows, int64_t num_rows, int64_t num_words, int32_t kind) {
    if (PAGODA_HAS_TILES && kind == PAGODA_CODED) join_coded_blocks(tile, rows, num_rows, num_words);
    else if (pagoda_is_tiled(kind)) join_blocks(tile, rows, num_rows, num_words);
    else interleave(tile, rows, num_rows, num_words);
}

/* The rows of one tile. */
typedef struct {
    int64_t first, count;
} tile_rows;

/* Which rows one of `tiles` has; NULL: every `rows_per_tile` rows are one. */
static tile_rows rows_of_tile(const pagoda_tiles *tiles, int64_t index, int64_t rows_per_tile, int64_t num_rows) {
    int64_t first = tiles ? tiles->first_rows[index] : index * rows_per_tile;
    int64_t end = tiles ? tiles->first_rows[index + 1] : min(first + rows_per_tile, num_rows);
    return (tile_rows){first, end - first};
}

/* Packs one tile of rows. */
static void pack_tile(void *args, int64_t index) {
    const pack_call *call = args;
    int64_t width = call->width, padded = divide_up(width, BLOCK_INPUTS) * BLOCK_INPUTS;
    int64_t num_words = pagoda_num_words(call->kind, call->width);
    tile_rows tile = rows_of_tile(call->tiles, index, call->rows_per_tile, call->rows->num_rows);
    float *row = pagoda_scratch(SCRATCH_ROW, (size_t)(padded * (2 + tile.count)) * sizeof *row), *ordered = row + padded;
    const uint32_t *packed[ROWS_PER_TILE];
    for (int64_t r = 0; r < tile.count; r++) {
        uint32_t *words = (uint32_t *)row + padded * (2 + r); /* padded to what the widest kind takes */
        int64_t from = tile.first + r;
        read_row(call, (const char *)call->source + from * width * (call->source_is_bf16 ? 2 : 4), row);
        if (call->order) put_in_order(ordered, row, call->order, width);
        if (pagoda_is_tiled(call->kind)) memset(words + num_words - LANES, 0, LANES * sizeof *words); /* what follows */
        make_words(call, call->order ? ordered : row, words, call->kind == PAGODA_INT8 ? call->rows->scales + from : NULL);
        packed[r] = words;
    }
    make_tile(call->rows->words + tile.first * num_words, packed, tile.count, num_words, call->kind);
}

void pagoda_pack_rows(pagoda_rows *rows, const void *source, int32_t source_is_bf16, int32_t kind, int32_t width,
                      const float *norm, float eps) {
    pack_call call = {rows, NULL, ROWS_PER_TILE, source, norm, source_is_bf16, kind, width, eps, NULL};
    pagoda_parallel_for(divide_up(rows->num_rows, ROWS_PER_TILE), pack_tile, &call);
}

void pagoda_pack_rows_for(pagoda_rows *rows, const void *source, int32_t source_is_bf16, const pagoda_weight *weight,
                          const float *norm, float eps) {
    pack_call call = {rows, NULL, ROWS_PER_TILE, source, norm, source_is_bf16, weight->kind, weight->in_features, eps,
                      weight->order};
    pagoda_parallel_for(divide_up(rows->num_rows, ROWS_PER_TILE), pack_tile, &call);
}

void pagoda_pack_rows_apart(const pagoda_rows *rows, const float *source, int32_t kind, int32_t width,
                            const float *norm, float eps) {
    pack_call call = {rows, NULL, 1, source, norm, false, kind, width, eps, NULL};
    pagoda_for_each_row(rows->num_rows, (int64_t)rows->num_rows * width, pack_tile, &call);
}

void pagoda_pack_tiles(const pagoda_rows *rows, const pagoda_tiles *tiles, const float *source, int32_t kind,
                       int32_t width) {
    pack_call call = {rows, tiles, 0, source, NULL, false, kind, width, 0, NULL};
    pagoda_for_each_row(tiles->num_tiles, (int64_t)rows->num_rows * width, pack_tile, &call);
}

/* Arguments of pagoda_gather_tiles. */
typedef struct {
    const pagoda_rows *rows, *from;
    const pagoda_tiles *tiles;
    const int32_t *sources;
    int64_t num_words;
    int32_t kind;
} gather_call;

/* Gathers the rows of one tile. */
static void gather_tile(void *args, int64_t index) {
    const gather_call *call = args;
    tile_rows tile = rows_of_tile(call->tiles, index, ROWS_PER_TILE, call->rows->num_rows);
    const uint32_t *packed[ROWS_PER_TILE];
    for (int64_t r = 0; r < tile.count; r++) {
        int64_t row = tile.first + r, source = call->sources ? call->sources[row] : row;
        packed[r] = call->from->words + source * call->num_words;
        if (call->kind == PAGODA_INT8) call->rows->scales[row] = call->from->scales[source];
    }
    make_tile(call->rows->words + tile.first * call->num_words, packed, tile.count, call->num_words, call->kind);
}

void pagoda_gather_tiles(const pagoda_rows *rows, const pagoda_tiles *tiles, const int32_t *sources,
                         const pagoda_rows *from, int32_t kind, int32_t width) {
    gather_call call = {rows, from, tiles, sources, pagoda_num_words(kind, width), kind};
    int64_t num_tiles = tiles ? tiles->num_tiles : divide_up(rows->num_rows, ROWS_PER_TILE);
    pagoda_for_each_row(num_tiles, rows->num_rows * call.num_words, gather_tile, &call);
}
