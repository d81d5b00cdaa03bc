/* The pool of compute threads: one loop at a time is divided among them. */
#ifndef PAGODA_THREADS_H
#define PAGODA_THREADS_H

#include <stdint.h>

/* A task: does part `index` of a loop. */
typedef void (*pagoda_task)(void *args, int64_t index);

enum { PAGODA_MAX_THREADS = 256 };

/* Sets how many threads compute, the caller's own among them. Not while a loop runs. */
void pagoda_set_num_threads(int count);

/* How many threads compute. */
int pagoda_num_threads(void);

/* Calls task(args, i) for 0 <= i < count < 2^24, on the threads that are free, and returns when all are done.
 * The calling thread takes part, and does everything itself if another caller has the pool. */
void pagoda_parallel_for(int64_t count, pagoda_task task, void *args);

/* The same for tasks that handle a row each, of `elements` in all: a few elements are done by the calling thread. */
void pagoda_for_each_row(int64_t count, int64_t elements, pagoda_task task, void *args);

#endif
