// Schemas and entries of linear_cross_entropy.
#include <algorithm>

#include "../common/torch_util.h"
#include "linear_cross_entropy.h"

namespace {

using namespace camox;

#ifndef CAMOX_CUDA_PART
constexpr const char* forward_op = "linear_cross_entropy";
constexpr const char* backward_op = "linear_cross_entropy_backward";
#endif

void check_matrix(const Tensor& x, const char* op, const char* name) {
  if (x.dim() == 2) return;
  throw refusal(std::string(op) + ": " + name + " must have 2 dimensions, got " + std::to_string(x.dim()));
}

void check_length(const Tensor& v, int64_t length, const char* op, const char* name) {
  if (v.dim() != 1 || v.size(0) != length)
    throw refusal(std::string(op) + ": " + name + " must have shape (" + std::to_string(length) + ",), got " +
                  std::to_string(v.numel()) + " elements in " + std::to_string(v.dim()) + " dimensions");
}

void check_target(const Tensor& target, int64_t rows, const Tensor& x, const char* op) {
  check_length(target, rows, op, "target");
  check_device(target, x, op, "target");
  if (target.scalar_type() != torch::headeronly::ScalarType::Long)
    throw refusal(std::string(op) + ": target must have dtype int64");
}

OptionalTensor as_contiguous(const OptionalTensor& x) {
  if (!x.has_value()) return x;
  return camox::as_contiguous(*x);
}

#ifndef CAMOX_CUDA_PART
// The arguments that both directions share.
struct Arguments {
  const Tensor &x, &weight, &target;
  const OptionalTensor& bias;
  int64_t ignore_index;
  double label_smoothing;
  int64_t reduction;
};

camox_linear_cross_entropy_params params_of(const Arguments& a, const char* op) {
  check_matrix(a.x, op, "x");
  check_matrix(a.weight, op, "weight");
  check_dtype_and_device(a.weight, a.x, op, "weight");
  camox_linear_cross_entropy_params p{};
  p.dtype = dtype_of(a.x, op);
  p.rows = a.x.size(0), p.depth = a.x.size(1), p.classes = a.weight.size(0);
  if (a.weight.size(1) != p.depth)
    throw refusal(std::string(op) + ": weight must have " + std::to_string(p.depth) + " columns as x, got " +
                  std::to_string(a.weight.size(1)));
  check_target(a.target, p.rows, a.x, op);
  if (a.bias.has_value()) {
    check_real(*a.bias, a.x, 1, op, "bias");
    check_length(*a.bias, p.classes, op, "bias");
    p.bias = a.bias->data_ptr();
  }
  p.reduction = code_of(a.reduction, CAMOX_LOSS_NONE, op, "reduction");
  p.smoothing = a.label_smoothing, p.ignore_index = a.ignore_index;
  p.x = a.x.data_ptr(), p.weight = a.weight.data_ptr(), p.target = static_cast<const int64_t*>(a.target.data_ptr());
  for (int64_t d = 0; d < 2; ++d) p.x_stride[d] = a.x.stride(d), p.weight_stride[d] = a.weight.stride(d);
  check(camox_linear_cross_entropy_check(&p, op));
  return p;
}

// Gradients that a forward makes are multiplied later by the one number that is the gradient of its loss.
void check_makes_gradients(const camox_linear_cross_entropy_params& p) {
  if (p.dtype == CAMOX_F64 || p.reduction == CAMOX_LOSS_NONE)
    throw refusal(std::string(forward_op) + ": the forward makes gradients of a mean or sum, and not in float64");
}

// One direction, with the memory that its kernels share.
void compute(camox_linear_cross_entropy_params& p, const Tensor& like) {
  const char* op = p.backward ? backward_op : forward_op;
  check(camox_linear_cross_entropy_check_targets(&p, op));
  p.threads = torch::stable::get_num_threads();
  const std::array<int64_t, 1> bytes = {std::max<int64_t>(camox_linear_cross_entropy_shared(&p), 1)};
  Tensor shared = empty_contiguous(like, aoti_torch_dtype_uint8(), 1, bytes.data());
  p.shared = shared.data_ptr();
  camox_linear_cross_entropy_kernel* const kernel = camox_linear_cross_entropy(p.dtype, camox_isa_current());
  constexpr int64_t item_cost = 1 << 20;  // each is worth a thread
  for (camox_linear_cross_entropy_begin(&p); p.step != CAMOX_LCE_DONE; camox_linear_cross_entropy_next(&p))
    run_with_scratch(kernel, p, camox_linear_cross_entropy_items(&p), item_cost, camox_linear_cross_entropy_scratch(&p));
}

// Gradients of x and weight in this dtype, and of the bias in the one computed in, which p points to; those that nobody needs
// are empty.
std::tuple<Tensor, Tensor, Tensor> new_gradients(camox_linear_cross_entropy_params& p, const Tensor& x, int32_t dtype,
                                                 bool needs_x, bool needs_weight, bool needs_bias) {
  const std::array<int64_t, 2> none = {0, 0}, x_size = {p.rows, p.depth}, weight_size = {p.classes, p.depth};
  Tensor grad_x = empty_contiguous(x, dtype, 2, (needs_x ? x_size : none).data());
  Tensor grad_weight = empty_contiguous(x, dtype, 2, (needs_weight ? weight_size : none).data());
  Tensor grad_bias = empty_real(x, {needs_bias ? p.classes : 0});
  if (needs_x) p.grad_x = grad_x.data_ptr();
  if (needs_weight) p.grad_weight = grad_weight.data_ptr();
  if (needs_bias) p.grad_bias = grad_bias.data_ptr();
  return {grad_x, grad_weight, grad_bias};
}

// The loss, two numbers of each row, and the gradients of x, weight and bias that it makes at once where these are asked for.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> linear_cross_entropy(
    const Tensor& given_x, const Tensor& given_weight, const Tensor& given_target, OptionalTensor given_bias,
    int64_t ignore_index, double label_smoothing, int64_t reduction, bool make_x, bool make_weight, bool make_bias) {
  Tensor target = camox::as_contiguous(given_target);
  OptionalTensor bias = as_contiguous(given_bias);
  camox_linear_cross_entropy_params p =
      params_of({given_x, given_weight, target, bias, ignore_index, label_smoothing, reduction}, forward_op);
  Tensor top = empty_real(given_x, {p.rows}), log = empty_real(given_x, {p.rows});
  Tensor loss = p.reduction == CAMOX_LOSS_NONE ? empty_real(given_x, {p.rows}) : empty_real(given_x, {});
  p.top = top.data_ptr(), p.log = log.data_ptr(), p.loss = loss.data_ptr();
  if (make_x || make_weight || make_bias) check_makes_gradients(p);
  auto [grad_x, grad_weight, grad_bias] = new_gradients(p, given_x, dtype_code(top), make_x, make_weight, make_bias);
  compute(p, given_x);
  return {loss, top, log, grad_x, grad_weight, grad_bias};
}

std::tuple<Tensor, Tensor, Tensor> linear_cross_entropy_backward(const Tensor& given_grad, const Tensor& x,
                                                                 const Tensor& weight, const Tensor& given_target,
                                                                 OptionalTensor given_bias, const Tensor& given_top,
                                                                 const Tensor& given_log, int64_t ignore_index,
                                                                 double label_smoothing, int64_t reduction, bool needs_x,
                                                                 bool needs_weight, bool needs_bias) {
  const char* op = backward_op;
  Tensor grad = camox::as_contiguous(given_grad), target = camox::as_contiguous(given_target),
         top = camox::as_contiguous(given_top), log = camox::as_contiguous(given_log);
  OptionalTensor bias = as_contiguous(given_bias);
  camox_linear_cross_entropy_params p = params_of({x, weight, target, bias, ignore_index, label_smoothing, reduction}, op);
  p.backward = 1;
  check_real(grad, x, p.reduction == CAMOX_LOSS_NONE ? 1 : 0, op, "grad");
  if (p.reduction == CAMOX_LOSS_NONE) check_length(grad, p.rows, op, "grad");
  check_real(top, x, 1, op, "top");
  check_real(log, x, 1, op, "log");
  check_length(top, p.rows, op, "top");
  check_length(log, p.rows, op, "log");
  p.grad = grad.data_ptr(), p.top = top.data_ptr(), p.log = log.data_ptr();
  auto gradients = new_gradients(p, x, dtype_code(x), needs_x, needs_weight, needs_bias);
  compute(p, x);
  return gradients;
}

#else
// A block of rows of logits: top, log and loss, and then, where grad is given, the gradient of the logits in their place, which
// dz is a view of in x's dtype.
void linear_cross_entropy_rows_(const Tensor& logits, const Tensor& x, const Tensor& weight, const Tensor& given_target,
                                OptionalTensor given_bias, const Tensor& top, const Tensor& log, const Tensor& loss,
                                OptionalTensor given_grad, OptionalTensor dz, int64_t ignore_index, double label_smoothing) {
  const char* op = "linear_cross_entropy_rows_";
  const Tensor target = camox::as_contiguous(given_target);
  const OptionalTensor bias = as_contiguous(given_bias), grad = as_contiguous(given_grad);
  check_real(logits, logits, 2, op, "logits");
  camox_linear_cross_entropy_rows_params p{};
  p.rows = logits.size(0), p.classes = logits.size(1), p.pitch = logits.stride(0);
  p.logits = static_cast<float*>(logits.data_ptr());
  if (logits.stride(1) != 1) throw refusal(std::string(op) + ": logits must have dense rows");
  const auto floats_of = [&](const Tensor& v, int64_t length, const char* name) {
    check_real(v, logits, 1, op, name);
    check_length(v, length, op, name);
    return static_cast<float*>(v.data_ptr());
  };
  check_matrix(x, op, "x");
  check_matrix(weight, op, "weight");
  check_device(x, logits, op, "x");
  check_dtype_and_device(weight, x, op, "weight");
  p.dtype = dtype_of(x, op), p.depth = x.size(1);
  if (x.size(0) != p.rows || weight.size(0) != p.classes || weight.size(1) != p.depth)
    throw refusal(std::string(op) + ": logits must have a row for each of x's and a column for each of weight's");
  p.x = x.data_ptr(), p.weight = weight.data_ptr();
  for (int64_t d = 0; d < 2; ++d) p.x_stride[d] = x.stride(d), p.weight_stride[d] = weight.stride(d);
  check_target(target, p.rows, logits, op);
  p.target = static_cast<const int64_t*>(target.data_ptr());
  if (bias.has_value()) p.bias = floats_of(*bias, p.classes, "bias");
  p.top = floats_of(top, p.rows, "top"), p.log = floats_of(log, p.rows, "log"), p.loss = floats_of(loss, p.rows, "loss");
  if (grad.has_value() != dz.has_value()) throw refusal(std::string(op) + ": grad and dz come together");
  if (grad.has_value()) {
    p.grad_stride = grad->dim();
    check_real(*grad, logits, p.grad_stride, op, "grad");
    if (p.grad_stride != 0) check_length(*grad, p.rows, op, "grad");
    p.grad = static_cast<const float*>(grad->data_ptr());
    check_dtype_and_device(*dz, x, op, "dz");
    if (dz->data_ptr() != logits.data_ptr() || dz->stride(0) * static_cast<int64_t>(dz->element_size()) != p.pitch * 4)
      throw refusal(std::string(op) + ": dz must begin where logits does, in each row");
  }
  p.ignore_index = ignore_index, p.smoothing = label_smoothing;
  check(camox_linear_cross_entropy_rows_check(&p, op));
  launch_with_error_word(camox_linear_cross_entropy_rows_cuda, p, logits, op);
}
#endif

}  // namespace

#ifndef CAMOX_CUDA_PART
STABLE_TORCH_LIBRARY_FRAGMENT(camox_ops, m) {
  m.def(
      "linear_cross_entropy(Tensor x, Tensor weight, Tensor target, Tensor? bias, int ignore_index, float label_smoothing, "
      "int reduction, bool make_x, bool make_weight, bool make_bias) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "linear_cross_entropy_backward(Tensor grad, Tensor x, Tensor weight, Tensor target, Tensor? bias, Tensor top, "
      "Tensor log, int ignore_index, float label_smoothing, int reduction, bool needs_x, bool needs_weight, bool needs_bias) "
      "-> (Tensor, Tensor, Tensor)");
  m.def(
      "linear_cross_entropy_rows_(Tensor(a!) logits, Tensor x, Tensor weight, Tensor target, Tensor? bias, Tensor(b!) top, "
      "Tensor(c!) log, Tensor(d!) loss, Tensor? grad, Tensor(e!)? dz, int ignore_index, float label_smoothing) -> ()");
}
#endif

STABLE_TORCH_LIBRARY_IMPL(camox_ops, CAMOX_BACKEND, m) {
#ifdef CAMOX_CUDA_PART
  m.impl("linear_cross_entropy_rows_", TORCH_BOX(&linear_cross_entropy_rows_));
#else
  m.impl("linear_cross_entropy", TORCH_BOX(&linear_cross_entropy));
  m.impl("linear_cross_entropy_backward", TORCH_BOX(&linear_cross_entropy_backward));
#endif
}
