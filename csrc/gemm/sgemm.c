#include "sgemm.h"

#if defined(CAMOX_HAVE_X86)
extern camox_sgemm_kernel camox_sgemm_f32_portable, camox_sgemm_f32_avx2, camox_sgemm_f32_avx512;
static camox_sgemm_kernel *const kernels[CAMOX_ISA_COUNT] = {camox_sgemm_f32_portable, camox_sgemm_f32_avx2,
                                                             camox_sgemm_f32_avx512};
#else
extern camox_sgemm_kernel camox_sgemm_f32_portable;
static camox_sgemm_kernel *const kernels[CAMOX_ISA_COUNT] = {camox_sgemm_f32_portable};
#endif

camox_sgemm_kernel *camox_sgemm(camox_isa isa) { return kernels[isa]; }
