/* Attention over a cache of bfloat16: see attention_compute.h. */
#include "attention/attention_compute.h"

/* Computes one item of a plan. */
void pagoda_attend_bfloat16(void *plan, int64_t item) {
    compute(BFLOAT16, plan, item);
}
