/* exp, erf, tanh, sin, cos and the activations made of them, as polynomials of this file's own: one body for every
   instruction set.

   Included from a kernel body after simd.h. float32 is written in the compiler's vector operators and a fused
   multiply-add that rounds once everywhere, so every instruction set gives the same bits; libm's vector functions need
   GLIBC_2.35 and differ between instruction sets. float64 (portable only) has its own exp and otherwise calls libm, lane by
   lane. NaN in, NaN out; subnormals are kept.

   Largest error in float32 (tests/test_simd_math.py): exp, erf, tanh, sin, cos below 2 ULP over every exponent.
   gelu: |error| <= 2^-23 |gelu| + 3e-8 |x|, and its derivative within 1e-7: far less than x/2 (1 + erf(x/sqrt(2))) loses in
   float32. Coefficients are minimax fits (Remez, 50 digits) rounded to float32. */
#ifndef CAMOX_SIMD_MATH_H
#define CAMOX_SIMD_MATH_H

/* Operations that compilers do not make well of the vector operators. at_most and at_least keep the NaN of v; abs_at_most is
   min(|v|, limit), and anything for NaN; fma is a * b + c rounded once; lookup reads row[index & (columns - 1)] of 16
   or 32 columns, lookup4 numbers [0, 4) of the rows that begin at eight offsets. */
#if defined(CAMOX_SIMD_AVX512)
CAMOX_INLINE vf32 vf32_at_most(vf32 v, float limit) { return (vf32)_mm512_min_ps((__m512)vf32_set1(limit), (__m512)v); }
CAMOX_INLINE vf32 vf32_at_least(vf32 v, float limit) { return (vf32)_mm512_max_ps((__m512)vf32_set1(limit), (__m512)v); }
CAMOX_INLINE vf32 vf32_abs_at_most(vf32 v, float limit) { /* 10: the lesser magnitude, without its sign */
  return (vf32)_mm512_range_ps((__m512)v, (__m512)vf32_set1(limit), 10);
}
CAMOX_INLINE vf32 vf32_lookup(const float *row, int columns, vi32 index) {
  if (columns == 16) return (vf32)_mm512_permutexvar_ps((__m512i)index, _mm512_load_ps(row));
  return (vf32)_mm512_permutex2var_ps(_mm512_load_ps(row), (__m512i)index, _mm512_load_ps(row + 16));
}
CAMOX_INLINE vf32 vf32_fma(vf32 a, vf32 b, vf32 c) { return (vf32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
#elif defined(CAMOX_SIMD_AVX2)
CAMOX_INLINE vf32 vf32_fma(vf32 a, vf32 b, vf32 c) { return (vf32)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
CAMOX_INLINE vf32 vf32_at_most(vf32 v, float limit) { return (vf32)_mm256_min_ps((__m256)vf32_set1(limit), (__m256)v); }
CAMOX_INLINE vf32 vf32_at_least(vf32 v, float limit) { return (vf32)_mm256_max_ps((__m256)vf32_set1(limit), (__m256)v); }
/* A 4x4 transpose in each half of a vector. */
CAMOX_INLINE void vf32_lookup4(vf32 c[4], const float *table, const uint32_t offset[8]) {
  __m256 row[4];
  for (int i = 0; i < 4; ++i)
    row[i] =
        _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_load_ps(table + offset[i])), _mm_load_ps(table + offset[i + 4]), 1);
  const __m256d low01 = (__m256d)_mm256_unpacklo_ps(row[0], row[1]), low23 = (__m256d)_mm256_unpacklo_ps(row[2], row[3]);
  const __m256d high01 = (__m256d)_mm256_unpackhi_ps(row[0], row[1]), high23 = (__m256d)_mm256_unpackhi_ps(row[2], row[3]);
  c[0] = (vf32)_mm256_unpacklo_pd(low01, low23), c[1] = (vf32)_mm256_unpackhi_pd(low01, low23);
  c[2] = (vf32)_mm256_unpacklo_pd(high01, high23), c[3] = (vf32)_mm256_unpackhi_pd(high01, high23);
}
#else
CAMOX_INLINE vf32 vf32_at_most(vf32 v, float limit) { return vf32_select((vi32)(v > vf32_set1(limit)), vf32_set1(limit), v); }
CAMOX_INLINE vf32 vf32_at_least(vf32 v, float limit) { return vf32_select((vi32)(v < vf32_set1(limit)), vf32_set1(limit), v); }
CAMOX_INLINE vf32 vf32_lookup(const float *row, int columns, vi32 index) {
  vf32 v;
  for (int lane = 0; lane < VF32_LANES; ++lane) v[lane] = row[index[lane] & (columns - 1)];
  return v;
}

#if defined(__FP_FAST_FMAF)
CAMOX_INLINE vf32 vf32_fma(vf32 a, vf32 b, vf32 c) {
  for (int lane = 0; lane < VF32_LANES; ++lane) a[lane] = __builtin_fmaf(a[lane], b[lane], c[lane]);
  return a;
}
#else
/* In double the product is exact; a sum that is not is made odd, so that rounding it to float cannot round twice. */
CAMOX_CALLED vf32 vf32_fma(vf32 a, vf32 b, vf32 c) {
  for (int lane = 0; lane < VF32_LANES; ++lane) {
    double product = (double)a[lane] * b[lane], sum = product + c[lane], part = sum - product;
    double error = (product - (sum - part)) + (c[lane] - part);
    int64_t bits;
    memcpy(&bits, &sum, sizeof bits);
    bits += ((error > 0) | (error < 0)) & ~bits & 1 ? ((error > 0) == (sum > 0) ? 1 : -1) : 0;
    memcpy(&sum, &bits, sizeof bits);
    a[lane] = (float)sum;
  }
  return a;
}
#endif
#endif

#if !defined(CAMOX_SIMD_AVX512)
CAMOX_INLINE vf32 vf32_abs_at_most(vf32 v, float limit) { return vf32_at_most(vf32_abs(v), limit); }
#endif

/* 1/sqrt(v) for positive finite v, one Newton step beyond sqrt and division: within 0.51 ULP instead of 1. */
CAMOX_INLINE vf32 vf32_rsqrt(vf32 v) {
  vf32 r = vf32_set1(1) / vf32_sqrt(v), product = v * r, rounding = vf32_fma(v, r, -product);
  vf32 error = vf32_fma(-product, r, vf32_set1(1)) - rounding * r;
  return vf32_fma(vf32_set1(0.5f) * r, error, r);
}

CAMOX_INLINE vf32 vf32_copysign(vf32 magnitude, vf32 sign) {
  vi32 bit = (vi32)vf32_set1(-0.0f);
  return (vf32)(((vi32)magnitude & ~bit) | ((vi32)sign & bit));
}

/* c[0] + c[1] v + ... + c[n-1] v^(n-1); n is a constant at every call. */
CAMOX_INLINE vf32 vf32_polynomial(vf32 v, const float *c, int n) {
  vf32 sum = vf32_set1(c[n - 1]);
  for (int k = n - 2; k >= 0; --k) sum = sum * v + vf32_set1(c[k]);
  return sum;
}

/* Adding it rounds a float32 of magnitude below 2^22 to the nearest integer, which is then in the low bits. */
#define CAMOX_ROUND_F32 0x1.8p23f

CAMOX_INLINE vf32 vf32_power_of_two(vi32 n) { return (vf32)((n + 127) << 23); }

/* (exp(r) - 1 - r) / r^2 for |r| <= log(2)/2 */
static const float camox_exp_tail[] = {0.49999994f, 0.166665196f, 0.0416683927f, 0.00836878084f, 0.00138144707f};

/* exp(r) for |r| <= ln(2)/2 */
CAMOX_INLINE vf32 vf32_exp_reduced(vf32 r) { return vf32_set1(1) + (r + r * r * vf32_polynomial(r, camox_exp_tail, 5)); }

CAMOX_CALLED vf32 vf32_exp(vf32 x) {
  vf32 round = vf32_set1(CAMOX_ROUND_F32);
  x = vf32_at_most(vf32_at_least(x, -105.0f), 89.0f);
  vf32 shifted = x * vf32_set1(1.44269504f) + round, n = shifted - round;
  vf32 r = (x - n * vf32_set1(0.693359375f)) - n * vf32_set1(-2.12194440e-4f);
  /* 2^n in two factors, so that subnormal results are rounded once and 2^128 does not overflow early */
  vi32 power = (vi32)shifted - (vi32)round, half = power >> 1;
  return vf32_exp_reduced(r) * vf32_power_of_two(half) * vf32_power_of_two(power - half);
}

/* exp for terms of sums, whose bits differ between instruction sets anyhow: fused where there is an instruction for it, and
   log(2) in one part, which is 1 ULP at -45. */
CAMOX_CALLED vf32 vf32_exp_term(vf32 x) {
#if defined(CAMOX_SIMD_AVX512)
  const vf32 round = vf32_set1(CAMOX_ROUND_F32), one = vf32_set1(1);
  x = vf32_at_least(x, -105.0f);
  vf32 n = vf32_fma(x, vf32_set1(1.44269504f), round) - round, sum = vf32_set1(camox_exp_tail[4]);
  vf32 r = vf32_fma(n, vf32_set1(-0.693147182f), x);
  for (int k = 3; k >= 0; --k) sum = vf32_fma(sum, r, vf32_set1(camox_exp_tail[k]));
  sum = vf32_fma(vf32_fma(sum, r, one), r, one);
  return (vf32)_mm512_scalef_ps((__m512)sum, (__m512)n);
#else
  return vf32_exp(x);
#endif
}

/* exp(x) for x <= 0 as a softmax needs it: within 2 ULP (more without fused products), 0 below -87, where it is < 2^-125. */
CAMOX_CALLED vf32 vf32_exp_weight(vf32 x) {
  const float *c = camox_exp_tail;
  const vf32 round = vf32_set1(CAMOX_ROUND_F32), one = vf32_set1(1), clamped = vf32_at_least(x, -87.0f);
  vf32 shifted = vf32_multiply_add(clamped, vf32_set1(1.44269504f), round), n = shifted - round, sum = vf32_set1(c[4]);
  vf32 r = vf32_multiply_add(n, vf32_set1(2.12194440e-4f), vf32_multiply_add(n, vf32_set1(-0.693359375f), clamped));
  for (int k = 3; k >= 0; --k) sum = vf32_multiply_add(sum, r, vf32_set1(c[k]));
  sum = one + vf32_multiply_add(r * r, sum, r);
  return vf32_keep(~(vi32)(x < vf32_set1(-87)), (vf32)((vi32)sum + ((vi32)shifted << 23)));
}

CAMOX_CALLED vf32 vf32_erf(vf32 x) {
  static const float small[] = {0.128379166f, -0.376125753f, 0.112827323f, -0.0268030204f, 0.00505174277f, -0.000631835777f};
  /* -log2(erfc(a)) for 0.85 <= a <= 4 */
  static const float large[] = {0.000150799358f, 1.62744796f,    0.918302715f,    0.150799021f,
                                -0.0324881114f,  0.00449810689f, -0.000293842691f};
  vf32 a = vf32_at_most(vf32_abs(x), 4.0f), square = a * a, round = vf32_set1(CAMOX_ROUND_F32);
  vf32 exponent = -vf32_polynomial(a, large, 7), shifted = exponent + round, n = shifted - round;
  vf32 erfc = vf32_exp_reduced((exponent - n) * vf32_set1(0.693147181f)) * vf32_power_of_two((vi32)shifted - (vi32)round);
  vf32 inner = x + x * vf32_polynomial(square, small, 6);
  return vf32_select((vi32)(a < vf32_set1(0.85f)), inner, vf32_copysign(vf32_set1(1) - erfc, x));
}

CAMOX_CALLED vf32 vf32_tanh(vf32 x) {
  static const float c[] = {-0.333332986f, 0.133319244f, -0.053783875f, 0.0207960643f, -0.00589521229f};
  vf32 a = vf32_at_most(vf32_abs(x), 10.0f), square = x * x, one = vf32_set1(1);
  vf32 outer = one - vf32_set1(2) / (vf32_exp(a + a) + one);
  vf32 inner = x + x * (square * vf32_polynomial(square, c, 5));
  return vf32_select((vi32)(a < vf32_set1(0.6f)), inner, vf32_copysign(outer, x));
}

/* x mod 2 pi for |x| >= 2^20 (Payne and Hanek): 96 bits of 2/pi are enough for a float32. Returns the reduced angle. */
CAMOX_INLINE double camox_reduce_angle_large(float x, int *quadrant) {
  static const uint32_t two_over_pi[] = {0,          0xa2f9836e, 0x4e441529, 0xfc2757d1, 0xf534ddc0,
                                         0xdb629599, 0x3c439041, 0xfe5163ab, 0xdebbc561};
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7f800000u) == 0x7f800000u) { /* inf and NaN */
    *quadrant = 0;
    return (double)(x - x);
  }
  /* |x| = mantissa * 2^exponent; bits of 2/pi that are multiples of 4 after scaling do not matter */
  uint64_t mantissa = (bits & 0x7fffffu) | 0x800000u;
  int exponent = (int)((bits >> 23) & 0xffu) - 150, first = exponent - 2 + 32;
  uint64_t window[3];
  for (int k = 0; k < 3; ++k) {
    int word = first / 32 + k, shift = first % 32;
    uint64_t pair = (uint64_t)two_over_pi[word] << 32 | two_over_pi[word + 1];
    window[k] = pair << shift >> 32;
  }
  uint64_t low = window[2] * mantissa, middle = window[1] * mantissa + (low >> 32),
           high = window[0] * mantissa + (middle >> 32);
  uint64_t product = high << 32 | (middle & 0xffffffffu); /* in units of 2^-62 quadrants */
  uint64_t nearest = (product + (1ull << 61)) >> 62;
  int64_t fraction = (int64_t)(product - (nearest << 62));
  double angle = (double)fraction * 0x1p-62 * 0x1.921fb54442d18p+0;
  int quarters = (int)(nearest & 3u);
  *quadrant = x < 0 ? -quarters : quarters;
  return x < 0 ? -angle : angle;
}

/* x = quadrant * pi/2 + the reduced angle, |reduced| <= pi/4. */
CAMOX_INLINE vf32 vf32_reduce_angle(vf32 x, vi32 *quadrant) {
  vf32 reduced;
  for (int lane = 0; lane < VF32_LANES; ++lane) {
    double angle = x[lane], n = angle * 0x1.45f306dc9c883p-1 + 0x1.8p52 - 0x1.8p52;
    /* pi/2 in 33 and 53 bits: n * the first is exact */
    reduced[lane] = (float)((angle - n * 0x1.921fb544p+0) - n * 0x1.0b4611a626331p-34);
    (*quadrant)[lane] = (int32_t)(n < 0x1p30 && n > -0x1p30 ? n : 0);
  }
  for (int lane = 0; lane < VF32_LANES; ++lane) {
    if (x[lane] < 0x1p20f && x[lane] > -0x1p20f) continue;
    int quarters;
    reduced[lane] = (float)camox_reduce_angle_large(x[lane], &quarters);
    (*quadrant)[lane] = quarters;
  }
  return reduced;
}

/* sin of quadrant * pi/2 + r */
CAMOX_INLINE vf32 vf32_sin_reduced(vf32 r, vi32 quadrant) {
  static const float s[] = {-0.166666538f, 0.00833215099f, -0.000195139728f};
  static const float c[] = {0.0416666456f, -0.00138873036f, 2.4431667e-05f};
  vf32 square = r * r;
  vf32 sine = r + r * (square * vf32_polynomial(square, s, 3));
  vf32 cosine = (vf32_set1(1) - vf32_set1(0.5f) * square) + square * square * vf32_polynomial(square, c, 3);
  vf32 value = vf32_select((quadrant & 1) != 0, cosine, sine);
  return (vf32)((vi32)value ^ ((quadrant & 2) << 30));
}

CAMOX_CALLED vf32 vf32_sin(vf32 x) {
  vi32 quadrant;
  vf32 r = vf32_reduce_angle(x, &quadrant);
  return vf32_sin_reduced(r, quadrant);
}

CAMOX_CALLED vf32 vf32_cos(vf32 x) {
  vi32 quadrant;
  vf32 r = vf32_reduce_angle(x, &quadrant);
  return vf32_sin_reduced(r, quadrant + 1);
}

/* erfc(a/sqrt(2))/2, the normal distribution's tail, as polynomials in a - k/2 for 2a within 1/2 of k = 0 .. 12, one to a
   column, of rising powers. Ends (k = 13, a >= 6.25) in 0. */
#define CAMOX_GELU_TAIL(COLUMN)                                                                           \
  COLUMN(0.5f, -0.39894223f, -1.5603101e-6f, 0.066514656f, -0.00016303202f, -0.009545485f)                \
  COLUMN(0.30853757f, -0.35206518f, 0.08800976f, 0.04399822f, -0.0198865f, -0.004435382f)                 \
  COLUMN(0.15865527f, -0.24197064f, 0.120981045f, -3.8484554e-6f, -0.0199774f, 0.004032191f)              \
  COLUMN(0.066807196f, -0.12951767f, 0.0971395f, -0.026977226f, -0.006129881f, 0.005759977f)              \
  COLUMN(0.022750122f, -0.05399108f, 0.053993706f, -0.026988374f, 0.0043767514f, 0.0021653608f)           \
  COLUMN(0.006209662f, -0.017528342f, 0.021911416f, -0.015335024f, 0.005887244f, -0.0006783743f)          \
  COLUMN(0.0013498985f, -0.004431832f, 0.006647582f, -0.005910373f, 0.003333265f, -0.0010861638f)         \
  COLUMN(0.00023262993f, -0.0008726601f, 0.0015268705f, -0.0016377723f, 0.0011929283f, -0.00056036195f)   \
  COLUMN(3.167159e-5f, -0.00013381944f, 0.00026751723f, -0.00033527176f, 0.00029709432f, -0.00017422324f) \
  COLUMN(3.3977528e-6f, -1.5980671e-5f, 3.5926605e-5f, -5.147884e-5f, 5.3594893e-5f, -3.6824993e-5f)      \
  COLUMN(2.8666335e-7f, -1.4861342e-6f, 3.710499e-6f, -5.9848257e-6f, 7.152782e-6f, -5.551993e-6f)        \
  COLUMN(1.8990715e-8f, -1.0761911e-7f, 2.9541238e-7f, -5.3017925e-7f, 7.152528e-7f, -6.1217287e-7f)      \
  COLUMN(9.866608e-10f, -6.0682854e-9f, 1.8162337e-8f, -3.5950094e-8f, 5.4035272e-8f, -5.0110565e-8f)     \
  COLUMN(0, 0, 0, 0, 0, 0)                                                                                \
  COLUMN(0, 0, 0, 0, 0, 0)                                                                                \
  COLUMN(0, 0, 0, 0, 0, 0)

/* The tail's sum with a * its derivative, as polynomials in 5a - k for 5a within 1/2 of k = 0 .. 30. Ends (k = 31, a >= 6.1)
   in 0. */
#define CAMOX_GELU_TAIL_GRAD(COLUMN)                                                             \
  COLUMN(0.5f, -0.159576803f, -1.85690021e-06f, 0.00213810452f, -2.38469438e-05f)                \
  COLUMN(0.342531741f, -0.153288409f, 0.00619407557f, 0.00193520542f, -9.12140749e-05f)          \
  COLUMN(0.1972702f, -0.135523215f, 0.0113131907f, 0.00142358744f, -0.000159152798f)             \
  COLUMN(0.0743183568f, -0.109297641f, 0.0145551786f, 0.000714685011f, -0.000188239123f)         \
  COLUMN(-0.0198978428f, -0.0787962303f, 0.0155737605f, -2.51828242e-05f, -0.000175166424f)      \
  COLUMN(-0.0833154693f, -0.0483943708f, 0.0145182153f, -0.000641633524f, -0.000128806496f)      \
  COLUMN(-0.117953598f, -0.0217490923f, 0.0119307945f, -0.00103323732f, -6.57949713e-05f)        \
  COLUMN(-0.1288618f, -0.00119803788f, 0.00855246f, -0.00117005152f, -4.16619969e-06f)           \
  COLUMN(-0.122674048f, 0.0124229919f, 0.00511126965f, -0.00108718791f, 4.23456004e-05f)         \
  COLUMN(-0.106179968f, 0.0195795838f, 0.00216011191f, -0.000860459579f, 6.73600225e-05f)        \
  COLUMN(-0.0852318034f, 0.0215964038f, 2.50768082e-08f, -0.000576169463f, 7.17705261e-05f)      \
  COLUMN(-0.0641406551f, 0.0201496296f, -0.00131112873f, -0.000306249945f, 6.13644515e-05f)      \
  COLUMN(-0.0455493368f, 0.0168407615f, -0.00189188903f, -9.50218018e-05f, 4.36433256e-05f)      \
  COLUMN(-0.030654531f, 0.0129310545f, -0.00194943394f, 4.19801581e-05f, 2.51567362e-05f)        \
  COLUMN(-0.0196081344f, 0.00924529694f, -0.00170214754f, 0.000110930232f, 1.00858551e-05f)      \
  COLUMN(-0.0119456472f, 0.00620461674f, -0.00132956274f, 0.000129535139f, 7.1272936e-08f)       \
  COLUMN(-0.00694194436f, 0.00392898964f, -0.000952115515f, 0.000117980795f, -5.14466365e-06f)   \
  COLUMN(-0.00385261583f, 0.00235600444f, -0.000633462681f, 9.31554168e-05f, -6.80542735e-06f)   \
  COLUMN(-0.00204373826f, 0.00134128483f, -0.000394751638f, 6.63496103e-05f, -6.36109098e-06f)   \
  COLUMN(-0.00103705027f, 0.000726357976f, -0.000231642553f, 4.34723552e-05f, -5.00355554e-06f)  \
  COLUMN(-0.000503649644f, 0.000374719064f, -0.000128476575f, 2.64980754e-05f, -3.5012381e-06f)  \
  COLUMN(-0.000234215142f, 0.000184369637f, -6.75339979e-05f, 1.5133397e-05f, -2.23548886e-06f)  \
  COLUMN(-0.000104334344f, 8.65973634e-05f, -3.3713688e-05f, 8.13734641e-06f, -1.32062519e-06f)  \
  COLUMN(-4.45354744e-05f, 3.8857961e-05f, -1.60091586e-05f, 4.13389171e-06f, -7.28067619e-07f)  \
  COLUMN(-1.82209133e-05f, 1.66681348e-05f, -7.24035635e-06f, 1.98923931e-06f, -3.76736239e-07f) \
  COLUMN(-7.14694897e-06f, 6.83837516e-06f, -3.12195539e-06f, 9.08508866e-07f, -1.83711293e-07f) \
  COLUMN(-2.68809572e-06f, 2.68454187e-06f, -1.28450563e-06f, 3.94426252e-07f, -8.46771897e-08f) \
  COLUMN(-9.6965573e-07f, 1.00879583e-06f, -5.04654849e-07f, 1.62984094e-07f, -3.69761857e-08f)  \
  COLUMN(-3.35509554e-07f, 3.62989397e-07f, -1.89435355e-07f, 6.41677644e-08f, -1.532438e-08f)   \
  COLUMN(-1.11368962e-07f, 1.25102318e-07f, -6.79761953e-08f, 2.40910101e-08f, -6.03636385e-09f) \
  COLUMN(-3.54687799e-08f, 4.13071568e-08f, -2.3327722e-08f, 8.63127703e-09f, -2.26262387e-09f)  \
  COLUMN(0, 0, 0, 0, 0)

/* Column (index & (columns - 1)) of a table as a polynomial in v. */
#if defined(CAMOX_SIMD_AVX2)
/* Columns in memory, padded to 8: fewer cycles than permutations of rows, of which each holds 8 numbers. */
#define CAMOX_COLUMN_OF_6(...) __VA_ARGS__, 0, 0,
#define CAMOX_COLUMN_OF_5(...) __VA_ARGS__, 0, 0, 0,
static const float camox_gelu_tail[16 * 8] __attribute__((aligned(64))) = {CAMOX_GELU_TAIL(CAMOX_COLUMN_OF_6)};
static const float camox_gelu_tail_grad[32 * 8] __attribute__((aligned(64))) = {CAMOX_GELU_TAIL_GRAD(CAMOX_COLUMN_OF_5)};

CAMOX_INLINE vf32 vf32_table_polynomial(const float *table, int columns, int powers, vi32 index, vf32 v) {
  const vi32 first = (index & (columns - 1)) * 8;
  uint32_t offset[8];
  vf32 c[8];
  memcpy(offset, &first, sizeof offset);
  vf32_lookup4(c, table, offset), vf32_lookup4(c + 4, table + 4, offset);
  vf32 sum = c[powers - 1];
  for (int power = powers - 2; power >= 0; --power) sum = vf32_fma(sum, v, c[power]);
  return sum;
}
#else
/* Rows in memory: of each power its coefficients in all columns. */
#define CAMOX_POWER_0(a, ...) a,
#define CAMOX_POWER_1(a, b, ...) b,
#define CAMOX_POWER_2(a, b, c, ...) c,
#define CAMOX_POWER_3(a, b, c, d, ...) d,
#define CAMOX_POWER_4(a, b, c, d, e, ...) e,
#define CAMOX_POWER_5(a, b, c, d, e, f) f,
static const float camox_gelu_tail[6 * 16] __attribute__((aligned(64))) = {
    CAMOX_GELU_TAIL(CAMOX_POWER_0) CAMOX_GELU_TAIL(CAMOX_POWER_1) CAMOX_GELU_TAIL(CAMOX_POWER_2) CAMOX_GELU_TAIL(CAMOX_POWER_3)
        CAMOX_GELU_TAIL(CAMOX_POWER_4) CAMOX_GELU_TAIL(CAMOX_POWER_5)};
static const float camox_gelu_tail_grad[5 * 32] __attribute__((aligned(64))) = {
    CAMOX_GELU_TAIL_GRAD(CAMOX_POWER_0) CAMOX_GELU_TAIL_GRAD(CAMOX_POWER_1) CAMOX_GELU_TAIL_GRAD(CAMOX_POWER_2)
        CAMOX_GELU_TAIL_GRAD(CAMOX_POWER_3) CAMOX_GELU_TAIL_GRAD(CAMOX_POWER_4)};

CAMOX_INLINE vf32 vf32_table_polynomial(const float *table, int columns, int powers, vi32 index, vf32 v) {
  vf32 sum = vf32_lookup(table + (powers - 1) * columns, columns, index);
  for (int power = powers - 2; power >= 0; --power)
    sum = vf32_fma(sum, v, vf32_lookup(table + power * columns, columns, index));
  return sum;
}
#endif

/* x Phi(x) = max(x, 0) - |x| Phi(-|x|): no cancellation on either side. */
CAMOX_CALLED vf32 vf32_gelu(vf32 x) {
  vf32 a = vf32_abs_at_most(x, 6.3f), round = vf32_set1(0x1p-1f * CAMOX_ROUND_F32), shifted = a + round;
  vf32 tail = vf32_table_polynomial(camox_gelu_tail, 16, 6, (vi32)shifted, a - (shifted - round));
  return vf32_fma(-a, tail, vf32_at_least(x, 0));
}

/* 1 - v where x > 0, else v. */
CAMOX_INLINE vf32 vf32_complement_where_positive(vf32 v, vf32 x) {
  const vf32 one = vf32_set1(1), zero = vf32_set1(0);
#ifdef CAMOX_SIMD_AVX512 /* one subtraction under a mask */
  return (vf32)_mm512_mask_sub_ps((__m512)v, _mm512_cmp_ps_mask((__m512)x, (__m512)zero, _CMP_GT_OQ), (__m512)one, (__m512)v);
#else
  return vf32_select((vi32)(x > zero), one - v, v);
#endif
}

/* d gelu / dx = Phi(x) + x phi(x). Intervals of 1/4 would be too wide for its table. */
CAMOX_CALLED vf32 vf32_gelu_grad(vf32 x) {
  vf32 a = vf32_at_most(vf32_abs(x), 6.2f), five = vf32_set1(5), round = vf32_set1(CAMOX_ROUND_F32);
  vf32 shifted = vf32_fma(a, five, round);
  vf32 grad = vf32_table_polynomial(camox_gelu_tail_grad, 32, 5, (vi32)shifted, vf32_fma(a, five, round - shifted));
  return vf32_complement_where_positive(grad, x);
}

#if !defined(CAMOX_SIMD_AVX2) && !defined(CAMOX_SIMD_AVX512)
CAMOX_INLINE vf64 vf64_at_most(vf64 v, double limit) { return vf64_select((vi64)(v > vf64_set1(limit)), vf64_set1(limit), v); }
CAMOX_INLINE vf64 vf64_at_least(vf64 v, double limit) { return vf64_select((vi64)(v < vf64_set1(limit)), vf64_set1(limit), v); }

CAMOX_INLINE vf64 vf64_fma(vf64 a, vf64 b, vf64 c) { return a * b + c; }

CAMOX_INLINE vf64 vf64_rsqrt(vf64 v) { return vf64_set1(1) / vf64_sqrt(v); }

CAMOX_INLINE vf64 vf64_power_of_two(vi64 n) { return (vf64)((n + 1023) << 52); }

/* Not libm's: its exp is a symbol of GLIBC_2.29. */
CAMOX_CALLED vf64 vf64_exp(vf64 x) {
  vf64 round = vf64_set1(0x1.8p52), one = vf64_set1(1);
  x = vf64_at_most(vf64_at_least(x, -746.0), 710.0);
  vf64 shifted = x * vf64_set1(0x1.71547652b82fep+0) + round, n = shifted - round;
  vf64 r = (x - n * vf64_set1(6.93147180369123816490e-01)) - n * vf64_set1(1.90821492927058770002e-10);
  vf64 series = one; /* 1 + r/3 (1 + r/4 (1 + ...)), innermost term first */
  for (int k = 13; k >= 3; --k) series = one + r * series * vf64_set1(1.0 / k);
  vi64 power = (vi64)shifted - (vi64)round, half = power >> 1;
  vf64 reduced = one + (r + r * r * series * vf64_set1(0.5));
  return reduced * vf64_power_of_two(half) * vf64_power_of_two(power - half);
}

CAMOX_INLINE vf64 vf64_exp_term(vf64 x) { return vf64_exp(x); }
CAMOX_INLINE vf64 vf64_exp_weight(vf64 x) { return vf64_exp(x); }

#define CAMOX_DEFINE_LIBM(name)                                            \
  CAMOX_CALLED vf64 vf64_##name(vf64 x) {                                  \
    for (int lane = 0; lane < VF64_LANES; ++lane) x[lane] = name(x[lane]); \
    return x;                                                              \
  }
CAMOX_DEFINE_LIBM(erf)
CAMOX_DEFINE_LIBM(erfc)
CAMOX_DEFINE_LIBM(tanh)
CAMOX_DEFINE_LIBM(sin)
CAMOX_DEFINE_LIBM(cos)

CAMOX_INLINE vf64 vf64_gelu_tail(vf64 x) { return vf64_set1(0.5) * vf64_erfc(x * vf64_set1(0x1.6a09e667f3bcdp-1)); }

CAMOX_CALLED vf64 vf64_gelu(vf64 x) {
  vf64 a = vf64_at_most(vf64_abs(x), 64.0);
  return vf64_at_least(x, 0.0) - a * vf64_gelu_tail(a);
}

CAMOX_CALLED vf64 vf64_gelu_grad(vf64 x) {
  vf64 a = vf64_at_most(vf64_abs(x), 64.0);
  vf64 grad = vf64_gelu_tail(a) - a * vf64_set1(0x1.9884533d43651p-2) * vf64_exp(vf64_set1(-0.5) * a * a);
  return vf64_select((vi64)(x > vf64_set1(0)), vf64_set1(1) - grad, grad);
}
#endif

/* sigmoid, silu and the tanh form of gelu, x sigmoid(u) with u = 2 sqrt(2/pi) (x + 0.044715 x^3); their
   derivatives. The part of a derivative that decays like exp(-|x|) is taken at |x| <= limit, past which it is below every
   rounding, so that exp stays finite. */
#define CAMOX_DEFINE_SIGMOIDS(V, T, SILU_LIMIT, GELU_LIMIT)                                                  \
  CAMOX_CALLED V V##_sigmoid(V x) { return V##_set1(1) / (V##_set1(1) + V##_exp(-x)); }                      \
  CAMOX_CALLED V V##_silu(V x) { return x / (V##_set1(1) + V##_exp(-x)); }                                   \
  CAMOX_CALLED V V##_silu_grad(V x) {                                                                        \
    V clamped = V##_at_most(V##_at_least(x, -(T)(SILU_LIMIT)), (T)(SILU_LIMIT));                             \
    V e = V##_exp(-clamped), s = V##_set1(1) / (V##_set1(1) + e);                                            \
    return s + clamped * s * (e * s);                                                                        \
  }                                                                                                          \
  CAMOX_CALLED V V##_gelu_tanh(V x) {                                                                        \
    V u = V##_set1((T)1.5957691216057308) * (x + V##_set1((T)0.044715) * x * x * x);                         \
    return x * V##_sigmoid(u);                                                                               \
  }                                                                                                          \
  CAMOX_CALLED V V##_gelu_tanh_grad(V x) {                                                                   \
    V clamped = V##_at_most(V##_at_least(x, -(T)(GELU_LIMIT)), (T)(GELU_LIMIT)), square = clamped * clamped; \
    V u = V##_set1((T)1.5957691216057308) * (clamped + V##_set1((T)0.044715) * clamped * square);            \
    V u_grad = V##_set1((T)1.5957691216057308) * (V##_set1(1) + V##_set1((T)(3 * 0.044715)) * square);       \
    V e = V##_exp(-u), s = V##_set1(1) / (V##_set1(1) + e);                                                  \
    return s + clamped * u_grad * s * (e * s);                                                               \
  }

CAMOX_DEFINE_SIGMOIDS(vf32, float, 80, 10)
#if !defined(CAMOX_SIMD_AVX2) && !defined(CAMOX_SIMD_AVX512)
CAMOX_DEFINE_SIGMOIDS(vf64, double, 700, 20)
#endif

#endif
