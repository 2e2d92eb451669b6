#!/bin/sh
# Names everything that this machine lacks for a build, all at once: check_machine.sh PYTHON
python=${1:-python3}
missing=0

lacks() {
  missing=1
  printf '  %s\n      Debian, Ubuntu: %s   Fedora: %s   Arch: %s\n' "$1" "$2" "$3" "$4"
} >&2

has() { command -v "$1" >/dev/null 2>&1; }

has "${CC:-gcc}" || lacks "the C compiler ${CC:-gcc}" gcc gcc gcc
has "${CXX:-g++}" || lacks "the C++ compiler ${CXX:-g++}" g++ gcc-c++ gcc
has make || lacks "make" make make make
if ! "$python" -c 'pass' >/dev/null 2>&1; then
  lacks "Python 3.10 or newer: there is no $python that runs (make PYTHON=/path/to/python3 names another)" python3 python3 python
elif ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
  lacks "Python 3.10 or newer: $python is $("$python" -c 'import platform; print(platform.python_version())') (make PYTHON=/path/to/python3 names another)" \
    python3 python3 python
else
  "$python" -c 'import venv, ensurepip' 2>/dev/null || lacks "the module venv of $python" python3-venv python3 python
  "$python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
    lacks "the headers of $python (Python.h)" python3-dev python3-devel python
fi
if [ $missing -ne 0 ]; then
  echo "missing on this machine: the above" >&2
  exit 1
fi
