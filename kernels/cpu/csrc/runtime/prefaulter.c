/* See prefaulter.h. No locks: the thread has the lowest priority, so a caller that waited for it could wait long. */
#define _GNU_SOURCE
#include "runtime/prefaulter.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { BLOCKS_AT_ONCE = 8, POPULATE_WRITE = 23 /* MADV_POPULATE_WRITE, Linux 5.14 */ };

typedef struct {
    char *start;
    int64_t block_bytes;
} part;

struct pagoda_prefault {
    atomic_int_fast64_t num_wanted, num_ready;
    atomic_bool is_running, is_stopped;
    atomic_int users; /* the owner, and the thread while it runs; the last one frees */
    bool is_polite;
    int64_t num_parts, num_blocks;
    part parts[];
};

/* Drops one user; the last one frees. */
static void leave(pagoda_prefault *prefault) {
    if (atomic_fetch_sub(&prefault->users, 1) == 1) free(prefault);
}

/* Has the system allocate pages; returns whether it did. */
static bool populate(char *from, size_t bytes) {
#if defined(__linux__)
    size_t before = (size_t)from % (size_t)sysconf(_SC_PAGESIZE);
    return madvise(from - before, bytes + before, POPULATE_WRITE) == 0;
#else
    (void)from, (void)bytes;
    return false;
#endif
}

/* Allocates the next few blocks. */
static void make_ready(pagoda_prefault *prefault) {
    int64_t first = atomic_load(&prefault->num_ready), end = atomic_load(&prefault->num_wanted);
    if (end > first + BLOCKS_AT_ONCE) end = first + BLOCKS_AT_ONCE;
    for (int64_t i = 0; i < prefault->num_parts && !atomic_load(&prefault->is_stopped); i++) {
        const part *p = &prefault->parts[i];
        if (!populate(p->start + first * p->block_bytes, (size_t)((end - first) * p->block_bytes))) {
            end = prefault->num_blocks; /* this system cannot, so the first write has to wait */
            break;
        }
    }
    atomic_store(&prefault->num_ready, end);
}

/* Whether more blocks are wanted than are ready. */
static bool has_work(pagoda_prefault *prefault) {
    return atomic_load(&prefault->num_ready) < atomic_load(&prefault->num_wanted) &&
           !atomic_load(&prefault->is_stopped);
}

/* The thread: ends when all wanted blocks are ready. */
static void *run(void *args) {
    pagoda_prefault *prefault = args;
#if defined(SCHED_IDLE)
    struct sched_param param = {0};
    if (prefault->is_polite) pthread_setschedparam(pthread_self(), SCHED_IDLE, &param); /* if it may */
#endif
    do {
        while (has_work(prefault)) make_ready(prefault);
        atomic_store(&prefault->is_running, false);
    } while (has_work(prefault) && !atomic_exchange(&prefault->is_running, true));
    leave(prefault);
    return NULL;
}

pagoda_prefault *pagoda_prefault_new(void *const *parts, const int64_t *block_bytes, int64_t num_parts,
                                     int64_t num_blocks, int32_t is_polite) {
    pagoda_prefault *prefault = calloc(1, sizeof *prefault + (size_t)num_parts * sizeof(part));
    if (!prefault) return NULL;
    atomic_init(&prefault->users, 1);
    prefault->is_polite = is_polite;
    prefault->num_parts = num_parts;
    prefault->num_blocks = num_blocks;
    for (int64_t i = 0; i < num_parts; i++) prefault->parts[i] = (part){parts[i], block_bytes[i]};
    return prefault;
}

void pagoda_prefault_want(pagoda_prefault *prefault, int64_t num_wanted) {
    if (num_wanted > prefault->num_blocks) num_wanted = prefault->num_blocks;
    if (num_wanted <= atomic_load(&prefault->num_wanted)) return;
    atomic_store(&prefault->num_wanted, num_wanted);
    if (!has_work(prefault) || atomic_exchange(&prefault->is_running, true)) return;
    pthread_t thread;
    atomic_fetch_add(&prefault->users, 1);
    if (!pthread_create(&thread, NULL, run, prefault)) {
        pthread_detach(thread);
        return;
    }
    atomic_store(&prefault->is_running, false); /* the next call tries again */
    leave(prefault);
}

int64_t pagoda_prefault_num_ready(pagoda_prefault *prefault) { return atomic_load(&prefault->num_ready); }

void pagoda_prefault_free(pagoda_prefault *prefault) {
    atomic_store(&prefault->is_stopped, true);
    leave(prefault);
}
