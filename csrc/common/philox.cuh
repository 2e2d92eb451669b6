/* Dropout masks (philox.h) in kernels of the CUDA part: what an element's thread asks. */
#ifndef CAMOX_PHILOX_CUH
#define CAMOX_PHILOX_CUH

#include "cuda_util.cuh"
#include "philox.h"

/* camox_philox_bits without an array that is indexed, which would lie in memory. */
__device__ __forceinline__ uint32_t camox_philox_pick(const camox_philox_words &words, int place) {
  const uint32_t low = place & 2 ? words.word[1] : words.word[0], high = place & 2 ? words.word[3] : words.word[2];
  const uint32_t word = place & 4 ? high : low;
  return word >> (16 * (place & 1)) & 0xffffu;
}

/* Whether element `index` is kept. */
__device__ __forceinline__ bool camox_keeps(uint64_t seed, int64_t index, uint32_t threshold) {
  const camox_philox_words words = camox_philox_group(seed, static_cast<uint64_t>(index) / CAMOX_PHILOX_ELEMENTS);
  return camox_philox_pick(words, static_cast<int>(index % CAMOX_PHILOX_ELEMENTS)) >= threshold;
}

/* Words of V elements. */
template <int V>
static constexpr int camox_keep_size = V == 1 ? 1 : V / 2;

/* The words of elements index ... index + V - 1, two of each, the earlier in the low half. index is a multiple of V, which
   divides the elements of a call. */
template <int V>
__device__ __forceinline__ void camox_keep_words(uint32_t (&to)[camox_keep_size<V>], uint64_t seed, int64_t index) {
  const camox_philox_words words = camox_philox_group(seed, static_cast<uint64_t>(index) / CAMOX_PHILOX_ELEMENTS);
  if constexpr (V == 1) {
    to[0] = camox_philox_pick(words, static_cast<int>(index % CAMOX_PHILOX_ELEMENTS));
    return;
  }
  const bool later = V == 4 && (index & 4) != 0;
#pragma unroll
  for (int i = 0; i < V / 2; ++i) to[i] = later ? words.word[(i + 2) % 4] : words.word[i];
}

/* Whether element i of a word is kept. Compared in the upper half, so that the later element needs no shift. */
__device__ __forceinline__ bool camox_word_keeps(uint32_t word, int i, uint32_t threshold) {
  return (i == 0 ? word << 16 : word) >= threshold << 16;
}

/* Whether elements index ... index + V - 1 are kept. */
template <int V>
__device__ __forceinline__ void camox_keeps_all(bool (&keep)[V], uint64_t seed, int64_t index, uint32_t threshold) {
  if constexpr (V == 1) {
    keep[0] = camox_keeps(seed, index, threshold);
  } else {
    uint32_t words[V / 2];
    camox_keep_words<V>(words, seed, index);
#pragma unroll
    for (int i = 0; i < V; ++i) keep[i] = camox_word_keeps(words[i / 2], i % 2, threshold);
  }
}

#endif
