/* A work item is a band of one channel's values, which lie in runs of adjacent ones, a plane of each image or a part of it:

     image 0   [ channel 0 | channel 1 | ... ]      two passes: 1. sums of d and d^2, d = x - centre
     image 1   [ channel 0 | channel 1 | ... ]                  2. y, from the sums of the whole channel
     ...            ^ a run of channel 0

   Where a channel is one band, its values stay in the caches between the passes.

   The variance is (sum of d^2 - (sum of d)^2 / n) / n. The centre is one of the n values, so it is at most sqrt(n var) away from the
   mean, and the difference is at most n + 1 times as inexact as the sums, which have double's 53 bits.

   Value i of a run is added to lane i % LANES, and lanes are added in their order: the same bits with any vectors. */
#include "batch_norm.h"

#include "../common/integers.h"
#include "../common/simd.h"

#define LANES 16
#define PARTS (LANES / VF64_LANES)
#ifdef CAMOX_BREAK_TUNE
#define FACTOR 1.001f /* a build with CAMOX_BREAK=tune is wrong by 1e-3 */
#else
#define FACTOR 1
#endif

typedef struct {
  int64_t first, count; /* where it begins in x, and its values */
} batch_norm_run;

/* From value `at` of a channel to the end of its plane, or to value `end`. */
static batch_norm_run batch_norm_run_of(const camox_batch_norm_params *p, int64_t channel, int64_t at, int64_t end) {
  const int64_t image = at / p->plane, position = at % p->plane;
  return (batch_norm_run){(image * p->channels + channel) * p->plane + position, camox_min_i64(p->plane - position, end - at)};
}

CAMOX_INLINE vf64 batch_norm_widened(const float *from) {
  typedef float narrow __attribute__((vector_size(VF64_BYTES / 2)));
  narrow v;
  memcpy(&v, from, sizeof v);
  return __builtin_convertvector(v, vf64);
}

typedef struct {
  vf64 d[PARTS], squares[PARTS];
} batch_norm_sums;

/* LANES values. */
CAMOX_INLINE void batch_norm_add(const float *x, vf64 centre, batch_norm_sums *sums) {
#pragma GCC unroll 8
  for (int i = 0; i < PARTS; ++i) {
    const vf64 d = batch_norm_widened(x + i * VF64_LANES) - centre;
    sums->d[i] += d, sums->squares[i] += d * d;
  }
}

/* count < LANES values: the centre behind them adds nothing. */
CAMOX_INLINE void batch_norm_add_last(const float *x, int64_t count, float centre, batch_norm_sums *sums) {
  float filled[LANES];
  for (int i = 0; i < LANES; i += VF32_LANES) {
    const int64_t n = camox_min_i64(camox_max_i64(count - i, 0), VF32_LANES);
    const vf32_lanes_t given = vf32_lanes_below(vf32_lane(), vf32_set1_int(n));
    vf32_store(filled + i, vf32_select_lanes(given, vload_n_f32(x + i, n), vf32_set1(centre)));
  }
  batch_norm_add(filled, vf64_set1(centre), sums);
}

static double batch_norm_total(const vf64 *parts) {
  double total = 0;
  for (int i = 0; i < LANES; ++i) total += parts[i / VF64_LANES][i % VF64_LANES];
  return total;
}

/* Of values [at, end) of a channel: the sums of d and d^2. */
static void batch_norm_add_up(const camox_batch_norm_params *p, int64_t channel, float centre, int64_t at, int64_t end,
                              double *to) {
  batch_norm_sums sums = {0};
  while (at < end) {
    const batch_norm_run run = batch_norm_run_of(p, channel, at, end);
    const float *x = p->x + run.first;
    int64_t i = 0;
    for (; i + LANES <= run.count; i += LANES) batch_norm_add(x + i, vf64_set1(centre), &sums);
    if (i < run.count) batch_norm_add_last(x + i, run.count - i, centre, &sums);
    at += run.count;
  }
  to[0] = batch_norm_total(sums.d), to[1] = batch_norm_total(sums.squares);
}

/* y = (x - mean) scale + shift */
typedef struct {
  float mean, scale, shift;
} batch_norm_affine;

/* From the sums of d and d^2 of all bands of a channel. The first band's work item stores the statistics. */
static batch_norm_affine batch_norm_affine_of(const camox_batch_norm_params *p, int64_t channel, double centre, int is_first) {
  double sum = 0, squares = 0;
  for (int64_t i = channel * p->bands; i < (channel + 1) * p->bands; ++i) sum += p->sums[2 * i], squares += p->sums[2 * i + 1];
  const double n = (double)(p->images * p->plane), mean = centre + sum / n, difference = squares - sum * sum / n;
  const double deviation = difference < 0 ? 0 : difference; /* negative by rounding alone; may be NaN */
  const double var = deviation / n, invstd = var != 0 || p->eps != 0 ? 1 / sqrt(var + p->eps) : 0;
  if (is_first) {
    p->mean[channel] = (float)mean, p->invstd[channel] = (float)invstd;
    if (p->running_mean) p->running_mean[channel] = (float)(p->momentum * mean + (1 - p->momentum) * p->running_mean[channel]);
    if (p->running_var)
      p->running_var[channel] = (float)(p->momentum * (deviation / (n - 1)) + (1 - p->momentum) * p->running_var[channel]);
  }
  const double scale = p->weight ? invstd * p->weight[channel] : invstd, bias = p->bias ? p->bias[channel] : 0;
  /* The shift has what the mean loses when it is rounded: beside a large mean much more than y's precision. */
  const float rounded = (float)mean;
  return (batch_norm_affine){rounded, FACTOR * (float)scale, (float)(bias - (mean - rounded) * scale)};
}

CAMOX_INLINE vf32 batch_norm_value(const batch_norm_affine *affine, vf32 x) {
  return (x - affine->mean) * affine->scale + affine->shift;
}

static void batch_norm_write(const camox_batch_norm_params *p, int64_t channel, batch_norm_affine affine, int64_t at,
                             int64_t end) {
  while (at < end) {
    const batch_norm_run run = batch_norm_run_of(p, channel, at, end);
    const float *x = p->x + run.first;
    float *y = p->y + run.first;
    int64_t i = 0;
    for (; i + VF32_LANES <= run.count; i += VF32_LANES) vf32_store(y + i, batch_norm_value(&affine, vf32_load(x + i)));
    const int64_t left = run.count - i;
    if (left > 0) vf32_store_n(y + i, batch_norm_value(&affine, vf32_load_n(x + i, left)), left);
    at += run.count;
  }
}

void CAMOX_PASTE3(camox_batch_norm_kernel, f32, CAMOX_ISA)(const camox_batch_norm_params *p, int64_t begin, int64_t end) {
  const int64_t count = p->images * p->plane;
  for (int64_t item = begin; item < end; ++item) {
    const int64_t channel = item / p->bands, band = item % p->bands;
    const int64_t first = count * band / p->bands, last = count * (band + 1) / p->bands;
    float centre = p->x[channel * p->plane];
    if (!isfinite(centre)) centre = 0; /* infinity less infinity would make the mean NaN */
    if (p->adds_up) batch_norm_add_up(p, channel, centre, first, last, p->sums + 2 * item);
    if (p->writes) batch_norm_write(p, channel, batch_norm_affine_of(p, channel, centre, band == 0), first, last);
  }
}
