#include "isa.h"

#include <stdlib.h>
#include <string.h>

#include "status.h"
#include "types.h"

static const char *const names[CAMOX_ISA_COUNT] = {"portable", "avx2", "avx512"};
static camox_isa current = CAMOX_ISA_PORTABLE;
int camox_prefetches_to_l1 = 0;

const char *camox_isa_name(camox_isa isa) { return names[isa]; }

int camox_isa_supported(camox_isa isa) {
  if (isa == CAMOX_ISA_PORTABLE) return 1;
#if defined(CAMOX_HAVE_X86)
  __builtin_cpu_init();
  int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (isa == CAMOX_ISA_AVX2) return avx2;
  return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#else
  return 0;
#endif
}

int camox_cpu_is_zen4(void) {
#if defined(CAMOX_HAVE_X86)
  return __builtin_cpu_is("amd") && __builtin_cpu_supports("avx512f") && !__builtin_cpu_supports("avx512vp2intersect");
#else
  return 0;
#endif
}

/* AMD's Zen 5 has VP2INTERSECT. */
static int is_zen5(void) {
#if defined(CAMOX_HAVE_X86)
  return __builtin_cpu_is("amd") && __builtin_cpu_supports("avx512vp2intersect");
#else
  return 0;
#endif
}

int camox_isa_init(void) {
  int best = CAMOX_ISA_COUNT - 1;
  while (!camox_isa_supported((camox_isa)best)) --best;
  current = (camox_isa)best;
  camox_prefetches_to_l1 = is_zen5();
  const char *forced = getenv("CAMOX_FORCE_ISA");
  if (forced == NULL || forced[0] == '\0') return CAMOX_OK;
  for (int isa = 0; isa < CAMOX_ISA_COUNT; ++isa) {
    if (strcmp(forced, names[isa]) != 0) continue;
    if (!camox_isa_supported((camox_isa)isa))
      return camox_fail(CAMOX_INVALID_ARGUMENT, "CAMOX_FORCE_ISA is '%s', which this machine does not have; its best is '%s'",
                        forced, names[best]);
    current = (camox_isa)isa;
    return CAMOX_OK;
  }
  return camox_fail(CAMOX_INVALID_ARGUMENT, "CAMOX_FORCE_ISA must be portable, avx2 or avx512, got '%s'", forced);
}

int camox_isa_has_avx512_bf16(void) {
#if defined(CAMOX_HAVE_X86)
  return current == CAMOX_ISA_AVX512 && __builtin_cpu_supports("avx512bf16");
#else
  return 0;
#endif
}

camox_isa camox_isa_current(void) { return current; }

void camox_note_kernel(const char *kernel, int dtype, camox_isa isa) {
  static const char *const dtypes[CAMOX_DTYPE_COUNT] = {"f32", "bf16", "f16", "f64"};
  const int portable = dtype == CAMOX_F64;
  camox_note("kernel %s_%s_%s", kernel, dtypes[dtype], names[portable ? CAMOX_ISA_PORTABLE : isa]);
  if (portable)
    camox_note("why float64 has one body, the portable one");
  else if (isa + 1 < CAMOX_ISA_COUNT)
    camox_note(camox_isa_supported((camox_isa)(isa + 1)) ? "why not %s: CAMOX_FORCE_ISA is %s"
                                                         : "why not %s: this CPU or build has %s",
               names[isa + 1], names[isa]);
}
