/* Memory that each thread keeps from call to call: fresh memory would cost page faults in every layer. */
#ifndef PAGODA_SCRATCH_H
#define PAGODA_SCRATCH_H

#include <stddef.h>

/* What a thread needs memory for. */
typedef enum {
    SCRATCH_ATTENTION_UNITS,
    SCRATCH_ATTENTION_ITEMS,
    SCRATCH_ATTENTION_RESULTS,
    SCRATCH_ATTENTION_WORK,
    SCRATCH_TOP_K,
    SCRATCH_ROW,
    SCRATCH_EXPERTS,
    SCRATCH_LATENT,
    SCRATCH_INDEXER,
    SCRATCH_LINEAR_CALLS,
    SCRATCH_STATE,
    SCRATCH_CODES,
    SCRATCH_CODED_SUMS,
    NUM_SCRATCH_USES,
} pagoda_scratch_use;

/* Returns the calling thread's memory for `use`, at least `bytes` long, aligned to 64 bytes. Its contents stay;
 * it moves only when it grows. It is freed when the thread ends. */
void *pagoda_scratch(pagoda_scratch_use use, size_t bytes);

#endif
