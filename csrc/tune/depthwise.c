#include "depthwise.h"

#include "../common/kernel_table.h"

CAMOX_F32_KERNEL_TABLE(camox_depthwise_kernel, camox_depthwise, camox_depthwise_kernel)
CAMOX_F32_KERNEL_TABLE(camox_depthwise_kernel, camox_depthwise_gradient, camox_depthwise_gradient_kernel)

size_t camox_depthwise_scratch(const camox_depthwise_params *p) {
  const int64_t lines = CAMOX_DEPTHWISE_BAND + p->size - 1;
  return (size_t)(lines * camox_depthwise_pitch(p)) * sizeof(float);
}
