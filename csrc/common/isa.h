/* Which instruction set the CPU kernels use: the best that the CPU has, or the one that CAMOX_FORCE_ISA names. */
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

/* Chooses it, once; a status code: CAMOX_INVALID_ARGUMENT where the forced name is unknown or this machine lacks it. */
int camox_isa_init(void);

/* 1 where kernels may use the AVX512-BF16 dot product: AVX-512 is in use and the CPU has AVX512_BF16. */
int camox_isa_has_avx512_bf16(void);

/* 1 where kernels prefetch to L1 and not to L2 (prefetch.h); camox_isa_init sets it. */
extern int camox_prefetches_to_l1;

/* 1 on AMD's Zen 4: the one with AVX-512 that has no VP2INTERSECT. */
int camox_cpu_is_zen4(void);

/* The one in use, which camox_isa_init has chosen. */
camox_isa camox_isa_current(void);

/* Notes (status.h) the variant of a kernel for a camox_dtype and isa, and what decided it. */
void camox_note_kernel(const char *kernel, int dtype, camox_isa isa);

#ifdef __cplusplus
}
#endif
#endif
