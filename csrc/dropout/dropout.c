/* Checks and the tables of variants. */
#include "dropout.h"

#include <math.h>

#include "../common/kernel_table.h"
#include "../common/status.h"
#include "dropout_plan.h"

#ifndef CAMOX_CUDA_PART
CAMOX_DECLARE_KERNELS(camox_dropout_forward_kernel, camox_dropout_kernel)
CAMOX_DECLARE_KERNELS(camox_sparse_gate_forward_kernel, camox_dropout_kernel)
CAMOX_DECLARE_KERNELS(camox_sparse_gate_backward_kernel, camox_dropout_kernel)
CAMOX_DECLARE_KERNELS(camox_dropout_norm_forward_kernel, camox_dropout_norm_kernel)
CAMOX_DECLARE_KERNELS(camox_dropout_norm_backward_kernel, camox_dropout_norm_kernel)
CAMOX_DECLARE_KERNELS(camox_dropout_norm_reduce_kernel, camox_dropout_norm_kernel)

typedef camox_dropout_kernel *camox_dropout_table[CAMOX_DTYPE_COUNT][CAMOX_ISA_COUNT];
typedef camox_dropout_norm_kernel *camox_dropout_norm_table[CAMOX_DTYPE_COUNT][CAMOX_ISA_COUNT];
static const camox_dropout_table dropout_kernels = CAMOX_KERNELS(camox_dropout_forward_kernel);
static const camox_dropout_table gate_kernels = CAMOX_KERNELS(camox_sparse_gate_forward_kernel);
static const camox_dropout_table gate_backward_kernels = CAMOX_KERNELS(camox_sparse_gate_backward_kernel);
static const camox_dropout_norm_table norm_kernels = CAMOX_KERNELS(camox_dropout_norm_forward_kernel);
static const camox_dropout_norm_table norm_backward_kernels = CAMOX_KERNELS(camox_dropout_norm_backward_kernel);
static const camox_dropout_norm_table norm_reduce_kernels = CAMOX_KERNELS(camox_dropout_norm_reduce_kernel);

camox_dropout_kernel *camox_dropout(camox_dtype dtype, camox_isa isa) { return dropout_kernels[dtype][isa]; }
camox_dropout_kernel *camox_sparse_gate(camox_dtype dtype, camox_isa isa) { return gate_kernels[dtype][isa]; }
camox_dropout_kernel *camox_sparse_gate_backward(camox_dtype dtype, camox_isa isa) { return gate_backward_kernels[dtype][isa]; }
camox_dropout_norm_kernel *camox_dropout_norm(camox_dtype dtype, camox_isa isa) { return norm_kernels[dtype][isa]; }
camox_dropout_norm_kernel *camox_dropout_norm_backward(camox_dtype dtype, camox_isa isa) {
  return norm_backward_kernels[dtype][isa];
}
camox_dropout_norm_kernel *camox_dropout_norm_reduce(camox_dtype dtype, camox_isa isa) {
  return norm_reduce_kernels[dtype][isa];
}
#endif

static int check_common(const char *op, camox_dtype dtype, double p) {
  if ((int)dtype < 0 || dtype >= CAMOX_DTYPE_COUNT)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: unknown dtype code %d", op, (int)dtype);
  if (!(p >= 0 && p < 1)) return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: p must be in [0, 1), got %g", op, p);
  return CAMOX_OK;
}

int camox_dropout_check(const camox_dropout_params *p, const char *op) {
  int status = check_common(op, p->dtype, p->p);
  if (status != CAMOX_OK) return status;
  if (p->dims < 0 || p->dims > CAMOX_DROPOUT_DIMS)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: x must have at most %d dimensions, got %d", op, (int)CAMOX_DROPOUT_DIMS,
                      p->dims);
  for (int d = 0; d < p->dims; ++d)
    if (p->size[d] < 0)
      return camox_fail(CAMOX_INVALID_ARGUMENT, "%s: x has a negative size %lld in dimension %d", op, (long long)p->size[d], d);
  return CAMOX_OK;
}

static int check_affine(const camox_dropout_norm_params *p, const camox_dropout_affine *v, const char *name) {
  if (v->length != p->width)
    return camox_fail(CAMOX_INVALID_ARGUMENT,
                      "dropout_add_layer_norm: %s must have one element per column of x, %lld, got %lld", name,
                      (long long)p->width, (long long)v->length);
  if (v->length > 1 && v->stride != 1)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "dropout_add_layer_norm: %s must be contiguous, got stride %lld", name,
                      (long long)v->stride);
  return CAMOX_OK;
}

int camox_dropout_norm_check(const camox_dropout_norm_params *p, int backward) {
  int status = check_common("dropout_add_layer_norm", p->dtype, p->p);
  if (status != CAMOX_OK) return status;
  if (!(camox_as_computed(p->dtype, p->eps) > 0) || isinf(p->eps))
    return camox_fail(CAMOX_INVALID_ARGUMENT, "dropout_add_layer_norm: eps must be > 0 and finite, got %g", p->eps);
  if (p->rows < 0 || p->width < 0)
    return camox_fail(CAMOX_INVALID_ARGUMENT, "dropout_add_layer_norm: x has a negative size (%lld, %lld)", (long long)p->rows,
                      (long long)p->width);
  status = check_affine(p, &p->weight, "weight");
  return status != CAMOX_OK || backward ? status : check_affine(p, &p->bias, "bias");
}

int64_t camox_dropout_units(const camox_dropout_params *p) { return camox_dropout_plan_of(p).units; }

int64_t camox_dropout_norm_units(const camox_dropout_norm_params *p) {
  int64_t rows = camox_dropout_norm_unit_rows(p->width);
  return (p->rows + rows - 1) / rows;
}
