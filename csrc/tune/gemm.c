#include "gemm.h"

#if defined(CAMOX_HAVE_X86)
extern camox_gemm_kernel camox_gemm_f32_portable, camox_gemm_f32_avx2, camox_gemm_f32_avx512;
static camox_gemm_kernel *const kernels[CAMOX_ISA_COUNT] = {camox_gemm_f32_portable, camox_gemm_f32_avx2,
                                                            camox_gemm_f32_avx512};
#else
extern camox_gemm_kernel camox_gemm_f32_portable;
static camox_gemm_kernel *const kernels[CAMOX_ISA_COUNT] = {camox_gemm_f32_portable};
#endif

camox_gemm_kernel *camox_gemm(camox_isa isa) { return kernels[isa]; }
