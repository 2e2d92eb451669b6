"""Proves an installed camox_ops on the GPU of this machine: scripts/gpu_check.sh installs the wheel and runs this.

    gpu_check.py all --mode quick --out DIR     every part in a process of its own, one record, the tables
    gpu_check.py correctness --mode quick --section FILE --seconds 60     one part

Parts: environment, correctness (every op against float64), graphs (capture and replay), bench, tests (the suite with
CAMOX_TEST_DEVICE=cuda), memcheck, racecheck, initcheck (compute-sanitizer on a short run). Ops come from
camox_ops._selftest.OPS, benchmarks from benchmarks/bench_<op>.py: a new op needs no line here.

A run adds to the record that lies in --out where commit, wheel and machine are the same: each part gets the record so
far with --known, replaces what it measures again and judges the whole. A part that crashes, hangs or loses the device
notes what it was at as failed and is started again for the rest.
"""

import argparse
import contextlib
import datetime
import functools
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from copy import deepcopy
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # behind the installed wheel, which is what is tested

from scripts import gpu_record  # noqa: E402

OLDEST_TORCH = (2, 10)
# Parts that time nothing run side by side: most of their time is the host's, which has cores for all of them.
STAGES = (("environment",), ("correctness", "graphs", "tests", *gpu_record.SANITIZERS), ("bench",))
# Seconds of each part; what a stage leaves over goes to the next one, and all together bound the whole run. The
# environment waits for the first start of CUDA, which takes most of a minute on some machines.
SECONDS = {
    "quick": dict(zip(gpu_record.PARTS, (120, 180, 180, 250, 180, 180, 180, 180), strict=True)),
    "full": dict(zip(gpu_record.PARTS, (120, 1200, 1200, 1500, 1200, 1200, 1200, 1200), strict=True)),
}
SECONDS["rehearsal"] = SECONDS["full"]
GRACE_S = 5  # a part stops by itself this long before it is killed
# So long one case may take on a GPU before it counts as hung; a benchmark's case with its compilations takes longest.
STALLED_S = {"correctness": 120, "graphs": 120, "bench": 900}
RESTARTED = tuple(STALLED_S)
WITH_OPS = (*RESTARTED, *gpu_record.SANITIZERS)  # the parts that --ops chooses from
DTYPES = ("float32", "bfloat16", "float16")
LAYOUTS = ("contiguous", "channels_last", "strided")
# What training uses: rows and channels of whole 16-byte accesses; heads as rows, and as an image's columns.
WIDE = [(2, 16, 24, 32), (1, 8, 9, 264)]
HEADS = (1, 2, 64, 32)
HEADS_LAYOUTS = ("contiguous", "positions")
# Beside those, odd sizes around vectors, tiles and warps; more planes and more rows than a grid has blocks in y.
SHAPES = {
    "rehearsal": [(2, 3, 5, 7), HEADS, (1, 2, 1, 1)],
    "quick": [
        *((2, 3, 5, 7), *WIDE, HEADS, (1, 2, 1, 1), (1, 1, 1, 9), (1, 1, 9, 1), (1, 3, 4, 17), (2, 131, 3, 4)),
        *((1, 129, 5, 17), (1, 2, 131, 33), (1, 1, 3, 513), (70001, 1, 2, 3), (1, 1, 70001, 3)),
    ],
}
SHAPES["full"] = [*SHAPES["quick"], (1, 70001, 1, 2), (3, 5, 1, 2051), (4, 584, 9, 9), (2, 80, 88, 88)]
SANITIZER_SHAPES = [(2, 3, 5, 7), (1, 40, 9, 33)]
CRASHED = "the process did not survive it"
COMPILER_FOUND = "found"
OUT_OF_TIME = "killed when its time was up"
LOST = 3  # exit status of a part that cannot use its device any more
WRONG_CALLS = "sanitized calls that are wrong:"
SANITIZED, SANITIZED_ALL = "sanitized calls:", "sanitized run ended"
SANITIZER_GRACE_S = 15  # that a sanitizer may need for its summary
FOREIGN_KERNEL = re.compile(r"^(?:void )?(?:at|cub|thrust|c10|cudnn|cutlass|nccl)(?:::|\d|_)|cudnn|cublas|gemm")


class Section:
    """What one part found, written after every step so that a part that is killed still tells what it did.

    known: the record so far; ops: only these; missing: only what the record lacks."""

    def __init__(self, path: Path, seconds: float, device: str, mode: str, known=None, ops=None, missing=False):
        self.path, self.device, self.mode = path, device, mode
        self.known, self.ops, self.missing = known or {}, ops, missing
        self.deadline = time.monotonic() + seconds
        self.data, self.status, self.message, self.now = {}, "incomplete", "was killed or crashed", None
        self.save()

    def take(self, name: str):
        """The part's section of the record so far, to be added to."""
        self.data[name] = deepcopy(self.known.get(name, gpu_record.EMPTY[name]))
        return self.data[name]

    def begin(self, now) -> None:
        """Notes what is tried next, which is to blame if the process does not survive it."""
        self.now = now
        self.save()

    def save(self) -> None:
        scratch = self.path.with_suffix(".tmp")
        state = {"status": self.status, "message": self.message, "now": self.now, "data": self.data}
        scratch.write_text(json.dumps(state))
        os.replace(scratch, self.path)

    def finish(self, status: str, message: str = "") -> None:
        self.status, self.message, self.now = status, message, None
        self.save()

    def time_is_up(self) -> bool:
        return time.monotonic() > self.deadline

    def chosen(self, op) -> bool:
        return not self.ops or op.name in self.ops or op.name.split()[0] in self.ops


def environment(section: Section) -> None:
    """Facts of the machine; failed where the package cannot run on it."""
    import platform

    import torch

    section.data["environment"] = facts = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda_of_torch": str(torch.version.cuda),
        "system": platform.platform(),
        "cpu_cores": str(len(os.sched_getaffinity(0))),
    }
    import camox_ops
    from benchmarks import device as gpu_device
    from camox_ops import _cuda, _selftest

    section.data["version"] = camox_ops.__version__
    facts |= {"camox_ops": camox_ops.__version__, "file": camox_ops.__file__, "cuda_part": _cuda.status()}
    for package in ("triton", "timm", "kornia"):
        facts[package] = version_of(package)
    facts["c_compiler"] = gpu_device.why_no_compiler() or COMPILER_FOUND
    if Path(_selftest.__file__).read_bytes() != (ROOT / "camox_ops" / "_selftest.py").read_bytes():
        return section.finish("failed", "the wheel is of another commit than this tree: their self-tests differ")
    if section.device == "cpu":
        return section.finish("passed", "a rehearsal on the CPU")
    if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_TORCH:
        return section.finish("failed", f"torch {torch.__version__} is older than 2.10")
    if not torch.cuda.is_available():
        return section.finish("failed", f"torch {torch.__version__} finds no CUDA device")
    properties = torch.cuda.get_device_properties(0)
    facts |= {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": str(properties.multi_processor_count),
        "memory_bytes": str(properties.total_memory),
        "l2_bytes": str(getattr(properties, "L2_cache_size", 0)),
        "nvidia_smi": nvidia_smi("driver_version,pstate,clocks.sm,clocks.mem,clocks.max.sm,power.limit"),
        "driver": nvidia_smi("driver_version"),
    }
    reason = _cuda.unusable(0)
    if reason:
        return section.finish("failed", reason)
    return section.finish("passed")


def version_of(package: str) -> str:
    import importlib.metadata

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def nvidia_smi(fields: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown: {error}"
    return done.stdout.strip() or f"unknown: {done.stderr.strip()}"


def ops_here(device: str) -> tuple[list, list[str]]:
    """The self-test's ops that have kernels for the device, and the names of those without and of absent ones."""
    import torch

    from camox_ops import _selftest

    def has_kernel(op) -> bool:
        name = f"camox_ops::{op.name.split()[0]}"
        return torch._C._dispatch_has_kernel_for_dispatch_key(name, device.upper())

    usable = [op for op in _selftest.OPS if has_kernel(op)]
    names = {op.name.split()[0] for op in usable}
    wanted = dict.fromkeys([*gpu_record.GROUPS.values(), *(op.name.split()[0] for op in _selftest.OPS)])
    absent = [name for name in wanted if name not in names]
    for name in absent:
        print(f"skipped: {name}: not in this build")
    return usable, absent


def exact(inputs: tuple, offset: float) -> tuple:
    """Images rounded to multiples of 1/64 below 4: every dtype holds them, sums are exact, so is every sign."""
    return tuple(t if t.dim() != 4 else ((t * 64).round() / 64).clamp(-3.75, 3.75) + offset for t in inputs)


def layouts_of(op, shape: tuple[int, ...]) -> tuple[str, ...]:
    """Memory layouts to try; none where the shape is not for the op."""
    if shape == HEADS:
        return HEADS_LAYOUTS if op.heads else ()
    return LAYOUTS if min(shape[2:]) >= op.least_side else ()


def text_of(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def check_all(section: Section, name: str, shapes: list, cases_of: Callable) -> None:
    """Fills the section `name` of the record, op by op and shape by shape.

    cases_of(op, shape) -> the names of cases and functions that return what is wrong, or ""."""
    found = section.take(name)
    ops, found["not_in_this_build"] = ops_here(section.device)
    pairs = [(op, shape) for shape in shapes for op in ops if layouts_of(op, shape)]
    for op, shape in pairs:
        text = text_of(shape)
        measured = text in found["cases"].get(op.name, {})
        if not section.chosen(op) or (measured and section.missing):
            continue
        if section.time_is_up():
            break
        # An earlier result goes away at once: what is cut off is not measured, whatever it was before.
        found["cases"].get(op.name, {}).pop(text, None)
        found["failures"] = [one for one in found["failures"] if (one["op"], one["shape"]) != (op.name, text)]
        cases, cut_off = 0, False
        for case, check in cases_of(op, shape, found["worst"]):
            cut_off = section.time_is_up()
            if cut_off:
                break
            section.begin([op.name, text, case])
            cases += 1
            message = check()
            if message:
                found["failures"].append({"op": op.name, "shape": text, "case": case, "message": message})
                print(f"FAILED {op.name} {text} {case}: {message}", flush=True)
        if not cut_off:
            found["cases"].setdefault(op.name, {})[text] = cases
        section.begin(None)
    left = [(op, shape) for op, shape in pairs if text_of(shape) not in found["cases"].get(op.name, {})]
    section.finish(*verdict(found, len(left), len(pairs)))


def verdict(found: dict, left: int, pairs: int) -> tuple[str, str]:
    """(status, message) of a section of the record; left: pairs of op and shape that no run has measured."""
    cases = sum(sum(by_shape.values()) for by_shape in found["cases"].values())
    missing = f"; {left} of {pairs} pairs of op and shape are not measured yet" if left else ""
    if found["failures"]:
        return "failed", f"{len(found['failures'])} failures, {cases} cases{missing}"
    if left:
        return "incomplete", f"{cases} cases passed{missing}"
    return ("passed", f"{cases} cases") if cases else ("failed", "there was nothing to check")


def guarded(device, check: Callable) -> str:
    """What the check says or raises; ContextLost where the device cannot be used after it."""
    try:
        return check()
    except Exception as error:
        message = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        device.check_alive(message)
        return message


def correctness(section: Section) -> None:
    """Outputs and gradients of every op against the float64 reference on the CPU, under the tolerance rule."""
    import torch

    from benchmarks.device import open_device

    device = open_device(section.device)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills fresh memory with NaN

    def cases_of(op, shape, worst):
        for name in DTYPES:
            for offset in (0.0, 1e4) if name == "float32" and op.offset else (0.0,):
                label = f"{name} mean 1e4" if offset else name
                numbers = {}  # of the CPU, which computes them in the first layout's case
                for layout in layouts_of(op, shape):
                    arguments = (op, shape, getattr(torch, name), offset, layout, device, numbers, worst)
                    yield f"{label} {layout}", functools.partial(guarded, device, lambda a=arguments: check_op(*a))

    check_all(section, "correctness", SHAPES[section.mode], cases_of)
    device.synchronize()


def check_op(op, shape, dtype, offset: float, layout: str, device, numbers: dict, worst: dict) -> str:
    """What is wrong with one op, shape, dtype and layout; the CPU computes what is true and what is allowed."""
    from camox_ops import _selftest

    if not numbers:
        inputs = tuple(t.to(dtype) for t in exact(op.inputs(shape, dtype), offset))
        try:
            truth = _selftest.run(op.reference, tuple(t.double() for t in inputs), None)
            numbers |= {"inputs": inputs, "truth": truth, "same": _selftest.run(op.reference, inputs, None)}
        except Exception as error:
            return f"the reference on the CPU: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    on_device = tuple(_selftest.arranged(t.to(device.torch_device), layout) for t in numbers["inputs"])
    ours = _selftest.run(op.ours, on_device, None)
    problems = []
    for what, mine, theirs, true in zip(("outputs", "gradients"), ours, numbers["same"], numbers["truth"], strict=True):
        error, allowed = _selftest.worst(mine, theirs, true, op.terms)
        if not error <= allowed and what == "gradients":
            theirs = farther_of_two_orders(op, numbers)
            error, allowed = _selftest.worst(mine, theirs, true, op.terms)
        if not error <= allowed:
            problems.append(f"{what}: error {error:.3e}, allowed {allowed:.3e}")
        elif allowed:
            key = f"{op.name} {what} {str(dtype).removeprefix('torch.')}"
            worst[key] = max(worst.get(key, 0.0), float(f"{error / allowed:.3g}"))
    slack = op.half_slack if device.kind == "cuda" else _selftest.FLOAT32_SLACK
    if dtype.itemsize == 2 and slack is not None:
        single = _selftest.run(op.ours, tuple(t.float() for t in on_device), None)[0]
        problems += more_than_one_rounding(ours[0], single, slack)
    return "; ".join(problems)


def farther_of_two_orders(op, numbers: dict) -> list:
    """PyTorch's gradients in the same dtype, each tensor as it is or with rows of pixels from the last to the first,
    whichever is farther from the truth: how far one sum of 200,000 terms is off is chance, its own as well as ours.
    As they are where the op has another result in that order."""
    from camox_ops import _selftest

    def reversed_rows(tensors):
        return tuple(t.flip(2) if t.dim() == 4 else t for t in tensors)

    def gradients(inputs):
        upstream = tuple(_selftest.weights(output) for output in numbers["truth"][0])
        return reversed_rows(_selftest.run(op.reference, reversed_rows(inputs), reversed_rows(upstream))[1])

    def error(gradient, true):
        return (gradient.double() - true).abs().max().item() if true.numel() else 0.0

    same, truth = numbers["same"][1], numbers["truth"][1]
    other_truth = gradients(tuple(t.double() for t in numbers["inputs"]))
    if any(
        error(g, t) > 1e-9 * (1.0 + t.abs().max().item()) for g, t in zip(other_truth, truth, strict=True) if t.numel()
    ):
        return same
    both = zip(same, gradients(numbers["inputs"]), truth, strict=True)
    return [g if error(g, t) >= error(other, t) else other for g, other, t in both]


def more_than_one_rounding(half: list, single: list, slack: float) -> list[str]:
    """Half-precision outputs lie within one rounding of our own float32 result, and slack times its largest element."""
    import torch

    found = []
    for low, high in zip(half, single, strict=True):
        info, high = torch.finfo(low.dtype), high.double()
        difference = (low.double() - high.clamp(-info.max, info.max)).abs()
        allowed = info.eps * high.abs() + info.smallest_normal * info.eps
        allowed += slack * high.abs().max()
        if not bool(torch.all(difference <= allowed)):
            found.append(f"more than one rounding from float32, by {(difference - allowed).max().item():.3e}")
    return found


def graphs(section: Section) -> None:
    """Every op captured, forward and with its backward pass, replayed on new inputs: the bits of a plain call."""
    import torch

    from benchmarks.device import open_device
    from camox_ops import _selftest

    device = open_device(section.device)

    def cases_of(op, shape, _):
        for name in DTYPES:
            for layout in layouts_of(op, shape)[:2]:
                # At the wide shapes with the backward pass alone: a capture takes a tenth of a second.
                for backward in (False, True) if shape == _selftest.CHECK_SHAPE else (True,):
                    arguments = (op, shape, getattr(torch, name), layout, backward, device)
                    label = f"{name} {layout} {'forward_backward' if backward else 'forward'}"
                    yield label, functools.partial(guarded, device, lambda a=arguments: replay_differs(*a))

    check_all(section, "graphs", [_selftest.CHECK_SHAPE, *WIDE, HEADS], cases_of)


def replay_differs(op, shape, dtype, layout: str, backward: bool, device) -> str:
    """What is wrong with the replays of a captured op, or an empty string."""
    import torch

    from benchmarks.device import tensors
    from camox_ops import _selftest

    given = op.inputs(shape, dtype)
    static = [_selftest.arranged(t.to(device.torch_device), layout).requires_grad_(backward) for t in given]
    with torch.no_grad():
        upstream = [_selftest.weights(y).to(y.dtype) for y in tensors(op.ours(*static))]

    def step(*inputs):
        outputs = tensors(op.ours(*inputs))
        return [*outputs, *(torch.autograd.grad(outputs, inputs, upstream) if backward else ())]

    graph, returned = device.capture(lambda: lambda: step(*static))
    for turn in (1, 2):
        with torch.no_grad():
            for tensor, values in zip(static, given, strict=True):
                tensor.copy_(values.flip(-1) * (1 + turn / 4))
        for tensor in returned:
            tensor.detach().fill_(float("nan"))
        graph.replay()
        device.synchronize()
        fresh = [_selftest.arranged(t.detach(), layout).requires_grad_(backward) for t in static]
        for index, (one, other) in enumerate(zip(returned, step(*fresh), strict=True)):
            if not torch.equal(one, other):
                return f"replay {turn}: result {index} differs from a plain call"
    return ""


def bench(section: Section) -> None:
    import torch

    from benchmarks.cuda import PLANS
    from benchmarks.device import open_device
    from benchmarks.record import WRONG
    from scripts import gpu_bench

    device = open_device(section.device)
    torch.manual_seed(0)
    found = section.take("bench")
    plan, arguments = PLANS[section.mode], (section.deadline, found, section.ops, section.missing)
    printed = {entry["key"] for entry in found["entries"]}
    for found in gpu_bench.run(device, plan, *arguments, section.begin):
        section.data["bench"] = found
        section.begin(None)
        for entry in found["entries"]:
            if entry["key"] not in printed:
                ours = {d: m["time_us"]["camox"]["median"] for d, m in entry["directions"].items()}
                print(f"{entry['key']}: {ours} us", flush=True)
        printed = {entry["key"] for entry in found["entries"]}
    cases, reasons = f"{len(found['entries'])} cases", found["not_measured"]
    wrong = [f"{key}: {reason}" for key, reason in reasons.items() if WRONG in reason or CRASHED in reason]
    left = [key for key, reason in reasons.items() if reason in gpu_record.LATER]
    if wrong:
        return section.finish("failed", f"{cases}; {'; '.join(wrong)[:300]}")
    if left:
        return section.finish("incomplete", f"{cases}; {len(left)} are not measured yet")
    if not found["entries"]:
        return section.finish("failed", "; ".join(sorted(set(reasons.values())))[:300] or "no benchmark")
    others = f"; {len(reasons)} could not be measured" if reasons else ""
    return section.finish("passed", cases + others)


def test_files(mode: str) -> list[str]:
    """The contract of all ops and each op's own tests; with --full all files whose tests can run on a GPU."""
    if mode == "full":
        shared = r"helpers import (?:\([^)]*|.*)\b(?:DEVICE|random_image)|contract_cases"
        shared += "|dropout_inputs|image_op|norm2d_truth"
        pattern = re.compile(rf"^from (?:{shared})\b", re.M)
        return [str(path) for path in sorted((ROOT / "tests").glob("test_*.py")) if pattern.search(path.read_text())]
    ops = [path.parent.name for path in sorted((ROOT / "csrc").glob("*/*_cuda.cu"))]
    files = [ROOT / "tests" / f"test_{name}.py" for name in ("cuda_part", "contract", *ops)]
    return [str(path) for path in files if path.exists()]


def tests(section: Section, files: list[str] | None = None) -> None:
    """The suite against the installed wheel, from a folder without a camox_ops of its own.

    Each file in a process of its own: an error that costs a process its device costs one file. The tests of the CUDA
    emulator, whose functions have the names of the driver's, are in tests/cuda and never beside real CUDA calls."""
    found = section.take("tests")
    if importlib.util.find_spec("pytest") is None or importlib.util.find_spec("hypothesis") is None:
        return section.finish("unavailable", "pytest and hypothesis are not installed")
    folder = section.path.parent / "tests-run"
    folder.mkdir(exist_ok=True)
    wanted = {Path(file).name: file for file in files or test_files(section.mode)}
    complete = {name for name, one in found.items() if section.missing and one["collected"] and not one["not_run"]}
    waiting, running = [name for name in wanted if name not in complete], {}
    at_once = max(1, min(8, len(os.sched_getaffinity(0)) // 2))
    while waiting or running:
        while waiting and len(running) < at_once and not section.time_is_up():
            name = waiting.pop(0)
            running[name] = start_tests(section, folder, wanted[name])
        if not running:
            break
        time.sleep(0.1)
        for name, process in list(running.items()):
            late = section.time_is_up()
            if late:
                process.kill()
                process.wait()
            if process.poll() is not None:
                del running[name]
                found[name] = count_tests(folder / f"{name}.lines", None if late else process.returncode)
                log = (folder / f"{name}.log").read_text()
                print(f"{name}: {' '.join((log.strip().splitlines() or ['it said nothing'])[-1].split())}", flush=True)
                if not found[name]["collected"] and not late and process.returncode != 5:
                    found[name]["failed"] = 1
                    message = f"no test was collected: {' '.join(log.split())[-300:]}"
                    found[name]["failures"] = [{"case": name, "message": message}]
                section.save()
    total = {key: sum(one[key] for one in found.values()) for key in ("passed", "failed", "skipped", "not_run")}
    counts = f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped"
    left = [
        name for name in wanted if name not in found or (not found[name]["collected"] and not found[name]["failed"])
    ]
    unfinished = f", {total['not_run']} tests and {len(left)} files not run yet" if left or total["not_run"] else ""
    if total["failed"]:
        return section.finish("failed", counts + unfinished)
    return section.finish("incomplete" if unfinished else "passed", counts + unfinished)


def start_tests(section: Section, folder: Path, file: str) -> subprocess.Popen:
    """pytest on one file; its lines and its output lie in `folder` under the file's name."""
    options = ["-q", "--no-header", "-m", "not slow", "-p", "no:cacheprovider", "-p", "gpu_pytest", "--tb=short"]
    if section.known.get("environment", {}).get("c_compiler", COMPILER_FOUND) != COMPILER_FOUND:
        options += ["-k", "not compile"]
    command = [sys.executable, "-m", "pytest", *options, "--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml")]
    name = Path(file).name
    lines = folder / f"{name}.lines"
    lines.write_text("")
    environ = {
        **os.environ,
        "CAMOX_TEST_DEVICE": section.device,
        "CAMOX_TESTS_LINES": str(lines),
        "CAMOX_TESTS_DEADLINE": str(time.time() + section.deadline - time.monotonic() - 2 * GRACE_S),
        "PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT / "scripts")))),
    }
    with (folder / f"{name}.log").open("w") as out:
        return subprocess.Popen([*command, file], cwd=folder, env=environ, stdout=out, stderr=subprocess.STDOUT)


def count_tests(lines: Path, code: int | None) -> dict:
    """What the lines of one file's tests say; code: pytest's exit status, None where it was killed in time."""
    outcomes, collected = {}, 0
    for line in map(json.loads, lines.read_text().splitlines()):
        if "collected" in line:
            collected = line["collected"]
        elif outcomes.get(line["test"], (None,))[0] != "failed":
            outcomes[line["test"]] = (line["outcome"], line["text"])
    found = {name: sum(outcome == name for outcome, _ in outcomes.values()) for name in ("passed", "failed", "skipped")}
    bad = [(test, text) for test, (outcome, text) in outcomes.items() if outcome == "failed"]
    failures = [{"case": test, "message": " ".join(text.split())[-300:]} for test, text in bad[:50]]
    # 0: all passed, 1: some failed, 2: stopped when time was up, 5: nothing was chosen
    if code not in (0, 1, 2, 5, None):
        found["failed"] += 1
        failures.append({"case": lines.stem, "message": f"pytest's exit status {code}"})
    return {"collected": collected, **found, "not_run": collected - len(outcomes), "failures": failures}


def sanitized_run(device_kind: str, ops: list[str], seconds: float) -> int:
    """What runs under compute-sanitizer: every op once in each layout, forward and backward; a line for each op."""
    import torch

    from benchmarks.device import open_device

    deadline = time.monotonic() + seconds
    device = open_device(device_kind)
    for op in ops_here(device_kind)[0]:
        if op.name not in ops or time.monotonic() > deadline:
            continue
        calls, wrong = 0, []
        for shape in (*SANITIZER_SHAPES, *WIDE, HEADS):
            for dtype in (torch.float32, torch.bfloat16):
                for layout in layouts_of(op, shape):
                    inputs = tuple(t.to(device.torch_device) for t in op.inputs(shape, dtype))
                    message = guarded(device, lambda a=(op, inputs, layout): not_finite(*a))
                    wrong += [f"{text_of(shape)} {dtype} {layout}: {message}"] if message else []
                    calls += 1
        device.synchronize()
        if wrong:
            print(WRONG_CALLS, op.name, "; ".join(wrong), flush=True)
        print(SANITIZED, calls, op.name, flush=True)
    print(SANITIZED_ALL, flush=True)
    return 0


def not_finite(op, inputs, layout: str) -> str:
    from camox_ops import _selftest

    results = _selftest.run(op.ours, tuple(_selftest.arranged(t, layout) for t in inputs), None)
    right = all(bool(t.cpu().isfinite().all()) for group in results for t in group)
    return "" if right else "a result is not finite"


def find_sanitizer() -> str | None:
    """compute-sanitizer on PATH, of a toolkit, or of the PyPI package nvidia-cuda-sanitizer-api."""
    folders = [os.environ.get("PATH", ""), os.path.join(os.environ.get("CUDA_HOME", "none"), "bin")]
    for pattern in ("usr/local/cuda*/bin", "usr/local/cuda*/compute-sanitizer", "opt/nvidia/compute-sanitizer*"):
        folders += sorted(map(str, Path("/").glob(pattern)), reverse=True)
    for site in dict.fromkeys(filter(None, sys.path)):
        folders += sorted(
            str(found.parent) for found in Path(site).glob("nvidia/**/compute-sanitizer") if found.is_file()
        )
    return shutil.which("compute-sanitizer", path=os.pathsep.join(folders))


def sanitize(section: Section, tool: str) -> None:
    """One tool over the ops; a section of the record is a list of runs, each with the ops it came to the end of."""
    runs = section.take("sanitizers").get(tool, [])
    section.data["sanitizers"] = {tool: runs} if runs else {}
    program = find_sanitizer()
    if program is None:
        return section.finish(
            "unavailable", "compute-sanitizer was not found: on PATH, under CUDA_HOME or as a package"
        )
    usable = ops_here(section.device)[0]
    known = {name for run in runs for name in run["ops"]}
    names = [op.name for op in usable if section.chosen(op) and not (section.missing and op.name in known)]
    log = section.path.with_suffix(".log")
    log.unlink(missing_ok=True)
    options = ["--tool", tool, "--log-file", str(log), "--print-limit", "50", "--launch-timeout", "60"]
    if tool == "memcheck":
        # torch probes for drivers' functions; the launches of our own kernels are checked where they are made.
        options += ["--report-api-errors", "no"]
    seconds = max(1.0, section.deadline - time.monotonic())
    child = [sys.executable, str(Path(__file__).resolve()), "sanitized-run", "--device", section.device]
    child += ["--seconds", str(max(1.0, seconds - SANITIZER_GRACE_S)), "--ops", ",".join(names)]
    # Each tensor an allocation of its own, so that reads past its end are seen.
    environ = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    status, message, found = "passed", "", None
    if names:
        try:
            arguments = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            process = subprocess.Popen([program, *options, *child], env=environ, start_new_session=True, **arguments)
        except OSError as error:
            return section.finish("unavailable", f"{program}: {error}")
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            output = process.communicate()[0] + f"\nthe run did not finish in {seconds:.0f} s"
        status, message, found = judge_sanitizer(tool, output, log.read_text() if log.exists() else "")
    if found and (found["ops"] or found["errors"]):
        for run in runs:
            run["ops"] = {name: calls for name, calls in run["ops"].items() if name not in found["ops"]}
        runs = [run for run in runs if run["ops"]] + [found]
        section.data["sanitizers"] = {tool: runs}
    known = {name for run in runs for name in run["ops"]}
    left = [op.name for op in usable if op.name not in known]
    if status == "passed" and any(run["errors"] for run in runs):
        status, message = "failed", next(run["findings"][0] for run in runs if run["errors"])
    elif status == "passed":
        calls = sum(sum(run["ops"].values()) for run in runs)
        others = sum(run["foreign_errors"] for run in runs)
        message = f"{calls} calls" + (f", {others} errors in others' kernels" if others else "")
    if left and status in ("passed", "incomplete"):
        status, message = "incomplete", f"{message}; {len(left)} ops are not run yet"
    return section.finish(status, message)


def judge_sanitizer(tool: str, output: str, log: str) -> tuple[str, str, dict]:
    """(status, message, section) from what the sanitized run printed and what the sanitizer wrote.

    Passed only where the run came to its end and the sanitizer's own summary says that it found nothing of ours."""
    done = {name: int(calls) for calls, name in re.findall(rf"^{SANITIZED} (\d+) (.+)$", output, re.MULTILINE)}
    total = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)", log)
    ours, foreign = re.findall(rf"^{WRONG_CALLS} .+$", output, re.MULTILINE), 0
    for block in re.split(r"^========= (?=\S)", log, flags=re.MULTILINE):
        kernels = re.findall(r"\bat ((?:void )?[\w:]+)[<(+]", block)
        if not kernels:
            continue
        if all(FOREIGN_KERNEL.search(kernel) for kernel in kernels):
            foreign += 1
        else:
            ours.append(" ".join(block.replace("=========", " ").split())[:300])
    unread = int(total.group(1)) - foreign if total else 0
    if not ours and unread > 0:
        ours.append(f"the summary counts {total.group(1)} errors, see the log")
    found = {"ops": done, "errors": len(ours), "foreign_errors": foreign, "findings": ours[:10]}
    if ours:
        return "failed", f"{len(ours)} findings, the first: {ours[0]}", found
    if SANITIZED_ALL not in output or total is None:
        text = [line.strip("= ").strip() for line in (log + "\n" + output).splitlines()]
        said = "; ".join(dict.fromkeys(line for line in text if line and line != "COMPUTE-SANITIZER"))
        # Without the summary nothing is known of the ops that were run; that time was up is not for want of a tool.
        status = "incomplete" if done and SANITIZED_ALL not in output else "unavailable"
        return status, f"{tool} did not complete: {said[-400:] or 'it said nothing'}", {**found, "ops": {}}
    others = f", {foreign} errors in others' kernels" if foreign else ""
    return "passed", f"{sum(done.values())} calls{others}", found


RUNNERS: dict[str, Callable] = {
    "environment": environment,
    "correctness": correctness,
    "graphs": graphs,
    "bench": bench,
    "tests": tests,
    **{tool: lambda section, tool=tool: sanitize(section, tool) for tool in gpu_record.SANITIZERS},
}


def run_part(name: str, options, seconds: float, folder: Path, known: dict, missing: bool) -> tuple[dict, dict]:
    """(status of the record, data) of one part, in a process that is killed when its time is up.

    One that did not survive a case is started again for what is missing, the case noted as failed."""
    begin, data, losses = time.monotonic(), {}, []
    while True:
        path = folder / f"{name}.json"
        path.unlink(missing_ok=True)
        known_path = folder / f"{name}.known"
        known_path.write_text(json.dumps({**known, **data}))
        left = seconds - (time.monotonic() - begin)
        command = [sys.executable, str(Path(__file__).resolve()), name, "--section", str(path)]
        command += ["--device", options.device, "--mode", options.mode, "--seconds", str(max(1.0, left - GRACE_S))]
        command += ["--known", str(known_path), *(["--missing"] if missing else [])]
        command += ["--ops", ",".join(options.ops)] if options.ops else []
        for file in options.tests or () if name == "tests" else ():
            command += ["--tests", file]
        how = watched(command, left, path, STALLED_S.get(name) if options.device == "cuda" else None)
        state = json.loads(path.read_text()) if path.exists() else {}
        found = {"status": "incomplete", "message": "", "now": None, "data": {}} | state
        data |= found["data"]
        if not how or found["now"] is None or how == OUT_OF_TIME or name not in RESTARTED:
            break
        reason = found["message"] if found["message"] not in ("", "was killed or crashed") else how
        note_loss(name, data, found["now"], f"{CRASHED}: {reason}")
        losses.append(f"{' '.join(found['now']) if name != 'bench' else found['now']}: {reason}")
        print(f"FAILED {losses[-1]}; {name} goes on without it", flush=True)
        missing = True
        if seconds - (time.monotonic() - begin) < 2 * GRACE_S:
            found |= {"status": "failed", "message": "time was up"}
            break
    if how and found["status"] == "incomplete":
        # Time that is up is no failure; a crash is one.
        found["status"] = "incomplete" if how == OUT_OF_TIME else "failed"
        if found["message"] in ("", "was killed or crashed"):
            found["message"] = how
    elif how and found["status"] == "passed":
        found["status"], found["message"] = "failed", f"{found['message']}, but {how}"
    if losses:
        found["status"], found["message"] = "failed", f"{found['message']}; {CRASHED}: {'; '.join(losses)}"[:600]
    status = {"status": found["status"], "message": found["message"], "mode": options.mode}
    return {**status, "seconds": round(time.monotonic() - begin, 1)}, data


def watched(command: list[str], seconds: float, path: Path, stalled_s: float | None) -> str:
    """How the process ended that writes `path`, "" where it ended well; it is killed when its time is up, and where it
    is at one case for longer than stalled_s."""
    # A session of its own, so that what the part started ends with it.
    process = subprocess.Popen(command, start_new_session=True)
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(timeout=max(0.0, min(1.0, deadline - time.monotonic())))
            return f"exit status {code}" if code else ""
        how = ""
        if time.monotonic() >= deadline:
            how = OUT_OF_TIME
        elif stalled_s and path.exists() and time.time() - path.stat().st_mtime > stalled_s:
            # Only what is at a case can hang; starting and finishing take what they take.
            how = f"hung for {stalled_s} s" if json.loads(path.read_text())["now"] else ""
        if how:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()
            return how


def note_loss(name: str, data: dict, now, message: str) -> None:
    """Records the case that a part's process did not survive as measured and failed."""
    if name == "bench":
        data.setdefault(name, deepcopy(gpu_record.EMPTY[name]))["not_measured"][now] = message
        return
    op, shape, case = now
    found = data.setdefault(name, deepcopy(gpu_record.EMPTY[name]))
    found["cases"].setdefault(op, {}).setdefault(shape, 1)
    found["failures"].append({"op": op, "shape": shape, "case": case, "message": message})


def wheel_facts(wheel: Path | None) -> dict | None:
    if wheel is None:
        return None
    content = wheel.read_bytes()
    return {"name": wheel.name, "sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}


def commit_of_tree() -> tuple[str, bool]:
    """Commit and whether the tree differs from it; CAMOX_COMMIT names it where the tree came without its repository."""
    from benchmarks import machine

    named = os.environ.get("CAMOX_COMMIT")
    return (named, False) if named else machine.git_state(ROOT)


def without_folders(found):
    """The same, files of this tree and of packages named from there on: no record tells a machine's folders. Nor where
    to read about an error of CUDA."""
    if isinstance(found, dict):
        return {key: without_folders(value) for key, value in found.items()}
    if isinstance(found, list):
        return [without_folders(value) for value in found]
    if isinstance(found, str):
        found = re.sub(r" Search for `\w+' in https?://\S+( for more informat\w*\.?)?", "", found)
        return re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+(?=(?:benchmarks|camox_ops|scripts|tests|site-packages)/)", "", found)
    return found


def save(record: dict, options) -> Path:
    """Where the record was written; one that is not valid lies beside it as it is, and the ValueError says why."""
    record["targets"] = gpu_record.targets(record) if options.device == "cuda" else []
    path = record_path(record, options)
    record = without_folders(record)
    try:
        gpu_record.write(record, path)
    except ValueError:
        path.with_suffix(".invalid").write_text(json.dumps(record, indent=1))
        raise
    if options.copy is not None:
        options.copy.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, options.copy)
    return path


def record_path(record: dict, options) -> Path:
    """In --out; what saw no GPU is no result and lies with the logs."""
    gpu = record["environment"].get("gpu")
    return (options.logs if gpu is None and options.device == "cuda" else options.out) / gpu_record.file_name(gpu)


def new_record(options) -> dict:
    commit, dirty = commit_of_tree()
    if commit == "unknown":
        print("gpu_check: this tree has no repository: CAMOX_COMMIT names its commit for the record", flush=True)
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    asked = [f"--{name} {','.join(getattr(options, name))}" for name in ("parts", "ops") if getattr(options, name)]
    asked += ["--missing"] if options.missing else []
    never = {"status": "not run", "message": "was not reached", "seconds": 0.0, "mode": options.mode}
    return {
        "schema_version": gpu_record.SCHEMA_VERSION,
        "date": now,
        "device": options.device,
        "commit": commit,
        "dirty": dirty,
        "version": "unknown",
        "wheel": wheel_facts(options.wheel),
        "seconds": 0.0,
        "runs": [{"date": now, "mode": options.mode, "asked": " ".join(asked) or "everything", "seconds": 0.0}],
        "environment": {},
        "targets": [],
        "parts": {name: dict(never) for name in gpu_record.PARTS},
        **deepcopy(gpu_record.EMPTY),
    }


def merged(record: dict, options) -> dict:
    """The record that this run adds to: the one in --out where it is of the same commit, wheel and machine."""
    old, said = gpu_record.earlier(record_path(record, options), record)
    if said:
        print(f"gpu_check: {said}", flush=True)
    if old is None:
        return record
    return {
        **old,
        **{name: record[name] for name in ("date", "environment", "version")},
        "dirty": old["dirty"] or record["dirty"],
        "runs": [*old["runs"], *record["runs"]],
        "parts": {**old["parts"], "environment": record["parts"]["environment"]},
    }


def why_not_run(name: str, options, record: dict) -> str:
    """Why a part is left out of this run, or ""."""
    if name == "environment":
        return ""
    if record["environment"] and record["parts"]["environment"]["status"] != "passed":
        return "the environment failed"
    if options.parts is not None and name not in options.parts:
        return "was not asked for"
    if options.ops and options.parts is None and name not in WITH_OPS:
        return "was not asked for: --ops chooses no tests, --tests does"
    before = record["parts"][name]
    if options.missing and before["status"] == "passed" and before["mode"] in (options.mode, "full"):
        return "has passed"
    return ""


def run_all(options) -> int:
    begin = time.monotonic()
    folder = options.logs / "parts"
    folder.mkdir(parents=True, exist_ok=True)
    record = new_record(options)
    boxes = SECONDS[options.mode]
    deadline = begin + (options.seconds or sum(max(boxes[name] for name in stage) for stage in STAGES))
    earlier_s = 0.0
    for index, stage in enumerate(STAGES):
        box, *later = (longest(boxes, names, options, record) for names in STAGES[index:])
        left = deadline - time.monotonic()
        seconds = left if not any(later) else max(min(box, left), left - sum(later))
        chosen = []
        for name in stage:
            why = why_not_run(name, options, record)
            if not why and seconds >= 2 * GRACE_S:
                chosen.append(name)
            elif record["parts"][name]["status"] == "not run":
                record["parts"][name]["message"] = why or "time was up"
        for name, status, data in run_together(chosen, options, seconds, folder, record):
            print(f"{name}: {status['status']}: {status['message']}", flush=True)
            record["sanitizers"] |= data.pop("sanitizers", {})
            record |= data
            so_far = record["parts"][name]["seconds"]
            record["parts"][name] = {**status, "seconds": round(so_far + status["seconds"], 1)}
            if name == "environment":
                record = merged(record, options)
                earlier_s = record["seconds"]
            taken = round(time.monotonic() - begin, 1)
            record["seconds"], record["runs"][-1]["seconds"] = round(earlier_s + taken, 1), taken
            save(record, options)  # after every part, so that a run that is cut off leaves what it found
    path = save(record, options)
    print(gpu_record.summary(record))
    print(f"wrote {path}")
    return 1 if gpu_record.failed(record) else 0


def longest(boxes: dict, names: tuple[str, ...], options, record: dict) -> float:
    """Seconds that a stage of the run may take: those of the longest of its parts that are run."""
    return max((boxes[name] for name in names if not why_not_run(name, options, record)), default=0)


def run_together(names: list[str], options, seconds: float, folder: Path, record: dict):
    """Runs parts side by side; yields each one's name, status and data as it ends."""
    known = deepcopy(record)  # a part that is started again reads it, while the record goes on
    if names:
        print(f"== {', '.join(names)} ({seconds:.0f} s at most)", flush=True)
    with ThreadPoolExecutor(max(1, len(names))) as pool:
        arguments = (options, seconds, folder, known, options.missing)
        running = {pool.submit(run_part, name, *arguments): name for name in names}
        for ended in as_completed(running):
            yield running[ended], *ended.result()


def parser() -> argparse.ArgumentParser:
    new = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    new.add_argument("part", choices=("all", "sanitized-run", *gpu_record.PARTS))
    new.add_argument("--mode", choices=tuple(SECONDS), default="quick")
    new.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal without a GPU")
    new.add_argument("--out", type=Path, help="folder of the record, to which a run adds")
    new.add_argument("--logs", type=Path, help="folder of the parts' logs; that of the record")
    new.add_argument("--copy", type=Path, help="a folder that gets a copy of the record")
    new.add_argument("--wheel", type=Path, help="the wheel that is installed, for the record")
    new.add_argument("--seconds", type=float, help="of the whole run, or of the one part")
    new.add_argument("--parts", type=lambda text: text.split(","), help="only these, with commas between")
    new.add_argument("--ops", type=lambda text: text.split(","), help="only these ops, with commas between")
    new.add_argument("--missing", action="store_true", help="only what the record does not have yet")
    new.add_argument("--tests", action="append", help="only these files of tests")
    new.add_argument("--known", type=Path, help="the record so far, for one part")
    new.add_argument("--section", type=Path, help="where one part writes what it found")
    return new


def main(arguments: list[str]) -> int:
    options = parser().parse_args(arguments)
    if options.part == "sanitized-run":
        return sanitized_run(options.device, options.ops, options.seconds)
    if options.part == "all":
        if options.out is None:
            raise SystemExit("gpu_check: all needs --out")
        for name, known in (("parts", gpu_record.PARTS), ("ops", (*gpu_record.OPS, *gpu_record.GROUPS))):
            unknown = [one for one in getattr(options, name) or () if one not in known]
            if unknown:
                raise SystemExit(f"gpu_check: --{name} {unknown[0]!r} is not one of {', '.join(dict.fromkeys(known))}")
        if options.device == "cpu" and options.mode != "rehearsal":
            raise SystemExit("gpu_check: --device cpu needs --mode rehearsal")
        options.out = options.out.resolve()
        options.logs = (options.logs or options.out).resolve()
        return run_all(options)
    if options.section is None:
        raise SystemExit("gpu_check: one part needs --section")
    known = json.loads(options.known.read_text()) if options.known else None
    seconds = options.seconds or 600.0
    chosen = (options.ops, options.missing)
    section = Section(options.section.resolve(), seconds, options.device, options.mode, known, *chosen)
    if options.part == "tests":
        tests(section, options.tests)
        return 0
    from benchmarks.device import ContextLost

    try:
        RUNNERS[options.part](section)
    except ContextLost as error:
        section.message = f"the device is lost: {error}"
        section.save()
        os._exit(LOST)  # what would be freed at exit is not there any more
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
