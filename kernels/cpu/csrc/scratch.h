/* Memory that a thread keeps from call to call, so that no layer pays for page faults. */
#ifndef PAGODA_SCRATCH_H
#define PAGODA_SCRATCH_H

#include <stddef.h>

typedef enum {
    SCRATCH_ATTENTION_UNITS,
    SCRATCH_ATTENTION_ITEMS,
    SCRATCH_ATTENTION_PARTIALS,
    SCRATCH_ATTENTION_WORK,
    SCRATCH_TOP_K,
    SCRATCH_ROW,
    NUM_SCRATCH_USES,
} pagoda_scratch_use;

/* Returns the calling thread's memory for `use`, at least `bytes` long, aligned to 64 bytes. It holds what it held, and
 * moves only when it must grow. It is freed when the thread ends. */
void *pagoda_scratch(pagoda_scratch_use use, size_t bytes);

#endif
