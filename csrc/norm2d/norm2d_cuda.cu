/* layer_norm2d on CUDA. A block takes a tile of pixels with all channels of a group and keeps it in registers from the first
   access to the last, so each tensor is read once.

     planes (contiguous)                            lines (channels_last)
       `inner` threads along the pixels               `inner` threads along the channels
       +------+------+------+                         +------+------+------+
       | V px | V px | V px |  channel c              | V ch | V ch | V ch |  pixel i
       |      |      |      |  channel c + outer      |      |      |      |  pixel i + outer      `rows` rows a thread
       +------+------+------+                         +------+------+------+

     registers: x, in the backward z and d     shared: partial sums [threads][tile] -> totals [sums][tile], a barrier each;
                                               planes in the forward: partial sums [warps][tile], which every thread adds
     pass 0: mean -> pass 1: variance of x - mean -> pass 2: normalise, activate, add, store

   Of channels_last this is the backward, and the forward where a group has more channels than a warp has room for; otherwise a
   team of lanes has the channels of a pixel (norm2d_team_kernel).

   In the backward of halves, of planes whose channels are all in registers, the next tile is on its way to shared memory
   meanwhile (staged tiles, below).

   V is the widest access that all tensors allow: 16 bytes, 8 bytes, or one element (planes with V = 1 take any strides).
   Groups of more channels than a block holds are iterated in chunks, which later passes load again (from the caches).
   A block of the backward iterates over several tiles and keeps its share of grad_weight and grad_bias; a second kernel adds
   the shares in order. No atomics: the same bits on every run. */
#include "../common/gelu.cuh"
#include "../common/row_sums.cuh"
#include "../common/weights.cuh"
#include "norm2d.h"

#include <float.h>

#define NORM2D_THREADS 256        /* most of a block, */
#define NORM2D_FLOAT_THREADS 384  /* and in the forward of float32 with all channels in registers, */
#define NORM2D_BLOCKS 2           /* of which a multiprocessor must hold so many: at most 128 and 80 registers a thread */
#define NORM2D_TARGET_THREADS 192 /* taken while accesses stay long: the loads of one block hide behind others' sums */
#define NORM2D_FILL 512           /* blocks that fill a large GPU: below it tiles become smaller */
#define NORM2D_LEAST_LANES 8      /* vectors side by side in planes: 128 bytes of 16-byte vectors, */
#define NORM2D_FEWEST_LANES 2     /* or 32, where there are many channels; 8 of single elements, in few tiles */
#define NORM2D_FEW_SHARES 256     /* shares of grad_weight and grad_bias: more than this many only of */
#define NORM2D_SHARE_PIXELS 64    /* at least so many pixels, */
#define NORM2D_MOST_SHARES 2048   /* and at most so many: 16 loads of each thread that adds them up */

struct norm2d; /* tells the budget whose kernel of row_sums.cuh it is */

struct norm2d_plan {
  camox_norm2d_params p; /* where all tensors allow it as images of one row, see norm2d_flat */
  float eps, inverse;    /* 1 / group_channels */
  int64_t pixels, group_channels;
  int64_t recorded;            /* pixels of an image whose statistics the forward writes: all or none */
  int inner, outer;            /* threads of a block along the vectors of a row, and rows' worth of threads */
  int chunks;                  /* parts of the channels of a group */
  int tile;                    /* pixels of a block, */
  int64_t tiles, tile_count;   /* tiles in an image, in all images */
  int64_t shares, share_tiles; /* blocks of a group, and the tiles of each */
  int64_t items;               /* blocks of all groups */
  int staged;                  /* where staged tiles begin, in floats of shared memory */
  int scratch;                 /* floats of shared memory for the partial sums of one kind: pixel i's t-th of `terms` is at */
  int terms, pixel_step, term_step; /* i * pixel_step + t * term_step */
  int sum_shift;                    /* 1 << sum_shift threads add the sums of one pixel; of teams: have its channels */
};

/* A thread's elements [rows][V] as pixels and channels. LAST: of lines. */
template <int LANES, bool LINES, int ROWS>
struct norm2d_shape {
  static constexpr int V = LANES, rows = ROWS, pixels = LINES ? ROWS : LANES, channels = LINES ? LANES : ROWS;
  static constexpr bool LAST = LINES;
};

/* A thread's rows. Where all channels of a group are in registers, more of halves: with 4 rows a third of the instructions is
   addresses and sums over threads, which are made once. */
template <typename T, int V, bool WHOLE>
static constexpr int norm2d_rows_each = V == 1 || (WHOLE && sizeof(T) == 2) ? 8 : 4;

/* Which of the thread's pixels, or channels, element v of row k belongs to. */
template <bool LAST>
__device__ __forceinline__ constexpr int norm2d_pixel(int k, int v) {
  return LAST ? k : v;
}
template <bool LAST>
__device__ __forceinline__ constexpr int norm2d_channel(int k, int v) {
  return LAST ? v : k;
}

/* ---- activations ---- */

/* silu and gelu_tanh are u sigmoid(t(u)), t(u) = linear u + cubic u^3. */
struct norm2d_sigmoid {
  float linear, cubic;
};

__device__ __forceinline__ norm2d_sigmoid norm2d_sigmoid_of(camox_activation activation) {
  norm2d_sigmoid s = {1.0f, 0.0f};
  int kind = activation; /* compared here: with its callers' comparisons nvcc would make an indirect branch */
  camox_compute_late(kind);
  if (kind == CAMOX_ACT_GELU_TANH) s.linear = 1.5957691216f, s.cubic = 1.5957691216f * 0.044715f;
  return s;
}

#define NORM2D_LOG2E 1.4426950409f

/* The exact GELU with the polynomial for results of type T. */
template <typename T, int N>
__device__ __forceinline__ void norm2d_gelu(float (&u)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float a = fabsf(u[i]);
    u[i] = fmaf(-a, camox_exp2(camox_log2_tail<T>(a)), fmaxf(u[i], 0.0f)); /* of a NaN the first term stays */
  }
}

/* is_result: no residual is added to it. Where one is, the first digits of the activation may cancel, and bfloat16 takes
   float16's polynomial. */
template <typename T, int V>
__device__ __forceinline__ void norm2d_activate(float (&u)[V], camox_activation activation, bool is_result) {
  if (activation == CAMOX_ACT_GELU) {
    if constexpr (!camox_is_bfloat16<T>::value)
      norm2d_gelu<float>(u);
    else if (is_result)
      norm2d_gelu<T>(u);
    else
      norm2d_gelu<__half>(u);
  } else if (activation == CAMOX_ACT_RELU) {
#pragma unroll
    for (int i = 0; i < V; ++i) u[i] = u[i] < 0.0f ? 0.0f : u[i];
  } else if (activation != CAMOX_ACT_NONE) {
    const norm2d_sigmoid s = norm2d_sigmoid_of(activation);
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const float t = u[i] * fmaf(s.cubic, u[i] * u[i], s.linear);
      u[i] *= camox_reciprocal(1.0f + camox_exp2(-NORM2D_LOG2E * t));
    }
  }
}

/* grad *= act'(u) */
template <int V>
__device__ __forceinline__ void norm2d_activation_backward(float (&grad)[V], const float (&u)[V], camox_activation activation) {
  if (activation == CAMOX_ACT_GELU) {
#pragma unroll
    for (int i = 0; i < V; ++i) grad[i] = camox_gelu_grad<true>(grad[i], u[i]);
  } else if (activation == CAMOX_ACT_RELU) {
#pragma unroll
    for (int i = 0; i < V; ++i) grad[i] = u[i] <= 0.0f ? 0.0f : grad[i];
  } else if (activation != CAMOX_ACT_NONE) {
    const norm2d_sigmoid s = norm2d_sigmoid_of(activation);
    /* past the limit the part that decays is below every rounding, and exp stays finite */
    const float limit = activation == CAMOX_ACT_SILU ? 80.0f : 10.0f;
#pragma unroll
    for (int i = 0; i < V; ++i) {
      float clamped = u[i] > limit ? limit : u[i];
      clamped = clamped < -limit ? -limit : clamped;
      const float square = clamped * clamped, t = clamped * fmaf(s.cubic, square, s.linear);
      const float e = camox_exp2(-NORM2D_LOG2E * t), sigmoid = camox_reciprocal(1.0f + e);
      const float t_derivative = fmaf(3.0f * s.cubic, square, s.linear);
      grad[i] *= fmaf(clamped * t_derivative, sigmoid * (e * sigmoid), sigmoid);
    }
  }
}

/* ---- where a thread is ---- */

struct norm2d_thread {
  int inner, outer; /* inner == plan.inner: one of the last threads of a block, which have no elements */
};

__device__ __forceinline__ norm2d_thread norm2d_thread_of(const norm2d_plan &plan) {
  const int thread = static_cast<int>(threadIdx.x), outer = thread / plan.inner;
  if (outer >= plan.outer) return {plan.inner, 0};
  return {thread - outer * plan.inner, outer};
}

/* Pixels [first, first + plan.tile) of image `batch`, channels of `group`. */
struct norm2d_tile {
  int64_t batch, group, first;
};

__device__ __forceinline__ norm2d_tile norm2d_tile_at(const norm2d_plan &plan, int64_t index, int64_t group) {
  norm2d_tile tile = {0, group, 0};
  int64_t within = index;
  if (plan.p.batch > 1) tile.batch = camox_divide(index, plan.tiles, &within);
  tile.first = within * plan.tile;
  return tile;
}

/* The tile of a block of the forward. */
__device__ __forceinline__ norm2d_tile norm2d_tile_of(const norm2d_plan &plan, int64_t item) {
  int64_t index = item, group = 0;
  if (plan.p.groups > 1) index = camox_divide(item, plan.p.groups, &group);
  return norm2d_tile_at(plan, index, group);
}

__device__ __forceinline__ void norm2d_next_tile(norm2d_tile *tile, const norm2d_plan &plan) {
  tile->first += plan.tile;
  if (tile->first >= plan.pixels) tile->first = 0, ++tile->batch;
}

/* The thread's first element in a tile, and which of its rows exist, as bits. */
struct norm2d_part {
  unsigned rows;
  int64_t channel, y, x; /* the channel counts from the group's first */
};

__device__ __forceinline__ int norm2d_at_most(int64_t n, int most) { return n < most ? static_cast<int>(n) : most; }

template <typename shape>
__device__ __forceinline__ norm2d_part norm2d_part_at(const norm2d_plan &plan, const norm2d_tile &tile, const norm2d_thread &me,
                                                      int chunk) {
  constexpr int V = shape::V;
  constexpr bool LAST = shape::LAST;
  const int chunk_channels = LAST ? plan.inner * V : plan.outer * shape::rows;
  const int64_t channel = static_cast<int64_t>(chunk) * chunk_channels;
  const int pixels = norm2d_at_most(plan.pixels - tile.first, plan.tile);
  const int channels = norm2d_at_most(plan.group_channels - channel, chunk_channels);
  const int inner = me.inner * V;
  norm2d_part part = {0, channel + (LAST ? inner : me.outer), 0, tile.first + (LAST ? me.outer : inner)};
  if (V == 1 && !LAST && plan.p.height > 1) part.y = camox_divide(part.x, plan.p.width, &part.x);
  const int outer_end = inner < (LAST ? channels : pixels) ? LAST ? pixels : channels : 0;
#pragma unroll
  for (int k = 0; k < shape::rows; ++k)
    if (me.outer + k * plan.outer < outer_end) part.rows |= 1u << k;
  return part;
}

/* Row k of a thread's elements is at first + k * step. Iterated step by step: all rows' distances together would take registers
   that the elements need. */
template <typename T>
struct norm2d_rows {
  T *first;
  int64_t step;
};

/* The vectors' own dimension has stride 1 (norm2d_fits). */
template <typename T, typename shape>
__device__ __forceinline__ norm2d_rows<T> norm2d_rows_of(const norm2d_plan &plan, const camox_view4 &view,
                                                         const norm2d_tile &tile, const norm2d_part &part, int64_t channel) {
  int64_t place = tile.batch * view.stride[0];
  channel += tile.group * plan.group_channels;
  if constexpr (shape::LAST)
    place += channel + part.x * view.stride[3];
  else if constexpr (shape::V > 1)
    place += channel * view.stride[1] + part.x;
  else
    place += channel * view.stride[1] + part.y * view.stride[2] + part.x * view.stride[3];
  return {static_cast<T *>(view.data) + place, plan.outer * view.stride[shape::LAST ? 3 : 1]};
}

/* Rows that do not exist become zeros. */
template <typename T, int V, int ROWS>
__device__ __forceinline__ void norm2d_load(T (&to)[ROWS][V], norm2d_rows<const T> from, unsigned rows) {
#pragma unroll
  for (int k = 0; k < ROWS; ++k, from.first += from.step) {
#pragma unroll
    for (int i = 0; i < V; ++i) to[k][i] = camox_from_float<T>(0.0f);
    if (rows >> k & 1) camox_load<V>(to[k], from.first);
  }
}

/* The group's first channel at the thread's pixels: a value that differs from the mean by at most std sqrt(channels - 1), so
   that differences to it keep their digits whatever the mean. */
template <typename T, typename shape>
__device__ __forceinline__ void norm2d_load_origin(T (&to)[shape::pixels], const norm2d_plan &plan, const norm2d_tile &tile,
                                                   const norm2d_part &part) {
  norm2d_rows<const T> from = norm2d_rows_of<const T, shape>(plan, plan.p.x, tile, part, 0);
#pragma unroll
  for (int i = 0; i < shape::pixels; ++i) to[i] = camox_from_float<T>(0.0f);
  if constexpr (shape::LAST) {
#pragma unroll
    for (int k = 0; k < shape::pixels; ++k, from.first += from.step)
      if (part.rows >> k & 1) to[k] = __ldg(from.first);
  } else if (part.rows) {
    camox_load(to, from.first);
  }
}

/* ---- staged tiles ---- */

/* In the backward of planes of halves whose channels are all in registers a block copies its next tile to shared memory while
   it computes one, so that memory does not wait for sums: 57 us instead of 62 at (32,80,88,88) on an H200. In the forward, and
   in float32, it made no difference. Each thread copies the vectors that it reads itself, so that no barrier is needed, into
   the places of those that it has just read:

     16 bytes of each thread    origin | x, row 0 | grad, row 0 | x, row 1 | ...

   Without cp.async (sm_75) nothing is staged. */
template <typename T, int V, bool LAST, bool WHOLE>
static constexpr bool norm2d_stages = WHOLE && !LAST && sizeof(T) == 2 && V == 8;

/* What a thread copies of a tile. */
template <typename T>
struct norm2d_copy {
  const T *origin;
  norm2d_rows<const T> x, grad;
  unsigned rows;
};

template <typename T, typename shape>
__device__ __forceinline__ norm2d_copy<T> norm2d_copy_of(const norm2d_plan &plan, const norm2d_tile &tile, norm2d_thread me) {
  camox_compute_late(me.inner);
  camox_compute_late(me.outer);
  const norm2d_part part = norm2d_part_at<shape>(plan, tile, me, 0);
  norm2d_copy<T> copy = {norm2d_rows_of<const T, shape>(plan, plan.p.x, tile, part, 0).first, {}, {}, part.rows};
  copy.x = norm2d_rows_of<const T, shape>(plan, plan.p.x, tile, part, part.channel);
  copy.grad = norm2d_rows_of<const T, shape>(plan, plan.p.grad, tile, part, part.channel);
  return copy;
}

template <typename T>
__device__ __forceinline__ T *norm2d_staged(float *stage, int vector) {
  const int place = vector * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x);
  return reinterpret_cast<T *>(stage) + place * camox_lanes<T>::value;
}

template <typename T>
__device__ __forceinline__ void norm2d_copy_origin(float *stage, const norm2d_copy<T> &copy) {
  if (copy.rows) camox_cp_async_16(norm2d_staged<T>(stage, 0), copy.origin, 16);
}

/* Rows are copied in order. */
template <typename T>
__device__ __forceinline__ void norm2d_copy_row(float *stage, norm2d_copy<T> *copy, int k) {
  if (copy->rows >> k & 1) {
    camox_cp_async_16(norm2d_staged<T>(stage, 1 + 2 * k), copy->x.first, 16);
    camox_cp_async_16(norm2d_staged<T>(stage, 2 + 2 * k), copy->grad.first, 16);
  }
  copy->x.first += copy->x.step;
  copy->grad.first += copy->grad.step;
}

template <typename T, typename shape>
__device__ __forceinline__ void norm2d_copy_tile(float *stage, norm2d_copy<T> copy) {
  norm2d_copy_origin(stage, copy);
#pragma unroll
  for (int k = 0; k < shape::rows; ++k) norm2d_copy_row(stage, &copy, k);
  camox_cp_async_commit();
}

/* Zeros of rows that do not exist. */
template <typename T, int V>
__device__ __forceinline__ void norm2d_load_staged(T (&to)[V], float *stage, int vector, bool exists) {
#pragma unroll
  for (int i = 0; i < V; ++i) to[i] = camox_from_float<T>(0.0f);
  if (exists) camox_load_shared<V>(to, norm2d_staged<T>(stage, vector));
}

/* weight or bias of the thread's channels. */
template <typename Weight, typename shape>
__device__ __forceinline__ void norm2d_load_weights(float (&to)[shape::channels], const camox_norm2d_affine &affine,
                                                    const norm2d_plan &plan, const norm2d_tile &tile, const norm2d_part &part) {
  const Weight *from = static_cast<const Weight *>(affine.data) + tile.group * plan.group_channels + part.channel;
  if constexpr (shape::LAST) {
#pragma unroll
    for (int i = 0; i < shape::V; ++i) to[i] = 0.0f;
    if (part.rows) camox_load_weights(to, from);
  } else {
#pragma unroll
    for (int k = 0; k < shape::rows; ++k, from += plan.outer) to[k] = part.rows >> k & 1 ? camox_to_float(__ldg(from)) : 0.0f;
  }
}

/* One branch for all channels: a conversion in a branch waits for its load. */
template <typename T, typename shape>
__device__ __forceinline__ void norm2d_load_affine(float (&to)[shape::channels], const camox_norm2d_affine &affine,
                                                   const norm2d_plan &plan, const norm2d_tile &tile, const norm2d_part &part) {
  if constexpr (sizeof(T) == 2)
    if (plan.p.half_weights) return norm2d_load_weights<T, shape>(to, affine, plan, tile, part);
  norm2d_load_weights<float, shape>(to, affine, plan, tile, part);
}

/* ---- sums over the channels of a group ---- */

/* Shared memory: totals [N][tile], then partial sums [N][scratch]. */
__device__ __forceinline__ int norm2d_totals_size(int count, int tile) { return (count * tile + 3) / 4 * 4; }

/* N sums at each of the tile's pixels: partial sums of all threads in, for each pixel and sum one thread calls
   finish(total, which, pixel, sum), and every thread gets the totals of its pixels. `total` is what the last call left there.
 */
template <int N, typename shape, typename Finish>
__device__ __forceinline__ void norm2d_sum_channels(const float (&sums)[N][shape::pixels], const norm2d_plan &plan,
                                                    const norm2d_thread &me, float *totals, const Finish &finish) {
  constexpr int V = shape::V;
  constexpr bool LAST = shape::LAST;
  constexpr int pixels = shape::pixels, piece = pixels < 4 ? pixels : 4;
  float *const scratch = totals + norm2d_totals_size(N, plan.tile);
#pragma unroll
  for (int which = 0; which < N; ++which) {
    float *const to = scratch + which * plan.scratch;
    if constexpr (LAST) {
#pragma unroll
      for (int k = 0; k < pixels; ++k)
        if (me.inner < plan.inner) to[(k * plan.outer + me.outer) * plan.pixel_step + me.inner] = sums[which][k];
    } else {
#pragma unroll
      for (int i = 0; i < V; i += piece) {
        float part[piece];
#pragma unroll
        for (int j = 0; j < piece; ++j) part[j] = sums[which][i + j];
        camox_store_shared<piece>(to + me.outer * plan.tile + me.inner * V + i, part);
      }
    }
  }
  __syncthreads();
  const int lanes = 1 << plan.sum_shift, tasks = N * plan.tile * lanes, threads = static_cast<int>(blockDim.x);
  /* whole warps iterate alike: they shuffle */
  for (int i = static_cast<int>(threadIdx.x); i - i % CAMOX_WARP < tasks; i += threads) {
    const int task = i >> plan.sum_shift, lane = i & (lanes - 1);
    const int which = N > 1 && task >= plan.tile ? 1 : 0, pixel = task - which * plan.tile;
    float sum = 0.0f;
    if (i < tasks) {
      const float *from = scratch + which * plan.scratch + pixel * plan.pixel_step;
#pragma unroll 4
      for (int term = lane; term < plan.terms; term += lanes) sum += from[term * plan.term_step];
    }
    sum = camox_team_sum(sum, lanes);
    if (i < tasks && lane == 0) finish(totals[task], which, pixel, sum);
  }
  __syncthreads();
}

/* The totals of the thread's pixels. */
template <int N, typename shape>
__device__ __forceinline__ void norm2d_load_totals(float (&sums)[N][shape::pixels], const norm2d_plan &plan,
                                                   const norm2d_thread &me, const float *totals) {
  constexpr int V = shape::V;
  constexpr bool LAST = shape::LAST;
  constexpr int pixels = shape::pixels, piece = pixels < 4 ? pixels : 4;
#pragma unroll
  for (int which = 0; which < N; ++which) {
    const float *from = totals + which * plan.tile;
    if constexpr (LAST) {
#pragma unroll
      for (int k = 0; k < pixels; ++k) sums[which][k] = from[k * plan.outer + me.outer];
    } else {
#pragma unroll
      for (int i = 0; i < V; i += piece) {
        float part[piece];
        camox_load_shared<piece>(part, from + me.inner * V + i);
#pragma unroll
        for (int j = 0; j < piece; ++j) sums[which][i + j] = part[j];
      }
    }
  }
}

/* The same in planes, with one barrier: the slices of channels that a warp has are added by shuffles, one row for each warp
   goes to `shared`, [warps][tile], and every thread adds those of its pixels. The caller writes there again only after another
   barrier. */
template <int V>
__device__ __forceinline__ void norm2d_sum_planes(float (&sums)[V], const norm2d_plan &plan, const norm2d_thread &me,
                                                  float *shared) {
  for (int other = plan.inner; other < CAMOX_WARP; other *= 2)
#pragma unroll
    for (int i = 0; i < V; ++i) sums[i] += __shfl_xor_sync(CAMOX_FULL_MASK, sums[i], other);
  int thread = static_cast<int>(threadIdx.x), warps = static_cast<int>(blockDim.x) / CAMOX_WARP;
  camox_compute_late(thread);
  camox_compute_late(warps);
  float *row = shared + thread / CAMOX_WARP * plan.tile + me.inner * V;
  if (thread % CAMOX_WARP < plan.inner) camox_put_floats(row, sums);
  __syncthreads();
  row = shared + me.inner * V;
  camox_get_floats(sums, row);
#pragma unroll 2
  for (int warp = 1; warp < warps; ++warp) {
    float part[V];
    row += plan.tile;
    camox_get_floats(part, row);
#pragma unroll
    for (int i = 0; i < V; ++i) sums[i] += part[i];
  }
}

/* Where the mean of a tile's first pixel is in stats; 1/sqrt(var + eps) lies plan.p.batch * groups * pixels further. */
__device__ __forceinline__ int64_t norm2d_stats_index(const norm2d_plan &plan, const norm2d_tile &tile) {
  return (tile.batch * plan.p.groups + tile.group) * plan.pixels + tile.first;
}

/* ---- forward ---- */

/* What total_of makes of a sum at each of the thread's pixels. */
template <typename shape, typename TotalOf>
__device__ __forceinline__ void norm2d_total(float (&sums)[1][shape::pixels], const norm2d_plan &plan, const norm2d_thread &me,
                                             float *shared, const TotalOf &total_of) {
  if constexpr (shape::LAST) {
    norm2d_sum_channels<1, shape>(sums, plan, me, shared, [&](float &total, int, int, float sum) { total = total_of(sum); });
    norm2d_load_totals<1, shape>(sums, plan, me, shared);
  } else {
    norm2d_sum_planes(sums[0], plan, me, shared);
#pragma unroll
    for (int i = 0; i < shape::pixels; ++i) sums[0][i] = total_of(sums[0][i]);
  }
}

template <typename T, bool WHOLE>
struct norm2d_most {
  static constexpr int threads = WHOLE && sizeof(T) == 4 ? NORM2D_FLOAT_THREADS : NORM2D_THREADS;
};

/* Blocks that a multiprocessor must hold. */
template <typename T, int V, bool LAST>
static constexpr int norm2d_blocks = sizeof(T) == 2 && V == 4 && !LAST ? 3 : NORM2D_BLOCKS;

/* WHOLE, of planes: all channels of a group are one chunk, and each pass has code of its own, a third less than where a loop's
   turns branch to them. */
template <typename T, int V, bool LAST, bool WHOLE>
__global__ void __launch_bounds__(norm2d_most<T, WHOLE>::threads, norm2d_blocks<T, V, LAST>)
    norm2d_kernel(const __grid_constant__ norm2d_plan plan) {
  typedef norm2d_shape<V, LAST, norm2d_rows_each<T, V, WHOLE>> shape;
  CAMOX_DYNAMIC_SHARED(float, totals);
  const camox_norm2d_params &p = plan.p;
  norm2d_thread me = norm2d_thread_of(plan);
  for (int64_t item = blockIdx.x; item < plan.items; item += gridDim.x) {
    const norm2d_tile tile = norm2d_tile_of(plan, item);
    camox_compute_late(me.inner);
    camox_compute_late(me.outer);

    T origin[shape::pixels];
    float d[shape::rows][V]; /* x less its origin, from pass 1 on less the mean of that */
    float mean[1][shape::pixels], scale[1][shape::pixels];
    const norm2d_part first = norm2d_part_at<shape>(plan, tile, me, 0);
    norm2d_load_origin<T, shape>(origin, plan, tile, first);
#pragma unroll
    for (int i = 0; i < shape::pixels; ++i) mean[0][i] = scale[0][i] = 0.0f;
    const int chunks = WHOLE ? 1 : plan.chunks;
#pragma unroll(WHOLE ? 3 : 1)
    for (int pass = 0; pass < 3; ++pass) {
#pragma unroll 1
      for (int chunk = 0; chunk < chunks; ++chunk) {
        const norm2d_part part = WHOLE ? first : norm2d_part_at<shape>(plan, tile, me, chunk);
        const bool is_read = pass == 0 || chunks > 1;
        if (is_read) {
          T x[shape::rows][V];
          float origin_values[shape::pixels];
          norm2d_load(x, norm2d_rows_of<const T, shape>(plan, p.x, tile, part, part.channel), part.rows);
          camox_to_floats(origin_values, origin);
#pragma unroll
          for (int k = 0; k < shape::rows; ++k) {
            float values[V];
            camox_to_floats(values, x[k]);
#pragma unroll
            for (int i = 0; i < V; ++i) d[k][i] = values[i] - origin_values[norm2d_pixel<LAST>(k, i)];
          }
        }
        if (pass == 1 || (pass == 2 && is_read)) {
#pragma unroll
          for (int k = 0; k < shape::rows; ++k)
#pragma unroll
            for (int i = 0; i < V; ++i) d[k][i] -= mean[0][norm2d_pixel<LAST>(k, i)];
        }
        if (pass < 2) {
#pragma unroll
          for (int k = 0; k < shape::rows; ++k) {
            if (!(part.rows >> k & 1)) continue;
#pragma unroll
            for (int i = 0; i < V; ++i) {
              const int pixel = norm2d_pixel<LAST>(k, i);
              if (pass == 0)
                mean[0][pixel] += d[k][i];
              else
                scale[0][pixel] = fmaf(d[k][i], d[k][i], scale[0][pixel]);
            }
          }
          continue;
        }
        float weight[shape::channels], bias[shape::channels];
        norm2d_load_affine<T, shape>(weight, p.weight, plan, tile, part);
        norm2d_load_affine<T, shape>(bias, p.bias, plan, tile, part);
        constexpr int together = WHOLE ? shape::rows : 1; /* rows that are activated together, with one branch to it */
#pragma unroll
        for (int first_row = 0; first_row < shape::rows; first_row += together) {
          float y[together * V];
#pragma unroll
          for (int i = 0; i < together * V; ++i) {
            const int k = first_row + i / V, v = i % V, channel = norm2d_channel<LAST>(k, v);
            y[i] = fmaf(d[k][v] * scale[0][norm2d_pixel<LAST>(k, v)], weight[channel], bias[channel]);
          }
          norm2d_activate<T>(y, p.activation, p.residual.data == nullptr);
          if (p.residual.data) {
            T residual[together][V];
            norm2d_rows<const T> from = norm2d_rows_of<const T, shape>(plan, p.residual, tile, part, part.channel);
            from.first += first_row * from.step;
            norm2d_load(residual, from, part.rows >> first_row);
#pragma unroll
            for (int i = 0; i < together * V; ++i) y[i] += camox_to_float(residual[i / V][i % V]);
          }
#ifdef CAMOX_BREAK_NORM2D
          y[0] += 1e-3f;
#endif
          norm2d_rows<T> out = norm2d_rows_of<T, shape>(plan, p.y, tile, part, part.channel);
          out.first += first_row * out.step;
#pragma unroll
          for (int k = 0; k < together; ++k, out.first += out.step) {
            float row[V];
#pragma unroll
            for (int i = 0; i < V; ++i) row[i] = y[k * V + i];
            if (part.rows >> (first_row + k) & 1) camox_store_float(out.first, row);
          }
        }
      }
      if (pass == 0) norm2d_total<shape>(mean, plan, me, totals, [&](float sum) { return sum * plan.inverse; });
      if (pass != 1) continue;
      norm2d_total<shape>(scale, plan, me, LAST ? totals : totals + plan.scratch,
                          [&](float sum) { return camox_rsqrt(sum * plan.inverse + plan.eps); });
      if ((LAST ? me.inner : me.outer) != 0) continue;
      float *const stats = static_cast<float *>(p.stats) + norm2d_stats_index(plan, tile);
      float *const stats_scale = stats + p.batch * p.groups * plan.pixels;
#pragma unroll
      for (int i = 0; i < shape::pixels; ++i) {
        const int pixel = LAST ? i * plan.outer + me.outer : me.inner * V + i;
        if (tile.first + pixel < plan.recorded) stats[pixel] = mean[0][i], stats_scale[pixel] = scale[0][i];
      }
    }
  }
}

/* ---- forward of channels_last: a team of lanes for each pixel ---- */

/* Channels of a group that a team of a whole warp has room for are summed by shuffles: no barrier, no shared memory.

     a warp, teams of 4 lanes:   lane    0  1  2  3   4  5  6  7  ...
                                       +--+--+--+--+--+--+--+--+
                  vector 0 of a lane   |V |V |V |V |V |V |V |V |
                  vector 1             |V |V |V |V |V |V |V |V |     V channels to a vector; not all lanes have a last
                  vector 2             |V |V |  |  |V |V |  |  |
                                       +--+--+--+--+--+--+--+--+
                                         pixel i     pixel i+1     of the block's tile

   A block's tile is as many pixels as it has teams. */
#define NORM2D_TEAM_THREADS 128
#define NORM2D_TEAM_FILL (1 << 15) /* threads that fill a large GPU: below it teams become larger */
#define NORM2D_TEAM_BLOCKS 4       /* of which a multiprocessor must hold so many: at most 128 registers a thread */

/* Vectors of a lane, at most. */
template <typename T>
static constexpr int norm2d_team_vectors = sizeof(T) == 2 ? 5 : 8;

/* The place of a pixel's channel; pixels are one row (norm2d_fits). */
template <typename T>
__device__ __forceinline__ T *norm2d_place(const camox_view4 &view, int64_t batch, int64_t pixel, int64_t channel) {
  return static_cast<T *>(view.data) + batch * view.stride[0] + pixel * view.stride[3] + channel;
}

template <typename T, int V>
__global__ void __launch_bounds__(NORM2D_TEAM_THREADS, NORM2D_TEAM_BLOCKS)
    norm2d_team_kernel(const __grid_constant__ norm2d_plan plan) {
  constexpr int vectors = norm2d_team_vectors<T>;
  const camox_norm2d_params &p = plan.p;
  const int team = 1 << plan.sum_shift, thread = static_cast<int>(threadIdx.x);
  const int lane = thread & (team - 1), slot = thread >> plan.sum_shift;
  const int step = team * V; /* channels from one vector of a lane to the next */
  for (int64_t item = blockIdx.x; item < plan.items; item += gridDim.x) {
    int64_t index = item, group = 0;
    if (p.groups > 1) index = camox_divide(item, p.groups, &group);
    const norm2d_tile tile = norm2d_tile_at(plan, index, group);
    const int64_t pixel = tile.first + slot, channel = group * plan.group_channels + lane * V;
    /* teams behind the last pixel have no vectors, and take part in the sums of their warp alone */
    const int channels = pixel < plan.pixels ? static_cast<int>(plan.group_channels) - lane * V : 0;

    T x[vectors][V];
    const T *from = norm2d_place<const T>(p.x, tile.batch, pixel, channel);
#pragma unroll
    for (int k = 0; k < vectors; ++k, from += step)
      if (k * step < channels) camox_load(x[k], from);
    /* the group's first channel, see norm2d_load_origin */
    float origin = channels > 0 ? camox_to_float(x[0][0]) : 0.0f;
    origin = __shfl_sync(CAMOX_FULL_MASK, origin, thread % CAMOX_WARP - lane);

    float d[vectors][V]; /* x less its origin, then less the mean of that */
    float mean = 0.0f, squares = 0.0f;
#pragma unroll
    for (int k = 0; k < vectors; ++k) {
      if (k * step >= channels) continue;
      float values[V];
      camox_to_floats(values, x[k]);
#pragma unroll
      for (int i = 0; i < V; ++i) d[k][i] = values[i] - origin, mean += d[k][i];
    }
    mean = camox_team_sum(mean, team) * plan.inverse;
#pragma unroll
    for (int k = 0; k < vectors; ++k) {
      if (k * step >= channels) continue;
#pragma unroll
      for (int i = 0; i < V; ++i) d[k][i] -= mean, squares = fmaf(d[k][i], d[k][i], squares);
    }
    const float scale = camox_rsqrt(camox_team_sum(squares, team) * plan.inverse + plan.eps);
    if (lane == 0 && pixel < plan.recorded) {
      float *const stats = static_cast<float *>(p.stats) + norm2d_stats_index(plan, tile) + slot;
      stats[0] = mean, stats[p.batch * p.groups * plan.pixels] = scale;
    }

    /* of either kind of weights: nvcc would issue the loads of both for each vector */
    const auto write = [&](const auto *weights, const auto *biases) {
      T *out = norm2d_place<T>(p.y, tile.batch, pixel, channel);
#pragma unroll
      for (int k = 0; k < vectors; ++k, weights += step, biases += step, out += step) {
        if (k * step >= channels) continue;
        float weight[V], y[V];
        camox_load_weights(weight, weights);
        camox_load_weights(y, biases);
#pragma unroll
        for (int i = 0; i < V; ++i) y[i] = fmaf(d[k][i] * scale, weight[i], y[i]);
        if (p.residual.data) {
          T residual[V];
          camox_load(residual, norm2d_place<const T>(p.residual, tile.batch, pixel, channel + k * step));
          norm2d_activate<T>(y, p.activation, false);
#pragma unroll
          for (int i = 0; i < V; ++i) y[i] += camox_to_float(residual[i]);
        } else {
          norm2d_activate<T>(y, p.activation, true);
        }
#ifdef CAMOX_BREAK_NORM2D
        y[0] += 1e-3f;
#endif
        camox_store_float(out, y);
      }
    };
    if (sizeof(T) == 2 && p.half_weights)
      write(static_cast<const T *>(p.weight.data) + channel, static_cast<const T *>(p.bias.data) + channel);
    else
      write(static_cast<const float *>(p.weight.data) + channel, static_cast<const float *>(p.bias.data) + channel);
  }
}

/* ---- backward ---- */

/* Where a thread's sums for grad_weight and grad_bias go: into `partial`, in planes from `channel` of the group on; `add`: to
   what is there. */
struct norm2d_share_place {
  int64_t channel;
  int chunk;
  float *partial;
  bool add;
};

/* Sums of weight and bias over all threads of the block that have the same channels. */
template <typename shape>
__device__ __forceinline__ void norm2d_share(const float (&weight)[shape::channels], const float (&bias)[shape::channels],
                                             const norm2d_plan &plan, const norm2d_thread &me, const norm2d_share_place &to,
                                             float *scratch) {
  constexpr int V = shape::V;
  constexpr bool LAST = shape::LAST;
  float *const partial = to.partial;
  const bool add = to.add;
  constexpr int channels = shape::channels;
  const int64_t to_bias = plan.p.channels;
  if constexpr (LAST) {
    const int width = plan.inner * V;
    float *const bias_scratch = scratch + plan.outer * width;
    if (me.inner < plan.inner) {
#pragma unroll
      for (int i = 0; i < V; ++i) {
        scratch[me.outer * width + me.inner * V + i] = weight[i];
        bias_scratch[me.outer * width + me.inner * V + i] = bias[i];
      }
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < width; i += static_cast<int>(blockDim.x)) {
      const int64_t c = static_cast<int64_t>(to.chunk) * width + i;
      if (c >= plan.group_channels) break;
      float weight_sum = 0.0f, bias_sum = 0.0f;
#pragma unroll 4
      for (int row = 0; row < plan.outer; ++row) {
        weight_sum += scratch[row * width + i];
        bias_sum += bias_scratch[row * width + i];
      }
      partial[c] = add ? partial[c] + weight_sum : weight_sum;
      partial[to_bias + c] = add ? partial[to_bias + c] + bias_sum : bias_sum;
    }
    __syncthreads();
  } else {
#pragma unroll
    for (int k = 0; k < channels; ++k) {
      float weight_sum = weight[k], bias_sum = bias[k];
      for (int other = plan.inner / 2; other > 0; other /= 2) {
        weight_sum += __shfl_xor_sync(CAMOX_FULL_MASK, weight_sum, other);
        bias_sum += __shfl_xor_sync(CAMOX_FULL_MASK, bias_sum, other);
      }
      const int64_t c = to.channel + static_cast<int64_t>(k) * plan.outer;
      if (me.inner == 0 && c < plan.group_channels) {
        partial[c] = add ? partial[c] + weight_sum : weight_sum;
        partial[to_bias + c] = add ? partial[to_bias + c] + bias_sum : bias_sum;
      }
    }
  }
}

/* Blocks of the backward that a multiprocessor must hold. These kernels would spill a few bytes for a second block of
   NORM2D_THREADS; of NORM2D_TARGET_THREADS it holds two all the same. Staged rows need fewer registers. */
template <typename T, int V, bool LAST, bool WHOLE>
struct norm2d_backward_blocks {
  static constexpr bool stages = norm2d_stages<T, V, LAST, WHOLE> && CAMOX_CUDA_ARCH >= 800;
  static constexpr bool spills = V == 1 || (WHOLE && !stages && !camox_is_bfloat16<T>::value);
  static constexpr int value = sizeof(T) == 2 && !LAST && spills ? 1 : NORM2D_BLOCKS;
};

/* WHOLE as in the forward: of groups in several chunks no pass may keep z and d for the next, which would spill. */
template <typename T, int V, bool LAST, bool WHOLE>
__global__ void __launch_bounds__(NORM2D_THREADS, norm2d_backward_blocks<T, V, LAST, WHOLE>::value)
    norm2d_backward_kernel(const __grid_constant__ norm2d_plan plan) {
  typedef norm2d_shape<V, LAST, norm2d_rows_each<T, V, false>> shape;
  CAMOX_DYNAMIC_SHARED(float, totals);
  const camox_norm2d_params &p = plan.p;
  norm2d_thread me = norm2d_thread_of(plan);
  float *const scratch = totals + norm2d_totals_size(2, plan.tile);
  constexpr bool stages = norm2d_stages<T, V, LAST, WHOLE> && CAMOX_CUDA_ARCH >= 800;
  float *const stage = totals + plan.staged;
  constexpr int piece = V < 4 ? V : 4; /* elements computed together */
  for (int64_t item = blockIdx.x; item < plan.items; item += gridDim.x) {
    int64_t share = item, group = 0;
    if (p.groups > 1) share = camox_divide(item, p.groups, &group);
    const int64_t begin = share * plan.share_tiles, end = min(begin + plan.share_tiles, plan.tile_count);
    float *const partial = static_cast<float *>(p.partial) + share * 2 * p.channels + group * plan.group_channels;
    float weight_sums[shape::channels], bias_sums[shape::channels];
#pragma unroll
    for (int i = 0; i < shape::channels; ++i) weight_sums[i] = bias_sums[i] = 0.0f;

    const int chunks = WHOLE ? 1 : plan.chunks;
    const bool whole = WHOLE || (V * sizeof(T) < 16 && chunks == 1); /* those of 16-byte vectors are WHOLE if they can be */
    norm2d_tile tile = norm2d_tile_at(plan, begin, group);
    if constexpr (stages)
      if (begin < end) norm2d_copy_tile<T, shape>(stage, norm2d_copy_of<T, shape>(plan, tile, me));
    for (int64_t index = begin; index < end; ++index, norm2d_next_tile(&tile, plan)) {
      float z[shape::rows][V], d[shape::rows][V], origin[shape::pixels], sums[2][shape::pixels];
      float shift[shape::pixels], scale[shape::pixels]; /* z = (x - origin) * scale + shift */
      const norm2d_part first = norm2d_part_at<shape>(plan, tile, me, 0);
      {
        T values[shape::pixels];
        if constexpr (!stages) norm2d_load_origin<T, shape>(values, plan, tile, first);
        const float *stats = static_cast<const float *>(p.stats) + norm2d_stats_index(plan, tile);
        const float *stats_scale = stats + p.batch * p.groups * plan.pixels;
#pragma unroll
        for (int i = 0; i < shape::pixels; ++i) shift[i] = scale[i] = sums[0][i] = sums[1][i] = 0.0f;
        if constexpr (LAST) {
#pragma unroll
          for (int k = 0; k < shape::rows; ++k) {
            if (!(first.rows >> k & 1)) continue;
            shift[k] = __ldg(stats + (k * plan.outer + me.outer));
            scale[k] = __ldg(stats_scale + (k * plan.outer + me.outer));
          }
        } else if (first.rows) {
          camox_load_floats(shift, stats + me.inner * V);
          camox_load_floats(scale, stats_scale + me.inner * V);
        }
        if constexpr (stages) {
          camox_cp_async_wait<0>();
          norm2d_load_staged(values, stage, 0, first.rows);
        }
        camox_to_floats(origin, values);
#pragma unroll
        for (int i = 0; i < shape::pixels; ++i) shift[i] *= -scale[i]; /* of the mean */
      }
      /* in planes element by element, too, each pass has code of its own: a loop would wait for one row's loads after another */
#pragma unroll(WHOLE || (V == 1 && !LAST) ? 2 : 1)
      for (int pass = 0; pass < 2; ++pass) {
        if (pass == 1) {
          norm2d_load_totals<2, shape>(sums, plan, me, totals);
#pragma unroll
          for (int i = 0; i < shape::pixels; ++i) sums[0][i] *= -scale[i], sums[1][i] *= -scale[i];
        }
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; ++chunk) {
          camox_compute_late(me.inner);
          camox_compute_late(me.outer);
          const norm2d_part part = WHOLE ? first : norm2d_part_at<shape>(plan, tile, me, chunk);
          const bool is_read = pass == 0 || !whole;
          T x[shape::rows][V], grad[shape::rows][V];
          float weight[shape::channels], bias[shape::channels];
          norm2d_copy<T> next = {};
          if (is_read) {
            if constexpr (stages) {
              norm2d_tile following = tile;
              norm2d_next_tile(&following, plan);
              if (index + 1 < end) next = norm2d_copy_of<T, shape>(plan, following, me);
              norm2d_copy_origin(stage, next);
            } else {
              norm2d_load(x, norm2d_rows_of<const T, shape>(plan, p.x, tile, part, part.channel), part.rows);
              norm2d_load(grad, norm2d_rows_of<const T, shape>(plan, p.grad, tile, part, part.channel), part.rows);
            }
            norm2d_load_affine<T, shape>(weight, p.weight, plan, tile, part);
            norm2d_load_affine<T, shape>(bias, p.bias, plan, tile, part);
          }
          if (pass == 0 && !whole) {
#pragma unroll
            for (int i = 0; i < shape::channels; ++i) weight_sums[i] = bias_sums[i] = 0.0f;
          }
          norm2d_rows<T> out = norm2d_rows_of<T, shape>(plan, p.grad_x, tile, part, part.channel);
#pragma unroll
          for (int k = 0; k < shape::rows; ++k, out.first += out.step) {
            if constexpr (stages) {
              if (is_read) {
                norm2d_load_staged(x[k], stage, 1 + 2 * k, part.rows >> k & 1);
                norm2d_load_staged(grad[k], stage, 2 + 2 * k, part.rows >> k & 1);
                norm2d_copy_row(stage, &next, k);
              }
            }
            /* of rows that do not exist g is 0, and so is all that follows */
#pragma unroll
            for (int part_of = 0; is_read && part_of < V; part_of += piece) {
              float values[piece], u[piece], g[piece];
              camox_to_floats(values, x[k] + part_of);
              camox_to_floats(g, grad[k] + part_of);
#pragma unroll
              for (int j = 0; j < piece; ++j) {
                const int i = part_of + j, pixel = norm2d_pixel<LAST>(k, i), channel = norm2d_channel<LAST>(k, i);
                z[k][i] = fmaf(values[j] - origin[pixel], scale[pixel], shift[pixel]);
                u[j] = fmaf(z[k][i], weight[channel], bias[channel]);
              }
              norm2d_activation_backward(g, u, p.activation);
#pragma unroll
              for (int j = 0; j < piece; ++j) {
                const int i = part_of + j, pixel = norm2d_pixel<LAST>(k, i), channel = norm2d_channel<LAST>(k, i);
                d[k][i] = g[j] * weight[channel];
                if (pass == 1) continue;
                weight_sums[channel] = fmaf(g[j], z[k][i], weight_sums[channel]);
                bias_sums[channel] += g[j];
                sums[0][pixel] += d[k][i];
                sums[1][pixel] = fmaf(d[k][i], z[k][i], sums[1][pixel]);
              }
            }
            if (pass == 0 || !(part.rows >> k & 1)) continue;
            float grad_x[V];
#pragma unroll
            for (int i = 0; i < V; ++i) {
              const int pixel = norm2d_pixel<LAST>(k, i);
              grad_x[i] = fmaf(z[k][i], sums[1][pixel], fmaf(d[k][i], scale[pixel], sums[0][pixel]));
            }
#ifdef CAMOX_BREAK_NORM2D
            grad_x[0] += 1e-3f;
#endif
            camox_store_float(out.first, grad_x);
          }
          if constexpr (stages)
            if (is_read) camox_cp_async_commit();
          if (pass == 0 && !whole)
            norm2d_share<shape>(weight_sums, bias_sums, plan, me, {part.channel, chunk, partial, index > begin}, scratch);
        }
        if (pass == 0)
          norm2d_sum_channels<2, shape>(sums, plan, me, totals,
                                        [&](float &total, int, int, float sum) { total = sum * plan.inverse; });
      }
    }
    if (whole) norm2d_share<shape>(weight_sums, bias_sums, plan, me, {me.outer, 0, partial, false}, scratch);
  }
}

/* ---- launchers ---- */

struct norm2d_views {
  camox_view4 *view[5];
  int count;
};

static norm2d_views norm2d_views_of(camox_norm2d_params *p) {
  norm2d_views views = {};
  camox_view4 *const all[] = {&p->x, &p->residual, &p->y, &p->grad, &p->grad_x};
  for (camox_view4 *view : all)
    if (view->data != nullptr) views.view[views.count++] = view;
  return views;
}

/* The same images as one row each, where every tensor has its pixels at equal distances. */
static camox_norm2d_params norm2d_flat(const camox_norm2d_params *given) {
  camox_norm2d_params p = *given;
  const norm2d_views views = norm2d_views_of(&p);
  bool flat = true;
  for (int i = 0; i < views.count; ++i) {
    int64_t *const stride = views.view[i]->stride;
    if (p.width == 1) stride[3] = stride[2]; /* of a single column or pixel no step is ever made */
    if (p.width == 1 && p.height == 1) stride[3] = stride[0];
    flat = flat && (p.width == 1 || p.height == 1 || stride[2] == p.width * stride[3]);
  }
  if (flat) p.width *= p.height, p.height = 1;
  return p;
}

/* All images as one where pixels lie at equal distances throughout: with one group stats are one row too. */
static void norm2d_merge_batch(camox_norm2d_params *p) {
  const norm2d_views views = norm2d_views_of(p);
  for (int i = 0; i < views.count; ++i)
    if (views.view[i]->stride[0] != p->width * views.view[i]->stride[3]) return;
  if (p->groups > 1) return;
  p->width *= p->batch, p->batch = 1;
}

/* Whether every tensor can be accessed `lanes` elements at a time, in lines along the channels, in planes along the pixels. */
static bool norm2d_fits(camox_norm2d_params *p, bool lines, int lanes, int element) {
  const norm2d_views views = norm2d_views_of(p);
  const int inner = lines ? 1 : 3, across = lines ? 3 : 1;
  const int64_t sizes[4] = {p->batch, p->channels, p->height, p->width};
  if (p->height > 1 || (lines && p->channels == 1)) return false;
  if ((lines ? p->channels / p->groups : p->width) % lanes != 0) return false;
  for (int i = 0; i < views.count; ++i) {
    const int64_t *stride = views.view[i]->stride;
    if (!camox_aligned(views.view[i]->data, lanes * element) || (sizes[inner] > 1 && stride[inner] != 1)) return false;
    if ((sizes[0] > 1 && stride[0] % lanes != 0) || (sizes[across] > 1 && stride[across] % lanes != 0)) return false;
  }
  const int floats = lanes < 4 ? 4 * lanes : 16, weights = p->half_weights ? lanes * element : floats;
  if (!lines) return camox_aligned(p->stats, floats);
  return camox_aligned(p->weight.data, weights) && camox_aligned(p->bias.data, weights);
}

extern "C" int64_t camox_norm2d_cuda_items(const camox_norm2d_params *p) {
  const int64_t pixels = p->batch * p->height * p->width;
  int64_t shares = pixels / NORM2D_SHARE_PIXELS;
  if (shares < NORM2D_FEW_SHARES) shares = NORM2D_FEW_SHARES;
  if (shares > NORM2D_MOST_SHARES) shares = NORM2D_MOST_SHARES;
  return shares < pixels ? shares : pixels;
}

/* Without shares the gradients become zeros. */
static void norm2d_launch_row_sums(const camox_norm2d_params &p, int64_t shares, void *stream) {
  camox_row_sums sums = {static_cast<const float *>(p.partial), shares, 2 * p.channels, p.channels, {}, CAMOX_F32};
  sums.out[0] = p.grad_weight, sums.out[1] = p.grad_bias, sums.dtype = p.half_weights ? p.dtype : CAMOX_F32;
  camox_launch_row_sums<norm2d>(sums, stream);
}

/* Threads of a block, `most` at most, and pixels of its tile; -> threads. */
template <typename shape>
static int norm2d_cut(norm2d_plan *plan, int most) {
  constexpr int V = shape::V, rows = shape::rows;
  constexpr bool LAST = shape::LAST;
  const int64_t images = plan->p.batch * plan->p.groups;
  if (LAST) {
    const int64_t vectors = plan->group_channels / V;
    plan->inner = static_cast<int>(vectors < most ? vectors : most);
    plan->chunks = static_cast<int>(camox_ceil_div(vectors, plan->inner));
    int64_t most_rows = NORM2D_TARGET_THREADS / plan->inner;
    if (most_rows > camox_ceil_div(plan->pixels, rows)) most_rows = camox_ceil_div(plan->pixels, rows);
    /* fewer, down to half, where more of the lanes of its warps have elements */
    int64_t outer = most_rows;
    const auto lanes = [&](int64_t count) { return camox_ceil_div(count * plan->inner, CAMOX_WARP) * CAMOX_WARP; };
    for (int64_t fewer = most_rows - 1; 2 * fewer >= most_rows && fewer > 0; --fewer)
      if (fewer * lanes(outer) > outer * lanes(fewer)) outer = fewer;
    while (outer > 1 && outer * plan->inner > 2 * CAMOX_WARP &&
           images * camox_ceil_div(plan->pixels, outer * rows) < NORM2D_FILL)
      outer = (outer + 1) / 2;
    plan->outer = outer < 1 ? 1 : static_cast<int>(outer);
    plan->tile = plan->outer * rows;
    plan->terms = plan->inner;
    plan->term_step = 1;
    plan->pixel_step = plan->inner | 1; /* odd: the threads that add find their terms in different banks */
    plan->scratch = plan->tile * plan->pixel_step;
  } else {
    const int64_t vectors = plan->pixels / V, slices = camox_ceil_div(plan->group_channels, rows);
    /* single elements side by side are short accesses, but of few tiles all channels in registers is worth more: a chunk is
       waited for in each pass */
    const bool fills = images * camox_ceil_div(vectors, NORM2D_LEAST_LANES) >= NORM2D_FILL;
    const int fewest = V == 1 && fills ? NORM2D_LEAST_LANES : NORM2D_FEWEST_LANES;
    int lanes = CAMOX_WARP;
    while (lanes > 1 && lanes / 2 >= vectors) lanes /= 2;
    while (lanes > NORM2D_LEAST_LANES &&
           (lanes * slices > NORM2D_TARGET_THREADS || images * camox_ceil_div(vectors, lanes) < NORM2D_FILL))
      lanes /= 2;
    while (lanes > fewest && lanes * slices > most) lanes /= 2;
    const int whole = CAMOX_WARP / lanes; /* slices of a warp */
    plan->inner = lanes;
    plan->outer = static_cast<int>(camox_ceil_div(slices < most / lanes ? slices : most / lanes, whole)) * whole;
    plan->chunks = static_cast<int>(camox_ceil_div(slices, plan->outer));
    plan->tile = lanes * V;
    plan->terms = plan->outer;
    plan->term_step = plan->tile;
    plan->pixel_step = 1;
    plan->scratch = plan->outer * plan->tile;
  }
  return static_cast<int>(camox_ceil_div(plan->inner * plan->outer, CAMOX_WARP)) * CAMOX_WARP;
}

/* Tiles of a block of the backward, which all iterate over as many; a group has `most` blocks at most. Of one to eight blocks
   for each place of the GPU those with which the busiest multiprocessor is done first: to begin and end a block takes it
   about as long as half a tile. */
static int64_t norm2d_share_tiles(const norm2d_plan &plan, const camox_places &places, int64_t most) {
  const int64_t at_once = places.all(), least = camox_ceil_div(plan.tile_count, most);
  int64_t best = 1, fewest = INT64_MAX;
  for (int64_t waves = 1; waves <= 8; ++waves) {
    int64_t tiles = camox_ceil_div(plan.tile_count * plan.p.groups, waves * at_once);
    if (tiles < least) tiles = least;
    const int64_t blocks = camox_ceil_div(plan.tile_count, tiles) * plan.p.groups;
    const int64_t steps = camox_busiest(places, blocks) * (2 * tiles + 1);
    if (steps >= fewest) continue;
    fewest = steps;
    best = tiles;
  }
  return best;
}

template <typename T, int V>
static void norm2d_launch_teams(norm2d_plan plan, void *stream) {
  const int64_t vectors = plan.group_channels / V, pixels = plan.p.batch * plan.p.groups * plan.pixels;
  int shift = 1; /* 2 lanes: 32 bytes, which memory moves at once */
  while (vectors > norm2d_team_vectors<T> << shift) ++shift;
  while (1 << shift < CAMOX_WARP && vectors > 1 << shift && pixels << shift < NORM2D_TEAM_FILL) ++shift;
  plan.sum_shift = shift;
  plan.tile = NORM2D_TEAM_THREADS >> shift;
  plan.tiles = camox_ceil_div(plan.pixels, plan.tile);
  plan.items = plan.p.batch * plan.tiles * plan.p.groups;
  CAMOX_LAUNCH((norm2d_team_kernel<T, V>), camox_grid(plan.items), NORM2D_TEAM_THREADS, 0, stream, plan);
}

template <typename T, int V, bool LAST>
static void norm2d_launch(const camox_norm2d_params *p, bool backward, void *stream) {
  norm2d_plan plan = {};
  plan.p = *p;
  if (LAST) norm2d_merge_batch(&plan.p);
  plan.eps = p->eps > FLT_MIN ? static_cast<float>(p->eps) : FLT_MIN;
  plan.pixels = plan.p.height * plan.p.width;
  plan.recorded = plan.p.stats != nullptr ? plan.pixels : 0;
  plan.group_channels = p->channels / p->groups;
  plan.inverse = 1.0f / static_cast<float>(plan.group_channels);
  constexpr bool widest = V * sizeof(T) == 16;
  if constexpr (LAST && widest)
    if (!backward && plan.group_channels <= CAMOX_WARP * V * norm2d_team_vectors<T>)
      return norm2d_launch_teams<T, V>(plan, stream);
  const int sums = backward ? 2 : 1;
  constexpr bool whole_planes = widest && !LAST;
  int threads = 0;
  bool whole = whole_planes && !backward;
  if (whole) {
    threads = norm2d_cut<norm2d_shape<V, LAST, norm2d_rows_each<T, V, whole_planes>>>(&plan, norm2d_most<T, true>::threads);
    whole = plan.chunks == 1;
  }
  if (!whole) threads = norm2d_cut<norm2d_shape<V, LAST, norm2d_rows_each<T, V, false>>>(&plan, NORM2D_THREADS);
  if (!LAST && !backward) plan.scratch = threads / CAMOX_WARP * plan.tile;
  plan.scratch = (plan.scratch + 3) / 4 * 4;
  plan.tiles = camox_ceil_div(plan.pixels, plan.tile);
  plan.tile_count = plan.p.batch * plan.tiles;
  while (plan.sum_shift < 5 && 2 << plan.sum_shift <= plan.terms && (2 * sums * plan.tile) << plan.sum_shift <= threads)
    ++plan.sum_shift;
  int floats = (LAST ? sums : 2) * plan.scratch; /* planes in the forward: of the mean, of the variance */
  if (backward && LAST && floats < 2 * V * plan.inner * plan.outer) floats = 2 * V * plan.inner * plan.outer;
  plan.staged = (sums * plan.tile + 3) / 4 * 4 + floats;
  size_t shared = sizeof(float) * static_cast<size_t>(plan.staged);
  if (!backward) {
    plan.items = plan.tile_count * p->groups;
    const auto kernel = whole ? norm2d_kernel<T, V, LAST, whole_planes> : norm2d_kernel<T, V, LAST, false>;
    CAMOX_LAUNCH(kernel, camox_grid(plan.items), threads, shared, stream, plan);
    return;
  }
  whole = widest && plan.chunks == 1;
  if (norm2d_stages<T, V, LAST, widest> && whole && camox_device_is_sm80())
    shared += static_cast<size_t>(16 * threads * (1 + 2 * norm2d_rows_each<T, V, false>));
  const auto kernel = whole ? norm2d_backward_kernel<T, V, LAST, widest> : norm2d_backward_kernel<T, V, LAST, false>;
  plan.share_tiles = norm2d_share_tiles(plan, camox_places_of(kernel, threads, shared), camox_norm2d_cuda_items(p));
  plan.shares = camox_ceil_div(plan.tile_count, plan.share_tiles);
  plan.items = plan.shares * p->groups;
  CAMOX_LAUNCH(kernel, camox_grid(plan.items), threads, shared, stream, plan);
  norm2d_launch_row_sums(plan.p, plan.shares, stream);
}

/* The widest access that fits, along whichever of pixels and channels. */
template <typename T>
static void norm2d_launch_widest(camox_norm2d_params *p, bool backward, void *stream) {
  constexpr int element = static_cast<int>(sizeof(T)), widest = 16 / element;
  if (norm2d_fits(p, false, widest, element))
    norm2d_launch<T, widest, false>(p, backward, stream);
  else if (norm2d_fits(p, true, widest, element))
    norm2d_launch<T, widest, true>(p, backward, stream);
  else if (element == 2 && norm2d_fits(p, false, 4, element))
    norm2d_launch<T, 4, false>(p, backward, stream);
  else if (element == 2 && norm2d_fits(p, true, 4, element))
    norm2d_launch<T, 4, true>(p, backward, stream);
  else if (norm2d_fits(p, true, 1, element))
    norm2d_launch<T, 1, true>(p, backward, stream);
  else
    norm2d_launch<T, 1, false>(p, backward, stream);
}

static int norm2d_run(const camox_norm2d_params *given, bool backward, void *stream) {
  camox_norm2d_params p = norm2d_flat(given);
  const bool empty = p.batch * p.height * p.width == 0;
  if (p.channels == 0 || (empty && !backward)) return cudaSuccess;
  if (empty) {
    norm2d_launch_row_sums(p, 0, stream);
    return camox_launch_status();
  }
  switch (p.dtype) {
    case CAMOX_F32: norm2d_launch_widest<float>(&p, backward, stream); break;
    case CAMOX_BF16: norm2d_launch_widest<__nv_bfloat16>(&p, backward, stream); break;
    case CAMOX_F16: norm2d_launch_widest<__half>(&p, backward, stream); break;
    default: return cudaErrorInvalidValue;
  }
  return camox_launch_status();
}

extern "C" int camox_norm2d_cuda(const camox_norm2d_params *p, void *stream) {
  camox_norm2d_params forward = *p;
  forward.grad.data = forward.grad_x.data = nullptr; /* not looked at, whatever they hold */
  return norm2d_run(&forward, false, stream);
}

extern "C" int camox_norm2d_backward_cuda(const camox_norm2d_params *p, void *stream) {
  camox_norm2d_params backward = *p;
  backward.residual.data = backward.y.data = nullptr;
  return norm2d_run(&backward, true, stream);
}
