/* Which instruction set the CPU kernels use: asked of the CPU once, or forced by CAMOX_FORCE_ISA. */
#ifndef CAMOX_ISA_H
#define CAMOX_ISA_H

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { CAMOX_ISA_PORTABLE = 0, CAMOX_ISA_AVX2 = 1, CAMOX_ISA_AVX512 = 2, CAMOX_ISA_COUNT = 3 } camox_isa;

/* "portable", "avx2", "avx512". */
const char *camox_isa_name(camox_isa isa);

/* 1 where both this build and this CPU have the instruction set. */
int camox_isa_supported(camox_isa isa);

/* Reads CAMOX_FORCE_ISA and the CPU; a status code, CAMOX_INVALID_ARGUMENT where the forced name is unknown or missing here. */
int camox_isa_init(void);

/* 1 where the one in use is AVX-512, on a CPU that has its bfloat16 dot product (AVX512-BF16) as well. */
int camox_has_avx512_bf16(void);

/* The one in use: decided by camox_isa_init. */
camox_isa camox_isa_current(void);

#ifdef __cplusplus
}
#endif
#endif
