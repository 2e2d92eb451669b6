// Schemas and entries of causal linear_attention and of its step.
#include "../common/direct.h"
#include "../common/torch_util.h"
#include "causal.h"

namespace {

using namespace camox;

constexpr const char* op = "linear_attention";

template <class AnyTensor>
void check_shape(const AnyTensor& y, std::initializer_list<int64_t> size, const char* of, const char* name) {
  bool same = y.dim() == static_cast<int64_t>(size.size());
  for (size_t d = 0; same && d < size.size(); ++d) same = y.size(d) == size.begin()[d];
  if (same) return;
  std::string wanted;
  for (int64_t n : size) wanted += (wanted.empty() ? "" : ", ") + std::to_string(n);
  throw refusal(std::string(of) + ": " + name + " must have shape (" + wanted + ")");
}

// The data of a contiguous real tensor of these sizes.
template <class AnyTensor>
void* real_data(const AnyTensor& y, const AnyTensor& q, std::initializer_list<int64_t> size, const char* of, const char* name) {
  check_real(y, q, static_cast<int64_t>(size.size()), of, name);
  check_shape(y, size, of, name);
  check_contiguous(y, of, name);
  return y.data_ptr();
}

// The operators' arguments after q, k and v.
struct Options {
  const OptionalTensor &key_mask, &initial_s, &initial_z, &cu_seqlens;
  int64_t feature_map, normalize;
  bool strict;
  double eps;
};

camox_causal_params params_of(const Tensor& q, const Tensor& k, const Tensor& v, const Options& options) {
  camox_causal_params p{};
  p.dtype = dtype_of(q, op);
  p.feature_map = code_of(options.feature_map, CAMOX_FEATURE_IDENTITY, op, "feature map");
  p.normalize = code_of(options.normalize, CAMOX_NORMALIZE_NONE, op, "normalization");
  p.strict = options.strict, p.eps = options.eps;
  check_image(q, op, "q");
  check_image(v, op, "v");
  p.batch = q.size(0), p.heads = q.size(1), p.length = q.size(2), p.key_dim = q.size(3), p.value_dim = v.size(3);
  check_shape(k, {p.batch, p.heads, p.length, p.key_dim}, op, "k");
  check_shape(v, {p.batch, p.heads, p.length, p.value_dim}, op, "v");
  check_dtype_and_device(k, q, op, "k");
  check_dtype_and_device(v, q, op, "v");
  p.q = view4(q), p.k = view4(k), p.v = view4(v);
  p.sequences = p.batch;
  if (options.cu_seqlens.has_value()) {
    const Tensor& cu_seqlens = *options.cu_seqlens;
    if (cu_seqlens.scalar_type() != torch::headeronly::ScalarType::Int)
      throw refusal("linear_attention: cu_seqlens must have dtype int32");
    if (cu_seqlens.dim() != 1 || cu_seqlens.size(0) < 1 || !cu_seqlens.is_contiguous())
      throw refusal("linear_attention: cu_seqlens must be contiguous with 1 dimension and at least 1 element");
    check_device(cu_seqlens, q, op, "cu_seqlens");
    p.cu_seqlens = static_cast<const int32_t*>(cu_seqlens.data_ptr());
    p.sequences = cu_seqlens.size(0) - 1;
  }
  if (options.key_mask.has_value()) {
    const Tensor& mask = *options.key_mask;
    if (mask.scalar_type() != torch::headeronly::ScalarType::Bool)
      throw refusal("linear_attention: key_mask must have dtype bool");
    check_shape(mask, {p.batch, p.length}, op, "key_mask");
    check_device(mask, q, op, "key_mask");
    p.key_mask = static_cast<const uint8_t*>(mask.data_ptr());
    p.mask_stride[0] = mask.stride(0), p.mask_stride[1] = mask.stride(1);
  }
  if (options.initial_s.has_value())
    p.initial_s = real_data(*options.initial_s, q, {p.sequences, p.heads, p.key_dim, p.value_dim}, op, "initial_s");
  if (options.initial_z.has_value())
    p.initial_z = real_data(*options.initial_z, q, {p.sequences, p.heads, p.key_dim}, op, "initial_z");
  return p;
}

// S and z; the latter without elements where there is none.
std::tuple<Tensor, Tensor> empty_state(const camox_causal_params& p, const Tensor& q) {
  const bool sum = p.normalize == CAMOX_NORMALIZE_SUM;
  return {empty_real(q, {p.sequences, p.heads, p.key_dim, p.value_dim}),
          sum ? empty_real(q, {p.sequences, p.heads, p.key_dim}) : empty_real(q, {0})};
}

#ifdef CAMOX_CUDA_PART
// What the kernels keep between them. The tensors must outlive the launches alone: their memory is reused in stream order.
struct Scratch {
  Tensor records, bounds;
  static Tensor empty_bounds(const camox_causal_params& p, const Tensor& q) {
    const int64_t size = p.cu_seqlens ? 2 * (p.sequences + 1) : 0;
    return empty_contiguous(q, aoti_torch_dtype_int32(), 1, &size);
  }
  // Of q's device, as the launch: which kernels it has decides how many there are.
  static int64_t count_of_records(const camox_causal_params& p, const Tensor& q) {
    torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
    return camox_causal_records(&p);
  }
  Scratch(camox_causal_params& p, const Tensor& q)
      : records(empty_real(q, {count_of_records(p, q)})), bounds(empty_bounds(p, q)) {
    p.records = records.data_ptr(), p.bounds = static_cast<int32_t*>(bounds.data_ptr());
  }
};
#else
void run_heads(camox_causal_kernel* kernel, const camox_causal_params& p) {
  const int64_t items = p.sequences * p.heads, cost = items > 0 ? p.batch * p.length * p.key_dim * p.heads * 64 / items : 1;
  run_with_scratch(kernel, p, items, cost, camox_causal_scratch(&p));
}
#endif

std::tuple<Tensor, Tensor, Tensor> linear_attention_causal(const Tensor& q, const Tensor& k, const Tensor& v,
                                                           OptionalTensor key_mask, OptionalTensor initial_s,
                                                           OptionalTensor initial_z, OptionalTensor cu_seqlens,
                                                           int64_t feature_map, int64_t normalize, bool strict, double eps) {
  const Options options{key_mask, initial_s, initial_z, cu_seqlens, feature_map, normalize, strict, eps};
  camox_causal_params p = params_of(q, k, v, options);
  Tensor out = empty_in_order(q, {p.batch, p.heads, p.length, p.value_dim}, 4);
  auto [s, z] = empty_state(p, q);
  p.out = view4(out), p.s = s.data_ptr(), p.z = z.data_ptr();
#ifdef CAMOX_CUDA_PART
  const Scratch scratch(p, q);
  check(camox_causal_check(&p, 0));
  launch_with_error_word(camox_linear_attention_causal_cuda, p, q, op);
#else
  check(camox_causal_check(&p, 0));
  run_heads(camox_causal_forward(p.dtype, camox_isa_current()), p);
#endif
  return {out, s, z};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> linear_attention_causal_backward(
    const Tensor& grad, OptionalTensor grad_s, OptionalTensor grad_z, const Tensor& q, const Tensor& k, const Tensor& v,
    OptionalTensor key_mask, OptionalTensor initial_s, OptionalTensor initial_z, OptionalTensor cu_seqlens, int64_t feature_map,
    int64_t normalize, bool strict, double eps) {
  const Options options{key_mask, initial_s, initial_z, cu_seqlens, feature_map, normalize, strict, eps};
  camox_causal_params p = params_of(q, k, v, options);
  const std::vector<int64_t> keys = {p.batch, p.heads, p.length, p.key_dim};
  check_shape(grad, {p.batch, p.heads, p.length, p.value_dim}, op, "grad");
  check_dtype_and_device(grad, q, op, "grad");
  if (grad_s.has_value()) p.grad_s = real_data(*grad_s, q, {p.sequences, p.heads, p.key_dim, p.value_dim}, op, "grad_s");
  if (grad_z.has_value()) p.grad_z = real_data(*grad_z, q, {p.sequences, p.heads, p.key_dim}, op, "grad_z");
  Tensor grad_q = empty_in_order(q, keys, 4), grad_k = empty_in_order(k, keys, 4);
  Tensor grad_v = empty_in_order(v, {p.batch, p.heads, p.length, p.value_dim}, 4);
  const bool has_rows = p.normalize == CAMOX_NORMALIZE_SUM || (!CAMOX_ON_CPU && p.normalize == CAMOX_NORMALIZE_FEATURE);
  const int64_t rows = has_rows ? p.batch * p.heads * p.length : 0;
  Tensor between = empty_real(q, {rows, 2});
  auto [sum_s, sum_z] = empty_state(p, q);
  p.grad = view4(grad), p.grad_q = view4(grad_q), p.grad_k = view4(grad_k), p.grad_v = view4(grad_v);
  p.sum_s = sum_s.data_ptr(), p.sum_z = sum_z.data_ptr(), p.rows = between.data_ptr();
#ifdef CAMOX_CUDA_PART
  const Scratch scratch(p, q);
  check(camox_causal_check(&p, 1));
  launch_with_error_word(camox_linear_attention_causal_backward_cuda, p, q, "linear_attention_backward");
#else
  check(camox_causal_check(&p, 1));
  run_heads(camox_causal_backward(p.dtype, camox_isa_current()), p);
#endif
  return {grad_q, grad_k, grad_v, sum_s, sum_z};
}

constexpr const char* step_op = "linear_attention_step";

// All but q, k, v and out, which have to be contiguous there.
template <class AnyTensor>
camox_causal_step_params step_params(const AnyTensor& q, const AnyTensor& k, const AnyTensor& v, const AnyTensor& s,
                                     const std::optional<AnyTensor>& z, int64_t feature_map, int64_t normalize, bool strict,
                                     double eps) {
  const char* name = step_op;
  camox_causal_step_params p{};
  p.dtype = dtype_of(q, name);
  p.feature_map = code_of(feature_map, CAMOX_FEATURE_IDENTITY, name, "feature map");
  p.normalize = code_of(normalize, CAMOX_NORMALIZE_NONE, name, "normalization");
  p.strict = strict, p.eps = eps;
  if (q.dim() != 3 || v.dim() != 3) throw refusal("linear_attention_step: q and v must have 3 dimensions");
  p.batch = q.size(0), p.heads = q.size(1), p.key_dim = q.size(2), p.value_dim = v.size(2);
  check_shape(k, {p.batch, p.heads, p.key_dim}, name, "k");
  check_shape(v, {p.batch, p.heads, p.value_dim}, name, "v");
  check_dtype_and_device(k, q, name, "k");
  check_dtype_and_device(v, q, name, "v");
  p.s = real_data(s, q, {p.batch, p.heads, p.key_dim, p.value_dim}, name, "s");
  if (z.has_value()) p.z = real_data(*z, q, {p.batch, p.heads, p.key_dim}, name, "z");
  return p;
}

template <class AnyTensor>
void compute_step(camox_causal_step_params& p, const AnyTensor& q, const AnyTensor& k, const AnyTensor& v,
                  const AnyTensor& out) {
  p.q = q.data_ptr(), p.k = k.data_ptr(), p.v = v.data_ptr(), p.out = out.data_ptr();
  check(camox_causal_step_check(&p));
#ifdef CAMOX_CUDA_PART
  launch(camox_linear_attention_step_cuda, p, q, step_op);
#else
  run(camox_causal_step(p.dtype, camox_isa_current()), p, p.batch * p.heads, p.key_dim * p.value_dim);
#endif
}

Tensor linear_attention_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& s, OptionalTensor z,
                             int64_t feature_map, int64_t normalize, bool strict, double eps) {
  camox_causal_step_params p = step_params(q, k, v, s, z, feature_map, normalize, strict, eps);
  const std::array<int64_t, 3> size = {p.batch, p.heads, p.value_dim};
  Tensor out = empty_contiguous(q, dtype_code(q), size.size(), size.data());
  compute_step(p, as_contiguous(q), as_contiguous(k), as_contiguous(v), out);
  return out;
}

#ifndef CAMOX_CUDA_PART
void linear_attention_step_into(const Described& q, const Described& k, const Described& v, const Described& s,
                                const std::optional<Described>& z, int64_t feature_map, int64_t normalize, bool strict,
                                double eps, const Described& out) {
  camox_causal_step_params p = step_params(q, k, v, s, z, feature_map, normalize, strict, eps);
  check_shape(out, {p.batch, p.heads, p.value_dim}, step_op, "out");
  check_dtype_and_device(out, q, step_op, "out");
  for (const Described* row : {&q, &k, &v, &out}) check_contiguous(*row, step_op, "each row");
  compute_step(p, q, k, v, out);
}
#endif

}  // namespace

#ifndef CAMOX_CUDA_PART
CAMOX_DIRECT(linear_attention_step_into)

STABLE_TORCH_LIBRARY_FRAGMENT(camox_ops, m) {
  m.def(
      "linear_attention_causal(Tensor q, Tensor k, Tensor v, Tensor? key_mask, Tensor? initial_s, Tensor? initial_z, Tensor? "
      "cu_seqlens, int feature_map, int normalize, bool strict, float eps) -> (Tensor, Tensor, Tensor)");
  m.def(
      "linear_attention_causal_backward(Tensor grad, Tensor? grad_s, Tensor? grad_z, Tensor q, Tensor k, Tensor v, Tensor? "
      "key_mask, Tensor? initial_s, Tensor? initial_z, Tensor? cu_seqlens, int feature_map, int normalize, bool strict, float "
      "eps) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "linear_attention_step(Tensor q, Tensor k, Tensor v, Tensor(a!) s, Tensor(b!)? z, int feature_map, int normalize, bool "
      "strict, float eps) -> Tensor");
}
#endif

STABLE_TORCH_LIBRARY_IMPL(camox_ops, CAMOX_BACKEND, m) {
  m.impl("linear_attention_causal", TORCH_BOX(&linear_attention_causal));
  m.impl("linear_attention_causal_backward", TORCH_BOX(&linear_attention_causal_backward));
  m.impl("linear_attention_step", TORCH_BOX(&linear_attention_step));
}
