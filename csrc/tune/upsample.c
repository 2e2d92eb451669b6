#include "upsample.h"

#include "../common/kernel_table.h"

CAMOX_KERNEL_TABLE_WITHOUT_F64(camox_upsample_kernel, camox_upsample_forward, camox_upsample_forward_kernel)
CAMOX_KERNEL_TABLE_WITHOUT_F64(camox_upsample_kernel, camox_upsample_backward, camox_upsample_backward_kernel)
CAMOX_KERNEL_TABLE_WITHOUT_F64(camox_upsample_kernel, camox_nearest_forward, camox_nearest_forward_kernel)
CAMOX_KERNEL_TABLE_WITHOUT_F64(camox_upsample_kernel, camox_nearest_backward, camox_nearest_backward_kernel)

size_t camox_upsample_scratch(const camox_upsample_params *p) {
  const int64_t elements = p->columns.from + 2 * p->columns.to + 8 * CAMOX_UPSAMPLE_VECTOR;
  return (size_t)elements * sizeof(float);
}
