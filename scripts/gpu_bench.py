"""Benchmarks of scripts/gpu_check.py: device events, L2 flushed before every call, graph replay beside it.

The cases are those of benchmarks/bench_<op>.py that take any shape (functions named make_case*, those with shapes of
their own marked by benchmarks.common.on_gpu); an op needs no entry here. As there, nothing is timed before its numbers
are right, all candidates take turns, ratios are taken within a round. The floor is a copy of as many bytes as the ideal
kernel reads plus writes, in the same rounds.
"""

import functools
import importlib.util
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import common, record
from scripts.gpu_record import GROUPS

BENCHMARKS = Path(common.__file__).parent
COMPILE_LIMIT_S = 90


@dataclass(frozen=True)
class Plan:
    """Shapes by size, rounds, (size, direction) that torch.compile is measured at, dtypes, layouts, bytes to copy."""

    shapes: dict
    rounds: int
    compiled: tuple[tuple[str, str], ...]
    dtypes: tuple
    layouts: tuple[str, ...]
    copy_bytes: int
    own: str = "shapes"  # of what benchmarks.common.on_gpu gave a maker
    full: bool = False


LARGE, LARGER = (32, 80, 88, 88), (32, 128, 128, 128)
SMALL = ((4, 584, 9, 9), (4, 288, 18, 18), (2, 256, 32, 32))
HALVES = (torch.float32, torch.bfloat16)
LAYOUTS = ("contiguous", "channels_last")
QUICK_COMPILED = (("large", "forward_backward"),)
PLANS = {
    "quick": Plan({"large": (LARGE,), "small": SMALL[:2]}, 25, QUICK_COMPILED, HALVES, LAYOUTS, 1 << 30),
    "full": Plan(
        {"large": (LARGE, LARGER), "small": SMALL},
        100,
        tuple((size, direction) for size in ("large", "small") for direction in ("forward", "forward_backward")),
        (*HALVES, torch.float16),
        LAYOUTS,
        4 << 30,
        full=True,
    ),
    "rehearsal": Plan(
        {"large": ((2, 3, 17, 19),), "small": ((1, 4, 5, 5),)}, 3, (), HALVES, LAYOUTS, 1 << 16, "rehearsal", full=True
    ),
}


def case_makers(device) -> dict[str, Callable]:
    """make_case of every benchmark that has one, loaded so that its constants lie on the device."""
    found = {}
    for path in sorted(BENCHMARKS.glob("bench_*.py")):
        spec = importlib.util.spec_from_file_location(f"gpu_{path.stem}", path)
        module = importlib.util.module_from_spec(spec)
        with torch.device(device.torch_device):
            spec.loader.exec_module(module)
        for name in sorted(vars(module)):
            if name.startswith("make_case"):
                found[f"{path.stem}.{name}"] = getattr(module, name)
    return found


def choices(plan: Plan, makers: dict[str, Callable]) -> list[tuple]:
    """(size, shape, dtype, layout, make_case), what the targets name first."""
    every = []
    for make_case in makers.values():
        own = getattr(make_case, "on_gpu", None)
        if own and own["full"] and not plan.full:
            continue
        dtypes = own["dtypes"] or plan.dtypes if own else plan.dtypes
        every += [
            (size, shape, dtype, layout, make_case)
            for size, shapes in (own[plan.own] if own else plan.shapes).items()
            for shape in shapes
            for dtype in dtypes
            for layout in (("contiguous",) if own else plan.layouts)
        ]
    return sorted(every, key=lambda c: (c[2] is torch.float16, c[3] != "contiguous", c[0] == "small"))


def directions_of(make_case) -> tuple[str, ...]:
    return getattr(make_case, "on_gpu", {"directions": common.DIRECTIONS_ON_GPU})["directions"]


def copy_step(device, count: int) -> Callable:
    source = torch.ones(max(1, count // 8), device=device.torch_device)
    target = torch.zeros_like(source)
    return lambda: target.copy_(source)


def host_us(device, step: Callable) -> float:
    """Microseconds that the host needs to queue a step."""
    step()
    device.synchronize()
    begin = time.perf_counter()
    step()
    taken = time.perf_counter() - begin
    device.synchronize()
    return 1e6 * taken


def call_us(device, step: Callable, calls: int = 20) -> float:
    """Microseconds of a call as a program sees it: many in a row, launches and all."""
    begin = time.perf_counter()
    for _ in range(calls):
        step()
    device.synchronize()
    return float(f"{1e6 * (time.perf_counter() - begin) / calls:.4g}")


def measure(device, steps: dict[str, Callable], rounds: int) -> dict[str, list[float]]:
    """Microseconds of every step on the device, one sample a round, the steps in turns and each after a flush."""
    names = list(steps)
    head_starts = {name: 2 * host_us(device, steps[name]) + 20 for name in names}
    samples = {name: [] for name in names}
    for turn in range(rounds):
        marks = {}
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            device.flush(head_starts[name])
            begin = device.mark()
            steps[name]()
            marks[name] = (begin, device.mark())
        device.synchronize()
        for name, (begin, end) in marks.items():
            samples[name].append(device.microseconds(begin, end))
    return samples


def copy_bandwidth(device, count: int, rounds: int) -> float:
    """GB/s, bytes read plus bytes written, of a copy far larger than the cache."""
    samples = measure(device, {"copy": copy_step(device, count)}, rounds)["copy"]
    return float(f"{count / 1e3 / record.spread(samples)['median']:.5g}")


def exact_float32():
    """TF32 would loosen the tolerance; times are taken with torch's defaults."""
    return torch.backends.cudnn.flags(enabled=True, allow_tf32=False)


class Candidates:
    """The functions of a case on the device: those that gave right numbers, and why the others were left out."""

    def __init__(self, device, make_case, shape, dtype, layout):
        made = [direction for direction in directions_of(make_case) if direction != "backward"]
        self.cases = {d: make_case(shape, d, dtype, layout) for d in made}
        self.case = self.cases[made[-1]]
        with torch.device(device.torch_device):  # where the modules among them are made
            self.functions = dict(self.case.candidates())
        self.functions.setdefault("compile", self.functions[common.BASELINE])
        self.to_compile = {n: f for n, f in self.functions.items() if n.startswith("compile") and f is not None}
        self.functions = {n: f for n, f in self.functions.items() if not n.startswith("compile")}
        self.inputs = tuple(t.to(device.torch_device) for t in self.case.make_inputs())
        self.check, self.refused = {}, {}
        self.upstream, self.truth, self.baseline = [], {}, {}
        baseline = self.functions[common.BASELINE]
        if self.case.direction != "step":  # which has a check of its own
            self.upstream = [g.to(device.torch_device) for g in common.upstream_like(self.case, baseline, self.inputs)]
            with exact_float32():
                self.truth = common.float64_numbers(self.case, baseline, self.inputs, self.upstream)
                self.baseline = self.bound(baseline).numbers()
        for name in list(self.functions):
            if name != common.BASELINE:
                self.admit(name, self.functions[name])

    def bound(self, function) -> common.Bound:
        return common.Bound(self.case, function, self.inputs, self.upstream)

    def admit(self, name: str, function) -> None:
        """Takes a function whose numbers are right; Refusal where camox's own are wrong."""
        try:
            with exact_float32():
                share = common.checked(self.case, self.bound(function), self.baseline, self.truth)
        except Exception as error:
            if name == common.SUBJECT:
                raise
            self.functions.pop(name, None)
            self.refused[name] = common.reason(error)
            return
        self.check[name] = float(f"{share:.3g}")
        self.functions[name] = function

    def compile(self, seconds: float) -> None:
        """The compiled candidates too, each within `seconds`."""
        common.forget_compiled()
        for name, function in self.to_compile.items():
            graphs = common.graphs_compiled()
            try:
                with common.time_limit(max(1, int(seconds)), "torch.compile"):
                    self.admit(name, torch.compile(function, dynamic=False, fullgraph=True))
                fault = self.refused.get(name) or common.compile_fault(graphs + 1)
            except Exception as error:
                fault = common.reason(error)
            if fault:
                self.refused[name] = fault
                self.functions.pop(name, None)
                self.check.pop(name, None)

    def steps(self, direction: str) -> dict[str, Callable]:
        """name -> a function that makes the step; for "backward" it runs the forward pass first."""
        makers = {}
        for name, function in self.functions.items():
            bound = self.bound(function)
            if direction == "forward":
                makers[name] = lambda bound=bound: torch.no_grad()(functools.partial(bound.function, *bound.inputs))
            elif direction in ("forward_backward", "step"):
                makers[name] = lambda bound=bound: bound.step
            elif name == common.SUBJECT:
                makers[name] = lambda bound=bound: backward_step(bound)
        return makers

    def floor_bytes(self, direction: str) -> int:
        if direction == "backward":
            return self.cases["forward_backward"].floor_bytes - self.cases["forward"].floor_bytes
        return self.cases[direction].floor_bytes


def backward_step(bound: common.Bound) -> Callable:
    outputs = common.tensors_of(bound.function(*bound.inputs))
    asked = list(bound.targets.values())
    return lambda: torch.autograd.grad(outputs, asked, bound.upstream, retain_graph=True)


def measured_direction(device, candidates: Candidates, direction: str, rounds: int) -> dict:
    makers = candidates.steps(direction)
    count = candidates.floor_bytes(direction)
    copy, kept = copy_step(device, count), []
    steps = {name: make() for name, make in makers.items()}
    for step in steps.values():
        step()  # under no_grad a compiled function is another one than that whose numbers were checked
    graphs = common.graphs_compiled()
    plain = measure(device, {**steps, "copy": copy}, rounds)
    if common.graphs_compiled() != graphs:
        for name in [name for name in steps if name.startswith("compile")]:
            candidates.refused[f"{direction} {name}"] = "recompiled while it was timed"
            del plain[name], steps[name], makers[name]
    replays = {"empty": device.empty_kernel, "copy": copy}
    captured = {} if direction == "step" else makers  # an optimizer's step is not made for graphs
    for name, make in {**captured, **{n: lambda step=s: step for n, s in replays.items()}}.items():
        try:
            replays[name], held = device.capture(make)
            kept.append(held)
        except Exception as error:
            replays.pop(name, None)
            candidates.refused[f"graph {direction} {name}"] = common.reason(error)
    graphs = measure(device, replays, rounds) if replays else {}
    ours = plain[common.SUBJECT]

    def over_ours(samples):
        return record.spread([t / o for t, o in zip(samples, ours, strict=True)])

    return {
        "floor_bytes": count,
        "time_us": {name: record.spread(taken) for name, taken in plain.items()},
        "call_us": {name: call_us(device, step) for name, step in steps.items()},
        "graph_us": {name: record.spread(taken) for name, taken in graphs.items()},
        "speed": {n: over_ours(taken) for n, taken in plain.items() if n not in (common.SUBJECT, "copy")},
        "share_of_copy": over_ours(plain["copy"]),
        "rounds": rounds,
    }


def measured_case(device, maker, size, shape, dtype, layout, plan: Plan, deadline: float) -> dict:
    """An entry of the record; Refusal where camox is missing or wrong."""
    candidates = Candidates(device, maker, shape, dtype, layout)
    entry = {
        "key": f"{candidates.case.group}/{candidates.case.dtype_name}/{layout}/{'x'.join(map(str, shape))}",
        "group": candidates.case.group,
        "shape": list(shape),
        "size": size,
        "dtype": candidates.case.dtype_name,
        "layout": layout,
        "directions": {},
    }
    for direction in directions_of(maker):
        if (size, direction) in plan.compiled and layout == "contiguous" and "compile" not in candidates.functions:
            candidates.compile(min(COMPILE_LIMIT_S, deadline - time.monotonic()))
        entry["directions"][direction] = measured_direction(device, candidates, direction, plan.rounds)
    return {**entry, "check": candidates.check, "refused": candidates.refused}


def run(device, plan: Plan, deadline: float) -> Iterator[dict]:
    """The bench section of the record after every case, until `deadline` (time.monotonic)."""
    found = {"copy_gb_per_s": None, "l2_bytes": device.l2_bytes, "entries": [], "not_measured": {}}
    found["copy_gb_per_s"] = copy_bandwidth(device, plan.copy_bytes, plan.rounds)
    makers, absent = case_makers(device), set()
    for size, shape, dtype, layout, maker in choices(plan, makers):
        try:
            group = maker(shape, directions_of(maker)[0], dtype, layout).group
        except Exception as error:
            found["not_measured"][getattr(maker, "__qualname__", repr(maker))] = common.reason(error)
            continue
        if group in absent:
            continue
        dtype_name = str(dtype).removeprefix("torch.")
        key = f"{group}/{dtype_name}/{layout}/{'x'.join(map(str, shape))}"
        if time.monotonic() > deadline:
            found["not_measured"][key] = "time was up"
            continue
        try:
            entry = measured_case(device, maker, size, shape, dtype, layout, plan, deadline)
            found["entries"].append(entry)
        except common.Refusal as error:
            reason = common.reason(error)
            found["not_measured"][group if "not in this build" in reason else key] = reason
            if "not in this build" in reason:
                absent.add(group)
        except Exception as error:  # one case that fails must not cost the others
            found["not_measured"][key] = common.reason(error)
        device.release()
        yield found
    for group in set(GROUPS) - {e["group"] for e in found["entries"]}:
        found["not_measured"].setdefault(group, "no benchmark of it gave a measurement")
    yield found
