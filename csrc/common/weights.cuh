/* Weights and biases of one element per channel or column, beside an x of type T: float32, or where `half` says so of T. A flag
   at run time, because kernels for either type would be twice as many for the sake of a few loads. */
#ifndef CAMOX_WEIGHTS_CUH
#define CAMOX_WEIGHTS_CUH

#include "cuda_util.cuh"

/* V adjacent ones as float, aligned to all of them or to 16 bytes. */
template <int V>
__device__ __forceinline__ void camox_load_weights(float (&to)[V], const float *from) {
  camox_load_floats(to, from);
}
template <int V, typename Half>
__device__ __forceinline__ void camox_load_weights(float (&to)[V], const Half *from) {
  Half values[V];
  camox_load(values, from);
  camox_to_floats(to, values);
}

/* From element i on. */
template <typename T, int V>
__device__ __forceinline__ void camox_load_weights(float (&to)[V], const void *weights, int64_t i, bool half) {
  if constexpr (sizeof(T) == 2)
    if (half) return camox_load_weights(to, static_cast<const T *>(weights) + i);
  camox_load_weights(to, static_cast<const float *>(weights) + i);
}

/* Both of V channels. In one branch, in which a conversion waits for its load, so that they wait together. */
template <typename T, int V>
__device__ __forceinline__ void camox_load_affine(float (&weight)[V], float (&bias)[V], const void *weights, const void *biases,
                                                  int64_t i, bool half) {
  if constexpr (sizeof(T) == 2) {
    if (half) {
      camox_load_weights(weight, static_cast<const T *>(weights) + i);
      camox_load_weights(bias, static_cast<const T *>(biases) + i);
      return;
    }
  }
  camox_load_weights(weight, static_cast<const float *>(weights) + i);
  camox_load_weights(bias, static_cast<const float *>(biases) + i);
}

#endif
