/* See quantize_codes.h. */
#include "coded/quantize_codes.h"

#include "coded/codes.h"
#include "runtime/integers.h"
#include "runtime/threads.h"
#include "runtime/vector.h"

enum { CANDIDATES = 4 }; /* on either side */
static const float SMALLEST_GROUP = 1e-35f; /* whose scale has an inverse; others are zero */
static const float CANDIDATE_STEP = 0.2f; /* of the lowest code */

/* Arguments of pagoda_quantize_codes. */
typedef struct {
    uint8_t *codes;
    bf16 *scales;
    const void *source;
    int64_t in_features;
    int32_t source_is_bf16, bits;
} quantize_call;

/* Integers nearest to x * inverse, as floats, from -half to half - 1. */
INLINE f32x16 rounded(f32x16 x, float inverse, float half) {
    const f32x16 lowest = f32x16_set(-half), highest = f32x16_set(half - 1);
    const f32x16 clamped = -f32x16_max(-highest, -f32x16_max(lowest, x * inverse));
    return (clamped + 12582912.0f) - 12582912.0f; /* 1.5 * 2^23 rounds */
}

/* The scale of a group that gives the least squared error among the candidates. */
static float best_scale(const f32x16 *group, float half) {
    const float highest = f32x16_largest(f32x16_max(group[0], group[1]));
    const float lowest = -f32x16_largest(f32x16_max(-group[0], -group[1]));
    const float extreme = highest > -lowest ? highest : lowest;
    float best = 0, most_explained = 0;
    if (!(extreme >= SMALLEST_GROUP || extreme <= -SMALLEST_GROUP)) return 0;
    const f32x16 parts[2] = {group[0] / extreme, group[1] / extreme}; /* else squares might overflow, or vanish */
    for (int i = -CANDIDATES; i <= CANDIDATES; i++) {
        const float inverse = -(half + CANDIDATE_STEP * (float)i);
        f32x16 with_codes = {0}, of_codes = {0};
        for (int part = 0; part < 2; part++) {
            const f32x16 code = rounded(parts[part], inverse, half);
            with_codes = f32x16_fma(parts[part], code, with_codes);
            of_codes = f32x16_fma(code, code, of_codes);
        }
        const float product = f32x16_sum(with_codes), square = f32x16_sum(of_codes);
        if (square > 0 && product * product > most_explained * square) {
            best = product / square;
            most_explained = product * product / square;
        }
    }
    return best * extreme;
}

/* Quantizes a row. */
static void quantize_row(void *args, int64_t row) {
    const quantize_call *call = args;
    const int64_t width = call->in_features, groups = divide_up(width, BLOCK_INPUTS);
    const char *source = (const char *)call->source + row * width * (call->source_is_bf16 ? 2 : 4);
    const float half = (float)(1 << (call->bits - 1));
    for (int64_t g = 0; g < groups; g++) {
        const int64_t first = g * BLOCK_INPUTS, count = min(BLOCK_INPUTS, width - first);
        f32x16 group[2];
        float codes[BLOCK_INPUTS];
        for (int part = 0; part < 2; part++)
            group[part] = load_some(source, call->source_is_bf16, first + part * LANES, max(0, count - part * LANES));
        const bf16 stored = bf16_from(best_scale(group, half));
        const float scale = bf16_to_float(stored), inverse = scale != 0 ? 1 / scale : 0;
        call->scales[row * groups + g] = stored;
        for (int part = 0; part < 2; part++) f32x16_store(codes + part * LANES, rounded(group[part], inverse, half));
        for (int64_t i = 0; i < count; i++) call->codes[row * width + first + i] = (uint8_t)(codes[i] + half);
    }
}

void pagoda_quantize_codes(uint8_t *codes, uint16_t *scales, const void *source, int32_t source_is_bf16,
                           int64_t num_rows, int64_t in_features, int32_t bits) {
    quantize_call call = {codes, scales, source, in_features, source_is_bf16, bits};
    pagoda_parallel_for(num_rows, quantize_row, &call);
}
