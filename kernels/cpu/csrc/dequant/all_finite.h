/* Whether numbers are finite. One NaN among the weights makes every answer noise. */
#ifndef PAGODA_ALL_FINITE_H
#define PAGODA_ALL_FINITE_H

#include <stdint.h>

/* Whether `count` numbers have no NaN and no infinity. `kind`: 0 for float32, 1 for bfloat16, 2 for float16. */
int32_t pagoda_all_finite(const void *numbers, int64_t count, int32_t kind);

#endif
