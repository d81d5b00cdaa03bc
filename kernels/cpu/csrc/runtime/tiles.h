/* Tiles: the matrix registers of Intel's AMX, which multiply 16 rows with 16 outputs in one instruction.
 *
 * A tile has up to 16 rows of 64 bytes, 16 words (see vector.h). A product adds rows [rows, 16 words] times weights
 * [16 words, 16 outputs] to sums [rows, 16 outputs]. So 16 words of a panel (linear.h) are a tile as they lie in memory.
 *
 *                            weights    WEIGHTS_0   WEIGHTS_1
 *     rows     ROWS_0                    SUMS_00     SUMS_01
 *              ROWS_1                    SUMS_10     SUMS_11
 *
 * int8 sums are exact. The sums of bfloat16 are float32, and their order is the processor's: see tile_dot_bf16. A row's
 * sums never depend on a tile's other rows, or how many there are.
 *
 * Tiles belong to a thread, and other libraries in it use them too. So every task configures them where it begins, and
 * releases them where it ends: what they hold would otherwise be saved at every switch of threads.
 *
 * The operating system grants tiles to a process that asks for them. kernels/cpu/build.py asks, and has the library
 * compiled without them if they are refused.
 */
#ifndef PAGODA_TILES_H
#define PAGODA_TILES_H

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512BF16__) && \
    defined(__AVX512VNNI__) && !defined(PAGODA_WITHOUT_TILES)
#define PAGODA_HAS_TILES 1
#else
#define PAGODA_HAS_TILES 0
#endif

#if PAGODA_HAS_TILES
#include <stdint.h>

#include "runtime/vector.h"

enum {
    TILE_ROWS = 16,  /* at most */
    TILE_WORDS = 16, /* of a row */
    TILE_STRIDE = 64 /* bytes from a row of words or sums to the next one, if they are adjacent */
};

/* The registers. Macros, because their names become part of the instructions. */
#define SUMS_00 0
#define SUMS_01 1
#define SUMS_10 2
#define SUMS_11 3
#define ROWS_0 4
#define ROWS_1 5
#define WEIGHTS_0 6
#define WEIGHTS_1 7

/* Loads a tile from memory, with `stride` bytes from a row to the next one; stores sums; sets them to 0. The compiler's
 * own loads do not say that they read memory. */
#define TILE_LOAD(TILE, FROM, STRIDE) TILE_LOAD_NUMBER(TILE, FROM, STRIDE)
#define TILE_LOAD_NUMBER(TILE, FROM, STRIDE)                                                                          \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #TILE ::"r"(FROM), "r"((int64_t)(STRIDE)) : "memory")
#define TILE_STORE(TILE, TO, STRIDE) TILE_STORE_NUMBER(TILE, TO, STRIDE)
#define TILE_STORE_NUMBER(TILE, TO, STRIDE)                                                                           \
    __asm__ volatile("tilestored %%tmm" #TILE ", (%0,%1,1)" ::"r"(TO), "r"((int64_t)(STRIDE)) : "memory")
#define TILE_ZERO(TILE) TILE_ZERO_NUMBER(TILE)
#define TILE_ZERO_NUMBER(TILE) __asm__ volatile("tilezero %%tmm" #TILE ::)

/* Adds products of bfloat16, of a row's 16 words with those of an output, to a sum. For each of the words in turn, the
 * lower halves' product is added to one partial sum and the upper halves' to another, each by a fused multiply-add that
 * starts from 0; then sum += lower + upper. Denormal inputs and results count as 0. */
#define TILE_DOT_BF16(SUMS, ROWS, WEIGHTS) TILE_DOT_NUMBERS("tdpbf16ps", SUMS, ROWS, WEIGHTS)

/* The same of int8, four to a word: unsigned ones in the rows, signed ones in the weights. Sums are int32, and exact. */
#define TILE_DOT_INT8(SUMS, ROWS, WEIGHTS) TILE_DOT_NUMBERS("tdpbusd", SUMS, ROWS, WEIGHTS)

/* The same of codes: signed bytes in the rows, and unsigned ones in the weights. */
#define TILE_DOT_CODES(SUMS, ROWS, WEIGHTS) TILE_DOT_NUMBERS("tdpbsud", SUMS, ROWS, WEIGHTS)
#define TILE_DOT_NUMBERS(NAME, SUMS, ROWS, WEIGHTS)                                                                   \
    __asm__ volatile(NAME " %%tmm" #WEIGHTS ", %%tmm" #ROWS ", %%tmm" #SUMS ::)

/* Configures the calling thread's tiles for products over `num_words` words, and sets them to 0: those of the first rows
 * have `first_rows` rows, those of the second `second_rows`, which may be 0 if they are not used. */
INLINE void tiles_configure_words(int first_rows, int second_rows, int num_words) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } __attribute__((packed, aligned(64))) configuration = {
        .palette = 1,
        .row_bytes = {64, 64, 64, 64, 4 * num_words, 4 * num_words, 64, 64},
        .rows = {first_rows, first_rows, second_rows, second_rows, first_rows, second_rows, num_words, num_words},
    };
    for (int tile = 0; tile < 8 && !second_rows; tile++)
        if (!configuration.rows[tile]) configuration.row_bytes[tile] = 0; /* both must be 0, or neither */
    __asm__ volatile("ldtilecfg %0" ::"m"(configuration));
}

/* The same for whole tiles of words. */
INLINE void tiles_configure(int first_rows, int second_rows) {
    tiles_configure_words(first_rows, second_rows, TILE_WORDS);
}

/* Returns the calling thread's tiles to the state that costs nothing. */
INLINE void tiles_release(void) { __asm__ volatile("tilerelease" ::: "memory"); }
#endif

#endif
