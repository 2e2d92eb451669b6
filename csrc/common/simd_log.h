/* Natural logarithms of vectors. Included from a kernel body after simd.h. */
#ifndef CAMOX_SIMD_LOG_H
#define CAMOX_SIMD_LOG_H

#include <float.h>
#include <math.h>

#include "simd_math.h"

/* (2 atanh(s) / s - 2) / s^2 by powers of s^2: its series, for s^2 <= 1/33. */
static const float camox_atanh_near[] = {0.666666667f, 0.4f, 0.285714286f, 0.222222222f};

/* log(x) for 0 <= x < inf, NaN for x < 0 and NaN. Infinity is not for it. */
CAMOX_CALLED vf32 vf32_log(vf32 x) {
  const vf32 one = vf32_set1(1), shift = vf32_set1(0x1p23f);
  const vi32 subnormal = (vi32)(x < vf32_set1(FLT_MIN));
  const vi32 bits = (vi32)vf32_select(subnormal, x * shift, x);
  const vi32 exponent = (bits - 0x3f3504f3) >> 23; /* of the power of two that leaves sqrt(1/2) <= m < sqrt(2) */
  const vf32 m = (vf32)(bits - (exponent << 23)), s = (m - one) / (m + one), square = s * s;
  const vf32 power = __builtin_convertvector(exponent, vf32) - vf32_keep(subnormal, vf32_set1(23));
  const vf32 tail = s * (square * vf32_polynomial(square, camox_atanh_near, 4)) - power * vf32_set1(2.12194440e-4f);
  const vf32 log = power * vf32_set1(0.693359375f) + (vf32_set1(2) * s + tail);
  const vf32 known = vf32_select((vi32)(x > vf32_set1(0)), log, vf32_set1(-INFINITY));
  return vf32_select((vi32)(x >= vf32_set1(0)), known, vf32_set1(NAN));
}

#if !defined(CAMOX_SIMD_AVX2) && !defined(CAMOX_SIMD_AVX512)
/* By log1p: log itself would ask for glibc 2.29. power is 0 where x is near 1, so nothing cancels. */
CAMOX_CALLED vf64 vf64_log(vf64 x) {
  for (int lane = 0; lane < VF64_LANES; ++lane) {
    int power;
    double m = frexp(x[lane], &power);
    if (m < M_SQRT1_2) m *= 2, --power;
    x[lane] = x[lane] > 0 ? log1p(m - 1) + power * M_LN2 : x[lane] < 0 ? NAN : x[lane] - INFINITY;
  }
  return x;
}
#endif

#endif
