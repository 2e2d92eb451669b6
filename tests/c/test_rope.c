/* rope against a plain double loop: every kernel of this machine, pairings, tables, positions, layouts and sizes around
 * vectors. */
#include "../../csrc/rope/rope.h"
#include "camox_test.h"

typedef enum { ROWS_OF_TOKENS, ROWS_OF_POSITIONS, ROWS_PACKED, ROWS } rows_kind;

/* positions where they are given or follow from cu_seqlens, else token t has row t */
static int64_t row_of(const camox_rope_params *p, int64_t b, int64_t t) {
  if (p->positions) return p->positions[b * p->position_stride[0] + t * p->position_stride[1]];
  int64_t begin = 0;
  for (int64_t s = 0; p->cu_seqlens && s < p->sequences; ++s)
    if (p->cu_seqlens[s] <= t) begin = p->cu_seqlens[s];
  return t - begin;
}

/* The rotation of element d of a token: its partner, the partner's sign, the tables' column of its own angle. */
typedef struct {
  int64_t partner, column;
  double sign;
} rotation;

static rotation rotation_of(const camox_rope_params *p, int64_t d) {
  int64_t half = p->rotary_dim / 2;
  int first = p->interleaved ? d % 2 == 0 : d < half;
  int64_t pair = p->interleaved ? d / 2 : d % half;
  rotation found = {p->interleaved ? d ^ 1 : (d + half) % p->rotary_dim, p->table_columns == half ? pair : d, first ? -1 : 1};
  return found;
}

static double table_at(const camox_rope_params *p, const void *table, int64_t row, int64_t column) {
  return test_get(p->dtype == CAMOX_F64 ? CAMOX_F64 : CAMOX_F32, table, row * p->table_columns + column);
}

/* y [B,H,T,D]; with grad_cos also the sums over input and x, the incoming gradient, of a forward that was not transposed */
static void naive(const camox_rope_params *p, const test_image *x, const test_image *input, double *y, double *grad_cos,
                  double *grad_sin) {
  TEST_EACH(x, b, h, t, d) {
    double value = test_at(x, b, h, t, d);
    if (d < p->rotary_dim) {
      rotation own = rotation_of(p, d), other = rotation_of(p, own.partner);
      int64_t row = row_of(p, b, t), sine = p->transposed ? other.column : own.column;
      double partner = test_at(x, b, h, t, own.partner) * table_at(p, p->sin, row, sine);
      if (grad_cos) {
        grad_cos[row * p->table_columns + own.column] += value * test_at(input, b, h, t, d);
        grad_sin[row * p->table_columns + own.column] += value * own.sign * test_at(input, b, h, t, own.partner);
      }
      value = value * table_at(p, p->cos, row, own.column) + (p->transposed ? -own.sign : own.sign) * partner;
    }
    *y++ = value;
  }
}

static void run(camox_rope_kernel *kernel, const camox_rope_params *p, int64_t items, int pieces) {
  for (int piece = 0; piece < pieces; ++piece) kernel(p, items * piece / pieces, items * (piece + 1) / pieces);
}

/* A table of exactly its size, filled with random numbers or left as the pattern, as an image. */
static test_image table_of(camox_dtype dtype, int64_t rows, int64_t columns, int filled) {
  int64_t size[4] = {1, 1, rows, columns};
  camox_dtype real = dtype == CAMOX_F64 ? CAMOX_F64 : CAMOX_F32;
  return filled ? test_input(real, TEST_CONTIGUOUS, size) : test_output(real, 0, 0, size);
}

typedef struct {
  int interleaved, transposed, per_element;
  rows_kind rows;
  int64_t rotary_dim;
} options;

static void test_case(camox_isa isa, camox_dtype dtype, test_layout layout, const int64_t size[4], options o) {
  static const int64_t many_positions[6] = {3, 0, 3, 2, 4, 3};
  static const int32_t cu_seqlens[4] = {0, 2, 2, 3};
  camox_rope_params p = {.dtype = dtype, .interleaved = o.interleaved, .transposed = o.transposed};
  p.batch = size[0], p.heads = size[1], p.length = size[2], p.dim = size[3];
  p.rotary_dim = o.rotary_dim, p.table_columns = o.per_element ? o.rotary_dim : o.rotary_dim / 2;
  p.table_length = o.rows == ROWS_OF_TOKENS ? p.length : 5;
  if (o.rows == ROWS_OF_POSITIONS) p.positions = many_positions, p.position_stride[0] = p.position_stride[1] = 1;
  if (o.rows == ROWS_PACKED) p.cu_seqlens = cu_seqlens, p.sequences = 3;
  test_image x = test_input(dtype, layout, size), input = test_input(dtype, layout, size);
  test_image y = test_output(dtype, layout == TEST_CHANNELS_LAST, layout == TEST_STRIDED, size);
  test_image cosines = table_of(dtype, p.table_length, p.table_columns, 1);
  test_image sines = table_of(dtype, p.table_length, p.table_columns, 1);
  test_image grad_cos = table_of(dtype, p.table_length, p.table_columns, 0);
  test_image grad_sin = table_of(dtype, p.table_length, p.table_columns, 0);
  p.x = x.view, p.y = y.view, p.input = input.view;
  p.cos = cosines.view.data, p.sin = sines.view.data, p.grad_cos = grad_cos.view.data, p.grad_sin = grad_sin.view.data;
  char what[200];
  snprintf(what, sizeof what, "%s %s %s (%d,%d,%d,%d) r %d interleaved %d transposed %d per element %d rows %d",
           camox_isa_name(isa), test_dtype_names[dtype], test_layout_names[layout], (int)size[0], (int)size[1], (int)size[2],
           (int)size[3], (int)o.rotary_dim, o.interleaved, o.transposed, o.per_element, (int)o.rows);

  double *truth = test_values(&x, 1), *truth_cos = test_values(&cosines, 1), *truth_sin = test_values(&sines, 1);
  double error, allowed;
  naive(&p, &x, &input, truth, o.transposed ? truth_cos : NULL, truth_sin);
  TEST(camox_rope_check(&p, 0) == CAMOX_OK && camox_rope_check_values(&p) == CAMOX_OK, "%s: %s", what, camox_last_error());
  run(camox_rope_forward(dtype, isa), &p, camox_rope_items(&p), 1 + o.per_element);
  TEST(test_close(&y, truth, &error, &allowed), "%s: off by %g, allowed %g", what, error, allowed);
  TEST(test_untouched(&y), "%s: written outside its elements", what);
  if (o.transposed) { /* the backward of a forward that was not */
    int64_t *order = malloc((size_t)(p.table_length + 1 + p.batch * p.length) * sizeof *order);
    p.totals = malloc((size_t)(2 * p.table_length * p.table_columns + 1) * sizeof *p.totals);
    if (order == NULL || p.totals == NULL) abort();
    if (o.rows != ROWS_OF_TOKENS) {
      camox_rope_sort_tokens(&p, order, order + p.table_length + 1);
      p.row_begin = order, p.tokens = order + p.table_length + 1;
    }
    memset(y.buffer, 0xa5, y.bytes);
    TEST(camox_rope_check(&p, 1) == CAMOX_OK, "%s: %s", what, camox_last_error());
    run(camox_rope_backward(dtype, isa), &p, camox_rope_backward_items(&p), 1 + o.per_element);
    TEST(test_close(&y, truth, &error, &allowed), "%s: gradient off by %g, allowed %g", what, error, allowed);
    TEST(test_untouched(&y), "%s: gradient written outside its elements", what);
    TEST(test_close(&grad_cos, truth_cos, &error, &allowed), "%s: cos's off by %g, allowed %g", what, error, allowed);
    TEST(test_close(&grad_sin, truth_sin, &error, &allowed), "%s: sin's off by %g, allowed %g", what, error, allowed);
    free(order), free(p.totals);
  }
  free(truth), free(truth_cos), free(truth_sin);
  test_image *const all[] = {&x, &input, &y, &cosines, &sines, &grad_cos, &grad_sin};
  for (size_t i = 0; i < sizeof all / sizeof *all; ++i) test_free(all[i]);
}

static void refused(const camox_rope_params *p, int backward, int values, const char *message) {
  int status = values ? camox_rope_check_values(p) : camox_rope_check(p, backward);
  TEST(status == CAMOX_INVALID_ARGUMENT && strstr(camox_last_error(), message), "%s: got %d, %s", message, status,
       camox_last_error());
}

static void test_checks_refuse(void) {
  float elements[24], angles[8] = {0};
  int64_t positions[3] = {0, 1, 3};
  int32_t cu_seqlens[3] = {0, 2, 3};
  const camox_rope_params good = {.batch = 1,
                                  .heads = 2,
                                  .length = 3,
                                  .dim = 4,
                                  .rotary_dim = 4,
                                  .table_length = 3,
                                  .table_columns = 2,
                                  .cos = angles,
                                  .sin = angles,
                                  .x = {elements, {24, 12, 4, 1}},
                                  .y = {elements, {24, 12, 4, 1}}};
  TEST(camox_rope_check(&good, 0) == CAMOX_OK && camox_rope_check(&good, 1) == CAMOX_OK, "%s", camox_last_error());
  camox_rope_params p = good;
  p.dtype = CAMOX_DTYPE_COUNT, refused(&p, 0, 0, "dtype code"), p = good;
  p.heads = -1, refused(&p, 0, 0, "negative size"), p = good;
  p.rotary_dim = 3, refused(&p, 0, 0, "rotary_dim must be even"), p = good;
  p.rotary_dim = 6, refused(&p, 0, 0, "rotary_dim must be even"), p = good;
  p.table_columns = 3, refused(&p, 0, 0, "columns, got 3"), p = good;
  p.table_length = 2, refused(&p, 0, 0, "fewer than the 3 positions"), p = good;
  p.y.stride[1] = 0, refused(&p, 0, 0, "share memory"), p = good;
  p.positions = positions, p.position_stride[1] = 1, refused(&p, 0, 1, "got 3 at token 2");
  refused(&p, 1, 0, "order of the tokens"), positions[0] = -1, refused(&p, 0, 1, "got -1 at token 0");
  p.cu_seqlens = cu_seqlens, p.sequences = 2, refused(&p, 0, 0, "not both"), p.positions = NULL;
  p.batch = 2, refused(&p, 0, 0, "(total, H, D)"), p.batch = 1;
  TEST(camox_rope_check_values(&p) == CAMOX_OK, "%s", camox_last_error());
  cu_seqlens[0] = 1, refused(&p, 0, 1, "cu_seqlens[0] must be 0, got 1"), cu_seqlens[0] = 0;
  cu_seqlens[1] = 4, refused(&p, 0, 1, "sequence 0 has 4 tokens"), p.table_length = 4, refused(&p, 0, 1, "must not fall");
  cu_seqlens[1] = 2, cu_seqlens[2] = 4, refused(&p, 0, 1, "must end with the 3 tokens of x, got 4");
}

int main(void) {
  /* one pair; around one and two vectors of pairs on every instruction set; more tokens than a tile holds; empty */
  static const int64_t sizes[][4] = {{2, 2, 3, 2},  {2, 3, 3, 7},    {1, 2, 3, 16}, {2, 1, 3, 33},
                                     {1, 2, 3, 70}, {1, 2, 3, 4099}, {0, 3, 4, 4},  {2, 0, 4, 4}};
  test_checks_refuse();
  for (int isa = 0; isa < CAMOX_ISA_COUNT; ++isa) {
    if (!camox_isa_supported((camox_isa)isa)) {
      printf("rope: %s is not on this machine\n", camox_isa_name((camox_isa)isa));
      continue;
    }
    for (int dtype = 0; dtype < CAMOX_DTYPE_COUNT; ++dtype)
      for (int layout = 0; layout < TEST_LAYOUTS; ++layout)
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; ++i)
          for (int flags = 0; flags < 8; ++flags)
            for (int rows = 0; rows < ROWS; ++rows) {
              if (rows != ROWS_OF_TOKENS && (sizes[i][2] != 3 || (rows == ROWS_PACKED && sizes[i][0] != 1))) continue;
              int64_t even = sizes[i][3] / 2 * 2;
              options o = {flags & 1, flags >> 1 & 1, flags >> 2 & 1, (rows_kind)rows, i % 2 && even > 4 ? even - 4 : even};
              test_case((camox_isa)isa, (camox_dtype)dtype, (test_layout)layout, sizes[i], o);
            }
    static const int64_t many_tokens[4] = {1, 2, 130, 6};
    test_case((camox_isa)isa, CAMOX_F32, TEST_CONTIGUOUS, many_tokens, (options){.rotary_dim = 6});
  }
  return test_report("rope");
}
