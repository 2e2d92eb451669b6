/* Checks, division of work and the choice of the kernel. */
#include "gemm.h"

#include "../common/check.h"
#include "gemm_plan.h"

static const char op[] = "gemm"; /* the operator's name */

int camox_gemm_check(const camox_gemm_params *p) {
  if (p->heads < 0 || p->rows < 0 || p->columns < 0)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: a or b has a negative size", op);
  if (p->depth < 1) return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: a must have columns, got %lld", op, (long long)p->depth);
  if (p->a_stride[1] != 1 && p->a_stride[2] != 1)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: rows or columns of a must be dense", op);
  if (p->b_stride[1] != 1 && p->b_stride[2] != 1)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: rows or columns of b must be dense", op);
  return CAMOX_OK;
}

int64_t camox_gemm_scratch(const camox_gemm_params *p) { return camox_gemm_plan_of(p).total; }

void camox_gemm_partition(camox_gemm_params *p, int64_t threads) {
  /* Sums and panels of a tile fit an L2 cache. Panels of an `a` whose rows are dense are copied one at a time. */
  const int dense = p->a_stride[2] == 1;
  p->tile_rows = camox_even_part(p->rows, dense ? 512 : 192, CAMOX_GEMM_ROWS);
  p->tile_columns = camox_even_part(p->columns, dense ? 192 : 768, CAMOX_GEMM_COLUMNS);
  int64_t items = camox_gemm_plan_of(p).items;
  while (items % threads != 0 && items < 8 * threads) {
    if (p->tile_columns >= p->tile_rows && p->tile_columns > CAMOX_GEMM_COLUMNS)
      p->tile_columns = camox_even_part(p->tile_columns, p->tile_columns / 2, CAMOX_GEMM_COLUMNS);
    else if (p->tile_rows > 4 * CAMOX_GEMM_ROWS)
      p->tile_rows = camox_even_part(p->tile_rows, p->tile_rows / 2, CAMOX_GEMM_ROWS);
    else
      break;
    items = camox_gemm_plan_of(p).items;
  }
  p->slots = camox_min_i64(items, threads);
}

#if defined(CAMOX_HAVE_X86)
extern camox_gemm_kernel camox_gemm_kernel_bf16_avx512_bf16;
#endif

camox_gemm_kernel *camox_gemm(camox_dtype dtype) {
#if defined(CAMOX_HAVE_X86)
  if (dtype == CAMOX_BF16 && camox_isa_has_avx512_bf16()) return camox_gemm_kernel_bf16_avx512_bf16;
#else
  (void)dtype;
#endif
  return NULL;
}
