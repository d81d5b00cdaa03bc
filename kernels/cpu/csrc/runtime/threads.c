/* See threads.h.
 *
 * A loop is published as one 64-bit word: its generation, its number of parts, and the next part. Threads claim parts by
 * adding 1, so a claim identifies its loop, and a thread that comes late claims nothing. No thread waits for an idle
 * one: on a busy machine a loop takes no longer than its slowest part.
 */
#define _GNU_SOURCE
#include "runtime/threads.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <time.h>

enum { PART_BITS = 24, SPINS_BEFORE_SLEEP = 20000, SPINS_BEFORE_YIELD = 2000 };
static const double LONG_WAIT_S = 2e-4;
static const uint64_t PART_MASK = ((uint64_t)1 << PART_BITS) - 1;

static struct {
    _Alignas(64) atomic_uint_fast64_t loop; /* generation << 48 | number of parts << 24 | next part */
    _Alignas(64) atomic_int_fast64_t done;
    _Alignas(64) pagoda_task task;
    void *args;
    atomic_int sleepers;
    atomic_int num_threads;
    double single_until; /* until when callers compute single-threaded, monotonic seconds; 0: they do not */
    int num_workers; /* threads that exist, without the callers' */
    pthread_mutex_t use; /* held by the caller whose loop runs */
    pthread_mutex_t sleep;
    pthread_cond_t wake;   /* for workers that compute */
    pthread_cond_t enlist; /* for workers beyond num_threads */
} pool = {
    .num_threads = 1,
    .use = PTHREAD_MUTEX_INITIALIZER,
    .sleep = PTHREAD_MUTEX_INITIALIZER,
    .wake = PTHREAD_COND_INITIALIZER,
    .enlist = PTHREAD_COND_INITIALIZER,
};

/* Lets the processor save power while it spins. */
static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Whether a loop has unclaimed parts. */
static inline bool has_parts(uint64_t loop) { return (loop & PART_MASK) < ((loop >> PART_BITS) & PART_MASK); }

/* Does parts of the current loop until none is left; returns how many. */
static int64_t work(void) {
    int64_t num_done = 0;
    while (has_parts(atomic_load_explicit(&pool.loop, memory_order_acquire))) {
        uint64_t claim = atomic_fetch_add_explicit(&pool.loop, 1, memory_order_acq_rel);
        if (!has_parts(claim)) break;
        /* The loop ends only after this part, so task and args are this loop's. */
        pool.task(pool.args, (int64_t)(claim & PART_MASK));
        atomic_fetch_add_explicit(&pool.done, 1, memory_order_release);
        num_done++;
    }
    return num_done;
}

/* Whether a worker is one of the num_threads that compute. */
static inline bool is_enlisted(int thread) {
    return thread < atomic_load_explicit(&pool.num_threads, memory_order_relaxed);
}

/* Spins, then sleeps, until there is a loop with unclaimed parts. */
static void wait_for_loop(int thread) {
    for (int spin = 0; spin < SPINS_BEFORE_SLEEP && is_enlisted(thread); spin++) {
        if (has_parts(atomic_load_explicit(&pool.loop, memory_order_acquire))) return;
        relax();
    }
    pthread_mutex_lock(&pool.sleep);
    for (bool is_needed = false; !is_needed;) {
        while (!is_enlisted(thread)) pthread_cond_wait(&pool.enlist, &pool.sleep);
        /* Before reading the loop: `publish` reads sleepers after it writes the loop. */
        atomic_fetch_add(&pool.sleepers, 1);
        is_needed = has_parts(atomic_load(&pool.loop));
        if (!is_needed) pthread_cond_wait(&pool.wake, &pool.sleep);
        atomic_fetch_sub(&pool.sleepers, 1);
    }
    pthread_mutex_unlock(&pool.sleep);
}

/* A worker's thread. */
static void *run_worker(void *number) {
    int thread = (int)(intptr_t)number;
    for (;;) {
        wait_for_loop(thread);
        work();
    }
    return NULL;
}

/* Resets the pool in a forked child, which does not have its parent's threads. */
static void forget_workers(void) {
    pool.num_workers = 0;
    atomic_store(&pool.num_threads, 1);
    atomic_store(&pool.sleepers, 0);
    atomic_store(&pool.loop, 0);
    pthread_mutex_init(&pool.use, NULL);
    pthread_mutex_init(&pool.sleep, NULL);
    pthread_cond_init(&pool.wake, NULL);
    pthread_cond_init(&pool.enlist, NULL);
}

void pagoda_set_num_threads(int count) {
    static bool is_registered = false;
    pthread_mutex_lock(&pool.use);
    if (!is_registered) is_registered = !pthread_atfork(NULL, NULL, forget_workers);
    count = count < 1 ? 1 : count > PAGODA_MAX_THREADS ? PAGODA_MAX_THREADS : count;
    while (pool.num_workers < count - 1) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, run_worker, (void *)(intptr_t)(pool.num_workers + 1))) break;
        pthread_detach(thread);
        pool.num_workers++;
    }
    pthread_mutex_lock(&pool.sleep);
    atomic_store(&pool.num_threads, count < pool.num_workers + 1 ? count : pool.num_workers + 1);
    pthread_cond_broadcast(&pool.enlist);
    pthread_mutex_unlock(&pool.sleep);
    pthread_mutex_unlock(&pool.use);
}

int pagoda_num_threads(void) { return atomic_load(&pool.num_threads); }

/* The monotonic clock. */
static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Whether callers compute single-threaded for now. */
static bool is_single(void) {
    if (pool.single_until == 0) return false;
    if (seconds() < pool.single_until) return true;
    pool.single_until = 0;
    return false;
}

/* Takes part in the loop and waits until the other threads' parts are done too. If another program takes a thread's
 * processor, the wait is longer than a part takes; the caller then computes single-threaded for as long as it waited. */
static void finish_loop(int64_t count) {
    double start = seconds();
    int64_t num_done = work();
    for (int spin = 0; spin < SPINS_BEFORE_YIELD; spin++) {
        if (atomic_load_explicit(&pool.done, memory_order_acquire) == count) return;
        relax();
    }
    double idle = seconds();
    while (atomic_load_explicit(&pool.done, memory_order_acquire) < count) sched_yield();
    double end = seconds(), part = (idle - start) / (double)(num_done ? num_done : 1);
    if (end - idle > LONG_WAIT_S + 2 * part) pool.single_until = end + (end - idle);
}

/* Starts a loop whose first parts are done, and wakes the sleeping workers. */
static void publish(int64_t count, int64_t first, pagoda_task task, void *args) {
    pool.task = task;
    pool.args = args;
    atomic_store_explicit(&pool.done, first, memory_order_relaxed);
    uint64_t generation = (atomic_load_explicit(&pool.loop, memory_order_relaxed) >> (2 * PART_BITS)) + 1;
    atomic_store(&pool.loop, generation << (2 * PART_BITS) | (uint64_t)count << PART_BITS | (uint64_t)first);
    if (atomic_load(&pool.sleepers)) {
        pthread_mutex_lock(&pool.sleep);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.sleep);
    }
}

void pagoda_parallel_for(int64_t count, pagoda_task task, void *args) {
    int64_t first = 0;
    if (count <= 1 || pagoda_num_threads() == 1 || pthread_mutex_trylock(&pool.use)) {
        while (first < count) task(args, first++);
        return;
    }
    while (first < count && is_single()) task(args, first++);
    if (first < count) {
        publish(count, first, task, args);
        finish_loop(count);
    }
    pthread_mutex_unlock(&pool.use);
}

enum { FEW_ELEMENTS = 1 << 14 }; /* below this, waking other threads costs more than they save */

void pagoda_for_each_row(int64_t count, int64_t elements, pagoda_task task, void *args) {
    if (elements >= FEW_ELEMENTS) {
        pagoda_parallel_for(count, task, args);
        return;
    }
    for (int64_t row = 0; row < count; row++) task(args, row);
}
