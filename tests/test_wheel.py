"""The wheel: what it holds, what it asks of the machine, and that it runs where it is unpacked."""

import importlib.util
import os
import platform
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from scripts import audit, build_wheel, sanitize  # noqa: E402
from scripts.build_wheel import CPU_PART, CUDA_PART, TUNE_PART  # noqa: E402

CPU_PARTS = (CPU_PART, TUNE_PART)
AUDITORS = importlib.util.find_spec("auditwheel") and importlib.util.find_spec("zopfli")
auditwheel = pytest.mark.skipif(AUDITORS is None, reason="what requirements/audit.txt names is not installed")


def archive(folder: Path, *names: str, title="camox_ops-1-cp310-abi3-manylinux_2_28_x86_64.whl") -> Path:
    path = folder / title
    with zipfile.ZipFile(path, "w") as made:
        for name in names:
            made.writestr(name, "")
    return path


def test_faults_of_a_wheel(tmp_path, monkeypatch):
    assert build_wheel.faults(archive(tmp_path, *CPU_PARTS, CUDA_PART), cuda=True) == []
    assert build_wheel.faults(archive(tmp_path, *CPU_PARTS), cuda=False) == []
    assert build_wheel.faults(archive(tmp_path, *CPU_PARTS), cuda=True) == [f"{CUDA_PART} is missing"]
    assert build_wheel.faults(archive(tmp_path, CPU_PARTS[0]), cuda=False) == [f"{CPU_PARTS[1]} is missing"]
    bundled = archive(tmp_path, *CPU_PARTS, "camox_ops.libs/libtorch_cpu.so")
    assert build_wheel.faults(bundled, cuda=False) == ["camox_ops.libs/libtorch_cpu.so does not belong there"]
    other = archive(tmp_path, *CPU_PARTS, title="camox_ops-1-cp311-cp311-linux_x86_64.whl")
    assert build_wheel.faults(other, cuda=False) == [f"{other.name} is not tagged cp310-abi3"]
    monkeypatch.setattr(build_wheel, "LARGEST", 100)
    assert "is more than" in build_wheel.faults(archive(tmp_path, *CPU_PARTS), cuda=False)[0]


def report(**changes) -> dict:
    torch_use = {"stable": True, "unstable_symbols": [], "min_torch_version": "2.10.0", **changes}
    binary = {
        "path": "a/_C.abi3.so",
        "cpython": {"compliant": True, "violations": []},
        "torch": torch_use,
        "error": None,
    }
    return {"extensions": [binary], "bundled_libs": []}


def test_setuptools_that_is_too_old_is_named():
    oldest = (ROOT / "pyproject.toml").read_text().split('"setuptools>=')[1].split('"')[0]
    code = "import setuptools; setuptools.__version__ = '69.5.1'; import runpy; runpy.run_path('setup.py')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"setuptools {oldest} or newer, this Python has 69.5.1" in done.stderr


def unoptimised(monkeypatch, quick: str, cpu_words: str = "avx2", driver: bool = False) -> set[str]:
    """What setup.py compiles without optimisation on a machine whose CPU and driver are made up."""
    read_text, exists = Path.read_text, Path.exists
    monkeypatch.setattr(
        Path, "read_text", lambda path, *a: cpu_words if path == Path("/proc/cpuinfo") else read_text(path, *a)
    )
    monkeypatch.setattr(Path, "exists", lambda path: driver if str(path).startswith("/dev/") else exists(path))
    monkeypatch.setenv("CAMOX_QUICK_BUILD", quick)
    monkeypatch.chdir(ROOT)
    facts = sanitize.setup_facts()
    compiled = [*facts["compilations"](), *facts["tune_compilations"](), *facts["cuda_compilations"]()]
    wanted = {folder for _, folder, flags in compiled if "-Og" in flags or "-DCAMOX_CUDA_UNOPTIMISED" in flags}
    assert wanted == {folder for _, folder, _ in compiled if folder.endswith("-unoptimised")}
    return {folder.split("-")[0] for folder in wanted}


def test_quick_build_optimises_what_this_machine_can_run(monkeypatch):
    assert unoptimised(monkeypatch, "0") == set()
    gpu_code = {"cuda"} if sanitize.setup_facts()["where_nvcc_can"]("--Ofast-compile=max") else set()
    assert unoptimised(monkeypatch, "1", "avx2 avx512f") == gpu_code
    assert unoptimised(monkeypatch, "1", "avx2 avx512f", driver=True) == set()
    if sanitize.setup_facts()["X86"]:
        assert unoptimised(monkeypatch, "1", "avx2") == {"avx512"} | gpu_code
        assert unoptimised(monkeypatch, "1", "sse2", driver=True) == {"avx2", "avx512"}
    with pytest.raises(SystemExit, match="CAMOX_QUICK_BUILD must be 0 or 1, got 'yes'"):
        unoptimised(monkeypatch, "yes")


@pytest.mark.slow
def test_cuda_objects_of_other_architectures_lie_elsewhere():
    code = (
        "import setuptools; setuptools.setup = lambda **_: None\n"
        "import runpy; compilations = runpy.run_path('setup.py')['cuda_compilations']()\n"
        "print(*sorted({folder for source, folder, _ in compilations if source.endswith('.cu')}))"
    )
    folders = []
    for archs in ("sm_80", "sm_80,sm_90", "all"):
        environment = {**os.environ, "CAMOX_CUDA_ARCHS": archs}
        folders.append(subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True, env=environment))
    assert len(set(folders)) == 3
    assert all(len(folder.split()) == 1 for folder in folders)


def test_audit_leaves_weak_symbols_out(tmp_path):
    source, library = tmp_path / "a.c", tmp_path / "a.so"
    source.write_text(
        "void needed(void); __attribute__((weak)) void wanted(void);\n"
        "void call(void) { needed(); if (wanted) wanted(); }\n"
    )
    subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    assert "needed" in audit.needed_symbols(library)
    assert "wanted" not in audit.needed_symbols(library)


def test_audit_judges():
    assert audit.judged(report()) == []
    assert "uses torch outside" in audit.judged(report(unstable_symbols=["_ZN2at3addE"]))[0]
    assert "needs torch 2.13.0" in audit.judged(report(min_torch_version="2.13.0"))[0]
    private = report()
    private["extensions"][0]["cpython"] = {"compliant": False, "violations": ["_PyLong_AsInt"]}
    assert "is not abi3: ['_PyLong_AsInt']" in audit.judged(private)[0]
    assert "found no Python module" in audit.judged({"extensions": [], "bundled_libs": []})[0]


@pytest.mark.slow
@auditwheel
def test_wheel_runs_where_it_is_unpacked(tmp_path):
    assert build_wheel.main(["--out", str(tmp_path / "dist")]) == 0
    (made,) = (tmp_path / "dist").glob("*.whl")
    if platform.machine() == "x86_64":
        assert int(re.search(r"manylinux_2_(\d+)_", made.name)[1]) <= 28, made.name
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target"]
    subprocess.run([*install, str(site), str(made)], check=True)
    code = "import camox_ops as cx; from camox_ops.__main__ import main; print(cx.__file__); main(['check'])"
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(site))
    assert " 0 failed" in done.stdout
    if importlib.util.find_spec("abi3audit") and importlib.util.find_spec("torch_abi_audit"):
        assert audit.main([str(made)]) == 0
