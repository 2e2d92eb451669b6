/* One call of a product of csrc/common/gemm.inc, for every element type of its arithmetic and every instruction set. */
#ifndef CAMOX_TEST_GEMM_CALLS_H
#define CAMOX_TEST_GEMM_CALLS_H

#include <stdint.h>

typedef enum { GEMM_FORM_NN, GEMM_FORM_NT, GEMM_FORM_LANES, GEMM_FORMS } gemm_form;

/* Strides in elements; GEMM_FORM_LANES: in vectors. bfloat16's a and b: in pairs, as is depth. */
typedef struct {
  const void *data;
  int64_t row, column;
} gemm_operand_view;

typedef struct {
  gemm_form form;
  void *c;
  int64_t c_row;
  gemm_operand_view a, b;
  int64_t rows, columns, depth;
  double scale;
  int accumulate, lower, non_temporal;
  const void *column_scale;
} gemm_call;

/* Returns the lanes of a vector; computes nothing where call is NULL. */
typedef int64_t gemm_call_fn(const gemm_call *call);

#endif
