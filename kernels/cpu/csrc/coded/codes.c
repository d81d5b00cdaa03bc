/* See codes.h. */
#include "coded/codes.h"

#include "coded/decode.h"
#include "runtime/integers.h"

pagoda_panel_layout pagoda_layout_of_panel(const pagoda_code_format *format, int64_t in_features) {
    const int64_t blocks = divide_up(in_features, BLOCK_INPUTS);
    const int64_t granules = SEGMENT_BLOCKS * (BLOCK_INPUTS / format->granule);
    const int64_t outers = max(1, granules / format->granules_per_outer);
    const int64_t outer_bytes = outers * LANES * (format->outer_type == OUTER_F32 ? 4 : 2);
    const bool has_minima = format->zero_kind == ZERO_MINIMA, has_points = format->zero_kind == ZERO_POINTS;
    pagoda_panel_layout layout;
    layout.outer_minima = outer_bytes;
    layout.zero_points = layout.outer_minima + (has_minima ? outer_bytes : 0);
    layout.inner_scales = layout.zero_points + (has_points ? outers * LANES : 0);
    layout.inner_minima = layout.inner_scales + (format->has_inner ? granules * LANES : 0);
    layout.codes = layout.inner_minima + (format->has_inner && has_minima ? granules * LANES : 0);
    layout.codes = divide_up(layout.codes, VECTOR_BYTES) * VECTOR_BYTES;
    layout.segment_bytes = layout.codes + SEGMENT_BLOCKS * format->bits * VECTOR_BYTES;
    layout.panel_bytes =
        divide_up(blocks, SEGMENT_BLOCKS) * layout.codes + blocks * format->bits * VECTOR_BYTES;
    return layout;
}

int64_t pagoda_panel_bytes(const pagoda_code_format *format, int64_t in_features) {
    return pagoda_layout_of_panel(format, in_features).panel_bytes;
}

int64_t pagoda_decoded_block_bytes(const pagoda_code_format *format) {
    return (BLOCK_WORDS + 2 * (BLOCK_INPUTS / format->granule)) * VECTOR_BYTES;
}

/* Decodes the levels of all blocks of a panel. */
INLINE void decode_all_levels(uint8_t *blocks, int64_t block_bytes, const uint8_t *codes, int64_t num_blocks, int bits,
                              bool has_levels, const uint8_t *levels, const uint8_t *fetched, int64_t num_fetched) {
    const u8_register table = repeated(levels);
    u8_register decoded[BLOCK_WORDS];
    for (int64_t b = 0; b < num_blocks; b++, blocks += block_bytes, codes += bits * VECTOR_BYTES) {
        for (int64_t i = 0; i < num_fetched; i++, fetched += VECTOR_BYTES) __builtin_prefetch(fetched, 0, 2);
        for (int from = 0; from < VECTOR_BYTES; from += REGISTER_BYTES) {
            decode_levels(decoded, codes, bits, has_levels, table, from);
            for (int word = 0; word < BLOCK_WORDS; word++)
                memcpy(blocks + word * VECTOR_BYTES + from, &decoded[word], sizeof decoded[word]);
        }
    }
}

/* Decodes the scales and minima of a segment. */
static void decode_scales(uint8_t *blocks, int64_t block_bytes, const uint8_t *segment,
                          const pagoda_code_format *format, const pagoda_panel_layout *layout, int64_t num_blocks) {
    const int per_block = BLOCK_INPUTS / format->granule;
    granule_cursor cursor = first_granule(format);
    for (int64_t b = 0; b < num_blocks; b++, blocks += block_bytes) {
        float *scales = (float *)(blocks + BLOCK_WORDS * VECTOR_BYTES), *minima = scales + per_block * LANES;
        for (int g = 0; g < per_block; g++) {
            const granule_cursor at = advance(&cursor, format);
            for (int lane = 0; lane < LANES; lane += REGISTER_LANES) {
                f32_register scale, minimum;
                load_scale(at, segment, format, layout, lane, &scale, &minimum);
                register_store(scales + g * LANES + lane, scale);
                register_store(minima + g * LANES + lane, minimum);
            }
        }
    }
}

void pagoda_decode_segment(uint8_t *blocks, const uint8_t *segment, const pagoda_code_format *format,
                           const pagoda_panel_layout *layout, int64_t num_blocks, const uint8_t *fetched,
                           int64_t num_fetched) {
    const int64_t block_bytes = pagoda_decoded_block_bytes(format);
    switch (format->bits + (format->has_levels ? 16 : 0)) {
#define CASE(BITS, HAS_LEVELS)                                                                                         \
    case BITS + 16 * HAS_LEVELS:                                                                                       \
        decode_all_levels(blocks, block_bytes, segment + layout->codes, num_blocks, BITS, HAS_LEVELS,                 \
                          format->levels, fetched, num_fetched);                                                       \
        break;
        FOR_EACH_CODE(CASE)
#undef CASE
    }
    decode_scales(blocks, block_bytes, segment, format, layout, num_blocks);
}

/* The code of an input of a segment, in one lane. */
static int code_of(const uint8_t *codes, int64_t input, int64_t lane, int bits) {
    const uint8_t *plane = codes + input / BLOCK_INPUTS * bits * VECTOR_BYTES + 4 * lane + input % 4;
    const int word = (int)(input % BLOCK_INPUTS / 4);
    int code = 0, shift = 0;
    if (bits == 8) return plane[word * VECTOR_BYTES];
    for (int width = 4; width; width /= 2) {
        const int words = 8 / width; /* that share a vector */
        if (!(bits & width)) continue;
        code |= (plane[word / words * VECTOR_BYTES] >> word % words * width & ((1 << width) - 1)) << shift;
        shift += width;
        plane += width * VECTOR_BYTES;
    }
    return code;
}

void pagoda_decode_output(float *output, const uint8_t *panel, int64_t lane, const pagoda_code_format *format,
                          int64_t in_features, float multiplier) {
    enum { SEGMENT_INPUTS = SEGMENT_BLOCKS * BLOCK_INPUTS };
    const pagoda_panel_layout layout = pagoda_layout_of_panel(format, in_features);
    for (int64_t first = 0; first < in_features; first += SEGMENT_INPUTS, panel += layout.segment_bytes) {
        granule_cursor cursor = first_granule(format);
        f32_register scale, minimum;
        const int first_lane = (int)lane / REGISTER_LANES * REGISTER_LANES, own = (int)lane % REGISTER_LANES;
        for (int64_t input = 0; input < min(SEGMENT_INPUTS, in_features - first); input++) {
            int level = code_of(panel + layout.codes, input, lane, format->bits);
            if (format->has_levels) level = format->levels[level];
            if (input % format->granule == 0)
                load_scale(advance(&cursor, format), panel, format, &layout, first_lane, &scale, &minimum);
            if (format->floats) {
                output[first + input] = scale[own] * number_of_float((uint8_t)level, format->floats) * multiplier;
                continue;
            }
            output[first + input] = (scale[own] * (float)level - minimum[own]) * multiplier;
        }
    }
}
