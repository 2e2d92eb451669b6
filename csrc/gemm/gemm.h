/* gemm: products of matrices in memory, of any size, for the projections around an attention (camox_ops.nn.project). Products
   of matrices that lie in cache, inside other kernels, are common/gemm.inc.

   a (H,M,K), b (H,K,N): out[h] = a[h] b[h] (H,M,N), M, N >= 0, K >= 1. Rows or columns of a[h] and of b[h] are dense, so that
   transposes are no copies; heads have any stride. Rows of out[h] are dense.
   dtypes    bfloat16, on CPUs with AVX512-BF16: sums in float32, in an order that depends on the sizes alone, rounded once at
             the store. float32: sgemm.h, on every CPU.
   errors    CAMOX_INVALID_ARGUMENT: a negative size, K < 1, neither rows nor columns dense. */
#ifndef CAMOX_GEMM_H
#define CAMOX_GEMM_H

#include "../common/isa.h"
#include "../common/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  camox_dtype dtype;
  int64_t heads, rows, columns, depth; /* H, M, N, K */
  const void *a, *b;
  int64_t a_stride[3], b_stride[3]; /* of H, M, K and of H, K, N */
  void *out;
  int64_t out_stride[2];           /* of H, M */
  int64_t tile_rows, tile_columns; /* of out, that one work item computes: set by camox_gemm_partition, as slots */
  void *scratch;                   /* `slots` of camox_gemm_scratch(p) float32 each */
  int64_t slots;                   /* slot s computes the work items items*s/slots ... items*(s+1)/slots - 1 */
} camox_gemm_params;

int camox_gemm_check(const camox_gemm_params *p);

/* Divides out into tiles, the work items, and these among `threads`. Results do not depend on it. */
void camox_gemm_partition(camox_gemm_params *p, int64_t threads);
int64_t camox_gemm_scratch(const camox_gemm_params *p);

typedef void camox_gemm_kernel(const camox_gemm_params *p, int64_t begin, int64_t end); /* slots */

/* The kernel for this dtype on the instruction set in use; NULL: there is none. */
camox_gemm_kernel *camox_gemm(camox_dtype dtype);

#ifdef __cplusplus
}
#endif
#endif
