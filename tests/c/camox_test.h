/* For the C tests of kernels: strided images in buffers of exactly their size, their values as double, comparison.

   AddressSanitizer guards both ends of every buffer; elements between those of a strided image hold a pattern that
   test_untouched looks for afterwards.                                                                              */
#ifndef CAMOX_TEST_H
#define CAMOX_TEST_H

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../csrc/common/isa.h"
#include "../../csrc/common/status.h"
#include "../../csrc/common/types.h"

static int test_failures;
static long test_checks;

#define TEST(condition, ...)                                 \
  do {                                                       \
    ++test_checks;                                           \
    if (!(condition) && ++test_failures <= 20) {             \
      printf("%s:%d: %s: ", __FILE__, __LINE__, #condition); \
      printf(__VA_ARGS__);                                   \
      printf("\n");                                          \
    }                                                        \
  } while (0)

static const char *const test_dtype_names[CAMOX_DTYPE_COUNT] = {"float32", "bfloat16", "float16", "float64"};
static const double test_epsilon[CAMOX_DTYPE_COUNT] = {FLT_EPSILON, 0x1p-7, 0x1p-10, DBL_EPSILON};
static const size_t test_size[CAMOX_DTYPE_COUNT] = {4, 2, 2, 8};

/* CONTIGUOUS and CHANNELS_LAST are dense; STRIDED leaves gaps everywhere; EXPANDED repeats the first image (stride 0). */
typedef enum { TEST_CONTIGUOUS, TEST_CHANNELS_LAST, TEST_STRIDED, TEST_EXPANDED, TEST_LAYOUTS } test_layout;
static const char *const test_layout_names[TEST_LAYOUTS] = {"contiguous", "channels_last", "strided", "expanded"};

typedef struct {
  camox_view4 view;
  camox_dtype dtype;
  int64_t size[4];
  void *buffer;
  size_t bytes;
} test_image;

/* Fills the stack that the next call may use with NaN (bytes of 0xff are one in every dtype), as far as kernels keep scratch
   there: what reads scratch that it did not write shows. AddressSanitizer gives memory of the heap the same bytes. */
static __attribute__((noinline, unused)) void test_poison_scratch(void) {
  volatile unsigned char scratch[512 * 1024];
  memset((void *)scratch, 0xff, sizeof scratch);
}

const char *__asan_default_options(void);
const char *__asan_default_options(void) { return "max_malloc_fill_size=1073741824:malloc_fill_byte=255"; }

/* A uniform number of 2^bits steps in [-1, 1): exact in every dtype up to 8 bits. */
static inline double test_random(int bits) {
  static uint64_t state = 0x9e3779b97f4a7c15u;
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return ldexp((double)(int64_t)(state >> (64 - bits)), 1 - bits) - 1;
}

static inline int test_is_half(camox_dtype dtype) { return dtype == CAMOX_BF16 || dtype == CAMOX_F16; }

static inline double test_get(camox_dtype dtype, const void *data, int64_t index) {
  if (dtype == CAMOX_F32) return ((const float *)data)[index];
  if (dtype == CAMOX_F64) return ((const double *)data)[index];
  uint16_t half = ((const uint16_t *)data)[index];
  if (dtype == CAMOX_BF16) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
  }
  int exponent = (half >> 10) & 31, mantissa = half & 1023;
  double magnitude = exponent == 0    ? ldexp(mantissa, -24)
                     : exponent == 31 ? (mantissa ? NAN : INFINITY)
                                      : ldexp(1024 + mantissa, exponent - 25);
  return half & 0x8000 ? -magnitude : magnitude;
}

/* The value must be exact in the dtype. */
static inline void test_set(camox_dtype dtype, void *data, int64_t index, double value) {
  if (dtype == CAMOX_F32) ((float *)data)[index] = (float)value;
  if (dtype == CAMOX_F64) ((double *)data)[index] = value;
  if (dtype == CAMOX_BF16) {
    float single = (float)value;
    uint32_t bits;
    memcpy(&bits, &single, sizeof bits);
    ((uint16_t *)data)[index] = (uint16_t)(bits >> 16);
  }
  if (dtype == CAMOX_F16) {
    int exponent = 0;
    double fraction = frexp(fabs(value), &exponent);
    uint16_t bits = value == 0 ? 0 : (uint16_t)(((exponent + 14) << 10) | ((int)ldexp(fraction, 11) & 1023));
    ((uint16_t *)data)[index] = (uint16_t)(bits | (signbit(value) ? 0x8000 : 0));
  }
}

static inline int64_t test_offset(const test_image *p, int64_t b, int64_t c, int64_t y, int64_t x) {
  const int64_t *stride = p->view.stride;
  return b * stride[0] + c * stride[1] + y * stride[2] + x * stride[3];
}

static inline double test_at(const test_image *p, int64_t b, int64_t c, int64_t y, int64_t x) {
  return test_get(p->dtype, p->view.data, test_offset(p, b, c, y, x));
}

/* A buffer of exactly the bytes that lie between the first and the last pixel, all 0xa5. */
static inline test_image test_allocate(camox_dtype dtype, const int64_t size[4], const int64_t stride[4]) {
  test_image p = {.dtype = dtype};
  memcpy(p.size, size, sizeof p.size);
  memcpy(p.view.stride, stride, sizeof p.view.stride);
  int empty = size[0] * size[1] * size[2] * size[3] == 0;
  int64_t count = empty ? 0 : test_offset(&p, size[0] - 1, size[1] - 1, size[2] - 1, size[3] - 1) + 1;
  p.bytes = (size_t)count * test_size[dtype];
  p.buffer = malloc(p.bytes ? p.bytes : 1);
  if (p.buffer == NULL) abort();
  memset(p.buffer, 0xa5, p.bytes);
  p.view.data = p.buffer;
  return p;
}

/* Scratch of one thread, all NaN: a kernel reads what it wrote there. */
static inline void *test_scratch(size_t bytes) {
  void *scratch = aligned_alloc(64, bytes);
  if (scratch == NULL) abort();
  return memset(scratch, 0xff, bytes);
}

/* All work items of *params, in as many pieces as threads would take, each with `bytes` of scratch. */
#define TEST_RUN(kernel, type, params, items, pieces, bytes)              \
  for (int64_t piece = 0, all = (items); piece < (pieces); ++piece) {     \
    type own = *(params);                                                 \
    test_poison_scratch();                                                \
    own.scratch = test_scratch(bytes);                                    \
    (kernel)(&own, all * piece / (pieces), all * (piece + 1) / (pieces)); \
    free(own.scratch);                                                    \
  }

/* What kernels write to: `gaps` as in a range of the channels of a larger image. */
static inline test_image test_output(camox_dtype dtype, int channels_last, int gaps, const int64_t size[4]) {
  int64_t h = size[2], w = size[3], c = size[1] + (gaps ? 3 : 0);
  int64_t contiguous[4] = {c * h * w, h * w, w, 1}, last[4] = {c * h * w, 1, c * w, c};
  return test_allocate(dtype, size, channels_last ? last : contiguous);
}

#define TEST_EACH(p, b, c, y, x)                 \
  for (int64_t b = 0; b < (p)->size[0]; ++b)     \
    for (int64_t c = 0; c < (p)->size[1]; ++c)   \
      for (int64_t y = 0; y < (p)->size[2]; ++y) \
        for (int64_t x = 0; x < (p)->size[3]; ++x)

/* What kernels read: random values in any layout. */
static inline test_image test_input(camox_dtype dtype, test_layout layout, const int64_t size[4]) {
  int64_t c = size[1], h = size[2], w = size[3], row = 2 * w + 3, plane = (h + 1) * row;
  int64_t strides[TEST_LAYOUTS][4] = {
      {c * h * w, h * w, w, 1}, {c * h * w, 1, c * w, c}, {(c + 1) * plane, plane, row, 2}, {0, h * w, w, 1}};
  test_image p = test_allocate(dtype, size, strides[layout]);
  TEST_EACH(&p, b, i, y, x) test_set(dtype, p.view.data, test_offset(&p, b, i, y, x), test_random(8));
  return p;
}

/* The pixels as [B,C,H,W] without gaps; zeros of the same shape where `zeros`. To be freed. */
static inline double *test_values(const test_image *p, int zeros) {
  double *values = calloc((size_t)(p->size[0] * p->size[1] * p->size[2] * p->size[3]) + 1, sizeof *values), *next = values;
  if (values == NULL) abort();
  if (!zeros) TEST_EACH(p, b, c, y, x) *next++ = test_at(p, b, c, y, x);
  return values;
}

static inline void test_free(test_image *p) {
  free(p->buffer);
  p->buffer = NULL;
}

/* Elements that belong to no pixel still hold the pattern. */
static inline int test_untouched(const test_image *p) {
  unsigned char *used = calloc(p->bytes + 1, 1);
  if (used == NULL) abort();
  size_t n = test_size[p->dtype];
  TEST_EACH(p, b, c, y, x) memset(used + (size_t)test_offset(p, b, c, y, x) * n, 1, n);
  int same = 1;
  for (size_t i = 0; i < p->bytes; ++i) same &= used[i] || ((unsigned char *)p->buffer)[i] == 0xa5;
  free(used);
  return same;
}

/* max|ours - truth| <= steps eps(float32 or float64) max|truth|, and one rounding to a half type on top; NaN never passes.
   truth is [B,C,H,W] without gaps. */
static inline int test_close_within(double steps, const test_image *ours, const double *truth, double *error, double *allowed) {
  double largest = 0;
  int close = 1;
  const double *value = truth;
  TEST_EACH(ours, b, c, y, x) largest = fmax(largest, fabs(*value++));
  double precise = ours->dtype == CAMOX_F64 ? DBL_EPSILON : FLT_EPSILON;
  double rounding = test_epsilon[ours->dtype] > precise ? test_epsilon[ours->dtype] / 2 : 0;
  *error = 0, value = truth;
  TEST_EACH(ours, b, c, y, x) {
    double difference = fabs(test_at(ours, b, c, y, x) - *value);
    *allowed = steps * precise * largest + rounding * fabs(*value++) + (ours->dtype == CAMOX_F16 ? 0x1p-25 : 0);
    if (!(difference <= *allowed)) close = 0, *error = isnan(difference) ? INFINITY : fmax(*error, difference);
  }
  return close;
}

static inline int test_close(const test_image *ours, const double *truth, double *error, double *allowed) {
  return test_close_within(8, ours, truth, error, allowed);
}

static inline int test_report(const char *op) {
  printf("%s: %ld checks, %d failures\n", op, test_checks, test_failures);
  return test_failures != 0;
}

#endif
