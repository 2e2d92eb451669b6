// _softmax, _log_softmax and their backward: where the replacement serves.
#include "softmax_ops.h"

#include <atomic>

#include "softmax.h"
#include "stock.h"

namespace camox {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::detail::StableLibrary;

std::atomic<int64_t> calls;

// PyTorch's kernels, which run outside the domain.
using StockForward = StockTensor(const void* x, int64_t dim, bool half_to_float);
using StockBackward = StockTensor(const void* grad, const void* y, int64_t dim, ScalarType x_type);

struct Stock {
  const char *forward_symbol, *backward_symbol;
  StockForward* forward = nullptr;
  StockBackward* backward = nullptr;
};

Stock stock[] = {
    {"_ZN2at3cpu8_softmaxERKNS_6TensorElb", "_ZN2at3cpu22_softmax_backward_dataERKNS_6TensorES3_lN3c1010ScalarTypeE"},
    {"_ZN2at3cpu12_log_softmaxERKNS_6TensorElb", "_ZN2at3cpu26_log_softmax_backward_dataERKNS_6TensorES3_lN3c1010ScalarTypeE"},
};

bool has_long_rows(const camox_softmax_params& p) {
  constexpr int64_t shortest = 128;
  return p.inner == 1 && p.n >= shortest;
}

bool exceeds_cache(const camox_softmax_params& p) {
  constexpr int64_t cache_bytes = 32 << 20;
  return p.outer * p.n * static_cast<int64_t>(sizeof(float)) >= cache_bytes;
}

// Whether the kernels take such a tensor, and its shape as they see it. PyTorch computes as fast: rows that fill its vectors
// but are short or in half precision, their gradients in the caches, and all gradients across rows.
bool serves(const Tensor& x, int64_t dim, bool backward, camox_softmax_params& p) {
  constexpr int64_t fewest_columns = 16, longest_row = 15, longest_column = 64;
  const ScalarType type = x.scalar_type();
  const int64_t dimensions = x.dim();
  if (type != ScalarType::Float && type != ScalarType::BFloat16 && type != ScalarType::Half) return false;
  if (dim < -dimensions || dim >= dimensions) return false;
  if (dim < 0) dim += dimensions;
  p.outer = p.inner = 1, p.n = x.size(dim);
  for (int64_t d = 0; d < dim; ++d) p.outer *= x.size(d);
  for (int64_t d = dim + 1; d < dimensions; ++d) p.inner *= x.size(d);
  if (p.outer * p.n * p.inner == 0) return false;
  if (has_long_rows(p)) return type == ScalarType::Float && (!backward || (p.log && exceeds_cache(p)));
  if (p.inner == 1) return p.n <= (backward && camox_isa_current() != CAMOX_ISA_AVX512 ? 7 : longest_row);
  return !backward && p.n <= longest_column && p.inner >= fewest_columns;
}

Tensor compute(bool backward, camox_softmax_params& p, const Tensor& like) {
  const Tensor out = empty_contiguous(like);
  p.out = out.data_ptr();
  const camox_isa isa = camox_isa_current();
  if (has_long_rows(p)) {
    p.exceeds_cache = exceeds_cache(p);
    run(backward ? camox_long_log_softmax_gradient(isa) : camox_long_softmax(isa), p, p.outer, p.n);
  } else {
    const auto kernel = backward ? camox_softmax_backward : camox_softmax_forward;
    run_with_scratch(kernel(dtype_of(like, "softmax"), isa), p, camox_softmax_items(&p), p.n * CAMOX_SOFTMAX_ROWS,
                     camox_softmax_scratch(&p));
  }
  calls.fetch_add(1, std::memory_order_relaxed);
  return out;
}

// _softmax(Tensor self, int dim, bool half_to_float) -> Tensor, and _log_softmax
void forward(StableIValue* stack, bool log) {
  const Tensor x(torch::stable::detail::to<AtenTensorHandle>(stack[0]));
  const int64_t dim = torch::stable::detail::to<int64_t>(stack[1]);
  const bool half_to_float = torch::stable::detail::to<bool>(stack[2]);
  camox_softmax_params p{};
  p.log = log;
  if (half_to_float || !serves(x, dim, false, p)) {
    stack[0] = torch::stable::detail::from(owned(stock[log].forward(x.get(), dim, half_to_float)));
    return;
  }
  const Tensor packed = as_contiguous(x);
  p.in = packed.data_ptr();
  stack[0] = torch::stable::detail::from(compute(false, p, x));
}

bool are_alike(const Tensor& a, const Tensor& b) {
  if (a.scalar_type() != b.scalar_type() || a.dim() != b.dim()) return false;
  for (int64_t d = 0; d < a.dim(); ++d)
    if (a.size(d) != b.size(d)) return false;
  return true;
}

// _softmax_backward_data(Tensor grad_output, Tensor output, int dim, ScalarType input_dtype) -> Tensor, and _log_softmax's
void backward(StableIValue* stack, bool log) {
  const Tensor grad(torch::stable::detail::to<AtenTensorHandle>(stack[0]));
  const Tensor y(torch::stable::detail::to<AtenTensorHandle>(stack[1]));
  const int64_t dim = torch::stable::detail::to<int64_t>(stack[2]);
  const ScalarType x_type = torch::stable::detail::to<ScalarType>(stack[3]);
  camox_softmax_params p{};
  p.log = log;
  if (!serves(y, dim, true, p) || !are_alike(grad, y) || x_type != y.scalar_type()) {
    stack[0] = torch::stable::detail::from(owned(stock[log].backward(grad.get(), y.get(), dim, x_type)));
    return;
  }
  const Tensor packed_y = as_contiguous(y), packed_grad = as_contiguous(grad);
  p.in = packed_y.data_ptr(), p.grad = packed_grad.data_ptr();
  stack[0] = torch::stable::detail::from(compute(true, p, y));
}

template <void (*function)(StableIValue*, bool), bool log>
void entry(StableIValue* stack, uint64_t, uint64_t) {
  function(stack, log);
}

std::unique_ptr<StableLibrary> registered;

}  // namespace

const char* put_softmax() {
  if (!torch_exception_get_what_without_backtrace) return "PyTorch gives the words of its errors to such kernels from 2.13 on";
  for (Stock& of : stock) {
    of.forward = reinterpret_cast<StockForward*>(address_in_torch(of.forward_symbol));
    of.backward = reinterpret_cast<StockBackward*>(address_in_torch(of.backward_symbol));
    if (!of.forward || !of.backward) return "this PyTorch's library has its own kernel under another name";
  }
  if (!registered) {
    auto library = std::make_unique<StableLibrary>(StableLibrary::Kind::IMPL, "aten", "CPU", __FILE__, __LINE__);
    library->impl("_softmax", entry<forward, false>).impl("_softmax_backward_data", entry<backward, false>);
    library->impl("_log_softmax", entry<forward, true>).impl("_log_softmax_backward_data", entry<backward, true>);
    registered = std::move(library);
  }
  return nullptr;
}

void take_softmax() { registered.reset(); }

int64_t softmax_calls() { return calls.load(std::memory_order_relaxed); }

}  // namespace camox
