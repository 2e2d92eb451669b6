// max_pool2d_with_indices: where the replacement serves.
#include "max_pool.h"

#include <algorithm>
#include <atomic>
#include <optional>

#include "pool.h"
#include "stock.h"

// torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h: PyTorch's kernel, which it does not look up at the dispatcher.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_cpu_max_pool2d_with_indices(
    AtenTensorHandle self, const int64_t* kernel_size, int64_t, const int64_t* stride, int64_t, const int64_t* padding, int64_t,
    const int64_t* dilation, int64_t, int32_t ceil_mode, AtenTensorHandle* values, AtenTensorHandle* indices);

namespace camox {
namespace {

using torch::stable::detail::StableLibrary;

std::atomic<int64_t> calls;

// What indices of 32 bits reach, with room for windows that begin or end outside.
constexpr int64_t most_pixels = 1 << 30;

struct MaxPool {
  std::vector<int64_t> window, stride, padding, dilation;
  bool ceil_mode;

  explicit MaxPool(const StableIValue* stack)
      : window(torch::stable::detail::to<std::vector<int64_t>>(stack[0])),
        stride(torch::stable::detail::to<std::vector<int64_t>>(stack[1])),
        padding(torch::stable::detail::to<std::vector<int64_t>>(stack[2])),
        dilation(torch::stable::detail::to<std::vector<int64_t>>(stack[3])),
        ceil_mode(torch::stable::detail::to<bool>(stack[4])) {}

  // No stride is the window's.
  const std::vector<int64_t>& step() const { return stride.empty() ? window : stride; }

  bool in_domain() const {
    for (const std::vector<int64_t>* list : {&window, &step(), &padding, &dilation})
      if (list->size() != 1 && list->size() != 2) return false;
    for (const bool last : {false, true}) {
      auto of_side = [last](const std::vector<int64_t>& list) { return last ? list.back() : list.front(); };
      const int64_t length = of_side(window), stride_ = of_side(step()), pad = of_side(padding);
      if (std::min(length, stride_) < 1 || std::max(length, stride_) > most_pixels || pad < 0 || pad > length / 2) return false;
      if (of_side(dilation) != 1) return false;
    }
    return true;
  }

  // Outputs along a side of n pixels; with ceil_mode one more, if it begins inside. None where the window does not fit.
  int64_t outputs(int64_t n, int64_t length, int64_t stride_, int64_t pad) const {
    const int64_t steps = n + 2 * pad - length + (ceil_mode ? stride_ - 1 : 0);
    if (steps < 0) return 0;
    const int64_t last = steps / stride_;
    return ceil_mode && last * stride_ >= n + pad ? last : last + 1;
  }
};

// What the kernel is asked for, but for the outputs; nothing where PyTorch's kernel serves.
std::optional<camox_max_pool_params> params_of(const Tensor& x, const MaxPool& pool) {
  // Lanes are columns of y, and of each row of x every window[1] of them cost a pass; fewer pixels were not always faster.
  constexpr int64_t least_columns = 4, most_steps = 16;
  const int64_t dimensions = x.dim();
  if (!pool.in_domain() || (dimensions != 3 && dimensions != 4) || !is_pooled_type(x) || x.numel() == 0) return std::nullopt;
  if (dimensions == 4 && is_channels_last(x)) return std::nullopt;
  if (x.stride(dimensions - 1) != 1 && x.size(dimensions - 1) != 1) return std::nullopt;
  camox_max_pool_params p{};
  p.channels = x.size(dimensions - 3), p.planes = p.channels * (dimensions == 4 ? x.size(0) : 1);
  p.rows = x.size(dimensions - 2), p.columns = x.size(dimensions - 1);
  p.window[0] = pool.window.front(), p.window[1] = pool.window.back();
  p.stride[0] = pool.step().front(), p.stride[1] = pool.step().back();
  p.padding[0] = pool.padding.front(), p.padding[1] = pool.padding.back();
  p.y_rows = pool.outputs(p.rows, p.window[0], p.stride[0], p.padding[0]);
  p.y_columns = pool.outputs(p.columns, p.window[1], p.stride[1], p.padding[1]);
  if (p.y_rows < 1 || p.y_columns < least_columns || p.rows * p.columns >= most_pixels) return std::nullopt;
  if (p.window[1] * p.stride[1] > most_steps * p.y_columns) return std::nullopt;
  p.x = image_view(x);
  return p;
}

void compute(camox_max_pool_params& p, camox_dtype dtype) {
  // Fewer planes than this are divided into bands of rows, whose windows share rows that each band reduces for itself.
  constexpr int64_t least_items = 16, least_band = 16;
  const int64_t band = std::max(least_band, p.window[0]);
  p.bands = std::clamp<int64_t>((least_items + p.planes - 1) / p.planes, 1, std::max<int64_t>(1, p.y_rows / band));
  run_with_scratch(camox_max_pool(dtype, camox_isa_current()), p, p.planes * p.bands, p.rows * p.columns / p.bands,
                   camox_max_pool_scratch(&p));
  calls.fetch_add(1, std::memory_order_relaxed);
}

// max_pool2d_with_indices(Tensor self, int[2] kernel_size, int[2] stride, int[2] padding, int[2] dilation, bool ceil_mode)
//     -> (Tensor, Tensor)
void max_pool2d(StableIValue* stack, uint64_t, uint64_t) {
  const Tensor x(torch::stable::detail::to<AtenTensorHandle>(stack[0]));
  const MaxPool pool(stack + 1);
  std::optional<camox_max_pool_params> p = params_of(x, pool);
  if (!p) {
    AtenTensorHandle values, indices;
    check_stock(
        aoti_torch_cpu_max_pool2d_with_indices(x.get(), pool.window.data(), pool.window.size(), pool.stride.data(),
                                               pool.stride.size(), pool.padding.data(), pool.padding.size(),
                                               pool.dilation.data(), pool.dilation.size(), pool.ceil_mode, &values, &indices),
        "max_pool2d_with_indices");
    stack[0] = torch::stable::detail::from(values), stack[1] = torch::stable::detail::from(indices);
    return;
  }
  const std::array<int64_t, 4> size = {p->planes / p->channels, p->channels, p->y_rows, p->y_columns};
  const int64_t dimensions = x.dim(), *shape = size.data() + 4 - dimensions;
  const Tensor values = empty_contiguous(x, dtype_code(x), dimensions, shape);
  const Tensor indices = empty_contiguous(x, aoti_torch_dtype_int64(), dimensions, shape);
  p->y = values.data_ptr(), p->indices = static_cast<int64_t*>(indices.data_ptr());
  compute(*p, dtype_of(x, "max_pool2d"));
  stack[0] = torch::stable::detail::from(values), stack[1] = torch::stable::detail::from(indices);
}

std::unique_ptr<StableLibrary> registered;

}  // namespace

const char* put_max_pool2d() {
  if (!torch_exception_get_what_without_backtrace) return "PyTorch gives the words of its errors to such kernels from 2.13 on";
  if (!aoti_torch_cpu_max_pool2d_with_indices) return "this PyTorch's C interface does not have its own kernel";
  if (!registered) {
    auto library = std::make_unique<StableLibrary>(StableLibrary::Kind::IMPL, "aten", "CPU", __FILE__, __LINE__);
    library->impl("max_pool2d_with_indices", max_pool2d);
    registered = std::move(library);
  }
  return nullptr;
}

void take_max_pool2d() { registered.reset(); }

int64_t max_pool2d_calls() { return calls.load(std::memory_order_relaxed); }

}  // namespace camox
