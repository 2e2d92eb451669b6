#!/usr/bin/env bash
# The wheel on another torch than it was built beside: CPU ops run, and where that torch has CUDA the CUDA part loads
# and registers its kernels, GPU or not. Usage: check_torch.sh REQUIREMENT [WHEEL], as in check_torch.sh "torch==2.10.*";
# PYTHON names the Python. Up to 7 GB of downloads.
set -euo pipefail
requirement=$1
wheel=${2:+$(realpath "$2")}
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
wheel=${wheel:-$(realpath dist/camox_ops-*.whl)}
venv=$PWD/build/wheel-on-$(printf %s "$requirement" | tr -c A-Za-z0-9. _)

[ -x "$venv/bin/python" ] || "$PYTHON" -m venv "$venv"
"$venv/bin/python" -m pip --disable-pip-version-check -q install -U "$requirement" numpy
"$venv/bin/python" -m pip --disable-pip-version-check -q install --no-deps --force-reinstall "$wheel"
# The operators whose kernels this tree has for CUDA.
operators=$(for bind in $(grep -l CAMOX_BACKEND csrc/*/*_bind.cpp); do
  sed -n '/^#ifndef CAMOX_CUDA_PART$/,/^#endif$/d; s/.*m\.impl("\([a-z0-9_]*\)".*/\1/p' "$bind"
done)
cd /
"$venv/bin/python" - "$wheel" $operators <<'CODE'
import sys
import zipfile

import torch

import camox_ops
from camox_ops import _cuda, _selftest

failed = [result for result in _selftest.check() if not result.passed]
print(f"torch {torch.__version__}: {sum(1 for _ in _selftest.OPS)} ops checked on the CPU, {len(failed)} failures")
has_part = "camox_ops/libcamox_ops_cuda.so" in zipfile.ZipFile(sys.argv[1]).namelist()
if not has_part:
    print("the wheel has no CUDA part")
elif torch.version.cuda is None:
    print("this torch has no CUDA: the CUDA part was not tried")
else:
    print("CUDA part:", _cuda.status())
    assert _cuda.part.library is not None, _cuda.part.missing
    ops = [f"camox_ops::{name}" for name in sys.argv[2:]]
    absent = [name for name in ops if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")]
    print(f"{len(ops) - len(absent)} of {len(ops)} operators registered their CUDA kernels;", "absent:", *absent or ["none"])
    failed += absent
    assert ops, "there are no CUDA kernels in this tree"
sys.exit(1 if failed else 0)
CODE
