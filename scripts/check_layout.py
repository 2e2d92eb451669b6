"""The tree is as CONTRIBUTING.md says: every op has all its files, no file carries a private path or a foreign host,
and words that its vocabulary has replaced do not come back.

    python scripts/check_layout.py

An op is a folder of csrc other than those of SHARED; its name is the same in every folder of the repository.
"""

import fnmatch
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
SHARED = {"common", "gemm"}
OPS_FOLDER = "camox_ops/ops"
LARGEST_FILE = 1 << 20
HOSTS = re.compile(r"(?:https?|git|ssh)://(?:[^/\s@]+@)?([\w.-]+)")
KNOWN_HOSTS = {"github.com", "keepachangelog.com", "semver.org", "www.w3.org"}  # the last: in every SVG
PRIVATE_PATH = re.compile(r"(?<![\w./$}:-])/(?:home|root|work|Users|tmp)/[\w.-]+")
LEFT_OPEN = re.compile(r"\b(?:TODO|FIXME|XXX)\b")
# Where the words below are not used any more: patterns of paths, to which others are added as they become clean.
PLAIN_WORDS = (
    "CONTRIBUTING.md",
    "README.md",
    "benchmarks/*.py",
    "camox_ops/*.py",
    "csrc/*.cu",
    "csrc/*.cuh",
    "docs/*.md",
    "examples/*.md",
    "examples/*.py",
    "tests/*.py",
    "tests/cuda/*",
)
# What to say instead: "Vocabulary" in CONTRIBUTING.md. Only words that have no right use; a string's strip(), os.walk
# and the <picture> of HTML are none of these.
REPLACED_WORDS = re.compile(
    r"(?<![a-z.])walk(?:s|ed|er|ing)?(?![a-z])"
    r"|(?<![a-z.])strips?(?![a-z])"
    r"|(?<![a-z])rigs?(?![a-z])"
    r"|(?<![a-z</])pictures?(?![a-z])"
    r"|(?<![a-z])planted(?![a-z])"
    r"|\w_ahead(?![a-z])|(?<![a-z])ahead_\w"
    r"|\b(?:anew|the house|both arms of|turn(?:s|ed)? red|knows? torch|the way of a call)\b",
    re.IGNORECASE,
)
SOURCES = (".c", ".h", ".inc", ".cu", ".cuh", ".cpp", ".py", ".sh")


def tracked() -> list[Path]:
    """Files that git knows or would add, so that a check before the commit sees what the commit will hold."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in names.split("\0") if name and (ROOT / name).is_file()]


def missing_files() -> list[str]:
    found = []
    ops = {path.name for path in (ROOT / "csrc").iterdir() if path.is_dir() and path.name not in SHARED}
    for op in sorted(ops):
        wanted = [pattern.format(op=op) for pattern in OP_FILES]
        found += [f"op {op}: {name} is missing" for name in wanted if not (ROOT / name).is_file()]
    for path in sorted((ROOT / OPS_FOLDER).glob("[a-z]*.py")):
        if path.stem not in ops:
            found.append(f"{OPS_FOLDER}/{path.name}: there is no csrc/{path.stem}")
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
    found, plain = [], any(fnmatch.fnmatchcase(name, pattern) for pattern in PLAIN_WORDS)
    for number, line in enumerate(lines, 1):
        where = f"{name}:{number}"
        found += [f"{where}: host {host}" for host in HOSTS.findall(line) if host not in KNOWN_HOSTS]
        found += [f"{where}: path of one machine, {private}" for private in PRIVATE_PATH.findall(line)]
        if path.suffix in SOURCES and path != Path(__file__).resolve():
            found += [f"{where}: left open, {word}" for word in LEFT_OPEN.findall(line)]
        if plain:
            found += [f"{where}: {word!r}, see Vocabulary in CONTRIBUTING.md" for word in REPLACED_WORDS.findall(line)]
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
