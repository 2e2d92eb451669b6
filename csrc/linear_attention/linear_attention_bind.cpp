// Schemas and entries of linear_attention.
#include "../common/torch_util.h"
#include "linear_attention.h"

namespace {

using namespace camox;

constexpr const char* op = "linear_attention";

void check_shape(const Tensor& y, std::initializer_list<int64_t> size, const char* name) {
  bool same = y.dim() == static_cast<int64_t>(size.size());
  for (size_t d = 0; same && d < size.size(); ++d) same = y.size(d) == size.begin()[d];
  if (same) return;
  std::string wanted;
  for (int64_t n : size) wanted += (wanted.empty() ? "" : ", ") + std::to_string(n);
  throw refusal(std::string("linear_attention: ") + name + " must have shape (" + wanted + ")");
}

// The data of a contiguous real tensor of these sizes; NULL where it is absent.
const void* real_data(const OptionalTensor& y, const Tensor& q, std::initializer_list<int64_t> size, const char* name) {
  if (!y.has_value()) return nullptr;
  check_real(*y, q, static_cast<int64_t>(size.size()), op, name);
  check_shape(*y, size, name);
  if (!y->is_contiguous()) throw refusal(std::string("linear_attention: ") + name + " must be contiguous");
  return y->data_ptr();
}

camox_linear_attention_params params_of(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& key_mask,
                                        int64_t feature_map, int64_t normalize, double eps, bool backward) {
  camox_linear_attention_params p{};
  p.backward = backward;
  p.dtype = dtype_of(q, op);
  p.feature_map = code_of(feature_map, CAMOX_FEATURE_IDENTITY, op, "feature map"),
  p.normalize = code_of(normalize, CAMOX_NORMALIZE_NONE, op, "normalization"), p.eps = eps;
  check_image(q, op, "q");
  check_image(v, op, "v");
  p.batch = q.size(0), p.heads = q.size(1), p.length = q.size(2), p.key_dim = q.size(3), p.value_dim = v.size(3);
  check_shape(k, {p.batch, p.heads, p.length, p.key_dim}, "k");
  check_shape(v, {p.batch, p.heads, p.length, p.value_dim}, "v");
  check_dtype_and_device(k, q, op, "k");
  check_dtype_and_device(v, q, op, "v");
  p.q = view4(q), p.k = view4(k), p.v = view4(v);
  if (key_mask.has_value()) {
    if (key_mask->scalar_type() != torch::headeronly::ScalarType::Bool)
      throw refusal("linear_attention: key_mask must have dtype bool");
    check_shape(*key_mask, {p.batch, p.length}, "key_mask");
    check_device(*key_mask, q, op, "key_mask");
    p.key_mask = static_cast<const uint8_t*>(key_mask->data_ptr());
    p.mask_stride[0] = key_mask->stride(0), p.mask_stride[1] = key_mask->stride(1);
  }
#ifdef CAMOX_CUDA_PART
  p.multiprocessors = camox_cuda_multiprocessors(q.get_device_index());
#endif
  camox_linear_attention_plan(&p);
  return p;
}

Tensor partial_of(camox_linear_attention_params& p, const Tensor& q) {
  Tensor partial = empty_real(q, {p.batch * p.heads, p.chunks, p.key_dim * (p.value_dim + 1)});
  p.partial = partial.data_ptr();
  return partial;
}

Tensor empty_s(const camox_linear_attention_params& p, const Tensor& q) {
  return empty_real(q, {p.batch, p.heads, p.key_dim, p.value_dim});
}

// Without elements where there is no z.
Tensor empty_z(const camox_linear_attention_params& p, const Tensor& q) {
  return p.normalize == CAMOX_NORMALIZE_SUM ? empty_real(q, {p.batch, p.heads, p.key_dim}) : empty_real(q, {0});
}

#ifndef CAMOX_CUDA_PART
using Variant = camox_linear_attention_kernel* (*)(camox_attention_step, camox_dtype, camox_isa);

void run_steps(Variant variant, const camox_linear_attention_params& p) {
  for (int step = 0; step < CAMOX_ATTENTION_STEPS; ++step) {
    const auto which = static_cast<camox_attention_step>(step);
    const int64_t rows = which == CAMOX_ATTENTION_STATE ? p.chunks : p.chunk;
    run_with_scratch(variant(which, p.dtype, camox_isa_current()), p, camox_linear_attention_work_items(&p, which),
                     rows * p.key_dim * p.value_dim, CAMOX_LINEAR_ATTENTION_SCRATCH);
  }
}
#endif

std::tuple<Tensor, Tensor, Tensor> linear_attention(const Tensor& q, const Tensor& k, const Tensor& v, OptionalTensor key_mask,
                                                    OptionalTensor initial_s, OptionalTensor initial_z, int64_t feature_map,
                                                    int64_t normalize, double eps) {
  camox_linear_attention_params p = params_of(q, k, v, key_mask, feature_map, normalize, eps, false);
  p.initial_s = real_data(initial_s, q, {p.batch, p.heads, p.key_dim, p.value_dim}, "initial_s");
  p.initial_z = real_data(initial_z, q, {p.batch, p.heads, p.key_dim}, "initial_z");
  Tensor out = empty_in_order(q, {p.batch, p.heads, p.length, p.value_dim}, 4);
  Tensor s = empty_s(p, q), z = empty_z(p, q), partial = partial_of(p, q);
  p.out = view4(out), p.s = s.data_ptr(), p.z = z.data_ptr();
  check(camox_linear_attention_check(&p, 0));
#ifdef CAMOX_CUDA_PART
  launch(camox_linear_attention_cuda, p, q, op);
#else
  run_steps(camox_linear_attention_forward, p);
#endif
  return {out, s, z};
}

// Gradients of what the forward returned.
struct Incoming {
  const Tensor& grad;
  const OptionalTensor &grad_s, &grad_z;
};

// Writes grad_q, grad_k and grad_v; returns the gradients of the initial state.
std::tuple<Tensor, Tensor> backward_into(const std::array<Tensor, 3>& grad_qkv, const Incoming& incoming, const Tensor& s,
                                         const Tensor& z, camox_linear_attention_params p) {
  const auto& [grad_q, grad_k, grad_v] = grad_qkv;
  const auto& [grad, grad_s, grad_z] = incoming;
  const Tensor& q = grad_q;  // the same dtype and device
  check_shape(grad, {p.batch, p.heads, p.length, p.value_dim}, "grad");
  check_dtype_and_device(grad, q, op, "grad");
  p.grad = view4(grad);
  p.s = const_cast<void*>(real_data(s, q, {p.batch, p.heads, p.key_dim, p.value_dim}, "s"));
  if (p.normalize == CAMOX_NORMALIZE_SUM) p.z = const_cast<void*>(real_data(z, q, {p.batch, p.heads, p.key_dim}, "z"));
  p.grad_s = real_data(grad_s, q, {p.batch, p.heads, p.key_dim, p.value_dim}, "grad_s");
  p.grad_z = real_data(grad_z, q, {p.batch, p.heads, p.key_dim}, "grad_z");
  Tensor sum_s = empty_s(p, q), sum_z = empty_z(p, q), partial = partial_of(p, q);
  p.grad_q = view4(grad_q), p.grad_k = view4(grad_k), p.grad_v = view4(grad_v);
  p.sum_s = sum_s.data_ptr(), p.sum_z = sum_z.data_ptr();
  check(camox_linear_attention_check(&p, 1));
#ifdef CAMOX_CUDA_PART
  launch(camox_linear_attention_backward_cuda, p, q, "linear_attention_backward");
#else
  run_steps(camox_linear_attention_backward, p);
#endif
  return {sum_s, sum_z};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> linear_attention_backward(
    const Tensor& grad, OptionalTensor grad_s, OptionalTensor grad_z, const Tensor& q, const Tensor& k, const Tensor& v,
    OptionalTensor key_mask, const Tensor& s, const Tensor& z, int64_t feature_map, int64_t normalize, double eps) {
  camox_linear_attention_params p = params_of(q, k, v, key_mask, feature_map, normalize, eps, true);
  const std::vector<int64_t> keys = {p.batch, p.heads, p.length, p.key_dim};
  Tensor grad_q = empty_in_order(q, keys, 4), grad_k = empty_in_order(k, keys, 4);
  Tensor grad_v = empty_in_order(v, {p.batch, p.heads, p.length, p.value_dim}, 4);
  auto [sum_s, sum_z] = backward_into({grad_q, grad_k, grad_v}, {grad, grad_s, grad_z}, s, z, p);
  return {grad_q, grad_k, grad_v, sum_s, sum_z};
}

// q, k or v of a (B,3,H,T,N) tensor.
Tensor part_of(const Tensor& qkv, int64_t part) {
  if (qkv.dim() != 5 || qkv.size(1) != 3) throw refusal("linear_attention: qkv must have shape (B, 3, H, T, N)");
  return torch::stable::select(qkv, 1, part);
}

std::tuple<Tensor, Tensor, Tensor> linear_attention_packed(const Tensor& qkv, OptionalTensor key_mask, int64_t feature_map,
                                                           int64_t normalize, double eps) {
  return linear_attention(part_of(qkv, 0), part_of(qkv, 1), part_of(qkv, 2), key_mask, std::nullopt, std::nullopt, feature_map,
                          normalize, eps);
}

Tensor linear_attention_packed_backward(const Tensor& grad, OptionalTensor grad_s, OptionalTensor grad_z, const Tensor& qkv,
                                        OptionalTensor key_mask, const Tensor& s, const Tensor& z, int64_t feature_map,
                                        int64_t normalize, double eps) {
  const Tensor q = part_of(qkv, 0);
  auto p = params_of(q, part_of(qkv, 1), part_of(qkv, 2), key_mask, feature_map, normalize, eps, true);
  auto sizes = qkv.sizes();
  Tensor grad_qkv = empty_in_order(qkv, {sizes.begin(), sizes.end()}, 5);
  backward_into({part_of(grad_qkv, 0), part_of(grad_qkv, 1), part_of(grad_qkv, 2)}, {grad, grad_s, grad_z}, s, z, p);
  return grad_qkv;
}

}  // namespace

#ifndef CAMOX_CUDA_PART
STABLE_TORCH_LIBRARY_FRAGMENT(camox_ops, m) {
  m.def(
      "linear_attention(Tensor q, Tensor k, Tensor v, Tensor? key_mask, Tensor? initial_s, Tensor? initial_z, int feature_map, "
      "int normalize, float eps) -> (Tensor, Tensor, Tensor)");
  m.def(
      "linear_attention_backward(Tensor grad, Tensor? grad_s, Tensor? grad_z, Tensor q, Tensor k, Tensor v, Tensor? key_mask, "
      "Tensor s, Tensor z, int feature_map, int normalize, float eps) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "linear_attention_packed(Tensor qkv, Tensor? key_mask, int feature_map, int normalize, float eps) -> (Tensor, Tensor, "
      "Tensor)");
  m.def(
      "linear_attention_packed_backward(Tensor grad, Tensor? grad_s, Tensor? grad_z, Tensor qkv, Tensor? key_mask, Tensor s, "
      "Tensor z, int feature_map, int normalize, float eps) -> Tensor");
}
#endif

STABLE_TORCH_LIBRARY_IMPL(camox_ops, CAMOX_BACKEND, m) {
  m.impl("linear_attention", TORCH_BOX(&linear_attention));
  m.impl("linear_attention_backward", TORCH_BOX(&linear_attention_backward));
  m.impl("linear_attention_packed", TORCH_BOX(&linear_attention_packed));
  m.impl("linear_attention_packed_backward", TORCH_BOX(&linear_attention_packed_backward));
}
