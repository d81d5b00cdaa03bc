/* Stores around the caches, for what no one reads soon: the processor need not read the line that it overwrites. */
#ifndef PAGODA_STREAM_H
#define PAGODA_STREAM_H

#include "runtime/vector.h"

/* Stores 64 bytes; around the caches where they are a whole line. Other threads see them after stream_end(). */
INLINE void stream_store(void *to, u32x16 value) {
#if defined(__AVX512F__)
    if ((uintptr_t)to % sizeof value == 0) {
        _mm512_stream_si512(to, (__m512i)value);
        return;
    }
#endif
    memcpy(to, &value, sizeof value);
}

/* Makes what this thread streamed visible to others before what it stores next. */
INLINE void stream_end(void) {
#if defined(__AVX512F__)
    _mm_sfence();
#endif
}

#endif
