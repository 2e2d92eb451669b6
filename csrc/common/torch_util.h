// What depends on torch, with direct.h alone beside it: tensors in and out of the C params structs, errors, threads and streams.
// Bindings are compiled twice: into _C for the CPU, and with CAMOX_CUDA_PART into the CUDA part.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <cstdlib>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "isa.h"
#include "status.h"
#include "types.h"

#ifdef CAMOX_CUDA_PART
#include <torch/csrc/stable/accelerator.h>
#define CAMOX_BACKEND CUDA
#define CAMOX_ON_CPU false
extern "C" const char* camox_cuda_error_text(int error);
extern "C" const char* camox_cuda_current_stream(int device_index, void** stream);
extern "C" uint32_t* camox_cuda_error_word(int device_index);
extern "C" int camox_cuda_multiprocessors(int device_index);
#else
#define CAMOX_BACKEND CPU
#define CAMOX_ON_CPU true
#ifdef __linux__
#include <sys/mman.h>
#endif
#endif

// In torch from 2.13 on (torch/csrc/stable/c/shim.h): the text of the last exception that its C interface caught on this
// thread.
extern "C" __attribute__((weak)) const char* torch_exception_get_what_without_backtrace();

namespace camox {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// A refused argument, as a check in C refuses one. torch makes a ValueError of it, from 2.15 on a RuntimeError.
class refusal : public std::invalid_argument {
 public:
  explicit refusal(const std::string& message) : std::invalid_argument(kept(message)) {}

 private:
  static const char* kept(const std::string& message) {
    camox_fail(CAMOX_INVALID_ARGUMENT, "%s", message.c_str());
    return camox_last_error();
  }
};

// A failed C check becomes what refusal does, or RuntimeError.
inline void check(int status) {
  if (status == CAMOX_OK) return;
  if (status == CAMOX_INVALID_ARGUMENT) throw std::invalid_argument(camox_last_error());
  throw std::runtime_error(camox_last_error());
}

template <class AnyTensor>
camox_dtype dtype_of(const AnyTensor& x, const char* op) {
  using torch::headeronly::ScalarType;
  switch (x.scalar_type()) {
    case ScalarType::Float: return CAMOX_F32;
    case ScalarType::BFloat16: return CAMOX_BF16;
    case ScalarType::Half: return CAMOX_F16;
#ifndef CAMOX_CUDA_PART
    case ScalarType::Double: return CAMOX_F64;
#endif
    default:
      throw refusal(std::string(op) + ": dtype must be float32, bfloat16, float16" +
                    (CAMOX_ON_CPU ? " or float64" : "; float64 runs on the CPU only"));
  }
}

// An option that was passed as a number: an enumerator of an enum whose last one is `last`.
template <class Enum>
Enum code_of(int64_t code, Enum last, const char* op, const char* name) {
  if (code < 0 || code > static_cast<int64_t>(last))
    throw refusal(std::string(op) + ": unknown " + name + " code " + std::to_string(code));
  return static_cast<Enum>(code);
}

template <class AnyTensor>
camox_view4 view4(const AnyTensor& x) {
  auto strides = x.strides();
  return {x.data_ptr(), {strides[0], strides[1], strides[2], strides[3]}};
}

// The ranges of C channels of a (B, N C, H, W) tensor.
template <class AnyTensor, size_t N>
void set_channel_ranges(camox_view4 (&ranges)[N], const AnyTensor& x) {
  const camox_view4 whole = view4(x);
  const int64_t bytes = x.size(1) / static_cast<int64_t>(N) * whole.stride[1] * static_cast<int64_t>(x.element_size());
  for (size_t i = 0; i < N; ++i) {
    ranges[i] = whole;
    ranges[i].data = static_cast<char*>(whole.data) + static_cast<int64_t>(i) * bytes;
  }
}

template <class AnyTensor>
void check_image(const AnyTensor& x, const char* op, const char* name) {
  if (x.dim() != 4)
    throw refusal(std::string(op) + ": " + name + " must have 4 dimensions (B, C, H, W), got " + std::to_string(x.dim()));
}

template <class AnyTensor>
void check_device(const AnyTensor& y, const AnyTensor& x, const char* op, const char* name) {
  if (y.is_cpu() != x.is_cpu() || y.get_device_index() != x.get_device_index())
    throw refusal(std::string(op) + ": " + name + " must be on the device of x");
}

template <class AnyTensor>
void check_dtype_and_device(const AnyTensor& y, const AnyTensor& x, const char* op, const char* name) {
  if (y.scalar_type() != x.scalar_type()) throw refusal(std::string(op) + ": " + name + " must have the dtype of x");
  check_device(y, x, op, name);
}

// One number or nothing. The kernel reads the seed on its device: the host does not wait for it.
template <class AnyTensor>
const int64_t* seed_of(const std::optional<AnyTensor>& seed, const AnyTensor& x, const char* op) {
  if (!seed.has_value()) return nullptr;
  if (seed->scalar_type() != torch::headeronly::ScalarType::Long || seed->numel() != 1)
    throw refusal(std::string(op) + ": seed must be one int64 number, got " + std::to_string(seed->numel()) + " elements");
  check_device(*seed, x, op, "seed");
  return static_cast<const int64_t*>(seed->data_ptr());
}

template <class AnyTensor>
bool have_one_shape(const AnyTensor& y, const AnyTensor& x) {
  bool same = y.dim() == x.dim();
  for (int64_t d = 0; same && d < x.dim(); ++d) same = y.size(d) == x.size(d);
  return same;
}

// A tensor of parameters or statistics must have the dtype that x is computed in.
template <class AnyTensor>
void check_real(const AnyTensor& v, const AnyTensor& x, int64_t dimensions, const char* op, const char* name) {
  using torch::headeronly::ScalarType;
  bool is_double = x.scalar_type() == ScalarType::Double;
  if (v.scalar_type() != (is_double ? ScalarType::Double : ScalarType::Float))
    throw refusal(std::string(op) + ": " + name + " must have dtype " + (is_double ? "float64" : "float32") + " beside this x");
  if (v.dim() != dimensions)
    throw refusal(std::string(op) + ": " + name + " must have " + std::to_string(dimensions) + " dimensions, got " +
                  std::to_string(v.dim()));
  check_device(v, x, op, name);
}

// A gradient or other tensor beside x must have x's shape (with `channels` channels), dtype and device.
template <class AnyTensor>
void check_like(const AnyTensor& y, const AnyTensor& x, int64_t channels, const char* op, const char* name) {
  check_image(y, op, name);
  for (int64_t d = 0; d < 4; ++d) {
    int64_t expected = d == 1 ? channels : x.size(d);
    if (y.size(d) != expected)
      throw refusal(std::string(op) + ": " + name + " has size " + std::to_string(y.size(d)) + " in dimension " +
                    std::to_string(d) + ", expected " + std::to_string(expected));
  }
  check_dtype_and_device(y, x, op, name);
}

template <class AnyTensor>
void check_contiguous(const AnyTensor& x, const char* op, const char* name) {
  if (!x.is_contiguous()) throw refusal(std::string(op) + ": " + name + " must be contiguous");
}

// torch's own rule for "strides like channels_last", so that fake tensors in Python decide the same (ops/_layout.py).
template <class AnyTensor>
bool is_channels_last(const AnyTensor& x) {
  auto sizes = x.sizes(), strides = x.strides();
  int64_t smallest = 0;
  if (strides[1] == 0) return false;
  for (int d : {1, 3, 2, 0}) {
    if (sizes[d] == 0 || strides[d] < smallest) return false;
    if (d == 0 && smallest == strides[1]) return false;
    smallest = strides[d] * (sizes[d] > 1 ? sizes[d] : 1);
  }
  return true;
}

inline int32_t dtype_code(const Tensor& x) {
  int32_t dtype;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &dtype));
  return dtype;
}

// x itself where it is contiguous already: torch::stable::contiguous passes through torch's dispatcher even then.
inline Tensor as_contiguous(const Tensor& x) { return x.is_contiguous() ? x : torch::stable::contiguous(x); }

// Requests huge pages for the memory of a large new tensor, which is often newly mapped: page faults of 4 KiB each can take
// longer than computing the tensor. The operating system may ignore the request.
template <class AnyTensor>
void use_huge_pages([[maybe_unused]] const AnyTensor& x) {
#if !defined(CAMOX_CUDA_PART) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t huge = 2 << 20;
  const uintptr_t bytes = static_cast<uintptr_t>(x.numel()) * x.element_size();
  if (bytes < 2 * huge) return;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(x.data_ptr());
  const uintptr_t first = (begin + huge - 1) / huge * huge, last = (begin + bytes) / huge * huge;
  madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

// An output that the caller made.
template <class AnyTensor>
void check_output(const AnyTensor& y, const AnyTensor& x, int64_t channels, const char* op) {
  check_like(y, x, channels, op, "output");
  use_huge_pages(y);
}

// Throws torch's own message for a failed allocation: programs that search for a batch size that fits recognise it. Older
// torch does not give its message to callers; the same words are made up here then.
[[noreturn]] inline void allocation_failed([[maybe_unused]] int64_t elements) {
  if (torch_exception_get_what_without_backtrace) throw std::runtime_error(torch_exception_get_what_without_backtrace());
  throw std::runtime_error(std::string(CAMOX_ON_CPU ? "DefaultCPUAllocator: can't allocate memory:" : "CUDA out of memory.") +
                           " Tried to allocate a tensor of " + std::to_string(elements) + " elements");
}

inline Tensor empty_strided(const Tensor& like, int32_t dtype, size_t dimensions, const int64_t* size, const int64_t* stride) {
  int32_t device_type;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  AtenTensorHandle handle;
  if (aoti_torch_empty_strided(dimensions, size, stride, dtype, device_type, like.get_device_index(), &handle) !=
      AOTI_TORCH_SUCCESS) {
    int64_t elements = 1;
    for (size_t d = 0; d < dimensions; ++d) elements *= size[d];
    allocation_failed(elements);
  }
  Tensor made(handle);
  use_huge_pages(made);
  return made;
}

// An uninitialised tensor like x, by torch's own rule.
inline Tensor empty_as(const Tensor& x) {
  try {
    Tensor made = torch::stable::empty_like(x);
    use_huge_pages(made);
    return made;
  } catch (const std::runtime_error&) {  // its message says only that the call failed
    allocation_failed(x.numel());
  }
}

// x's dimensions from `begin` up to `end` in the order of their strides, the innermost last. Dimensions of stride 0 or size 1
// do not determine the order. The same rule as memory_order in ops/_layout.py.
inline std::vector<int64_t> memory_order(const Tensor& x, int64_t begin, int64_t end) {
  auto sizes = x.sizes(), strides = x.strides();
  std::vector<int64_t> order;
  for (int64_t d = begin; d < end; ++d) order.push_back(d);
  auto is_undetermined = [&](int64_t d) { return strides[d] == 0 || sizes[d] == 1; };
  for (int64_t i = 1; i < end - begin; ++i)
    for (int64_t place = i, j = i - 1; j >= 0; --j) {
      int64_t outer = order[j], inner = order[place];
      if (is_undetermined(outer) || is_undetermined(inner)) continue;
      if (strides[outer] >= strides[inner]) break;
      std::swap(order[j], order[place]);
      place = j;
    }
  return order;
}

// Strides of a tensor without gaps whose dimensions lie in memory in this order, the innermost last.
inline std::vector<int64_t> packed_strides(const std::vector<int64_t>& size, const std::vector<int64_t>& order) {
  std::vector<int64_t> stride(size.size());
  int64_t step = 1;
  for (size_t i = order.size(); i-- > 0;) {
    stride[order[i]] = step;
    step *= size[order[i]] > 1 ? size[order[i]] : 1;
  }
  return stride;
}

// An uninitialised tensor of these sizes without gaps, its dimensions in memory in the order of x's strides; the dimensions
// from `sorted` on are innermost and keep their order. The same rule as dense_strides in ops/_layout.py.
inline Tensor empty_in_order(const Tensor& x, const std::vector<int64_t>& size, int64_t sorted) {
  std::vector<int64_t> order = memory_order(x, 0, sorted);
  for (int64_t d = sorted; d < x.dim(); ++d) order.push_back(d);
  return empty_strided(x, dtype_code(x), size.size(), size.data(), packed_strides(size, order).data());
}

// Like x, whose last dimension is innermost.
inline Tensor empty_in_order(const Tensor& x) {
  auto sizes = x.sizes();
  return empty_in_order(x, {sizes.begin(), sizes.end()}, x.dim() - 1);
}

inline Tensor empty_contiguous(const Tensor& like, int32_t dtype, size_t dimensions, const int64_t* size) {
  std::vector<int64_t> stride(dimensions);
  int64_t step = 1;
  for (size_t d = dimensions; d-- > 0;) {
    stride[d] = step;
    step *= size[d] > 1 ? size[d] : 1;
  }
  return empty_strided(like, dtype, dimensions, size, stride.data());
}

inline Tensor empty_contiguous(const Tensor& x) { return empty_contiguous(x, dtype_code(x), x.dim(), x.sizes().data()); }

// An uninitialised contiguous tensor in the dtype that x is computed in.
inline Tensor empty_real(const Tensor& x, std::initializer_list<int64_t> size) {
  bool is_double = x.scalar_type() == torch::headeronly::ScalarType::Double;
  return empty_contiguous(x, is_double ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32(), size.size(), size.begin());
}

inline Tensor empty_image(const Tensor& like, int64_t channels, bool channels_last) {
  std::array<int64_t, 4> size = {like.size(0), channels, like.size(2), like.size(3)};
  if (!channels_last) return empty_contiguous(like, dtype_code(like), size.size(), size.data());
  auto at_least_1 = [](int64_t n) { return n > 1 ? n : 1; };
  int64_t c = at_least_1(size[1]), h = at_least_1(size[2]), w = at_least_1(size[3]);
  std::array<int64_t, 4> stride = {c * h * w, 1, c * w, c};
  return empty_strided(like, dtype_code(like), size.size(), size.data(), stride.data());
}

#ifdef CAMOX_CUDA_PART
// Runs a launcher on x's device and torch's current stream there.
template <class Params>
void launch(int (*launcher)(const Params*, void*), const Params& params, const Tensor& x, const char* op) {
  torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  void* stream = nullptr;
  const char* why_not = camox_cuda_current_stream(x.get_device_index(), &stream);
  if (why_not != nullptr) check(camox_fail(CAMOX_CUDA_ERROR, "%s: %s", op, why_not));
  int error = launcher(&params, stream);
  if (error != 0) check(camox_fail(CAMOX_CUDA_ERROR, "%s: %s", op, camox_cuda_error_text(error)));
}

// As launch; params.error_word points to the word of x's device in which kernels report wrong values.
template <class Params>
void launch_with_error_word(int (*launcher)(const Params*, void*), Params& params, const Tensor& x, const char* op) {
  torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  params.error_word = camox_cuda_error_word(x.get_device_index());
  launch(launcher, params, x, op);
}
#else
// The fewest work items of about `item_cost` elements each that are worth a thread.
inline int64_t grain_of(int64_t item_cost) {
  constexpr int64_t elements_worth_a_thread = 16384;
  const int64_t grain = elements_worth_a_thread / (item_cost > 0 ? item_cost : 1);
  return grain > 0 ? grain : 1;
}

// Runs kernel(&params, begin, end) over all work items, of about `item_cost` elements each, on torch's threads.
template <class Kernel, class Params>
void run(Kernel kernel, const Params& params, int64_t items, int64_t item_cost) {
  torch::stable::parallel_for(0, items, grain_of(item_cost), [&](int64_t begin, int64_t end) { kernel(&params, begin, end); });
}

// Uninitialised memory, aligned to a cache line.
class AlignedMemory {
 public:
  AlignedMemory() = default;
  explicit AlignedMemory(size_t bytes) : memory_(std::aligned_alloc(line, (bytes + line - 1) / line * line)) {
    if (bytes > 0 && !memory_)
      throw std::runtime_error("camox_ops: no memory for " + std::to_string(bytes) + " bytes of scratch");
  }
  void* get() const { return memory_.get(); }

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  static constexpr size_t line = 64;
  std::unique_ptr<void, Free> memory_;
};

// Scratch of at least so many bytes that belongs to this thread until it ends. The stacks of threads can be too small for it.
inline void* thread_scratch(size_t bytes) {
  static thread_local AlignedMemory scratch;
  static thread_local size_t size = 0;
  if (size < bytes) {
    size = 0;
    scratch = AlignedMemory();
    scratch = AlignedMemory(bytes);
    size = bytes;
  }
  return scratch.get();
}

// As run; params.scratch points to `bytes` of scratch of the calling thread.
template <class Kernel, class Params>
void run_with_scratch(Kernel kernel, const Params& params, int64_t items, int64_t item_cost, size_t bytes) {
  torch::stable::parallel_for(0, items, grain_of(item_cost), [&](int64_t begin, int64_t end) {
    Params own = params;
    own.scratch = thread_scratch(bytes);
    kernel(&own, begin, end);
  });
}
#endif

}  // namespace camox
