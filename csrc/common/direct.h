// Operators called from Python past torch's dispatcher, on plain CPU tensors.
//
//   _C.<op>_into(arguments..., outputs...) -> whether the outputs are written
//
// The dispatcher makes several objects of each tensor and looks a kernel up in tables: with cold caches, as in a training step,
// that takes longer than an op takes on a small image. Here DLPack's table of functions says where a tensor lies, and Python
// makes the outputs. What is not as expected is refused in silence, before anything is written: the caller then calls the
// operator, whose messages say what is wrong.
//
// Include it first, as Python's header asks for.
#pragma once

#ifndef CAMOX_CUDA_PART
#define Py_LIMITED_API 0x030A0000
#include <Python.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <exception>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

#include "dlpack.h"

// Set by _C.use_dlpack: NULL until then.
extern "C" camox_dlpack_describe* camox_describe;
extern "C" PyTypeObject* camox_plain_types[2];
extern "C" PyObject* camox_is_neg;

namespace camox {

// A plain CPU tensor of Python's, as long as it lives and is not changed, with those members of torch::stable::Tensor's that
// checks and views ask for.
class Described {
 public:
  using Type = torch::headeronly::ScalarType;

  static bool is_plain(PyObject* object) {
    PyTypeObject* const type = Py_TYPE(object);
    return type == camox_plain_types[0] || type == camox_plain_types[1];
  }

  // False: not a plain CPU tensor, or one whose memory does not hold its values.
  bool read(PyObject* tensor) {
    if (!is_plain(tensor)) return false;
    if (camox_describe(tensor, &x_) != 0) {
      PyErr_Clear();
      return false;
    }
    if (x_.device.device_type != CAMOX_DLPACK_CPU || x_.strides == nullptr) return false;
    elements_ = 1;
    for (int64_t d = 0; d < dim(); ++d) elements_ *= size(d);
    // Tensors that torch knows to be zero have no memory.
    return (x_.data != nullptr || elements_ == 0) && !is_negated(tensor);
  }

  int64_t dim() const { return x_.ndim; }
  int64_t size(int64_t d) const { return x_.shape[d]; }
  int64_t stride(int64_t d) const { return x_.strides[d]; }
  const int64_t* sizes() const { return x_.shape; }
  const int64_t* strides() const { return x_.strides; }
  int64_t numel() const { return elements_; }
  int64_t element_size() const { return x_.dtype.bits / 8; }

  // Undefined: of none of those that ops read.
  Type scalar_type() const {
    if (x_.dtype.lanes != 1) return Type::Undefined;
    if (x_.dtype.code == CAMOX_DLPACK_INT && x_.dtype.bits == 64) return Type::Long;
    if (x_.dtype.code == CAMOX_DLPACK_BFLOAT && x_.dtype.bits == 16) return Type::BFloat16;
    if (x_.dtype.code != CAMOX_DLPACK_FLOAT) return Type::Undefined;
    switch (x_.dtype.bits) {
      case 16: return Type::Half;
      case 32: return Type::Float;
      case 64: return Type::Double;
      default: return Type::Undefined;
    }
  }

  void* data_ptr() const { return static_cast<char*>(x_.data) + x_.byte_offset; }
  bool is_cpu() const { return true; }
  int32_t get_device_index() const { return x_.device.device_id; }

  bool is_contiguous() const {
    int64_t inside = 1;
    for (int64_t d = dim(); d-- > 0; inside *= size(d))
      if (size(d) != 1 && stride(d) != inside) return elements_ == 0;
    return true;
  }

 private:
  // In memory lie the negatives of such a tensor's values.
  static bool is_negated(PyObject* tensor) {
    PyObject* const answer = PyObject_CallMethodObjArgs(tensor, camox_is_neg, nullptr);
    if (answer == nullptr) PyErr_Clear();
    Py_XDECREF(answer);
    return answer != Py_False;
  }

  camox_dlpack_tensor x_;
  int64_t elements_;
};

inline bool read(PyObject* given, Described& x) { return x.read(given); }

inline bool read(PyObject* given, std::optional<Described>& x) { return given == Py_None || x.emplace().read(given); }

inline bool read(PyObject* given, double& number) {
  if (Py_TYPE(given) != &PyFloat_Type) return false;
  number = PyFloat_AsDouble(given);
  return true;
}

inline bool read(PyObject* given, bool& flag) {
  flag = given == Py_True;
  return flag || given == Py_False;
}

inline bool read(PyObject* given, int64_t& number) {
  if (Py_TYPE(given) != &PyLong_Type) return false;
  number = PyLong_AsLongLong(given);
  if (PyErr_Occurred() == nullptr) return true;
  PyErr_Clear();
  return false;
}

// Lets other threads of Python run.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() { PyEval_RestoreThread(state_); }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

template <class... Args, size_t... I>
bool call_direct(void (*op)(Args...), PyObject* const* given, std::index_sequence<I...>) try {
  std::tuple<std::remove_cv_t<std::remove_reference_t<Args>>...> args;
  if (!(read(given[I], std::get<I>(args)) && ...)) return false;
  WithoutGil others_run;
  op(std::get<I>(args)...);
  return true;
} catch (const std::exception&) {
  return false;
}

template <class... Args>
PyObject* call_direct(void (*op)(Args...), PyObject* const* given, Py_ssize_t count) {
  const bool is_called = camox_describe != nullptr && count == sizeof...(Args);
  return PyBool_FromLong(is_called && call_direct(op, given, std::index_sequence_for<Args...>()));
}

}  // namespace camox

// Makes op, a function of Described and numbers that refuses by an exception before it writes anything, what module.c lists as
// _C.<op>.
#define CAMOX_DIRECT(op)                                                                            \
  extern "C" PyObject* camox_direct_##op(PyObject*, PyObject* const* arguments, Py_ssize_t count) { \
    return camox::call_direct(&op, arguments, count);                                               \
  }
#endif
