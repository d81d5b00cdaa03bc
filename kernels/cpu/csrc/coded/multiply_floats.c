/* See pagoda_decode_floats in codes.h, and what follows it. */
#include "coded/floats.h"
#include "runtime/integers.h"

enum {
    NUM_REGISTERS = LANES / REGISTER_LANES,
    PANELS = PANELS_OF_GROUP,
    WORDS_OF_BLOCK = BLOCK_INPUTS / 2,
    ROW_BYTES_AHEAD = 4096, /* that are fetched of each panel */
};

int64_t pagoda_words_of_scale(const pagoda_code_format *format) {
    return min((int64_t)format->granules_per_outer * WORDS_OF_BLOCK, FLOAT_WORDS);
}

/* The segment of a panel that has a block. */
INLINE const uint8_t *segment_of(const uint8_t *panel, const pagoda_panel_layout *layout, int64_t block) {
    return panel + block / SEGMENT_BLOCKS * layout->segment_bytes;
}

/* The codes of a block. */
INLINE const uint8_t *codes_of(const uint8_t *panel, const pagoda_panel_layout *layout, int64_t block) {
    return segment_of(panel, layout, block) + layout->codes + block % SEGMENT_BLOCKS * BLOCK_WORDS * VECTOR_BYTES;
}

/* The scales of a block, of a register's outputs from `lane` on. */
INLINE f32_register scales_of(const uint8_t *panel, const pagoda_code_format *format, const pagoda_panel_layout *layout,
                              int64_t block, int lane) {
    const int64_t outer = block % SEGMENT_BLOCKS / format->granules_per_outer;
    const int64_t bytes = LANES * (format->outer_type == OUTER_F32 ? 4 : 2);
    return load_outer(segment_of(panel, layout, block) + outer * bytes, format->outer_type, lane);
}

/* Bytes from a block to the codes that are prefetched meanwhile: `distance`, and from a panel's last ones to the first of
 * the next four panels. */
INLINE int64_t distance_of_fetched(const pagoda_panel_layout *layout, int64_t block, int64_t distance) {
    const int64_t in_segment = block % SEGMENT_BLOCKS * BLOCK_WORDS * VECTOR_BYTES;
    const int64_t at = block / SEGMENT_BLOCKS * layout->segment_bytes + in_segment;
    return distance + (at + distance >= layout->panel_bytes ? (PANELS - 1) * layout->panel_bytes : 0);
}

/* Fetches the scales of a segment. */
INLINE void fetch_scales(const uint8_t *segment, const pagoda_panel_layout *layout) {
    for (int64_t i = 0; i < layout->codes; i += VECTOR_BYTES) __builtin_prefetch(segment + i, 0, 2);
}

pagoda_later_codes pagoda_codes_after(const uint8_t *panels, const pagoda_code_format *format,
                                      const pagoda_panel_layout *layout, int64_t first_word) {
    /* Of two calls, the first is about two panels and the codes of both calls, the second about the other two panels. */
    const int64_t words_of_scale = pagoda_words_of_scale(format);
    const bool is_second = first_word / words_of_scale % 2;
    const int64_t block = (first_word - (is_second ? words_of_scale : 0)) / WORDS_OF_BLOCK;
    const int64_t distance = distance_of_fetched(layout, block, layout->segment_bytes);
    for (int p = 0; p < PANELS && first_word % (SEGMENT_BLOCKS * WORDS_OF_BLOCK) == 0; p++)
        fetch_scales(segment_of(panels + p * layout->panel_bytes, layout, block) + distance, layout);
    const uint8_t *first = codes_of(panels, layout, block) + distance + (is_second ? 2 * layout->panel_bytes : 0);
    return (pagoda_later_codes){first, first + layout->panel_bytes};
}

void pagoda_decode_floats(uint32_t *words, const uint8_t *panels, const pagoda_code_format *format,
                          const pagoda_panel_layout *layout, int64_t first_word, int64_t num_words,
                          pagoda_later_codes fetched) {
    const float_table table = table_of_floats(format->floats);
    for (int p = 0; p < PANELS; p++, words += num_words * LANES, panels += layout->panel_bytes)
        for (int64_t word = 0; word < num_words; word += WORDS_OF_BLOCK) {
            const uint8_t *codes = codes_of(panels, layout, (first_word + word) / WORDS_OF_BLOCK);
            for (int i = 0; i < BLOCK_WORDS; i++) {
                const uint8_t **line = i % 2 ? &fetched.first : &fetched.second;
                if (*line) __builtin_prefetch(*line, 0, 2), *line += VECTOR_BYTES;
                for (int lane = 0; lane < LANES; lane += REGISTER_LANES) {
                    u32_register decoded[WORDS_OF_CODES];
                    decode_words(decoded, codes + i * VECTOR_BYTES + lane * 4, &table);
                    for (int j = 0; j < WORDS_OF_CODES; j++)
                        memcpy(words + (word + WORDS_OF_CODES * i + j) * LANES + lane, &decoded[j], sizeof decoded[j]);
                }
            }
        }
}

void pagoda_add_scaled(float *sums, const float *products, int64_t num_rows, const uint8_t *panels,
                       const pagoda_code_format *format, const pagoda_panel_layout *layout, int64_t first_word) {
    for (int p = 0; p < PANELS; p++, panels += layout->panel_bytes)
        for (int lane = 0; lane < LANES; lane += REGISTER_LANES) {
            const f32_register scales = scales_of(panels, format, layout, first_word / WORDS_OF_BLOCK, lane);
            for (int64_t row = 0; row < num_rows; row++) {
                const int64_t at = (p * num_rows + row) * LANES + lane;
                register_store(sums + at, register_fma(scales, register_load(products + at), register_load(sums + at)));
            }
        }
}

/* sum + the products of a word of the weights with one of the row, in the order of linear.c (linear/). */
INLINE f32_register dot_word(f32_register sum, u32_register weights, uint32_t row) {
#if PAGODA_HALF_REGISTERS
    const u32_register word = row - (u32_register){0};
    sum = register_fma((f32_register)(word << 16), (f32_register)(weights << 16), sum);
    return register_fma((f32_register)(word & 0xffff0000u), (f32_register)(weights & 0xffff0000u), sum);
#else
    return pagoda_dot_bf16(sum, u32x16_set(row), weights);
#endif
}

void pagoda_multiply_float_row(float *sums, const uint32_t *row, const uint8_t *panels,
                               const pagoda_code_format *format, const pagoda_panel_layout *layout, int64_t num_words) {
    const float_table table = table_of_floats(format->floats);
    const int64_t words_of_scale = pagoda_words_of_scale(format);
    f32_register sum[NUM_REGISTERS][PANELS] = {{{0}}}, products[NUM_REGISTERS][PANELS] = {{{0}}};
    for (int64_t word = 0; word < num_words; word += WORDS_OF_BLOCK) {
        const int64_t block = word / WORDS_OF_BLOCK, end = min(word + WORDS_OF_BLOCK, num_words);
        const bool is_last = end == num_words || end % words_of_scale == 0; /* with this scale */
        const int64_t distance = distance_of_fetched(layout, block, ROW_BYTES_AHEAD);
        for (int p = 0; p < PANELS && block % SEGMENT_BLOCKS == 0; p++)
            fetch_scales(segment_of(panels + p * layout->panel_bytes, layout, block) + distance, layout);
        _Pragma("GCC unroll 2") for (int i = 0; i < NUM_REGISTERS; i++) {
            const int lane = i * REGISTER_LANES;
            const uint8_t *codes = codes_of(panels, layout, block) + lane * 4;
            for (int64_t k = word; k < end; k += WORDS_OF_CODES, codes += VECTOR_BYTES) {
                const uint32_t first = row[k], second = k + 1 < end ? row[k + 1] : 0;
                _Pragma("GCC unroll 4") for (int p = 0; p < PANELS; p++) {
                    u32_register words[WORDS_OF_CODES];
                    if (i == 0) __builtin_prefetch(codes + p * layout->panel_bytes + distance, 0, 2);
                    decode_words(words, codes + p * layout->panel_bytes, &table);
                    products[i][p] = dot_word(dot_word(products[i][p], words[0], first), words[1], second);
                }
            }
            _Pragma("GCC unroll 4") for (int p = 0; p < PANELS && is_last; p++) {
                const f32_register scales = scales_of(panels + p * layout->panel_bytes, format, layout, block, lane);
                sum[i][p] = register_fma(scales, products[i][p], sum[i][p]);
                products[i][p] = (f32_register){0};
            }
        }
    }
    for (int i = 0; i < NUM_REGISTERS; i++)
        for (int p = 0; p < PANELS; p++) register_store(sums + p * LANES + i * REGISTER_LANES, sum[i][p]);
}
