"""The CUDA part as far as a machine without a GPU can tell: when it is loaded, what is said when it cannot be used."""

import ctypes
import os
import re
from pathlib import Path

import pytest
import torch
from helpers import DEVICE, run_python

import camox_ops
from camox_ops import _cuda


def test_cpu_torch_never_opens_it():
    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA")
    maps = run_python("import camox_ops; print(open('/proc/self/maps').read())")
    assert "_C.abi3.so" in maps
    assert "libcamox_ops_cuda" not in maps
    assert "has no CUDA" in _cuda.status()
    assert _cuda.unusable(0) == _cuda.part.missing


@pytest.mark.parametrize(
    ("built", "driver", "archs", "capability", "expected"),
    [
        (13000, 13000, ["sm_80"], (8, 0), ""),
        (13000, 13000, ["sm_80"], (8, 9), ""),
        (13000, 13020, ["sm_75", "sm_90"], (12, 0), ""),
        (13000, 13000, ["sm_80"], (9, 0), ""),
        (13000, 13000, ["sm_80", "sm_90"], (7, 5), "the GPU is sm_75, and the CUDA part has code for sm_80, sm_90"),
        (13000, 13000, ["sm_86", "sm_90"], (8, 0), "the GPU is sm_80, and the CUDA part has code for sm_86, sm_90"),
        (13000, 12080, ["sm_80"], (8, 0), "(driver 580 or newer), but the driver supports CUDA 12.8"),
        (13000, 0, ["sm_80"], (8, 0), "built with CUDA 13.0, which needs a driver for it"),
    ],
)
def test_why_not(built, driver, archs, capability, expected):
    reason = _cuda.why_not(built, driver, archs, capability)
    assert expected in reason
    assert bool(reason) == bool(expected)


def test_library_says_what_it_has():
    if not _cuda.LIBRARY.exists():
        pytest.skip("built without nvcc: there is no CUDA part")
    torch.ones(1)  # libtorch_cpu, which the library needs, is loaded
    library = ctypes.CDLL(str(_cuda.LIBRARY), mode=os.RTLD_LAZY)
    library.camox_cuda_archs.restype = ctypes.c_char_p
    archs = library.camox_cuda_archs().decode().split(",")
    assert archs
    assert set(archs) <= {"sm_75", "sm_80", "sm_86", "sm_89", "sm_90"}
    built, driver = ctypes.c_int(), ctypes.c_int(-1)
    library.camox_cuda_versions(ctypes.byref(built), ctypes.byref(driver))
    assert built.value >= 12000
    assert driver.value >= 0


def test_every_operator_with_kernels_registers_them():
    if not _cuda.LIBRARY.exists():
        pytest.skip("built without nvcc: there is no CUDA part")
    kernels = sorted((Path(__file__).parent.parent / "csrc").glob("*/*_cuda.cu"))
    bindings = [path.with_name(path.name.replace("_cuda.cu", "_bind.cpp")).read_text() for path in kernels]
    for_cpu = re.compile("^#ifndef CAMOX_CUDA_PART$.*?^#endif$", re.DOTALL | re.MULTILINE)
    bindings = [for_cpu.sub("", text) for text in bindings]
    operators = {f"camox_ops::{name}" for text in bindings for name in re.findall(r'm\.impl\("(\w+)"', text)}
    # in a process of its own: what the library registers stays registered
    known = run_python(
        "import ctypes, os, torch, camox_ops\n"
        f"ctypes.CDLL({str(_cuda.LIBRARY)!r}, mode=os.RTLD_LAZY)\n"
        f"has = torch._C._dispatch_has_kernel_for_dispatch_key\n"
        f"print(*(name for name in {sorted(operators)!r} if has(name, 'CUDA')))"
    )
    assert operators
    assert set(known.split()) == operators


def test_error_texts():
    assert _cuda.error_texts(0) == []
    (text,) = _cuda.error_texts(1)
    assert text.startswith("rope: positions or cu_seqlens gave a token a position that is negative or past cos and sin")
    header = (Path(__file__).parents[1] / "csrc" / "common" / "device_errors.h").read_text()
    bits = [int(value) for value in re.findall(r"CAMOX_ERROR_\w+ = (\d+)", header)]
    assert bits == list(_cuda.DEVICE_ERRORS)


def test_check_errors_without_cuda():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert camox_ops.check_errors() is None
    assert camox_ops.check_errors("cuda:0") is None
    with pytest.raises(ValueError, match="check_errors: device must be a CUDA device, got cpu"):
        camox_ops.check_errors("cpu")


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
def test_check_errors_tells_once():
    camox_ops.check_errors()
    x, (cos, sin) = torch.ones(1, 1, 2, 4, device=DEVICE), camox_ops.rope_tables(4, 3, device=DEVICE)
    y = camox_ops.rope(x, cos, sin, positions=torch.tensor([2, 3], device=DEVICE))
    assert y.isnan().all(-1).flatten().tolist() == [False, True]
    with pytest.raises(ValueError, match=r"rope: positions or cu_seqlens .* are NaN"):
        camox_ops.check_errors(DEVICE)
    camox_ops.check_errors()
