/* What test_gemm.c calls: compiled once per instruction set, as kernels are. */
#include "gemm_calls.h"

#define CAMOX_BODY "../../tests/c/gemm_cpu.inc"
#include "../../csrc/common/simd_foreach.h"

#if defined(CAMOX_SIMD_AVX512)
#include "../../csrc/common/gemm_bf16.h"

CAMOX_AVX512_BF16 int64_t test_gemm_pairs(const gemm_call *call);
CAMOX_AVX512_BF16 int64_t test_gemm_pairs(const gemm_call *call) {
  const bf16_gemm_matrix a = {call->a.data, call->a.row, call->a.column}, b = {call->b.data, call->b.row, call->b.column};
  const gemm_size size = {call->rows, call->columns, call->depth};
  const vf32_gemm_epilogue epilogue = {.scale = (float)call->scale,
                                       .accumulate = call->accumulate,
                                       .non_temporal = call->non_temporal,
                                       .column_scale = call->column_scale};
  bf16_gemm_nn(call->c, call->c_row, a, b, size, epilogue);
  camox_stream_end();
  return VF32_LANES;
}
#endif
