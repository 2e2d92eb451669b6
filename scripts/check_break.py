"""Proves that an op's tests notice a wrong kernel: builds it with CAMOX_BREAK=<op> and demands red tests.

    python scripts/check_break.py edge

The broken build, without the CUDA part, lies under build/break-<op> with a copy of the tests and never touches the
build in place. Every test of values and of gradients must fail an assertion in half of its cases, as 1e-3 is
less than half precision rounds large values by; but for those that STAY_GREEN names with the reason. What checks
arguments must stay green, or the tests were red for another reason.
"""

import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MUST_FAIL = {"values": ("test_matches_reference", "test_known_values"), "gradients": ("test_grad",)}
MUST_PASS = "test_errors"
TEST_FILES = {"tune": "tune_cpu"}
# Op family -> test -> why the broken kernels, which are wrong in one output and one gradient, cannot turn it red.
STAY_GREEN = {
    "bands": {
        "test_grad_of_a_tensor_that_outlived_a_transform": "compares two calls of the broken op",
        "test_grad_where_pixels_are_not_finite": "asks whether gradients are finite",
    },
    "bdh": {
        "test_grad_of_float32_tables_is_not_rounded_to_halves": "compares the broken op with itself in other dtypes"
    },
    "box": {"test_matches_reference_where_running_sums_would_drift": "means of 1e4 are rounded by as much"},
    "dropout": {"test_known_values_of_philox": "tests the generator of camox_ops.reference"},
    "edge": {"test_grad_of_strided_gradients": "compares the broken op with itself in another layout"},
    "gemm": {
        "test_grad": "float64, which PyTorch multiplies",
        "test_matches_reference": "float32, which PyTorch multiplies",
    },
    "moe": {
        "test_known_values_of_aux_losses": "moe_aux_loss is not broken",
        "test_matches_reference_aux": "moe_aux_loss is not broken",
        "test_grad_matches_reference_aux": "moe_aux_loss is not broken",
        "test_matches_reference_route": "moe_route is not broken",
        "test_matches_reference_routing": "moe_routing is not broken",
        "test_grad_matches_reference_route": "moe_route is not broken",
    },
    "norm2d": {"test_grad_where_some_need_none": "compares two calls of the broken op"},
    "rope": {
        "test_grad_of_tables_of_many_tokens": "the tables' gradients are not broken",
        "test_grad_of_tables_through_vmap": "compares two calls of the broken op",
    },
}
WRONG_NUMBERS = ("AssertionError", "GradcheckError")
# Op family -> /proc/cpuinfo's word for what a CPU must have to run any kernel that its tests call.
NEEDS = {"gemm": "avx512_bf16"}


def build(op: str) -> Path:
    folder = ROOT / "build" / f"break-{op}"
    shutil.rmtree(folder, ignore_errors=True)
    environment = {**os.environ, "CAMOX_BREAK": op, "CAMOX_NVCC": "none"}
    command = [sys.executable, "setup.py", "-q", "build", "--build-lib", str(folder)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def state_of(case: ElementTree.Element) -> str:
    """ "passed", "skipped", "failed" where numbers were found wrong, else "error: why"."""
    for child in case:
        if child.tag == "skipped":
            return "skipped"
        said = (child.get("message") or "") + (child.text or "")
        if child.tag == "failure" and (said.startswith("assert ") or any(name in said for name in WRONG_NUMBERS)):
            return "failed"
        if child.tag in ("failure", "error"):
            return f"error: {child.get('message')}"
    return "passed"


def outcomes(folder: Path, op: str) -> dict[str, list[str]]:
    """{test's name: the state of each of its cases}"""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    which = "import camox_ops as cx; print(cx.__file__, cx.build_info()['broken_op'])"
    found = subprocess.run([sys.executable, "-c", which], cwd=folder, env=environment, capture_output=True, text=True)
    if found.stdout.split() != [str(folder / "camox_ops" / "__init__.py"), op]:
        sys.exit(f"break {op}: the broken build is not what Python imports: {found.stdout or found.stderr}")
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "--tb=no", "-p", "no:cacheprovider"]
    chosen = " or ".join([*(prefix for prefixes in MUST_FAIL.values() for prefix in prefixes), MUST_PASS])
    command += ["-r", "N", "-k", chosen, f"--junitxml={report}", f"tests/test_{TEST_FILES.get(op, op)}.py"]
    subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL)
    if not report.exists():
        sys.exit(f"break {op}: pytest wrote no report")
    results = {}
    for case in ElementTree.parse(report).iter("testcase"):
        results.setdefault(case.get("name").split("[")[0], []).append(state_of(case))
    return results


def noticed(states: list[str]) -> bool:
    """Whether a test's cases, apart from those that were skipped, tell a broken kernel from a right one."""
    ran = [state for state in states if state != "skipped"]
    return 2 * ran.count("failed") >= len(ran)


def faults(results: dict[str, list[str]], green: dict[str, str]) -> list[str]:
    """What is wrong with how the tests took the broken kernel. green: the tests that cannot notice it, and why."""
    found = []
    for what, prefixes in MUST_FAIL.items():
        tests = {name: states for name, states in results.items() if name.startswith(prefixes)}
        if not any("failed" in states for states in tests.values()):
            found.append(f"no test of {what} failed ({len(tests)} ran: {', '.join(prefixes)}*)")
        for name, states in sorted(tests.items()):
            if name not in green and not noticed(states):
                found.append(f"{name} did not notice: {states.count('failed')} of {len(states)} cases failed")
    for name in green:
        if name not in results:
            found.append(f"STAY_GREEN names {name}, which did not run")
        elif noticed(results[name]):
            found.append(f"STAY_GREEN names {name}, which failed: it needs no exception")
    checks = [state for name, cases in results.items() if name.startswith(MUST_PASS) for state in cases]
    if not checks or set(checks) != {"passed"}:
        found.append(f"the tests of error messages must pass, got {checks or 'none'}")
    return found


def main(op: str) -> int:
    if op in NEEDS and NEEDS[op] not in Path("/proc/cpuinfo").read_text().split():
        print(f"break {op}: not checked, its kernels need {NEEDS[op]}, which this CPU does not have")
        return 0
    results = outcomes(build(op), op)
    for name, states in sorted(results.items()):
        others = {state for state in states if state not in ("passed", "failed")}
        counts = f"{states.count('passed'):4} passed {states.count('failed'):4} failed of {len(states)}"
        print(f"  {name:40} {counts}", *sorted(others), sep="  ")
    found = faults(results, STAY_GREEN.get(op, {}))
    for fault in found:
        print(f"break {op}: {fault}", file=sys.stderr)
    failed = sum(states.count("failed") for states in results.values())
    if not found:
        print(f"break {op}: {failed} tests fail, as they must")
    return 1 if found else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
