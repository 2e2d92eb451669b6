/* A band of rows is worked on at a time. Its rows of x are copied into lines with zeros around them, which stay in L1, so that no
   loop knows a border:

       x             lines, `pitch` floats apart                     y, or dy
     +------+      +-----------------+                            +----------+
     | band |  ->  | 0 |  row    | 0 |  line i + r, from c on ->  |  row i   |
     +------+      +-----------------+                            +----------+

   Convolution: a work item is a plane of y. A tile of ROWS rows and two vectors of columns of y, one at a row's end, is summed up in registers; for each
   column c of the window the lines i .. i + ROWS + size - 2 are read once, each serving the rows of y that it reaches.

   Gradient of the weights: a work item is a channel, through all images in order, so that its sums do not depend on the number of
   threads. For a row r of the window, size vectors of sums stay in registers while the band's dy is passed over once: a vector of dy
   times the vectors of the line i + r that begin at c = 0 .. size - 1. Lanes are added up after each plane, in double. */
#include "depthwise.h"

#include "../common/simd.h"

#define LANES VF32_LANES
#ifdef CAMOX_BREAK_TUNE
#define FACTOR 1.001f /* a build with CAMOX_BREAK=tune is wrong by 1e-3 */
#else
#define FACTOR 1
#endif
#define ROWS 4

typedef struct {
  const camox_depthwise_params *p;
  float *lines;
  int64_t pitch;
} depthwise_band;

/* All zeros: what lies beside the rows of x stays so. */
static depthwise_band depthwise_band_of(const camox_depthwise_params *p) {
  memset(p->scratch, 0, camox_depthwise_scratch(p));
  return (depthwise_band){p, (float *)p->scratch, camox_depthwise_pitch(p)};
}

/* The lines under rows first .. first + count - 1 of y. */
static void depthwise_fill(const depthwise_band *band, const float *plane, int64_t first, int64_t count) {
  const camox_depthwise_params *p = band->p;
  const size_t bytes = (size_t)p->columns * sizeof *plane;
  for (int64_t i = 0; i < count + p->size - 1; ++i) {
    float *line = band->lines + i * band->pitch + p->left;
    const int64_t row = first + i - p->top;
    if (row < 0 || row >= p->rows)
      memset(line, 0, bytes);
    else
      memcpy(line, plane + row * p->columns, bytes);
  }
}

/* sums[i][v]: rows i and vectors v of y, from the line and column at `lines`. */
CAMOX_INLINE void depthwise_tile(const int size, const int vectors, const float *lines, int64_t pitch, const float *weights,
                                 vf32 sums[ROWS][2]) {
  for (int c = 0; c < size; ++c) {
#pragma GCC unroll 14
    for (int line = 0; line < ROWS + size - 1; ++line) {
      const float *from = lines + line * pitch + c;
      vf32 x[2];
#pragma GCC unroll 2
      for (int v = 0; v < vectors; ++v) x[v] = vf32_load(from + v * LANES);
#pragma GCC unroll 4
      for (int i = 0; i < ROWS; ++i) {
        if (line < i || line - i >= size) continue;
        const vf32 weight = vf32_set1(weights[(line - i) * size + c]);
#pragma GCC unroll 2
        for (int v = 0; v < vectors; ++v) sums[i][v] = vf32_multiply_add(weight, x[v], sums[i][v]);
      }
    }
  }
}

/* `count` rows of y, from column j on as far as `vectors` reach. */
CAMOX_INLINE void depthwise_columns(const int size, const int vectors, const depthwise_band *band, const float *weights,
                                    float bias, float *y, int64_t count, int64_t j) {
  const int64_t columns = band->p->y_columns;
  for (int64_t i = 0; i < count; i += ROWS) {
    vf32 sums[ROWS][2];
    for (int row = 0; row < ROWS; ++row) sums[row][0] = sums[row][1] = vf32_set1(bias);
    depthwise_tile(size, vectors, band->lines + i * band->pitch + j, band->pitch, weights, sums);
    for (int64_t row = 0; row < camox_min_i64(ROWS, count - i); ++row)
      for (int v = 0; v < vectors; ++v) {
        const int64_t column = j + v * LANES;
        float *to = y + (i + row) * columns + column;
        if (column + LANES <= columns)
          vf32_store(to, sums[row][v]);
        else
          vf32_store_n(to, sums[row][v], columns - column);
      }
  }
}

/* `count` rows of y: pairs of vectors, and one where one is enough for the rest. */
CAMOX_INLINE void depthwise_rows(const int size, const depthwise_band *band, const float *weights, float bias, float *y,
                                 int64_t count) {
  const int64_t columns = band->p->y_columns;
  int64_t j = 0;
  for (; j + LANES < columns; j += 2 * LANES) depthwise_columns(size, 2, band, weights, bias, y, count, j);
  if (j < columns) depthwise_columns(size, 1, band, weights, bias, y, count, j);
}

/* sums[c] of row r of the window, over `count` rows of dy. Lanes past a row's end take no part: 0 times infinity is not 0. */
CAMOX_INLINE void depthwise_gradient_row(const int size, const float *lines, int64_t pitch, const float *dy, int64_t columns,
                                         int64_t count, vf32 *sums) {
  vf32 held[CAMOX_DEPTHWISE_LARGEST];
#pragma GCC unroll 11
  for (int c = 0; c < size; ++c) held[c] = sums[c];
  for (int64_t i = 0; i < count; ++i, lines += pitch, dy += columns) {
    int64_t j = 0;
    for (; j + LANES <= columns; j += LANES) {
      const vf32 d = vf32_load(dy + j);
#pragma GCC unroll 11
      for (int c = 0; c < size; ++c) held[c] = vf32_multiply_add(d, vf32_load(lines + j + c), held[c]);
    }
    if (j == columns) continue;
    const vf32 d = vf32_load_n(dy + j, columns - j);
#pragma GCC unroll 11
    for (int c = 0; c < size; ++c) held[c] = vf32_multiply_add(d, vf32_load_n(lines + j + c, columns - j), held[c]);
  }
#pragma GCC unroll 11
  for (int c = 0; c < size; ++c) sums[c] = held[c];
}

CAMOX_INLINE void depthwise_gradient_rows(const int size, const depthwise_band *band, const float *dy, int64_t count,
                                          vf32 *sums) {
  for (int r = 0; r < size; ++r)
    depthwise_gradient_row(size, band->lines + r * band->pitch, band->pitch, dy, band->p->y_columns, count, sums + r * size);
}

/* A body for each size of the window, which unrolls its loops over it. */
#define FOR_SIZE(size, call) \
  switch (size) {            \
    case 3: call(3); break;  \
    case 5: call(5); break;  \
    case 7: call(7); break;  \
    case 9: call(9); break;  \
    default: call(11);       \
  }

void CAMOX_PASTE3(camox_depthwise_kernel, f32, CAMOX_ISA)(const camox_depthwise_params *p, int64_t begin, int64_t end) {
  const depthwise_band band = depthwise_band_of(p);
  const int64_t taps = p->size * p->size;
  for (int64_t item = begin; item < end; ++item) {
    const int64_t channel = item % p->channels;
    float weights[CAMOX_DEPTHWISE_LARGEST * CAMOX_DEPTHWISE_LARGEST];
    for (int64_t k = 0; k < taps; ++k) weights[k] = FACTOR * p->weights[channel * taps + (p->turned ? taps - 1 - k : k)];
    const float *plane = p->x + item * p->rows * p->columns;
    const float bias = p->bias ? p->bias[channel] : 0;
    for (int64_t first = 0; first < p->y_rows; first += CAMOX_DEPTHWISE_BAND) {
      const int64_t count = camox_min_i64(CAMOX_DEPTHWISE_BAND, p->y_rows - first);
      depthwise_fill(&band, plane, first, count);
      float *y = p->y + (item * p->y_rows + first) * p->y_columns;
#define CALL(size) depthwise_rows(size, &band, weights, bias, y, count)
      FOR_SIZE(p->size, CALL)
#undef CALL
    }
  }
}

static double depthwise_total(const float *from, int64_t count) {
  vf32 sum = vf32_set1(0);
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) sum += vf32_load(from + i);
  if (i < count) sum += vf32_load_n(from + i, count - i);
  return vf32_sum(sum);
}

void CAMOX_PASTE3(camox_depthwise_gradient_kernel, f32, CAMOX_ISA)(const camox_depthwise_params *p, int64_t begin,
                                                                   int64_t end) {
  const depthwise_band band = depthwise_band_of(p);
  const int64_t taps = p->size * p->size, pixels = p->y_rows * p->y_columns;
  vf32 sums[CAMOX_DEPTHWISE_LARGEST * CAMOX_DEPTHWISE_LARGEST];
  for (int64_t channel = begin; channel < end; ++channel) {
    double totals[CAMOX_DEPTHWISE_LARGEST * CAMOX_DEPTHWISE_LARGEST] = {0}, of_bias = 0;
    for (int64_t image = 0; image < p->batch; ++image) {
      const float *plane = p->x + (image * p->channels + channel) * p->rows * p->columns;
      const float *dy = p->dy + (image * p->channels + channel) * pixels;
      for (int64_t k = 0; k < taps; ++k) sums[k] = vf32_set1(0);
      for (int64_t first = 0; first < p->y_rows; first += CAMOX_DEPTHWISE_BAND) {
        const int64_t count = camox_min_i64(CAMOX_DEPTHWISE_BAND, p->y_rows - first);
        depthwise_fill(&band, plane, first, count);
#define CALL(size) depthwise_gradient_rows(size, &band, dy + first * p->y_columns, count, sums)
        FOR_SIZE(p->size, CALL)
#undef CALL
      }
      for (int64_t k = 0; k < taps; ++k) totals[k] += vf32_sum(sums[k]);
      if (p->d_bias) of_bias += depthwise_total(dy, pixels);
    }
    for (int64_t k = 0; k < taps; ++k) p->d_weights[channel * taps + k] = FACTOR * (float)totals[k];
    if (p->d_bias) p->d_bias[channel] = (float)of_bias;
  }
}
