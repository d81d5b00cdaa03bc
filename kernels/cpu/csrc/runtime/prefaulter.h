/* Has the system allocate pages of memory before they are written, on a thread that runs when a core is idle. */
#ifndef PAGODA_PREFAULTER_H
#define PAGODA_PREFAULTER_H

#include <stdint.h>

typedef struct pagoda_prefault pagoda_prefault;

/* For memory in `num_parts` parts, each of `num_blocks` blocks; `block_bytes` has the size of a block in each part. If
 * `is_polite`, the thread runs only on idle cores. NULL if there is no memory for the structure. */
pagoda_prefault *pagoda_prefault_new(void *const *parts, const int64_t *block_bytes, int64_t num_parts,
                                     int64_t num_blocks, int32_t is_polite);

/* Makes the first `num_wanted` blocks of every part ready, on the thread; returns at once. One caller at a time. */
void pagoda_prefault_want(pagoda_prefault *prefault, int64_t num_wanted);

/* How many blocks are ready; all of them if the system cannot allocate beforehand. */
int64_t pagoda_prefault_num_ready(pagoda_prefault *prefault);

/* Stops, and returns at once. The memory may be freed: at most one more system call asks for pages at its
 * addresses, which changes no contents. */
void pagoda_prefault_free(pagoda_prefault *prefault);

#endif
