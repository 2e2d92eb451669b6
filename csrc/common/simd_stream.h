/* Non-temporal (streaming) stores, for outputs so large that the next op would not find them in the caches anyway: an ordinary
   store first reads the cache line that it writes. vstream_* need an address aligned to the bytes that they write; a kernel
   calls camox_stream_end() before other threads may read them. Ordinary stores where the instruction set has none. */
#if defined(CAMOX_SIMD_AVX512)
CAMOX_INLINE void vstream_f32(float *to, vf32 value) { _mm512_stream_ps(to, (__m512)value); }
CAMOX_INLINE void vstream_bf16(uint16_t *to, vf32 value) { _mm256_stream_si256((__m256i *)to, vf32_to_bf16(value)); }
CAMOX_INLINE void vstream_f16(uint16_t *to, vf32 value) { _mm256_stream_si256((__m256i *)to, vf32_to_f16(value)); }
CAMOX_INLINE void camox_stream_end(void) { _mm_sfence(); }
#elif defined(CAMOX_SIMD_AVX2)
CAMOX_INLINE void vstream_f32(float *to, vf32 value) { _mm256_stream_ps(to, (__m256)value); }
#define CAMOX_DEFINE_STREAM(S)                                                  \
  CAMOX_INLINE void vstream_##S(uint16_t *to, vf32 value) {                     \
    uint16_t rounded[VF32_LANES];                                               \
    vstore_##S(rounded, value);                                                 \
    _mm_stream_si128((__m128i *)to, _mm_loadu_si128((const __m128i *)rounded)); \
  }
CAMOX_DEFINE_STREAM(bf16)
CAMOX_DEFINE_STREAM(f16)
CAMOX_INLINE void camox_stream_end(void) { _mm_sfence(); }
#else
CAMOX_INLINE void vstream_f32(float *to, vf32 value) { vstore_f32(to, value); }
CAMOX_INLINE void vstream_bf16(uint16_t *to, vf32 value) { vstore_bf16(to, value); }
CAMOX_INLINE void vstream_f16(uint16_t *to, vf32 value) { vstore_f16(to, value); }
CAMOX_INLINE void vstream_f64(double *to, vf64 value) { vstore_f64(to, value); }
CAMOX_INLINE void camox_stream_end(void) {}
#endif

/* Outputs of this many bytes and more gain by them: more than an L2 cache, a good part of an L3 cache. */
#define CAMOX_STREAM_BYTES ((int64_t)8 << 20)
