/* AWQ's words of eight nibbles, and how their nibbles change places. */
#ifndef PAGODA_TURN_NIBBLES_H
#define PAGODA_TURN_NIBBLES_H

#include "runtime/vector.h"

/* The column that each nibble of a word of AWQ holds, the lowest first. */
static const int AWQ_ORDER[8] = {0, 2, 4, 6, 1, 3, 5, 7};

/* Turns the 8 x 8 nibbles of each lane: nibble n of vector i becomes nibble i of vector n. */
INLINE void turn_nibbles(u32x16 *vectors) {
    static const uint32_t LOW[] = {0x0f0f0f0f, 0x00ff00ff, 0x0000ffff}; /* of each pair of 1, 2 and 4 nibbles */
    for (int step = 0; step < 3; step++)
        for (int i = 0; i < 8; i++) {
            int size = 1 << step;
            if (i & size) continue;
            u32x16 *a = vectors + i, *b = vectors + i + size, swapped = (*a >> 4 * size ^ *b) & LOW[step];
            *b ^= swapped;
            *a ^= swapped << 4 * size;
        }
}

#endif
