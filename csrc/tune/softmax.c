#include "softmax.h"

#include "../common/integers.h"
#include "../common/kernel_table.h"

CAMOX_KERNEL_TABLE_WITHOUT_F64(camox_softmax_kernel, camox_softmax_forward, camox_softmax_forward_kernel)
CAMOX_KERNEL_TABLE_WITHOUT_F64(camox_softmax_kernel, camox_softmax_backward, camox_softmax_backward_kernel)
CAMOX_F32_KERNEL_TABLE(camox_softmax_kernel, camox_long_softmax, camox_long_softmax_kernel)
CAMOX_F32_KERNEL_TABLE(camox_softmax_kernel, camox_long_log_softmax_gradient, camox_long_log_softmax_gradient_kernel)

int64_t camox_softmax_items(const camox_softmax_params *p) {
  return p->inner == 1 ? camox_ceil_div(p->outer, CAMOX_SOFTMAX_ROWS) : p->outer * camox_ceil_div(p->inner, CAMOX_SOFTMAX_ROWS);
}

/* Two tiles. */
size_t camox_softmax_scratch(const camox_softmax_params *p) { return 2 * (size_t)p->n * CAMOX_SOFTMAX_ROWS * sizeof(float); }
