/* See scratch.h. A pthread key holds a thread's memory and frees it when the thread ends. */
#define _GNU_SOURCE
#include "runtime/scratch.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ALIGNMENT = 64 };

typedef struct {
    void *bytes;
    size_t size;
} buffer;

static pthread_key_t key;
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* Frees a thread's memory. */
static void release(void *value) {
    buffer *buffers = value;
    for (int use = 0; use < NUM_SCRATCH_USES; use++) free(buffers[use].bytes);
    free(buffers);
}

/* Allocates, or ends the program. */
static void *allocate(size_t size) {
    void *bytes = aligned_alloc(ALIGNMENT, size);
    if (!bytes) {
        fprintf(stderr, "pagoda: no memory for %zu bytes of scratch\n", size);
        abort();
    }
    return bytes;
}

/* Creates the key, once for the process. */
static void create_key(void) {
    if (pthread_key_create(&key, release)) abort();
}

/* The calling thread's buffers. */
static buffer *buffers_of_thread(void) {
    pthread_once(&once, create_key);
    buffer *buffers = pthread_getspecific(key);
    if (!buffers) {
        size_t size = (NUM_SCRATCH_USES * sizeof *buffers + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
        buffers = memset(allocate(size), 0, size);
        pthread_setspecific(key, buffers);
    }
    return buffers;
}

void *pagoda_scratch(pagoda_scratch_use use, size_t bytes) {
    buffer *kept = &buffers_of_thread()[use];
    if (kept->size < bytes) {
        size_t size = (bytes + bytes / 2 + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
        void *grown = allocate(size);
        if (kept->size) memcpy(grown, kept->bytes, kept->size);
        free(kept->bytes);
        *kept = (buffer){grown, size};
    }
    return kept->bytes;
}
