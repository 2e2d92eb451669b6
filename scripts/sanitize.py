"""Runs tests/c/test_<op>.c under AddressSanitizer and UndefinedBehaviorSanitizer: python scripts/sanitize.py [op ...]

test_tune.c, of the replacements of PyTorch's kernels, is one of them.

The sources and their flags are setup.py's own, one object for each instruction set; no Python is in the tested process.
What a test calls on every instruction set itself is tests/c/<op>_cpu.c, compiled as the kernels are.
"""

import os
import runpy
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import setuptools

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests" / "c"
FOLDER = ROOT / "build" / "sanitize"
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
# Kernels check addresses in calls rather than in branches, and GCC allocates the registers of a whole function at once:
# the same checks, in functions that it compiles in a quarter of the time.
SANITIZE_KERNELS = [*SANITIZE, "--param=asan-instrumentation-with-call-threshold=0", "-fira-region=one", "-Og"]
# GCC does not align what needs 64 bytes in the stack that finds uses after return (its bug 110027); the other
# instruction sets look for these in the same sources.
SANITIZE_AVX512 = ["--param=asan-use-after-return=0"]
# Ops whose kernels multiply by csrc/gemm's sgemm.
MULTIPLY = {"linear_cross_entropy"}
COMPILER = os.environ.get("CC", "gcc")


def setup_facts() -> dict:
    """The names that setup.py defines, without building anything."""
    real, setuptools.setup = setuptools.setup, lambda **_: None
    try:
        return runpy.run_path(str(ROOT / "setup.py"))
    finally:
        setuptools.setup = real


def compile_one(job, lacks) -> str:
    """The object of (source, target, flags). Kernels of an instruction set that this CPU `lacks` (setup.py) are
    linked and never called: the sanitizers would see nothing."""
    source, target, flags = job
    target.parent.mkdir(parents=True, exist_ok=True)
    flavour = target.relative_to(FOLDER).parts[0]
    sanitize = SANITIZE_KERNELS if Path(source).stem.endswith("_cpu") else SANITIZE
    if lacks(flavour.split("-")[0]):
        built = list(ROOT.glob(f"build/temp.*/plain/{flavour}/{Path(source).with_suffix('.o')}"))
        if built:  # by setup.py, for the extension
            return str(built[0])
        sanitize = []
    elif flavour == "avx512":
        sanitize = [*sanitize, *SANITIZE_AVX512]
    command = [COMPILER, *flags, "-O1", *sanitize, "-g1", "-c", str(source), "-o", str(target)]
    subprocess.run(command, cwd=ROOT, check=True)
    return str(target)


def main(ops: list[str]) -> int:
    facts = setup_facts()
    jobs = {op: [(TESTS / f"test_{op}.c", FOLDER / f"test_{op}.o", facts["C_FLAGS"])] for op in ops}
    for op in ops:
        source = TESTS / f"{op}_cpu.c"
        for isa, flags in facts["ISA_FLAGS"].items() if source.exists() else ():
            jobs[op].append((source, FOLDER / isa / f"{op}_tests.o", [*facts["C_FLAGS"], *flags, f"-DCAMOX_ISA={isa}"]))
    common = []
    replacements = [job for job in facts["tune_compilations"]() if Path(job[0]).parent.name == "tune"]
    for source, flavour, flags in [*facts["compilations"](), *replacements]:
        job = (source, FOLDER / flavour / Path(source).with_suffix(".o"), flags)
        folder = Path(source).parent.name
        if source.endswith(".c") and folder == "common":
            common.append(job)
        elif source.endswith(".c") and folder in jobs:
            jobs[folder].append(job)
        if Path(source) in facts["SGEMM"]:
            for op in MULTIPLY.intersection(jobs):
                jobs[op].append(job)
    failed = []
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        compile_job = partial(compile_one, lacks=facts["lacks"])
        shared = list(pool.map(compile_job, common))
        objects = {op: pool.map(compile_job, jobs[op]) for op in ops}
        for op in ops:
            program = FOLDER / f"test_{op}"
            command = [COMPILER, *SANITIZE, *objects[op], *shared, "-lm", "-o", str(program)]
            subprocess.run(command, check=True)
            options = {
                "ASAN_OPTIONS": "detect_leaks=1:detect_stack_use_after_return=1",
                "UBSAN_OPTIONS": "print_stacktrace=1",
            }
            if subprocess.run([str(program)], env={**os.environ, **options}).returncode:
                failed.append(op)
    for op in failed:
        print(f"sanitize: {op} failed", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    os.chdir(ROOT)
    every = sorted(path.stem.removeprefix("test_") for path in TESTS.glob("test_*.c"))
    sys.exit(main(sys.argv[1:] or every))
