/* See pagoda_pack_codes in coded.h. */
#include <string.h>

#include "linear/coded.h"
#include "runtime/integers.h"
#include "runtime/threads.h"
#include "runtime/vector.h"

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

/* Packs the words of an output's block to its lane. */
static void pack_block(uint8_t *lane, const uint32_t *words, int bits) {
    enum { VECTOR_BYTES = LANES * 4 };
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
    const int64_t end = min((index + 1) * LANES, call->num_rows), block_bytes = call->format->bits * LANES * 4;
    const int64_t factor_bytes = layout.codes;
    for (int64_t row = index * LANES; row < end; row++) {
        const int64_t output = call->first_output + row;
        const int64_t panel = output / LANES * call->panel_step + call->panel_offset;
        uint8_t *lane = call->panels + panel * layout.panel_bytes + output % LANES * 4;
        const uint8_t *codes = call->codes + row * call->in_features;
        for (int64_t input = 0; input < call->in_features; input += BLOCK_INPUTS, lane += block_bytes) {
            uint32_t words[BLOCK_WORDS];
            if (input / BLOCK_INPUTS % SEGMENT_BLOCKS == 0) lane += factor_bytes;
            load_words(words, codes + input, call->in_features - input);
            pack_block(lane, words, call->format->bits);
        }
    }
}

void pagoda_pack_codes(uint8_t *panels, const pagoda_code_format *format, const uint8_t *codes, int64_t num_rows,
                       int64_t in_features, int64_t first_output, int64_t panel_step, int64_t panel_offset) {
    pack_call call = {panels, format, codes, num_rows, in_features, first_output, panel_step, panel_offset};
    pagoda_parallel_for(divide_up(num_rows, LANES), pack_part, &call);
}
