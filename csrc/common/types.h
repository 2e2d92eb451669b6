/* What every op's params struct is made of: element types and strided 4-d views. */
#ifndef CAMOX_TYPES_H
#define CAMOX_TYPES_H

#include <stddef.h>
#include <stdint.h>

/* Marks functions of headers that GPU kernels call too. */
#ifdef __CUDACC__
#define CAMOX_ANYWHERE __host__ __device__
#else
#define CAMOX_ANYWHERE
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { CAMOX_F32 = 0, CAMOX_BF16 = 1, CAMOX_F16 = 2, CAMOX_F64 = 3, CAMOX_DTYPE_COUNT = 4 } camox_dtype;

/* A number rounded to the type that this dtype is computed in: 1e-50 is 0 in float. */
static inline double camox_as_computed(camox_dtype dtype, double number) {
  return dtype == CAMOX_F64 ? number : (double)(float)number;
}

typedef enum { CAMOX_BORDER_ZEROS = 0, CAMOX_BORDER_REPLICATE = 1, CAMOX_BORDER_REFLECT = 2 } camox_border;

/* A (B,C,H,W) tensor: data is NULL where an optional tensor is absent; strides count elements and may be 0. */
typedef struct {
  void *data;
  int64_t stride[4];
} camox_view4;

/* The lines of a thread that computes a stencil on the CPU (stencil.h), about 24: its stack can be too small for them. */
#define CAMOX_STENCIL_SCRATCH (772 << 10)

/* The row or column that index i maps to, i may lie outside [0, n); -1 where the border is zero. */
CAMOX_ANYWHERE static inline int64_t camox_border_index(int64_t i, int64_t n, int border) {
  if (i >= 0 && i < n) return i;
  if (border == CAMOX_BORDER_REPLICATE) return i < 0 ? 0 : n - 1;
  if (border == CAMOX_BORDER_REFLECT) return i < 0 ? -i : 2 * n - 2 - i;
  return -1;
}

#ifdef __cplusplus
}
#endif
#endif
