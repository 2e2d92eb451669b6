/* De-interleave and interleave: even(a, b) and odd(a, b) are the lanes with even and with odd index of a followed by b;
   zip_low(e, o) and zip_high(e, o) are the inverse, zip_low(even(a, b), odd(a, b)) == a.
   Shifts by one lane: shift_up(a, b) is the last lane of a and all but the last of b, shift_down(a, b) all but the first of a
   and the first of b; keep_shift_*: zero in lanes outside the set. */
#if defined(__clang__)
#define CAMOX_SHUFFLE(I, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define CAMOX_SHUFFLE(I, a, b, ...) __builtin_shuffle(a, b, (I){__VA_ARGS__})
#endif

#define CAMOX_DEFINE_PAIRS(V, I, EVEN, ODD, LOW, HIGH)                         \
  CAMOX_INLINE V V##_even(V a, V b) { return CAMOX_SHUFFLE(I, a, b, EVEN); }   \
  CAMOX_INLINE V V##_odd(V a, V b) { return CAMOX_SHUFFLE(I, a, b, ODD); }     \
  CAMOX_INLINE V V##_zip_low(V e, V o) { return CAMOX_SHUFFLE(I, e, o, LOW); } \
  CAMOX_INLINE V V##_zip_high(V e, V o) { return CAMOX_SHUFFLE(I, e, o, HIGH); }

#define CAMOX_LIST(...) __VA_ARGS__

#if VF32_LANES == 16
CAMOX_DEFINE_PAIRS(vf32, vi32, CAMOX_LIST(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
                   CAMOX_LIST(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31),
                   CAMOX_LIST(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23),
                   CAMOX_LIST(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31))
#elif VF32_LANES == 8
CAMOX_DEFINE_PAIRS(vf32, vi32, CAMOX_LIST(0, 2, 4, 6, 8, 10, 12, 14), CAMOX_LIST(1, 3, 5, 7, 9, 11, 13, 15),
                   CAMOX_LIST(0, 8, 1, 9, 2, 10, 3, 11), CAMOX_LIST(4, 12, 5, 13, 6, 14, 7, 15))
#else
CAMOX_DEFINE_PAIRS(vf32, vi32, CAMOX_LIST(0, 2, 4, 6), CAMOX_LIST(1, 3, 5, 7), CAMOX_LIST(0, 4, 1, 5), CAMOX_LIST(2, 6, 3, 7))
#endif
#if VF64_LANES == 2
CAMOX_DEFINE_PAIRS(vf64, vi64, CAMOX_LIST(0, 2), CAMOX_LIST(1, 3), CAMOX_LIST(0, 2), CAMOX_LIST(1, 3))
#endif

#if VF32_LANES == 8
CAMOX_INLINE vf32 vf32_shift_up(vf32 a, vf32 b) { return CAMOX_SHUFFLE(vi32, a, b, 7, 8, 9, 10, 11, 12, 13, 14); }
CAMOX_INLINE vf32 vf32_shift_down(vf32 a, vf32 b) { return CAMOX_SHUFFLE(vi32, a, b, 1, 2, 3, 4, 5, 6, 7, 8); }
#elif VF32_LANES == 4
/* Each of two steps is one instruction of SSE2; in one step compilers take six. */
CAMOX_INLINE vf32 vf32_shift_up(vf32 a, vf32 b) {
  vf32 ends = CAMOX_SHUFFLE(vi32, a, b, 3, 3, 4, 4);
  return CAMOX_SHUFFLE(vi32, ends, b, 0, 2, 5, 6);
}
CAMOX_INLINE vf32 vf32_shift_down(vf32 a, vf32 b) {
  vf32 ends = CAMOX_SHUFFLE(vi32, a, b, 3, 3, 4, 4);
  return CAMOX_SHUFFLE(vi32, a, ends, 1, 2, 4, 6);
}
#endif
#if VF32_LANES < 16
CAMOX_INLINE vf32 vf32_keep_shift_up(vf32_lanes_t lanes, vf32 a, vf32 b) { return vf32_keep_lanes(lanes, vf32_shift_up(a, b)); }
CAMOX_INLINE vf32 vf32_keep_shift_down(vf32_lanes_t lanes, vf32 a, vf32 b) {
  return vf32_keep_lanes(lanes, vf32_shift_down(a, b));
}
#endif
#if VF64_LANES == 2
CAMOX_INLINE vf64 vf64_shift_up(vf64 a, vf64 b) { return CAMOX_SHUFFLE(vi64, a, b, 1, 2); }
CAMOX_INLINE vf64 vf64_shift_down(vf64 a, vf64 b) { return CAMOX_SHUFFLE(vi64, a, b, 1, 2); }
CAMOX_INLINE vf64 vf64_keep_shift_up(vf64_lanes_t lanes, vf64 a, vf64 b) { return vf64_keep_lanes(lanes, vf64_shift_up(a, b)); }
CAMOX_INLINE vf64 vf64_keep_shift_down(vf64_lanes_t lanes, vf64 a, vf64 b) {
  return vf64_keep_lanes(lanes, vf64_shift_down(a, b));
}
#endif
