/* Arithmetic on sizes and indices. */
#ifndef PAGODA_INTEGERS_H
#define PAGODA_INTEGERS_H

#include <stdint.h>

/* The smaller of two numbers. */
static inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

/* The larger of two numbers. */
static inline int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }

/* a / b rounded up; both positive. */
static inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

#endif
