/* Attention over a cache of bfloat16: see attention_compute.h. */
#include "attention_compute.h"

void pagoda_attend_bfloat16(void *plan, int64_t item) {
    compute(BFLOAT16, plan, item);
}
