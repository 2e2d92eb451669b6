// Schemas and CPU entries of TokenMoE's experts: their activations, and their products of rows that are sorted by expert, each
// expert's with its own matrix. float32 is multiplied by csrc/gemm; other dtypes by torch.mm, which has faster kernels for bfloat16.
#include <algorithm>

#include "../gemm/sgemm_run.h"
#include "moe.h"

namespace {

using namespace camox;
using torch::headeronly::ScalarType;

std::string text(int64_t value) { return std::to_string(value); }

// The rows [offsets[e], offsets[e+1]) of expert e; offsets rise from 0 and stay within `rows`.
const int64_t* checked_offsets(const Tensor& offsets, int64_t rows, const char* op) {
  if (offsets.scalar_type() != ScalarType::Long || offsets.dim() != 1 || offsets.size(0) < 2)
    throw refusal(std::string(op) + ": offsets must have shape (E+1,) and dtype int64");
  const int64_t* begin = static_cast<const int64_t*>(offsets.data_ptr());
  for (int64_t e = 0; e < offsets.size(0); ++e)
    if (begin[e] < (e ? begin[e - 1] : 0) || begin[e] > rows || (e == 0 && begin[0] != 0))
      throw refusal(std::string(op) + ": offsets must rise from 0 to at most the " + text(rows) + " rows, got " +
                    text(begin[e]) + " at index " + text(e));
  return begin;
}

void check_operands(const Tensor& a, const Tensor& b, int64_t b_dimensions, const char* op) {
  if (a.dim() != 2 || b.dim() != b_dimensions)
    throw refusal(std::string(op) + ": a must have 2 dimensions and b " + text(b_dimensions) + ", got " + text(a.dim()) +
                  " and " + text(b.dim()));
  dtype_of(a, op);
  check_dtype_and_device(b, a, op, "b");
}

void mm_out(const Tensor& a, const Tensor& b, const Tensor& out) {
  std::array<StableIValue, 3> stack = {torch::stable::detail::from(a), torch::stable::detail::from(b),
                                       torch::stable::detail::from(out)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::mm", "out", stack.data(), TORCH_ABI_VERSION));
  Tensor returned(torch::stable::detail::to<AtenTensorHandle>(stack[0]));
}

Tensor rows_of(Tensor x, int64_t begin, int64_t count) { return torch::stable::narrow(x, 0, begin, count); }

// A matrix as csrc/gemm reads it: its rows or its columns are dense.
Tensor as_operand(const Tensor& x) {
  const int64_t d = x.dim();
  return x.stride(d - 2) == 1 || x.stride(d - 1) == 1 ? x : torch::stable::contiguous(x);
}

struct Matrix {
  const Tensor& whole;
  int64_t offset, row_stride, column_stride; /* in elements */
};

// out (contiguous) [rows, columns] = a b, or zeros where there is nothing to add up.
void multiply_float32(const Matrix& a, const Matrix& b, float* out, int64_t rows, int64_t columns, int64_t depth) {
  if (rows == 0 || columns == 0) return;
  if (depth == 0) {
    std::fill_n(out, rows * columns, 0.0f);
    return;
  }
  const float* x = static_cast<const float*>(a.whole.data_ptr()) + a.offset;
  const float* y = static_cast<const float*>(b.whole.data_ptr()) + b.offset;
  Products products{};
  products.shape = {rows, columns, depth, 1, 0, a.row_stride, a.column_stride, b.row_stride, b.column_stride, columns};
  products.x = &x, products.y = &y, products.c = &out, products.count = 1;
  if (!multiply(products)) throw std::runtime_error("moe_experts_mm: no memory for the scratch of its threads");
}

// a (N,K) sorted by expert, b (E,K,M) -> (N,M); zeros past the last expert's rows.
Tensor moe_experts_mm(const Tensor& given_a, const Tensor& given_b, const Tensor& given_offsets) {
  const char* op = "moe_experts_mm";
  check_operands(given_a, given_b, 3, op);
  check_device(given_offsets, given_a, op, "offsets");
  const Tensor offsets = as_contiguous(given_offsets), a = as_operand(given_a), b = as_operand(given_b);
  const int64_t rows = a.size(0), depth = a.size(1), columns = b.size(2), experts = b.size(0);
  const int64_t* begin = checked_offsets(offsets, rows, op);
  if (offsets.size(0) != experts + 1 || b.size(1) != depth)
    throw refusal(std::string(op) + ": b must have shape (E, K, M) for a (N, K) and offsets (E+1,)");
  const std::array<int64_t, 2> size = {rows, columns};
  Tensor out = empty_contiguous(a, dtype_code(a), size.size(), size.data());
  const bool ours = a.scalar_type() == ScalarType::Float;
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t count = begin[e + 1] - begin[e];
    if (count == 0) continue;
    if (ours)
      multiply_float32({a, begin[e] * a.stride(0), a.stride(0), a.stride(1)}, {b, e * b.stride(0), b.stride(1), b.stride(2)},
                       static_cast<float*>(out.data_ptr()) + begin[e] * columns, count, columns, depth);
    else
      mm_out(rows_of(a, begin[e], count), torch::stable::select(b, 0, e), rows_of(out, begin[e], count));
  }
  Tensor tail = rows_of(out, begin[experts], rows - begin[experts]);
  torch::stable::zero_(tail);
  return out;
}

// a (N,K), b (N,M), both sorted by expert -> (E,K,M), the sums over each expert's rows of a^T b; zeros without rows.
Tensor moe_experts_mm_tn(const Tensor& given_a, const Tensor& given_b, const Tensor& given_offsets) {
  const char* op = "moe_experts_mm_tn";
  check_operands(given_a, given_b, 2, op);
  check_device(given_offsets, given_a, op, "offsets");
  const Tensor offsets = as_contiguous(given_offsets), a = as_operand(given_a), b = as_operand(given_b);
  const int64_t rows = a.size(0), depth = a.size(1), columns = b.size(1), experts = offsets.size(0) - 1;
  const int64_t* begin = checked_offsets(offsets, rows, op);
  if (b.size(0) != rows) throw refusal(std::string(op) + ": a and b must have as many rows");
  const std::array<int64_t, 3> size = {experts, depth, columns};
  Tensor out = empty_contiguous(a, dtype_code(a), size.size(), size.data());
  const bool ours = a.scalar_type() == ScalarType::Float;
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t count = begin[e + 1] - begin[e];
    if (ours)
      multiply_float32({a, begin[e] * a.stride(0), a.stride(1), a.stride(0)},
                       {b, begin[e] * b.stride(0), b.stride(0), b.stride(1)},
                       static_cast<float*>(out.data_ptr()) + e * depth * columns, depth, columns, count);
    else
      mm_out(torch::stable::transpose(rows_of(a, begin[e], count), 0, 1), rows_of(b, begin[e], count),
             torch::stable::select(out, 0, e));
  }
  return out;
}

camox_moe_activation_params activation_params(const Tensor& h, int64_t activation, const char* op) {
  if (h.dim() != 2) throw refusal(std::string(op) + ": h must have 2 dimensions, got " + text(h.dim()));
  camox_moe_activation_params p{};
  p.dtype = dtype_of(h, op);
  p.activation = code_of(activation, CAMOX_EXPERT_GELU, op, "activation");
  const bool gated = p.activation == CAMOX_EXPERT_SWIGLU;
  if (gated && h.size(1) % 2 != 0)
    throw refusal(std::string(op) + ": h must have an even number of columns, got " + text(h.size(1)));
  p.rows = h.size(0), p.hidden = h.size(1) / (gated ? 2 : 1);
  check(camox_moe_activation_check(&p));
  p.h = h.data_ptr();
  return p;
}

Tensor empty_activation(const Tensor& h, const camox_moe_activation_params& p) {
  const std::array<int64_t, 2> size = {p.rows, p.hidden};
  return empty_contiguous(h, dtype_code(h), size.size(), size.data());
}

Tensor moe_activation(const Tensor& given, int64_t activation) {
  const Tensor h = as_contiguous(given);
  camox_moe_activation_params p = activation_params(h, activation, "moe_activation");
  Tensor a = empty_activation(h, p);
  p.a = a.data_ptr();
  run(camox_moe_activation(p.dtype, camox_isa_current()), p, p.rows, p.hidden);
  return a;
}

std::tuple<Tensor, Tensor, Tensor> moe_activation_backward(const Tensor& given, const Tensor& given_grad,
                                                           const Tensor& given_scale, int64_t activation) {
  const char* op = "moe_activation_backward";
  const Tensor h = as_contiguous(given), grad = as_contiguous(given_grad), scale = as_contiguous(given_scale);
  camox_moe_activation_params p = activation_params(h, activation, op);
  check_dtype_and_device(grad, h, op, "grad");
  check_real(scale, h, 1, op, "scale");
  if (grad.dim() != 2 || grad.size(0) != p.rows || grad.size(1) != p.hidden || scale.size(0) != p.rows)
    throw refusal(std::string(op) + ": grad must have shape (" + text(p.rows) + ", " + text(p.hidden) + ") and scale (" +
                  text(p.rows) + ",)");
  const std::array<int64_t, 2> size = {h.size(0), h.size(1)};
  Tensor a = empty_activation(h, p), grad_h = empty_contiguous(h, dtype_code(h), size.size(), size.data());
  Tensor dots = empty_real(h, {p.rows});
  p.grad = grad.data_ptr(), p.scale = scale.data_ptr();
  p.a = a.data_ptr(), p.grad_h = grad_h.data_ptr(), p.dots = dots.data_ptr();
  run(camox_moe_activation_backward(p.dtype, camox_isa_current()), p, p.rows, 2 * p.hidden);
  return {a, grad_h, dots};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(camox_ops, m) {
  m.def("moe_experts_mm(Tensor a, Tensor b, Tensor offsets) -> Tensor");
  m.def("moe_experts_mm_tn(Tensor a, Tensor b, Tensor offsets) -> Tensor");
  m.def("moe_activation(Tensor h, int activation) -> Tensor");
  m.def("moe_activation_backward(Tensor h, Tensor grad, Tensor scale, int activation) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(camox_ops, CPU, m) {
  m.impl("moe_experts_mm", TORCH_BOX(&moe_experts_mm));
  m.impl("moe_experts_mm_tn", TORCH_BOX(&moe_experts_mm_tn));
  m.impl("moe_activation", TORCH_BOX(&moe_activation));
  m.impl("moe_activation_backward", TORCH_BOX(&moe_activation_backward));
}
