/* camox_ops._C: instruction set, build facts and allocator tuning in plain C on CPython's limited API. Loading this object
   also registers the operators of the *_bind.cpp files with torch. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#if defined(__GLIBC__)
#include <gnu/libc-version.h>
#include <malloc.h>
#endif

#include "common/isa.h"
#include "common/status.h"

static PyObject *isa(PyObject *self, PyObject *args) {
  (void)self, (void)args;
  return PyUnicode_FromString(camox_isa_name(camox_isa_current()));
}

static PyObject *has_avx512_bf16(PyObject *self, PyObject *args) {
  (void)self, (void)args;
  return PyBool_FromLong(camox_isa_has_avx512_bf16());
}

static PyObject *supported_isas(PyObject *self, PyObject *args) {
  (void)self, (void)args;
  PyObject *list = PyList_New(0);
  for (int i = 0; list != NULL && i < CAMOX_ISA_COUNT; ++i) {
    if (!camox_isa_supported((camox_isa)i)) continue;
    PyObject *name = PyUnicode_FromString(camox_isa_name((camox_isa)i));
    if (name == NULL || PyList_Append(list, name) < 0) Py_CLEAR(list);
    Py_XDECREF(name);
  }
  return list;
}

/* (bool): whether C notes what each call runs, from now on and in every thread. */
static PyObject *keep_notes(PyObject *self, PyObject *wanted) {
  (void)self;
  const int kept = PyObject_IsTrue(wanted);
  if (kept < 0) return NULL;
  camox_notes_are_kept = kept;
  Py_RETURN_NONE;
}

/* This thread's notes, which are forgotten then. */
static PyObject *take_notes(PyObject *self, PyObject *args) {
  (void)self, (void)args;
  PyObject *text = PyUnicode_FromString(camox_notes());
  camox_clear_notes();
  return text;
}

/* What this thread's last failed call said of an argument that it refused; empty where it failed for another reason. */
static PyObject *last_refusal(PyObject *self, PyObject *args) {
  (void)self, (void)args;
  return PyUnicode_FromString(camox_last_refusal());
}

static PyObject *build_info(PyObject *self, PyObject *args) {
  (void)self, (void)args;
  return Py_BuildValue("{s:s, s:s, s:s, s:s, s:s}", "version", CAMOX_VERSION, "compiler", __VERSION__, "built_with_torch",
                       CAMOX_BUILD_TORCH, "minimum_torch", "2.10", "broken_op", CAMOX_BREAK_NAME);
}

#if defined(__GLIBC__)
static const struct {
  const char *name;
  int parameter, value;
} malloc_settings[] = {
    {"M_MMAP_MAX", M_MMAP_MAX, 0},              /* large blocks come from the heap, not from mmap and its page faults */
    {"M_TRIM_THRESHOLD", M_TRIM_THRESHOLD, -1}, /* never: freed memory is kept */
    {"M_TOP_PAD", M_TOP_PAD, 64 << 20},         /* the heap grows in steps of 64 MiB */
};
#endif

/* -> (supported, {name: value} of what was set, text) */
static PyObject *tune_cpu_allocator(PyObject *self, PyObject *args) {
  (void)self, (void)args;
#if defined(__GLIBC__)
  PyObject *settings = PyDict_New();
  for (size_t i = 0; settings != NULL && i < sizeof malloc_settings / sizeof *malloc_settings; ++i) {
    if (mallopt(malloc_settings[i].parameter, malloc_settings[i].value) != 1) continue;
    PyObject *value = PyLong_FromLong(malloc_settings[i].value);
    if (value == NULL || PyDict_SetItemString(settings, malloc_settings[i].name, value) < 0) Py_CLEAR(settings);
    Py_XDECREF(value);
  }
  if (settings == NULL) return NULL;
  PyObject *text = PyUnicode_FromFormat("glibc %s: freed memory stays with the process", gnu_get_libc_version());
  if (text == NULL) {
    Py_DECREF(settings);
    return NULL;
  }
  return Py_BuildValue("(ONN)", Py_True, settings, text);
#else
  return Py_BuildValue("(O{}s)", Py_False, "not glibc: nothing was changed");
#endif
}

/* grad_norms/grad_norms_bind.cpp */
extern PyObject *camox_grad_norms_of_list(PyObject *self, PyObject *args);

/* common/direct.cpp, and, of CAMOX_DIRECT, <op>/<op>_bind.cpp */
extern PyObject *camox_use_dlpack(PyObject *self, PyObject *args);
extern PyObject *camox_look_at(PyObject *self, PyObject *const *args, Py_ssize_t count);
#define DIRECT(op) extern PyObject *camox_direct_##op(PyObject *self, PyObject *const *args, Py_ssize_t count);
#include "direct_list.h"
#undef DIRECT

#define FAST(function) (PyCFunction)(void (*)(void))(function)

static PyMethodDef methods[] = {
    {"isa", isa, METH_NOARGS, "The instruction set in use: 'portable', 'avx2' or 'avx512'."},
    {"has_avx512_bf16", has_avx512_bf16, METH_NOARGS, "Whether kernels may use the AVX512-BF16 dot product."},
    {"supported_isas", supported_isas, METH_NOARGS, "Every instruction set that this build and this CPU have."},
    {"build_info", build_info, METH_NOARGS, "Facts of this build as a dict."},
    {"keep_notes", keep_notes, METH_O, "Whether C notes what each call runs."},
    {"take_notes", take_notes, METH_NOARGS, "This thread's notes, a line each; they are forgotten then."},
    {"last_refusal", last_refusal, METH_NOARGS, "What this thread's last failed call said of an argument; else empty."},
    {"grad_norms_of_list", camox_grad_norms_of_list, METH_VARARGS,
     "Writes the norms by group of a list of plain CPU tensors; False: nothing written, call the operator."},
    {"use_dlpack", camox_use_dlpack, METH_VARARGS, "Tell look_at and all <op>_into how tensors are read; False: not known."},
    {"look_at", FAST(camox_look_at), METH_FASTCALL,
     "0: arguments may not go past the dispatcher, 1: they may, 2: and one of them requires a gradient."},
#define DIRECT(op) {#op, FAST(camox_direct_##op), METH_FASTCALL, "Writes outputs; False: nothing written, call the operator."},
#include "direct_list.h"
#undef DIRECT
    {"tune_cpu_allocator", tune_cpu_allocator, METH_NOARGS, "Keep freed memory with the process (glibc)."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "camox_ops._C", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__C(void) {
  if (camox_isa_init() != CAMOX_OK) {
    PyErr_SetString(PyExc_ImportError, camox_last_error());
    return NULL;
  }
  return PyModule_Create(&definition);
}
