// An output of less padding than half a window is the middle of the box mean, and the gradient of it the same with zeros around:
//
//   +-------------+      y_margin = window/2 - padding rows and columns at each side, which the kernel leaves out of y;
//   |  +-------+  |      in backward x_margin: there grad has no pixels, and its zeros are not stored anywhere
//   |  |   y   |  |
//   |  +-------+  |
//   +-------------+
#include "pool.h"

#include <algorithm>
#include <atomic>
#include <optional>

#include "../box/box.h"
#include "stock.h"

// torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h: PyTorch's kernels, which it does not look up at the dispatcher.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_cpu_avg_pool2d(AtenTensorHandle self, const int64_t* kernel_size,
                                                                          int64_t, const int64_t* stride, int64_t,
                                                                          const int64_t* padding, int64_t, int32_t ceil_mode,
                                                                          int32_t count_include_pad, int64_t* divisor_override,
                                                                          AtenTensorHandle* result);
extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_cpu_avg_pool2d_backward(AtenTensorHandle grad_output, AtenTensorHandle self, const int64_t* kernel_size, int64_t,
                                   const int64_t* stride, int64_t, const int64_t* padding, int64_t, int32_t ceil_mode,
                                   int32_t count_include_pad, int64_t* divisor_override, AtenTensorHandle* result);

namespace camox {
namespace {

using torch::stable::detail::StableLibrary;

std::atomic<int64_t> calls;

// The arguments that both operators have, taken from the stack, and whether such a pool is in the domain.
struct Pool {
  std::vector<int64_t> window, stride, padding;
  bool ceil_mode, count_include_pad;
  std::optional<int64_t> divisor;

  explicit Pool(const StableIValue* stack)
      : window(torch::stable::detail::to<std::vector<int64_t>>(stack[0])),
        stride(torch::stable::detail::to<std::vector<int64_t>>(stack[1])),
        padding(torch::stable::detail::to<std::vector<int64_t>>(stack[2])),
        ceil_mode(torch::stable::detail::to<bool>(stack[3])),
        count_include_pad(torch::stable::detail::to<bool>(stack[4])),
        divisor(torch::stable::detail::to<std::optional<int64_t>>(stack[5])) {}

  bool in_domain() const {
    for (const std::vector<int64_t>* list : {&window, &stride, &padding})
      if (list->size() != 1 && list->size() != 2) return false;
    if (stride.front() != 1 || stride.back() != 1 || ceil_mode || divisor) return false;
    for (const bool last : {false, true}) {
      const int64_t length = last ? window.back() : window.front(), pad = last ? padding.back() : padding.front();
      if (length < 1 || length % 2 == 0 || pad < 0 || pad > length / 2) return false;
    }
    return true;
  }
};

// What the kernel is asked for, but for x and y; nothing where PyTorch's kernel serves.
std::optional<camox_box_params> params_of(const Tensor& x, const Pool& pool) {
  // Below this, PyTorch's additions over box_mean's pixels, the latter was not always faster.
  constexpr int64_t least_gain = 6;
  const int64_t dimensions = x.dim();
  if (!pool.in_domain()) return std::nullopt;
  if ((dimensions != 3 && dimensions != 4) || !is_pooled_type(x) || x.numel() == 0) return std::nullopt;
  camox_box_params p{};
  p.dtype = dtype_of(x, "avg_pool2d");
  p.channels_last = dimensions == 4 && is_channels_last(x);
  p.batch = dimensions == 4 ? x.size(0) : 1, p.channels = x.size(dimensions - 3);
  p.height = x.size(dimensions - 2), p.width = x.size(dimensions - 1);
  p.window_height = pool.window.front(), p.window_width = pool.window.back();
  p.y_margin[0] = p.window_height / 2 - pool.padding.front(), p.y_margin[1] = p.window_width / 2 - pool.padding.back();
  const int64_t rows = p.height - 2 * p.y_margin[0], columns = p.width - 2 * p.y_margin[1];
  if (rows < 1 || columns < 1) return std::nullopt;
  const double work = static_cast<double>(rows * columns) * static_cast<double>(p.window_height * p.window_width);
  if (work < static_cast<double>(least_gain * p.height * p.width)) return std::nullopt;
  return p;
}

Tensor empty_output(const Tensor& like, const camox_box_params& p, int64_t height, int64_t width) {
  const std::array<int64_t, 4> size = {p.batch, p.channels, height, width};
  if (like.dim() == 3) return empty_contiguous(like, dtype_code(like), 3, size.data() + 1);
  if (!p.channels_last) return empty_contiguous(like, dtype_code(like), 4, size.data());
  const std::array<int64_t, 4> strides = {p.channels * height * width, 1, p.channels * width, p.channels};
  return empty_strided(like, dtype_code(like), 4, size.data(), strides.data());
}

void run_box(camox_box_params& p, const Tensor& x, const Tensor& y) {
  p.x = image_view(x), p.y = image_view(y);
  check(camox_box_check(&p, "avg_pool2d"));
  const int64_t items = camox_box_items(&p);
  run_with_scratch(camox_box_forward(p.dtype, camox_isa_current()), p, items, p.batch * p.channels * p.height * p.width / items,
                   camox_box_scratch(&p));
  calls.fetch_add(1, std::memory_order_relaxed);
}

// avg_pool2d(Tensor self, int[2] kernel_size, int[2] stride, int[2] padding, bool ceil_mode, bool count_include_pad,
//            int? divisor_override) -> Tensor
void avg_pool2d(StableIValue* stack, uint64_t, uint64_t) {
  const Tensor x(torch::stable::detail::to<AtenTensorHandle>(stack[0]));
  Pool pool(stack + 1);
  std::optional<camox_box_params> p = params_of(x, pool);
  if (!p) {
    AtenTensorHandle y;
    check_stock(aoti_torch_cpu_avg_pool2d(x.get(), pool.window.data(), pool.window.size(), pool.stride.data(),
                                          pool.stride.size(), pool.padding.data(), pool.padding.size(), pool.ceil_mode,
                                          pool.count_include_pad, pool.divisor ? &*pool.divisor : nullptr, &y),
                "avg_pool2d");
    stack[0] = torch::stable::detail::from(y);
    return;
  }
  p->kind = pool.count_include_pad ? CAMOX_BOX_MEAN : CAMOX_BOX_COUNTED;
  const Tensor y = empty_output(x, *p, p->height - 2 * p->y_margin[0], p->width - 2 * p->y_margin[1]);
  run_box(*p, x, y);
  stack[0] = torch::stable::detail::from(y);
}

// Whether grad is what the output of this pool of x is.
bool fits(const Tensor& grad, const Tensor& x, const camox_box_params& p) {
  const int64_t dimensions = x.dim();
  if (grad.dim() != dimensions || grad.scalar_type() != x.scalar_type()) return false;
  for (int64_t d = 0; d < dimensions; ++d) {
    const int64_t side = d - (dimensions - 2);
    if (grad.size(d) != x.size(d) - (side >= 0 ? 2 * p.y_margin[side] : 0)) return false;
  }
  return true;
}

// avg_pool2d_backward(Tensor grad_output, Tensor self, int[2] kernel_size, int[2] stride, int[2] padding, bool ceil_mode,
//                     bool count_include_pad, int? divisor_override) -> Tensor
void avg_pool2d_backward(StableIValue* stack, uint64_t, uint64_t) {
  const Tensor grad(torch::stable::detail::to<AtenTensorHandle>(stack[0]));
  const Tensor x(torch::stable::detail::to<AtenTensorHandle>(stack[1]));
  Pool pool(stack + 2);
  std::optional<camox_box_params> p = params_of(x, pool);
  if (!p || !fits(grad, x, *p)) {
    AtenTensorHandle y;
    check_stock(
        aoti_torch_cpu_avg_pool2d_backward(grad.get(), x.get(), pool.window.data(), pool.window.size(), pool.stride.data(),
                                           pool.stride.size(), pool.padding.data(), pool.padding.size(), pool.ceil_mode,
                                           pool.count_include_pad, pool.divisor ? &*pool.divisor : nullptr, &y),
        "avg_pool2d_backward");
    stack[0] = torch::stable::detail::from(y);
    return;
  }
  p->kind = pool.count_include_pad ? CAMOX_BOX_MEAN : CAMOX_BOX_COUNTED_ADJOINT;
  std::swap(p->x_margin, p->y_margin);
  const Tensor y = empty_output(x, *p, p->height, p->width);
  run_box(*p, grad, y);
  stack[0] = torch::stable::detail::from(y);
}

std::unique_ptr<StableLibrary> registered;

}  // namespace

const char* put_avg_pool2d() {
  if (!torch_exception_get_what_without_backtrace) return "PyTorch gives the words of its errors to such kernels from 2.13 on";
  if (!aoti_torch_cpu_avg_pool2d || !aoti_torch_cpu_avg_pool2d_backward)
    return "this PyTorch's C interface does not have its own kernel";
  if (!registered) {
    auto library = std::make_unique<StableLibrary>(StableLibrary::Kind::IMPL, "aten", "CPU", __FILE__, __LINE__);
    library->impl("avg_pool2d", avg_pool2d).impl("avg_pool2d_backward", avg_pool2d_backward);
    registered = std::move(library);
  }
  return nullptr;
}

void take_avg_pool2d() { registered.reset(); }

int64_t avg_pool2d_calls() { return calls.load(std::memory_order_relaxed); }

}  // namespace camox
