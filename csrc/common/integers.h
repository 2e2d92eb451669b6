/* Whole numbers: the smaller, the larger, quotients that are rounded up. */
#ifndef CAMOX_INTEGERS_H
#define CAMOX_INTEGERS_H

#include <stdint.h>

static inline int64_t camox_min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t camox_max_i64(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t camox_ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t camox_round_up(int64_t n, int64_t unit) { return camox_ceil_div(n, unit) * unit; }

#endif
