// Schema and entry of gemm, the product of camox_ops.nn's projections.
#include <algorithm>

#include "gemm.h"
#include "sgemm_run.h"

namespace {

using namespace camox;

constexpr const char* op = "gemm";

void check_operand(const Tensor& x, const char* name) {
  if (x.dim() == 3) return;
  throw refusal(std::string(op) + ": " + name + " must have 3 dimensions, got " + std::to_string(x.dim()));
}

// sums: what the columns of b add up to, (H, N), or nullptr.
void multiply_float32(const camox_gemm_params& p, const OptionalTensor& bias, float* sums) {
  Products products{};
  products.shape = {p.rows,        p.columns,     p.depth,        1, 0, p.a_stride[1], p.a_stride[2],
                    p.b_stride[1], p.b_stride[2], p.out_stride[1]};
  std::vector<const float*> a(p.heads), b(p.heads), biases(p.heads);
  std::vector<float*> out(p.heads), y_sums(p.heads);
  for (int64_t head = 0; head < p.heads; ++head) {
    a[head] = static_cast<const float*>(p.a) + head * p.a_stride[0];
    b[head] = static_cast<const float*>(p.b) + head * p.b_stride[0];
    out[head] = static_cast<float*>(p.out) + head * p.out_stride[0];
    if (sums) y_sums[head] = sums + head * p.columns;
    if (bias) biases[head] = static_cast<const float*>(bias->data_ptr()) + head * bias->stride(0);
  }
  products.x = a.data(), products.y = b.data(), products.c = out.data(), products.count = p.heads;
  if (bias) products.biases = biases.data();
  if (sums) products.y_sums = y_sums.data();
  if (!multiply(products)) throw std::runtime_error("gemm: no memory for the scratch of its threads");
}

void multiply_bfloat16(camox_gemm_params& p, const Tensor& like) {
  camox_gemm_kernel* kernel = camox_gemm(p.dtype);
  if (!kernel) throw std::runtime_error("gemm: the instruction set in use does not multiply bfloat16");
  camox_gemm_partition(&p, torch::stable::get_num_threads());
  const std::array<int64_t, 1> elements = {p.slots * camox_gemm_scratch(&p)};
  Tensor scratch = empty_contiguous(like, aoti_torch_dtype_float32(), 1, elements.data());
  p.scratch = scratch.data_ptr();
  run(kernel, p, p.slots, p.rows * p.columns * p.depth);
}

void check_bias(const Tensor& bias, const Tensor& a, const camox_gemm_params& p) {
  check_dtype_and_device(bias, a, op, "bias");
  if (p.dtype != CAMOX_F32) throw refusal("gemm: bias is for products of float32");
  if (bias.dim() != 2 || bias.size(0) != p.heads || bias.size(1) != p.columns || (p.columns > 1 && bias.stride(1) != 1))
    throw refusal("gemm: bias must have shape (H, N), the heads and columns of b, and dense rows");
}

// What multiplies a and b, which are checked; `out` is not set.
camox_gemm_params params_of(const Tensor& a, const Tensor& b) {
  check_operand(a, "a");
  check_operand(b, "b");
  check_dtype_and_device(b, a, op, "b");
  camox_gemm_params p{};
  p.dtype = dtype_of(a, op);
  if (p.dtype != CAMOX_BF16 && p.dtype != CAMOX_F32) throw refusal("gemm: a must have dtype float32 or bfloat16");
  if (b.size(0) != a.size(0) || b.size(1) != a.size(2))
    throw refusal("gemm: b must have the heads of a and as many rows as a has columns");
  p.heads = a.size(0), p.rows = a.size(1), p.depth = a.size(2), p.columns = b.size(2);
  p.a = a.data_ptr(), p.b = b.data_ptr();
  std::copy_n(a.strides().begin(), 3, p.a_stride);
  std::copy_n(b.strides().begin(), 3, p.b_stride);
  check(camox_gemm_check(&p));
  return p;
}

// (H, M, N), in memory (M, H, N) where `by_row`; bias (H, N) is added to each row.
Tensor gemm(const Tensor& a, const Tensor& b, bool by_row, OptionalTensor bias) {
  camox_gemm_params p = params_of(a, b);
  if (bias) check_bias(*bias, a, p);
  const std::vector<int64_t> size = {p.heads, p.rows, p.columns};
  const std::vector<int64_t> order = by_row ? std::vector<int64_t>{1, 0, 2} : std::vector<int64_t>{0, 1, 2};
  Tensor out = empty_strided(a, dtype_code(a), size.size(), size.data(), packed_strides(size, order).data());
  p.out = out.data_ptr();
  std::copy_n(out.strides().begin(), 2, p.out_stride);
  if (out.numel() == 0) return out;
  if (p.dtype == CAMOX_F32)
    multiply_float32(p, bias, nullptr);
  else
    multiply_bfloat16(p, a);
  return out;
}

// (H, M, N), and the sums of b's columns, (H, N): gradients of a weight and a bias from one reading of b.
std::tuple<Tensor, Tensor> gemm_sums(const Tensor& a, const Tensor& b) {
  camox_gemm_params p = params_of(a, b);
  if (p.dtype != CAMOX_F32) throw refusal("gemm_sums: a must have dtype float32");
  if (p.rows < 1) throw refusal("gemm_sums: a must have rows, got 0");
  const std::array<int64_t, 3> size = {p.heads, p.rows, p.columns};
  const std::array<int64_t, 2> sums_size = {p.heads, p.columns};
  Tensor out = empty_contiguous(a, dtype_code(a), 3, size.data()),
         sums = empty_contiguous(a, dtype_code(a), 2, sums_size.data());
  p.out = out.data_ptr();
  std::copy_n(out.strides().begin(), 2, p.out_stride);
  if (out.numel() > 0) multiply_float32(p, {}, static_cast<float*>(sums.data_ptr()));
  return {out, sums};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(camox_ops, m) {
  m.def("gemm(Tensor a, Tensor b, bool by_row, Tensor? bias=None) -> Tensor");
  m.def("gemm_sums(Tensor a, Tensor b) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(camox_ops, CPU, m) {
  m.impl("gemm", TORCH_BOX(&gemm));
  m.impl("gemm_sums", TORCH_BOX(&gemm_sums));
}
