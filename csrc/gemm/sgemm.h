/* Products of float32 matrices in memory, C = alpha op(A) op(B) + beta C + bias: for the projections (gemm.h), and for the BLAS
   calls of PyTorch's own kernels (../tune).

   formula   c[i,j] = (beta ? beta c[i,j] : 0) + alpha * sum over k of x[i,k] y[k,j] + (bias ? bias[j] : row_bias ? row_bias[i] : 0)
   shapes    x [rows, depth], y [depth, columns], c [rows, columns] with neighbouring columns adjacent in memory; of x and of y
             either the rows or the columns lie adjacent (one of the two strides is 1), as in BLAS
   sums      y_sums[j] = sum over k of y[k,j], from the packed blocks: a bias's gradient beside its weight's
   dtype     float32. Sums run over blocks of the depth, in order, in fused multiply-adds where the CPU has them; they depend on
             the sizes alone, so that any division of the work among threads gives the same bits
   beta      0: c is not read, whatever is there; alpha is not 0
   source    K. Goto and R. van de Geijn, "Anatomy of high-performance matrix multiplication" (ACM TOMS 34, 2008). */
#ifndef CAMOX_SGEMM_H
#define CAMOX_SGEMM_H

#include <stdint.h>

#include "../common/isa.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  int64_t rows, columns, depth;
  float alpha, beta;
  int64_t x_row, x_depth;    /* strides of x, in elements */
  int64_t y_depth, y_column; /* strides of y */
  int64_t c_row;
} camox_sgemm_shape;

typedef struct {
  const float *x, *y;
  float *c;
  /* scratch is as the last call left it, which had this y and these columns: what it packed of y is used again where that was
     all of it, as camox_sgemm_keeps_y says */
  int y_is_packed;
  const float *bias;     /* [columns], dense, or NULL */
  const float *row_bias; /* [rows], dense, or NULL; with a bias of the columns it is not read */
  float *y_sums;         /* [columns]: what the columns of y add up to, written by the tiles of row 0; or NULL */
} camox_sgemm_operands;

/* A rectangle of c: what one work item computes. */
typedef struct {
  int64_t row, rows, column, columns;
} camox_sgemm_tile;

/* scratch: CAMOX_SGEMM_SCRATCH_BYTES, aligned to 64. */
typedef void camox_sgemm_kernel(const camox_sgemm_shape *shape, const camox_sgemm_operands *at, camox_sgemm_tile tile,
                                float *scratch);

camox_sgemm_kernel *camox_sgemm(camox_isa isa);

enum {
  CAMOX_SGEMM_COLUMNS = 32, /* tiles are best a multiple of so many columns */
  CAMOX_SGEMM_DEPTH = 384,  /* the longest sum in registers */
  /* Packed blocks, which lie in L2 together: 128 KiB of x, 512 KiB of y. */
  CAMOX_SGEMM_X_FLOATS = 32 << 10,
  CAMOX_SGEMM_Y_FLOATS = 128 << 10,
  CAMOX_SGEMM_SCRATCH_BYTES = 4 * (CAMOX_SGEMM_X_FLOATS + CAMOX_SGEMM_Y_FLOATS)
};

/* Whether a tile of so many columns leaves all of y packed in its scratch: one block of the depth and of the columns. */
static inline int camox_sgemm_keeps_y(int64_t depth, int64_t columns) {
  return depth <= CAMOX_SGEMM_DEPTH && columns <= CAMOX_SGEMM_Y_FLOATS / depth / CAMOX_SGEMM_COLUMNS * CAMOX_SGEMM_COLUMNS;
}

#ifdef __cplusplus
}
#endif
#endif
