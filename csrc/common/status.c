#include "status.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local char last_error[512];

int camox_fail(int code, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(last_error, sizeof last_error, format, arguments);
  va_end(arguments);
  return code;
}

const char *camox_last_error(void) { return last_error; }
