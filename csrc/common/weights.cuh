/* Weights and biases of one element per channel or column, beside an x of type T: float32, or where `half` says so of T. A flag
   at run time, because kernels for either type would be twice as many for the sake of a few loads. */
#ifndef CAMOX_WEIGHTS_CUH
#define CAMOX_WEIGHTS_CUH

#include "cuda_util.cuh"

template <typename T>
__device__ __forceinline__ float camox_load_weight(const void *weights, int64_t i, bool half) {
  if constexpr (sizeof(T) == 2)
    if (half) return camox_to_float(__ldg(static_cast<const T *>(weights) + i));
  return __ldg(static_cast<const float *>(weights) + i);
}

/* V adjacent ones, aligned to all of them or to 16 bytes. */
template <typename T, int V>
__device__ __forceinline__ void camox_load_weights(float (&to)[V], const void *weights, int64_t i, bool half) {
  if constexpr (sizeof(T) == 2) {
    if (half) {
      T values[V];
      camox_load(values, static_cast<const T *>(weights) + i);
      camox_to_floats(to, values);
      return;
    }
  }
  camox_load_floats(to, static_cast<const float *>(weights) + i);
}

#endif
