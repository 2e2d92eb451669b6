/* Checks, the scalar steps of routing and of the losses, and the table of variants. */
#include "moe.h"

#include <string.h>

#include "../common/check.h"
#include "../common/integers.h"
#include "../common/kernel_table.h"
#include "moe_plan.h"

static int check_sizes(int dtype, int64_t rows, int64_t experts, int64_t top_k) {
  CAMOX_REQUIRE(camox_check_dtype("moe", dtype));
  if (rows < 0) return camox_fail(CAMOX_INVALID_ARGUMENT, "moe: rows must be >= 0, got %lld", (long long)rows);
  if (experts < 1 || experts > CAMOX_MOE_MOST_EXPERTS)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "moe: the number of experts must be from 1 to %d, got %lld",
                      CAMOX_MOE_MOST_EXPERTS, (long long)experts);
  if (top_k < 1 || top_k > experts)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "moe: top_k must be from 1 to the number of experts, %lld, got %lld",
                      (long long)experts, (long long)top_k);
  return CAMOX_OK;
}

int camox_moe_route_check(const camox_moe_route_params *p) {
  if (p->score < CAMOX_MOE_TOPK_SOFTMAX || p->score > CAMOX_MOE_SIGMOID_TOPK)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "moe_route: unknown score code %d", p->score);
  if (p->aux < CAMOX_MOE_SWITCH || p->aux > CAMOX_MOE_USAGE_MSE)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "moe_aux_loss: unknown kind code %d", p->aux);
  return check_sizes(p->dtype, p->rows, p->num_experts, p->top_k);
}

int camox_moe_rows_check(const camox_moe_rows_params *p) {
  if (p->row_size < 0)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "moe: a row has a negative size, %lld", (long long)p->row_size);
  return check_sizes(p->dtype, p->rows, p->num_experts, p->top_k);
}

int camox_moe_activation_check(const camox_moe_activation_params *p) {
  CAMOX_REQUIRE(camox_check_dtype("moe_activation", p->dtype));
  if (p->activation < CAMOX_EXPERT_SWIGLU || p->activation > CAMOX_EXPERT_GELU)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "moe_activation: unknown activation code %d", p->activation);
  if (p->rows < 0 || p->hidden < 1)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "moe_activation: h must have rows of at least 1 element, got (%lld, %lld)",
                      (long long)p->rows, (long long)p->hidden);
  return CAMOX_OK;
}

#ifndef CAMOX_CUDA_PART
int camox_moe_check_experts(const int64_t *experts, int64_t slots, int64_t num_experts) {
  for (int64_t slot = 0; slot < slots; ++slot)
    if (experts[slot] < 0 || experts[slot] >= num_experts)
      return camox_fail(CAMOX_INVALID_ARGUMENT, "moe: routing.experts must be >= 0 and < %lld, got %lld in slot %lld",
                        (long long)num_experts, (long long)experts[slot], (long long)slot);
  return CAMOX_OK;
}

int camox_moe_check_places(const camox_moe_rows_params *p, uint8_t *taken) {
  const int64_t slots = p->rows * p->top_k, places = camox_moe_places(p);
  for (int64_t e = 0; e <= p->num_experts; ++e)
    if (p->offsets[e] < (e ? p->offsets[e - 1] : 0) || p->offsets[e] > slots)
      return camox_fail(CAMOX_INVALID_ARGUMENT,
                        "moe: routing.offsets must rise from 0 to at most the %lld slots, got %lld at index %lld",
                        (long long)slots, (long long)p->offsets[e], (long long)e);
  int status = p->capacity < 0 ? CAMOX_OK : camox_moe_check_experts(p->experts, slots, p->num_experts);
  if (status != CAMOX_OK) return status;
  int64_t copies = 0;
  for (int64_t slot = 0; slot < slots; ++slot) {
    const int64_t position = p->position[slot];
    if (position == -1) continue;
    if (p->capacity >= 0) {
      const int64_t expert = p->experts[slot], first = p->offsets[expert], end = p->offsets[expert + 1];
      if (position >= first + p->capacity && position < end)
        return camox_fail(CAMOX_INVALID_ARGUMENT,
                          "moe: padded=True has %lld places for an expert, and routing.offsets counts %lld copies for expert "
                          "%lld: give moe_routing a capacity_factor",
                          (long long)p->capacity, (long long)(end - first), (long long)expert);
    }
    int64_t place = position < 0 ? -1 : camox_moe_place(p, slot);
    if (place < 0 || place >= places || (p->capacity >= 0 && place / p->capacity != p->experts[slot]))
      return camox_fail(CAMOX_INVALID_ARGUMENT, "moe: routing.position must be -1 or a place among %lld, got %lld in slot %lld",
                        (long long)places, (long long)position, (long long)slot);
    const int64_t end = p->offsets[p->capacity < 0 ? p->num_experts : p->experts[slot] + 1];
    if (position >= end)
      return camox_fail(CAMOX_INVALID_ARGUMENT,
                        "moe: routing.position must lie below %lld, where routing.offsets ends, got %lld in slot %lld",
                        (long long)end, (long long)position, (long long)slot);
    if (taken[position])
      return camox_fail(CAMOX_INVALID_ARGUMENT, "moe: routing.position must have every place once, got %lld again in slot %lld",
                        (long long)position, (long long)slot);
    taken[position] = 1, ++copies;
  }
  if (copies != p->offsets[p->num_experts])
    return camox_fail(CAMOX_INVALID_ARGUMENT,
                      "moe: routing.position must have each of the %lld places that routing.offsets counts, got %lld copies",
                      (long long)p->offsets[p->num_experts], (long long)copies);
  return CAMOX_OK;
}

int64_t camox_moe_blocks(const camox_moe_route_params *p) { return camox_ceil_div(p->rows, camox_moe_block_rows(p)); }

int64_t camox_moe_items(const camox_moe_rows_params *p, int fills_places) {
  int64_t items = p->rows * camox_moe_chunks(p);
  if (!fills_places) return items;
  return items + (p->capacity < 0 ? p->rows * p->top_k - p->offsets[p->num_experts] : camox_moe_places(p));
}

void camox_moe_count(const camox_moe_route_params *p, int64_t begin, int64_t end) {
  const int64_t block_rows = camox_moe_block_rows(p);
  for (int64_t block = begin; block < end; ++block) {
    int64_t *counts = p->block_counts + block * (p->num_experts + 1);
    memset(counts, 0, (size_t)(p->num_experts + 1) * sizeof *counts);
    int64_t row = block * block_rows, last = camox_min_i64(row + block_rows, p->rows);
    for (; row < last; ++row)
      for (int64_t k = 0; k < p->top_k; ++k)
        counts[p->experts[row * p->top_k + k]] += !p->valid || p->valid[row * p->valid_stride];
  }
}

int camox_moe_scan(const camox_moe_route_params *p) {
  const int64_t experts = p->num_experts, blocks = camox_moe_blocks(p), slots = p->rows * p->top_k;
  int64_t bad = 0;
  for (int64_t block = 0; block < blocks; ++block) bad += p->block_counts[block * (experts + 1) + experts];
  if (bad)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "moe_route: logits hold NaN in %lld of %lld rows", (long long)bad,
                      (long long)p->rows);
  memset(p->counts, 0, (size_t)experts * sizeof *p->counts);
  for (int64_t block = 0; block < blocks; ++block) {
    int64_t *counts = p->block_counts + block * (experts + 1);
    for (int64_t e = 0; e < experts; ++e) {
      int64_t before = p->counts[e];
      p->counts[e] += counts[e], counts[e] = before;
    }
  }
  p->offsets[0] = 0;
  for (int64_t e = 0; e < experts; ++e) {
    if (p->capacity >= 0 && p->counts[e] > p->capacity) p->counts[e] = p->capacity;
    p->offsets[e + 1] = p->offsets[e] + p->counts[e];
  }
  for (int64_t place = p->offsets[experts]; place < slots; ++place) p->order[place] = -1;
  return CAMOX_OK;
}

void camox_moe_place_slots(const camox_moe_route_params *p, int64_t begin, int64_t end) {
  const int64_t block_rows = camox_moe_block_rows(p);
  for (int64_t block = begin; block < end; ++block) {
    int64_t *next = p->block_counts + block * (p->num_experts + 1);
    int64_t row = block * block_rows, last = camox_min_i64(row + block_rows, p->rows);
    for (int64_t slot = row * p->top_k; row < last; ++row) {
      const int counted = !p->valid || p->valid[row * p->valid_stride];
      for (int64_t k = 0; k < p->top_k; ++k, ++slot) {
        const int64_t expert = p->experts[slot], rank = counted ? next[expert]++ : p->capacity;
        if (counted && (p->capacity < 0 || rank < p->capacity)) {
          p->position[slot] = p->offsets[expert] + rank;
          p->order[p->position[slot]] = slot;
          continue;
        }
        p->position[slot] = -1;
        if (!p->weights) continue;
        if (p->dtype == CAMOX_F64)
          ((double *)p->weights)[slot] = 0;
        else
          ((float *)p->weights)[slot] = 0;
      }
    }
  }
}

static void store_real(const camox_moe_route_params *p, void *to, int64_t i, double value) {
  if (p->dtype == CAMOX_F64)
    ((double *)to)[i] = value;
  else
    ((float *)to)[i] = (float)value;
}

/* The sum of a column of the blocks' partial sums. */
static double sum_blocks(const camox_moe_route_params *p, int64_t column) {
  double sum = 0;
  const int64_t blocks = camox_moe_blocks(p);
  for (int64_t block = 0; block < blocks; ++block) sum += ((const double *)p->partial)[block * (p->num_experts + 2) + column];
  return sum;
}

void camox_moe_aux_finish(const camox_moe_route_params *p) {
  const int64_t experts = p->num_experts;
  double sums[CAMOX_MOE_MOST_EXPERTS], loss = 0, mean = 0, variance = 0;
  double number = p->aux == CAMOX_MOE_USAGE_MSE ? 1 : sum_blocks(p, experts + 1);
  if (number < 1) number = 1;
  switch (p->aux) {
    case CAMOX_MOE_USAGE_MSE:
      for (int64_t e = 0; e < experts; ++e) {
        double off = (double)p->counts[e] / ((double)(p->rows * p->top_k) + 1e-8) - 1 / (double)experts;
        loss += 0.01 * off * off / (double)experts;
        store_real(p, p->slope, e, 0);
      }
      break;
    case CAMOX_MOE_Z:
      loss = sum_blocks(p, experts) / number;
      for (int64_t e = 0; e < experts; ++e) store_real(p, p->slope, e, 2 / number);
      break;
    case CAMOX_MOE_SWITCH:
      for (int64_t e = 0; e < experts; ++e) {
        double slope = (double)experts * (double)p->counts[e] / (number * (double)p->top_k) / number;
        loss += slope * sum_blocks(p, e);
        store_real(p, p->slope, e, slope);
      }
      break;
    default:
      for (int64_t e = 0; e < experts; ++e) mean += (sums[e] = sum_blocks(p, e)) / (double)experts;
      for (int64_t e = 0; e < experts; ++e) variance += (sums[e] - mean) * (sums[e] - mean) / (double)experts;
      double square = mean * mean + 1e-10;
      loss = variance / square;
      for (int64_t e = 0; e < experts; ++e) {
        double of_variance = 2 * (sums[e] - mean) / (double)experts / square;
        store_real(p, p->slope, e, of_variance - loss * 2 * mean / (double)experts / square);
      }
  }
  store_real(p, p->loss, 0, loss);
}

void camox_moe_sum_chunks(const camox_moe_rows_params *p) {
  const int64_t chunks = camox_moe_chunks(p);
  if (chunks == 1) return;
  for (int64_t slot = 0; slot < p->rows * p->top_k; ++slot) {
    const int64_t row = slot / p->top_k, first = row * chunks * p->top_k + slot % p->top_k;
    double sum = 0;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const int64_t i = first + chunk * p->top_k;
      sum += p->dtype == CAMOX_F64 ? ((const double *)p->partial)[i] : ((const float *)p->partial)[i];
    }
    if (p->dtype == CAMOX_F64)
      ((double *)p->grad_weights)[slot] = sum;
    else
      ((float *)p->grad_weights)[slot] = (float)sum;
  }
}

CAMOX_KERNEL_TABLE(camox_moe_route_kernel, camox_moe_choose, camox_moe_choose_kernel)
CAMOX_KERNEL_TABLE(camox_moe_route_kernel, camox_moe_route_backward, camox_moe_route_backward_kernel)
CAMOX_KERNEL_TABLE(camox_moe_route_kernel, camox_moe_aux_sums, camox_moe_aux_sums_kernel)
CAMOX_KERNEL_TABLE(camox_moe_route_kernel, camox_moe_aux_backward, camox_moe_aux_backward_kernel)
CAMOX_KERNEL_TABLE(camox_moe_rows_kernel, camox_moe_dispatch, camox_moe_dispatch_kernel)
CAMOX_KERNEL_TABLE(camox_moe_rows_kernel, camox_moe_combine, camox_moe_combine_kernel)
CAMOX_KERNEL_TABLE(camox_moe_rows_kernel, camox_moe_combine_backward, camox_moe_combine_backward_kernel)
CAMOX_KERNEL_TABLE(camox_moe_activation_function, camox_moe_activation, camox_moe_activation_kernel)
CAMOX_KERNEL_TABLE(camox_moe_activation_function, camox_moe_activation_backward, camox_moe_activation_backward_kernel)
#endif
