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

namespace camox {
namespace {

using torch::stable::detail::StableLibrary;

std::atomic<int64_t> calls;

// A list of one or two numbers that the stack owns: the arguments may go on to PyTorch's kernel, so it stays there.
struct Pair {
  size_t size = 0;
  int64_t height = 0, width = 0;
};

Pair pair_of(StableIValue list) {
  const auto handle = torch::stable::detail::to<StableListHandle>(list);
  Pair pair;
  STABLE_TORCH_ERROR_CODE_CHECK(torch_list_size(handle, &pair.size));
  if (pair.size < 1 || pair.size > 2) return pair;
  StableIValue first, last;
  STABLE_TORCH_ERROR_CODE_CHECK(torch_list_get_item(handle, 0, &first));
  STABLE_TORCH_ERROR_CODE_CHECK(torch_list_get_item(handle, pair.size - 1, &last));
  pair.height = torch::stable::detail::to<int64_t>(first), pair.width = torch::stable::detail::to<int64_t>(last);
  return pair;
}

// kernel_size, stride, padding, ceil_mode, count_include_pad and divisor_override, as they lie on the stack of both operators.
enum { kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override, arguments };

struct Pool {
  Pair window, padding;
  bool count_include_pad;
};

std::optional<Pool> pool_of(const StableIValue* stack) {
  const Pair window = pair_of(stack[kernel_size]), step = pair_of(stack[stride]), pad = pair_of(stack[padding]);
  if (step.size == 0 || step.height != 1 || step.width != 1) return std::nullopt;
  if (window.size == 0 || window.height < 1 || window.width < 1 || window.height % 2 == 0 || window.width % 2 == 0)
    return std::nullopt;
  if (pad.size == 0 || pad.height < 0 || pad.width < 0 || pad.height > window.height / 2 || pad.width > window.width / 2)
    return std::nullopt;
  if (torch::stable::detail::to<bool>(stack[ceil_mode]) ||
      stack[divisor_override] != torch::stable::detail::from(std::nullopt))
    return std::nullopt;
  return Pool{window, pad, torch::stable::detail::to<bool>(stack[count_include_pad])};
}

bool is_pooled_type(const Tensor& x) {
  using torch::headeronly::ScalarType;
  const ScalarType type = x.scalar_type();
  return type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half;
}

// (C,H,W) is an image of a batch of one.
camox_view4 image_view(const Tensor& x) {
  camox_view4 view{x.data_ptr(), {0, 0, 0, 0}};
  const auto strides = x.strides();
  std::copy(strides.begin(), strides.end(), view.stride + 4 - x.dim());
  return view;
}

// What the kernel is asked for, but for x and y; nothing where PyTorch's kernel serves.
std::optional<camox_box_params> params_of(const Tensor& x, const Pool& pool) {
  // Below this, PyTorch's additions over box_mean's pixels, the latter was not always faster.
  constexpr int64_t least_gain = 6;
  const int64_t dimensions = x.dim();
  if ((dimensions != 3 && dimensions != 4) || !is_pooled_type(x) || x.numel() == 0) return std::nullopt;
  camox_box_params p{};
  p.dtype = dtype_of(x, "avg_pool2d");
  p.channels_last = dimensions == 4 && is_channels_last(x);
  p.batch = dimensions == 4 ? x.size(0) : 1, p.channels = x.size(dimensions - 3);
  p.height = x.size(dimensions - 2), p.width = x.size(dimensions - 1);
  p.window_height = pool.window.height, p.window_width = pool.window.width;
  p.y_margin[0] = pool.window.height / 2 - pool.padding.height, p.y_margin[1] = pool.window.width / 2 - pool.padding.width;
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

void delete_lists(const StableIValue* stack) {
  for (int list : {kernel_size, stride, padding})
    STABLE_TORCH_ERROR_CODE_CHECK(torch_delete_list(torch::stable::detail::to<StableListHandle>(stack[list])));
}

// avg_pool2d(Tensor self, int[2] kernel_size, int[2] stride, int[2] padding, bool ceil_mode, bool count_include_pad,
//            int? divisor_override) -> Tensor
void avg_pool2d(StableIValue* stack, uint64_t, uint64_t) {
  const Tensor x(torch::stable::detail::to<AtenTensorHandle>(stack[0]));
  StableIValue* given = stack + 1;
  const std::optional<Pool> pool = pool_of(given);
  std::optional<camox_box_params> p = pool ? params_of(x, *pool) : std::nullopt;
  if (!p) {
    std::array<StableIValue, 2 + arguments> forwarded{torch::stable::detail::from(x)};
    std::copy(given, given + arguments, forwarded.begin() + 1);
    stack[0] = torch::stable::detail::from(
        call_stock_into_empty(x, "aten::avg_pool2d", "out", forwarded.data(), 1 + arguments));
    return;
  }
  p->kind = pool->count_include_pad ? CAMOX_BOX_MEAN : CAMOX_BOX_COUNTED;
  const Tensor y = empty_output(x, *p, p->height - 2 * p->y_margin[0], p->width - 2 * p->y_margin[1]);
  run_box(*p, x, y);
  delete_lists(given);
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
  StableIValue* given = stack + 2;
  const std::optional<Pool> pool = pool_of(given);
  std::optional<camox_box_params> p = pool ? params_of(x, *pool) : std::nullopt;
  if (!p || !fits(grad, x, *p)) {
    std::array<StableIValue, 3 + arguments> forwarded{torch::stable::detail::from(grad), torch::stable::detail::from(x)};
    std::copy(given, given + arguments, forwarded.begin() + 2);
    stack[0] = torch::stable::detail::from(
        call_stock_into_empty(x, "aten::avg_pool2d_backward", "grad_input", forwarded.data(), 2 + arguments));
    return;
  }
  p->kind = pool->count_include_pad ? CAMOX_BOX_MEAN : CAMOX_BOX_COUNTED_ADJOINT;
  std::swap(p->x_margin, p->y_margin);
  const Tensor y = empty_output(x, *p, p->height, p->width);
  run_box(*p, grad, y);
  delete_lists(given);
  stack[0] = torch::stable::detail::from(y);
}

std::unique_ptr<StableLibrary> registered;

}  // namespace

const char* put_avg_pool2d() {
  if (!torch_exception_get_what_without_backtrace) return "PyTorch gives the words of its errors to such kernels from 2.13 on";
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
