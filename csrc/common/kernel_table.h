/* Declares every variant of a kernel and lists them as [dtype][isa]: the one place that knows which variants a build has. */
#ifndef CAMOX_KERNEL_TABLE_H
#define CAMOX_KERNEL_TABLE_H

#include "isa.h"
#include "status.h"

#if defined(CAMOX_HAVE_X86)
#define CAMOX_ISA_ROW_(name, dtype) {name##_##dtype##_portable, name##_##dtype##_avx2, name##_##dtype##_avx512}
#define CAMOX_PORTABLE_ROW_(name) {name##_f64_portable, name##_f64_portable, name##_f64_portable}
#else
#define CAMOX_ISA_ROW_(name, dtype) {name##_##dtype##_portable}
#define CAMOX_PORTABLE_ROW_(name) {name##_f64_portable}
#endif

/* type: the kernels' function type, a typedef. */
#define CAMOX_DECLARE_KERNELS(name, type)                                                 \
  extern type CAMOX_NAMES_(name, f32), CAMOX_NAMES_(name, bf16), CAMOX_NAMES_(name, f16); \
  extern type name##_f64_portable;

#if defined(CAMOX_HAVE_X86)
#define CAMOX_NAMES_(name, dtype) name##_##dtype##_portable, name##_##dtype##_avx2, name##_##dtype##_avx512
#else
#define CAMOX_NAMES_(name, dtype) name##_##dtype##_portable
#endif

/* For cx.explain: notes the variant of `kernel`, a name up to its dtype, that the caller is about to run. */
#define CAMOX_NOTE_KERNEL(kernel, dtype, isa) \
  if (camox_notes_are_kept) camox_note_kernel(kernel, (int)(dtype), isa);

/* Declares the kernels `kernel` and defines get(dtype, isa), which returns one of them. type: as above. */
#define CAMOX_KERNEL_TABLE(type, get, kernel)                                                \
  CAMOX_DECLARE_KERNELS(kernel, type)                                                        \
  type *get(camox_dtype dtype, camox_isa isa) {                                              \
    static type *const variants[CAMOX_DTYPE_COUNT][CAMOX_ISA_COUNT] = CAMOX_KERNELS(kernel); \
    CAMOX_NOTE_KERNEL(#kernel, dtype, isa)                                                   \
    return variants[dtype][isa];                                                             \
  }

/* The same of kernels without float64. */
#define CAMOX_KERNEL_TABLE_WITHOUT_F64(type, get, kernel)                                                        \
  extern type CAMOX_NAMES_(kernel, f32), CAMOX_NAMES_(kernel, bf16), CAMOX_NAMES_(kernel, f16);                  \
  type *get(camox_dtype dtype, camox_isa isa) {                                                                  \
    static type *const variants[][CAMOX_ISA_COUNT] = {CAMOX_ISA_ROW_(kernel, f32), CAMOX_ISA_ROW_(kernel, bf16), \
                                                      CAMOX_ISA_ROW_(kernel, f16)};                              \
    return variants[dtype][isa];                                                                                 \
  }

/* The same of kernels of float32 alone: get(isa). */
#define CAMOX_F32_KERNEL_TABLE(type, get, kernel)                               \
  extern type CAMOX_NAMES_(kernel, f32);                                        \
  type *get(camox_isa isa) {                                                    \
    static type *const variants[CAMOX_ISA_COUNT] = CAMOX_ISA_ROW_(kernel, f32); \
    return variants[isa];                                                       \
  }

/* Rows in the order of camox_dtype, columns in the order of camox_isa. */
#define CAMOX_KERNELS(name) \
  {CAMOX_ISA_ROW_(name, f32), CAMOX_ISA_ROW_(name, bf16), CAMOX_ISA_ROW_(name, f16), CAMOX_PORTABLE_ROW_(name)}

#endif
