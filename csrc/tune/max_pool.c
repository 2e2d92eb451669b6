#include "max_pool.h"

#include "../common/integers.h"
#include "../common/kernel_table.h"

CAMOX_KERNEL_TABLE_WITHOUT_F64(camox_max_pool_kernel, camox_max_pool, camox_max_pool_kernel)

int64_t camox_max_pool_phase(const camox_max_pool_params *p) {
  const int64_t stride = p->stride[1];
  const int64_t pixels = p->padding[1] / stride + 1 + camox_round_up(p->columns / stride + 1, CAMOX_MAX_POOL_VECTOR);
  const int64_t read = camox_round_up(p->y_columns, CAMOX_MAX_POOL_VECTOR) + p->window[1] / stride;
  return camox_round_up(camox_max_i64(pixels, read), CAMOX_MAX_POOL_VECTOR);
}

int64_t camox_max_pool_lines(const camox_max_pool_params *p) { return camox_min_i64(p->window[0], p->rows); }

size_t camox_max_pool_scratch(const camox_max_pool_params *p) {
  const int64_t line = camox_round_up(p->y_columns, CAMOX_MAX_POOL_VECTOR);
  const int64_t copies = camox_round_up(p->columns, CAMOX_MAX_POOL_VECTOR) + p->stride[1] * camox_max_pool_phase(p);
  return (size_t)(copies + 2 * camox_max_pool_lines(p) * line) * sizeof(float) + (size_t)p->window[1] * sizeof(int64_t);
}
