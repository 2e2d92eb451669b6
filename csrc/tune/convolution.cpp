// aten::convolution and its backward: where the replacements serve. Every convolution of the process passes through here; what
// is neither depthwise nor of one pixel goes on after a look at its groups and its window.
#include <algorithm>
#include <atomic>
#include <optional>

#include "convolution.h"
#include "depthwise.h"
#include "pointwise.h"
#include "stock.h"

// torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h: PyTorch's kernels, which it does not look up at the dispatcher.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_cpu_convolution(AtenTensorHandle input, AtenTensorHandle weight,
                                                                           AtenTensorHandle* bias, const int64_t* stride,
                                                                           int64_t, const int64_t* padding, int64_t,
                                                                           const int64_t* dilation, int64_t, int32_t transposed,
                                                                           const int64_t* output_padding, int64_t,
                                                                           int64_t groups, AtenTensorHandle* result);
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_cpu_convolution_backward(
    AtenTensorHandle grad_output, AtenTensorHandle input, AtenTensorHandle weight, const int64_t** bias_sizes, int64_t,
    const int64_t* stride, int64_t, const int64_t* padding, int64_t, const int64_t* dilation, int64_t, int32_t transposed,
    const int64_t* output_padding, int64_t, int64_t groups, const int32_t* output_mask, int64_t, AtenTensorHandle* grad_input,
    AtenTensorHandle* grad_weight, AtenTensorHandle* grad_bias);

namespace camox {
namespace {

using torch::stable::detail::StableLibrary;
using Numbers = std::vector<int64_t>;

std::atomic<int64_t> depthwise_served, pointwise_served;
std::atomic<bool> serving_depthwise, serving_pointwise;

// The arguments that both operators have, taken from the stack.
struct Convolution {
  Numbers stride, padding, dilation;
  bool transposed;
  Numbers output_padding;
  int64_t groups;

  explicit Convolution(const StableIValue* stack)
      : stride(torch::stable::detail::to<Numbers>(stack[0])),
        padding(torch::stable::detail::to<Numbers>(stack[1])),
        dilation(torch::stable::detail::to<Numbers>(stack[2])),
        transposed(torch::stable::detail::to<bool>(stack[3])),
        output_padding(torch::stable::detail::to<Numbers>(stack[4])),
        groups(torch::stable::detail::to<int64_t>(stack[5])) {}
};

bool all_are(const Numbers& numbers, int64_t wanted) {
  return std::all_of(numbers.begin(), numbers.end(), [=](int64_t number) { return number == wanted; });
}

bool is_float32(const Tensor& x) { return x.scalar_type() == torch::headeronly::ScalarType::Float; }

// The sizes, where such a convolution of x is in the domain of the depthwise ones.
std::optional<camox_depthwise_params> depthwise_of(const Tensor& x, const Tensor& weight, const Convolution& c) {
  if (!serving_depthwise.load(std::memory_order_relaxed) || c.groups == 1 || c.transposed || x.dim() != 4 || weight.dim() != 4)
    return std::nullopt;
  if (x.size(1) != c.groups || weight.size(0) != c.groups || weight.size(1) != 1) return std::nullopt;
  camox_depthwise_params p{};
  p.size = weight.size(2);
  if (weight.size(3) != p.size || p.size % 2 == 0 || p.size < 3 || p.size > CAMOX_DEPTHWISE_LARGEST) return std::nullopt;
  if (!is_float32(x) || !is_float32(weight) || !x.is_contiguous() || !weight.is_contiguous()) return std::nullopt;
  if (c.stride.size() > 2 || c.padding.empty() || c.padding.size() > 2 || c.dilation.size() > 2) return std::nullopt;
  if (!all_are(c.stride, 1) || !all_are(c.dilation, 1) || !all_are(c.output_padding, 0)) return std::nullopt;
  p.batch = x.size(0), p.channels = x.size(1), p.rows = x.size(2), p.columns = x.size(3);
  p.top = c.padding.front(), p.left = c.padding.back();
  if (p.top < 0 || p.left < 0 || p.top >= p.size || p.left >= p.size) return std::nullopt;
  p.y_rows = p.rows + 2 * p.top - p.size + 1, p.y_columns = p.columns + 2 * p.left - p.size + 1;
  if (x.numel() == 0 || p.y_rows < 1 || p.y_columns < 1) return std::nullopt;
  return p;
}

// The same for those of one pixel. In other layouts and for few channels or positions PyTorch's are not slower.
std::optional<PointwiseSizes> pointwise_of(const Tensor& x, const Tensor& weight, const Convolution& c) {
  constexpr int64_t least_channels = 8, least_positions = 16, least_product = 32 * 32 * 32;
  if (!serving_pointwise.load(std::memory_order_relaxed) || c.groups != 1 || c.transposed) return std::nullopt;
  if (x.dim() < 3 || weight.dim() != x.dim() || weight.size(1) != x.size(1)) return std::nullopt;
  PointwiseSizes s{x.size(0), x.size(1), weight.size(0), 1};
  for (int64_t d = 2; d < x.dim(); ++d) {
    // Another stride asks for a result in channels_last.
    if (weight.size(d) != 1 || weight.stride(d) != 1 || (x.size(d) == 1 && x.stride(d) != 1)) return std::nullopt;
    s.positions *= x.size(d);
  }
  if (!is_float32(x) || !is_float32(weight) || !x.is_contiguous() || !weight.is_contiguous()) return std::nullopt;
  if (!all_are(c.stride, 1) || !all_are(c.dilation, 1) || !all_are(c.padding, 0)) return std::nullopt;
  if (s.images == 0 || s.inputs < least_channels || s.outputs < least_channels) return std::nullopt;
  if (s.positions != 1 && s.positions < least_positions) return std::nullopt;
  if (s.images * s.inputs * s.outputs * s.positions < least_product) return std::nullopt;
  return s;
}

const float* floats(const Tensor& x) { return static_cast<const float*>(x.data_ptr()); }

Tensor empty_floats(const Tensor& like, const Numbers& size) {
  return empty_contiguous(like, dtype_code(like), size.size(), size.data());
}

bool is_dense_floats(const Tensor& x, const Numbers& sizes) {
  return is_float32(x) && x.is_contiguous() && x.dim() == static_cast<int64_t>(sizes.size()) &&
         std::equal(sizes.begin(), sizes.end(), x.sizes().begin());
}

Numbers sizes_of(const Tensor& x) { return Numbers(x.sizes().begin(), x.sizes().end()); }

// Those of the result of such a convolution of x.
Numbers result_sizes(const camox_depthwise_params& p, const Tensor&) { return {p.batch, p.channels, p.y_rows, p.y_columns}; }

Numbers result_sizes(const PointwiseSizes& s, const Tensor& x) {
  Numbers sizes = sizes_of(x);
  sizes[1] = s.outputs;
  return sizes;
}

// ---- forward ----

void run_planes(const camox_depthwise_params& p) {
  run_with_scratch(camox_depthwise(camox_isa_current()), p, p.batch * p.channels, p.y_rows * p.y_columns * p.size,
                   camox_depthwise_scratch(&p));
}

void convolve(camox_depthwise_params p, const Tensor& x, const Tensor& weight, const float* bias, float* y) {
  p.x = floats(x), p.weights = floats(weight), p.bias = bias, p.y = y;
  run_planes(p);
  depthwise_served.fetch_add(1, std::memory_order_relaxed);
}

void convolve(const PointwiseSizes& s, const Tensor& x, const Tensor& weight, const float* bias, float* y) {
  pointwise(s, floats(x), floats(weight), bias, y);
  pointwise_served.fetch_add(1, std::memory_order_relaxed);
}

// The result, or an undefined tensor where the sizes are none or the bias is not in the domain.
template <class Sizes>
Tensor convolved(const std::optional<Sizes>& sizes, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  if (!sizes || (bias && !is_dense_floats(*bias, {weight.size(0)}))) return Tensor();
  const Tensor y = empty_floats(x, result_sizes(*sizes, x));
  convolve(*sizes, x, weight, bias ? floats(*bias) : nullptr, static_cast<float*>(y.data_ptr()));
  return y;
}

Tensor stock_convolution(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, const Convolution& c) {
  AtenTensorHandle y, of_bias = bias ? bias->get() : nullptr;
  check_stock(aoti_torch_cpu_convolution(x.get(), weight.get(), bias ? &of_bias : nullptr, c.stride.data(), c.stride.size(),
                                         c.padding.data(), c.padding.size(), c.dilation.data(), c.dilation.size(), c.transposed,
                                         c.output_padding.data(), c.output_padding.size(), c.groups, &y),
              "convolution");
  return Tensor(y);
}

// convolution(Tensor input, Tensor weight, Tensor? bias, SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed,
//             SymInt[] output_padding, SymInt groups) -> Tensor
void convolution(StableIValue* stack, uint64_t, uint64_t) {
  const Tensor x(torch::stable::detail::to<AtenTensorHandle>(stack[0]));
  const Tensor weight(torch::stable::detail::to<AtenTensorHandle>(stack[1]));
  auto bias = torch::stable::detail::to<std::optional<Tensor>>(stack[2]);
  if (bias && !bias->defined()) bias.reset();  // so torch calls itself where there is none
  const Convolution c(stack + 3);
  Tensor y = convolved(depthwise_of(x, weight, c), x, weight, bias);
  if (!y.defined()) y = convolved(pointwise_of(x, weight, c), x, weight, bias);
  if (!y.defined()) y = stock_convolution(x, weight, bias, c);
  stack[0] = torch::stable::detail::from(y);
}

// ---- backward ----

// Those that are wanted; NULL otherwise.
struct Gradients {
  float *x, *weight, *bias;
};

void differentiate(const camox_depthwise_params& p, const Tensor& dy, const Tensor& x, const Tensor& weight,
                   const Gradients& to) {
  if (to.weight) {
    camox_depthwise_params of_weights = p;
    of_weights.x = floats(x), of_weights.dy = floats(dy);
    of_weights.d_weights = to.weight, of_weights.d_bias = to.bias;
    run_with_scratch(camox_depthwise_gradient(camox_isa_current()), of_weights, p.channels,
                     p.batch * p.y_rows * p.y_columns * p.size, camox_depthwise_scratch(&of_weights));
  }
  if (to.x) {
    camox_depthwise_params of_x = p;
    of_x.x = floats(dy), of_x.weights = floats(weight), of_x.y = to.x;
    of_x.turned = 1;
    of_x.top = p.size - 1 - p.top, of_x.left = p.size - 1 - p.left;
    std::swap(of_x.rows, of_x.y_rows), std::swap(of_x.columns, of_x.y_columns);
    run_planes(of_x);
  }
  depthwise_served.fetch_add(1, std::memory_order_relaxed);
}

void differentiate(const PointwiseSizes& s, const Tensor& dy, const Tensor& x, const Tensor& weight, const Gradients& to) {
  if (to.weight || to.bias) pointwise_gradient_of_weights(s, floats(x), floats(dy), to.weight, to.bias);
  if (to.x) pointwise_gradient_of_x(s, floats(dy), floats(weight), to.x);
  pointwise_served.fetch_add(1, std::memory_order_relaxed);
}

using Results = std::array<Tensor, 3>;  // of x, weight and bias, undefined where not wanted

// Whether it served.
template <class Sizes>
bool differentiated(const std::optional<Sizes>& sizes, const Tensor& dy, const Tensor& x, const Tensor& weight,
                    const std::vector<bool>& wanted, Results& results) {
  if (!sizes || !is_dense_floats(dy, result_sizes(*sizes, x))) return false;
  // The sum of a depthwise gradient gives the bias' along with the window's.
  const bool with_weight = wanted[1] || (wanted[2] && std::is_same_v<Sizes, camox_depthwise_params>);
  const Results made = {wanted[0] ? empty_floats(x, sizes_of(x)) : Tensor(),
                        with_weight ? empty_floats(weight, sizes_of(weight)) : Tensor(),
                        wanted[2] ? empty_floats(weight, {weight.size(0)}) : Tensor()};
  auto memory = [](const Tensor& t) { return t.defined() ? static_cast<float*>(t.data_ptr()) : nullptr; };
  differentiate(*sizes, dy, x, weight, {memory(made[0]), memory(made[1]), memory(made[2])});
  for (int i = 0; i < 3; ++i) results[i] = wanted[i] ? made[i] : Tensor();
  return true;
}

Results stock_gradients(const Tensor& dy, const Tensor& x, const Tensor& weight, const std::optional<Numbers>& bias_sizes,
                        const Convolution& c, const std::vector<bool>& mask) {
  std::array<AtenTensorHandle, 3> result;
  const int64_t* sizes = bias_sizes ? bias_sizes->data() : nullptr;
  const std::array<int32_t, 3> wanted = {mask[0], mask[1], mask[2]};
  check_stock(aoti_torch_cpu_convolution_backward(dy.get(), x.get(), weight.get(), bias_sizes ? &sizes : nullptr,
                                                  bias_sizes ? bias_sizes->size() : 0, c.stride.data(), c.stride.size(),
                                                  c.padding.data(), c.padding.size(), c.dilation.data(), c.dilation.size(),
                                                  c.transposed, c.output_padding.data(), c.output_padding.size(), c.groups,
                                                  wanted.data(), wanted.size(), &result[0], &result[1], &result[2]),
              "convolution_backward");
  return {Tensor(result[0]), Tensor(result[1]), Tensor(result[2])};
}

// convolution_backward(Tensor grad_output, Tensor input, Tensor weight, SymInt[]? bias_sizes, SymInt[] stride, SymInt[] padding,
//                      SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups, bool[3] output_mask)
//   -> (Tensor, Tensor, Tensor)
void convolution_backward(StableIValue* stack, uint64_t, uint64_t) {
  const Tensor dy(torch::stable::detail::to<AtenTensorHandle>(stack[0]));
  const Tensor x(torch::stable::detail::to<AtenTensorHandle>(stack[1]));
  const Tensor weight(torch::stable::detail::to<AtenTensorHandle>(stack[2]));
  const auto bias_sizes = torch::stable::detail::to<std::optional<Numbers>>(stack[3]);
  const Convolution c(stack + 4);
  const auto wanted = torch::stable::detail::to<std::vector<bool>>(stack[10]);
  Results results;
  if (!differentiated(depthwise_of(x, weight, c), dy, x, weight, wanted, results) &&
      !differentiated(pointwise_of(x, weight, c), dy, x, weight, wanted, results))
    results = stock_gradients(dy, x, weight, bias_sizes, c, wanted);
  for (int i = 0; i < 3; ++i) stack[i] = torch::stable::detail::from(results[i]);
}

// ---- in place and out again ----

std::unique_ptr<StableLibrary> registered;  // while one of them serves

const char* put(std::atomic<bool>& serving) {
  if (!torch_exception_get_what_without_backtrace) return "PyTorch gives the words of its errors to such kernels from 2.13 on";
  if (!aoti_torch_cpu_convolution || !aoti_torch_cpu_convolution_backward)
    return "this PyTorch's C interface does not have its own kernel";
  if (!registered) {
    auto library = std::make_unique<StableLibrary>(StableLibrary::Kind::IMPL, "aten", "CPU", __FILE__, __LINE__);
    library->impl("convolution", convolution).impl("convolution_backward", convolution_backward);
    registered = std::move(library);
  }
  serving.store(true);
  return nullptr;
}

void take(std::atomic<bool>& serving) {
  serving.store(false);
  if (!serving_depthwise.load() && !serving_pointwise.load()) registered.reset();
}

}  // namespace

const char* put_convolution() { return put(serving_depthwise); }
void take_convolution() { take(serving_depthwise); }
int64_t convolution_calls() { return depthwise_served.load(std::memory_order_relaxed); }

const char* put_pointwise() { return put(serving_pointwise); }
void take_pointwise() { take(serving_pointwise); }
int64_t pointwise_calls() { return pointwise_served.load(std::memory_order_relaxed); }

}  // namespace camox
