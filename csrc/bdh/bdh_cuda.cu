/* bdh_attention on CUDA: products of 64 x 64 tiles (../common/tile_product.cuh), whose operands are rotated, masked or weighed
   on their way into shared memory; float16 and bfloat16 on tensor cores, float32 (and bfloat16 on sm_75) by FMA, sums in float32.

     scores   s = scale r r^T, a tile and its mirror image at once      softmax  a warp per row
              of a single tile: several products over a part of the columns of q each, added up by part_scores
     values   out = w v, or scale r z, or their sum                     grad_v   w^T g, or scale r (r^T g), or their sum
     pairs    e = d s + d s^T                                           grad_q   scale e r, rotated back
     state    z = r^T v, or r^T g

     Half types whose rows are read 16 bytes at a time have kernels beside these:
     short    scores and values of two heads of at most 64 tokens, without softmax: the forward alone
     large    the state form that is not causal, by tiles of 128 x 192 or 128 x 128 (../common/large_product.cuh):
              z = r^T v, which makes r and stores it, and out = scale r z; for the backward z too, then from the stored r
              dz = r^T g and grad_v = scale r dz, and grad_q of both states: scale [g v] [z dz]^T

     scratch  [ delta ][ scores of a band of rows ][ pairs of the same band ][ states of a segment of chunks ]
              or, of large, [ r of a band of heads ][ their states, in the element type: rows z, or z and dz ]

       T x T scores of a head             a band has as many heads, or rows or chunks of one, as fill a GPU;
       +--------------------+             since s is symmetric, bands need nothing of each other in the backward either
       | band 0             |
       +--------------------+             causal state form: chunks of tokens on the diagonal, before them the scan of the
       | band 1             |             states of the chunks before (of r^T g: after)
       +--------------------+

   The state form, where it has fewer products, has the state kernels and grad_q from both states; causal it goes by chunks:
   the scores inside a chunk are added where values, grad_v and grad_q are computed. No atomics: the same bits on every run.
   Half types: r, w, e and z are rounded to the type as the tensor cores take them, in float16 to infinity beyond its range.
   float32 is multiplied in float32, or where `tf32` allows it on tensor cores from sm_80 on, operands rounded to TF32. */
#include "../common/large_product.cuh"
#include "../common/tile_product.cuh"
#include "bdh.h"

#define BDH_TILES_AT_ONCE 2048 /* of scores, pairs and states in scratch, or the least there can be: enough to fill a GPU */
#define BDH_FILL 256           /* blocks that fill a large GPU */
#define BDH_HEADS_PER_BLOCK 8  /* of a block of grad_q, at most */
#define BDH_HALVES 2           /* of a part of the columns of q, where scores of a head are one tile */
#define BDH_PART_STEPS 4       /* of a part at least */
#define BDH_ROTATED_TILES 8192 /* of r in scratch, 64 MiB: at least a head's */
#define BDH_GRAD_Q_COLUMNS 128 /* of a large tile of grad_q: its sums leave room in shared memory and registers for */
#define BDH_GRAD_Q_BLOCKS (CAMOX_CUDA_ARCH >= 900 ? 2 : 1) /* of which one multiplies while the other rotates back, */
#define BDH_GRAD_Q_AT_ONCE 4                               /* each thread so many pieces of 8 columns */
#define BDH_SHORT_HEADS 2                                  /* of a block, which share their angles */
#define BDH_SHORT_STAGES 3                                 /* each of tiles of q of both heads, of cosines and of sines */
#define BDH_SHORT_TILES 4                                  /* of v in shared memory, each 64 columns */
#define BDH_STEP_THREADS 256
#define BDH_STEP_COLUMNS 32 /* columns of the state of a block, whose warps share its rows */
#define BDH_STEP_CHUNK 512  /* elements of r in shared memory */

/* Blocks that a multiprocessor shall hold of values, and of grad_v of scores: as many as their shared memory lets it. */
template <typename P>
constexpr int bdh_blocks = CAMOX_CUDA_ARCH < 900 || !camox_on_tensor_cores<P> ? CAMOX_TILE_BLOCKS
                           : sizeof(P) == 2                                   ? 4
                                                                              : 3;

/* The heads of a launch, and the rows and chunks of each; there is more than one chunk in causal state form alone. */
struct bdh_row_band {
  int64_t first_sequence, sequences, first_row, rows, first_chunk, chunks;
};

struct bdh_plan {
  camox_bdh_params p;
  float scale;
  bdh_row_band band;
  int64_t chunk; /* tokens, T where there are no chunks */
  float *scores; /* [sequences, chunks, rows, chunk] of the band, or p.scores */
  void *pairs;   /* likewise, in the element type */
  void *rotated; /* [sequences, T, rotated_dim] r of the band; columns from N on are 0 */
  int64_t rotated_dim;
  int64_t state_pitch, state_columns; /* of large states: elements of a row, and of z in it; those from D on are 0 */
  int64_t parts, part_columns;        /* of q, where scores are one tile */
  float *part_scores;                 /* [sequences, chunks, parts, tile] where there are several */
  float *delta;                       /* [B*H, T] */
  float *state[2];                    /* [sequences, chunks, N, D]: r^T v, and r^T g */
  float *carried[2];                  /* [segments, N, D]: of the chunks before, or after, the band's; NULL where it has all */
  int64_t heads_per_block;            /* of grad_q, in sequence: their angles are the same */
  bool adds_heads;                    /* a block of grad_v adds up the heads that share a v */
  bool paired;                        /* large tiles of r^T v are of two heads that share v */
  bool has_state, has_scores;         /* of what out and the gradients are made: both in causal state form */
  bool masked;                        /* the forward's scores: only keys that count */
  bool weights; /* scores are p.scores with w from the forward; else, in the backward, s, and w follows from it */
  bool wide_state, wide_q, wide_v, wide_out, wide_grad, wide_grad_q, wide_grad_v, wide_tables, wide_scores, wide_pairs,
      wide_partial;
};

/* Which tile an item is: `slot` counts the launch's heads and chunks; its row is one of the chunk, or of a state. */
struct bdh_place {
  int64_t slot, sequence, b, h, first, length, row, column; /* the chunk's first token, its tokens, the tile's first */
  int rows;                                                 /* at most 0 beyond the end of a shorter chunk */
};

/* A chunk of the launch's; the place of a tile in it is not set. */
__device__ __forceinline__ bdh_place bdh_chunk_of(const bdh_plan &plan, int64_t slot) {
  bdh_place at = {};
  int64_t chunk;
  at.slot = slot;
  at.sequence = plan.band.first_sequence + camox_divide(slot, plan.band.chunks, &chunk);
  at.b = camox_divide(at.sequence, plan.p.heads, &at.h);
  at.first = (plan.band.first_chunk + chunk) * plan.chunk;
  at.length = min(plan.p.length - at.first, plan.chunk);
  return at;
}

/* Tiles begin at row `first` of every chunk, and there are `rows`. */
__device__ __forceinline__ bdh_place bdh_place_of(const bdh_plan &plan, int64_t item, int64_t columns, int64_t first,
                                                  int64_t rows) {
  int64_t row, column;
  const int64_t remaining = camox_divide(item, camox_ceil_div(columns, CAMOX_TILE), &column);
  bdh_place at = bdh_chunk_of(plan, camox_divide(remaining, camox_ceil_div(rows, CAMOX_TILE), &row));
  at.row = first + row * CAMOX_TILE, at.column = column * CAMOX_TILE;
  at.rows = static_cast<int>(min(rows - row * CAMOX_TILE, static_cast<int64_t>(CAMOX_TILE)));
  return at;
}

/* Of the band's rows. */
__device__ __forceinline__ bdh_place bdh_place_of(const bdh_plan &plan, int64_t item, int64_t columns) {
  bdh_place at = bdh_place_of(plan, item, columns, plan.band.first_row, plan.band.rows);
  at.rows = static_cast<int>(min(static_cast<int64_t>(at.rows), at.length - at.row));
  return at;
}

__device__ __forceinline__ int bdh_columns_of(const bdh_place &at, int64_t columns) {
  return static_cast<int>(min(columns - at.column, static_cast<int64_t>(CAMOX_TILE)));
}

/* The tile's first element in a tensor of [B,H,T,columns]. */
template <typename E>
__device__ __forceinline__ E *bdh_at(const camox_view4 &view, const bdh_place &at) {
  return static_cast<E *>(view.data) + at.b * view.stride[0] + at.h * view.stride[1] + (at.first + at.row) * view.stride[2] +
         at.column * view.stride[3];
}

#define BDH_FOR_TILES(item, items) for (int64_t item = blockIdx.x; item < (items); item += gridDim.x)

__device__ __forceinline__ float *bdh_scores_of(const bdh_plan &plan, int64_t slot, int64_t sequence) {
  return plan.scores + (plan.p.scores ? sequence * plan.p.length : slot * plan.band.rows) * plan.chunk;
}

/* ---- operands: V neighbouring elements of a row in memory, 0 beyond the ends ---- */

/* A chunk of one head. */
template <typename T>
__device__ __forceinline__ camox_tile_matrix<T> bdh_view(const camox_view4 &view, const bdh_place &at, int64_t columns,
                                                         bool wide) {
  return {static_cast<const T *>(view.data) + at.b * view.stride[0] + at.h * view.stride[1] + at.first * view.stride[2],
          view.stride[2],
          view.stride[3],
          at.length,
          columns,
          wide};
}

template <int V>
__device__ __forceinline__ void bdh_load_floats(float (&to)[V], const float *from, int count, bool wide) {
  if (wide && count == V) {
    camox_load_floats<V>(to, from);
  } else {
#pragma unroll
    for (int i = 0; i < V; ++i) to[i] = i < count ? __ldg(from + i) : 0.0f;
  }
}

/* float32 of the launcher's own, dense, as the element type. */
template <typename T>
struct bdh_sums_of {
  const float *data;
  int64_t rows, columns;
  bool wide;

  static constexpr bool copied = false, made = false;
  __device__ __forceinline__ bool usual() const { return wide; }

  __device__ __forceinline__ void piece(T (&to)[camox_tile_lanes<T>], int64_t r, int64_t c) const {
    constexpr int V = camox_tile_lanes<T>;
    const float *const from = data + r * columns + c;
    const int count = r < rows ? camox_at_most<V>(columns - c) : 0;
    float x[V];
    bdh_load_floats(x, from, count, wide);
    camox_round(to, x);
  }
};

template <typename T>
__device__ __forceinline__ auto bdh_state_of(const bdh_plan &plan, const bdh_place &at, int of_grad) {
  const camox_bdh_params &p = plan.p;
  const float *const state = plan.state[of_grad] + at.slot * p.dim * p.value_dim;
  if constexpr (sizeof(T) == 4)
    return camox_tile_matrix<float>{state, p.value_dim, 1, p.dim, p.value_dim, plan.wide_state};
  else
    return bdh_sums_of<T>{state, p.dim, p.value_dim, plan.wide_state};
}

/* The first `count`, or all N, angles from column c of a row of a table that holds one per pair, or per_element; c and
   count are even. */
template <int N>
__device__ __forceinline__ void bdh_angles(float (&to)[N], const float *row, bool per_element, bool wide, int64_t c,
                                           int count) {
  if (per_element) {
    if (wide && count == N) {
      camox_load_floats<N>(to, row + c);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) to[i] = i < count ? __ldg(row + c + i) : 0.0f;
    }
  } else {
    float of_pairs[N / 2];
    if (wide && count == N) {
      camox_load_floats<N / 2>(of_pairs, row + c / 2);
    } else {
#pragma unroll
      for (int i = 0; i < N / 2; ++i) of_pairs[i] = 2 * i < count ? __ldg(row + c / 2 + i) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = of_pairs[i / 2];
  }
}

/* The larger of the two, and NaN where x is: one instruction from sm_80 on. */
__device__ __forceinline__ float bdh_at_least(float x, float least) {
#if defined(CAMOX_CUDA_EMULATOR) || CAMOX_CUDA_ARCH < 800
  return x < least ? least : x;
#else
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(least));
  return y;
#endif
}

/* r of a chunk of one head. */
template <typename T>
struct bdh_rotated {
  camox_tile_matrix<T> q;
  const float *cos, *sin;
  int64_t table_columns;
  bool relu, wide_tables;

  __device__ __forceinline__ void angles(float (&cosines)[camox_tile_lanes<T>], float (&sines)[camox_tile_lanes<T>], int64_t r,
                                         int64_t c) const {
    const bool per_element = table_columns == q.columns;
    const int count = camox_at_most<camox_tile_lanes<T>>(q.columns - c);
    bdh_angles(cosines, cos + r * table_columns, per_element, wide_tables, c, count);
    bdh_angles(sines, sin + r * table_columns, per_element, wide_tables, c, count);
  }

  static constexpr bool copied = true, made = true;
  __device__ __forceinline__ const camox_tile_matrix<T> &memory() const { return q; }

  __device__ __forceinline__ void piece(T (&to)[camox_tile_lanes<T>], int64_t r, int64_t c) const {
    q.piece(to, r, c);
    make(to, r, c);
  }

  __device__ __forceinline__ void make(T (&values)[camox_tile_lanes<T>], int64_t r, int64_t c) const {
    if (r >= q.rows) return;
    float cosines[camox_tile_lanes<T>], sines[camox_tile_lanes<T>];
    angles(cosines, sines, r, c);
    rotate<1>(values, cosines, sines);
  }

  /* An angle for each pair. */
  __device__ __forceinline__ bool usual() const {
    return q.wide && wide_tables && table_columns != q.columns && q.columns % camox_tile_lanes<T> == 0;
  }

  struct angle_place {
    const float *cos, *sin;
    int rows; /* that exist from this one on */
  };

  __device__ __forceinline__ angle_place place(int64_t r, int64_t c) const {
    const int64_t at = r * table_columns + static_cast<int64_t>(static_cast<uint64_t>(c) / 2);
    return {cos + at, sin + at, c < q.columns ? camox_at_most<CAMOX_TILE>(q.rows - r) : 0};
  }

  template <int V>
  __device__ __forceinline__ void make_usual(T (&values)[V], const angle_place &at, int below) const {
    if (below >= at.rows) return;
    float cosines[V / 2], sines[V / 2];
    camox_load_floats(cosines, at.cos + below * table_columns);
    camox_load_floats(sines, at.sin + below * table_columns);
    rotate<2>(values, cosines, sines);
  }

  /* OF elements have one angle. */
  template <int OF, int V>
  __device__ __forceinline__ void rotate(T (&values)[V], const float (&cosines)[V / OF], const float (&sines)[V / OF]) const {
    const float least = relu ? 0.0f : -INFINITY;
    float x[V];
#pragma unroll
    for (int i = 0; i < V; i += 2) {
      const float first = bdh_at_least(camox_to_float(values[i]), least);
      const float second = bdh_at_least(camox_to_float(values[i + 1]), least);
      x[i] = fmaf(first, cosines[i / OF], -second * sines[i / OF]);
      x[i + 1] = fmaf(second, cosines[(i + 1) / OF], first * sines[(i + 1) / OF]);
    }
    camox_round(values, x);
  }

  /* What d q takes of q and the angles for a piece of d r; OF elements have one angle. */
  template <int OF>
  struct backward_piece {
    T x[camox_tile_lanes<T>];
    float cosines[camox_tile_lanes<T> / OF], sines[camox_tile_lanes<T> / OF];
  };

  __device__ __forceinline__ void load(backward_piece<1> &to, int64_t r, int64_t c) const {
    q.piece(to.x, r, c);
    angles(to.cosines, to.sines, r, c);
  }

  /* Of usual(), a piece that exists. */
  __device__ __forceinline__ void load(backward_piece<2> &to, int64_t r, int64_t c) const {
    const angle_place at = place(r, c);
    camox_load(to.x, q.data + r * q.row + c);
    camox_load_floats(to.cosines, at.cos);
    camox_load_floats(to.sines, at.sin);
  }

  /* d q from d r. */
  template <int OF>
  __device__ __forceinline__ void rotate_back(float (&grad)[camox_tile_lanes<T>], const backward_piece<OF> &own) const {
#pragma unroll
    for (int i = 0; i < camox_tile_lanes<T>; i += 2) {
      const float first = grad[i];
      grad[i] = fmaf(first, own.cosines[i / OF], grad[i + 1] * own.sines[(i + 1) / OF]);
      grad[i + 1] = fmaf(grad[i + 1], own.cosines[(i + 1) / OF], -first * own.sines[i / OF]);
    }
#pragma unroll
    for (int i = 0; i < camox_tile_lanes<T>; ++i)
      if (relu && !(camox_to_float(own.x[i]) > 0.0f)) grad[i] = 0.0f;
  }
};

template <typename T>
__device__ __forceinline__ bdh_rotated<T> bdh_rotated_of(const bdh_plan &plan, const bdh_place &at) {
  const camox_bdh_params &p = plan.p;
  return {bdh_view<T>(p.q, at, p.dim, plan.wide_q),
          static_cast<const float *>(p.cos) + at.first * p.table_columns,
          static_cast<const float *>(p.sin) + at.first * p.table_columns,
          p.table_columns,
          p.relu != 0,
          plan.wide_tables};
}

/* Scores of a chunk of one head as the element type: the band's rows; or, where they are s of the backward, TRANSPOSED
   weights: row j has w[i,j] for all i, from s[j,i]. */
template <typename T, bool TRANSPOSED>
struct bdh_weights {
  const float *data;
  int64_t pitch, first_row, rows, length;
  const float *logsumexp; /* of the head's rows, NULL without softmax */
  bool causal, wide;

  static constexpr bool copied = false, made = false;
  __device__ __forceinline__ bool usual() const { return wide; }

  __device__ __forceinline__ void piece(T (&to)[camox_tile_lanes<T>], int64_t r, int64_t c) const {
    constexpr int V = camox_tile_lanes<T>;
    const float *const from = data + (r - first_row) * pitch + c;
    const int count = r < first_row + rows ? camox_at_most<V>(length - c) : 0;
    float x[V];
    bdh_load_floats(x, from, count, wide);
    if constexpr (TRANSPOSED) {
      const int first = causal ? camox_at_most<V>(r - c + 1) : 0;
#pragma unroll
      for (int i = 0; i < V; ++i) {
        if (i < first || i >= count) {
          x[i] = 0.0f;
        } else if (logsumexp) {
          x[i] = expf(x[i] - __ldg(logsumexp + c + i));
        }
      }
    }
    camox_round(to, x);
  }
};

/* The same of scores that are the weights already: float32 is copied as it lies. */
template <typename T>
__device__ __forceinline__ auto bdh_ready_weights(const bdh_plan &plan, const bdh_place &at, const float *scores,
                                                  int64_t first_row, int64_t rows) {
  if constexpr (sizeof(T) == 4)
    return camox_tile_matrix<float>{
        scores - first_row * plan.chunk, plan.chunk, 1, first_row + rows, at.length, plan.wide_scores};
  else
    return bdh_weights<T, false>{scores, plan.chunk, first_row, rows, at.length, nullptr, plan.p.causal != 0, plan.wide_scores};
}

/* ---- forward ---- */

/* The first `rows` and `columns` of the stage to the other side of the diagonal of a dense matrix. */
template <typename E>
__device__ __forceinline__ void bdh_put_mirrored(const float *stage, E *to, int64_t pitch, int rows, int columns, bool wide) {
  constexpr int V = camox_tile_lanes<E>;
#pragma unroll 2
  for (int item = static_cast<int>(threadIdx.x); item < CAMOX_TILE * CAMOX_TILE / V; item += CAMOX_TILE_THREADS) {
    const int row = item / CAMOX_TILE * V, column = item % CAMOX_TILE;
    if (row >= rows || column >= columns) continue;
    float values[V];
#pragma unroll
    for (int i = 0; i < V; ++i) values[i] = stage[camox_tile_stage_at(row + i, column)];
    camox_tile_store(to + column * pitch + row, 1, values, rows - row, wide);
  }
}

/* The band's scores: for the forward (masked) w but for softmax, for the backward s as it is. Where the band is all rows and
   both sides of the diagonal are asked for, only one of them is computed. */
template <typename P>
__global__ void __launch_bounds__(CAMOX_TILE_THREADS, CAMOX_TILE_BLOCKS)
    bdh_scores_kernel(const __grid_constant__ bdh_plan plan, int64_t items) {
  CAMOX_TILE_SHARED(CAMOX_TILE_RING, ring, stage);
  const camox_bdh_params &p = plan.p;
  const bool masked = plan.masked && p.causal, mirrored = plan.band.rows == plan.chunk && !masked;
  BDH_FOR_TILES(item, items) {
    const bdh_place at = bdh_place_of(plan, item, plan.chunk);
    const bool above = at.column > at.row;
    if (at.rows <= 0 || at.column >= at.length || (above && (mirrored || (masked && !p.scores)))) continue;
    camox_tile_sums sums;
    camox_tile_clear(sums);
    if (!above || !masked) {
      const bdh_rotated<camox_tile_element<P>> r = bdh_rotated_of<camox_tile_element<P>>(plan, at);
      camox_tile_multiply<P, false, false>(sums, ring, r, at.row, r, at.column, {0, p.dim}, at.row == at.column);
    }
    const bool on_diagonal = masked && at.row == at.column;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      float &sum = sums[i / 16][i / 4 % 4][i % 4];
      sum = on_diagonal && camox_tile_column(i / 4 % 4, i) >= camox_tile_row(i / 16, i % 4) ? 0.0f : sum * plan.scale;
    }
    camox_tile_stage(stage, sums);
    float *const scores = bdh_scores_of(plan, at.slot, at.sequence);
    const int columns = bdh_columns_of(at, at.length);
    camox_tile_put(stage, scores + (at.row - plan.band.first_row) * plan.chunk + at.column, plan.chunk, 1, at.rows, columns,
                   plan.wide_scores);
    if (mirrored && at.column < at.row)
      bdh_put_mirrored(stage, scores + at.column * plan.chunk + at.row, plan.chunk, at.rows, columns, plan.wide_scores);
  }
}

/* A score of a sum of products, of a single tile. */
__device__ __forceinline__ float bdh_tile_score(const bdh_plan &plan, float sum, int row, int column) {
  return plan.masked && plan.p.causal && column >= row ? 0.0f : sum * plan.scale;
}

/* The same of heads, or chunks, of a single tile, of which there are often fewer than a GPU has room for: a block sums over a
   part of the columns of q, and both halves of its threads over half of the part. Several parts go to scratch. */
template <typename P>
__global__ void __launch_bounds__(BDH_HALVES *CAMOX_TILE_THREADS, CAMOX_CUDA_ARCH == 750 ? 1 : 2)
    bdh_tile_scores_kernel(const __grid_constant__ bdh_plan plan, int64_t items) {
  __shared__ camox_tile_ring<CAMOX_TILE_RING, 1> rings[BDH_HALVES];
  float *const stage = reinterpret_cast<float *>(rings);
  const int half = static_cast<int>(threadIdx.x) / CAMOX_TILE_THREADS;
  const int64_t columns = plan.part_columns / BDH_HALVES;
  const bool whole = plan.parts == 1;
  BDH_FOR_TILES(item, items) {
    int64_t part;
    const bdh_place at = bdh_chunk_of(plan, camox_divide(item, plan.parts, &part));
    const bdh_rotated<camox_tile_element<P>> r = bdh_rotated_of<camox_tile_element<P>>(plan, at);
    const int64_t first = part * plan.part_columns + half * columns;
    camox_tile_sums sums;
    camox_tile_clear(sums);
    camox_tile_multiply<P, false, false>(sums, rings[half], r, 0, r, 0, {first, first + columns});
    __syncthreads();
    if (half > 0) camox_tile_to_stage(stage, sums);
    __syncthreads();
    if (half == 0) {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        float &sum = sums[i / 16][i / 4 % 4][i % 4];
        sum += stage[camox_tile_stage_of(i / 2 * 2) + i % 2];
        if (whole) sum = bdh_tile_score(plan, sum, camox_tile_row(i / 16, i % 4), camox_tile_column(i / 4 % 4, i));
      }
      camox_tile_to_stage(stage, sums);
    }
    __syncthreads();
    const int tokens = static_cast<int>(at.length);
    float *const to = whole ? bdh_scores_of(plan, at.slot, at.sequence) : plan.part_scores + item * CAMOX_TILE_STAGE;
    camox_tile_put<BDH_HALVES * CAMOX_TILE_THREADS>(stage, to, whole ? plan.chunk : CAMOX_TILE, 1, tokens, tokens,
                                                    !whole || plan.wide_scores);
  }
}

/* Scores of single tiles whose parts are in scratch, added up in order, an element a thread. */
__global__ void __launch_bounds__(CAMOX_TILE_THREADS)
    bdh_part_scores_kernel(const __grid_constant__ bdh_plan plan, int64_t items) {
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * CAMOX_TILE_THREADS + threadIdx.x; item < items;
       item += static_cast<int64_t>(gridDim.x) * CAMOX_TILE_THREADS) {
    int64_t row, column;
    const bdh_place at = bdh_chunk_of(plan, camox_divide(camox_divide(item, plan.chunk, &column), plan.chunk, &row));
    if (row >= at.length || column >= at.length) continue;
    const float *const parts = plan.part_scores + at.slot * plan.parts * CAMOX_TILE_STAGE + row * CAMOX_TILE + column;
    float sum = 0.0f;
#pragma unroll 4
    for (int64_t part = 0; part < plan.parts; ++part) sum += __ldg(parts + part * CAMOX_TILE_STAGE);
    bdh_scores_of(plan, at.slot, at.sequence)[row * plan.chunk + column] =
        bdh_tile_score(plan, sum, static_cast<int>(row), static_cast<int>(column));
  }
}

/* out of heads of at most 64 tokens, and their scores where they are saved; half types without softmax. A block has two heads,
   whose angles are the same, and 4 warps for each.

     memory --cp.async--> a ring of 3 stages: 64 columns of [q][q of the other head][cosines][sines]
            step i + 2    step i: each warp rotates 16 columns of its head in registers, and adds up s = r r^T
     then   s of the 4 warps added up in their order -> w, 64 x 64 in shared memory -> scores; and 16 rows of out = w v by each

     The terms of a sum may come in any order, if both operands have the same: a lane takes 4 adjacent columns of a row, two
     pairs, as its two words of a fragment. The words of 8 rows are those of 8 columns too. Of s a warp computes the 20 of 32
     blocks of 16 x 8 that reach the diagonal or lie below it. */
template <typename T>
__global__ void __launch_bounds__(BDH_SHORT_HEADS *CAMOX_TILE_THREADS, 1)
    bdh_short_kernel(const __grid_constant__ bdh_plan plan, int64_t items) {
  if constexpr (CAMOX_CUDA_ARCH >= 800) {
    constexpr unsigned blocks = 20, tiles_of_stage = BDH_SHORT_HEADS + 2;
    CAMOX_DYNAMIC_SHARED(uint32_t, shared);
    const camox_bdh_params &p = plan.p;
    const unsigned head = threadIdx.x / CAMOX_TILE_THREADS, part = threadIdx.x / CAMOX_WARP % 4,
                   lane = threadIdx.x % CAMOX_WARP;
    const unsigned g = lane / 4, t = lane % 4;
    /* pieces are permuted so that 4 rows of two of them are in different banks */
    const unsigned down = threadIdx.x / 8, to = down * 32 + (threadIdx.x % 8 ^ down % 4 * 2) * 4;
    const unsigned from = g * 32 + ((part * 2 + t / 2) ^ g % 4 * 2) * 4 + t % 2 * 2;
    BDH_FOR_TILES(item, items) {
      const int64_t slots = plan.band.sequences, slot = item * BDH_SHORT_HEADS;
      const bdh_place first = bdh_chunk_of(plan, slot), second = bdh_chunk_of(plan, slot + 1 < slots ? slot + 1 : slot);
      const bdh_place at = head == 0 ? first : second;
      const bdh_rotated<T> r = bdh_rotated_of<T>(plan, first);
      const T *const q[BDH_SHORT_HEADS] = {r.q.data, bdh_view<T>(p.q, second, p.dim, true).data};
      const auto begin = [&](unsigned stage, int64_t k) {
        uint32_t *const tile = shared + stage * tiles_of_stage * CAMOX_TILE_WORDS + to;
        const int64_t column = k + threadIdx.x % 8 * 8;
        if (k < p.dim) {
#pragma unroll
          for (unsigned below = 0; below < CAMOX_TILE; below += 32) {
            const unsigned row = down + below, place = below * 32;
            const int bytes = row < r.q.rows && column < p.dim ? 16 : 0;
            const int64_t angle = row * r.table_columns + column / 2;
            camox_cp_async_16(tile + place, q[0] + row * r.q.row + column, bytes);
            camox_cp_async_16(tile + place + CAMOX_TILE_WORDS, q[1] + row * r.q.row + column, bytes);
            camox_cp_async_16(tile + place + 2 * CAMOX_TILE_WORDS, r.cos + angle, bytes);
            camox_cp_async_16(tile + place + 3 * CAMOX_TILE_WORDS, r.sin + angle, bytes);
          }
        }
        camox_cp_async_commit();
      };
      float sums[blocks][4] = {};
      __syncthreads(); /* what shared memory held is no longer read */
#pragma unroll
      for (unsigned i = 0; i < BDH_SHORT_STAGES - 1; ++i) begin(i, i * CAMOX_TILE);
      unsigned stage = 0;
#pragma unroll 1
      for (int64_t k = 0; k < p.dim; k += CAMOX_TILE) {
        camox_cp_async_wait<BDH_SHORT_STAGES - 2>();
        __syncthreads(); /* all pieces of this step have landed, and the stage of the step before is free again */
        begin(stage == 0 ? BDH_SHORT_STAGES - 1 : stage - 1, k + (BDH_SHORT_STAGES - 1) * CAMOX_TILE);
        const uint32_t *const tile = shared + stage * tiles_of_stage * CAMOX_TILE_WORDS + from;
        uint32_t words[8][2]; /* of rows 8 i + g */
#pragma unroll
        for (unsigned i = 0; i < 8; ++i) {
          T values[4];
          float cosines[2], sines[2];
          camox_load_shared(values, reinterpret_cast<const T *>(tile + head * CAMOX_TILE_WORDS + i * 256));
          camox_load_shared(cosines, reinterpret_cast<const float *>(tile + 2 * CAMOX_TILE_WORDS + i * 256));
          camox_load_shared(sines, reinterpret_cast<const float *>(tile + 3 * CAMOX_TILE_WORDS + i * 256));
          r.template rotate<2>(values, cosines, sines);
          __builtin_memcpy(words[i], static_cast<const void *>(values), sizeof words[i]);
        }
#pragma unroll
        for (unsigned m = 0; m < 4; ++m) {
          const uint32_t rows[4] = {words[2 * m][0], words[2 * m + 1][0], words[2 * m][1], words[2 * m + 1][1]};
#pragma unroll
          for (unsigned n = 0; n < 2 * m + 2; ++n) camox_mma_m16n8k16<T>(sums[m * (m + 1) + n], rows, words[n]);
        }
        stage = stage == BDH_SHORT_STAGES - 1 ? 0 : stage + 1;
      }

      /* s of the four warps of a head */
      float *const parts = reinterpret_cast<float *>(shared) + head * 4 * blocks * 128 + lane * 4;
      __syncthreads(); /* the last step is no longer read */
#pragma unroll
      for (unsigned i = 0; i < blocks; ++i) camox_store_shared(parts + (part * blocks + i) * 128, sums[i]);
      __syncthreads();
      float own[blocks / 4][4] = {}; /* of block 4 i + part */
#pragma unroll
      for (unsigned i = 0; i < blocks / 4; ++i) {
#pragma unroll
        for (unsigned other = 0; other < 4; ++other) {
          float of_other[4];
          camox_load_shared(of_other, parts + (other * blocks + 4 * i + part) * 128);
#pragma unroll
          for (unsigned e = 0; e < 4; ++e) own[i][e] += of_other[e];
        }
      }
      __syncthreads();

      /* w on both sides of the diagonal, while v lands */
      float *const w = reinterpret_cast<float *>(shared) + head * CAMOX_TILE_STAGE;
      const camox_tile_matrix<T> v = bdh_view<T>(p.v, at, p.value_dim, true);
      const bool same = bdh_view<T>(p.v, first, p.value_dim, true).data == v.data; /* the first head copies for both */
      uint32_t *const v_tiles =
          shared + BDH_SHORT_HEADS * CAMOX_TILE_STAGE + (same ? 0 : head * BDH_SHORT_TILES * CAMOX_TILE_WORDS);
      if (head == 0 || !same)
        for (int column = 0; column < p.value_dim; column += CAMOX_TILE)
          camox_tile_copy(v_tiles + column / CAMOX_TILE * CAMOX_TILE_WORDS, v, 0, column);
      camox_cp_async_commit();
#pragma unroll
      for (unsigned i = 0; i < blocks / 4; ++i) {
        const unsigned block = 4 * i + part, m = block < 2 ? 0 : block < 6 ? 1 : block < 12 ? 2 : 3, n = block - m * (m + 1);
#pragma unroll
        for (unsigned e = 0; e < 4; ++e) {
          const int row = static_cast<int>(m * 16 + e / 2 * 8 + g), column = static_cast<int>(n * 8 + t * 2 + e % 2);
          const float weight = own[i][e] * plan.scale;
          if (column < row) w[camox_tile_stage_at(column, row)] = p.causal ? 0.0f : weight;
          if (column <= row) w[camox_tile_stage_at(row, column)] = p.causal && column == row ? 0.0f : weight;
        }
      }
      __syncthreads();
      const int tokens = static_cast<int>(at.length);
      if (p.scores) {
        for (unsigned i = 0; i < BDH_SHORT_HEADS && slot + i < slots; ++i)
          camox_tile_put<BDH_SHORT_HEADS * CAMOX_TILE_THREADS>(
              reinterpret_cast<float *>(shared) + i * CAMOX_TILE_STAGE,
              bdh_scores_of(plan, slot + i, plan.band.first_sequence + slot + i), plan.chunk, 1, tokens, tokens,
              plan.wide_scores);
      }
      uint32_t weights[4][4]; /* fragments of 16 rows of w, 16 terms each */
      const int row = static_cast<int>(part * 16 + g);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float pair[2];
          T rounded[2];
          camox_load_shared(pair, w + camox_tile_stage_at(row + i % 2 * 8, static_cast<int>(k * 16 + i / 2 * 8 + t * 2)));
          camox_round(rounded, pair);
          __builtin_memcpy(&weights[k][i], static_cast<const void *>(rounded), 4);
        }
      }
      camox_cp_async_wait<0>();
      __syncthreads(); /* v has landed, and of w a warp uses 16 rows for out from here on */
#pragma unroll 1
      for (int column = 0; column < p.value_dim; column += CAMOX_TILE) {
        const uint32_t *const tile = v_tiles + column / CAMOX_TILE * CAMOX_TILE_WORDS;
        float out[8][4] = {};
#pragma unroll
        for (unsigned n = 0; n < 8; n += 2) {
          const camox_tile_fragments<T, true, false> of_v(tile, lane, n * 8);
#pragma unroll
          for (unsigned k = 0; k < 4; ++k) {
            uint32_t columns[4];
            of_v.load(columns, k);
            const uint32_t left[2] = {columns[0], columns[1]}, right[2] = {columns[2], columns[3]};
            camox_mma_m16n8k16<T>(out[n], weights[k], left);
            camox_mma_m16n8k16<T>(out[n + 1], weights[k], right);
          }
        }
#ifdef CAMOX_BREAK_BDH
        out[0][0] += 1e-3f;
#endif
#pragma unroll
        for (int n = 0; n < 8; ++n) {
#pragma unroll
          for (int e = 0; e < 4; e += 2) {
            const float pair[2] = {out[n][e], out[n][e + 1]};
            camox_store_shared(w + camox_tile_stage_at(row + e / 2 * 8, static_cast<int>(n * 8 + t * 2)), pair);
          }
        }
        __syncwarp();
#pragma unroll
        for (unsigned i = lane; i < 16 * 8; i += CAMOX_WARP) {
          const int token = static_cast<int>(part * 16 + i / 8), beside = static_cast<int>(i % 8 * 8);
          float values[8];
          camox_tile_from_stage(values, w, token, beside);
          if (token < tokens && slot + head < slots)
            camox_tile_store(bdh_at<T>(p.out, at) + token * p.out.stride[2] + (column + beside) * p.out.stride[3],
                             p.out.stride[3], values, p.value_dim - column - beside, plan.wide_out);
        }
        __syncwarp(); /* the next columns overwrite these rows */
      }
    }
  }
}

/* The band's scores become their softmax, a warp a row. */
__global__ void __launch_bounds__(CAMOX_TILE_THREADS) bdh_softmax_kernel(const __grid_constant__ bdh_plan plan, int64_t items) {
  const camox_bdh_params &p = plan.p;
  const int lane = static_cast<int>(threadIdx.x) % CAMOX_WARP, warp = static_cast<int>(threadIdx.x) / CAMOX_WARP;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * (CAMOX_TILE_THREADS / CAMOX_WARP) + warp; item < items;
       item += static_cast<int64_t>(gridDim.x) * (CAMOX_TILE_THREADS / CAMOX_WARP)) {
    int64_t row;
    const int64_t sequence = camox_divide(item, plan.band.rows, &row);
    float *const scores = plan.scores + item * p.length;
    row += plan.band.first_row;
    const int64_t keys = p.causal ? row : p.length;
    float most = -INFINITY;
    for (int64_t j = lane; j < keys; j += CAMOX_WARP) most = fmaxf(most, scores[j]);
    most = camox_warp_max(most);
    float sum = 0.0f;
    for (int64_t j = lane; j < keys; j += CAMOX_WARP) sum += expf(scores[j] - most);
    sum = camox_warp_sum(sum);
    const float factor = 1.0f / sum;
    for (int64_t j = lane; j < keys; j += CAMOX_WARP) scores[j] = expf(scores[j] - most) * factor;
    if (p.logsumexp && lane == 0)
      static_cast<float *>(p.logsumexp)[(plan.band.first_sequence + sequence) * p.length + row] =
          keys > 0 ? most + logf(sum) : -INFINITY;
  }
}

template <typename T>
__device__ __forceinline__ void bdh_put_out(float *stage, camox_tile_sums &sums, const bdh_plan &plan, const bdh_place &at) {
  const camox_view4 &out = plan.p.out;
#ifdef CAMOX_BREAK_BDH
  sums[0][0][0] += 1e-3f;
#endif
  camox_tile_stage(stage, sums);
  camox_tile_put(stage, bdh_at<T>(out, at), out.stride[2], out.stride[3], at.rows, bdh_columns_of(at, plan.p.value_dim),
                 plan.wide_out);
}

/* Of one head among several that share v: to p.partial. */
template <typename T>
__device__ __forceinline__ void bdh_put_grad_v(float *stage, const camox_tile_sums &sums, const bdh_plan &plan,
                                               const bdh_place &at) {
  const camox_bdh_params &p = plan.p;
  camox_tile_stage(stage, sums);
  const int columns = bdh_columns_of(at, p.value_dim);
  if (p.value_heads != p.heads && !plan.adds_heads) {
    float *const partial =
        static_cast<float *>(p.partial) + (at.sequence * p.length + at.first + at.row) * p.value_dim + at.column;
    camox_tile_put(stage, partial, p.value_dim, 1, at.rows, columns, plan.wide_partial);
  } else {
    camox_tile_put(stage, bdh_at<T>(p.grad_v, at), p.grad_v.stride[2], p.grad_v.stride[3], at.rows, columns, plan.wide_grad_v);
  }
}

/* sums = scale r z of the chunk's state: what the other chunks, or all tokens, give a tile of out, or of the gradient of v. */
template <typename P>
__device__ __forceinline__ void bdh_add_state(camox_tile_sums &sums, camox_tile_ring<CAMOX_TILE_RING> &ring,
                                              const bdh_plan &plan, const bdh_place &at, int of_grad) {
  using T = camox_tile_element<P>;
  camox_tile_multiply<P, false, true>(sums, ring, bdh_rotated_of<T>(plan, at), at.row, bdh_state_of<T>(plan, at, of_grad),
                                      at.column, {0, plan.p.dim});
#pragma unroll
  for (int i = 0; i < 32; ++i) sums[i / 16][i / 4 % 4][i % 4] *= plan.scale;
}

/* out = w v, or of the state form scale r (r^T v), or their sum. */
template <typename P>
__global__ void __launch_bounds__(CAMOX_TILE_THREADS, bdh_blocks<P>)
    bdh_values_kernel(const __grid_constant__ bdh_plan plan, int64_t items) {
  using T = camox_tile_element<P>;
  CAMOX_TILE_SHARED(CAMOX_TILE_RING, ring, stage);
  const camox_bdh_params &p = plan.p;
  BDH_FOR_TILES(item, items) {
    const bdh_place at = bdh_place_of(plan, item, p.value_dim);
    if (at.rows <= 0) continue;
    camox_tile_sums sums;
    camox_tile_clear(sums);
    if (plan.has_state) bdh_add_state<P>(sums, ring, plan, at, 0);
    if (plan.has_scores) {
      const auto w = bdh_ready_weights<T>(plan, at, bdh_scores_of(plan, at.slot, at.sequence), plan.band.first_row,
                                          min(plan.band.rows, at.length));
      const camox_tile_matrix<T> v = bdh_view<T>(p.v, at, p.value_dim, plan.wide_v);
      const int64_t end = p.causal ? min(at.length, at.row + CAMOX_TILE) : at.length;
      camox_tile_multiply<P, false, true>(sums, ring, w, at.row, v, at.column, {0, end});
    }
    bdh_put_out<T>(stage, sums, plan, at);
  }
}

/* r^T v of the launch's heads and chunks, or r^T g. */
template <typename P>
__global__ void __launch_bounds__(CAMOX_TILE_THREADS, CAMOX_TILE_BLOCKS)
    bdh_state_kernel(const __grid_constant__ bdh_plan plan, int of_grad, int64_t items) {
  using T = camox_tile_element<P>;
  CAMOX_TILE_SHARED(CAMOX_TILE_RING, ring, stage);
  const camox_bdh_params &p = plan.p;
  BDH_FOR_TILES(item, items) {
    const bdh_place at = bdh_place_of(plan, item, p.value_dim, 0, p.dim);
    const camox_tile_matrix<T> v = bdh_view<T>(of_grad ? p.grad : p.v, at, p.value_dim, of_grad ? plan.wide_grad : plan.wide_v);
    camox_tile_sums sums;
    camox_tile_clear(sums);
    camox_tile_multiply<P, true, true>(sums, ring, bdh_rotated_of<T>(plan, at), at.row, v, at.column, {0, at.length});
    camox_tile_stage(stage, sums);
    float *const state = plan.state[of_grad] + at.slot * p.dim * p.value_dim;
    camox_tile_put(stage, state + at.row * p.value_dim + at.column, p.value_dim, 1, at.rows, bdh_columns_of(at, p.value_dim),
                   plan.wide_state);
  }
}

/* The states of every head's chunks become the sum of those before, or with of_grad after, them, in that order. A thread has V
   neighbouring elements. */
template <int V>
__global__ void __launch_bounds__(CAMOX_TILE_THREADS)
    bdh_scan_kernel(const __grid_constant__ bdh_plan plan, int of_grad, int64_t items) {
  const int64_t size = plan.p.dim * plan.p.value_dim, chunks = plan.band.chunks;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * CAMOX_TILE_THREADS + threadIdx.x; item < items;
       item += static_cast<int64_t>(gridDim.x) * CAMOX_TILE_THREADS) {
    int64_t place;
    const int64_t sequence = camox_divide(item * V, size, &place);
    float *state = plan.state[of_grad] + sequence * chunks * size + place;
    int64_t step = size;
    if (of_grad) state += (chunks - 1) * size, step = -size;
    float sum[V] = {};
    if (plan.carried[of_grad]) camox_load<V>(sum, plan.carried[of_grad] + place);
#pragma unroll 4
    for (int64_t chunk = 0; chunk < chunks; ++chunk, state += step) {
      float own[V];
      camox_get_floats<V>(own, state);
      camox_store<V>(state, sum);
#pragma unroll
      for (int i = 0; i < V; ++i) sum[i] += own[i];
    }
  }
}

template <typename T>
__device__ __forceinline__ T *bdh_large_rotated(const bdh_plan &plan, int64_t slot) {
  return static_cast<T *>(plan.rotated) + slot * plan.p.length * plan.rotated_dim;
}

/* z, or dz, of a head: the backward has both in a row, so that for grad_q they are one matrix. */
template <typename T>
__device__ __forceinline__ T *bdh_large_state(const bdh_plan &plan, int64_t slot, bool of_grad) {
  return reinterpret_cast<T *>(plan.state[0]) + slot * plan.rotated_dim * plan.state_pitch + (of_grad ? plan.state_columns : 0);
}

/* r as the first operand of r^T v: 32 tokens of 64 columns of two heads, whose angles are the same, or of 128 columns of one. A
   thread copies a piece of 8 columns and the one of the other head, or 64 columns on, rotates both and stores them to r too.
   Behind the tiles of a stage lie its angles, 4 cosines and 4 sines; those of 64 columns on, and of tables with an angle for
   each element, are loaded when they are needed. */
template <typename T>
struct bdh_large_rows {
  static constexpr bool ACROSS = true;
  static constexpr int stages = 3, more_words = 2 * CAMOX_LARGE_THREADS * 4;

  bdh_rotated<T> r;
  const T *from[2];
  T *to[2];                       /* NULL where nothing is stored */
  int64_t column, angle, columns; /* columns: of r with the padding */
  int bytes[2];
  bool paired;

  static __device__ __forceinline__ unsigned token(void) { return threadIdx.x / 8; }
  __device__ __forceinline__ bool per_pair(void) const { return r.usual(); }
  static __device__ __forceinline__ unsigned place(unsigned i) {
    return camox_large_place<CAMOX_LARGE_ROWS, true>(token(), threadIdx.x % 8 + 8 * i) * 4;
  }

  /* stores: of the blocks that make the same tile of r this one stores it. */
  __device__ __forceinline__ bdh_large_rows(const bdh_plan &plan, const bdh_place &at, bool stores)
      : r(bdh_rotated_of<T>(plan, at)), columns(plan.rotated_dim), paired(plan.paired) {
    column = at.column + threadIdx.x % 8 * 8;
    angle = token() * r.table_columns + column / 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t own = column + (paired ? 0 : i * CAMOX_TILE), head = paired ? i : 0;
      from[i] = r.q.data + head * plan.p.q.stride[1] + token() * r.q.row + own;
      bytes[i] = own < r.q.columns ? 16 : 0;
      to[i] = stores && own < columns ? bdh_large_rotated<T>(plan, at.slot + head) + token() * columns + own : nullptr;
    }
  }

  __device__ __forceinline__ void begin(uint32_t *tile, uint32_t *angles, int64_t k) {
    const bool exists = k + token() < r.q.rows, has_angles = exists && bytes[0] > 0 && per_pair();
#pragma unroll
    for (unsigned i = 0; i < 2; ++i) camox_cp_async_16(tile + place(i), from[i] + k * r.q.row, exists ? bytes[i] : 0);
    const int64_t from_angle = angle + k * r.table_columns;
    camox_cp_async_16(angles + threadIdx.x * 4, r.cos + from_angle, has_angles ? 16 : 0);
    camox_cp_async_16(angles + (CAMOX_LARGE_THREADS + threadIdx.x) * 4, r.sin + from_angle, has_angles ? 16 : 0);
  }

  __device__ __forceinline__ void complete(uint32_t *tile, const uint32_t *angles, int64_t k) {
    const bool exists = k + token() < r.q.rows;
    float cosines[4], sines[4];
    camox_load_shared(cosines, reinterpret_cast<const float *>(angles + threadIdx.x * 4));
    camox_load_shared(sines, reinterpret_cast<const float *>(angles + (CAMOX_LARGE_THREADS + threadIdx.x) * 4));
#pragma unroll
    for (unsigned i = 0; i < 2; ++i) {
      T values[8];
      T *const at = reinterpret_cast<T *>(tile + place(i));
      camox_load_shared(values, at);
      if (per_pair() && (i == 0 || paired)) {
        r.template rotate<2>(values, cosines, sines);
      } else {
        r.make(values, k + token(), column + (paired ? 0 : i * CAMOX_TILE));
      }
      camox_store_shared(at, values);
      if (to[i] && exists) camox_store(to[i] + k * columns, values);
    }
  }
};

/* r from scratch as the first operand of r^T g. */
template <typename T>
struct bdh_large_stored_rows : camox_large_copy<T, CAMOX_LARGE_ROWS, true> {
  __device__ __forceinline__ bdh_large_stored_rows(const bdh_plan &plan, const bdh_place &at, bool)
      : camox_large_copy<T, CAMOX_LARGE_ROWS, true>(
            {bdh_large_rotated<T>(plan, at.slot), plan.rotated_dim, plan.p.length, plan.rotated_dim}, at.column) {}
};

template <typename T, bool OF_GRAD>
using bdh_large_state_rows = typename camox_select<OF_GRAD, bdh_large_stored_rows<T>, bdh_large_rows<T>>::type;

/* z = r^T v of the band's heads, rounded to the element type, and r on the way; or OF_GRAD dz = r^T g of that r. */
template <typename T, int COLUMNS, bool OF_GRAD>
__global__ void __launch_bounds__(CAMOX_LARGE_THREADS, 1)
    bdh_large_state_kernel(const __grid_constant__ bdh_plan plan, int64_t items) {
  if constexpr (CAMOX_CUDA_ARCH >= 800) {
    CAMOX_DYNAMIC_SHARED(uint32_t, shared);
    const camox_bdh_params &p = plan.p;
    /* heads of the block's rows; columns of r of each: heads share v, but not g */
    const int heads = plan.paired && !OF_GRAD ? 2 : 1, span = CAMOX_LARGE_ROWS / heads;
    BDH_FOR_TILES(item, items) {
      int64_t tile, column;
      const int64_t remaining = camox_divide(item, camox_ceil_div(p.value_dim, COLUMNS), &column);
      const int64_t slot = camox_divide(remaining, camox_ceil_div(plan.rotated_dim, span), &tile) * heads;
      bdh_place at = bdh_chunk_of(plan, slot);
      at.column = tile * span;
      const camox_tile_matrix<T> v = bdh_view<T>(OF_GRAD ? p.grad : p.v, at, p.value_dim, true);
      bdh_large_state_rows<T, OF_GRAD> r(plan, at, column == 0);
      column *= COLUMNS;
      camox_large_copy<T, COLUMNS, true> values({v.data, v.row, v.rows, v.columns}, column);
      camox_large_sums<COLUMNS> sums;
      camox_large_multiply<T, COLUMNS>(sums, shared, r, values, p.length);
      camox_large_put<T, COLUMNS>(
          shared, sums, 1.0f, 1, camox_at_most<COLUMNS>(plan.state_columns - column), true, [&](int row) -> T * {
            const int64_t of_head = at.column + row % span;
            if (of_head >= plan.rotated_dim) return nullptr;
            return bdh_large_state<T>(plan, at.slot + row / span, OF_GRAD) + of_head * plan.state_pitch + column;
          });
    }
  }
}

/* out = scale r z of the band's heads; or OF_GRAD their gradients of v, scale r dz: of heads that share v to p.partial. */
template <typename T, int COLUMNS, bool OF_GRAD>
__global__ void __launch_bounds__(CAMOX_LARGE_THREADS, 1)
    bdh_large_out_kernel(const __grid_constant__ bdh_plan plan, int64_t items) {
  if constexpr (CAMOX_CUDA_ARCH >= 800) {
    CAMOX_DYNAMIC_SHARED(uint32_t, shared);
    const camox_bdh_params &p = plan.p;
    BDH_FOR_TILES(item, items) {
      int64_t row, column;
      const int64_t remaining = camox_divide(item, camox_ceil_div(p.value_dim, COLUMNS), &column);
      bdh_place at = bdh_chunk_of(plan, camox_divide(remaining, camox_ceil_div(p.length, CAMOX_LARGE_ROWS), &row));
      at.row = row * CAMOX_LARGE_ROWS, at.column = column * COLUMNS;
      camox_large_copy<T, CAMOX_LARGE_ROWS, false> r(
          {bdh_large_rotated<T>(plan, at.slot), plan.rotated_dim, p.length, plan.rotated_dim}, at.row);
      camox_large_copy<T, COLUMNS, true> z(
          {bdh_large_state<T>(plan, at.slot, OF_GRAD), plan.state_pitch, plan.rotated_dim, p.value_dim}, at.column);
      camox_large_sums<COLUMNS> sums;
      camox_large_multiply<T, COLUMNS>(sums, shared, r, z, plan.rotated_dim);
#ifdef CAMOX_BREAK_BDH
      sums[0][0][0] += 1e-3f;
#endif
      const camox_view4 &view = OF_GRAD ? p.grad_v : p.out;
      const int columns = camox_at_most<COLUMNS>(p.value_dim - at.column);
      if (OF_GRAD && p.value_heads != p.heads) {
        float *const partial = static_cast<float *>(p.partial) + at.sequence * p.length * p.value_dim + at.column;
        camox_large_put_floats<COLUMNS>(sums, plan.scale, columns, plan.wide_partial, [&](int below) -> float * {
          return at.row + below < p.length ? partial + (at.row + below) * p.value_dim : nullptr;
        });
      } else {
        T *const out = bdh_at<T>(view, at);
        camox_large_put<T, COLUMNS>(
            shared, sums, plan.scale, view.stride[3], columns, OF_GRAD ? plan.wide_grad_v : plan.wide_out,
            [&](int below) -> T * { return at.row + below < p.length ? out + below * view.stride[2] : nullptr; });
      }
    }
  }
}

/* [g v] of a head as the first operand of grad_q: k is along the rows of g, then of v, each with zeros up to a whole step. */
template <typename T>
struct bdh_large_grad_rows {
  typedef camox_large_copy<T, CAMOX_LARGE_ROWS, false> copy;
  static constexpr bool ACROSS = false;
  static constexpr int stages = copy::stages, more_words = 0;

  copy grad, v;
  int64_t first_of_v;

  static __device__ __forceinline__ copy copy_of(const bdh_plan &plan, const bdh_place &at, const camox_view4 &view) {
    const camox_tile_matrix<T> matrix = bdh_view<T>(view, at, plan.p.value_dim, true);
    return copy({matrix.data, matrix.row, matrix.rows, matrix.columns}, at.row);
  }

  __device__ __forceinline__ bdh_large_grad_rows(const bdh_plan &plan, const bdh_place &at)
      : grad(copy_of(plan, at, plan.p.grad)), v(copy_of(plan, at, plan.p.v)), first_of_v(plan.state_columns) {}

  __device__ __forceinline__ void begin(uint32_t *tile, uint32_t *more, int64_t k) {
    if (k < first_of_v)
      grad.begin(tile, more, k);
    else
      v.begin(tile, more, k - first_of_v);
  }

  __device__ __forceinline__ void complete(uint32_t *, const uint32_t *, int64_t) {}
};

/* The stage's d r, times scale, to grad_q: rotated back and 0 where relu was, unless `grad_of_rotated`. OF elements have one
   angle: 2 where rows of q, grad_q and the angles are read and written 16 bytes at a time, several of them at once. */
template <typename T, int OF>
__device__ __forceinline__ void bdh_large_put_grad_q(const float *stage, const bdh_plan &plan, const bdh_place &at,
                                                     const bdh_rotated<T> &r) {
  constexpr int V = camox_tile_lanes<T>, across = BDH_GRAD_Q_COLUMNS / V, step = CAMOX_LARGE_THREADS / across;
  constexpr int at_once = OF == 2 ? BDH_GRAD_Q_AT_ONCE : 1;
  const camox_bdh_params &p = plan.p;
  T *const to = bdh_at<T>(p.grad_q, at);
  const int rows = camox_at_most<CAMOX_LARGE_ROWS>(p.length - at.row);
  const int column = static_cast<int>(threadIdx.x) % across * V;
  const bool rotated = OF == 1 && p.grad_of_rotated;
  if (column >= p.dim - at.column) return;
#pragma unroll 1
  for (int first = static_cast<int>(threadIdx.x) / across; first < rows; first += at_once * step) {
    typename bdh_rotated<T>::template backward_piece<OF> own[at_once];
#pragma unroll
    for (int i = 0; i < at_once; ++i)
      if (!rotated) r.load(own[i], at.row + min(first + i * step, rows - 1), at.column + column);
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      const int row = min(first + i * step, rows - 1);
      float grad[V];
#pragma unroll
      for (int j = 0; j < V; j += 4) {
        float part[4];
        camox_load_shared(part, stage + camox_large_stage_at(row, column + j));
#pragma unroll
        for (int k = 0; k < 4; ++k) grad[j + k] = plan.scale * part[k];
      }
#ifdef CAMOX_BREAK_BDH
      grad[0] += 1e-3f;
#endif
      if (!rotated) r.rotate_back(grad, own[i]);
      if (first + i * step < rows)
        camox_tile_store(to + row * p.grad_q.stride[2] + column * p.grad_q.stride[3], p.grad_q.stride[3], grad, V,
                         OF == 2 || plan.wide_grad_q);
    }
  }
}

/* d r = scale [g v] [z dz]^T of the band's heads, which becomes grad_q on its way to memory.

       k -->       D        D                k -->       D        D
              +--------+--------+                   +--------+--------+
       128    |   g    |   v    |   x        128    |   z    |   dz   |   = 128 x 128 of d r --> shared memory, float32
     tokens   +--------+--------+       columns of  +--------+--------+              --scale, rotate back, relu--> grad_q
                                             r                                                                            */
template <typename T>
__global__ void __launch_bounds__(CAMOX_LARGE_THREADS, BDH_GRAD_Q_BLOCKS)
    bdh_large_grad_q_kernel(const __grid_constant__ bdh_plan plan, int64_t items) {
  if constexpr (CAMOX_CUDA_ARCH >= 800) {
    CAMOX_DYNAMIC_SHARED(uint32_t, shared);
    const camox_bdh_params &p = plan.p;
    BDH_FOR_TILES(item, items) {
      int64_t row, column;
      const int64_t remaining = camox_divide(item, camox_ceil_div(p.dim, BDH_GRAD_Q_COLUMNS), &column);
      bdh_place at = bdh_chunk_of(plan, camox_divide(remaining, camox_ceil_div(p.length, CAMOX_LARGE_ROWS), &row));
      at.row = row * CAMOX_LARGE_ROWS, at.column = column * BDH_GRAD_Q_COLUMNS;
      bdh_large_grad_rows<T> grads(plan, at);
      camox_large_copy<T, BDH_GRAD_Q_COLUMNS, false> states(
          {bdh_large_state<T>(plan, at.slot, false), plan.state_pitch, plan.rotated_dim, plan.state_pitch}, at.column);
      camox_large_sums<BDH_GRAD_Q_COLUMNS> sums;
      camox_large_multiply<T, BDH_GRAD_Q_COLUMNS>(sums, shared, grads, states, plan.state_pitch);
      float *const stage = reinterpret_cast<float *>(shared);
      camox_large_stage<BDH_GRAD_Q_COLUMNS>(stage, sums);
      const bdh_rotated<T> r = bdh_rotated_of<T>(plan, at);
      if (r.usual() && plan.wide_grad_q && !p.grad_of_rotated)
        bdh_large_put_grad_q<T, 2>(stage, plan, at, r);
      else
        bdh_large_put_grad_q<T, 1>(stage, plan, at, r);
    }
  }
}

/* ---- backward ---- */

/* delta[i] = sum_d g[i,d] out[i,d] of every head, a warp a row: where no launch has all scores of a row and of its mirror. */
template <typename T>
__global__ void __launch_bounds__(CAMOX_TILE_THREADS) bdh_delta_kernel(const __grid_constant__ bdh_plan plan, int64_t items) {
  const camox_bdh_params &p = plan.p;
  const int lane = static_cast<int>(threadIdx.x) % CAMOX_WARP, warp = static_cast<int>(threadIdx.x) / CAMOX_WARP;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * (CAMOX_TILE_THREADS / CAMOX_WARP) + warp; item < items;
       item += static_cast<int64_t>(gridDim.x) * (CAMOX_TILE_THREADS / CAMOX_WARP)) {
    int64_t row;
    bdh_place at = {};
    at.b = camox_divide(camox_divide(item, p.length, &row), p.heads, &at.h), at.length = p.length;
    const camox_tile_matrix<T> grad = bdh_view<T>(p.grad, at, p.value_dim, false);
    const camox_tile_matrix<T> out = bdh_view<T>(p.out, at, p.value_dim, false);
    float sum = 0.0f;
    for (int64_t d = lane; d < p.value_dim; d += CAMOX_WARP)
      sum = fmaf(camox_to_float(__ldg(grad.data + row * grad.row + d * grad.column)),
                 camox_to_float(__ldg(out.data + row * out.row + d * out.column)), sum);
    sum = camox_warp_sum(sum);
    if (lane == 0) plan.delta[item] = sum;
  }
}

/* w of a softmax from the scores that lie where `place` says. */
__device__ __forceinline__ float bdh_weight_of(const bdh_plan &plan, const bdh_place &at, const float *scores, int64_t query,
                                               int64_t key, int64_t place) {
  if (plan.weights) return __ldg(scores + query * plan.p.length + key);
  if (plan.p.causal && key >= query) return 0.0f;
  return expf(__ldg(scores + place) -
              __ldg(static_cast<const float *>(plan.p.logsumexp) + at.sequence * plan.p.length + query));
}

/* delta[i] = sum_j w[i,j] d w[i,j] of the band's rows, d w being the bits that pairs has too: where a softmax is nearly all in
   one score, d w - delta keeps its digits. */
template <typename P>
__global__ void __launch_bounds__(CAMOX_TILE_THREADS, CAMOX_TILE_BLOCKS)
    bdh_weighed_kernel(const __grid_constant__ bdh_plan plan, int64_t items) {
  using T = camox_tile_element<P>;
  CAMOX_TILE_SHARED(CAMOX_TILE_RING, ring, stage);
  const camox_bdh_params &p = plan.p;
  const int row = static_cast<int>(threadIdx.x) / 2, side = static_cast<int>(threadIdx.x) % 2;
  BDH_FOR_TILES(item, items) {
    const bdh_place at = bdh_place_of(plan, item, 1);
    const float *const scores = bdh_scores_of(plan, at.slot, at.sequence);
    const int64_t query = at.row + row, first = (query - plan.band.first_row) * p.length;
    const int64_t end = p.causal ? min(p.length, at.row + CAMOX_TILE) : p.length;
    float sum = 0.0f, lost = 0.0f; /* lost: what rounding took from sum: one of the terms is often far the largest */
    for (int64_t column = 0; column < end; column += CAMOX_TILE) {
      camox_tile_sums sums;
      camox_tile_clear(sums);
      camox_tile_multiply<P, false, false>(sums, ring, bdh_view<T>(p.grad, at, p.value_dim, plan.wide_grad), at.row,
                                           bdh_view<T>(p.v, at, p.value_dim, plan.wide_v), column, {0, p.value_dim});
      camox_tile_stage(stage, sums);
      const int columns = row < at.rows ? camox_at_most<CAMOX_TILE>(p.length - column) : 0;
#pragma unroll 4
      for (int i = side; i < columns; i += 2) {
        const float w = bdh_weight_of(plan, at, scores, query, column + i, first + column + i);
        const float term = w * stage[camox_tile_stage_at(row, i)], next = sum + term, added = next - sum;
        lost += (sum - (next - added)) + (term - added);
        sum = next;
      }
    }
    sum += __shfl_xor_sync(CAMOX_FULL_MASK, sum, 1) + (lost + __shfl_xor_sync(CAMOX_FULL_MASK, lost, 1));
    if (side == 0 && row < at.rows) plan.delta[at.sequence * p.length + query] = sum;
  }
}

/* The stage's d w become d s of a softmax. other: its rows are keys, its columns queries. `added` may be NULL. */
__device__ __forceinline__ void bdh_through_softmax(float *stage, const float *added, const bdh_plan &plan, const bdh_place &at,
                                                    bool other) {
  const camox_bdh_params &p = plan.p;
  const int64_t first = at.sequence * p.length;
  const float *const scores = bdh_scores_of(plan, at.slot, at.sequence);
  const int columns = bdh_columns_of(at, p.length);
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < CAMOX_TILE * CAMOX_TILE; i += CAMOX_TILE_THREADS) {
    const int row = i / CAMOX_TILE, column = i % CAMOX_TILE;
    if (row >= at.rows || column >= columns) continue;
    const int64_t query = other ? at.column + column : at.row + row, key = other ? at.row + row : at.column + column;
    const int64_t place = (at.row - plan.band.first_row + row) * p.length + at.column + column;
    const float w = bdh_weight_of(plan, at, scores, query, key, place);
    float &value = stage[camox_tile_stage_at(row, column)];
    value = w * (value - __ldg(plan.delta + first + query));
    if (added) value += added[camox_tile_stage_at(row, column)];
  }
  __syncthreads();
}

/* e[j,i] = d s[j,i] + d s[i,j] of the band's rows j. Of the two one is 0 where causal. */
template <typename P, bool SOFTMAX>
__global__ void __launch_bounds__(CAMOX_TILE_THREADS, CAMOX_TILE_BLOCKS)
    bdh_pairs_kernel(const __grid_constant__ bdh_plan plan, int64_t items) {
  using T = camox_tile_element<P>;
  CAMOX_TILE_SHARED(SOFTMAX ? 2 : CAMOX_TILE_RING, ring, stage); /* 2: a block has 48 KB */
  __shared__ __align__(16) float own[SOFTMAX ? CAMOX_TILE_STAGE : 1];
  const camox_bdh_params &p = plan.p;
  const bool mirrored = plan.band.rows == plan.chunk;
  BDH_FOR_TILES(item, items) {
    const bdh_place at = bdh_place_of(plan, item, plan.chunk);
    const bool above = at.column > at.row;
    if (at.rows <= 0 || at.column >= at.length || (mirrored && above)) continue;
    const camox_tile_matrix<T> g = bdh_view<T>(p.grad, at, p.value_dim, plan.wide_grad);
    const camox_tile_matrix<T> v = bdh_view<T>(p.v, at, p.value_dim, plan.wide_v);
    camox_tile_sums sums;
    camox_tile_clear(sums);
    if (!(p.causal && above)) camox_tile_multiply<P, false, false>(sums, ring, g, at.row, v, at.column, {0, p.value_dim});
    if (SOFTMAX && !p.causal) {
      camox_tile_stage(own, sums);
      bdh_through_softmax(own, nullptr, plan, at, false);
      camox_tile_clear(sums);
    }
    if (!p.causal || above) camox_tile_multiply<P, false, false>(sums, ring, v, at.row, g, at.column, {0, p.value_dim});
    camox_tile_stage(stage, sums);
    if (SOFTMAX) bdh_through_softmax(stage, p.causal ? nullptr : own, plan, at, !p.causal || above);
    if (p.causal && at.row == at.column) {
#pragma unroll 4
      for (int i = static_cast<int>(threadIdx.x); i < CAMOX_TILE * CAMOX_TILE; i += CAMOX_TILE_THREADS) {
        const int row = i / CAMOX_TILE, column = i % CAMOX_TILE;
        if (column >= row)
          stage[camox_tile_stage_at(row, column)] = column == row ? 0.0f : stage[camox_tile_stage_at(column, row)];
      }
      __syncthreads();
    }
    T *const to = static_cast<T *>(plan.pairs) + at.slot * plan.band.rows * plan.chunk;
    const int columns = bdh_columns_of(at, at.length);
    camox_tile_put(stage, to + (at.row - plan.band.first_row) * plan.chunk + at.column, plan.chunk, 1, at.rows, columns,
                   plan.wide_pairs);
    if (mirrored && at.column < at.row)
      bdh_put_mirrored(stage, to + at.column * plan.chunk + at.row, plan.chunk, at.rows, columns, plan.wide_pairs);
  }
}

/* d r = scale e r of the band's rows, or of the state form scale (g (r^T v)^T + v (r^T g)^T), or their sum; rotated back and 0
   where relu was, unless `grad_of_rotated`. A block has the same tile of plan.heads_per_block heads, and so have the blocks
   beside it: angles come from the caches. Three blocks of a multiprocessor are what the shared memory of sm_80 lets be; float32
   would take registers for two. */
template <typename P>
__global__ void __launch_bounds__(CAMOX_TILE_THREADS, CAMOX_CUDA_ARCH >= 800 ? 3 : CAMOX_TILE_BLOCKS)
    bdh_grad_q_kernel(const __grid_constant__ bdh_plan plan, int64_t items) {
  using T = camox_tile_element<P>;
  constexpr int V = camox_tile_lanes<T>, across = CAMOX_TILE / V;
  CAMOX_TILE_SHARED(CAMOX_TILE_RING, ring, stage);
  const camox_bdh_params &p = plan.p;
  const int64_t slots = plan.band.sequences * plan.band.chunks, groups = camox_ceil_div(slots, plan.heads_per_block);
  BDH_FOR_TILES(item, items) {
    int64_t group;
    const int64_t tile = camox_divide(item, groups, &group);
    const int64_t end = min(slots, (group + 1) * plan.heads_per_block);
    for (int64_t slot = group * plan.heads_per_block; slot < end; ++slot) {
      const bdh_place at = bdh_place_of(plan, slot * (items / groups) + tile, p.dim);
      if (at.rows <= 0) continue;
      const bdh_rotated<T> r = bdh_rotated_of<T>(plan, at);
      camox_tile_sums sums;
      camox_tile_clear(sums);
      if (plan.has_state) {
#pragma unroll 1
        for (int other = 0; other < 2; ++other) {
          const camox_tile_matrix<T> rows =
              bdh_view<T>(other ? p.v : p.grad, at, p.value_dim, other ? plan.wide_v : plan.wide_grad);
          camox_tile_multiply<P, false, false>(sums, ring, rows, at.row, bdh_state_of<T>(plan, at, other), at.column,
                                               {0, p.value_dim});
        }
      }
      if (plan.has_scores) {
        const camox_tile_matrix<T> pairs = {static_cast<const T *>(plan.pairs) + at.slot * plan.band.rows * plan.chunk,
                                            plan.chunk,
                                            1,
                                            min(plan.band.rows, at.length),
                                            at.length,
                                            plan.wide_pairs};
        camox_tile_multiply<P, false, true>(sums, ring, pairs, at.row - plan.band.first_row, r, at.column, {0, at.length});
      }
      camox_tile_stage(stage, sums);
      T *const to = bdh_at<T>(p.grad_q, at);
      const int columns = bdh_columns_of(at, p.dim);
#pragma unroll 1
      for (int place = static_cast<int>(threadIdx.x); place < CAMOX_TILE * across; place += CAMOX_TILE_THREADS) {
        const int row = place / across, column = place % across * V;
        if (row >= at.rows || column >= columns) continue;
        float grad[V];
        camox_tile_from_stage(grad, stage, row, column);
#pragma unroll
        for (int i = 0; i < V; ++i) grad[i] *= plan.scale;
#ifdef CAMOX_BREAK_BDH
        grad[0] += 1e-3f;
#endif
        if (!p.grad_of_rotated) {
          typename bdh_rotated<T>::template backward_piece<1> own;
          r.load(own, at.row + row, at.column + column);
          r.rotate_back(grad, own);
        }
        camox_tile_store(to + row * p.grad_q.stride[2] + column * p.grad_q.stride[3], p.grad_q.stride[3], grad,
                         columns - column, plan.wide_grad_q);
      }
    }
  }
}

/* w^T g of the band's rows, of each head, or of the state form scale r (r^T g), or their sum; adds_heads: of all heads of a
   batch element, in their order. WEIGHTS: plan.weights, which no state form has. */
template <typename P, bool WEIGHTS>
__global__ void __launch_bounds__(CAMOX_TILE_THREADS, WEIGHTS ? CAMOX_TILE_BLOCKS : bdh_blocks<P>)
    bdh_grad_v_kernel(const __grid_constant__ bdh_plan plan, int64_t items) {
  using T = camox_tile_element<P>;
  CAMOX_TILE_SHARED(CAMOX_TILE_RING, ring, stage);
  const camox_bdh_params &p = plan.p;
  BDH_FOR_TILES(item, items) {
    bdh_place at = bdh_place_of(plan, item, p.value_dim);
    if (at.rows <= 0) continue;
    const bool adds_heads = WEIGHTS && plan.adds_heads;
    if (adds_heads) at.b = at.sequence, at.h = 0, at.sequence *= p.heads;
    const int heads = adds_heads ? static_cast<int>(p.heads) : plan.has_scores ? 1 : 0;
    camox_tile_sums sums;
    camox_tile_clear(sums);
    if constexpr (!WEIGHTS)
      if (plan.has_state) bdh_add_state<P>(sums, ring, plan, at, 1);
#pragma unroll 1
    for (int h = 0; h < heads; ++h) {
      bdh_place of_head = at;
      of_head.h += h;
      const camox_tile_matrix<T> g = bdh_view<T>(p.grad, of_head, p.value_dim, plan.wide_grad);
      const float *const scores = bdh_scores_of(plan, at.slot, at.sequence + h);
      const camox_tile_range range = {p.causal ? at.row : 0, at.length};
      if constexpr (WEIGHTS) {
        camox_tile_multiply<P, true, true>(sums, ring, bdh_ready_weights<T>(plan, at, scores, 0, at.length), at.row, g,
                                           at.column, range);
      } else {
        const bdh_weights<T, true> w = {scores,
                                        plan.chunk,
                                        plan.band.first_row,
                                        min(plan.band.rows, at.length),
                                        at.length,
                                        p.softmax ? static_cast<const float *>(p.logsumexp) + at.sequence * p.length : nullptr,
                                        p.causal != 0,
                                        plan.wide_scores};
        camox_tile_multiply<P, false, true>(sums, ring, w, at.row, g, at.column, range);
      }
    }
    bdh_put_grad_v<T>(stage, sums, plan, at);
  }
}

/* The gradient of a v that the heads share: theirs added up in order. A thread has V neighbouring elements. */
template <typename T, int V>
__global__ void __launch_bounds__(CAMOX_TILE_THREADS)
    bdh_sum_kernel(const __grid_constant__ camox_bdh_params p, int64_t items) {
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * CAMOX_TILE_THREADS + threadIdx.x; item < items;
       item += static_cast<int64_t>(gridDim.x) * CAMOX_TILE_THREADS) {
    int64_t row, column;
    const int64_t b = camox_divide(camox_divide(item * V, p.value_dim, &column), p.length, &row);
    const int64_t head = p.length * p.value_dim;
    const float *from = static_cast<const float *>(p.partial) + b * p.heads * head + row * p.value_dim + column;
    float sum[V] = {};
#pragma unroll 4
    for (int64_t h = 0; h < p.heads; ++h, from += head) {
      float of_head[V];
      camox_load(of_head, from);
#pragma unroll
      for (int i = 0; i < V; ++i) sum[i] += of_head[i];
    }
    T rounded[V];
    camox_round(rounded, sum);
    T *const to =
        static_cast<T *>(p.grad_v.data) + b * p.grad_v.stride[0] + row * p.grad_v.stride[2] + column * p.grad_v.stride[3];
    if constexpr (V == 1)
      *to = rounded[0];
    else
      camox_store(to, rounded);
  }
}

/* ---- one token ---- */

/* A block has BDH_STEP_COLUMNS columns of one head's state; its warps share the rows. */
template <typename T>
__global__ void __launch_bounds__(BDH_STEP_THREADS)
    bdh_step_kernel(const __grid_constant__ camox_bdh_step_params p, float scale, int64_t items) {
  constexpr int WARPS = BDH_STEP_THREADS / CAMOX_WARP;
  __shared__ float r[BDH_STEP_CHUNK];
  __shared__ float shares[WARPS][BDH_STEP_COLUMNS];
  const int lane = static_cast<int>(threadIdx.x) % CAMOX_WARP, warp = static_cast<int>(threadIdx.x) / CAMOX_WARP;
  const bool per_element = p.table_columns == p.dim;
  BDH_FOR_TILES(item, items) {
    int64_t tile, h;
    const int64_t sequence = camox_divide(item, camox_ceil_div(p.value_dim, BDH_STEP_COLUMNS), &tile);
    const int64_t b = camox_divide(sequence, p.heads, &h), column = tile * BDH_STEP_COLUMNS + lane;
    const T *const q = static_cast<const T *>(p.q.data) + b * p.q.stride[0] + h * p.q.stride[1];
    const bool exists = column < p.value_dim;
    float value = 0.0f;
    if (exists)
      value = camox_to_float(
          __ldg(static_cast<const T *>(p.v.data) + b * p.v.stride[0] + h * p.v.stride[1] + column * p.v.stride[3]));
    const float *const state = static_cast<const float *>(p.state.data);
    const int64_t place = b * p.state.stride[0] + h * p.state.stride[1] + column * p.state.stride[3];
    float *const next = static_cast<float *>(p.next) + sequence * p.dim * p.value_dim + column;
    float sum = 0.0f;
    for (int64_t first = 0; first < p.dim; first += BDH_STEP_CHUNK) {
      const int rows = static_cast<int>(min(p.dim - first, static_cast<int64_t>(BDH_STEP_CHUNK)));
      __syncthreads();
      for (int i = 2 * static_cast<int>(threadIdx.x); i < rows; i += 2 * BDH_STEP_THREADS) {
        float x0 = camox_to_float(__ldg(q + (first + i) * p.q.stride[3]));
        float x1 = camox_to_float(__ldg(q + (first + i + 1) * p.q.stride[3]));
        if (p.relu) x0 = bdh_at_least(x0, 0.0f), x1 = bdh_at_least(x1, 0.0f);
        const int64_t angle = per_element ? first + i : (first + i) / 2;
        const float *const cosines = static_cast<const float *>(p.cos) + angle, *const sines =
                                                                                    static_cast<const float *>(p.sin) + angle;
        r[i] = fmaf(x0, __ldg(cosines), -x1 * __ldg(sines));
        r[i + 1] = fmaf(x1, __ldg(cosines + per_element), x0 * __ldg(sines + per_element));
      }
      __syncthreads();
      if (exists) {
#pragma unroll 4
        for (int i = warp; i < rows; i += WARPS) {
          const float before = state ? __ldg(state + place + (first + i) * p.state.stride[2]) : 0.0f;
          sum = fmaf(r[i], before, sum);
          next[(first + i) * p.value_dim] = fmaf(r[i], value, before);
        }
      }
    }
    shares[warp][lane] = sum;
    __syncthreads();
    if (warp == 0 && exists) {
      sum = 0.0f;
#pragma unroll
      for (int i = 0; i < WARPS; ++i) sum += shares[i][lane];
      sum *= scale;
#ifdef CAMOX_BREAK_BDH
      sum += 1e-3f;
#endif
      static_cast<T *>(p.out.data)[b * p.out.stride[0] + h * p.out.stride[1] + column * p.out.stride[3]] =
          camox_from_float<T>(sum);
    }
  }
}

/* ---- launchers ---- */

/* Whether rows of this view can be read 16 bytes at a time. */
static bool bdh_is_wide(const camox_view4 &view, int64_t element_bytes) {
  if (!camox_aligned(view.data, 16) || view.stride[3] != 1) return false;
  for (int d = 0; d < 3; ++d)
    if (view.stride[d] * element_bytes % 16 != 0) return false;
  return true;
}

static int64_t bdh_heads(const camox_bdh_params *p) { return p->length == 0 ? 0 : p->batch * p->heads; }

static int64_t bdh_element_bytes(const camox_bdh_params *p) { return p->dtype == CAMOX_F32 ? 4 : 2; }

/* The forward without scores, and a backward that finds none, of heads whose state is less work than their scores. */
static bool bdh_by_state(const camox_bdh_params *p) { return !p->scores && camox_bdh_state_form(p); }

/* Whether rows of q and v can be read 16 bytes at a time. */
static bool bdh_is_wide(const camox_bdh_params *p) {
  return bdh_is_wide(p->q, bdh_element_bytes(p)) && p->dim % 8 == 0 && bdh_is_wide(p->v, bdh_element_bytes(p));
}

/* Whether r is made once, for products by large tiles: tiles of 64 columns, of which there are several, would make it again. */
static bool bdh_rotates_once(const camox_bdh_params *p, bool backward) {
  return p->dtype != CAMOX_F32 && bdh_by_state(p) && !p->causal && p->value_dim > CAMOX_TILE && bdh_is_wide(p) &&
         (!backward || bdh_is_wide(p->grad, bdh_element_bytes(p)));
}

/* Whether scores and out of two heads are one block's, which copies the angles of pairs as well. */
static bool bdh_is_short(const camox_bdh_params *p) {
  return p->dtype != CAMOX_F32 && !bdh_by_state(p) && !p->softmax && p->length <= CAMOX_TILE && bdh_is_wide(p) &&
         p->value_dim <= BDH_SHORT_TILES * CAMOX_TILE && camox_aligned(p->cos, 16) && camox_aligned(p->sin, 16) &&
         p->table_columns != p->dim;
}

/* The parts of scratch, in bytes; bands are all of one size, the last one may be shorter. */
struct bdh_scratch {
  int64_t sequences, rows;             /* of a band */
  int64_t chunk, chunks, segment;      /* tokens of a chunk; all chunks of a head; those of a band */
  int64_t delta, scores, pairs, state; /* a state for v, in the backward one for g: */
  int64_t carried;                     /* this too */
  int64_t rotated;                     /* with it state is of the element type */
  int64_t parts, part_columns;         /* of the columns of q, where scores are a single tile: */
  int64_t part_scores;                 /* those of the parts, if there are several */
};

/* All heads, each as one chunk. */
static bdh_scratch bdh_one_band(const camox_bdh_params *p) {
  bdh_scratch s = {};
  s.sequences = bdh_heads(p), s.rows = s.chunk = p->length;
  s.chunks = s.segment = 1;
  return s;
}

static int64_t bdh_rounded(int64_t bytes) { return (bytes + 255) / 256 * 256; }

static int64_t bdh_tiles_of(int64_t rows, int64_t columns) {
  return camox_ceil_div(rows, CAMOX_TILE) * camox_ceil_div(columns, CAMOX_TILE);
}

/* As many heads as fill a GPU, or chunks of one. */
static void bdh_plan_states(bdh_scratch &s, const camox_bdh_params *p, int64_t most) {
  int64_t tiles = bdh_tiles_of(p->dim, p->value_dim);
  if (p->causal) {
    const int64_t chunk = camox_bdh_cuda_chunk(p), of_scores = bdh_tiles_of(chunk, chunk);
    if (chunk < s.chunk) s.rows = s.chunk = chunk;
    if (of_scores > tiles) tiles = of_scores;
  }
  const int64_t slots = tiles > 0 && most > tiles ? most / tiles : 1;
  s.segment = s.chunks = camox_ceil_div(p->length, s.chunk);
  if (s.segment > slots) s.segment = slots;
  if (s.sequences > slots / s.segment) s.sequences = slots / s.segment;
  const int64_t size = p->dim * p->value_dim * 4;
  s.state = bdh_rounded(s.sequences * s.segment * size);
  if (s.segment < s.chunks) s.carried = bdh_rounded(camox_ceil_div(s.chunks, s.segment) * size);
}

static int64_t bdh_rotated_dim(const camox_bdh_params *p) {
  return camox_ceil_div(p->dim, CAMOX_LARGE_DEPTH) * CAMOX_LARGE_DEPTH;
}
/* Of a row of z, whole steps of grad_q. */
static int64_t bdh_state_columns(const camox_bdh_params *p) {
  return camox_ceil_div(p->value_dim, CAMOX_LARGE_DEPTH) * CAMOX_LARGE_DEPTH;
}

/* Where r is made once, in bands of heads. */
static bdh_scratch bdh_rotated_scratch_of(const camox_bdh_params *p, bool backward) {
  const int64_t columns = bdh_rotated_dim(p), tiles = bdh_tiles_of(p->length, columns), most = camox_grid(BDH_ROTATED_TILES);
  bdh_scratch s = bdh_one_band(p);
  if (s.sequences == 0) return s;
  if (s.sequences > most / tiles) s.sequences = most < 2 * tiles ? 1 : most / tiles / 2 * 2; /* pairs of heads */
  s.rotated = bdh_rounded(s.sequences * p->length * columns * bdh_element_bytes(p));
  s.state = bdh_rounded(s.sequences * columns * bdh_state_columns(p) * (backward ? 2 : 1) * bdh_element_bytes(p));
  return s;
}

/* Parts that make as many blocks as fill a GPU of the scores of single tiles, each of steps enough to use the whole ring; of the
   shape alone, because the parts are the order of a sum. */
static void bdh_plan_parts(bdh_scratch &s, const camox_bdh_params *p) {
  const int64_t step = BDH_HALVES * camox_tile_depth<char> / bdh_element_bytes(p), steps = camox_ceil_div(p->dim, step);
  const int64_t room = BDH_FILL / (bdh_heads(p) * camox_ceil_div(p->length, s.chunk));
  const int64_t least = BDH_PART_STEPS, of_part = camox_ceil_div(steps, room < 1 ? 1 : room);
  s.part_columns = (of_part > least ? of_part : least) * step;
  s.parts = camox_ceil_div(p->dim, s.part_columns);
  if (s.chunk <= CAMOX_TILE && s.parts > 1)
    s.part_scores = bdh_rounded(s.sequences * s.segment * s.parts * CAMOX_TILE_STAGE * 4);
}

static bdh_scratch bdh_scratch_of(const camox_bdh_params *p, bool backward) {
  bdh_scratch s = bdh_one_band(p);
  if (s.sequences == 0) return s;
  if (backward && p->softmax) s.delta = bdh_rounded(s.sequences * p->length * 4);
  if (p->scores && !backward) {
    bdh_plan_parts(s, p);
    return s;
  }
  const int64_t most = camox_grid(BDH_TILES_AT_ONCE);
  if (bdh_by_state(p)) {
    bdh_plan_states(s, p, most);
    if (!p->causal) return s;
  } else {
    const int64_t length_tiles = camox_ceil_div(p->length, CAMOX_TILE), tiles = length_tiles * length_tiles;
    if (s.sequences > most / tiles) s.sequences = most > tiles ? most / tiles : 1;
    if (tiles > most) {
      const int64_t rows = (most > length_tiles ? most / length_tiles : 1) * CAMOX_TILE;
      if (rows < s.rows) s.rows = rows;
    }
  }
  const int64_t elements = s.sequences * s.segment * s.rows * s.chunk;
  if (!p->scores) s.scores = bdh_rounded(elements * 4), bdh_plan_parts(s, p);
  if (backward) s.pairs = bdh_rounded(elements * bdh_element_bytes(p));
  return s;
}

static bdh_plan bdh_plan_of(const camox_bdh_params *p, const bdh_scratch &s, bool backward) {
  bdh_plan plan = {};
  plan.p = *p;
  plan.scale = static_cast<float>(p->scale);
  char *scratch = static_cast<char *>(p->scratch);
  plan.delta = reinterpret_cast<float *>(scratch), scratch += s.delta;
  plan.scores = static_cast<float *>(p->scores ? p->scores : scratch), scratch += s.scores;
  plan.pairs = scratch, scratch += s.pairs;
  plan.parts = s.parts, plan.part_columns = s.part_columns;
  plan.part_scores = reinterpret_cast<float *>(scratch), scratch += s.part_scores;
  plan.rotated = scratch, scratch += s.rotated;
  plan.rotated_dim = bdh_rotated_dim(p);
  plan.state_columns = bdh_state_columns(p), plan.state_pitch = plan.state_columns * (backward ? 2 : 1);
  plan.paired = p->value_heads != p->heads && p->heads % 2 == 0 && s.sequences % 2 == 0;
  for (int i = 0; i <= backward; ++i) {
    plan.state[i] = reinterpret_cast<float *>(scratch), scratch += s.state;
    plan.carried[i] = reinterpret_cast<float *>(scratch), scratch += s.carried;
  }
  plan.chunk = s.chunk;
  plan.has_state = bdh_by_state(p), plan.has_scores = !plan.has_state || p->causal;
  plan.masked = !backward, plan.weights = backward && p->scores;
  /* where the GPU is full without the heads side by side */
  plan.adds_heads =
      plan.weights && p->value_heads != p->heads && p->batch * bdh_tiles_of(p->length, p->value_dim) >= camox_grid(BDH_FILL);
  const int64_t bytes = bdh_element_bytes(p);
  plan.wide_q = bdh_is_wide(p->q, bytes), plan.wide_v = bdh_is_wide(p->v, bytes), plan.wide_out = bdh_is_wide(p->out, bytes);
  plan.wide_grad = bdh_is_wide(p->grad, bytes);
  plan.wide_grad_q = bdh_is_wide(p->grad_q, bytes), plan.wide_grad_v = bdh_is_wide(p->grad_v, bytes);
  plan.wide_partial = camox_aligned(p->partial, 16) && p->value_dim % 4 == 0;
  plan.wide_tables = camox_aligned(p->cos, 16) && camox_aligned(p->sin, 16) && p->table_columns % 4 == 0;
  plan.wide_scores = camox_aligned(plan.scores, 16) && s.chunk % 4 == 0;
  plan.wide_pairs = camox_aligned(plan.pairs, 16) && s.chunk * bytes % 16 == 0;
  plan.wide_state = camox_aligned(plan.state[0], 16) && p->value_dim % 4 == 0;
  return plan;
}

static int64_t bdh_slots(const bdh_plan &plan) { return plan.band.sequences * plan.band.chunks; }

static int64_t bdh_tiles(const bdh_plan &plan, int64_t columns) {
  return bdh_slots(plan) * bdh_tiles_of(plan.band.rows, columns);
}

#define BDH_LAUNCH(kernel, items, per_block, ...)                                                                            \
  do {                                                                                                                       \
    const int64_t count = (items);                                                                                           \
    if (count > 0)                                                                                                           \
      CAMOX_LAUNCH(kernel, camox_grid(camox_ceil_div(count, per_block)), CAMOX_TILE_THREADS, 0, stream, __VA_ARGS__, count); \
  } while (0)

#define BDH_WARPS (CAMOX_TILE_THREADS / CAMOX_WARP)

/* r^T v of the band, for the backward r^T g too; where causal the sum of the chunks before, or after, each. */
template <typename P>
static void bdh_launch_states(const bdh_plan &plan, bool backward, void *stream) {
  const int64_t size = plan.p.dim * plan.p.value_dim;
  for (int of_grad = 0; of_grad <= backward; ++of_grad) {
    BDH_LAUNCH((bdh_state_kernel<P>), bdh_slots(plan) * bdh_tiles_of(plan.p.dim, plan.p.value_dim), 1, plan, of_grad);
    if (!plan.p.causal) continue;
    if (plan.wide_state)
      BDH_LAUNCH(bdh_scan_kernel<4>, plan.band.sequences * size / 4, CAMOX_TILE_THREADS, plan, of_grad);
    else
      BDH_LAUNCH(bdh_scan_kernel<1>, plan.band.sequences * size, CAMOX_TILE_THREADS, plan, of_grad);
  }
}

/* Calls launch() for every band; before those of a head that is divided into segments the states before, or after, each are
   summed up, segments being longer chunks. */
template <typename P, typename Launch>
static void bdh_for_row_bands(bdh_plan &plan, const bdh_scratch &s, bool backward, void *stream, const Launch &launch) {
  const int64_t heads = bdh_heads(&plan.p), size = plan.p.dim * plan.p.value_dim;
  float *const carried[2] = {plan.carried[0], plan.carried[1]};
  for (int64_t sequence = 0; sequence < heads; sequence += s.sequences) {
    plan.band = {sequence, s.sequences < heads - sequence ? s.sequences : heads - sequence, 0, s.rows, 0, 1};
    if (s.carried > 0) {
      bdh_plan segments = plan;
      segments.chunk = s.segment * s.chunk;
      segments.band.chunks = camox_ceil_div(s.chunks, s.segment);
      for (int i = 0; i <= backward; ++i) segments.state[i] = carried[i], segments.carried[i] = nullptr;
      bdh_launch_states<P>(segments, backward, stream);
    }
    for (int64_t chunk = 0; chunk < s.chunks; chunk += s.segment) {
      plan.band.first_chunk = chunk, plan.band.chunks = s.segment < s.chunks - chunk ? s.segment : s.chunks - chunk;
      for (int i = 0; i <= backward; ++i) plan.carried[i] = s.carried > 0 ? carried[i] + chunk / s.segment * size : nullptr;
      for (int64_t row = 0; row < s.chunk; row += s.rows) {
        plan.band.first_row = row, plan.band.rows = s.rows < s.chunk - row ? s.rows : s.chunk - row;
        launch();
      }
    }
  }
}

template <typename P>
static void bdh_launch_scores(const bdh_plan &plan, void *stream) {
  const int64_t slots = bdh_slots(plan);
  if (plan.chunk > CAMOX_TILE) {
    BDH_LAUNCH((bdh_scores_kernel<P>), bdh_tiles(plan, plan.chunk), 1, plan);
  } else if (slots > 0) {
    const int64_t items = slots * plan.parts;
    CAMOX_LAUNCH((bdh_tile_scores_kernel<P>), camox_grid(items), BDH_HALVES * CAMOX_TILE_THREADS, 0, stream, plan, items);
    if (plan.parts > 1) BDH_LAUNCH(bdh_part_scores_kernel, slots * plan.chunk * plan.chunk, CAMOX_TILE_THREADS, plan);
  }
}

typedef void bdh_kernel(bdh_plan, int64_t);

/* inline: the emulator of sm_75 does not call it. */
static inline cudaError_t bdh_launch_large(bdh_kernel *kernel, int shared, int64_t items, const bdh_plan &plan, void *stream) {
  const cudaError_t error =
      cudaFuncSetAttribute(reinterpret_cast<const void *>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error == cudaSuccess) CAMOX_LAUNCH(kernel, camox_grid(items), CAMOX_LARGE_THREADS, shared, stream, plan, items);
  return error;
}

/* z of the band's heads, or dz. */
template <typename T, int COLUMNS, bool OF_GRAD>
static inline cudaError_t bdh_launch_large_state(const bdh_plan &plan, void *stream) {
  const int64_t heads = plan.paired && !OF_GRAD ? 2 : 1, groups = camox_ceil_div(plan.p.value_dim, COLUMNS);
  return bdh_launch_large(
      bdh_large_state_kernel<T, COLUMNS, OF_GRAD>, camox_large_shared<bdh_large_state_rows<T, OF_GRAD>, COLUMNS>,
      plan.band.sequences / heads * groups * camox_ceil_div(plan.rotated_dim, CAMOX_LARGE_ROWS / heads), plan, stream);
}

/* out of the band's heads, or grad_v. */
template <typename T, int COLUMNS, bool OF_GRAD>
static inline cudaError_t bdh_launch_large_out(const bdh_plan &plan, void *stream) {
  const int64_t groups = camox_ceil_div(plan.p.value_dim, COLUMNS);
  return bdh_launch_large(bdh_large_out_kernel<T, COLUMNS, OF_GRAD>,
                          camox_large_shared<camox_large_copy<T, CAMOX_LARGE_ROWS, false>, COLUMNS>,
                          plan.band.sequences * groups * camox_ceil_div(plan.p.length, CAMOX_LARGE_ROWS), plan, stream);
}

template <typename T>
static inline cudaError_t bdh_launch_large_grad_q(const bdh_plan &plan, void *stream) {
  constexpr int shared = camox_large_shared<bdh_large_grad_rows<T>, BDH_GRAD_Q_COLUMNS>;
  static_assert(shared >= CAMOX_LARGE_ROWS * BDH_GRAD_Q_COLUMNS * 4, "the stage takes the place of the ring");
  const int64_t tiles = camox_ceil_div(plan.p.length, CAMOX_LARGE_ROWS) * camox_ceil_div(plan.p.dim, BDH_GRAD_Q_COLUMNS);
  return bdh_launch_large(bdh_large_grad_q_kernel<T>, shared, plan.band.sequences * tiles, plan, stream);
}

template <typename T, int COLUMNS>
static int bdh_run_rotated(const camox_bdh_params *p, bool backward, void *stream) {
  const bdh_scratch s = bdh_rotated_scratch_of(p, backward);
  bdh_plan plan = bdh_plan_of(p, s, backward);
  cudaError_t error = cudaSuccess;
  bdh_for_row_bands<T>(plan, s, backward, stream, [&] {
    if (error == cudaSuccess) error = bdh_launch_large_state<T, COLUMNS, false>(plan, stream);
    if (!backward) {
      if (error == cudaSuccess) error = bdh_launch_large_out<T, COLUMNS, false>(plan, stream);
      return;
    }
    if (error == cudaSuccess) error = bdh_launch_large_state<T, COLUMNS, true>(plan, stream);
    if (error == cudaSuccess) error = bdh_launch_large_out<T, COLUMNS, true>(plan, stream);
    if (error == cudaSuccess) error = bdh_launch_large_grad_q<T>(plan, stream);
  });
  return error != cudaSuccess ? error : camox_launch_status();
}

/* By the columns that leave fewer of their tiles' empty. */
template <typename T>
static inline int bdh_run_rotated(const camox_bdh_params *p, bool backward, void *stream) {
  const bool widest = camox_ceil_div(p->value_dim, 192) * 192 <= camox_ceil_div(p->value_dim, 128) * 128;
  return widest ? bdh_run_rotated<T, 192>(p, backward, stream) : bdh_run_rotated<T, 128>(p, backward, stream);
}

template <typename T>
static int bdh_run_short(const camox_bdh_params *p, void *stream) {
  const bdh_scratch s = bdh_scratch_of(p, false);
  bdh_plan plan = bdh_plan_of(p, s, false);
  constexpr int shared = BDH_SHORT_STAGES * (BDH_SHORT_HEADS + 2) * CAMOX_TILE_WORDS * 4;
  cudaError_t error = cudaSuccess;
  bdh_for_row_bands<T>(plan, s, false, stream, [&] {
    if (error == cudaSuccess)
      error = bdh_launch_large(bdh_short_kernel<T>, shared, camox_ceil_div(plan.band.sequences, BDH_SHORT_HEADS), plan, stream);
  });
  return error != cudaSuccess ? error : camox_launch_status();
}

template <typename P>
static int bdh_run(const camox_bdh_params *p, void *stream) {
  if constexpr (camox_may_be_sm80 && sizeof(P) == 2) {
    if (bdh_is_short(p) && camox_device_is_sm80()) return bdh_run_short<P>(p, stream);
    if (bdh_rotates_once(p, false) && camox_device_is_sm80()) return bdh_run_rotated<P>(p, false, stream);
  }
  const bdh_scratch s = bdh_scratch_of(p, false);
  bdh_plan plan = bdh_plan_of(p, s, false);
  bdh_for_row_bands<P>(plan, s, false, stream, [&] {
    if (plan.has_state) bdh_launch_states<P>(plan, false, stream);
    if (plan.has_scores) bdh_launch_scores<P>(plan, stream);
    if (p->softmax) BDH_LAUNCH(bdh_softmax_kernel, plan.band.sequences * plan.band.rows, BDH_WARPS, plan);
    BDH_LAUNCH((bdh_values_kernel<P>), bdh_tiles(plan, p->value_dim), 1, plan);
  });
  return camox_launch_status();
}

template <typename P>
static void bdh_launch_grad_q(bdh_plan &plan, void *stream) {
  plan.heads_per_block = bdh_tiles(plan, plan.p.dim) / camox_grid(BDH_TILES_AT_ONCE);
  plan.heads_per_block = plan.heads_per_block < 1                     ? 1
                         : plan.heads_per_block < BDH_HEADS_PER_BLOCK ? plan.heads_per_block
                                                                      : BDH_HEADS_PER_BLOCK;
  const int64_t groups = camox_ceil_div(bdh_slots(plan), plan.heads_per_block);
  BDH_LAUNCH((bdh_grad_q_kernel<P>), groups * bdh_tiles_of(plan.band.rows, plan.p.dim), 1, plan);
}

/* The heads' gradients of a v that they share. */
template <typename T>
static void bdh_launch_sum(const camox_bdh_params *p, void *stream) {
  const int64_t elements = p->batch * p->length * p->value_dim;
  if (camox_aligned(p->partial, 16) && p->value_dim % 4 == 0 && bdh_is_wide(p->grad_v, bdh_element_bytes(p)))
    BDH_LAUNCH((bdh_sum_kernel<T, 4>), elements / 4, CAMOX_TILE_THREADS, *p);
  else
    BDH_LAUNCH((bdh_sum_kernel<T, 1>), elements, CAMOX_TILE_THREADS, *p);
}

template <typename P>
static int bdh_run_backward(const camox_bdh_params *p, void *stream) {
  if constexpr (camox_may_be_sm80 && sizeof(P) == 2) {
    if (bdh_rotates_once(p, true) && camox_device_is_sm80()) {
      const int error = bdh_run_rotated<P>(p, true, stream);
      if (error == cudaSuccess && p->value_heads != p->heads) bdh_launch_sum<P>(p, stream);
      return error != cudaSuccess ? error : camox_launch_status();
    }
  }
  const bdh_scratch s = bdh_scratch_of(p, true);
  bdh_plan plan = bdh_plan_of(p, s, true);
  const bool whole = s.rows == p->length;
  if (p->softmax && !whole) BDH_LAUNCH((bdh_delta_kernel<camox_tile_element<P>>), bdh_heads(p) * p->length, BDH_WARPS, plan);
  if (plan.weights) {
    plan.band = {0, plan.adds_heads ? p->batch : bdh_heads(p), 0, p->length, 0, 1};
    BDH_LAUNCH((bdh_grad_v_kernel<P, true>), bdh_tiles(plan, p->value_dim), 1, plan);
  }
  bdh_for_row_bands<P>(plan, s, true, stream, [&] {
    if (plan.has_state) bdh_launch_states<P>(plan, true, stream);
    if (!plan.weights) {
      if (plan.has_scores) bdh_launch_scores<P>(plan, stream);
      BDH_LAUNCH((bdh_grad_v_kernel<P, false>), bdh_tiles(plan, p->value_dim), 1, plan);
    }
    if (p->softmax && whole) BDH_LAUNCH((bdh_weighed_kernel<P>), bdh_tiles(plan, 1), 1, plan);
    if (p->softmax)
      BDH_LAUNCH((bdh_pairs_kernel<P, true>), bdh_tiles(plan, plan.chunk), 1, plan);
    else if (plan.has_scores)
      BDH_LAUNCH((bdh_pairs_kernel<P, false>), bdh_tiles(plan, plan.chunk), 1, plan);
    bdh_launch_grad_q<P>(plan, stream);
  });
  if (p->value_heads != p->heads && !plan.adds_heads) bdh_launch_sum<camox_tile_element<P>>(p, stream);
  return camox_launch_status();
}

template <typename T>
static int bdh_run_step(const camox_bdh_step_params *p, void *stream) {
  const int64_t items = p->batch * p->heads * camox_ceil_div(p->value_dim, BDH_STEP_COLUMNS);
  if (items == 0) return cudaSuccess;
  CAMOX_LAUNCH((bdh_step_kernel<T>), camox_grid(items), BDH_STEP_THREADS, 0, stream, *p, static_cast<float>(p->scale), items);
  return camox_launch_status();
}

extern "C" int64_t camox_bdh_cuda_scratch(const camox_bdh_params *p, int backward) {
  const bdh_scratch s = bdh_scratch_of(p, backward != 0);
  const int64_t bytes = s.delta + s.scores + s.pairs + s.part_scores + (s.state + s.carried) * (backward ? 2 : 1);
  if (!bdh_rotates_once(p, backward != 0)) return bytes;
  /* whatever the device: the one that will run it need not be the current one */
  const bdh_scratch rotated = bdh_rotated_scratch_of(p, backward != 0);
  return bytes > rotated.rotated + rotated.state ? bytes : rotated.rotated + rotated.state;
}

#define BDH_BY_TYPE(run, of_float32)                       \
  switch (p->dtype) {                                      \
    case CAMOX_F32: return of_float32;                     \
    case CAMOX_BF16: return run<__nv_bfloat16>(p, stream); \
    case CAMOX_F16: return run<__half>(p, stream);         \
    default: return cudaErrorInvalidValue;                 \
  }

extern "C" int camox_bdh_cuda(const camox_bdh_params *p, void *stream) {
  BDH_BY_TYPE(bdh_run, p->tf32 ? bdh_run<camox_tf32>(p, stream) : bdh_run<float>(p, stream))
}

extern "C" int camox_bdh_backward_cuda(const camox_bdh_params *p, void *stream) {
  /* w of a softmax needs what the forward saved of it */
  if (p->softmax && !p->scores && !p->logsumexp && bdh_heads(p) > 0) return cudaErrorInvalidValue;
  BDH_BY_TYPE(bdh_run_backward, p->tf32 ? bdh_run_backward<camox_tf32>(p, stream) : bdh_run_backward<float>(p, stream))
}

extern "C" int camox_bdh_step_cuda(const camox_bdh_step_params *p, void *stream) {
  BDH_BY_TYPE(bdh_run_step, bdh_run_step<float>(p, stream))
}
