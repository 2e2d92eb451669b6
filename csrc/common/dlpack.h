/* What this package uses of DLPack 1 (https://github.com/dmlc/dlpack), by which libraries tell each other where a tensor lies.
   torch has the whole header, but refuses it beside its stable interface. */
#ifndef CAMOX_DLPACK_H
#define CAMOX_DLPACK_H

#include <stdint.h>

enum { CAMOX_DLPACK_MAJOR = 1 };
enum { CAMOX_DLPACK_CPU = 1 };                                                  /* device_type */
enum { CAMOX_DLPACK_INT = 0, CAMOX_DLPACK_FLOAT = 2, CAMOX_DLPACK_BFLOAT = 4 }; /* dtype.code */

typedef struct {
  void *data;
  struct {
    int32_t device_type, device_id;
  } device;
  int32_t ndim;
  struct {
    uint8_t code, bits;
    uint16_t lanes;
  } dtype;
  int64_t *shape, *strides; /* [ndim], strides in elements */
  uint64_t byte_offset;     /* of the first element from data */
} camox_dlpack_tensor;

/* Describes a tensor of Python's, as long as it lives and is not changed. Not 0: a Python exception is set. */
typedef int camox_dlpack_describe(void *tensor, camox_dlpack_tensor *description);

/* What the capsule of a class's __dlpack_c_exchange_api__ points to. */
typedef struct camox_dlpack_table {
  struct {
    uint32_t major, minor;
  } version;
  struct camox_dlpack_table *previous;
  void (*unused[3])(void);
  camox_dlpack_describe *describe; /* may be NULL */
} camox_dlpack_table;

#endif
