/* See pagoda_pack_codes in codes.h. */
#include <string.h>

#include "coded/codes.h"
#include "runtime/integers.h"
#include "runtime/threads.h"
#include "runtime/vector.h"

enum { VECTOR_BYTES = LANES * 4, SEGMENT_INPUTS = SEGMENT_BLOCKS * BLOCK_INPUTS };

/* Arguments of pagoda_pack_codes. */
typedef struct {
    uint8_t *panels;
    const pagoda_code_format *format;
    const uint8_t *codes;
    int64_t num_rows, in_features, first_output, panel_step, panel_offset;
} pack_call;

/* The words of an output's block, of which `count` inputs are left; codes of 0 follow the last one. */
static void load_words(uint32_t *words, const uint8_t *codes, int64_t count) {
    memset(words, 0, BLOCK_INPUTS);
    memcpy(words, codes, (size_t)min(count, BLOCK_INPUTS));
}

/* Packs the words of 16 outputs' block; `words` has their first words, then their second ones, and so on. */
INLINE void pack_blocks(uint8_t *to, const uint32_t *words, int bits) {
    if (bits == 8) {
        memcpy(to, words, BLOCK_WORDS * VECTOR_BYTES);
        return;
    }
    for (int width = 4, shift = 0; width; width /= 2) {
        if (!(bits & width)) continue;
        const uint32_t mask = 0x01010101u * ((1u << width) - 1);
        for (int i = 0; i < width; i++, to += VECTOR_BYTES) {
            u32x16 packed = {0};
            for (int j = 0; j < 8 / width; j++)
                packed |= (u32x16_load(words + (i * (8 / width) + j) * LANES) >> shift & mask) << j * width;
            memcpy(to, &packed, sizeof packed);
        }
        shift += width;
    }
}

/* Packs a whole panel, two blocks at a time, as far as there are two: returns how many inputs it has packed. */
static int64_t pack_panel(uint8_t *panel, const pack_call *call, const pagoda_panel_layout *layout,
                          const uint8_t *codes) {
    const int64_t block_bytes = call->format->bits * VECTOR_BYTES;
    int64_t input = 0;
    for (; input + 2 * BLOCK_INPUTS <= call->in_features; input += 2 * BLOCK_INPUTS) {
        u32x16 rows[LANES];
        uint32_t words[LANES * LANES];
        for (int lane = 0; lane < LANES; lane++) rows[lane] = u32x16_load(codes + lane * call->in_features + input);
        store_transposed(words, LANES, rows);
        uint8_t *to = panel + input / SEGMENT_INPUTS * layout->segment_bytes + layout->codes +
                      input % SEGMENT_INPUTS / BLOCK_INPUTS * block_bytes;
        pack_blocks(to, words, call->format->bits);
        pack_blocks(to + block_bytes, words + BLOCK_WORDS * LANES, call->format->bits);
    }
    return input;
}

/* Packs the words of an output's block to its lane. */
static void pack_block(uint8_t *lane, const uint32_t *words, int bits) {
    if (bits == 8) {
        for (int word = 0; word < BLOCK_WORDS; word++) memcpy(lane + word * VECTOR_BYTES, words + word, 4);
        return;
    }
    for (int width = 4, shift = 0; width; width /= 2) {
        if (!(bits & width)) continue;
        const uint32_t mask = 0x01010101u * ((1u << width) - 1);
        for (int i = 0; i < width; i++, lane += VECTOR_BYTES) {
            uint32_t packed = 0;
            for (int j = 0; j < 8 / width; j++) packed |= (words[i * (8 / width) + j] >> shift & mask) << j * width;
            memcpy(lane, &packed, 4);
        }
        shift += width;
    }
}

/* Packs 16 rows. */
static void pack_part(void *args, int64_t index) {
    const pack_call *call = args;
    const pagoda_panel_layout layout = pagoda_layout_of_panel(call->format, call->in_features);
    const int64_t end = min((index + 1) * LANES, call->num_rows), block_bytes = call->format->bits * VECTOR_BYTES;
    const int64_t output = call->first_output + index * LANES;
    int64_t packed = 0;
    if (output % LANES == 0 && end == (index + 1) * LANES) {
        const int64_t panel = output / LANES * call->panel_step + call->panel_offset;
        packed = pack_panel(call->panels + panel * layout.panel_bytes, call, &layout,
                            call->codes + index * LANES * call->in_features);
    }
    for (int64_t row = index * LANES; row < end; row++) {
        const int64_t output = call->first_output + row;
        const int64_t panel = output / LANES * call->panel_step + call->panel_offset;
        uint8_t *lane = call->panels + panel * layout.panel_bytes + output % LANES * 4;
        const uint8_t *codes = call->codes + row * call->in_features;
        for (int64_t input = packed; input < call->in_features; input += BLOCK_INPUTS) {
            uint32_t words[BLOCK_WORDS];
            uint8_t *block = lane + input / SEGMENT_INPUTS * layout.segment_bytes + layout.codes +
                             input % SEGMENT_INPUTS / BLOCK_INPUTS * block_bytes;
            load_words(words, codes + input, call->in_features - input);
            pack_block(block, words, call->format->bits);
        }
    }
}

void pagoda_pack_codes(uint8_t *panels, const pagoda_code_format *format, const uint8_t *codes, int64_t num_rows,
                       int64_t in_features, int64_t first_output, int64_t panel_step, int64_t panel_offset) {
    pack_call call = {panels, format, codes, num_rows, in_features, first_output, panel_step, panel_offset};
    pagoda_parallel_for(divide_up(num_rows, LANES), pack_part, &call);
}
