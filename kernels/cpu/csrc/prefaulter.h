/* Gives memory its pages before they are written, on a thread that runs when a core has nothing else to do. */
#ifndef PAGODA_PREFAULTER_H
#define PAGODA_PREFAULTER_H

#include <stdint.h>

typedef struct pagoda_prefault pagoda_prefault;

/* For memory in `num_parts` parts, each of `num_blocks` blocks of `block_bytes`. The thread leaves cores to others if
 * `is_polite`. NULL if there is no memory for the structure. */
pagoda_prefault *pagoda_prefault_new(void *const *parts, int64_t num_parts, int64_t block_bytes, int64_t num_blocks,
                                     int32_t is_polite);

/* Has the first `num_wanted` blocks of every part made ready, and returns at once. One caller at a time. */
void pagoda_prefault_want(pagoda_prefault *prefault, int64_t num_wanted);

/* How many are ready; all where the system cannot do it beforehand. */
int64_t pagoda_prefault_num_ready(pagoda_prefault *prefault);

/* Stops, and returns at once. The memory may be given back: at most one more call asks for pages of where it was, which
 * changes nothing that is there then. */
void pagoda_prefault_free(pagoda_prefault *prefault);

#endif
