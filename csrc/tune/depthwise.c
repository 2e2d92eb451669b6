#include "depthwise.h"

#if defined(CAMOX_HAVE_X86)
#define DEPTHWISE_KERNELS(name)                                                          \
  extern camox_depthwise_kernel name##_f32_portable, name##_f32_avx2, name##_f32_avx512; \
  static camox_depthwise_kernel *const name##_of[CAMOX_ISA_COUNT] = {name##_f32_portable, name##_f32_avx2, name##_f32_avx512};
#else
#define DEPTHWISE_KERNELS(name)                      \
  extern camox_depthwise_kernel name##_f32_portable; \
  static camox_depthwise_kernel *const name##_of[CAMOX_ISA_COUNT] = {name##_f32_portable};
#endif

DEPTHWISE_KERNELS(camox_depthwise_kernel)
DEPTHWISE_KERNELS(camox_depthwise_gradient_kernel)

camox_depthwise_kernel *camox_depthwise(camox_isa isa) { return camox_depthwise_kernel_of[isa]; }
camox_depthwise_kernel *camox_depthwise_gradient(camox_isa isa) { return camox_depthwise_gradient_kernel_of[isa]; }

size_t camox_depthwise_scratch(const camox_depthwise_params *p) {
  const int64_t lines = CAMOX_DEPTHWISE_BAND + p->size - 1;
  return (size_t)(lines * camox_depthwise_pitch(p)) * sizeof(float);
}
