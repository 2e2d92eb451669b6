// Products of float32 matrices on PyTorch's threads: sgemm.h's tiles, divided among them.
#ifndef CAMOX_SGEMM_RUN_H
#define CAMOX_SGEMM_RUN_H

#include <algorithm>

#include "../common/integers.h"
#include "../common/torch_util.h"
#include "sgemm.h"

namespace camox {

// One product, or `count` products of one shape.
struct Products {
  camox_sgemm_shape shape;
  const float** x;
  const float** y;
  float** c;
  int64_t count;
  const float** biases;   // of each product, for sgemm.h; NULL: none
  float** y_sums;         // the same
  const float* row_bias;  // of all products; NULL: none
};

// c as a grid of tiles, at most `tiles` of them. A tile costs its products, and the packing of its rows of x and columns of
// y, whose every element takes about as long as `packing` multiply-adds.
struct ProductGrid {
  int64_t row_tiles, column_tiles, rows, columns;
};

inline ProductGrid grid_of(const camox_sgemm_shape& s, int64_t tiles) {
  constexpr int64_t packing = 8;
  ProductGrid best{};
  int64_t least_cost = INT64_MAX;
  for (int64_t across = 1; across <= tiles; ++across) {
    ProductGrid g{};
    g.columns = camox_round_up(camox_ceil_div(s.columns, across), CAMOX_SGEMM_COLUMNS);
    g.rows = camox_ceil_div(s.rows, tiles / across);
    g.column_tiles = camox_ceil_div(s.columns, g.columns);
    g.row_tiles = camox_ceil_div(s.rows, g.rows);
    const int64_t cost = g.rows * g.columns + packing * (g.rows + g.columns);
    if (cost < least_cost) least_cost = cost, best = g;
  }
  return best;
}

struct ProductJob {
  const Products* products;
  ProductGrid grid;
  int64_t items, lanes;
  camox_sgemm_kernel* kernel;
  char* scratch;
};

// Lanes [begin, end): each has its own scratch and an equal share of the items.
inline void run_lanes(int64_t begin, int64_t end, void* context) {
  const ProductJob& job = *static_cast<const ProductJob*>(context);
  const Products& p = *job.products;
  const ProductGrid& g = job.grid;
  for (int64_t lane = begin; lane < end; ++lane) {
    float* scratch = reinterpret_cast<float*>(job.scratch + lane * CAMOX_SGEMM_SCRATCH_BYTES);
    for (int64_t item = lane * job.items / job.lanes; item < (lane + 1) * job.items / job.lanes; ++item) {
      const int64_t tile = item % (g.row_tiles * g.column_tiles), matrix = item / (g.row_tiles * g.column_tiles);
      camox_sgemm_tile t{};
      t.row = tile / g.column_tiles * g.rows, t.column = tile % g.column_tiles * g.columns;
      t.rows = std::min(g.rows, p.shape.rows - t.row), t.columns = std::min(g.columns, p.shape.columns - t.column);
      camox_sgemm_operands at{};
      at.x = p.x[matrix], at.y = p.y[matrix], at.c = p.c[matrix], at.row_bias = p.row_bias;
      if (p.biases) at.bias = p.biases[matrix];
      if (p.y_sums) at.y_sums = p.y_sums[matrix];
      job.kernel(&p.shape, &at, t, scratch);
    }
  }
}

// Whether the products were computed; nothing was written otherwise. Sizes are positive, alpha is not 0. Throws nothing: BLAS
// has no way to.
inline bool multiply(const Products& p) {
  constexpr int64_t thread_product = 1 << 18;  // multiply-adds that are worth a thread
  uint32_t threads = 1;
  if (torch_get_num_threads(&threads) != AOTI_TORCH_SUCCESS) return false;
  const int64_t product = p.shape.rows * p.shape.columns * p.shape.depth;
  const int64_t lanes = std::clamp<int64_t>(p.count * product / thread_product, 1, threads);
  ProductJob job{};
  job.products = &p;
  job.grid = grid_of(p.shape, camox_ceil_div(lanes, p.count));
  job.items = p.count * job.grid.row_tiles * job.grid.column_tiles;
  job.lanes = std::min(lanes, job.items);
  job.kernel = camox_sgemm(camox_isa_current());
  try {
    job.scratch = static_cast<char*>(thread_scratch(job.lanes * CAMOX_SGEMM_SCRATCH_BYTES));
  } catch (const std::runtime_error&) {
    return false;
  }
  if (job.lanes == 1) {
    run_lanes(0, 1, &job);
    return true;
  }
  return torch_parallel_for(0, job.lanes, 1, run_lanes, &job) == AOTI_TORCH_SUCCESS;
}

}  // namespace camox
#endif
