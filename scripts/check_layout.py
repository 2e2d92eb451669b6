"""The tree is as CONTRIBUTING.md says: every op has all its files, no file carries a private path or a foreign host.

    python scripts/check_layout.py

An op is a folder of csrc other than those of NO_OPS; its name is the same in every room of the house.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OP_FILES = (
    "csrc/{op}/{op}.h",
    "csrc/{op}/{op}.c",
    "csrc/{op}/{op}_cpu.c",
    "csrc/{op}/{op}_cpu.inc",
    "csrc/{op}/{op}_bind.cpp",
    "csrc/{op}/README.md",
    "camox_ops/ops/{op}.py",
    "camox_ops/reference/{op}.py",
    "tests/test_{op}.py",
    "tests/c/test_{op}.c",
    "benchmarks/bench_{op}.py",
    "docs/{op}.md",
)
# Folders of csrc that are no op: what ops share, and what replaces PyTorch's own kernels.
NO_OPS = ("common", "tune")
TUNE_FILES = (
    "csrc/tune/README.md",
    "camox_ops/train/tune.py",
    "tests/test_tune_cpu.py",
    "tests/c/test_tune.c",
    "benchmarks/bench_tune_cpu.py",
    "docs/cpu.md",
)
ROOM_OF_OPS = "camox_ops/ops"
LARGEST_FILE = 1 << 20
HOSTS = re.compile(r"(?:https?|git|ssh)://(?:[^/\s@]+@)?([\w.-]+)")
KNOWN_HOSTS = {"github.com", "keepachangelog.com", "semver.org", "www.w3.org"}  # the last: in every SVG
PRIVATE_PATH = re.compile(r"(?<![\w./$}:-])/(?:home|root|work|Users|tmp)/[\w.-]+")
LEFT_OPEN = re.compile(r"\b(?:TODO|FIXME|XXX)\b")
SOURCES = (".c", ".h", ".inc", ".cu", ".cuh", ".cpp", ".py", ".sh")


def tracked() -> list[Path]:
    """Files that git knows or would add, so that a check before the commit sees what the commit will hold."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in names.split("\0") if name and (ROOT / name).is_file()]


def missing_files() -> list[str]:
    found = [f"tune: {name} is missing" for name in TUNE_FILES if not (ROOT / name).is_file()]
    ops = {path.name for path in (ROOT / "csrc").iterdir() if path.is_dir() and path.name not in NO_OPS}
    for op in sorted(ops):
        wanted = [pattern.format(op=op) for pattern in OP_FILES]
        found += [f"op {op}: {name} is missing" for name in wanted if not (ROOT / name).is_file()]
    for path in sorted((ROOT / ROOM_OF_OPS).glob("[a-z]*.py")):
        if path.stem not in ops:
            found.append(f"{ROOM_OF_OPS}/{path.name}: there is no csrc/{path.stem}")
    return found


def faults_of(path: Path) -> list[str]:
    """What must not stand in a tracked file, each as path:line: what."""
    name = path.relative_to(ROOT).as_posix()
    if path.stat().st_size > LARGEST_FILE:
        return [f"{name}: larger than {LARGEST_FILE >> 20} MiB"]
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        return []
    found = []
    for number, line in enumerate(lines, 1):
        where = f"{name}:{number}"
        found += [f"{where}: host {host}" for host in HOSTS.findall(line) if host not in KNOWN_HOSTS]
        found += [f"{where}: path of one machine, {private}" for private in PRIVATE_PATH.findall(line)]
        if path.suffix in SOURCES and path != Path(__file__).resolve():
            found += [f"{where}: left open, {word}" for word in LEFT_OPEN.findall(line)]
    return found


def main() -> int:
    files = tracked()
    found = missing_files() + [fault for path in files for fault in faults_of(path)]
    for fault in found:
        print(fault, file=sys.stderr)
    if not found:
        print(f"layout: {len(files)} files as they should be")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
