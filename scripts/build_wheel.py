"""Builds the wheel for other machines: python scripts/build_wheel.py [--out dist]

Every GPU architecture where nvcc is found; in its name the oldest glibc that its symbols allow (auditwheel; torch's own
libraries stay outside). Prints what it took and holds the wheel against its limits: both parts there, the size.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LARGEST = 20 << 20
CPU_PART, CUDA_PART = "camox_ops/_C.abi3.so", "camox_ops/libcamox_ops_cuda.so"
TUNE_PART = "camox_ops/libcamox_ops_tune.so"
# libstdc++ and libc belong to the system, the rest to torch.
EXCLUDED = ("libtorch*", "libc10*")


def build(folder: Path) -> Path:
    """The wheel as setup.py makes it, compiled from nothing."""
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "wheel", "--no-build-isolation"]
    base = f"--config-settings=--build-option=build --build-base {folder}/b"
    options = ["--no-deps", "--wheel-dir", str(folder), base]
    environment = {"CAMOX_CUDA_ARCHS": "all", **os.environ}
    subprocess.run([*command, *options, str(ROOT)], check=True, cwd=ROOT, env=environment)
    (wheel,) = folder.glob("*.whl")
    return wheel


def repaired(wheel: Path, out: Path) -> Path:
    """The same wheel in `out`, named after the oldest Linux that has all it asks for."""
    tools = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    excluded = [f"--exclude={name}" for name in EXCLUDED]
    command = [sys.executable, "-m", "auditwheel", "repair", "--strip"]
    command += [*excluded, "--wheel-dir", str(out), str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PATH": tools})
    found = re.search(r"Fixed-up wheel written to (.+)", done.stdout + done.stderr)
    if done.returncode or not found:
        sys.exit(f"auditwheel failed:\n{done.stdout}{done.stderr}")
    return Path(found.group(1).strip())


def squeeze(wheel: Path) -> None:
    """Writes the wheel again with Zopfli's Deflate, which any pip reads and which is smaller than zlib's smallest."""
    import zopfli

    smaller = wheel.with_suffix(".squeezed")
    with zipfile.ZipFile(wheel) as old, zopfli.ZipFile(smaller, "w") as new:
        for entry in old.infolist():
            new.writestr(entry, old.read(entry), zipfile.ZIP_DEFLATED)
    smaller.replace(wheel)


def faults(wheel: Path, cuda: bool) -> list[str]:
    """What is wrong with a wheel that should hold the CPU part, what tune_cpu opens, and perhaps the CUDA part."""
    names = zipfile.ZipFile(wheel).namelist()
    wanted = [CPU_PART, TUNE_PART, *([CUDA_PART] if cuda else [])]
    found = [f"{name} is missing" for name in wanted if name not in names]
    foreign = [name for name in names if name.endswith(".so") or ".so." in name]
    found += [f"{name} does not belong there" for name in foreign if name not in (CPU_PART, TUNE_PART, CUDA_PART)]
    size = wheel.stat().st_size
    if size > LARGEST:
        found.append(f"{size / 2**20:.1f} MiB is more than {LARGEST >> 20} MiB")
    if "cp310-abi3" not in wheel.name:
        found.append(f"{wheel.name} is not tagged cp310-abi3")
    return found


def nvcc_found() -> bool:
    code = "import setuptools; setuptools.setup = lambda **_: None\nimport runpy\n"
    code += f"print(runpy.run_path({str(ROOT / 'setup.py')!r})['NVCC'] is not None)"
    return subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True).strip() == "True"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    out = parser.parse_args(arguments).out
    out.mkdir(parents=True, exist_ok=True)
    cuda = nvcc_found()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        built = build(Path(folder))
        seconds = time.monotonic() - begin
        wheel = repaired(built, out)
    squeeze(wheel)
    for old in out.glob("camox_ops-*.whl"):
        if old != wheel:
            old.unlink()
    parts = "with the CUDA part" if cuda else "without a CUDA part (no nvcc found)"
    print(f"{wheel.name}: {wheel.stat().st_size / 2**20:.2f} MiB, built in {seconds:.0f} s, {parts}")
    found = faults(wheel, cuda)
    for fault in found:
        print(f"{wheel.name}: {fault}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
