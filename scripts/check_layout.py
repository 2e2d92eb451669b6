"""The tree is as CONTRIBUTING.md says: every op has all its files and stands in every list, no file carries a private
path or a foreign host, and words that its vocabulary has replaced do not come back.

    python scripts/check_layout.py

An op family is a folder of csrc other than those of SHARED; its name is the same in every folder of the repository.
Its functions are what camox_ops/__init__.py exports of it: for those of one image and one image of its shape that is an
entry in camox_ops/_ops.py, from which most other lists are made.
"""

import ast
import fnmatch
import re
import runpy
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OP_FILES = (
    "csrc/{op}/{op}.h",
    "csrc/{op}/{op}.c",
    "csrc/{op}/{op}_cpu.c",
    "csrc/{op}/{op}_bind.cpp",
    "csrc/{op}/{op}_cuda.cu",
    "csrc/{op}/README.md",
    "camox_ops/ops/{op}.py",
    "camox_ops/reference/{op}.py",
    "tests/test_{op}.py",
    "tests/c/test_{op}.c",
    "benchmarks/bench_{op}.py",
    "docs/{op}.md",
)
# Folders of csrc that are no op: what ops share, products of matrices, and what replaces PyTorch's own kernels.
SHARED = {"common", "gemm", "tune"}
TUNE_FILES = (
    "csrc/tune/README.md",
    "camox_ops/train/tune.py",
    "tests/test_tune_cpu.py",
    "tests/c/test_tune.c",
    "benchmarks/bench_tune_cpu.py",
    "docs/cpu.md",
)
BODY = "csrc/{op}/{op}_cpu.inc"
FORMULA = "csrc/{op}/{op}.inc"  # of an op of one image, instead
OF_ONE_IMAGE = '#include "../common/image_bind.h"'
ONE_LIST = "camox_ops/_ops.py"
EXPORTS = "camox_ops/__init__.py"
OPS_FOLDER = "camox_ops/ops"
# Functions that have no kernel to test, and why.
WITHOUT_TESTS = {"rope_tables": "makes cosines and sines with torch's own functions"}
# What every family's entry in a file looks like; {name}: each of its functions.
FAMILY_ENTRIES = {"README.md": "(docs/{family}.md)", "docs/index.md": "({family}.md)"}
FUNCTION_ENTRIES = {"CHANGELOG.md": "`{name}`", "docs/{family}.md": "{name}", "docs/index.md": "`{name}`"}
# The same of those that are not in the one list, of which other lists are made.
OTHER_FAMILY_ENTRIES = {
    "camox_ops/reference/__init__.py": "from .{family} import",
    "scripts/benchmark_groups.py": '"{family}"',
}
OTHER_FUNCTION_ENTRIES = {"camox_ops/_selftest.py": "{name}", "tests/contract_cases.py": '"{name}"'}
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
    "csrc/*",
    "docs/*.md",
    "examples/*.md",
    "examples/*.py",
    "scripts/[!c]*.py",
    "scripts/check_break.py",
    "scripts/check_docs.py",
    "scripts/cuda_budget.py",
    "tests/*.py",
    "tests/c/*",
    "tests/cuda/*",
)
# What to say instead: "Vocabulary" in CONTRIBUTING.md. Only words that have no right use; a string's strip(), an option
# --strip, os.walk and the <picture> of HTML are none of these.
REPLACED_WORDS = re.compile(
    r"(?<![a-z.])walk(?:s|ed|er|ing)?(?![a-z])"
    r"|(?<![a-z.-])strips?(?![a-z])"
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


def text_of(name: str) -> str:
    path = ROOT / name
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def families() -> list[str]:
    return sorted(path.name for path in (ROOT / "csrc").iterdir() if path.is_dir() and path.name not in SHARED)


def image_ops() -> list[str]:
    return list(runpy.run_path(str(ROOT / ONE_LIST))["IMAGE_OPS"])


def functions() -> dict[str, list[str]]:
    """Family -> the functions that camox_ops exports of it, apart from its classes."""
    found = {name: [name] for name in image_ops()}
    for node in ast.parse(text_of(EXPORTS)).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ops."):
            found[node.module.removeprefix("ops.")] = [alias.name for alias in node.names if alias.name.islower()]
    return found


def missing_files() -> list[str]:
    found = [f"tune: {name} is missing" for name in TUNE_FILES if not (ROOT / name).is_file()]
    for op in families():
        body = FORMULA if OF_ONE_IMAGE in text_of(f"csrc/{op}/{op}_bind.cpp") else BODY
        wanted = [pattern.format(op=op) for pattern in (*OP_FILES, body)]
        if body == BODY:
            wanted.append(f"tests/cuda/{op}_cases.py")
        found += [f"op {op}: {name} is missing" for name in wanted if not (ROOT / name).is_file()]
    for path in sorted((ROOT / OPS_FOLDER).glob("[a-z]*.py")):
        if path.stem not in families():
            found.append(f"{OPS_FOLDER}/{path.name}: there is no csrc/{path.stem}")
    return found


def missing_entries() -> list[str]:
    """What a family of ops is not entered in, each as file: what is missing there."""
    found, exported, listed = [], functions(), image_ops()
    for name in listed:
        if name not in families():
            found.append(f"{ONE_LIST}: IMAGE_OPS has {name}, but there is no csrc/{name}")
    for family in families():
        of_one_image = OF_ONE_IMAGE in text_of(f"csrc/{family}/{family}_bind.cpp")
        if of_one_image != (family in listed):
            found.append(
                f"{ONE_LIST}: IMAGE_OPS has {'no ' * of_one_image}entry {family}, csrc/{family} says otherwise"
            )
            continue
        if not exported.get(family):
            found.append(f"{EXPORTS}: no function of {OPS_FOLDER}/{family}.py is exported")
        if of_one_image and f", {family}>" not in text_of("csrc/cuda_budget.json"):
            update = f"python scripts/cuda_budget.py --update --ops {family}"
            found.append(f"csrc/cuda_budget.json: no kernels of {family}; `{update}` writes them")
        if of_one_image and f"`{family}`" not in text_of("docs/benchmarks.md"):
            found.append(f"docs/benchmarks.md: nothing of {family}; `python scripts/benchmark_pages.py` draws it anew")
        of_family = FAMILY_ENTRIES if of_one_image else FAMILY_ENTRIES | OTHER_FAMILY_ENTRIES
        entries = [(file, entry, "") for file, entry in of_family.items()]
        for name in exported.get(family, []):
            entries += [(file, entry, name) for file, entry in FUNCTION_ENTRIES.items()]
            if not of_one_image and name not in WITHOUT_TESTS:
                entries += [(file, entry, name) for file, entry in OTHER_FUNCTION_ENTRIES.items()]
        for file, entry, name in entries:
            file, entry = file.format(family=family), entry.format(family=family, name=name)
            if not re.search(rf"(?<!\w){re.escape(entry)}(?!\w)", text_of(file)):
                found.append(f"{file}: no entry of {name or family}, such as {entry}")
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
    found = missing_files() + missing_entries() + [fault for path in files for fault in faults_of(path)]
    for fault in found:
        print(fault, file=sys.stderr)
    if not found:
        print(f"layout: {len(files)} files as they should be")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
