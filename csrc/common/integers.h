/* Whole numbers: the smaller, the larger, quotients that are rounded up, equal parts. */
#ifndef CAMOX_INTEGERS_H
#define CAMOX_INTEGERS_H

#include <stdint.h>

static inline int64_t camox_min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t camox_max_i64(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t camox_ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t camox_round_up(int64_t n, int64_t unit) { return camox_ceil_div(n, unit) * unit; }

/* The size of a part where n is cut into as few equal parts as `most` allows, before each is rounded up to a multiple of
   `unit`; at least one `unit`. */
static inline int64_t camox_even_part(int64_t n, int64_t most, int64_t unit) {
  const int64_t whole = camox_max_i64(n, 1);
  return camox_round_up(camox_ceil_div(whole, camox_ceil_div(whole, most)), unit);
}

#endif
