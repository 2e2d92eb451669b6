"""The CUDA part as far as a machine without a GPU can tell: when it is loaded, what is said when it cannot be used."""

import ctypes
import os
import re
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from helpers import DEVICE, run_python_with_torch

import camox_ops
from camox_ops import _cuda
from camox_ops._torch_private import raise_as_torch_does

sys.path.insert(0, str(Path(__file__).parent / "cuda"))
import emulator


def test_cpu_torch_never_opens_it():
    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA")
    maps = run_python_with_torch("import camox_ops; print(open('/proc/self/maps').read())")
    assert "_C.abi3.so" in maps
    assert "libcamox_ops_cuda" not in maps
    assert "has no CUDA" in _cuda.status()
    assert _cuda.unusable(0) == _cuda.part.missing


@pytest.mark.parametrize(
    ("built", "driver", "archs", "capability", "expected"),
    [
        (13000, 13000, ["sm_80"], (8, 0), ""),
        (13000, 13000, ["sm_80"], (8, 9), ""),
        (13000, 13020, ["sm_75", "sm_90", "compute_90"], (12, 0), ""),
        (13000, 13000, ["sm_80", "compute_80"], (9, 0), ""),
        (13010, 13000, ["sm_80", "sm_90", "compute_90"], (8, 9), ""),
        (13010, 13000, ["sm_80", "sm_100", "compute_90"], (10, 3), ""),
        (
            13010,
            13000,
            ["sm_80", "sm_90", "compute_90"],
            (10, 0),
            "the GPU is sm_100, for which the CUDA part has no machine code, and its PTX needs a driver for CUDA 13.1 "
            "or newer, but the driver supports CUDA 13.0",
        ),
        (13000, 13000, ["sm_80", "sm_120", "compute_80"], (11, 0), ""),
        (13000, 13000, ["sm_75"], (9, 0), "the GPU is sm_90, and the CUDA part has code for sm_75"),
        (13000, 13000, ["sm_80", "sm_90"], (7, 5), "the GPU is sm_75, and the CUDA part has code for sm_80, sm_90"),
        (13000, 13000, ["sm_86", "sm_90"], (8, 0), "the GPU is sm_80, and the CUDA part has code for sm_86, sm_90"),
        (13000, 12080, ["sm_80"], (8, 0), "(driver 580 or newer), but the driver supports CUDA 12.8"),
        (13000, 0, ["sm_80"], (8, 0), "which needs a driver for it (driver 580 or newer), but no driver was found"),
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
    known = {"sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"}
    machine_code = [arch for arch in archs if arch.startswith("sm_")]
    ptx = [arch for arch in archs if arch not in machine_code]
    assert machine_code
    assert set(machine_code) <= known
    assert len(ptx) == (machine_code != ["sm_75"])
    assert {arch.replace("compute_", "sm_") for arch in ptx} <= known
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
    known = run_python_with_torch(
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


@pytest.mark.parametrize(
    ("driver", "unoptimised", "expected"),
    [
        (0, False, "built with CUDA 13.0 for sm_80; no driver was found"),
        (13010, False, "; the driver supports CUDA 13.1"),
        (0, True, "for sm_80, without optimisation (CAMOX_QUICK_BUILD); no driver was found"),
    ],
)
def test_status_names_the_driver(monkeypatch, driver, unoptimised, expected):
    made_up_part(monkeypatch, driver, unoptimised)
    assert _cuda.status().endswith(expected)


def made_up_part(monkeypatch, driver, unoptimised):
    monkeypatch.setattr(_cuda.part, "library", object())
    monkeypatch.setattr(_cuda.part, "versions", lambda: (13000, driver))
    monkeypatch.setattr(_cuda.part, "archs", lambda: ["sm_80"])
    monkeypatch.setattr(_cuda.part, "unoptimised", lambda: unoptimised)


def test_kernels_without_optimisation_are_named_where_a_gpu_would_run_them(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    made_up_part(monkeypatch, 13000, True)
    with pytest.warns(UserWarning, match="without optimisation.*CAMOX_QUICK_BUILD=0"):
        assert _cuda.unusable.__wrapped__(0) == ""
    made_up_part(monkeypatch, 13000, False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _cuda.unusable.__wrapped__(0) == ""


@pytest.fixture
def machine(monkeypatch):
    """csrc/common/cuda_part.cu on a made-up machine of four GPUs, the first of them current, in a copy of its own: it
    remembers the addresses that it found."""
    if emulator.why_unavailable() is not None:
        pytest.skip(emulator.why_unavailable())
    library = fake_devices()
    library.camox_cuda_error_word.restype = ctypes.c_void_p
    monkeypatch.setattr(_cuda.part, "library", library)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    return library


def fake_devices():
    built = emulator.build("fake_devices.so", [emulator.HERE / "fake_devices.cpp"], ["-ldl"])
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / built.name
        copy.write_bytes(built.read_bytes())
        return ctypes.CDLL(str(copy))


def used(machine):
    return [i for i, made in enumerate((ctypes.c_bool * 4).in_dll(machine, "fake_contexts")) if made]


def current(machine):
    return ctypes.c_int.in_dll(machine, "fake_current").value


def test_error_word_is_that_of_the_device_asked_for(machine):
    words = (ctypes.c_uint32 * 4).in_dll(machine, "fake_words")
    for device in (2, 0, 2):
        assert machine.camox_cuda_error_word(device) == ctypes.addressof(words) + 4 * device
        assert current(machine) == 0
    for none in (-1, 4, 1000):
        assert machine.camox_cuda_error_word(none) is None


def test_arguments_that_it_refused_are_value_errors(machine):
    """Also where torch makes a RuntimeError of C++'s invalid_argument."""
    with pytest.raises(ValueError, match="refused"):
        raise_as_torch_does(RuntimeError("refused"))
    raise_as_torch_does(RuntimeError("failed"))


def test_check_errors_touches_only_devices_that_ran_kernels(machine):
    camox_ops.check_errors()
    camox_ops.check_errors(3)
    assert used(machine) == []
    ctypes.c_int.in_dll(machine, "fake_current").value = 2  # as torch leaves it where nothing was done on the first
    words = (ctypes.c_uint32 * 4).in_dll(machine, "fake_words")
    machine.camox_cuda_error_word(2)
    words[2] = 1
    with pytest.raises(ValueError, match=r"rope: positions or cu_seqlens .* are NaN \(cuda:2\)"):
        camox_ops.check_errors()
    camox_ops.check_errors()
    assert words[2] == 0
    assert used(machine) == [2]
    machine.camox_cuda_error_word(1)
    words[1] = 2
    with pytest.raises(ValueError, match=r"moe_route: logits held NaN; .* \(cuda:1\)"):
        camox_ops.check_errors(torch.device("cuda", 1))
    assert used(machine) == [1, 2]
    assert current(machine) == 2
    with pytest.raises(ValueError, match="check_errors: device must be one of 4 CUDA devices, got cuda:7"):
        camox_ops.check_errors("cuda:7")


def test_a_word_that_is_not_found_leaves_no_error_behind(machine):
    """The launch that follows asks for the last error, and would seem to have failed."""
    fails = ctypes.c_bool.in_dll(machine, "fake_symbol_fails")
    fails.value = True
    assert machine.camox_cuda_error_word(0) is None
    assert machine.cudaGetLastError() == 0
    fails.value = False
    assert machine.camox_cuda_error_word(0) is not None


def test_multiprocessors_of_the_device_asked_for(machine):
    """A launcher that asks for the last error would take that of a device that is not there for its own."""
    assert [machine.camox_cuda_multiprocessors(device) for device in (3, 0, 7)] == [103, 100, 1]
    assert machine.cudaGetLastError() == 0
    assert used(machine) == []


def test_without_the_stream_of_torch_it_is_said_why(machine, tmp_path):
    """In processes of their own, the second of which has a libtorch_cuda that fails for all devices but 3."""
    if torch.version.cuda is not None:
        pytest.skip("this torch has a libtorch_cuda")
    source = tmp_path / "torch_cuda.cpp"
    source.write_text(
        'extern "C" int aoti_torch_get_current_cuda_stream(int device, void **stream) {\n'
        "  *stream = reinterpret_cast<void *>(device + 40L);\n"
        "  return device != 3;\n}\n"
    )
    torch_cuda = emulator.build("libtorch_cuda.so", [source], ["-Wl,-soname,libtorch_cuda.so"])
    fake = emulator.build("fake_devices.so", [emulator.HERE / "fake_devices.cpp"], ["-ldl"])
    ask = (
        f"library = ctypes.CDLL({str(fake)!r})\n"
        "library.camox_cuda_current_stream.restype = ctypes.c_char_p\n"
        "for device in (3, 1):\n"
        "    stream = ctypes.c_void_p()\n"
        "    print(library.camox_cuda_current_stream(device, ctypes.byref(stream)), stream.value)\n"
    )
    missing = run_python_with_torch(f"import ctypes\n{ask}")
    assert missing.count("this torch has no aoti_torch_get_current_cuda_stream to ask for its stream") == 2
    found, failed = run_python_with_torch(
        f"import ctypes\ntorch = ctypes.CDLL({str(torch_cuda)!r})\n{ask}"
    ).splitlines()
    assert found == "None 43"
    assert "torch failed to return its current stream" in failed


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
