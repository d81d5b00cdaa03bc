/* A panel's segments are packed one after the other: the codes of 16 outputs become bytes, and then planes of bits, while
 * they are in the first cache. Whole lines are written around the caches. See stored.h. */
#include "coded/stored.h"

#include "coded/stored_rows.h"
#include "runtime/stream.h"
#include "runtime/threads.h"

enum {
    VECTOR_BYTES = LANES * 4,
    MOST_FACTOR_BYTES = MOST_GRANULES * LANES * (2 * 4 + 3),
    MOST_SEGMENT_BYTES = MOST_FACTOR_BYTES + SEGMENT_BLOCKS * 8 * VECTOR_BYTES,
};

/* Arguments of pagoda_pack_stored. */
typedef struct {
    uint8_t *panels;
    const pagoda_code_format *format;
    const pagoda_stored_codes *stored;
    pagoda_panel_layout layout;
} pack_call;

/* The outputs of a panel that are stored: `lane` to `end` - 1; the first one is `row`. */
typedef struct {
    int lane, end;
    int64_t row;
} panel_rows;

/* A segment of a panel. */
typedef struct {
    _Alignas(VECTOR_BYTES) uint8_t bytes[MOST_SEGMENT_BYTES];
    _Alignas(VECTOR_BYTES) uint8_t codes[LANES][SEGMENT_INPUTS];
} packed_segment;

/* --- factors ------------------------------------------------------------------------------------------------------- */

/* Which of an output's factors a segment has. */
typedef struct {
    int64_t first, count;
} factor_range;

/* The outer ones; a factor of more inputs than a segment has is in each. */
static factor_range outer_range(const pagoda_code_format *format, int64_t segment) {
    const int granules = SEGMENT_INPUTS / format->granule, per_outer = format->granules_per_outer;
    if (per_outer >= granules) return (factor_range){segment / (per_outer / granules), 1};
    return (factor_range){segment * (granules / per_outer), granules / per_outer};
}

/* Writes an output's factors to its lane: `size` bytes each. */
INLINE void put_factors(uint8_t *to, const pagoda_stored_factors *factors, int64_t row, factor_range range, int size) {
    const uint8_t *from = factors->first + row * factors->stride + range.first * size;
    const int64_t count = min(range.count, factors->count - range.first);
    for (int64_t i = 0; i < count; i++) memcpy(to + i * LANES * size, from + i * size, (size_t)size);
}

/* The same of bytes that a table has the factors of. */
INLINE void put_listed(uint8_t *to, const pagoda_stored_codes *stored, int64_t row, factor_range range, int size) {
    const pagoda_stored_factors *factors = &stored->outer_scales;
    const uint8_t *from = factors->first + row * factors->stride + range.first;
    const int64_t count = min(range.count, factors->count - range.first);
    for (int64_t i = 0; i < count; i++)
        memcpy(to + i * LANES * size, stored->scale_table + from[i] * size, (size_t)size);
}

static void put_all_factors(const segment_row *to, const pack_call *call, int64_t row, int64_t segment) {
    const pagoda_stored_codes *stored = call->stored;
    const int64_t granules = SEGMENT_INPUTS / call->format->granule;
    const factor_range outer = outer_range(call->format, segment), inner = {segment * granules, granules};
    const bool is_wide = call->format->outer_type == OUTER_F32;
    if (stored->scale_table && is_wide) put_listed(to->outer_scales, stored, row, outer, 4);
    else if (stored->scale_table) put_listed(to->outer_scales, stored, row, outer, 2);
    else if (is_wide) put_factors(to->outer_scales, &stored->outer_scales, row, outer, 4);
    else put_factors(to->outer_scales, &stored->outer_scales, row, outer, 2);
    if (stored->outer_minima.first && is_wide) put_factors(to->outer_minima, &stored->outer_minima, row, outer, 4);
    else if (stored->outer_minima.first) put_factors(to->outer_minima, &stored->outer_minima, row, outer, 2);
    if (stored->zero_points.first) put_factors(to->zero_points, &stored->zero_points, row, outer, 1);
    if (stored->inner_scales.first) put_factors(to->inner_scales, &stored->inner_scales, row, inner, 1);
    if (stored->inner_minima.first) put_factors(to->inner_minima, &stored->inner_minima, row, inner, 1);
}

/* --- codes --------------------------------------------------------------------------------------------------------- */

/* Packs the words of 16 outputs' block; `words` has their first words, then their second ones, and so on. */
INLINE void pack_block(uint8_t *to, const uint32_t *words, int bits) {
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

/* Packs pairs of blocks of 16 outputs' codes; with constant `bits`. */
INLINE void pack_pairs(uint8_t *to, const uint8_t *const *rows, int num_pairs, int bits) {
    for (int pair = 0; pair < num_pairs; pair++, to += 2 * bits * VECTOR_BYTES) {
        u32x16 vectors[LANES];
        uint32_t words[LANES * LANES];
        for (int lane = 0; lane < LANES; lane++) vectors[lane] = u32x16_load(rows[lane] + pair * 2 * BLOCK_INPUTS);
        if (bits == 8) {
            store_transposed((uint32_t *)to, LANES, vectors);
            continue;
        }
        store_transposed(words, LANES, vectors);
        pack_block(to, words, bits);
        pack_block(to + bits * VECTOR_BYTES, words + BLOCK_WORDS * LANES, bits);
    }
}

static void pack_all(uint8_t *to, const uint8_t *const *rows, int num_pairs, int bits) {
    switch (bits) {
#define CASE(BITS)                                                                                                    \
    case BITS: pack_pairs(to, rows, num_pairs, BITS); break;
        CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#undef CASE
    }
}

/* --- segments ------------------------------------------------------------------------------------------------------ */

/* Reads a segment's rows, and packs them in `segment`. */
static void pack_segment(packed_segment *segment, const pack_call *call, const panel_rows *own, int64_t index) {
    const pagoda_stored_codes *stored = call->stored;
    const pagoda_panel_layout *layout = &call->layout;
    const int64_t first = index * SEGMENT_INPUTS, count = stored->num_inputs - first;
    const int64_t num_blocks = divide_up(min(SEGMENT_INPUTS, stored->in_features - first), BLOCK_INPUTS);
    const uint8_t *rows[LANES];
    memset(segment->bytes, 0, (size_t)layout->codes);
    for (int lane = 0; lane < LANES; lane++) {
        rows[lane] = segment->codes[lane];
        if (lane < own->lane || lane >= own->end || count <= 0) {
            memset(segment->codes[lane], 0, SEGMENT_INPUTS);
            continue;
        }
        const int64_t row = own->row + lane - own->lane;
        const uint8_t *from = stored->codes + row * stored->row_bytes;
        const int outer_bytes = call->format->outer_type == OUTER_F32 ? 4 : 2;
        const segment_row to = {
            segment->codes[lane],
            segment->bytes + lane * outer_bytes,
            segment->bytes + layout->outer_minima + lane * outer_bytes,
            segment->bytes + layout->zero_points + lane,
            segment->bytes + layout->inner_scales + lane,
            segment->bytes + layout->inner_minima + lane,
        };
        if (stored->layout >= STORED_GGUF) {
            read_gguf(&to, from, first, count, stored->layout - STORED_GGUF);
            continue;
        }
        put_all_factors(&to, call, row, index);
        if (stored->layout == STORED_BYTES && count >= SEGMENT_INPUTS) rows[lane] = from + first;
        else read_codes(segment->codes[lane], from, first, count, stored->layout);
    }
    pack_all(segment->bytes + layout->codes, rows, (int)divide_up(num_blocks, 2), call->format->bits);
}

/* Copies lanes of vectors whose elements have `size` bytes. */
static void copy_lanes(uint8_t *to, const uint8_t *from, int64_t num_bytes, int64_t size, const panel_rows *own) {
    for (int64_t at = 0; at < num_bytes; at += LANES * size)
        memcpy(to + at + own->lane * size, from + at + own->lane * size, (size_t)((own->end - own->lane) * size));
}

/* Writes a segment: all of it, or the lanes of some outputs. */
static void write_segment(uint8_t *to, const packed_segment *segment, const pack_call *call, const panel_rows *own,
                          int64_t num_bytes) {
    const pagoda_panel_layout *layout = &call->layout;
    const uint8_t *from = segment->bytes;
    if (own->lane == 0 && own->end == LANES) {
        for (int64_t at = 0; at < num_bytes; at += VECTOR_BYTES) stream_store(to + at, u32x16_load(from + at));
        return;
    }
    copy_lanes(to, from, layout->zero_points, call->format->outer_type == OUTER_F32 ? 4 : 2, own);
    const int64_t granules = SEGMENT_INPUTS / call->format->granule, at = layout->zero_points;
    const int64_t outers = max(1, granules / call->format->granules_per_outer);
    int64_t vectors = call->format->zero_kind == ZERO_POINTS ? outers : 0;
    if (call->format->has_inner) vectors += call->format->zero_kind == ZERO_MINIMA ? 2 * granules : granules;
    copy_lanes(to + at, from + at, vectors * LANES, 1, own);
    copy_lanes(to + layout->codes, from + layout->codes, num_bytes - layout->codes, 4, own);
}

/* Packs the outputs of one panel. */
static void pack_panel(void *args, int64_t index) {
    const pack_call *call = args;
    const pagoda_stored_codes *stored = call->stored;
    const pagoda_panel_layout *layout = &call->layout;
    const int64_t panel = stored->first_output / LANES + index;
    const int64_t first = max(panel * LANES, stored->first_output);
    const int64_t end = min((panel + 1) * LANES, stored->first_output + stored->num_rows);
    const panel_rows own = {(int)(first - panel * LANES), (int)(end - panel * LANES), first - stored->first_output};
    uint8_t *to = call->panels + (panel * stored->panel_step + stored->panel_offset) * layout->panel_bytes;
    packed_segment segment;
    for (int64_t i = 0; i * SEGMENT_INPUTS < stored->in_features; i++, to += layout->segment_bytes) {
        const int64_t blocks = divide_up(min(SEGMENT_INPUTS, stored->in_features - i * SEGMENT_INPUTS), BLOCK_INPUTS);
        pack_segment(&segment, call, &own, i);
        write_segment(to, &segment, call, &own, layout->codes + blocks * call->format->bits * VECTOR_BYTES);
    }
    stream_end();
}

void pagoda_pack_stored(uint8_t *panels, const pagoda_code_format *format, const pagoda_stored_codes *stored) {
    pack_call call = {panels, format, stored, pagoda_layout_of_panel(format, stored->in_features)};
    const int64_t first_panel = stored->first_output / LANES;
    if (!stored->num_rows || !stored->in_features) return;
    pagoda_parallel_for(divide_up(stored->first_output + stored->num_rows, LANES) - first_panel, pack_panel, &call);
}
