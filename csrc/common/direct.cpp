#include "direct.h"

camox_dlpack_describe* camox_describe;
PyTypeObject* camox_plain_types[2];
PyObject* camox_is_neg;

namespace {

PyObject* requires_grad_name;

enum Look { REFUSED = 0, PLAIN = 1, DIFFERENTIATED = 2 };

Look look_at(PyObject* argument) {
  if (!camox::Described::is_plain(argument)) {
    PyTypeObject* const type = Py_TYPE(argument);
    const bool is_number = type == &PyLong_Type || type == &PyFloat_Type || type == &PyBool_Type;
    return is_number || argument == Py_None ? PLAIN : REFUSED;
  }
  camox::Described x;
  if (!x.read(argument)) return REFUSED;
  PyObject* const answer = PyObject_GetAttr(argument, requires_grad_name);
  if (answer == nullptr) PyErr_Clear();
  Py_XDECREF(answer);
  return answer == Py_True ? DIFFERENTIATED : answer == Py_False ? PLAIN : REFUSED;
}

}  // namespace

// (torch.Tensor.__dlpack_c_exchange_api__, torch.Tensor, torch.nn.Parameter) -> whether tensors can be read
extern "C" PyObject* camox_use_dlpack(PyObject*, PyObject* args) {
  PyObject *capsule, *types[2];
  if (!PyArg_ParseTuple(args, "OO!O!", &capsule, &PyType_Type, &types[0], &PyType_Type, &types[1])) return nullptr;
  const auto* table = static_cast<const camox_dlpack_table*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  if (table == nullptr) return nullptr;
  if (table->version.major != CAMOX_DLPACK_MAJOR || table->describe == nullptr) Py_RETURN_FALSE;
  camox_is_neg = PyUnicode_InternFromString("is_neg");
  requires_grad_name = PyUnicode_InternFromString("requires_grad");
  if (camox_is_neg == nullptr || requires_grad_name == nullptr) return nullptr;
  for (int i = 0; i < 2; ++i) camox_plain_types[i] = reinterpret_cast<PyTypeObject*>(Py_NewRef(types[i]));
  camox_describe = table->describe;
  Py_RETURN_TRUE;
}

// (any arguments) -> 0: something else than plain CPU tensors, numbers and None; 1: nothing else; 2: nothing else, and one of
// the tensors requires a gradient
extern "C" PyObject* camox_look_at(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Look found = camox_describe == nullptr ? REFUSED : PLAIN;
  for (Py_ssize_t i = 0; i < count && found != REFUSED; ++i) {
    const Look look = look_at(args[i]);
    if (look != PLAIN) found = look;
  }
  return PyLong_FromLong(found);
}
