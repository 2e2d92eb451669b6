/* Includes CAMOX_BODY once per element type of this instruction set: float64 has one portable body only, and none with
   CAMOX_WITHOUT_F64. */
#include "simd.h"

#define CAMOX_DTYPE f32
#define elem float
#define real float
#define vr vf32
#define vri vi32
#define VR_LANES VF32_LANES
#define VR(name) vf32_##name
#define ELEM(name) name##_f32
#include CAMOX_BODY
#undef CAMOX_DTYPE
#undef elem
#undef ELEM

#define CAMOX_DTYPE bf16
#define elem uint16_t
#define ELEM(name) name##_bf16
#include CAMOX_BODY
#undef CAMOX_DTYPE
#undef ELEM

#define CAMOX_DTYPE f16
#define ELEM(name) name##_f16
#include CAMOX_BODY
#undef CAMOX_DTYPE
#undef elem
#undef real
#undef vr
#undef vri
#undef VR_LANES
#undef VR
#undef ELEM

#if !defined(CAMOX_SIMD_AVX2) && !defined(CAMOX_SIMD_AVX512) && !defined(CAMOX_WITHOUT_F64)
#define CAMOX_DTYPE f64
#define elem double
#define real double
#define vr vf64
#define vri vi64
#define VR_LANES VF64_LANES
#define VR(name) vf64_##name
#define ELEM(name) name##_f64
#include CAMOX_BODY
#undef CAMOX_DTYPE
#undef elem
#undef real
#undef vr
#undef vri
#undef VR_LANES
#undef VR
#undef ELEM
#endif
#undef CAMOX_BODY
