// Schemas and entries of bdh_attention and its step.
#include <algorithm>

#include "../common/torch_util.h"
#include "bdh.h"

namespace {

using namespace camox;

void check_table(const Tensor& table, const Tensor& q, int64_t dimensions, const char* op, const char* name) {
  check_real(table, q, dimensions, op, name);
  if (!table.is_contiguous()) throw refusal(std::string(op) + ": " + name + " must be contiguous");
}

void check_companion(const Tensor& y, const Tensor& q, int64_t dimensions, const char* op, const char* name) {
  if (y.dim() != dimensions)
    throw refusal(std::string(op) + ": " + name + " must have " + std::to_string(dimensions) + " dimensions, got " +
                  std::to_string(y.dim()));
  check_dtype_and_device(y, q, op, name);
}

void check_sizes(const Tensor& y, std::initializer_list<int64_t> sizes, const char* op, const char* name) {
  if (!std::equal(sizes.begin(), sizes.end(), y.sizes().begin(), y.sizes().end()))
    throw refusal(std::string(op) + ": " + name + " has another shape than q and v ask for");
}

// v with as many heads as q has: the stride over a shared head is 0.
template <class Params>
void set_heads(Params& p, const Tensor& v) {
  p.value_heads = v.size(1);
  if (p.value_heads == 1) p.v.stride[1] = 0;
}

struct Options {
  bool relu, causal, softmax;
  double scale;
  int64_t form;
  bool tf32;
};

camox_bdh_params bdh_params(const Tensor& q, const Tensor& v, const Tensor& cos, const Tensor& sin, const Options& o) {
  const char* op = "bdh_attention";
  camox_bdh_params p{};
  p.dtype = dtype_of(q, op);
  check_companion(q, q, 4, op, "q");
  check_companion(v, q, 4, op, "v");
  check_table(cos, q, 2, op, "cos");
  check_table(sin, q, 2, op, "sin");
  if (cos.size(0) != sin.size(0) || cos.size(1) != sin.size(1))
    throw refusal("bdh_attention: cos and sin must have the same shape");
  p.relu = o.relu, p.causal = o.causal, p.softmax = o.softmax, p.tf32 = o.tf32, p.scale = o.scale;
  p.form = static_cast<camox_bdh_form>(o.form < 0 || o.form > CAMOX_BDH_STATE ? CAMOX_BDH_STATE + 1 : o.form);
  p.batch = q.size(0), p.heads = q.size(1), p.length = q.size(2), p.dim = q.size(3), p.value_dim = v.size(3);
  check_sizes(v, {p.batch, v.size(1), p.length, p.value_dim}, op, "v");
  p.table_length = cos.size(0), p.table_columns = cos.size(1);
  p.cos = cos.data_ptr(), p.sin = sin.data_ptr();
  p.q = view4(q), p.v = view4(v);
  set_heads(p, v);
  return p;
}

#ifdef CAMOX_CUDA_PART
bool slots_sum_heads(const camox_bdh_params&) { return false; }

// Temporary memory of a launcher, to be kept until it has returned.
Tensor scratch_of(camox_bdh_params& p, const Tensor& q, bool backward) {
  Tensor scratch = empty_real(q, {(camox_bdh_cuda_scratch(&p, backward) + 3) / 4});
  p.scratch = scratch.data_ptr();
  return scratch;
}
#else
// Whether batch elements are so many that all heads of one go to one thread, which sums the gradients of their shared values.
bool slots_sum_heads(const camox_bdh_params& p) {
  const int64_t threads = torch::stable::get_num_threads();
  return p.heads > 0 && p.batch > 0 && (p.batch % threads == 0 || p.batch >= 8 * threads);
}

void run_slots(camox_bdh_kernel* kernel, camox_bdh_params& p, const Tensor& q, bool backward) {
  const int64_t items = camox_bdh_work_items(&p);
  if (items == 0) return;
  if (camox_notes_are_kept) camox_bdh_note(&p, backward);
  p.slots = std::min<int64_t>(items, torch::stable::get_num_threads());
  Tensor scratch = empty_real(q, {p.slots * camox_bdh_scratch(&p, backward)});
  p.scratch = scratch.data_ptr();
  run(kernel, p, p.slots, q.numel());
}
#endif

// NULL for a tensor without elements: what was not saved.
void* data_of_saved(const Tensor& saved, const Tensor& q, std::initializer_list<int64_t> size, const char* op,
                    const char* name) {
  if (saved.numel() == 0) return nullptr;
  check_real(saved, q, static_cast<int64_t>(size.size()), op, name);
  check_sizes(saved, size, op, name);
  if (!saved.is_contiguous()) throw refusal(std::string(op) + ": " + name + " must be contiguous");
  return saved.data_ptr();
}

// out, and what the backward reads: the scores or, with softmax, the rows' log of the sum of exp, or neither. What is not
// saved has no elements.
std::tuple<Tensor, Tensor, Tensor> bdh_attention(const Tensor& q, const Tensor& v, const Tensor& cos, const Tensor& sin,
                                                 bool relu, bool causal, bool softmax, double scale, bool save, int64_t form,
                                                 bool tf32) {
  camox_bdh_params p = bdh_params(q, v, cos, sin, {relu, causal, softmax, scale, form, tf32});
  Tensor out = empty_in_order(q, {p.batch, p.heads, p.length, p.value_dim}, 3);
  p.out = view4(out);
  check(camox_bdh_check(&p, 0));
  const bool saves_scores = save && camox_bdh_saves_scores(&p), saves_sums = save && !saves_scores && softmax;
  Tensor scores = saves_scores ? empty_real(q, {p.batch, p.heads, p.length, p.length}) : empty_real(q, {0});
  Tensor logsumexp = saves_sums ? empty_real(q, {p.batch, p.heads, p.length}) : empty_real(q, {0});
  if (saves_scores) p.scores = scores.data_ptr();
  if (saves_sums) p.logsumexp = logsumexp.data_ptr();
#ifdef CAMOX_CUDA_PART
  Tensor scratch = scratch_of(p, q, false);
  launch(camox_bdh_cuda, p, q, "bdh_attention");
#else
  run_slots(camox_bdh_forward(p.dtype, camox_isa_current()), p, q, false);
#endif
  return {out, scores, logsumexp};
}

std::tuple<Tensor, Tensor> bdh_attention_backward(const Tensor& grad, const Tensor& q, const Tensor& v, const Tensor& cos,
                                                  const Tensor& sin, OptionalTensor out, const Tensor& scores,
                                                  const Tensor& logsumexp, bool relu, bool causal, bool softmax, double scale,
                                                  int64_t form, bool unturned, bool tf32) {
  const char* op = "bdh_attention_backward";
  camox_bdh_params p = bdh_params(q, v, cos, sin, {relu, causal, softmax, scale, form, tf32});
  check_companion(grad, q, 4, op, "grad");
  check_sizes(grad, {p.batch, p.heads, p.length, p.value_dim}, op, "grad");
  p.scores = data_of_saved(scores, q, {p.batch, p.heads, p.length, p.length}, op, "scores");
  p.logsumexp = data_of_saved(logsumexp, q, {p.batch, p.heads, p.length}, op, "logsumexp");
  if (out.has_value()) {
    check_companion(*out, q, 4, op, "out");
    check_sizes(*out, {p.batch, p.heads, p.length, p.value_dim}, op, "out");
    p.out = view4(*out);
  }
  p.grad_of_rotated = unturned;
  p.grad = view4(grad);
  Tensor grad_q = empty_in_order(q), grad_v = empty_in_order(v);
  p.grad_q = view4(grad_q), p.grad_v = view4(grad_v);
  const bool partial_sums = p.value_heads != p.heads && !slots_sum_heads(p);
  // at least one element: an empty tensor may have no memory
  const int64_t elements = p.batch * p.heads * p.length * p.value_dim;
  Tensor partial = empty_real(q, {partial_sums ? std::max<int64_t>(elements, 1) : 0});
  if (partial_sums) p.partial = partial.data_ptr();
  check(camox_bdh_check(&p, 1));
#ifdef CAMOX_CUDA_PART
  Tensor scratch = scratch_of(p, q, true);
  launch(camox_bdh_backward_cuda, p, q, op);
#else
  p.avx512_bf16 = p.dtype == CAMOX_BF16 && camox_isa_has_avx512_bf16();
  run_slots(p.avx512_bf16 ? camox_bdh_backward_avx512_bf16() : camox_bdh_backward(p.dtype, camox_isa_current()), p, q, true);
  if (p.partial) run(camox_bdh_sum(p.dtype, camox_isa_current()), p, camox_bdh_sum_work_items(&p), p.heads * p.value_dim);
#endif
  return {grad_q, grad_v};
}

camox_view4 view_of_token(const Tensor& x) {
  auto strides = x.strides();
  return {x.data_ptr(), {strides[0], strides[1], 0, strides[2]}};
}

std::tuple<Tensor, Tensor> bdh_attention_step(const Tensor& q, const Tensor& v, const Tensor& cos, const Tensor& sin,
                                              OptionalTensor state, bool relu, double scale) {
  const char* op = "bdh_attention_step";
  camox_bdh_step_params p{};
  p.dtype = dtype_of(q, op);
  check_companion(q, q, 3, op, "q");
  check_companion(v, q, 3, op, "v");
  check_table(cos, q, 1, op, "cos");
  check_table(sin, q, 1, op, "sin");
  if (cos.size(0) != sin.size(0)) throw refusal("bdh_attention_step: cos and sin must have the same shape");
  p.relu = relu, p.scale = scale;
  p.batch = q.size(0), p.heads = q.size(1), p.dim = q.size(2), p.value_dim = v.size(2);
  check_sizes(v, {p.batch, v.size(1), p.value_dim}, op, "v");
  p.table_columns = cos.size(0);
  p.cos = cos.data_ptr(), p.sin = sin.data_ptr();
  p.q = view_of_token(q), p.v = view_of_token(v);
  set_heads(p, v);
  if (state.has_value()) {
    check_real(*state, q, 4, op, "state");
    check_sizes(*state, {p.batch, p.heads, p.dim, p.value_dim}, op, "state");
    if (!state->is_contiguous()) throw refusal("bdh_attention_step: state must be contiguous");
    p.state = view4(*state);
  }
  Tensor next = empty_real(q, {p.batch, p.heads, p.dim, p.value_dim});
  const std::array<int64_t, 3> size = {p.batch, p.heads, p.value_dim};
  Tensor out = empty_contiguous(q, dtype_code(q), size.size(), size.data());
  p.next = next.data_ptr(), p.out = view_of_token(out);
  check(camox_bdh_step_check(&p));
#ifdef CAMOX_CUDA_PART
  launch(camox_bdh_step_cuda, p, q, op);
#else
  run(camox_bdh_step(p.dtype, camox_isa_current()), p, camox_bdh_step_work_items(&p), p.dim * p.value_dim);
#endif
  return {out, next};
}

}  // namespace

#ifndef CAMOX_CUDA_PART
STABLE_TORCH_LIBRARY_FRAGMENT(camox_ops, m) {
  m.def(
      "bdh_attention(Tensor q, Tensor v, Tensor cos, Tensor sin, bool relu, bool causal, bool softmax, float scale, "
      "bool save, int form, bool tf32=False) -> (Tensor, Tensor, Tensor)");
  m.def(
      "bdh_attention_backward(Tensor grad, Tensor q, Tensor v, Tensor cos, Tensor sin, Tensor? out, Tensor scores, Tensor "
      "logsumexp, bool relu, "
      "bool causal, bool softmax, float scale, int form, bool unturned, bool tf32=False) -> (Tensor, Tensor)");
  m.def(
      "bdh_attention_step(Tensor q, Tensor v, Tensor cos, Tensor sin, Tensor? state, bool relu, float scale) -> "
      "(Tensor, Tensor)");
}
#endif

STABLE_TORCH_LIBRARY_IMPL(camox_ops, CAMOX_BACKEND, m) {
  m.impl("bdh_attention", TORCH_BOX(&bdh_attention));
  m.impl("bdh_attention_backward", TORCH_BOX(&bdh_attention_backward));
  m.impl("bdh_attention_step", TORCH_BOX(&bdh_attention_step));
}
