/* See pagoda_multiply_coded_row in codes.h. */
#include "coded/decode.h"
#include "coded/dot.h"
#include "runtime/integers.h"

enum { NUM_REGISTERS = LANES / REGISTER_LANES, BYTES_AHEAD = 8192 /* that are fetched */ };

/* Multiplies a row with a panel; with constant `bits` and `granules` of a block. */
INLINE void multiply(float *sums, const uint32_t *row, const uint8_t *panel, const pagoda_code_format *format,
                     const pagoda_panel_layout *layout, int64_t num_blocks, int bits, bool has_levels, int granules) {
    const u8_register table = repeated(format->levels);
    const uint8_t *codes = panel + layout->codes;
    f32_register sum[NUM_REGISTERS] = {{0}};
    granule_cursor cursor = first_granule(format);
    const int64_t lines = divide_up(layout->segment_bytes, SEGMENT_BLOCKS * VECTOR_BYTES); /* for each block */
    for (int64_t b = 0; b < num_blocks; b++, codes += bits * VECTOR_BYTES, row += ROW_BLOCK_WORDS) {
        granule_cursor at[2];
        if (b && b % SEGMENT_BLOCKS == 0) {
            cursor = first_granule(format);
            panel += layout->segment_bytes;
            codes = panel + layout->codes;
        }
        const uint8_t *fetched = panel + BYTES_AHEAD + b % SEGMENT_BLOCKS * lines * VECTOR_BYTES;
        for (int64_t i = 0; i < lines; i++) __builtin_prefetch(fetched + i * VECTOR_BYTES, 0, 2);
        for (int g = 0; g < granules; g++) at[g] = advance(&cursor, format);
        _Pragma("GCC unroll 2") for (int i = 0; i < NUM_REGISTERS; i++) {
            u8_register levels[BLOCK_WORDS];
            decode_levels(levels, codes, bits, has_levels, table, i * REGISTER_BYTES);
            _Pragma("GCC unroll 2") for (int g = 0; g < granules; g++) {
                const int words = BLOCK_WORDS / granules;
                i32_register dots = {0};
                f32_register scale, minimum;
                _Pragma("GCC unroll 8") for (int k = g * words; k < (g + 1) * words; k++)
                    dots = dot_bytes(dots, (i32_register)levels[k], row[k], bits == 8 || has_levels);
                load_scale(at[g], panel, format, layout, i * REGISTER_LANES, &scale, &minimum);
                sum[i] = add_granule(sum[i], dots, scale, minimum, float_of_word(row[ROW_SCALE]),
                                     float_of_word(row[ROW_SUMS + (granules == 1 ? 2 : g)]), bits == 8 || has_levels);
            }
        }
    }
    memcpy(sums, sum, sizeof sum);
}

void pagoda_multiply_coded_row(float *sums, const uint32_t *row, const uint8_t *panel, const pagoda_code_format *format,
                               const pagoda_panel_layout *layout, int64_t in_features) {
    const int64_t num_blocks = divide_up(in_features, BLOCK_INPUTS);
    switch (2 * (format->bits + (format->has_levels ? 16 : 0)) + (format->granule == 16)) {
#define CASE(BITS, HAS_LEVELS)                                                                                        \
    case 2 * (BITS + 16 * HAS_LEVELS):                                                                                \
        multiply(sums, row, panel, format, layout, num_blocks, BITS, HAS_LEVELS, 1);                                  \
        return;                                                                                                       \
    case 2 * (BITS + 16 * HAS_LEVELS) + 1:                                                                            \
        multiply(sums, row, panel, format, layout, num_blocks, BITS, HAS_LEVELS, 2);                                  \
        return;
        FOR_EACH_CODE(CASE)
#undef CASE
    }
}
