/* Philox4x32-R, a counter-based generator: four 32-bit words from a 128-bit counter and a 64-bit key, the same in C, CUDA and
   the vector bodies (simd_philox.h). Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011),
   whose known-answer vectors the tests hold it to; 7 rounds is the fewest that pass BigCrush.

   Dropout masks: element i of a tensor, counted in row-major order of its logical shape, has the bits
     half i % 8 (word (i % 8) / 2, low half first) of philox(counter = {i / 8, as 64 bits, low word first; 0; 0}, key = seed)
   and is kept where they are >= round(65536 p). So a mask depends on the seed and on logical indices alone. */
#ifndef CAMOX_PHILOX_H
#define CAMOX_PHILOX_H

#include <stdint.h>

#if defined(__CUDACC__) || defined(CAMOX_CUDA_EMULATOR)
#define CAMOX_PHILOX_INLINE static __host__ __device__ __forceinline__
#else
#define CAMOX_PHILOX_INLINE static inline
#endif

#define CAMOX_PHILOX_ROUNDS 7
#define CAMOX_PHILOX_M0 0xd2511f53u
#define CAMOX_PHILOX_M1 0xcd9e8d57u
#define CAMOX_PHILOX_W0 0x9e3779b9u
#define CAMOX_PHILOX_W1 0xbb67ae85u
/* Elements whose bits come from one call. */
#define CAMOX_PHILOX_ELEMENTS 8

typedef struct {
  uint32_t word[4];
} camox_philox_words;

/* nvcc would make a product of 64 bits of it, and add an upper half that is 0. */
CAMOX_PHILOX_INLINE uint64_t camox_philox_product(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  uint64_t product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
#else
  return (uint64_t)a * b;
#endif
}

CAMOX_PHILOX_INLINE camox_philox_words camox_philox(camox_philox_words counter, uint32_t key0, uint32_t key1, int rounds) {
  for (int round = 0; round < rounds; ++round) {
    const uint64_t a = camox_philox_product(CAMOX_PHILOX_M0, counter.word[0]);
    const uint64_t b = camox_philox_product(CAMOX_PHILOX_M1, counter.word[2]);
    counter.word[0] = (uint32_t)(b >> 32) ^ counter.word[1] ^ key0;
    counter.word[2] = (uint32_t)(a >> 32) ^ counter.word[3] ^ key1;
    counter.word[1] = (uint32_t)b;
    counter.word[3] = (uint32_t)a;
    key0 += CAMOX_PHILOX_W0;
    key1 += CAMOX_PHILOX_W1;
  }
  return counter;
}

/* The bits of elements 8 * group ... 8 * group + 7. */
CAMOX_PHILOX_INLINE camox_philox_words camox_philox_group(uint64_t seed, uint64_t group) {
  const camox_philox_words counter = {{(uint32_t)group, (uint32_t)(group >> 32), 0, 0}};
  return camox_philox(counter, (uint32_t)seed, (uint32_t)(seed >> 32), CAMOX_PHILOX_ROUNDS);
}

/* The 16 bits of element `index` (0 to 7) of a group. */
CAMOX_PHILOX_INLINE uint32_t camox_philox_bits(camox_philox_words words, int index) {
  return words.word[index / 2] >> (16 * (index % 2)) & 0xffffu;
}

/* 65536 p, rounded, at most 65535: elements with smaller bits are dropped. */
CAMOX_PHILOX_INLINE uint32_t camox_dropout_threshold(double p) {
  const uint32_t threshold = (uint32_t)(65536.0 * p + 0.5);
  return threshold < 65535u ? threshold : 65535u;
}

/* The factor of elements that are kept. */
CAMOX_PHILOX_INLINE double camox_dropout_scale(uint32_t threshold) { return 65536.0 / (65536.0 - (double)threshold); }

#endif
