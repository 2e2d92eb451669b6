/* The exact GELU, u Phi(u), from the normal distribution's tail: max(u, 0) - |u| Phi(-|u|), in which nothing cancels, with
   log2 Phi(-a) as a polynomial and one ex2. erfcf and expf take three times the instructions. */
#ifndef CAMOX_GELU_CUH
#define CAMOX_GELU_CUH

#include "cuda_util.cuh"

/* log2 Phi(-a), a >= 0. T: the type that the result is rounded to. float: Phi(-a) within 2e-8, in units of
   max(a Phi(-a), 4e-3), up to 6.2. float16, in three steps less: within 1.1e-5 of Phi(-a) up to 7. bfloat16, in five less:
   within 7e-4 of Phi(-a) up to 5 and 2.7e-3 up to 6.5, less than half of its eps. */
template <typename T>
__device__ __forceinline__ float camox_log2_tail(float a) {
  if constexpr (camox_is_bfloat16<T>::value) {
    float sum = fmaf(-0.000217900262f, a, 0.004731155f);
    sum = fmaf(sum, a, -0.0442856811f);
    sum = fmaf(sum, a, -0.469551325f);
    sum = fmaf(sum, a, -1.14707065f);
    return fmaf(sum, a, -1.0f);
  } else if constexpr (sizeof(T) == 2) {
    float sum = fmaf(-1.59716353e-06f, a, 5.63954382e-05f);
    sum = fmaf(sum, a, -0.000885857153f);
    sum = fmaf(sum, a, 0.0083180787f);
    sum = fmaf(sum, a, -0.0535469204f);
    sum = fmaf(sum, a, -0.458890259f);
    sum = fmaf(sum, a, -1.15109181f);
    return fmaf(sum, a, -1.0f);
  } else {
    float sum = fmaf(-1.8627043e-08f, a, 6.00300154e-07f);
    sum = fmaf(sum, a, -8.23527989e-06f);
    sum = fmaf(sum, a, 6.08133232e-05f);
    sum = fmaf(sum, a, -0.000226865843f);
    sum = fmaf(sum, a, -0.000107131083f);
    sum = fmaf(sum, a, 0.0070747938f);
    sum = fmaf(sum, a, -0.0525254048f);
    sum = fmaf(sum, a, -0.459194362f);
    sum = fmaf(sum, a, -1.15110695f);
    return fmaf(sum, a, -1.0f);
  }
}

#define CAMOX_GELU_LAST 7.0f /* from here on the tail is below every rounding */

template <typename T>
__device__ __forceinline__ float camox_gelu(float u) {
  const float a = fminf(fabsf(u), CAMOX_GELU_LAST); /* finite; of a NaN the last term stays */
  return fmaf(-a, camox_exp2(camox_log2_tail<T>(a)), u < 0.0f ? 0.0f : u);
}

/* grad (Phi(u) + u phi(u)). With a = |u| and Mills' ratio M(a) = Phi(-a) / phi(a) the derivative at -a is phi(a) (M(a) - a),
   one ex2; M is a quotient of polynomials whose terms are all positive. Before rounding the derivative is within 1.1e-7, in
   units of the larger of itself and 0.05. One quotient for all types: halves lie within one rounding of float32's gradients,
   where these nearly cancel too. FINITE: |u| < 1e19. */
template <bool FINITE>
__device__ __forceinline__ float camox_gelu_grad(float grad, float u) {
  const float a = FINITE ? fabsf(u) : fminf(fabsf(u), CAMOX_GELU_LAST);
  const float density = camox_exp2(fmaf(-0.72134752045f * u, u, -1.3257480647f)); /* of a NaN a NaN */
  const float above = fmaf(fmaf(0.0913299695f, a, 0.478830546f), a, 1.25331426f);
  float below = fmaf(0.000313940225f, a, 0.086509034f);
  below = fmaf(below, a, 0.514281809f);
  below = fmaf(below, a, 1.17994082f);
  below = fmaf(below, a, 1.0f);
  const float derivative = density * fmaf(above, camox_reciprocal(below), -a); /* at -a; at a it is 1 less that */
  return u > 0.0f ? fmaf(-grad, derivative, grad) : grad * derivative;
}

#endif
