#include "status.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local char last_error[512];
static _Thread_local int last_code;
static _Thread_local char notes[2048];
static _Thread_local size_t notes_length;
int camox_notes_are_kept = 0;

int camox_fail(int code, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(last_error, sizeof last_error, format, arguments);
  va_end(arguments);
  return last_code = code;
}

const char *camox_last_error(void) { return last_error; }

const char *camox_last_refusal(void) { return last_code == CAMOX_INVALID_ARGUMENT ? last_error : ""; }

void camox_note(const char *format, ...) {
  const size_t room = sizeof notes - notes_length;
  va_list arguments;
  va_start(arguments, format);
  const int length = vsnprintf(notes + notes_length, room, format, arguments);
  va_end(arguments);
  if (length >= 0 && (size_t)length + 1 < room) {
    notes_length += (size_t)length;
    notes[notes_length++] = '\n';
  }
  notes[notes_length] = '\0';
}

const char *camox_notes(void) { return notes; }

void camox_clear_notes(void) { notes[notes_length = 0] = '\0'; }
