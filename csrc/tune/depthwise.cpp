// aten::convolution and its backward: where the replacement serves. Every convolution of the process passes through here; what
// is not depthwise goes on after one look at its groups.
#include <algorithm>
#include <atomic>
#include <optional>

#include "depthwise.h"
#include "depthwise_ops.h"
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

std::atomic<int64_t> calls;

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

// The sizes, where such a convolution of x is in the domain.
std::optional<camox_depthwise_params> params_of(const Tensor& x, const Tensor& weight, const Convolution& c) {
  if (c.groups == 1 || c.transposed || x.dim() != 4 || weight.dim() != 4) return std::nullopt;
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

const float* floats(const Tensor& x) { return static_cast<const float*>(x.data_ptr()); }

Tensor empty_floats(const Tensor& like, std::initializer_list<int64_t> size) {
  return empty_contiguous(like, dtype_code(like), size.size(), size.begin());
}

void run_planes(const camox_depthwise_params& p) {
  run_with_scratch(camox_depthwise(camox_isa_current()), p, p.batch * p.channels, p.y_rows * p.y_columns * p.size,
                   camox_depthwise_scratch(&p));
}

// convolution(Tensor input, Tensor weight, Tensor? bias, SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed,
//             SymInt[] output_padding, SymInt groups) -> Tensor
void convolution(StableIValue* stack, uint64_t, uint64_t) {
  const Tensor x(torch::stable::detail::to<AtenTensorHandle>(stack[0]));
  const Tensor weight(torch::stable::detail::to<AtenTensorHandle>(stack[1]));
  auto bias = torch::stable::detail::to<std::optional<Tensor>>(stack[2]);
  if (bias && !bias->defined()) bias.reset();  // so torch calls itself where there is none
  const Convolution c(stack + 3);
  std::optional<camox_depthwise_params> p = params_of(x, weight, c);
  if (p && bias && (!is_float32(*bias) || bias->numel() != p->channels || !bias->is_contiguous())) p.reset();
  if (!p) {
    AtenTensorHandle y, of_bias = bias ? bias->get() : nullptr;
    check_stock(aoti_torch_cpu_convolution(x.get(), weight.get(), bias ? &of_bias : nullptr, c.stride.data(), c.stride.size(),
                                           c.padding.data(), c.padding.size(), c.dilation.data(), c.dilation.size(),
                                           c.transposed, c.output_padding.data(), c.output_padding.size(), c.groups, &y),
                "convolution");
    stack[0] = torch::stable::detail::from(y);
    return;
  }
  const Tensor y = empty_floats(x, {p->batch, p->channels, p->y_rows, p->y_columns});
  p->x = floats(x), p->weights = floats(weight), p->bias = bias ? floats(*bias) : nullptr;
  p->y = static_cast<float*>(y.data_ptr());
  run_planes(*p);
  calls.fetch_add(1, std::memory_order_relaxed);
  stack[0] = torch::stable::detail::from(y);
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
  const auto mask = torch::stable::detail::to<std::vector<bool>>(stack[10]);
  std::optional<camox_depthwise_params> p = params_of(x, weight, c);
  if (p && (!is_float32(dy) || !dy.is_contiguous() || dy.dim() != 4 || dy.size(0) != p->batch || dy.size(1) != p->channels ||
            dy.size(2) != p->y_rows || dy.size(3) != p->y_columns))
    p.reset();
  std::array<AtenTensorHandle, 3> result;
  if (!p) {
    const int64_t* sizes = bias_sizes ? bias_sizes->data() : nullptr;
    const std::array<int32_t, 3> wanted = {mask[0], mask[1], mask[2]};
    check_stock(aoti_torch_cpu_convolution_backward(dy.get(), x.get(), weight.get(), bias_sizes ? &sizes : nullptr,
                                                    bias_sizes ? bias_sizes->size() : 0, c.stride.data(), c.stride.size(),
                                                    c.padding.data(), c.padding.size(), c.dilation.data(), c.dilation.size(),
                                                    c.transposed, c.output_padding.data(), c.output_padding.size(), c.groups,
                                                    wanted.data(), wanted.size(), &result[0], &result[1], &result[2]),
                "convolution_backward");
    for (int i = 0; i < 3; ++i) stack[i] = torch::stable::detail::from(result[i]);
    return;
  }
  const std::array<Tensor, 3> made = {mask[0] ? empty_floats(x, {p->batch, p->channels, p->rows, p->columns}) : Tensor(),
                                      mask[1] || mask[2] ? empty_floats(weight, {p->channels, 1, p->size, p->size}) : Tensor(),
                                      mask[2] ? empty_floats(weight, {p->channels}) : Tensor()};
  if (mask[1] || mask[2]) {
    camox_depthwise_params of_weights = *p;
    of_weights.x = floats(x), of_weights.dy = floats(dy);
    of_weights.d_weights = static_cast<float*>(made[1].data_ptr());
    of_weights.d_bias = mask[2] ? static_cast<float*>(made[2].data_ptr()) : nullptr;
    run_with_scratch(camox_depthwise_gradient(camox_isa_current()), of_weights, p->channels,
                     p->batch * p->y_rows * p->y_columns * p->size, camox_depthwise_scratch(&of_weights));
  }
  if (mask[0]) {
    camox_depthwise_params of_x = *p;
    of_x.x = floats(dy), of_x.weights = floats(weight), of_x.y = static_cast<float*>(made[0].data_ptr());
    of_x.turned = 1;
    of_x.top = p->size - 1 - p->top, of_x.left = p->size - 1 - p->left;
    std::swap(of_x.rows, of_x.y_rows), std::swap(of_x.columns, of_x.y_columns);
    run_planes(of_x);
  }
  calls.fetch_add(1, std::memory_order_relaxed);
  for (int i = 0; i < 3; ++i) stack[i] = torch::stable::detail::from(mask[i] ? made[i] : Tensor());
}

std::unique_ptr<StableLibrary> registered;

}  // namespace

const char* put_convolution() {
  if (!torch_exception_get_what_without_backtrace) return "PyTorch gives the words of its errors to such kernels from 2.13 on";
  if (!aoti_torch_cpu_convolution || !aoti_torch_cpu_convolution_backward)
    return "this PyTorch's C interface does not have its own kernel";
  if (!registered) {
    auto library = std::make_unique<StableLibrary>(StableLibrary::Kind::IMPL, "aten", "CPU", __FILE__, __LINE__);
    library->impl("convolution", convolution).impl("convolution_backward", convolution_backward);
    registered = std::move(library);
  }
  return nullptr;
}

void take_convolution() { registered.reset(); }

int64_t convolution_calls() { return calls.load(std::memory_order_relaxed); }

}  // namespace camox
