/* One tile of a product of float32 matrices; compiled once per instruction set.

       c [tile]            =      x [tile.rows, depth]     times      y [depth, tile.columns]
       +---------------+          +-------+-------+                   +-------------------+
       |   |   |   |   |          |       |       |            depth  |  y block: packed, |
       | micro tile    |          | panel of ROWS |            block  |  stays in L2      |
       | ROWS x COLUMNS|          | packed, L1    |                   +--------+--------+
       +---------------+          +-------+-------+                   |        |        |

   for each depth block (at most 384 long):
     for each block of columns:      packed into panels of COLUMNS columns, [depth][COLUMNS], stays in L2
       for each block of rows:       x with dense rows: two panels of them, copied to rows that share no cache sets
                                     else: packed into six panels of at most ROWS rows, [depth][rows]
         for each panel of rows:     it stays in L1
           for each panel of columns:   micro tile: rows x COLUMNS sums in registers, vectors along the columns, one
                                        factor of x broadcast per row and step; meanwhile the next block is prefetched
   Packing turns any transposition into one of two orders that the micro tile reads: steps of all rows, or whole rows. */
#include "sgemm.h"

#include "../common/integers.h"
#include "../common/simd.h"
#include "../common/simd_transpose.h"

/* PREFETCH: where half vectors let a panel of y stay in L1, what comes next waits in L2. */
#if defined(CAMOX_SIMD_AVX512)
#define ROWS 14
#define PREFETCH(at) __builtin_prefetch(at, 0, 3)
#elif defined(CAMOX_SIMD_AVX2)
#define ROWS 6
#define PREFETCH(at) __builtin_prefetch(at, 0, 2)
#else
#define ROWS 4
#define PREFETCH(at) __builtin_prefetch(at, 0, 2)
#endif
#define VECTORS 2
#define COLUMNS (VECTORS * VF32_LANES)
/* Between copied rows of x: a constant needs no register, and one that is no power of two spreads them over the sets of L1. */
#define X_ROW (CAMOX_SGEMM_DEPTH + 16)

/* Lines of a matrix, rows of x or columns of y: element k of line i is at[i * line + k * step], one of the strides 1. */
typedef struct {
  const float *at;
  int64_t line, step, count;
} lines;

/* to[k * pitch + i] = element k of line i, for all lines, at most `pitch`. Vectors are stored whole: what lies past the lines
   is spoilt, and written again by the next k or left behind the last. */
static void pack_across(float *to, int64_t pitch, lines from, int64_t depth) {
  enum { STEPS = 8 };
  for (int64_t first = 0; first < from.count; first += VF32_LANES) {
    const float *line[VF32_LANES];
    for (int64_t i = 0; i < VF32_LANES; ++i) line[i] = from.at + camox_min_i64(first + i, from.count - 1) * from.line;
    int64_t k = 0;
    for (; k + STEPS <= depth; k += STEPS) {
      vf32 block[STEPS];
      vload_quads_f32(block, line, k, STEPS / 4);
      for (int64_t s = 0; s < STEPS; ++s) vf32_store(to + (k + s) * pitch + first, block[s]);
    }
    for (; k < depth; ++k)
      for (int64_t i = 0; i < camox_min_i64(VF32_LANES, from.count - first); ++i) to[k * pitch + first + i] = line[i][k];
  }
}

/* to[k * pitch + i] = from[k * step + i] for the i below n and VF32_LANES; vectors are stored whole. */
static void pack_steps(float *to, int64_t pitch, const float *from, int64_t step, int64_t n, int64_t steps) {
  if (n >= VF32_LANES)
    for (int64_t k = 0; k < steps; ++k) vf32_store(to + k * pitch, vf32_load(from + k * step));
  else
    for (int64_t k = 0; k < steps; ++k) vf32_store(to + k * pitch, vf32_load_n(from + k * step, n));
}

/* The steps [begin, end) of one panel, where the elements of a step are adjacent in memory: `left` of them, the panel's first. */
static void pack_along(float *panel, int64_t pitch, lines from, int64_t left, int64_t begin, int64_t end, int64_t depth) {
  const int64_t last = depth - 1;
  for (int64_t i = 0; i < from.count; i += VF32_LANES) {
    const float *at = from.at + i;
    const int64_t readable = left - i;
    pack_steps(panel + begin * pitch + i, pitch, at + begin * from.step, from.step, readable, camox_min_i64(end, last) - begin);
    if (end > last) { /* whole vectors of this step alone reach the next panel, where there is one: it has begun already */
      const vf32 v = vf32_load_n(at + last * from.step, camox_min_i64(readable, VF32_LANES));
      vf32_store_n(panel + last * pitch + i, v, camox_min_i64(pitch - i, VF32_LANES));
    }
  }
}

/* Panels of `pitch` lines, one after the other, each [depth][pitch]. Where the elements of a step are adjacent in memory, the
   panels take those of a few steps in turn, so that a cache line that several of them share is read once. */
static void pack_panels(float *to, int64_t pitch, lines from, int64_t depth) {
  enum { TURN = 16 };
  const int along = from.line == 1;
  for (int64_t begin = 0; begin < depth; begin += along ? TURN : depth)
    for (int64_t first = 0; first < from.count; first += pitch) {
      const int64_t left = from.count - first, count = camox_min_i64(pitch, left);
      const lines panel = {from.at + first * from.line, from.line, from.step, count};
      if (along)
        pack_along(to + first * depth, pitch, panel, left, begin, camox_min_i64(begin + TURN, depth), depth);
      else
        pack_across(to + first * depth, pitch, panel, depth);
    }
}

/* Dense rows, X_ROW apart, in whole vectors. */
static void copy_rows(float *to, lines from, int64_t depth) {
  for (int64_t i = 0; i < from.count; ++i, to += X_ROW, from.at += from.line)
    for (int64_t k = 0; k < depth; k += VF32_LANES) vf32_store(to + k, vf32_load_n(from.at + k, depth - k));
}

/* Runs of cache lines that are prefetched one by one while registers multiply: `line` lines of this run are done. */
typedef struct {
  const float *at;
  int64_t line, lines, skip, runs;
} prefetcher;

enum { LINE = 16 }; /* floats of a cache line */
static const prefetcher no_prefetch;

static prefetcher prefetch_of(lines from, int64_t depth) {
  if (from.count == 0) return no_prefetch;
  const int across = from.line == 1;
  const int64_t run = across ? from.count : depth, distance = across ? from.step : from.line;
  const int64_t covered = camox_ceil_div(run, LINE);
  return (prefetcher){from.at, 0, covered, distance - covered * LINE, across ? depth : from.count};
}

typedef struct {
  const float *x, *y;           /* steps [depth][x_pitch] or rows X_ROW apart; [depth][COLUMNS] */
  const float *bias, *row_bias; /* of these columns or rows, or NULL */
  float *c;
  int64_t x_pitch, c_row, depth, columns;
  float alpha, beta;
} micro_tile;

CAMOX_INLINE void store_sum(float *to, vf32 sum, float beta, int64_t n) {
  if (n >= VF32_LANES) {
    if (beta != 0) sum = vf32_multiply_add(vf32_load(to), vf32_set1(beta), sum);
    vf32_store(to, sum);
  } else if (n > 0) {
    if (beta != 0) sum = vf32_multiply_add(vf32_load_n(to, n), vf32_set1(beta), sum);
    vf32_store_n(to, sum, n);
  }
}

/* Element (r, k) of x is t->x[r * x_row + k * x_step]. */
CAMOX_INLINE void multiply(const micro_tile *t, prefetcher *next, int rows, int vectors, int64_t x_row, int64_t x_step) {
  vf32 sum[ROWS][VECTORS];
  prefetcher p = *next;
  int64_t step = p.runs > 0 ? LINE : 0;
  const float *x = t->x, *y = t->y;
  if (step == 0) p.at = x; /* what lies in L1 */
#pragma GCC unroll 14
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < vectors; ++v) {
      if (v * VF32_LANES % LINE == 0) __builtin_prefetch(t->c + r * t->c_row + v * VF32_LANES, 1);
      sum[r][v] = vf32_set1(0);
    }
  }
  for (int64_t k = 0; k < t->depth; ++k) {
    vf32 column[VECTORS];
#pragma GCC unroll 2
    for (int v = 0; v < vectors; ++v) column[v] = vf32_load(y + v * VF32_LANES);
#pragma GCC unroll 14
    for (int r = 0; r < rows; ++r) {
      const vf32 factor = vf32_set1(x[r * x_row]);
#pragma GCC unroll 2
      for (int v = 0; v < vectors; ++v) sum[r][v] = vf32_multiply_add(factor, column[v], sum[r][v]);
    }
    x += x_step, y += COLUMNS;
    PREFETCH(p.at);
    p.at += step;
    if (step != 0 && ++p.line == p.lines) {
      p.at += p.skip, p.line = 0;
      if (--p.runs == 0) step = 0;
    }
  }
  *next = p;
#ifdef CAMOX_BREAK
  const vf32 alpha = vf32_set1(t->alpha * 1.001f);
#else
  const vf32 alpha = vf32_set1(t->alpha);
#endif
  vf32 bias[VECTORS];
#pragma GCC unroll 2
  for (int v = 0; v < vectors; ++v)
    bias[v] =
        t->bias ? vf32_load_n(t->bias + v * VF32_LANES, camox_min_i64(t->columns - v * VF32_LANES, VF32_LANES)) : vf32_set1(0);
#pragma GCC unroll 14
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < vectors; ++v) {
      const vf32 offset = t->row_bias ? vf32_set1(t->row_bias[r]) : bias[v];
      store_sum(t->c + r * t->c_row + v * VF32_LANES, vf32_multiply_add(sum[r][v], alpha, offset), t->beta,
                t->columns - v * VF32_LANES);
    }
}

#define MULTIPLY(n)                                                                                 \
  static __attribute__((noinline)) void multiply_steps_##n(const micro_tile *t, prefetcher *next) { \
    if (t->columns > VF32_LANES)                                                                    \
      multiply(t, next, n, 2, 1, t->x_pitch);                                                       \
    else                                                                                            \
      multiply(t, next, n, 1, 1, t->x_pitch);                                                       \
  }                                                                                                 \
  static __attribute__((noinline)) void multiply_rows_##n(const micro_tile *t, prefetcher *next) {  \
    if (t->columns > VF32_LANES)                                                                    \
      multiply(t, next, n, 2, X_ROW, 1);                                                            \
    else                                                                                            \
      multiply(t, next, n, 1, X_ROW, 1);                                                            \
  }
MULTIPLY(1)
MULTIPLY(2)
MULTIPLY(3)
MULTIPLY(4)
#if ROWS > 4
MULTIPLY(5)
MULTIPLY(6)
#endif
#if ROWS > 6
MULTIPLY(7)
MULTIPLY(8)
MULTIPLY(9)
MULTIPLY(10)
MULTIPLY(11)
MULTIPLY(12)
MULTIPLY(13)
MULTIPLY(14)
#endif

/* By rows, and by the order of x: steps, or whole rows. */
#define MULTIPLIERS(n) {multiply_steps_##n, multiply_rows_##n}
static void (*const multipliers[ROWS + 1][2])(const micro_tile *, prefetcher *) = {
    {NULL, NULL},    MULTIPLIERS(1),  MULTIPLIERS(2), MULTIPLIERS(3),  MULTIPLIERS(4),
#if ROWS > 4
    MULTIPLIERS(5),  MULTIPLIERS(6),
#endif
#if ROWS > 6
    MULTIPLIERS(7),  MULTIPLIERS(8),  MULTIPLIERS(9), MULTIPLIERS(10), MULTIPLIERS(11),
    MULTIPLIERS(12), MULTIPLIERS(13), MULTIPLIERS(14)
#endif
};

static int has_dense_rows(const camox_sgemm_shape *s) { return s->x_depth == 1 && s->x_row != 1; }

static lines x_lines(const camox_sgemm_shape *s, const camox_sgemm_operands *at, int64_t begin, int64_t end, int64_t k) {
  return (lines){at->x + begin * s->x_row + k * s->x_depth, s->x_row, s->x_depth, end - begin};
}

static lines y_lines(const camox_sgemm_shape *s, const camox_sgemm_operands *at, int64_t begin, int64_t end, int64_t k) {
  return (lines){at->y + begin * s->y_column + k * s->y_depth, s->y_column, s->y_depth, end - begin};
}

/* Rows and columns [begin, end) of c, whose factors are packed. */
typedef struct {
  int64_t begin, end, panel; /* panel: rows or columns of a micro tile */
  const float *packed;
} side;

/* sums[j] = (accumulate ? sums[j] : 0) + the steps of column j of y. */
static void add_up_columns(float *sums, side y, int64_t depth, int accumulate) {
  for (int64_t j = y.begin; j < y.end; j += VF32_LANES) {
    const float *at = y.packed + (j - y.begin) / COLUMNS * COLUMNS * depth + (j - y.begin) % COLUMNS;
    const int64_t n = camox_min_i64(y.end - j, VF32_LANES);
    vf32 sum = accumulate ? vf32_load_n(sums + j, n) : vf32_set1(0), even = vf32_set1(0), odd = vf32_set1(0);
    for (int64_t k = 0; k + 1 < depth; k += 2, at += 2 * COLUMNS) even += vf32_load(at), odd += vf32_load(at + COLUMNS);
    if (depth % 2) even += vf32_load(at);
#ifdef CAMOX_BREAK
    even *= vf32_set1(1.01f);
#endif
    vf32_store_n(sums + j, sum + (even + odd), n);
  }
}

/* The steps [k, k + depth) of the sums. Meanwhile the rows of x and then the columns of y that come next are prefetched. */
static void multiply_block(const camox_sgemm_shape *s, const camox_sgemm_operands *at, side x, side y, int64_t k, int64_t depth,
                           prefetcher *x_next, prefetcher *y_next) {
  const float *bias = k == 0 ? at->bias : NULL, *row_bias = k == 0 && !bias ? at->row_bias : NULL;
  const float beta = k == 0 ? s->beta : 1;
  const int in_rows = has_dense_rows(s);
  const int64_t x_row = in_rows ? X_ROW : depth;
  micro_tile t = {.x_pitch = x.panel, .c_row = s->c_row, .depth = depth, .alpha = s->alpha, .beta = beta};
  for (int64_t i = x.begin; i < x.end; i += x.panel) {
    t.x = x.packed + (i - x.begin) * x_row;
    t.row_bias = row_bias ? row_bias + i : NULL;
    for (int64_t j = y.begin; j < y.end; j += COLUMNS) {
      t.y = y.packed + (j - y.begin) * depth;
      t.bias = bias ? bias + j : NULL;
      t.c = at->c + i * s->c_row + j;
      t.columns = camox_min_i64(COLUMNS, y.end - j);
      multipliers[camox_min_i64(x.panel, x.end - i)][in_rows](&t, x_next->runs > 0 ? x_next : y_next);
    }
  }
}

void CAMOX_PASTE3(camox_sgemm, f32, CAMOX_ISA)(const camox_sgemm_shape *s, const camox_sgemm_operands *at,
                                               camox_sgemm_tile tile, float *scratch) {
  /* Of dense rows; of others; those during whose products the next columns of y are fetched, late enough to be there still. */
  enum { COPIED_PANELS = 2, PACKED_PANELS = 6, LAST_PANELS = 8 };
  _Static_assert(PACKED_PANELS * ROWS * CAMOX_SGEMM_DEPTH <= CAMOX_SGEMM_X_FLOATS, "what the scratch has room for");
  float *x_block = scratch, *y_block = scratch + CAMOX_SGEMM_X_FLOATS;
  const int in_rows = has_dense_rows(s);
  const int64_t depth = camox_even_part(s->depth, CAMOX_SGEMM_DEPTH, 1), panel = camox_even_part(tile.rows, ROWS, 1);
  const int64_t height = in_rows ? COPIED_PANELS * panel : camox_even_part(tile.rows, PACKED_PANELS * panel, panel);
  const int64_t width = camox_even_part(tile.columns, CAMOX_SGEMM_Y_FLOATS / depth / COLUMNS * COLUMNS, COLUMNS);
  const int64_t end_row = tile.row + tile.rows, end_column = tile.column + tile.columns;
  const int keeps_x = !in_rows && tile.rows <= height;
  for (int64_t k = 0; k < s->depth; k += depth) {
    const int64_t steps = camox_min_i64(depth, s->depth - k);
    for (int64_t left = tile.column; left < end_column; left += width) {
      const side y = {left, camox_min_i64(left + width, end_column), COLUMNS, y_block};
      const int more_columns = y.end < end_column, more_steps = k + depth < s->depth;
      if (!at->y_is_packed || !camox_sgemm_keeps_y(s->depth, tile.columns))
        pack_panels(y_block, COLUMNS, y_lines(s, at, left, y.end, k), steps);
      if (at->y_sums && tile.row == 0) add_up_columns(at->y_sums, y, steps, k > 0);
      const int64_t next_k = more_columns ? k : k + depth, next_left = more_columns ? y.end : tile.column;
      const int64_t next_end = more_columns || more_steps ? camox_min_i64(next_left + width, end_column) : next_left;
      prefetcher y_next = prefetch_of(y_lines(s, at, next_left, next_end, next_k), steps), nothing = no_prefetch;
      for (int64_t top = tile.row; top < end_row; top += height) {
        const side x = {top, camox_min_i64(top + height, end_row), panel, x_block};
        const lines rows = x_lines(s, at, top, x.end, k);
        if (in_rows)
          copy_rows(x_block, rows, steps);
        else if (left == tile.column || !keeps_x)
          pack_panels(x_block, panel, rows, steps);
        lines next_rows = x_lines(s, at, x.end, camox_min_i64(x.end + height, end_row), k);
        if (x.end == end_row && (more_columns ? !keeps_x : more_steps))
          next_rows = x_lines(s, at, tile.row, camox_min_i64(tile.row + height, end_row), next_k);
        prefetcher x_next = prefetch_of(next_rows, steps);
        const int is_late = end_row - top <= camox_max_i64(height, LAST_PANELS * panel);
        multiply_block(s, at, x, y, k, steps, &x_next, is_late ? &y_next : &nothing);
      }
    }
  }
}
