/* moe against plain double loops: every kernel of this machine, scores, capacities, masks and sizes around vectors, blocks and
 * chunks. */
#include "../../csrc/moe/moe.h"
#include "../../csrc/moe/moe_plan.h"
#include "camox_test.h"

typedef struct {
  int64_t rows, experts, top_k, row_size;
} sizes;

typedef struct {
  camox_isa isa;
  camox_dtype dtype, real;
  sizes n;
  int64_t capacity;
  int score, masked, padded;
  char what[160];
} options;

/* A buffer of exactly its size, so that a sanitizer sees accesses beyond it; random numbers or the pattern. */
static test_image rows_of(camox_dtype dtype, int64_t rows, int64_t columns, int filled) {
  int64_t size[4] = {1, 1, rows, columns};
  return filled ? test_input(dtype, TEST_CONTIGUOUS, size) : test_output(dtype, 0, 0, size);
}

static int64_t *indices_of(int64_t count) {
  int64_t *found = malloc((size_t)(count ? count : 1) * sizeof *found);
  if (found == NULL) abort();
  memset(found, 0xa5, (size_t)count * sizeof *found);
  return found;
}

static void run_route(camox_moe_route_kernel *kernel, const camox_moe_route_params *p) {
  int64_t blocks = camox_moe_blocks(p), half = blocks / 2;
  kernel(p, 0, half), kernel(p, half, blocks);
}

static void run_rows(camox_moe_rows_kernel *kernel, const camox_moe_rows_params *p, int fills_places) {
  int64_t items = camox_moe_items(p, fills_places), third = items / 3;
  kernel(p, 0, third), kernel(p, third, items);
}

/* weights in double, experts and places as the contract says */
static void naive_route(const options *o, const test_image *logits, const uint8_t *valid, double *weights, int64_t *experts,
                        int64_t *counts, int64_t *position) {
  const sizes n = o->n;
  memset(counts, 0, (size_t)n.experts * sizeof *counts);
  for (int64_t row = 0; row < n.rows; ++row) {
    double over_all = 0, over_chosen = 0, largest = -INFINITY;
    for (int64_t e = 0; e < n.experts; ++e) largest = fmax(largest, test_at(logits, 0, 0, row, e));
    for (int64_t e = 0; e < n.experts; ++e) over_all += exp(test_at(logits, 0, 0, row, e) - largest);
    for (int64_t k = 0; k < n.top_k; ++k) {
      int64_t slot = row * n.top_k + k, best = -1;
      for (int64_t e = 0; e < n.experts; ++e) {
        int taken = 0;
        for (int64_t j = 0; j < k; ++j) taken |= experts[slot - k + j] == e;
        if (!taken && (best < 0 || test_at(logits, 0, 0, row, e) > test_at(logits, 0, 0, row, best))) best = e;
      }
      double logit = test_at(logits, 0, 0, row, best);
      experts[slot] = best;
      weights[slot] = o->score == CAMOX_MOE_SIGMOID_TOPK ? 1 / (1 + exp(-logit)) : exp(logit - largest);
      over_chosen += weights[slot];
      position[slot] = valid[row] && (o->capacity < 0 || counts[best] < o->capacity) ? counts[best]++ : -1;
    }
    for (int64_t k = 0; k < n.top_k; ++k) {
      int64_t slot = row * n.top_k + k;
      if (o->score == CAMOX_MOE_TOPK_SOFTMAX) weights[slot] /= over_chosen;
      if (o->score == CAMOX_MOE_SOFTMAX_TOPK) weights[slot] /= over_all;
      if (position[slot] < 0) weights[slot] = 0;
    }
  }
  int64_t offset = 0;
  for (int64_t e = 0; e < n.experts; offset += counts[e++])
    for (int64_t slot = 0; slot < n.rows * n.top_k; ++slot)
      if (experts[slot] == e && position[slot] >= 0) position[slot] += offset;
}

static void close_to(const options *o, const char *name, const test_image *ours, const double *truth) {
  double error, allowed;
  TEST(test_close(ours, truth, &error, &allowed), "%s: %s off by %g, allowed %g", o->what, name, error, allowed);
}

/* dispatch, combine and its backward with a routing that was checked */
static void test_rows(const options *o, const int64_t *experts, const int64_t *offsets, const int64_t *position,
                      const test_image *weights) {
  const sizes n = o->n;
  camox_moe_rows_params p = {.dtype = o->dtype, .rows = n.rows, .top_k = n.top_k, .num_experts = n.experts};
  p.row_size = p.place_stride = p.row_stride = n.row_size;
  p.capacity = o->padded ? (o->capacity < 0 ? n.rows : o->capacity) : -1;
  p.experts = experts, p.offsets = offsets, p.position = position;
  const int64_t places = camox_moe_places(&p), slots = n.rows * n.top_k;
  test_image x = rows_of(o->dtype, n.rows, n.row_size, 1), copies = rows_of(o->dtype, places, n.row_size, 0);
  test_image y = rows_of(o->dtype, places, n.row_size, 1), combined = rows_of(o->dtype, n.rows, n.row_size, 0);
  test_image grad_y = rows_of(o->dtype, places, n.row_size, 0), grad_weights = rows_of(o->real, n.rows, n.top_k, 0);
  test_image partial = rows_of(o->real, n.rows * camox_moe_chunks(&p), n.top_k, 0);
  double *of_places = test_values(&y, 1), *of_grad_y = test_values(&y, 1), *of_rows = test_values(&x, 1);
  double *of_weights = calloc((size_t)slots + 1, sizeof *of_weights);
  if (of_weights == NULL) abort();
  for (int64_t slot = 0; slot < slots; ++slot) {
    int64_t place = camox_moe_place(&p, slot), row = slot / n.top_k;
    for (int64_t i = 0; place >= 0 && i < n.row_size; ++i) {
      double weight = test_get(o->real, weights->buffer, slot), value = test_at(&x, 0, 0, row, i);
      of_places[place * n.row_size + i] = value;
      of_grad_y[place * n.row_size + i] = weight * value;
      of_rows[row * n.row_size + i] += weight * test_at(&y, 0, 0, place, i);
      of_weights[slot] += value * test_at(&y, 0, 0, place, i);
    }
  }
  uint8_t *taken = calloc((size_t)slots + 1, 1);
  if (taken == NULL) abort();
  TEST(camox_moe_rows_check(&p) == CAMOX_OK && camox_moe_check_places(&p, taken) == CAMOX_OK, "%s: %s", o->what,
       camox_last_error());
  free(taken);
  p.row = x.buffer, p.place = copies.buffer;
  run_rows(camox_moe_dispatch(o->dtype, o->isa), &p, 1);
  close_to(o, "dispatch", &copies, of_places);
  p.place = y.buffer, p.weights = weights->buffer, p.grad_place = grad_y.buffer, p.grad_weights = grad_weights.buffer;
  p.partial = partial.buffer;
  run_rows(camox_moe_combine_backward(o->dtype, o->isa), &p, 1);
  camox_moe_sum_chunks(&p);
  close_to(o, "grad_y", &grad_y, of_grad_y);
  close_to(o, "grad_weights", &grad_weights, of_weights);
  p.row = combined.buffer;
  run_rows(camox_moe_combine(o->dtype, o->isa), &p, 0);
  close_to(o, "combine", &combined, of_rows);
  free(of_places), free(of_grad_y), free(of_rows), free(of_weights);
  test_image *const all[] = {&x, &copies, &y, &combined, &grad_y, &grad_weights, &partial};
  for (size_t i = 0; i < sizeof all / sizeof *all; ++i) test_free(all[i]);
}

/* The gradient of the losses, from the slopes, whose loss is compared. */
static void test_aux(const options *o, const test_image *logits, const uint8_t *valid, camox_moe_route_params p) {
  const sizes n = o->n;
  double *sums = calloc((size_t)n.experts + 2, sizeof *sums), *p_of = test_values(logits, 1), number = 0;
  double *truth = test_values(logits, 1);
  if (sums == NULL) abort();
  for (int64_t row = 0; row < n.rows; ++row) {
    double sum = 0;
    for (int64_t e = 0; e < n.experts; ++e) sum += exp(test_at(logits, 0, 0, row, e));
    for (int64_t e = 0; e < n.experts; ++e) p_of[row * n.experts + e] = exp(test_at(logits, 0, 0, row, e)) / sum;
    number += valid[row];
    for (int64_t e = 0; e < n.experts; ++e) sums[e] += valid[row] * p_of[row * n.experts + e];
  }
  double loss = 0, counted = number > 1 ? number : 1;
  for (int64_t e = 0; e < n.experts; ++e)
    loss += (double)n.experts * (double)p.counts[e] / (counted * (double)n.top_k) * sums[e] / counted;
  test_image ours = rows_of(o->real, 1, 1, 0), slope = rows_of(o->real, 1, n.experts, 0), grad = rows_of(o->real, 1, 1, 1);
  test_image grad_logits = rows_of(o->dtype, n.rows, n.experts, 0);
  double *partial = calloc((size_t)(camox_moe_blocks(&p) * (n.experts + 2)) + 1, sizeof *partial);
  if (partial == NULL) abort();
  p.aux = CAMOX_MOE_SWITCH, p.partial = partial, p.loss = ours.buffer, p.slope = slope.buffer;
  p.grad = grad.buffer, p.grad_logits = grad_logits.buffer;
  run_route(camox_moe_aux_sums(o->dtype, o->isa), &p);
  camox_moe_aux_finish(&p);
  close_to(o, "switch", &ours, &loss);
  for (int64_t row = 0; row < n.rows; ++row) {
    double dot = 0;
    for (int64_t e = 0; e < n.experts; ++e) dot += p_of[row * n.experts + e] * test_at(&slope, 0, 0, 0, e);
    for (int64_t e = 0; e < n.experts; ++e)
      truth[row * n.experts + e] =
          valid[row] * test_at(&grad, 0, 0, 0, 0) * p_of[row * n.experts + e] * (test_at(&slope, 0, 0, 0, e) - dot);
  }
  run_route(camox_moe_aux_backward(o->dtype, o->isa), &p);
  TEST(test_untouched(&grad_logits), "%s: written outside", o->what);
  double error = 0, allowed = 8 * test_epsilon[o->dtype];
  for (int64_t i = 0; i < n.rows * n.experts; ++i)
    error = fmax(error, fabs(test_get(o->dtype, grad_logits.buffer, i) - truth[i]));
  TEST(error <= allowed, "%s: the loss's gradient off by %g", o->what, error);
  free(sums), free(p_of), free(truth), free(partial);
  test_free(&ours), test_free(&slope), test_free(&grad), test_free(&grad_logits);
}

/* Places of experts that were chosen before: those of routing. */
static void test_given_experts(const options *o, camox_moe_route_params p) {
  const int64_t slots = p.rows * p.top_k, *const position = p.position, *const order = p.order;
  p.dtype = CAMOX_F32, p.weights = NULL;
  p.position = indices_of(slots), p.order = indices_of(slots);
  TEST(camox_moe_check_experts(p.experts, slots, p.num_experts) == CAMOX_OK, "%s: %s", o->what, camox_last_error());
  run_route(camox_moe_count, &p);
  TEST(camox_moe_scan(&p) == CAMOX_OK, "%s: %s", o->what, camox_last_error());
  run_route(camox_moe_place_slots, &p);
  TEST(memcmp(p.position, position, (size_t)slots * sizeof *position) == 0, "%s: position of given experts", o->what);
  TEST(memcmp(p.order, order, (size_t)slots * sizeof *order) == 0, "%s: order of given experts", o->what);
  free(p.position), free(p.order);
}

static void test_case(options o) {
  const sizes n = o.n;
  const int64_t slots = n.rows * n.top_k;
  o.real = o.dtype == CAMOX_F64 ? CAMOX_F64 : CAMOX_F32;
  snprintf(o.what, sizeof o.what, "%s %s (%d,%d,%d,%d) capacity %d score %d masked %d padded %d", camox_isa_name(o.isa),
           test_dtype_names[o.dtype], (int)n.rows, (int)n.experts, (int)n.top_k, (int)n.row_size, (int)o.capacity, o.score,
           o.masked, o.padded);
  camox_moe_route_params p = {.dtype = o.dtype, .score = o.score, .rows = n.rows, .num_experts = n.experts};
  p.top_k = n.top_k, p.capacity = o.capacity;
  test_image logits = rows_of(o.dtype, n.rows, n.experts, 1), weights = rows_of(o.real, n.rows, n.top_k, 0);
  uint8_t *valid = malloc((size_t)n.rows + 1);
  double *of_weights = calloc((size_t)slots + 1, sizeof *of_weights);
  if (valid == NULL || of_weights == NULL) abort();
  for (int64_t row = 0; row < n.rows; ++row) valid[row] = !o.masked || row % 3 != 1;
  int64_t *experts = indices_of(slots), *position = indices_of(slots), *counts = indices_of(n.experts);
  naive_route(&o, &logits, valid, of_weights, experts, counts, position);
  p.logits = logits.buffer, p.logits_stride[0] = n.experts, p.logits_stride[1] = 1;
  if (o.masked) p.valid = valid, p.valid_stride = 1;
  p.weights = weights.buffer, p.experts = indices_of(slots), p.position = indices_of(slots), p.order = indices_of(slots);
  p.counts = indices_of(n.experts), p.offsets = indices_of(n.experts + 1);
  p.block_counts = indices_of(camox_moe_blocks(&p) * (n.experts + 1));
  p.scratch = test_scratch(CAMOX_MOE_SCRATCH);
  TEST(camox_moe_route_check(&p) == CAMOX_OK, "%s: %s", o.what, camox_last_error());
  run_route(camox_moe_choose(o.dtype, o.isa), &p);
  TEST(camox_moe_scan(&p) == CAMOX_OK, "%s: %s", o.what, camox_last_error());
  run_route(camox_moe_place_slots, &p);
  close_to(&o, "weights", &weights, of_weights);
  TEST(memcmp(p.experts, experts, (size_t)slots * sizeof *experts) == 0, "%s: experts", o.what);
  TEST(memcmp(p.position, position, (size_t)slots * sizeof *position) == 0, "%s: position", o.what);
  TEST(memcmp(p.counts, counts, (size_t)n.experts * sizeof *counts) == 0, "%s: counts", o.what);
  int64_t inverse = 0;
  for (int64_t slot = 0; slot < slots; ++slot) inverse += position[slot] >= 0 && p.order[position[slot]] == slot;
  TEST(inverse == p.offsets[n.experts], "%s: order", o.what);
  for (int64_t place = inverse; place < slots; ++place) TEST(p.order[place] == -1, "%s: order's tail", o.what);
  test_rows(&o, p.experts, p.offsets, p.position, &weights);
  test_aux(&o, &logits, valid, p);
  test_given_experts(&o, p);
  int64_t *const owned[] = {experts, position, counts, p.experts, p.position, p.order, p.counts, p.offsets, p.block_counts};
  for (size_t i = 0; i < sizeof owned / sizeof *owned; ++i) free(owned[i]);
  free(p.scratch), free(valid), free(of_weights), test_free(&logits), test_free(&weights);
}

static void test_activation(camox_isa isa, camox_dtype dtype, int activation, int64_t rows, int64_t hidden) {
  options o = {.isa = isa, .dtype = dtype, .real = dtype == CAMOX_F64 ? CAMOX_F64 : CAMOX_F32};
  snprintf(o.what, sizeof o.what, "%s %s activation %d (%d,%d)", camox_isa_name(isa), test_dtype_names[dtype], activation,
           (int)rows, (int)hidden);
  const int64_t wide = activation == CAMOX_EXPERT_SWIGLU ? 2 * hidden : hidden;
  test_image h = rows_of(dtype, rows, wide, 1), grad = rows_of(dtype, rows, hidden, 1), scale = rows_of(o.real, 1, rows, 1);
  test_image a = rows_of(dtype, rows, hidden, 0), scaled = rows_of(dtype, rows, hidden, 0);
  test_image grad_h = rows_of(dtype, rows, wide, 0), dots = rows_of(o.real, 1, rows, 0);
  double *of_a = test_values(&a, 1), *of_scaled = test_values(&a, 1), *of_h = test_values(&h, 1),
         *of_dots = test_values(&dots, 1);
  for (int64_t row = 0; row < rows; ++row) {
    const double by = test_at(&scale, 0, 0, 0, row);
    of_dots[row] = 0;
    for (int64_t i = 0; i < hidden; ++i) {
      const double x = test_at(&h, 0, 0, row, i), g = test_at(&grad, 0, 0, row, i), sigmoid = 1 / (1 + exp(-x));
      double y, *to = of_h + row * wide + i;
      if (activation == CAMOX_EXPERT_SWIGLU) {
        const double value = test_at(&h, 0, 0, row, hidden + i);
        y = x * sigmoid * value;
        to[0] = by * g * value * sigmoid * (1 + x * (1 - sigmoid)), to[hidden] = by * g * x * sigmoid;
      } else {
        const double below = 0.5 * erfc(-x / sqrt(2.0));
        y = x * below, *to = by * g * (below + x * exp(-x * x / 2) / sqrt(8 * atan(1.0)));
      }
      of_a[row * hidden + i] = y, of_scaled[row * hidden + i] = by * y, of_dots[row] += g * y;
    }
  }
  camox_moe_activation_params p = {.dtype = dtype, .activation = activation, .rows = rows, .hidden = hidden};
  p.h = h.buffer, p.grad = grad.buffer, p.scale = scale.buffer, p.grad_h = grad_h.buffer, p.dots = dots.buffer;
  TEST(camox_moe_activation_check(&p) == CAMOX_OK, "%s: %s", o.what, camox_last_error());
  p.a = a.buffer;
  camox_moe_activation(dtype, isa)(&p, 0, rows);
  p.a = scaled.buffer;
  camox_moe_activation_backward(dtype, isa)(&p, 0, rows / 2), camox_moe_activation_backward(dtype, isa)(&p, rows / 2, rows);
  close_to(&o, "a", &a, of_a), close_to(&o, "scaled", &scaled, of_scaled);
  close_to(&o, "grad_h", &grad_h, of_h), close_to(&o, "dots", &dots, of_dots);
  free(of_a), free(of_scaled), free(of_h), free(of_dots);
  test_image *const all[] = {&h, &grad, &scale, &a, &scaled, &grad_h, &dots};
  for (size_t i = 0; i < sizeof all / sizeof *all; ++i) test_free(all[i]);
}

static void refused(int status, const char *message) {
  TEST(status == CAMOX_INVALID_ARGUMENT && strstr(camox_last_error(), message), "%s: got %d, %s", message, status,
       camox_last_error());
}

static int check_places(const camox_moe_rows_params *p) {
  uint8_t taken[4] = {0};
  return camox_moe_check_places(p, taken);
}

static void test_checks_refuse(void) {
  const camox_moe_route_params good = {.rows = 2, .num_experts = 3, .top_k = 2};
  TEST(camox_moe_route_check(&good) == CAMOX_OK, "%s", camox_last_error());
  camox_moe_route_params p = good;
  p.dtype = CAMOX_DTYPE_COUNT, refused(camox_moe_route_check(&p), "dtype code"), p = good;
  p.rows = -1, refused(camox_moe_route_check(&p), "rows must be >= 0, got -1"), p = good;
  p.num_experts = 0, refused(camox_moe_route_check(&p), "from 1 to 1024, got 0"), p = good;
  p.num_experts = 1025, refused(camox_moe_route_check(&p), "from 1 to 1024, got 1025"), p = good;
  p.top_k = 0, refused(camox_moe_route_check(&p), "top_k must be from 1 to the number of experts, 3, got 0"), p = good;
  p.top_k = 4, refused(camox_moe_route_check(&p), "3, got 4"), p = good;
  p.score = 3, refused(camox_moe_route_check(&p), "score code 3"), p = good;
  p.aux = 4, refused(camox_moe_route_check(&p), "kind code 4");
  camox_moe_activation_params of = {.rows = 1, .hidden = 0};
  refused(camox_moe_activation_check(&of), "at least 1 element, got (1, 0)");
  of.hidden = 1, of.activation = 2, refused(camox_moe_activation_check(&of), "activation code 2");
  int64_t experts[4] = {0, 1, 2, 0}, offsets[4] = {0, 2, 3, 4}, position[4] = {0, 2, 3, 1};
  camox_moe_rows_params rows = {.rows = 2, .num_experts = 3, .top_k = 2, .row_size = 1, .capacity = -1};
  rows.experts = experts, rows.offsets = offsets, rows.position = position;
  TEST(camox_moe_rows_check(&rows) == CAMOX_OK && check_places(&rows) == CAMOX_OK, "%s", camox_last_error());
  rows.row_size = -1, refused(camox_moe_rows_check(&rows), "negative size"), rows.row_size = 1;
  position[3] = 4, refused(check_places(&rows), "got 4 in slot 3");
  position[3] = 2, refused(check_places(&rows), "every place once, got 2 again in slot 3");
  position[3] = -1, refused(check_places(&rows), "each of the 4 places that routing.offsets counts, got 3 copies");
  position[3] = 1;
  offsets[3] = 3, refused(check_places(&rows), "below 3, where routing.offsets ends, got 3 in slot 2"), offsets[3] = 4;
  rows.capacity = 1,
  refused(check_places(&rows), "has 1 places for an expert, and routing.offsets counts 2 copies for expert 0");
  rows.capacity = 2;
  TEST(check_places(&rows) == CAMOX_OK, "%s", camox_last_error());
  experts[3] = 1, position[3] = 3, refused(check_places(&rows), "below 3, where routing.offsets ends, got 3 in slot 3");
  experts[3] = 0, position[3] = 1;
  experts[1] = -1, refused(check_places(&rows), "experts must be >= 0 and < 3, got -1 in slot 1"), experts[1] = 1;
  offsets[1] = 5, refused(check_places(&rows), "got 5 at index 1"), offsets[1] = 2;
  offsets[2] = 1, refused(check_places(&rows), "got 1 at index 2");
}

int main(void) {
  /* one of all; around a vector of rows (2 to 16); a block of rows; a row of several chunks; nothing */
  static const sizes all[] = {{1, 1, 1, 1},    {3, 7, 3, 5}, {17, 5, 2, 33}, {130, 9, 4, 2},
                              {2, 3, 3, 4113}, {4, 2, 1, 0}, {0, 3, 2, 4}};
  test_checks_refuse();
  for (int isa = 0; isa < CAMOX_ISA_COUNT; ++isa) {
    if (!camox_isa_supported((camox_isa)isa)) {
      printf("moe: %s is not on this machine\n", camox_isa_name((camox_isa)isa));
      continue;
    }
    for (int dtype = 0; dtype < CAMOX_DTYPE_COUNT; ++dtype) {
      for (int64_t hidden = 1; hidden < 50; hidden += 15)
        for (int activation = 0; activation <= CAMOX_EXPERT_GELU; ++activation)
          test_activation((camox_isa)isa, (camox_dtype)dtype, activation, 3, hidden);
      for (size_t i = 0; i < sizeof all / sizeof *all; ++i)
        for (int score = 0; score <= CAMOX_MOE_SIGMOID_TOPK; ++score)
          for (int flags = 0; flags < 8; ++flags) {
            options o = {.isa = (camox_isa)isa, .dtype = (camox_dtype)dtype, .n = all[i], .score = score};
            o.masked = flags & 1, o.padded = flags >> 1 & 1;
            o.capacity = flags & 4 ? (all[i].rows * all[i].top_k + all[i].experts) / (2 * all[i].experts) : -1;
            test_case(o);
          }
    }
  }
  return test_report("moe");
}
