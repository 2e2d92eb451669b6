// Schemas and entries of short_attention.
#include "../common/torch_util.h"
#include "short_attention.h"

namespace {

using namespace camox;
using torch::headeronly::ScalarType;

void check_like_q(const Tensor& x, const Tensor& q, const char* op, const char* name) {
  bool same = x.dim() == 4;
  for (int64_t d = 0; same && d < 4; ++d) same = x.size(d) == q.size(d);
  if (!same) throw refusal(std::string(op) + ": " + name + " must have the shape of q");
  if (x.scalar_type() != q.scalar_type()) throw refusal(std::string(op) + ": " + name + " must have the dtype of q");
  check_device(x, q, op, name);
}

void set_padding(camox_short_attention_params& p, const Tensor& mask, const Tensor& q, const char* op) {
  if (mask.scalar_type() != ScalarType::Bool) throw refusal(std::string(op) + ": key_padding_mask must have dtype bool");
  if (mask.dim() != 2 || mask.size(0) != p.sequences || mask.size(1) != p.length)
    throw refusal(std::string(op) + ": key_padding_mask must have shape (S, T) of q");
  check_device(mask, q, op, "key_padding_mask");
  p.padding = static_cast<const uint8_t*>(mask.data_ptr());
  p.padding_stride[0] = mask.stride(0), p.padding_stride[1] = mask.stride(1);
}

struct Options {
  bool causal;
  double scale, probability;
};

camox_short_attention_params params_of(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& mask,
                                       const OptionalTensor& seed, const Options& o, const char* op) {
  camox_short_attention_params p{};
  if (q.dim() != 4) throw refusal(std::string(op) + ": q must have 4 dimensions (S, T, H, D), got " + std::to_string(q.dim()));
  check_like_q(k, q, op, "k");
  check_like_q(v, q, op, "v");
  p.dtype = dtype_of(q, op);
  p.causal = o.causal, p.scale = o.scale, p.p = o.probability;
  p.sequences = q.size(0), p.length = q.size(1), p.heads = q.size(2), p.dim = q.size(3);
  p.q = view4(q), p.k = view4(k), p.v = view4(v);
  if (mask.has_value()) set_padding(p, *mask, q, op);
  p.seed = seed_of(seed, q, op);
  return p;
}

#ifdef CAMOX_CUDA_PART
#define CAMOX_SHORT_ATTENTION_COMPUTE(direction, launcher, p, q, op) launch(launcher, p, q, op)
#else
#define CAMOX_SHORT_ATTENTION_COMPUTE(direction, launcher, p, q, op) compute(camox_short_attention_##direction, p, q)

void compute(camox_short_attention_kernel* variant(camox_dtype, camox_isa), const camox_short_attention_params& p,
             const Tensor& q) {
  int64_t items = camox_short_attention_work_items(&p);
  run_with_scratch(variant(p.dtype, camox_isa_current()), p, items, items > 0 ? q.numel() / items : 0,
                   CAMOX_SHORT_ATTENTION_SCRATCH);
}
#endif

Tensor short_attention(const Tensor& q, const Tensor& k, const Tensor& v, OptionalTensor key_padding_mask, OptionalTensor seed,
                       bool causal, double scale, double probability) {
  const char* op = "short_attention";
  camox_short_attention_params p = params_of(q, k, v, key_padding_mask, seed, {causal, scale, probability}, op);
  Tensor out = empty_in_order(q);
  p.out = view4(out);
  check(camox_short_attention_check(&p, 0));
  CAMOX_SHORT_ATTENTION_COMPUTE(forward, camox_short_attention_cuda, p, q, op);
  return out;
}

// p: as params_of made it.
void backward_into(const std::array<Tensor, 3>& grad_qkv, const Tensor& grad, const Tensor& q, camox_short_attention_params p,
                   const char* op) {
  check_like_q(grad, q, op, "grad");
  p.grad = view4(grad);
  p.grad_q = view4(grad_qkv[0]), p.grad_k = view4(grad_qkv[1]), p.grad_v = view4(grad_qkv[2]);
  check(camox_short_attention_check(&p, 1));
  CAMOX_SHORT_ATTENTION_COMPUTE(backward, camox_short_attention_backward_cuda, p, q, op);
}

std::tuple<Tensor, Tensor, Tensor> short_attention_backward(const Tensor& grad, const Tensor& q, const Tensor& k,
                                                            const Tensor& v, OptionalTensor key_padding_mask,
                                                            OptionalTensor seed, bool causal, double scale,
                                                            double probability) {
  const char* op = "short_attention_backward";
  auto p = params_of(q, k, v, key_padding_mask, seed, {causal, scale, probability}, op);
  Tensor grad_q = empty_in_order(q), grad_k = empty_in_order(k), grad_v = empty_in_order(v);
  backward_into({grad_q, grad_k, grad_v}, grad, q, p, op);
  return {grad_q, grad_k, grad_v};
}

// q, k or v of a (S,T,3,H,D) tensor.
Tensor part_of(const Tensor& qkv, int64_t part) {
  if (qkv.dim() != 5 || qkv.size(2) != 3) throw refusal("short_attention: qkv must have shape (S, T, 3, H, D)");
  return torch::stable::select(qkv, 2, part);
}

Tensor short_attention_packed(const Tensor& qkv, OptionalTensor key_padding_mask, OptionalTensor seed, bool causal,
                              double scale, double probability) {
  return short_attention(part_of(qkv, 0), part_of(qkv, 1), part_of(qkv, 2), key_padding_mask, seed, causal, scale, probability);
}

Tensor short_attention_packed_backward(const Tensor& grad, const Tensor& qkv, OptionalTensor key_padding_mask,
                                       OptionalTensor seed, bool causal, double scale, double probability) {
  const char* op = "short_attention_packed_backward";
  const Tensor q = part_of(qkv, 0);
  auto p = params_of(q, part_of(qkv, 1), part_of(qkv, 2), key_padding_mask, seed, {causal, scale, probability}, op);
  Tensor grad_qkv = empty_in_order(qkv);
  backward_into({part_of(grad_qkv, 0), part_of(grad_qkv, 1), part_of(grad_qkv, 2)}, grad, q, p, op);
  return grad_qkv;
}

}  // namespace

#ifndef CAMOX_CUDA_PART
#define SHORT_ATTENTION_OPTIONS "Tensor? key_padding_mask, Tensor? seed, bool causal, float scale, float p"
#define SHORT_ATTENTION_ARGUMENTS "Tensor q, Tensor k, Tensor v, " SHORT_ATTENTION_OPTIONS
STABLE_TORCH_LIBRARY_FRAGMENT(camox_ops, m) {
  m.def("short_attention(" SHORT_ATTENTION_ARGUMENTS ") -> Tensor");
  m.def("short_attention_backward(Tensor grad, " SHORT_ATTENTION_ARGUMENTS ") -> (Tensor, Tensor, Tensor)");
  m.def("short_attention_packed(Tensor qkv, " SHORT_ATTENTION_OPTIONS ") -> Tensor");
  m.def("short_attention_packed_backward(Tensor grad, Tensor qkv, " SHORT_ATTENTION_OPTIONS ") -> Tensor");
}
#endif

STABLE_TORCH_LIBRARY_IMPL(camox_ops, CAMOX_BACKEND, m) {
  m.impl("short_attention", TORCH_BOX(&short_attention));
  m.impl("short_attention_backward", TORCH_BOX(&short_attention_backward));
  m.impl("short_attention_packed", TORCH_BOX(&short_attention_packed));
  m.impl("short_attention_packed_backward", TORCH_BOX(&short_attention_packed_backward));
}
