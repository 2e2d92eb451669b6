"""The package as a whole: import, instruction sets, allocator, and what the binary may ask of other libraries."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from helpers import run_python_with_torch

import camox_ops as cx
from camox_ops import _cuda
from camox_ops.train import tune

BINARY = Path(cx._C.__file__)
BINARIES = [path for path in (BINARY, _cuda.LIBRARY, tune.LIBRARY) if path.exists()]
ISAS = ("portable", "avx2", "avx512")
# what torch's own wheels need: the systems of manylinux_2_28
OLDEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11)}


needs_nm = pytest.mark.skipif(shutil.which("nm") is None, reason="nm (binutils) is not installed")
each_binary = pytest.mark.parametrize("binary", BINARIES, ids=lambda path: path.name)


def undefined_symbols(binary: Path, *options: str) -> list[str]:
    command = ["nm", "--dynamic", "--undefined-only", *options, str(binary)]
    return [line.split(maxsplit=1)[1] for line in subprocess.check_output(command, text=True).splitlines()]


def test_smoke():
    assert all(hasattr(cx, name) for name in cx.__all__)
    facts = cx.build_info()
    assert facts["version"] == cx.__version__
    assert facts["minimum_torch"] == "2.10"
    assert facts["broken_op"] == ""


def test_import_changes_no_settings_and_brings_no_compiler():
    code = """
import sys, torch
def facts():  # torch._dynamo takes longer to import than all of torch
    return torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(), "torch._dynamo" in sys.modules
before = facts()
import camox_ops
print(before == facts(), facts()[-1])
"""
    assert run_python_with_torch(code).strip() == "True False"


# Supported ones are forced by test_isa_agree too.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in cx.supported_isas() else ()) for name in ISAS]
)
def test_force_isa(name):
    code = "import camox_ops as cx; print(cx.isa())"
    if name in cx.supported_isas():
        assert run_python_with_torch(code, CAMOX_FORCE_ISA=name).strip() == name
    else:
        with pytest.raises(
            RuntimeError, match=f"ImportError: CAMOX_FORCE_ISA is '{name}', which this machine does not"
        ):
            run_python_with_torch(code, CAMOX_FORCE_ISA=name)


def test_force_isa_empty_is_the_best():
    assert (
        run_python_with_torch("import camox_ops as cx; print(cx.isa())", CAMOX_FORCE_ISA="").strip()
        == cx.supported_isas()[-1]
    )


def test_errors_of_an_unknown_isa():
    message = "ImportError: CAMOX_FORCE_ISA must be portable, avx2 or avx512, got 'sse9'"
    with pytest.raises(RuntimeError, match=message):
        run_python_with_torch("import camox_ops", CAMOX_FORCE_ISA="sse9")


FILL_FREED_BLOCKS = """
import resource, torch
def new_pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(16 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
# A block that was freed takes a few rounds until it has the slack that an aligned allocation asks for.
print(min([new_pages() for _ in range(20)][1:]))
"""


def test_tune_cpu_allocator():
    report = "import camox_ops as cx; report = cx.train.tune_cpu_allocator()\n"
    report += "print(report.supported, sorted(report.settings), report, sep='|')\n"
    first, pages = run_python_with_torch(report + FILL_FREED_BLOCKS).splitlines()
    supported, settings, text = first.split("|")
    if supported == "True":
        assert settings == "['M_MMAP_MAX', 'M_TOP_PAD', 'M_TRIM_THRESHOLD', 'THP_MEM_ALLOC_ENABLE']"
        assert text.startswith("glibc ") and "large tensors begin on pages (" in text
        assert int(pages) < 100, "64 MiB just freed came from the kernel again"
        untuned = run_python_with_torch("import camox_ops" + FILL_FREED_BLOCKS)
        assert int(untuned) > 1000, "importing alone must tune nothing"
    else:
        assert (settings, text) == ("[]", "not glibc: nothing was changed")


@pytest.mark.parametrize(
    ("first", "why"),
    [
        ("import torch; torch.ones(3)", "tensors were made before"),
        pytest.param(
            "import os; os.environ['THP_MEM_ALLOC_ENABLE'] = '0'",
            "THP_MEM_ALLOC_ENABLE was '0'",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_tune_cpu_allocator_says_what_came_too_late(first, why):
    tune = "import camox_ops as cx; print(*cx.train.tune_cpu_allocator()[::2], sep='|')"
    report = run_python_with_torch(f"{first}\n{tune}").strip()
    if report.startswith("True"):
        assert report.endswith(f"; large tensors do not begin on pages, {why}")


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without huge pages")
def test_large_outputs_ask_for_huge_pages():
    out = cx.layer_norm2d(torch.zeros(1, 1, 2048, 2048), torch.ones(1), torch.zeros(1))
    inside = out.data_ptr() + out.nbytes // 2
    for mapping in re.split(r"\n(?=[0-9a-f]+-)", Path("/proc/self/smaps").read_text()):
        begin, end = (int(address, 16) for address in mapping.split(maxsplit=1)[0].split("-"))
        if begin <= inside < end:
            assert " hg" in mapping.split("VmFlags:")[1]
            return
    raise AssertionError("the output is in no mapping")


def test_binary_is_abi3():
    assert BINARY.name == "_C.abi3.so"


@needs_nm
def test_replacements_call_the_products_of_the_module():
    assert {"camox_sgemm", "camox_box_forward", "camox_isa_current"} <= set(undefined_symbols(tune.LIBRARY))


@needs_nm
@each_binary
def test_binary_uses_torch_by_its_stable_abi_alone(binary):
    symbols = undefined_symbols(binary)
    assert [symbol for symbol in symbols if symbol.startswith(("aoti_torch_", "torch_"))]
    foreign = [
        name for name in undefined_symbols(binary, "--demangle") if re.search(r"\b(c10|at|torch|caffe2)::", name)
    ]
    assert foreign == []
    # C++ symbols are versioned ones of the C++ runtime: torch's carry no version.
    assert [symbol for symbol in symbols if symbol.startswith("_Z") and "@" not in symbol] == []


@needs_nm
def test_binary_uses_python_by_its_limited_api_alone():
    private = {symbol for symbol in undefined_symbols(BINARY) if symbol.startswith("_Py")}
    # What the limited API's own macros expand to.
    assert private <= {"_Py_Dealloc", "_Py_NoneStruct", "_Py_TrueStruct", "_Py_FalseStruct", "_Py_BuildValue_SizeT"}


@needs_nm
@each_binary
@pytest.mark.parametrize("library", OLDEST)
def test_binary_needs_no_newer_system(binary, library):
    names = re.findall(rf"@{library}_([\d.]+)", " ".join(undefined_symbols(binary)))
    assert names
    assert max(tuple(map(int, name.split("."))) for name in names) <= OLDEST[library]
