/* What the CUDA kernels of 3x3 and 5x5 filters share: the division of images among threads, windows of pixels, borders.

       columns (or channels of channels_last), V to a thread
             thread t-1 | thread t | thread t+1
     row r-1    v v v v | v v v v  | v v v v
     row r      v v v v | V V V V  | v v v v     a thread iterates down the `rows` rows of its row band; of each row it has
     row r+1    v v v v | v v v v  | v v v v     a window in registers: its own V elements and REACH columns beside them
        |
        v                                        global memory -> registers: own elements by one access, neighbours from the
                                                 L1 cache; the next row is loaded while one is computed

   A work item is a thread: V neighbours along the innermost dimension times one row band of one image. V is the widest access
   that all tensors allow: 16 bytes, 4 bytes, or one element with any strides. */
#ifndef CAMOX_STENCIL_CUH
#define CAMOX_STENCIL_CUH

#include "cuda_util.cuh"
#include "types.h"

/* How the images are divided among threads. */
struct camox_partition {
  int64_t channels, height, width;
  int rows;          /* rows of a row band */
  int64_t row_bands; /* of an image */
  int64_t vectors;   /* along the innermost dimension */
  int64_t items;     /* threads with work */
};

#define CAMOX_LEAST_BAND 2           /* rows */
#define CAMOX_LARGEST_BAND (1 << 16) /* so that rows of a band are counted in 32 bits */
/* Of a forward, which mostly writes: blocks that run at the same time then write close to each other, which memory is faster at.
   On an H100 10 to 17% of the time of contiguous images of 88 rows, which had bands of 22 to 30 rows before. */
#define CAMOX_FORWARD_BAND 6

/* Divides images into row bands for blocks of `per_block` threads that write. A band of more rows computes and reads less
   twice, `beside` rows in all; but the multiprocessor with the most blocks decides when the kernel ends, and its last blocks
   count as what keeps it busy at least. So of the numbers of bands that give 15 of 16 places a block and no band more than
   `most_rows`, the one with the fewest steps on that multiprocessor; the most bands where none does. Not all places: a wave of
   97% of them took 75 us on an H100, one and a half waves 92 (frequency_bands backward, channels_last bfloat16). */
static inline camox_partition camox_partition_of(const camox_places &places, bool last, int64_t batch, int64_t channels,
                                                 int64_t height, int64_t width, int lanes, int64_t per_block, int beside,
                                                 int most_rows) {
  camox_partition partition = {};
  partition.channels = channels, partition.height = height, partition.width = width;
  partition.vectors = (last ? channels : width) / lanes;
  const int64_t across = batch * partition.vectors * (last ? width : channels);
  const int64_t most = camox_ceil_div(height, CAMOX_LEAST_BAND), least = camox_ceil_div(height, most_rows);
  const int64_t at_once = places.all();
  int64_t bands = camox_ceil_div(at_once * per_block * 15, across * 16);
  bands = bands > most ? most : bands < least ? least : bands;
  int64_t fewest = INT64_MAX;
  for (const int64_t end = 4 * bands; bands <= end && bands <= most; ++bands) {
    const int64_t rows = camox_ceil_div(height, bands), blocks = camox_ceil_div(across * bands, per_block);
    const int64_t steps = camox_busiest(places, blocks) * (rows + beside);
    if (steps >= fewest) continue;
    fewest = steps;
    partition.rows = static_cast<int>(rows);
  }
  partition.row_bands = camox_ceil_div(height, partition.rows);
  partition.items = across * partition.row_bands;
  return partition;
}

/* Thread `item` -> image, channel, column and first row; neighbouring threads are neighbours in memory. */
template <int V, bool LAST>
__device__ __forceinline__ void camox_position(const camox_partition &partition, int64_t item, int64_t *b, int64_t *c,
                                               int64_t *column, int64_t *y) {
  int64_t vector, row_band;
  int64_t remaining = camox_divide(item, partition.vectors, &vector);
  if (LAST) {
    remaining = camox_divide(remaining, partition.width, column);
    *b = camox_divide(remaining, partition.row_bands, &row_band);
    *c = vector * V;
  } else {
    remaining = camox_divide(remaining, partition.row_bands, &row_band);
    *b = camox_divide(remaining, partition.channels, c);
    *column = vector * V;
  }
  *y = row_band * partition.rows;
}

__device__ __forceinline__ int64_t camox_offset(const camox_view4 &view, int64_t b, int64_t c, int64_t y, int64_t column) {
  return b * view.stride[0] + c * view.stride[1] + y * view.stride[2] + column * view.stride[3];
}

/* The image's rows as a row band that begins at y counts them: -above ... span-above-1; of those above it at most two count. */
struct camox_rows {
  int above, span;
};

__device__ __forceinline__ camox_rows camox_rows_at(const camox_partition &partition, int64_t y) {
  camox_rows rows;
  rows.above = y < 2 ? static_cast<int>(y) : 2;
  rows.span = rows.above + static_cast<int>(min(partition.height - y, static_cast<int64_t>(partition.rows) + 2));
  return rows;
}

__device__ __forceinline__ bool camox_inside(const camox_rows &rows, int row) {
  return static_cast<unsigned>(row + rows.above) < static_cast<unsigned>(rows.span);
}

/* One row of a thread's window: column k beside element i is x[center + i + k * step]. */
template <typename T, int V, bool LAST, int REACH>
struct camox_window {
  static constexpr int step = LAST ? V : 1, center = REACH * step, size = V + 2 * center;
  T x[size];

  /* N elements from `at` on, for one access */
  template <int N>
  static __device__ __forceinline__ T (&part(T *at)) [N] { return *reinterpret_cast<T(*)[N]>(at); }
};

/* N elements of a window from `at` on as float. They are copied first: read in pairs at an odd place, the window would lie in
   memory. */
template <int N, typename T>
__device__ __forceinline__ void camox_widen_part(float *to, const T *from, int at) {
  T part[N];
  float wide[N];
#pragma unroll
  for (int i = 0; i < N; ++i) part[i] = from[at + i];
  camox_to_floats(wide, part);
#pragma unroll
  for (int i = 0; i < N; ++i) to[at + i] = wide[i];
}

template <typename T, int V, bool LAST, int REACH>
__device__ __forceinline__ camox_window<float, V, LAST, REACH> camox_widen(const camox_window<T, V, LAST, REACH> &raw) {
  camox_window<float, V, LAST, REACH> wide;
  camox_widen_part<wide.center>(wide.x, raw.x, 0);
  camox_widen_part<V>(wide.x, raw.x, wide.center);
  camox_widen_part<wide.center>(wide.x, raw.x, wide.center + V);
  return wide;
}

template <int N, typename T>
__device__ __forceinline__ void camox_clear(T (&to)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = camox_from_float<T>(0.0f);
}

template <typename T, int V, bool LAST, int REACH>
__device__ __forceinline__ void camox_clear(camox_window<T, V, LAST, REACH> &window) {
  camox_clear(window.x);
}

/* Where the columns beside a thread's own lie, nearest first, as distances from its first element; columns that do not exist
   count as zeros. */
template <int V, bool LAST, int REACH>
struct camox_sides {
  /* one access of several columns: they lie side by side */
  typedef typename camox_select<V == 1 || LAST, int64_t, int>::type distance;
  distance left[REACH], right[REACH];
  bool has_left[REACH], has_right[REACH];
  camox_border border; /* what columns and rows off the image count as */
};

/* Borders other than zeros are for one column. */
template <int V, bool LAST, int REACH>
__device__ __forceinline__ camox_sides<V, LAST, REACH> camox_sides_at(const camox_partition &partition, int64_t column,
                                                                      int64_t stride, camox_border border) {
  typedef typename camox_sides<V, LAST, REACH>::distance distance;
  const distance step = V > 1 && !LAST ? 1 : static_cast<distance>(stride); /* 1: of vectors along the columns, for nvcc */
  const distance inside = border == CAMOX_BORDER_REFLECT ? step : 0;
  camox_sides<V, LAST, REACH> sides;
  sides.border = border;
#pragma unroll
  for (int k = 0; k < REACH; ++k) {
    const bool at_left = column <= k, at_right = column + (LAST ? 1 : V) + k >= partition.width;
    /* where zeros are not loaded, a distance is the same for all threads */
    const bool zeros = border == CAMOX_BORDER_ZEROS;
    sides.left[k] = at_left && !zeros ? inside : -(k + 1) * step;
    sides.right[k] = (LAST ? 0 : V - 1) + (at_right && !zeros ? -inside : (k + 1) * step);
    sides.has_left[k] = !at_left || !zeros;
    sides.has_right[k] = !at_right || !zeros;
  }
  return sides;
}

/* N elements at `at`, or zeros. */
template <int N, typename T>
__device__ __forceinline__ void camox_load_or_clear(T (&to)[N], const T *at, bool has) {
  camox_clear(to);
  if (has) camox_load<N>(to, at);
}

/* Loads the window whose own elements are at `at`; columns off the image are zeros. */
template <typename T, int V, bool LAST, int REACH, int KNOWN>
__device__ __forceinline__ void camox_fetch_at(camox_window<T, V, LAST, REACH> &raw, const T *at,
                                               const camox_sides<V, LAST, KNOWN> &sides) {
  static_assert(REACH <= 2 && REACH <= KNOWN, "sides must know the columns that are read");
  typedef camox_window<T, V, LAST, REACH> window;
  camox_load<V>(window::template part<V>(raw.x + window::center), at);
  if constexpr (!LAST && V > 1 && REACH == 2) {
    /* a thread at the border has both columns beside it or none */
    camox_load_or_clear<2>(window::template part<2>(raw.x), at - 2, sides.has_left[0]);
    camox_load_or_clear<2>(window::template part<2>(raw.x + window::center + V), at + V, sides.has_right[0]);
  } else if (LAST && sides.has_left[REACH - 1] && sides.has_right[REACH - 1]) {
    /* nearly all threads: nothing is cleared, no access needs a predicate */
#pragma unroll
    for (int k = 0; k < REACH; ++k) {
      camox_load<V>(window::template part<V>(raw.x + window::center - (k + 1) * V), at + sides.left[k]);
      camox_load<V>(window::template part<V>(raw.x + window::center + (k + 1) * V), at + sides.right[k]);
    }
  } else {
    constexpr int n = LAST ? V : 1;
#pragma unroll
    for (int k = 0; k < REACH; ++k) {
      camox_load_or_clear<n>(window::template part<n>(raw.x + window::center - (k + 1) * n), at + sides.left[k],
                             sides.has_left[k]);
      camox_load_or_clear<n>(window::template part<n>(raw.x + window::center + V + k * n), at + sides.right[k],
                             sides.has_right[k]);
    }
  }
}

/* Reads a thread's column of one image downwards, row by row, the border's rows and columns included. Rows count from the
   row band's first. */
template <typename T, int V, bool LAST, int REACH>
struct camox_reader {
  const T *next; /* the column in the row that is read next */
  camox_sides<V, LAST, REACH> sides;
  camox_rows rows;
};

template <typename T, int V, bool LAST, int REACH>
__device__ __forceinline__ camox_reader<T, V, LAST, REACH> camox_reader_at(const camox_partition &partition,
                                                                           const camox_view4 &view, camox_border border,
                                                                           int64_t b, int64_t c, int64_t column, int64_t y,
                                                                           int row) {
  camox_reader<T, V, LAST, REACH> reader;
  reader.next = static_cast<const T *>(view.data) + camox_offset(view, b, c, y + row, column);
  reader.sides = camox_sides_at<V, LAST, REACH>(partition, column, view.stride[3], border);
  reader.rows = camox_rows_at(partition, y);
  return reader;
}

/* Where the reader's next row, which is `row`, has the column; known: whether it counts as anything but zeros. */
template <typename T, int V, bool LAST, int KNOWN>
__device__ __forceinline__ const T *camox_next_of(camox_reader<T, V, LAST, KNOWN> &reader, const camox_view4 &view,
                                                  camox_border border, int row, bool &known) {
  const T *at = reader.next;
  known = true;
  if (!camox_inside(reader.rows, row)) {
    /* replicate: back to the image's side; reflect: as far again. Two rows off an image of two nothing is used. */
    const int place = row + reader.rows.above, beyond = place < 0 ? place : place - (reader.rows.span - 1);
    const int back = border == CAMOX_BORDER_REFLECT ? 2 * beyond : beyond;
    known = border != CAMOX_BORDER_ZEROS && camox_inside(reader.rows, row - back);
    at -= back * view.stride[2];
  }
  reader.next += view.stride[2];
  return at;
}

template <typename T, int V, bool LAST, int REACH, int KNOWN>
__device__ __forceinline__ void camox_fetch(camox_window<T, V, LAST, REACH> &raw, camox_reader<T, V, LAST, KNOWN> &reader,
                                            const camox_view4 &view, camox_border border, int row) {
  bool known;
  const T *const at = camox_next_of(reader, view, border, row, known);
  if (known)
    camox_fetch_at(raw, at, reader.sides);
  else
    camox_clear(raw);
}

/* Where a thread is in MAPS tensors of one shape, row by row. Accesses of several elements are only made where all of them have
   the same strides, those of `shared`. */
template <int V, int MAPS>
struct camox_cursor {
  static constexpr int distinct = V > 1 ? 1 : MAPS;
  int64_t offset[distinct];
};

template <int V, int MAPS>
__device__ __forceinline__ const camox_view4 &camox_strides(const camox_view4 (&maps)[MAPS], const camox_view4 &shared,
                                                            int map) {
  return V > 1 ? shared : maps[map];
}

template <int V, int MAPS>
__device__ __forceinline__ camox_cursor<V, MAPS> camox_cursor_at(const camox_view4 (&maps)[MAPS], const camox_view4 &shared,
                                                                 int64_t b, int64_t c, int64_t y, int64_t column) {
  camox_cursor<V, MAPS> cursor;
#pragma unroll
  for (int map = 0; map < cursor.distinct; ++map)
    cursor.offset[map] = camox_offset(camox_strides<V>(maps, shared, map), b, c, y, column);
  return cursor;
}

template <typename T, int V, int MAPS>
__device__ __forceinline__ T *camox_at(const camox_view4 (&maps)[MAPS], const camox_cursor<V, MAPS> &cursor, int map) {
  return static_cast<T *>(maps[map].data) + cursor.offset[V > 1 ? 0 : map];
}

template <int V, int MAPS>
__device__ __forceinline__ void camox_next_row(const camox_view4 (&maps)[MAPS], const camox_view4 &shared,
                                               camox_cursor<V, MAPS> &cursor) {
#pragma unroll
  for (int map = 0; map < cursor.distinct; ++map) cursor.offset[map] += camox_strides<V>(maps, shared, map).stride[2];
}

/* The next row of a thread's own elements of the first N tensors: zeros off the image and where there is no tensor. `all`:
   each of the N is there, known before the first row. */
template <int N, typename T, int V, int MAPS>
__device__ __forceinline__ void camox_fetch_maps(T (&raw)[N][V], const camox_view4 (&maps)[MAPS], const camox_view4 &shared,
                                                 camox_cursor<V, MAPS> &cursor, bool all, bool inside) {
  if (all && inside) {
#pragma unroll
    for (int map = 0; map < N; ++map) camox_load<V>(raw[map], camox_at<const T>(maps, cursor, map));
  } else {
#pragma unroll
    for (int map = 0; map < N; ++map)
      camox_load_or_clear<V>(raw[map], camox_at<const T>(maps, cursor, map), maps[map].data && inside);
  }
  camox_next_row(maps, shared, cursor);
}

/* ---- contiguous images whose threads access 16 bytes: the next rows in shared memory ----

     of each row, tensor and warp     [ left | lane 0 | lane 1 | ... | lane 31 | right ]     16 bytes each

   cp.async copies each lane's own columns, and the first and the last lane also those beside their warp's. ROWS rows are asked
   for at once while as many are computed: they are contiguous, and memory is faster at longer pieces. Rows off the image are
   those that the border repeats, or zeros; zeros are the rows of tensors that are not there, too, without a branch. */
template <int N, int THREADS, int ROWS>
struct camox_stage {
  uint4 word[2][ROWS][N][THREADS / CAMOX_WARP][1 + CAMOX_WARP + 1];
};

/* sm_75 cannot copy to shared memory and go on. */
template <typename T, int V>
static constexpr bool camox_stages = CAMOX_CUDA_ARCH >= 800 && V * sizeof(T) == 16;

/* The window whose own elements are at `own` of a stage; columns off the image are those that the border repeats, or zeros. */
template <typename T, int V, int REACH, int KNOWN>
__device__ __forceinline__ void camox_receive(camox_window<T, V, false, REACH> &raw, const T *own,
                                              const camox_sides<V, false, KNOWN> &sides) {
  typedef camox_window<T, V, false, REACH> window;
  camox_clear(raw);
  camox_load_shared(window::template part<V>(raw.x + window::center), own);
  /* two columns are read by one access, and never repeated */
  const int left = REACH == 1 ? sides.left[0] : -REACH, right = REACH == 1 ? sides.right[0] : V;
  if (sides.has_left[0]) camox_load_shared(window::template part<REACH>(raw.x), own + left);
  if (sides.has_right[0]) camox_load_shared(window::template part<REACH>(raw.x + window::center + V), own + right);
}

/* step(own, r, ahead) for each row r of a row band and the REACH rows above and below it: own(map) is where a thread's columns
   of the first N tensors are, `ahead` by how many rows the cursor is further down. All lanes of a warp call. */
template <typename T, int V, int N, int MAPS, int THREADS, int ROWS, int REACH, typename Step>
__device__ __forceinline__ void camox_staged_band(camox_stage<N, THREADS, ROWS> &stage, const camox_view4 (&maps)[MAPS],
                                                  const camox_view4 &shared, camox_cursor<V, MAPS> &cursor,
                                                  const camox_sides<V, false, REACH> &sides, const camox_rows &image_rows,
                                                  int rows, const Step &step) {
  const int warp = static_cast<int>(threadIdx.x) / CAMOX_WARP, lane = static_cast<int>(threadIdx.x) % CAMOX_WARP;
  /* neighbours that the warp has no lane for */
  const bool beside_left = lane == 0 && sides.has_left[0] && sides.left[0] < 0;
  const bool beside_right = lane == CAMOX_WARP - 1 && sides.has_right[0] && sides.right[0] >= V;
  unsigned present = 0; /* bit i: there is a tensor i */
#pragma unroll
  for (int map = 0; map < N; ++map) present |= maps[map].data ? 1u << map : 0;
  /* rows off the image that count: one on each side, and from how far back they come */
  const int repeated = sides.border != CAMOX_BORDER_ZEROS;
  const int64_t back = (sides.border == CAMOX_BORDER_REFLECT ? 2 : repeated) * shared.stride[2];
  const auto request = [&](int half, int first) {
#pragma unroll
    for (int k = 0; k < ROWS; ++k) {
      const int row = first + k, place = row + image_rows.above;
      const unsigned counted = static_cast<unsigned>(image_rows.span + 2 * repeated);
      const unsigned has = static_cast<unsigned>(place + repeated) < counted ? present : 0;
      const int64_t shift = row < 0 && place < 0 ? back : place >= image_rows.span ? -back : 0;
#pragma unroll
      for (int map = 0; map < N; ++map) {
        uint4 *const word = &stage.word[half][k][map][warp][1 + lane];
        const T *const at = camox_at<const T>(maps, cursor, map) + shift;
        const int bytes = has & 1u << map ? 16 : 0;
        camox_cp_async_16(word, at, bytes);
        if (beside_left) camox_cp_async_16(word - 1, at - V, bytes);
        if (beside_right) camox_cp_async_16(word + 1, at + V, bytes);
      }
      camox_next_row(maps, shared, cursor);
    }
  };
  int half = 0;
  request(half, -REACH);
  camox_cp_async_commit();
  for (int first = -REACH; first < rows + REACH; first += ROWS) {
    __syncwarp(); /* all lanes have read what is overwritten now */
    /* behind the last rows there is nothing to copy, but of two rows the branch would make frequency_bands spill */
    if (ROWS <= 2 || first + ROWS < rows + REACH)
      request(half ^ 1, first + ROWS);
    else
      for (int k = 0; k < ROWS; ++k) camox_next_row(maps, shared, cursor); /* `ahead` counts them */
    camox_cp_async_commit();
    camox_cp_async_wait<1>();
    __syncwarp();
#pragma unroll
    for (int k = 0; k < ROWS; ++k) {
      const auto own = [&](int map) { return reinterpret_cast<const T *>(&stage.word[half][k][map][warp][1 + lane]); };
      step(own, first + k, 2 * ROWS - k);
    }
    half ^= 1;
  }
  camox_cp_async_wait<0>();
  __syncwarp();
}

/* Of a forward whose rows are staged, or not: its bands and the row above and the row below them are two halves of a stage, all
   of whose rows are asked for before one is waited for. */
template <bool STAGED, int THREADS>
using camox_forward_stage = typename camox_select<STAGED, camox_stage<1, THREADS, (CAMOX_FORWARD_BAND + 2) / 2>, int>::type;

/* add(x, r) for each row r of a row band of `band_rows` rows and those above and below it, as floats, in order; a thread has
   `rows` of the band, none if it is one too many. The reader's next row is -1. */
template <bool STAGED, typename T, int V, bool LAST, typename Stage, typename Add>
__device__ __forceinline__ void camox_forward_band(Stage &stage, camox_reader<T, V, LAST, 1> &reader, const camox_view4 &view,
                                                   camox_border border, int band_rows, int rows, const Add &add) {
  typedef camox_window<T, V, LAST, 1> window;
  if constexpr (STAGED) {
    const camox_view4 views[1] = {view};
    camox_cursor<V, 1> cursor = {{reader.next - static_cast<const T *>(view.data)}};
    const auto receive_row = [&](const auto &own, int r, int) {
      window raw;
      camox_receive(raw, own(0), reader.sides);
      add(camox_widen(raw), r);
    };
    camox_staged_band<T>(stage, views, view, cursor, reader.sides, reader.rows, band_rows, receive_row);
  } else {
    window first, second, raw, next; /* all asked for before one is used: their waits are one */
    camox_fetch(first, reader, view, border, -1);
    camox_fetch(second, reader, view, border, 0);
    camox_fetch(raw, reader, view, border, 1);
    camox_fetch(next, reader, view, border, 2);
    add(camox_widen(first), -1);
    add(camox_widen(second), 0);
#pragma unroll 2
    for (int row = 0; row < rows; ++row) {
      const camox_window<float, V, LAST, 1> bottom = camox_widen(raw);
      raw = next;
      if (row + 2 < rows) camox_fetch(next, reader, view, border, row + 3);
      add(bottom, row + 1);
    }
  }
}

/* ---- channels_last: blocks whose threads exchange rows through shared memory ----

     columns     | reach |        written        | reach |
     of a block    c c c   c c c   ...   c c c     c c c        a column is `chunk` threads for V channels each

   A block goes down a row band of `columns` columns and `chunk` vectors of channels. Its first and last `reach` columns only
   serve their neighbours; those off the image are there too, of zeros. */
/* Vectors of channels of a column: enough to read memory in whole sectors or nearly, and few, so that a block has many columns */
#define CAMOX_LEAST_TILE 4
#define CAMOX_LARGEST_TILE 16

struct camox_tiles {
  int reach, chunk, columns;
  int64_t chunks, across, blocks; /* of an image's channels, of its width, and in all */
};

/* Threads of a block: whole warps, and those that write. */
static inline int camox_tile_threads(const camox_tiles &tiles) {
  return static_cast<int>(camox_ceil_div(tiles.columns * tiles.chunk, CAMOX_WARP) * CAMOX_WARP);
}

static inline int camox_tile_outputs(const camox_tiles &tiles) { return (tiles.columns - 2 * tiles.reach) * tiles.chunk; }

/* The division for blocks of at most so many threads that starts the fewest: few that are idle, few columns computed twice. */
static inline camox_tiles camox_tiles_of(int64_t vectors, int64_t width, int reach, int threads) {
  camox_tiles best = {};
  int64_t fewest = INT64_MAX;
  const int64_t first = camox_ceil_div(vectors, CAMOX_LARGEST_TILE), last = camox_ceil_div(vectors, CAMOX_LEAST_TILE);
  for (int64_t chunks = first; chunks <= last && chunks < first + CAMOX_LARGEST_TILE; ++chunks) {
    camox_tiles tiles = {};
    tiles.reach = reach, tiles.chunks = chunks;
    tiles.chunk = static_cast<int>(camox_ceil_div(vectors, chunks));
    tiles.across = camox_ceil_div(width, threads / tiles.chunk - 2 * reach);
    tiles.columns = static_cast<int>(camox_ceil_div(width, tiles.across)) + 2 * reach;
    const int64_t all = chunks * tiles.across * camox_tile_threads(tiles);
    if (all >= fewest) continue;
    fewest = all;
    best = tiles;
  }
  return best;
}

/* Launches a kernel of tiles whose blocks have at most so many threads. Row bands are those of images of whole tiles. */
template <typename Plan>
static inline void camox_launch_tiles(void (*kernel)(Plan), Plan plan, int reach, int most_threads, int lanes, void *stream) {
  const auto &p = plan.p;
  camox_tiles tiles = camox_tiles_of(p.channels / lanes, p.width, reach, most_threads);
  const int threads = camox_tile_threads(tiles);
  plan.partition = camox_partition_of(camox_places_of(kernel, threads), true, p.batch, tiles.chunks * tiles.chunk * lanes,
                                      p.height, tiles.across * (tiles.columns - 2 * reach), lanes, camox_tile_outputs(tiles),
                                      2 * reach, CAMOX_LARGEST_BAND);
  plan.partition.channels = p.channels, plan.partition.width = p.width, plan.partition.vectors = p.channels / lanes;
  tiles.blocks = p.batch * plan.partition.row_bands * tiles.across * tiles.chunks;
  plan.tiles = tiles;
  CAMOX_LAUNCH(kernel, camox_grid(tiles.blocks), threads, 0, stream, plan);
}

/* Where a thread of a block is. Positions off the image are moved to its side, so that they can be read; beyond: by how many
   columns. */
struct camox_tile_place {
  int64_t b, c, column, y;
  int beyond;
  bool exists, writes; /* false: a thread too many; only serves its neighbours */
};

template <int V>
__device__ __forceinline__ camox_tile_place camox_tile_at(const camox_tiles &tiles, const camox_partition &partition,
                                                          int64_t block) {
  const int thread = static_cast<int>(threadIdx.x), slot = thread / tiles.chunk, lane = thread % tiles.chunk;
  int64_t chunk, tile, row_band;
  camox_tile_place place;
  int64_t remaining = camox_divide(block, tiles.chunks, &chunk);
  remaining = camox_divide(remaining, tiles.across, &tile);
  place.b = camox_divide(remaining, partition.row_bands, &row_band);
  const int64_t column = tile * (tiles.columns - 2 * tiles.reach) + slot - tiles.reach, vector = chunk * tiles.chunk + lane;
  place.column = max(static_cast<int64_t>(0), min(column, partition.width - 1));
  place.c = min(vector, partition.vectors - 1) * V;
  place.y = row_band * partition.rows;
  place.beyond = static_cast<int>(column - place.column);
  place.exists = slot < tiles.columns && vector < partition.vectors;
  place.writes = place.exists && place.beyond == 0 && slot >= tiles.reach && slot < tiles.columns - tiles.reach;
  return place;
}

/* V values of a thread in a buffer of a block of at most THREADS: pieces of up to 16 bytes, side by side for side-by-side
   threads. */
template <int THREADS, int V>
__device__ __forceinline__ void camox_put_tile(float *buffer, const float (&from)[V], int thread) {
  camox_put_floats(buffer + thread * camox_piece<V>, from, THREADS);
}

template <int THREADS, int V>
__device__ __forceinline__ void camox_get_tile(float (&to)[V], const float *buffer, int thread) {
  camox_get_floats(to, buffer + thread * camox_piece<V>, THREADS);
}

/* ---- for launchers: a struct Op has params, maps(p), backward_reads_x, run<T> and launch<T, V, LAST> ---- */

/* Whether a tensor of these sizes, if there is one, can be accessed `lanes` elements at a time along dimension `inner`. */
static inline bool camox_view_fits(const camox_view4 &view, const int64_t (&sizes)[4], int inner, int lanes, int element) {
  if (view.data == nullptr) return true;
  if (sizes[inner] % lanes != 0 || !camox_aligned(view.data, lanes * element)) return false;
  for (int i = 0; i < 4; ++i) {
    if (i == inner ? view.stride[i] != 1 : sizes[i] > 1 && view.stride[i] % lanes != 0) return false;
  }
  return true;
}

/* The first of the tensors that is there, or the last. */
template <int MAPS>
static inline const camox_view4 &camox_first_map(const camox_view4 (&maps)[MAPS]) {
  int map = 0;
  while (map < MAPS - 1 && maps[map].data == nullptr) ++map;
  return maps[map];
}

/* Whether all can be accessed so, and have the same strides. */
template <int MAPS>
static inline bool camox_maps_fit(const camox_view4 (&maps)[MAPS], const int64_t (&sizes)[4], int inner, int lanes,
                                  int element) {
  bool fit = true;
  for (int map = 0; map < MAPS; ++map) {
    fit = fit && camox_view_fits(maps[map], sizes, inner, lanes, element);
    for (int i = 0; i < 4 && maps[map].data; ++i) fit = fit && maps[map].stride[i] == camox_first_map(maps).stride[i];
  }
  return fit;
}

/* Whether x, grad_x and all maps can be accessed `lanes` elements at a time along the innermost dimension. */
template <typename Params, int MAPS>
static inline bool camox_fits(const Params *p, const camox_view4 (&maps)[MAPS], int lanes, int element) {
  const int64_t sizes[4] = {p->batch, p->channels, p->height, p->width};
  const int inner = p->channels_last ? 1 : 3;
  return camox_view_fits(p->x, sizes, inner, lanes, element) && camox_view_fits(p->grad_x, sizes, inner, lanes, element) &&
         camox_maps_fit(maps, sizes, inner, lanes, element);
}

template <typename Op, typename T, int V>
static inline void camox_launch_layout(const typename Op::params *p, bool backward, void *stream) {
  if (p->channels_last)
    Op::template launch<T, V, true>(p, backward, stream);
  else
    Op::template launch<T, V, false>(p, backward, stream);
}

/* Op::launch with the widest access that fits: 16 bytes, 4 bytes, or element by element. */
template <typename Op, typename T>
static inline void camox_launch_widest(const typename Op::params *p, bool backward, void *stream) {
  constexpr int element = static_cast<int>(sizeof(T)), widest = camox_lanes<T>::value, middle = 4 / element;
  if (camox_fits(p, Op::maps(p), widest, element))
    camox_launch_layout<Op, T, widest>(p, backward, stream);
  else if (middle > 1 && camox_fits(p, Op::maps(p), middle, element))
    camox_launch_layout<Op, T, middle>(p, backward, stream);
  else
    camox_launch_layout<Op, T, 1>(p, backward, stream);
}

/* Op::run for the element type, on the views that this direction has: 0 or a cudaError_t. */
template <typename Op>
static inline int camox_run(const typename Op::params *given, bool backward, void *stream) {
  typename Op::params own = *given, *p = &own;
  if (p->batch * p->channels * p->height * p->width == 0) return cudaSuccess;
  if (!backward) p->grad_x.data = nullptr;
  if (backward && !Op::backward_reads_x) p->x.data = nullptr;
  switch (p->dtype) {
    case CAMOX_F32: Op::template run<float>(p, backward, stream); break;
    case CAMOX_BF16: Op::template run<__nv_bfloat16>(p, backward, stream); break;
    case CAMOX_F16: Op::template run<__half>(p, backward, stream); break;
    default: return cudaErrorInvalidValue;
  }
  return camox_launch_status();
}

#endif
