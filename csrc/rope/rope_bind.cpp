// Schemas and entries of rope.
#include <algorithm>
#include <memory>

#include "../common/torch_util.h"
#include "rope.h"

namespace {

using namespace camox;

// (B,H,T,D) of x in its layout; packed tokens are one batch element.
struct Axes {
  int64_t batch, heads, length, dim;
};

Axes axes_of(const Tensor& x, int64_t layout, bool packed, const char* name) {
  const camox_rope_layout order = code_of(layout, CAMOX_ROPE_BTHD, "rope", "layout");
  int64_t dimensions = packed ? 3 : 4;
  if (x.dim() != dimensions)
    throw refusal(std::string("rope: ") + name + " must have " + std::to_string(dimensions) +
                  (packed ? " dimensions (total, H, D) with cu_seqlens, got " : " dimensions, got ") + std::to_string(x.dim()));
  if (packed) return {-1, 1, 0, 2};
  return order == CAMOX_ROPE_BHTD ? Axes{0, 1, 2, 3} : Axes{0, 2, 1, 3};
}

camox_view4 view_of(const Tensor& x, const Axes& axes) {
  auto strides = x.strides();
  return {x.data_ptr(),
          {axes.batch < 0 ? 0 : strides[axes.batch], strides[axes.heads], strides[axes.length], strides[axes.dim]}};
}

void check_same_device(const Tensor& y, const Tensor& x, const char* name) {
  if (y.is_cpu() != x.is_cpu() || y.get_device_index() != x.get_device_index())
    throw refusal(std::string("rope: ") + name + " must be on the device of x");
}

void check_table(const Tensor& table, const Tensor& x, const char* name) {
  using torch::headeronly::ScalarType;
  const bool is_double = x.scalar_type() == ScalarType::Double;
  if (table.scalar_type() != (is_double ? ScalarType::Double : ScalarType::Float))
    throw refusal(std::string("rope: ") + name + " must have dtype " + (is_double ? "float64" : "float32") + " beside this x");
  if (table.dim() != 2 || !table.is_contiguous())
    throw refusal(std::string("rope: ") + name + " must be contiguous with 2 dimensions");
  check_same_device(table, x, name);
}

void set_positions(camox_rope_params& p, const Tensor& positions, const Tensor& x) {
  static const int64_t nowhere = 0;  // an empty tensor may have no memory
  if (positions.scalar_type() != torch::headeronly::ScalarType::Long) throw refusal("rope: positions must have dtype int64");
  const bool batched = positions.dim() == 2;
  if ((!batched && positions.dim() != 1) || positions.size(batched) != p.length || (batched && positions.size(0) != p.batch))
    throw refusal("rope: positions must have shape (T,) or (B, T) of x");
  check_same_device(positions, x, "positions");
  p.positions = positions.numel() ? static_cast<const int64_t*>(positions.data_ptr()) : &nowhere;
  p.position_stride[0] = batched ? positions.stride(0) : 0;
  p.position_stride[1] = positions.stride(batched);
}

void set_cu_seqlens(camox_rope_params& p, const Tensor& cu_seqlens, const Tensor& x) {
  if (cu_seqlens.scalar_type() != torch::headeronly::ScalarType::Int) throw refusal("rope: cu_seqlens must have dtype int32");
  if (cu_seqlens.dim() != 1 || cu_seqlens.size(0) < 1 || !cu_seqlens.is_contiguous())
    throw refusal("rope: cu_seqlens must be contiguous with 1 dimension and at least 1 element");
  check_same_device(cu_seqlens, x, "cu_seqlens");
  p.cu_seqlens = static_cast<const int32_t*>(cu_seqlens.data_ptr());
  p.sequences = cu_seqlens.size(0) - 1;
}

// The operators' arguments after x and the tables.
struct Options {
  const OptionalTensor &positions, &cu_seqlens;
  bool interleaved;
  int64_t layout;
  std::optional<int64_t> rotary_dim;
  bool transposed;
};

camox_rope_params rope_params(const Tensor& x, const Tensor& cos, const Tensor& sin, const Options& options) {
  camox_rope_params p{};
  const bool packed = options.cu_seqlens.has_value();
  const Axes axes = axes_of(x, options.layout, packed, "x");
  p.dtype = dtype_of(x, "rope");
  p.interleaved = options.interleaved, p.transposed = options.transposed;
  p.batch = packed ? 1 : x.size(axes.batch);
  p.heads = x.size(axes.heads), p.length = x.size(axes.length), p.dim = x.size(axes.dim);
  p.rotary_dim = options.rotary_dim.value_or(p.dim);
  p.x = view_of(x, axes);
  check_table(cos, x, "cos");
  check_table(sin, x, "sin");
  if (cos.size(0) != sin.size(0) || cos.size(1) != sin.size(1)) throw refusal("rope: cos and sin must have the same shape");
  p.table_length = cos.size(0), p.table_columns = cos.size(1);
  p.cos = cos.data_ptr(), p.sin = sin.data_ptr();
  if (options.positions.has_value()) set_positions(p, *options.positions, x);
  if (packed) set_cu_seqlens(p, *options.cu_seqlens, x);
  return p;
}

void rotate(camox_rope_params& p, const Tensor& x, const Tensor& y, const Axes& axes) {
  p.y = view_of(y, axes);
  check(camox_rope_check(&p, 0));
#ifdef CAMOX_CUDA_PART
  launch_with_error_word(camox_rope_cuda, p, x, "rope");
#else
  check(camox_rope_check_values(&p));
  const int64_t items = camox_rope_items(&p);
  run(camox_rope_forward(p.dtype, camox_isa_current()), p, items, items > 0 ? x.numel() / items : 0);
#endif
}

Tensor rope(const Tensor& x, const Tensor& cos, const Tensor& sin, OptionalTensor positions, OptionalTensor cu_seqlens,
            bool interleaved, int64_t layout, std::optional<int64_t> rotary_dim, bool transposed) {
  camox_rope_params p = rope_params(x, cos, sin, {positions, cu_seqlens, interleaved, layout, rotary_dim, transposed});
  Tensor y = empty_in_order(x);
  rotate(p, x, y, axes_of(x, layout, cu_seqlens.has_value(), "x"));
  return y;
}

void rope_(const Tensor& x, const Tensor& cos, const Tensor& sin, OptionalTensor positions, OptionalTensor cu_seqlens,
           bool interleaved, int64_t layout, std::optional<int64_t> rotary_dim, bool transposed) {
  camox_rope_params p = rope_params(x, cos, sin, {positions, cu_seqlens, interleaved, layout, rotary_dim, transposed});
  rotate(p, x, x, axes_of(x, layout, cu_seqlens.has_value(), "x"));
}

std::tuple<Tensor, Tensor, Tensor> rope_backward(const Tensor& grad, const Tensor& x, const Tensor& cos, const Tensor& sin,
                                                 OptionalTensor positions, OptionalTensor cu_seqlens, bool interleaved,
                                                 int64_t layout, std::optional<int64_t> rotary_dim, bool transposed) {
  camox_rope_params p = rope_params(grad, cos, sin, {positions, cu_seqlens, interleaved, layout, rotary_dim, !transposed});
  const Axes axes = axes_of(x, layout, cu_seqlens.has_value(), "x");
  for (int64_t d = 0; d < x.dim(); ++d)
    if (grad.size(d) != x.size(d)) throw refusal("rope_backward: grad must have the shape of x");
  if (grad.scalar_type() != x.scalar_type()) throw refusal("rope_backward: grad must have the dtype of x");
  check_same_device(grad, x, "grad");
  Tensor grad_x = empty_in_order(x);
  Tensor grad_cos = empty_in_order(cos), grad_sin = empty_in_order(sin);
  p.input = view_of(x, axes), p.y = view_of(grad_x, axes);
  p.grad_cos = grad_cos.data_ptr(), p.grad_sin = grad_sin.data_ptr();
#ifdef CAMOX_CUDA_PART
  check(camox_rope_check(&p, 1));
  const std::array<int64_t, 3> size = {2, p.batch * p.length, p.table_columns};
  const std::array<int64_t, 3> stride = {std::max<int64_t>(size[1] * size[2], 1), std::max<int64_t>(size[2], 1), 1};
  Tensor partial = empty_strided(cos, dtype_code(cos), 3, size.data(), stride.data());
  p.partial = static_cast<float*>(partial.data_ptr());
  launch_with_error_word(camox_rope_backward_cuda, p, x, "rope_backward");
#else
  check(camox_rope_check(&p, 0));
  check(camox_rope_check_values(&p));
  std::vector<int64_t> order;
  if (p.positions || p.cu_seqlens) {
    order.resize(p.table_length + 1 + p.batch * p.length);
    camox_rope_sort_tokens(&p, order.data(), order.data() + p.table_length + 1);
    p.row_begin = order.data(), p.tokens = order.data() + p.table_length + 1;
  }
  const std::unique_ptr<double[]> totals(new double[2 * p.table_length * p.table_columns]);
  p.totals = totals.get();
  check(camox_rope_check(&p, 1));
  const int64_t items = camox_rope_backward_items(&p);
  run(camox_rope_backward(p.dtype, camox_isa_current()), p, items, items > 0 ? x.numel() / items : 0);
#endif
  return {grad_x, grad_cos, grad_sin};
}

}  // namespace

#ifndef CAMOX_CUDA_PART
#define ROPE_ARGUMENTS                                                                                                  \
  "Tensor cos, Tensor sin, Tensor? positions, Tensor? cu_seqlens, bool interleaved, int layout, int? rotary_dim, bool " \
  "transposed"
STABLE_TORCH_LIBRARY_FRAGMENT(camox_ops, m) {
  m.def("rope(Tensor x, " ROPE_ARGUMENTS ") -> Tensor");
  m.def("rope_(Tensor(a!) x, " ROPE_ARGUMENTS ") -> ()");
  m.def("rope_backward(Tensor grad, Tensor x, " ROPE_ARGUMENTS ") -> (Tensor, Tensor, Tensor)");
}
#endif

STABLE_TORCH_LIBRARY_IMPL(camox_ops, CAMOX_BACKEND, m) {
  m.impl("rope", TORCH_BOX(&rope));
  m.impl("rope_", TORCH_BOX(&rope_));
  m.impl("rope_backward", TORCH_BOX(&rope_backward));
}
