"""The package as a whole: import, instruction sets, allocator, and what the binary may ask of other libraries."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from helpers import run_python

import camox_ops as cx

BINARY = Path(cx._C.__file__)
ISAS = ("portable", "avx2", "avx512")
OLDEST_GLIBC = (2, 28)  # what torch's own wheels need


def undefined_symbols(*options: str) -> list[str]:
    command = ["nm", "--dynamic", "--undefined-only", *options, str(BINARY)]
    return [line.split(maxsplit=1)[1] for line in subprocess.check_output(command, text=True).splitlines()]


def test_smoke():
    assert all(hasattr(cx, name) for name in cx.__all__)
    facts = cx.build_info()
    assert facts["version"] == cx.__version__
    assert facts["minimum_torch"] == "2.10"
    assert facts["broken_op"] == ""


def test_import_changes_no_settings():
    code = """
import torch
def settings():
    return torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()
before = settings()
import camox_ops
print(before == settings())
"""
    assert run_python(code).strip() == "True"


@pytest.mark.parametrize("name", ISAS)
def test_force_isa(name):
    code = "import camox_ops as cx; print(cx.isa())"
    if name in cx.supported_isas():
        assert run_python(code, CAMOX_FORCE_ISA=name).strip() == name
    else:
        with pytest.raises(
            RuntimeError, match=f"ImportError: CAMOX_FORCE_ISA is '{name}', which this machine does not"
        ):
            run_python(code, CAMOX_FORCE_ISA=name)


def test_force_isa_empty_is_the_best():
    assert run_python("import camox_ops as cx; print(cx.isa())", CAMOX_FORCE_ISA="").strip() == cx.supported_isas()[-1]


def test_errors_of_an_unknown_isa():
    message = "ImportError: CAMOX_FORCE_ISA must be portable, avx2 or avx512, got 'sse9'"
    with pytest.raises(RuntimeError, match=message):
        run_python("import camox_ops", CAMOX_FORCE_ISA="sse9")


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
    first, pages = run_python(report + FILL_FREED_BLOCKS).splitlines()
    supported, settings, text = first.split("|")
    if supported == "True":
        assert settings == "['M_MMAP_MAX', 'M_TOP_PAD', 'M_TRIM_THRESHOLD']"
        assert text.startswith("glibc ")
        assert int(pages) < 100, "64 MiB just freed came from the kernel again"
        assert int(run_python("import camox_ops" + FILL_FREED_BLOCKS)) > 1000, "importing alone must tune nothing"
    else:
        assert (settings, text) == ("[]", "not glibc: nothing was changed")


def test_binary_is_abi3():
    assert BINARY.name == "_C.abi3.so"


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm (binutils) is not installed")
def test_binary_uses_torch_by_its_stable_abi_alone():
    symbols = [symbol.split("@")[0] for symbol in undefined_symbols()]
    from_torch = [symbol for symbol in symbols if symbol.startswith(("aoti_torch_", "torch_"))]
    assert from_torch
    foreign = [name for name in undefined_symbols("--demangle") if re.search(r"\b(c10|at|torch|caffe2)::", name)]
    assert foreign == []
    # C++ symbols are versioned ones of the C++ runtime: torch's carry no version.
    assert [name for name in undefined_symbols() if name.startswith("_Z") and "@" not in name] == []


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm (binutils) is not installed")
def test_binary_uses_python_by_its_limited_api_alone():
    private = {symbol for symbol in undefined_symbols() if symbol.startswith("_Py")}
    # What the limited API's own macros expand to.
    assert private <= {"_Py_Dealloc", "_Py_NoneStruct", "_Py_TrueStruct", "_Py_FalseStruct", "_Py_BuildValue_SizeT"}


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm (binutils) is not installed")
def test_binary_needs_no_newer_glibc():
    versions = {tuple(map(int, found.split("."))) for name in undefined_symbols() for found in glibc_versions(name)}
    assert versions
    assert max(versions) <= OLDEST_GLIBC


def glibc_versions(symbol: str) -> list[str]:
    return re.findall(r"@GLIBC_([\d.]+)", symbol)
