/* Attention over a cache of float32: see attention_compute.h. */
#include "attention/attention_compute.h"

/* Computes one item of a plan. */
void pagoda_attend_float32(void *plan, int64_t item) {
    compute(FLOAT32, plan, item);
}
