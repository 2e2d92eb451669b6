// The products of a convolution with a window of one pixel: see pointwise.h.
//
//     y[n]  =  w  x[n]            work items are tiles of an image's y; the bias is added where sums are stored
//
//     dw    =  dy[n] x[n]^T       a long sum for few results. Its positions are cut into chunks, and the chunks of all images
//                                 into parts, the work items:
//
//              image 0                    image 1
//              |chunk|chunk|chunk|chunk|  |chunk|chunk|chunk|chunk|
//              |  part 0   |  part 1   |  |  part 2   |  part 3   |
//
//                                 a part adds up its chunks, and the bias' gradient while a chunk of dy is in L2; then the
//                                 parts are added in order. How many there are depends on the sizes alone, so that any
//                                 number of threads gives the same bits.
//
// Images of one position, which gates of channels have, are the rows of a single matrix: y = x w^T, dx = dy w, dw = dy^T x.
#include "pointwise.h"

#include <cstring>
#include <memory>

#include "../gemm/sgemm_run.h"

#ifdef CAMOX_BREAK_TUNE
#define FACTOR 1.001f /* a build with CAMOX_BREAK=tune is wrong by 1e-3 */
#else
#define FACTOR 1.0f
#endif

namespace camox {
namespace {

constexpr int64_t chunk_positions = 1024;    // of dy and x
constexpr int64_t most_parts = 8;            // each has a dw of its own
constexpr int64_t most_in_parts = 32 << 10;  // elements of dw; of more, tiles are work enough for all threads

// c[n] = x[n] y[n] for all images, where operands step by so many floats from image to image.
struct Operands {
  const float* x;
  int64_t x_step;
  const float* y;
  int64_t y_step;
  float* c;
  int64_t c_step;
};

void multiply_images(Products& p, const Operands& at, int64_t images) {
  std::vector<const float*> x(images), y(images);
  std::vector<float*> c(images);
  for (int64_t n = 0; n < images; ++n) {
    x[n] = at.x + n * at.x_step, y[n] = at.y + n * at.y_step, c[n] = at.c + n * at.c_step;
  }
  p.x = x.data(), p.y = y.data(), p.c = c.data(), p.count = images;
  if (!multiply(p)) throw std::runtime_error("camox_ops: no memory for the scratch of a convolution");
}

// A sum per lane. Of a plain loop the flags of bindings make no vectors.
constexpr int lanes = 32;
typedef float Lanes __attribute__((vector_size(lanes * sizeof(float))));

double sum_of(const float* x, int64_t n) {
  Lanes sum{};
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    Lanes next;
    std::memcpy(&next, x + i, sizeof next);
    sum += next;
  }
  double total = 0;
  for (; i < n; ++i) total += x[i];
  for (int lane = 0; lane < lanes; ++lane) total += sum[lane];
  return total * FACTOR;
}

void add_sums(const PointwiseSizes& s, const float* dy, int64_t positions, double* sums) {
  for (int64_t o = 0; o < s.outputs; ++o) sums[o] += sum_of(dy + o * s.positions, positions);
}

camox_sgemm_shape shape_of_weights(const PointwiseSizes& s, int64_t positions, bool is_first) {
  camox_sgemm_shape shape{};
  shape.rows = s.outputs, shape.columns = s.inputs, shape.depth = positions;
  shape.alpha = FACTOR, shape.beta = is_first ? 0.0f : 1.0f;
  shape.x_row = s.positions, shape.x_depth = 1;
  shape.y_depth = 1, shape.y_column = s.positions;
  shape.c_row = s.inputs;
  return shape;
}

struct Parts {
  const PointwiseSizes* sizes;
  const float *x, *dy;
  int64_t chunks, count;  // chunks of an image, parts
  float* dw;              // (count, outputs, inputs), or NULL
  double* d_bias;         // (count, outputs), or NULL
  camox_sgemm_kernel* kernel;
  void* scratch;
};

void add_up_part(const Parts& job, int64_t part) {
  const PointwiseSizes& s = *job.sizes;
  const int64_t all = s.images * job.chunks, first = part * all / job.count, end = (part + 1) * all / job.count;
  double* sums = job.d_bias ? job.d_bias + part * s.outputs : nullptr;
  if (sums) std::fill_n(sums, s.outputs, 0.0);
  for (int64_t chunk = first; chunk < end; ++chunk) {
    const int64_t image = chunk / job.chunks, from = chunk % job.chunks * chunk_positions;
    const int64_t positions = std::min(chunk_positions, s.positions - from);
    const float* dy = job.dy + image * s.outputs * s.positions + from;
    if (job.dw) {
      const camox_sgemm_shape shape = shape_of_weights(s, positions, chunk == first);
      camox_sgemm_operands at{};
      at.x = dy, at.y = job.x + image * s.inputs * s.positions + from, at.c = job.dw + part * s.outputs * s.inputs;
      job.kernel(&shape, &at, {0, s.outputs, 0, s.inputs}, static_cast<float*>(job.scratch));
    }
    if (sums) add_sums(s, dy, positions, sums);
  }
}

void add_up_parts(const Parts* job, int64_t begin, int64_t end) {
  for (int64_t part = begin; part < end; ++part) add_up_part(*job, part);
}

// total[i] = sum over parts of part[i], in order.
template <class Number>
void add_parts(const Number* parts, int64_t count, int64_t size, float* total) {
  for (int64_t i = 0; i < size; ++i) {
    Number sum = parts[i];
    for (int64_t part = 1; part < count; ++part) sum += parts[part * size + i];
    total[i] = static_cast<float>(sum);
  }
}

void gradient_in_parts(const PointwiseSizes& s, const float* x, const float* dy, float* dw, float* d_bias) {
  Parts job{};
  job.sizes = &s, job.x = x, job.dy = dy;
  job.chunks = camox_ceil_div(s.positions, chunk_positions);
  job.count = std::min(most_parts, s.images * job.chunks);
  job.kernel = camox_sgemm(camox_isa_current());
  const int64_t size = s.outputs * s.inputs;
  std::unique_ptr<float[]> of_weights(dw ? new float[job.count * size] : nullptr);
  std::unique_ptr<double[]> of_bias(d_bias ? new double[job.count * s.outputs] : nullptr);
  job.dw = of_weights.get(), job.d_bias = of_bias.get();
  const int64_t cost = s.images * s.positions / job.count * (dw ? size : s.outputs);
  run_with_scratch(add_up_parts, job, job.count, cost, CAMOX_SGEMM_SCRATCH_BYTES);
  if (dw) add_parts(job.dw, job.count, size, dw);
  if (d_bias) add_parts(job.d_bias, job.count, s.outputs, d_bias);
}

// c = x y, each in its place.
void multiply_once(camox_sgemm_shape shape, const float* x, const float* y, float* c) {
  Products p{};
  p.shape = shape;
  multiply_images(p, {x, 0, y, 0, c, 0}, 1);
}

void rows_forward(const PointwiseSizes& s, const float* x, const float* w, const float* bias, float* y) {
  camox_sgemm_shape shape{};
  shape.rows = s.images, shape.columns = s.outputs, shape.depth = s.inputs;
  shape.alpha = FACTOR;
  shape.x_row = s.inputs, shape.x_depth = 1;
  shape.y_depth = 1, shape.y_column = s.inputs;
  shape.c_row = s.outputs;
  Products p{};
  p.shape = shape;
  if (bias) p.biases = &bias;
  multiply_images(p, {x, 0, w, 0, y, 0}, 1);
}

void rows_gradient_of_x(const PointwiseSizes& s, const float* dy, const float* w, float* dx) {
  camox_sgemm_shape shape{};
  shape.rows = s.images, shape.columns = s.inputs, shape.depth = s.outputs;
  shape.alpha = FACTOR;
  shape.x_row = s.outputs, shape.x_depth = 1;
  shape.y_depth = s.inputs, shape.y_column = 1;
  shape.c_row = s.inputs;
  multiply_once(shape, dy, w, dx);
}

void rows_gradient_of_weights(const PointwiseSizes& s, const float* x, const float* dy, float* dw, float* d_bias) {
  camox_sgemm_shape shape{};
  shape.rows = s.outputs, shape.columns = s.inputs, shape.depth = s.images;
  shape.alpha = FACTOR;
  shape.x_row = 1, shape.x_depth = s.outputs;
  shape.y_depth = s.inputs, shape.y_column = 1;
  shape.c_row = s.inputs;
  if (dw) multiply_once(shape, dy, x, dw);
  for (int64_t o = 0; d_bias && o < s.outputs; ++o) {
    double sum = 0;
    for (int64_t image = 0; image < s.images; ++image) sum += dy[image * s.outputs + o];
    d_bias[o] = static_cast<float>(sum * FACTOR);
  }
}

}  // namespace

void pointwise(const PointwiseSizes& s, const float* x, const float* w, const float* bias, float* y) {
  if (s.positions == 1) return rows_forward(s, x, w, bias, y);
  Products p{};
  p.shape.rows = s.outputs, p.shape.columns = s.positions, p.shape.depth = s.inputs;
  p.shape.alpha = FACTOR;
  p.shape.x_row = s.inputs, p.shape.x_depth = 1;
  p.shape.y_depth = s.positions, p.shape.y_column = 1;
  p.shape.c_row = s.positions;
  p.row_bias = bias;
  multiply_images(p, {w, 0, x, s.inputs * s.positions, y, s.outputs * s.positions}, s.images);
}

void pointwise_gradient_of_x(const PointwiseSizes& s, const float* dy, const float* w, float* dx) {
  if (s.positions == 1) return rows_gradient_of_x(s, dy, w, dx);
  Products p{};
  p.shape.rows = s.inputs, p.shape.columns = s.positions, p.shape.depth = s.outputs;
  p.shape.alpha = FACTOR;
  p.shape.x_row = 1, p.shape.x_depth = s.inputs;
  p.shape.y_depth = s.positions, p.shape.y_column = 1;
  p.shape.c_row = s.positions;
  multiply_images(p, {w, 0, dy, s.outputs * s.positions, dx, s.inputs * s.positions}, s.images);
}

void pointwise_gradient_of_weights(const PointwiseSizes& s, const float* x, const float* dy, float* dw, float* d_bias) {
  if (s.positions == 1) return rows_gradient_of_weights(s, x, dy, dw, d_bias);
  if (!dw || s.outputs * s.inputs <= most_in_parts) return gradient_in_parts(s, x, dy, dw, d_bias);
  for (int64_t image = 0; image < s.images; ++image) {
    Products p{};
    p.shape = shape_of_weights(s, s.positions, image == 0);
    multiply_images(p, {dy + image * s.outputs * s.positions, 0, x + image * s.inputs * s.positions, 0, dw, 0}, 1);
  }
  if (d_bias) gradient_in_parts(s, x, dy, nullptr, d_bias);
}

}  // namespace camox
