#include "dequant/all_finite.h"

#include "runtime/integers.h"

/* The largest magnitude as an integer: those of NaN and infinity, whose exponent has all bits set, come after all others.
 * Pieces are short, so that a damaged weight is noticed early and a loop without exits becomes vectors. */
enum { PIECE = 4096 };

static int are_below_32(const uint32_t *numbers, int64_t count, uint32_t infinity) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < count; i++) {
        uint32_t magnitude = numbers[i] & 0x7fffffff;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest < infinity;
}

static int are_below_16(const uint16_t *numbers, int64_t count, uint16_t infinity) {
    uint16_t largest = 0;
    for (int64_t i = 0; i < count; i++) {
        uint16_t magnitude = numbers[i] & 0x7fff;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest < infinity;
}

int32_t pagoda_all_finite(const void *numbers, int64_t count, int32_t kind) {
    enum { FLOAT32, BFLOAT16 };
    for (int64_t start = 0; start < count; start += PIECE) {
        int64_t size = min(PIECE, count - start);
        if (kind == FLOAT32 && !are_below_32((const uint32_t *)numbers + start, size, 0x7f800000)) return 0;
        if (kind != FLOAT32 &&
            !are_below_16((const uint16_t *)numbers + start, size, kind == BFLOAT16 ? 0x7f80 : 0x7c00))
            return 0;
    }
    return 1;
}
