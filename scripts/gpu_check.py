"""Proves an installed camox_ops on the GPU of this machine: scripts/gpu_check.sh installs the wheel and runs this.

    gpu_check.py all --mode quick --out DIR     every part in a process of its own, one record, the tables
    gpu_check.py correctness --mode quick --section FILE --seconds 60     one part

Parts: environment, correctness (every op against float64), graphs (capture and replay), bench, tests (the suite with
CAMOX_TEST_DEVICE=cuda), memcheck, racecheck, initcheck (compute-sanitizer on a short run). Ops come from
camox_ops._selftest.OPS, benchmarks from benchmarks/bench_<op>.py: a new op needs no line here.
"""

import argparse
import datetime
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
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # behind the installed wheel, which is what is tested

from scripts import gpu_record  # noqa: E402

OLDEST_TORCH = (2, 10)
# Seconds of each part; what a part leaves over goes to the next one, and all together bound the whole run.
SECONDS = {
    "quick": dict(zip(gpu_record.PARTS, (30, 50, 30, 140, 80, 45, 45, 45), strict=True)),
    "full": dict(zip(gpu_record.PARTS, (60, 300, 120, 1200, 900, 240, 240, 240), strict=True)),
}
SECONDS["rehearsal"] = SECONDS["quick"]
GRACE_S = 5  # a part stops by itself this long before it is killed
DTYPES = ("float32", "bfloat16", "float16")
LAYOUTS = ("contiguous", "channels_last", "strided")
# Odd sizes around vectors, tiles and warps; more planes and more rows than a grid has blocks in y.
SHAPES = {
    "rehearsal": [(2, 3, 5, 7), (1, 2, 1, 1)],
    "quick": [
        *((2, 3, 5, 7), (1, 2, 1, 1), (1, 1, 1, 9), (1, 1, 9, 1), (1, 3, 4, 17), (2, 131, 3, 4), (1, 129, 5, 17)),
        *((1, 2, 131, 33), (1, 1, 3, 513), (70001, 1, 2, 3), (1, 1, 70001, 3)),
    ],
}
SHAPES["full"] = [*SHAPES["quick"], (1, 70001, 1, 2), (3, 5, 1, 2051), (4, 584, 9, 9), (2, 80, 88, 88)]
SANITIZER_SHAPES = [(2, 3, 5, 7), (1, 40, 9, 33)]
SANITIZED = "sanitized calls:"
FOREIGN_KERNEL = re.compile(r"^(?:void )?(?:at|cub|thrust|c10|cudnn|cutlass|nccl)(?:::|\d|_)|cudnn|cublas|gemm")


class Section:
    """What one part found, written after every step so that a part that is killed still tells what it did."""

    def __init__(self, path: Path, seconds: float, device: str, mode: str):
        self.path, self.device, self.mode = path, device, mode
        self.deadline = time.monotonic() + seconds
        self.data, self.status, self.message = {}, "incomplete", "was killed or crashed"
        self.save()

    def save(self) -> None:
        scratch = self.path.with_suffix(".tmp")
        scratch.write_text(json.dumps({"status": self.status, "message": self.message, "data": self.data}))
        os.replace(scratch, self.path)

    def finish(self, status: str, message: str = "") -> None:
        self.status, self.message = status, message
        self.save()

    def time_is_up(self) -> bool:
        return time.monotonic() > self.deadline


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
    from camox_ops import _cuda

    section.data["version"] = camox_ops.__version__
    facts |= {"camox_ops": camox_ops.__version__, "file": camox_ops.__file__, "cuda_part": _cuda.status()}
    for package in ("triton", "timm", "kornia"):
        facts[package] = version_of(package)
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
    """Pictures rounded to multiples of 1/64 below 4: every dtype holds them, sums are exact, so is every sign."""
    return tuple(t if t.dim() != 4 else ((t * 64).round() / 64).clamp(-3.75, 3.75) + offset for t in inputs)


def correctness(section: Section) -> None:
    """Outputs and gradients of every op against the float64 reference on the CPU, under the tolerance rule."""
    import torch

    from scripts.gpu_device import open_device

    device = open_device(section.device)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills fresh memory with NaN
    ops, absent = ops_here(section.device)
    found = section.data["correctness"] = {"cases": 0, "not_in_this_build": absent, "worst": {}, "failures": []}
    for shape in SHAPES[section.mode]:
        for op in ops:
            if section.time_is_up():
                return section.finish(*verdict(found, "time was up"))
            for name in DTYPES:
                for offset in (0.0, 1e4) if name == "float32" else (0.0,):
                    check_op(op, shape, getattr(torch, name), offset, device, found)
            section.save()
    device.synchronize()
    return section.finish(*verdict(found))


def verdict(found: dict, unfinished: str = "") -> tuple[str, str]:
    """(status, message) of a part that counts cases and failures."""
    if found["failures"]:
        return "failed", f"{len(found['failures'])} of {found['cases']} cases failed"
    if unfinished:
        return "incomplete", f"{found['cases']} cases passed, then {unfinished}"
    return ("passed", f"{found['cases']} cases") if found["cases"] else ("failed", "there was nothing to check")


def check_op(op, shape, dtype, offset: float, device, found: dict) -> None:
    """One op, shape and dtype in every layout; the CPU computes what is true and what is allowed."""
    from camox_ops import _selftest

    inputs = tuple(t.to(dtype) for t in exact(op.inputs(shape, dtype), offset))
    name = str(dtype).removeprefix("torch.")
    label = f"{op.name} {name} {'x'.join(map(str, shape))}{' mean 1e4' if offset else ''}"
    try:
        truth = _selftest.run(op.reference, tuple(t.double() for t in inputs), None)
        same_dtype = _selftest.run(op.reference, inputs, None)
    except RuntimeError:
        return  # a picture that the reference refuses, such as one without a neighbour to reflect
    for layout in LAYOUTS:
        on_device = tuple(_selftest.arranged(t.to(device.torch_device), layout) for t in inputs)
        found["cases"] += 1
        try:
            ours = _selftest.run(op.ours, on_device, None)
            problems = []
            for what, mine, theirs, true in zip(("outputs", "gradients"), ours, same_dtype, truth, strict=True):
                error, allowed = _selftest.worst(mine, theirs, true)
                if not error <= allowed:
                    problems.append(f"{what}: error {error:.3e}, allowed {allowed:.3e}")
                elif allowed:
                    key, share = f"{op.name} {what} {name}", float(f"{error / allowed:.3g}")
                    found["worst"][key] = max(found["worst"].get(key, 0.0), share)
            if dtype.itemsize == 2:
                single = _selftest.run(op.ours, tuple(t.float() for t in on_device), None)[0]
                problems += more_than_one_rounding(ours[0], single)
        except Exception as error:
            problems = [f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"]
        if problems:
            found["failures"].append({"case": f"{label} {layout}", "message": "; ".join(problems)})
            print(f"FAILED {label} {layout}: {'; '.join(problems)}", flush=True)


def more_than_one_rounding(half: list, single: list) -> list[str]:
    """Half-precision outputs lie within one rounding of our own float32 result, whose sums may be ordered otherwise."""
    import torch

    found = []
    for low, high in zip(half, single, strict=True):
        info, high = torch.finfo(low.dtype), high.double()
        difference = (low.double() - high.clamp(-info.max, info.max)).abs()
        allowed = info.eps * high.abs() + info.smallest_normal * info.eps
        allowed += 4 * torch.finfo(torch.float32).eps * high.abs().max()
        if not bool(torch.all(difference <= allowed)):
            found.append(f"more than one rounding from float32, by {(difference - allowed).max().item():.3e}")
    return found


def graphs(section: Section) -> None:
    """Every op captured, forward and with its backward pass, replayed on new inputs: the bits of a plain call."""
    import torch

    from scripts.gpu_device import open_device

    device = open_device(section.device)
    found = section.data["graphs"] = {"cases": 0, "failures": []}
    for op in ops_here(section.device)[0]:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for layout in LAYOUTS[:2]:
                for backward in (False, True):
                    if section.time_is_up():
                        return section.finish(*verdict(found, "time was up"))
                    name = f"{op.name} {'forward_backward' if backward else 'forward'} {dtype} {layout}"
                    found["cases"] += 1
                    try:
                        message = replay_differs(op, dtype, layout, backward, device)
                    except Exception as error:
                        message = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                    if message:
                        found["failures"].append({"case": name, "message": message})
                        print(f"FAILED {name}: {message}", flush=True)
        section.save()
    return section.finish(*verdict(found))


def replay_differs(op, dtype, layout: str, backward: bool, device) -> str:
    """What is wrong with the replays of a captured op, or an empty string."""
    import torch

    from camox_ops import _selftest
    from scripts.gpu_device import tensors

    given = op.inputs(_selftest.CHECK_SHAPE, dtype)
    static = [_selftest.arranged(t.to(device.torch_device), layout).requires_grad_(backward) for t in given]
    with torch.no_grad():
        upstream = [_selftest.weights(y).to(y.dtype) for y in tensors(op.ours(*static))]

    def step(*inputs):
        outputs = tensors(op.ours(*inputs))
        return [*outputs, *(torch.autograd.grad(outputs, inputs, upstream) if backward else ())]

    replay, returned = device.capture(lambda: lambda: step(*static))
    for turn in (1, 2):
        with torch.no_grad():
            for tensor, values in zip(static, given, strict=True):
                tensor.copy_(values.flip(-1) * (1 + turn / 4))
        for tensor in returned:
            tensor.detach().fill_(float("nan"))
        replay()
        device.synchronize()
        fresh = [_selftest.arranged(t.detach(), layout).requires_grad_(backward) for t in static]
        for index, (one, other) in enumerate(zip(returned, step(*fresh), strict=True)):
            if not torch.equal(one, other):
                return f"replay {turn}: result {index} differs from a plain call"
    return ""


def bench(section: Section) -> None:
    import torch

    from scripts import gpu_bench
    from scripts.gpu_device import open_device

    device = open_device(section.device)
    torch.manual_seed(0)
    printed = 0
    for found in gpu_bench.run(device, gpu_bench.PLANS[section.mode], section.deadline):
        section.data["bench"] = found
        section.save()
        for entry in found["entries"][printed:]:
            ours = {d: m["time_us"]["camox"]["median"] for d, m in entry["directions"].items()}
            print(f"{entry['key']}: {ours} us", flush=True)
        printed = len(found["entries"])
    left = [key for key, reason in found["not_measured"].items() if reason == "time was up"]
    if not found["entries"]:
        return section.finish("failed", "; ".join(sorted(set(found["not_measured"].values())))[:300] or "no benchmark")
    if left:
        return section.finish(
            "incomplete", f"{len(found['entries'])} cases, then time was up: {len(left)} not measured"
        )
    return section.finish("passed", f"{len(found['entries'])} cases")


def test_files(mode: str) -> list[str]:
    """The tests of the ops; with --full all of them."""
    if mode == "full":
        return [str(ROOT / "tests")]
    ops = [path.parent.name for path in sorted((ROOT / "csrc").glob("*/*_cuda.cu"))]
    files = [ROOT / "tests" / f"test_{name}.py" for name in ("cuda_part", *ops)]
    return [str(path) for path in files if path.exists()]


def tests(section: Section, files: list[str] | None = None) -> None:
    """The suite against the installed wheel, from a folder without a camox_ops of its own."""
    found = section.data["tests"] = dict(gpu_record.EMPTY["tests"], failures=[])
    if importlib.util.find_spec("pytest") is None or importlib.util.find_spec("hypothesis") is None:
        return section.finish("unavailable", "pytest and hypothesis are not installed")
    lines = section.path.with_suffix(".lines")
    lines.write_text("")
    folder = section.path.parent / "tests-run"
    folder.mkdir(exist_ok=True)
    options = ["-q", "--no-header", "-m", "not slow", "-p", "no:cacheprovider", "-p", "gpu_pytest", "--tb=short"]
    command = [sys.executable, "-m", "pytest", *options, "--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml")]
    seconds = section.deadline - time.monotonic()
    environ = {
        **os.environ,
        "CAMOX_TEST_DEVICE": section.device,
        "CAMOX_TESTS_LINES": str(lines),
        "CAMOX_TESTS_DEADLINE": str(time.time() + seconds - 2 * GRACE_S),
        "PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT / "scripts")))),
    }
    log = section.path.with_suffix(".log")
    with log.open("w") as out:
        command += files or test_files(section.mode)
        process = subprocess.Popen(command, cwd=folder, env=environ, stdout=out, stderr=subprocess.STDOUT)
        try:
            code = process.wait(timeout=max(1.0, seconds))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = None
    count_tests(found, lines)
    if not found["collected"]:
        return section.finish("failed", f"no test was collected: {' '.join(log.read_text().split())[-300:]}")
    counts = f"{found['passed']} passed, {found['failed']} failed, {found['skipped']} skipped"
    if found["failed"] or code not in (0, 2, None):
        return section.finish("failed", f"{counts}, pytest's exit status {code}")
    if found["not_run"]:
        return section.finish("incomplete", f"{counts}, {found['not_run']} not run when time was up")
    return section.finish("passed", counts)


def count_tests(found: dict, lines: Path) -> None:
    outcomes = {}
    for line in map(json.loads, lines.read_text().splitlines()):
        if "collected" in line:
            found["collected"] = line["collected"]
        elif outcomes.get(line["test"], (None,))[0] != "failed":
            outcomes[line["test"]] = (line["outcome"], line["text"])
    for name in ("passed", "failed", "skipped"):
        found[name] = sum(outcome == name for outcome, _ in outcomes.values())
    found["not_run"] = found["collected"] - len(outcomes)
    bad = [(test, text) for test, (outcome, text) in outcomes.items() if outcome == "failed"]
    found["failures"] = [{"case": test, "message": " ".join(text.split())[-300:]} for test, text in bad[:50]]


def sanitized_run(device_kind: str) -> int:
    """What runs under compute-sanitizer: every op once in each layout, forward and backward."""
    import torch

    from camox_ops import _selftest
    from scripts.gpu_device import open_device

    device = open_device(device_kind)
    calls = 0
    for op in ops_here(device_kind)[0]:
        for shape in SANITIZER_SHAPES:
            for dtype in (torch.float32, torch.bfloat16):
                for layout in LAYOUTS:
                    inputs = tuple(t.to(device.torch_device) for t in op.inputs(shape, dtype))
                    results = _selftest.run(op.ours, tuple(_selftest.arranged(t, layout) for t in inputs), None)
                    if not all(bool(t.cpu().isfinite().all()) for group in results for t in group):
                        raise SystemExit(f"{op.name} {shape} {dtype} {layout}: a result is not finite")
                    calls += 1
    device.synchronize()
    print(SANITIZED, calls, flush=True)
    return 0


def find_sanitizer() -> str | None:
    folders = [os.environ.get("PATH", ""), os.path.join(os.environ.get("CUDA_HOME", "none"), "bin")]
    for pattern in ("usr/local/cuda*/bin", "usr/local/cuda*/compute-sanitizer", "opt/nvidia/compute-sanitizer*"):
        folders += sorted(map(str, Path("/").glob(pattern)), reverse=True)
    return shutil.which("compute-sanitizer", path=os.pathsep.join(folders))


def sanitize(section: Section, tool: str) -> None:
    section.data["sanitizers"] = {}
    program = find_sanitizer()
    if program is None:
        return section.finish("unavailable", "compute-sanitizer was not found on PATH or under CUDA_HOME")
    log = section.path.with_suffix(".log")
    options = ["--tool", tool, "--log-file", str(log), "--print-limit", "50", "--launch-timeout", "60"]
    if tool == "memcheck":
        # torch probes for drivers' functions; the launches of our own kernels are checked where they are made.
        options += ["--report-api-errors", "no"]
    child = [sys.executable, str(Path(__file__).resolve()), "sanitized-run", "--device", section.device]
    # Each tensor an allocation of its own, so that reads past its end are seen.
    environ = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    seconds = max(1.0, section.deadline - time.monotonic())
    try:
        done = subprocess.run([program, *options, *child], capture_output=True, text=True, env=environ, timeout=seconds)
        output = done.stdout + done.stderr
    except subprocess.TimeoutExpired:
        output = f"the run did not finish in {seconds:.0f} s"
    except OSError as error:
        return section.finish("unavailable", f"{program}: {error}")
    status, message, found = judge_sanitizer(tool, output, log.read_text() if log.exists() else "")
    section.data["sanitizers"] = {tool: found}
    return section.finish(status, message)


def judge_sanitizer(tool: str, output: str, log: str) -> tuple[str, str, dict]:
    """(status, message, section) from what the sanitized run printed and what the sanitizer wrote.

    Passed only where the run came to its end and the sanitizer's own summary says that it found nothing of ours."""
    calls = re.search(rf"{SANITIZED} (\d+)", output)
    total = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)", log)
    ours, foreign = [], 0
    for block in re.split(r"^========= (?=\S)", log, flags=re.MULTILINE):
        kernels = re.findall(r"\bat ((?:void )?[\w:]+)[<(+]", block)
        if not kernels:
            continue
        if all(FOREIGN_KERNEL.search(kernel) for kernel in kernels):
            foreign += 1
        else:
            ours.append(" ".join(block.replace("=========", " ").split())[:300])
    found = {
        "calls": int(calls.group(1)) if calls else 0,
        "errors": len(ours),
        "foreign_errors": foreign,
        "findings": ours[:10],
    }
    if ours:
        return "failed", f"{len(ours)} findings, the first: {ours[0]}", found
    if calls is None or total is None:
        text = [line.strip("= ").strip() for line in (log + "\n" + output).splitlines()]
        said = "; ".join(dict.fromkeys(line for line in text if line and line != "COMPUTE-SANITIZER"))
        return "unavailable", f"{tool} did not complete: {said[:400] or 'it said nothing'}", found
    unread = int(total.group(1)) - foreign
    if unread > 0:
        return "failed", f"the summary counts {total.group(1)} errors, see the log", found
    others = f", {foreign} errors in others' kernels" if foreign else ""
    return "passed", f"{found['calls']} calls{others}", found


RUNNERS: dict[str, Callable] = {
    "environment": environment,
    "correctness": correctness,
    "graphs": graphs,
    "bench": bench,
    "tests": tests,
    **{tool: lambda section, tool=tool: sanitize(section, tool) for tool in gpu_record.SANITIZERS},
}


def run_part(name: str, options, seconds: float, folder: Path) -> tuple[dict, dict]:
    """(status of the record, data) of one part, in a process that is killed when its time is up."""
    path = folder / f"{name}.json"
    path.unlink(missing_ok=True)
    command = [sys.executable, str(Path(__file__).resolve()), name, "--section", str(path)]
    command += ["--device", options.device, "--mode", options.mode, "--seconds", str(max(1.0, seconds - GRACE_S))]
    for file in options.tests or () if name == "tests" else ():
        command += ["--tests", file]
    begin, how = time.monotonic(), ""
    # A session of its own, so that what the part started ends with it.
    process = subprocess.Popen(command, start_new_session=True)
    try:
        code = process.wait(timeout=seconds)
        how = f"exit status {code}" if code else ""
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait()
        how = f"killed after {seconds:.0f} s"
    found = json.loads(path.read_text()) if path.exists() else {"status": "incomplete", "message": "", "data": {}}
    if how and found["status"] == "incomplete":
        # Time that is up is no failure; a crash is one.
        found["status"] = "incomplete" if how.startswith("killed") else "failed"
        if found["message"] in ("", "was killed or crashed"):
            found["message"] = how
    elif how and found["status"] == "passed":
        found["status"], found["message"] = "failed", f"{found['message']}, but {how}"
    status = {"status": found["status"], "message": found["message"]}
    return {**status, "seconds": round(time.monotonic() - begin, 1)}, found["data"]


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


def save(record: dict, options) -> Path:
    """Where the record was written; one that is not valid lies beside it as it is, and the ValueError says why."""
    record["targets"] = gpu_record.targets(record) if options.device == "cuda" else []
    path = options.out / gpu_record.file_name(record["environment"].get("gpu"))
    try:
        gpu_record.write(record, path)
    except ValueError:
        path.with_suffix(".invalid").write_text(json.dumps(record, indent=1))
        raise
    return path


def run_all(options) -> int:
    begin = time.monotonic()
    folder = options.out / "parts"
    folder.mkdir(parents=True, exist_ok=True)
    commit, dirty = commit_of_tree()
    record = {
        "schema_version": gpu_record.SCHEMA_VERSION,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "mode": options.mode,
        "device": options.device,
        "commit": commit,
        "dirty": dirty,
        "version": "unknown",
        "wheel": wheel_facts(options.wheel),
        "environment": {},
        "sanitizers": {},
        "targets": [],
        "parts": {n: {"status": "not run", "message": "was not reached", "seconds": 0.0} for n in gpu_record.PARTS},
        **json.loads(json.dumps(gpu_record.EMPTY)),
    }
    boxes = SECONDS[options.mode]
    deadline = begin + (options.seconds or sum(boxes.values()))
    reason = ""
    for index, name in enumerate(gpu_record.PARTS):
        chosen = options.parts is None or name in options.parts or name == "environment"
        later = sum(boxes[n] for n in gpu_record.PARTS[index + 1 :] if options.parts is None or n in options.parts)
        left = deadline - time.monotonic()
        seconds = left if not later else max(min(boxes[name], left), left - later)
        if not chosen or reason or seconds < 2 * GRACE_S:
            why = reason or ("was not asked for" if not chosen else "time was up")
            record["parts"][name] = {"status": "not run", "message": why, "seconds": 0.0}
            continue
        print(f"== {name} ({seconds:.0f} s at most)", flush=True)
        record["parts"][name], data = run_part(name, options, seconds, folder)
        print(f"{name}: {record['parts'][name]['status']}: {record['parts'][name]['message']}", flush=True)
        record["sanitizers"] |= data.pop("sanitizers", {})
        record |= data
        if name == "environment" and record["parts"][name]["status"] != "passed":
            reason = "the environment failed"
        record["seconds"] = round(time.monotonic() - begin, 1)
        save(record, options)  # after every part, so that a run that is cut off leaves what it found
    path = save(record, options)
    print(gpu_record.summary(record))
    print(f"wrote {path}")
    return 1 if gpu_record.failed(record) else 0


def parser() -> argparse.ArgumentParser:
    new = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    new.add_argument("part", choices=("all", "sanitized-run", *gpu_record.PARTS))
    new.add_argument("--mode", choices=tuple(SECONDS), default="quick")
    new.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal without a GPU")
    new.add_argument("--out", type=Path, help="folder of the record and of the parts' logs")
    new.add_argument("--wheel", type=Path, help="the wheel that is installed, for the record")
    new.add_argument("--seconds", type=float, help="of the whole run, or of the one part")
    new.add_argument("--parts", type=lambda text: text.split(","), help="only these, with commas between")
    new.add_argument("--tests", action="append", help="only these files of tests")
    new.add_argument("--section", type=Path, help="where one part writes what it found")
    return new


def main(arguments: list[str]) -> int:
    options = parser().parse_args(arguments)
    if options.part == "sanitized-run":
        return sanitized_run(options.device)
    if options.part == "all":
        if options.out is None:
            raise SystemExit("gpu_check: all needs --out")
        unknown = set(options.parts or ()) - set(gpu_record.PARTS)
        if unknown:
            raise SystemExit(f"gpu_check: --parts {unknown.pop()!r} is not one of {', '.join(gpu_record.PARTS)}")
        if options.device == "cpu" and options.mode != "rehearsal":
            raise SystemExit("gpu_check: --device cpu needs --mode rehearsal")
        options.out = options.out.resolve()
        return run_all(options)
    if options.section is None:
        raise SystemExit("gpu_check: one part needs --section")
    section = Section(options.section.resolve(), options.seconds or 600.0, options.device, options.mode)
    if options.part == "tests":
        tests(section, options.tests)
    else:
        RUNNERS[options.part](section)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
