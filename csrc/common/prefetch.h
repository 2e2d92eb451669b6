/* Asking for a cache line before it is read or written: included from a kernel body after simd.h.

   Which cache it should come to depends on the processor. Zen 5 drops a prefetch to L2 while many others are under way (a loop
   of them alone is twice as fast as memory). Zen 4 keeps loads waiting behind one to L1, which has few places for lines on
   their way. On others L2, where a line does not drive out what a kernel works on. Zen 4 and 5 run the variants for AVX-512. */
#ifndef CAMOX_PREFETCH_H
#define CAMOX_PREFETCH_H

#include "isa.h"

/* PREFETCHES(level), a macro of calls of __builtin_prefetch to this level of the compiler's: once for several of them, as a
   branch keeps what is before it apart from what is after it. */
#if defined(CAMOX_SIMD_AVX512)
#define CAMOX_PREFETCH_BY_PROCESSOR(PREFETCHES)                                                              \
  do {                                                                                                       \
    int to_l1 = camox_prefetches_to_l1;                                                                      \
    __asm__("" : "+r"(to_l1)); /* not a constant of the loop around it, of which compilers would make two */ \
    if (to_l1) {                                                                                             \
      PREFETCHES(3);                                                                                         \
    } else {                                                                                                 \
      PREFETCHES(2);                                                                                         \
    }                                                                                                        \
  } while (0)
#else
#define CAMOX_PREFETCH_BY_PROCESSOR(PREFETCHES) \
  do {                                          \
    PREFETCHES(2);                              \
  } while (0)
#endif

static inline __attribute__((always_inline, unused)) void camox_prefetch(const void *at) {
#define CAMOX_PREFETCH_LINE(level) __builtin_prefetch(at, 0, level)
  CAMOX_PREFETCH_BY_PROCESSOR(CAMOX_PREFETCH_LINE);
#undef CAMOX_PREFETCH_LINE
}

#endif
