"""Benchmarks of scripts/gpu_check.py: device events, the L2 cold before every call; beside it warm, and graph replay.

The cases are those of benchmarks/bench_<op>.py that take any shape (functions named make_case*, those with shapes of
their own marked by benchmarks.common.on_gpu); an op needs no entry here. As there, nothing is timed before its numbers
are right, all candidates take turns, ratios are taken within a round. The floor is a copy of as many bytes as the ideal
kernel reads plus writes, in the same rounds.
"""

import functools
import importlib.util
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks import common, record
from scripts.gpu_device import why_no_compiler
from scripts.gpu_record import EMPTY, GROUPS, LATER

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


@dataclass(frozen=True)
class Choice:
    """What one entry of the record measures; `compiled`: once more, with torch.compile."""

    group: str
    size: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str
    make_case: Callable
    compiled: bool = False

    @property
    def key(self) -> str:
        dtype_name = str(self.dtype).removeprefix("torch.")
        return f"{self.group}/{dtype_name}/{self.layout}/{'x'.join(map(str, self.shape))}"

    @property
    def rank(self) -> int:
        """What the targets name comes first, and a model's step, which compiles for minutes, last."""
        if self.size == "step":
            return 6
        if self.dtype is torch.float16:
            return 5
        if self.layout != "contiguous":
            return 4
        return 2 * self.compiled + (self.size == "small")

    def chosen(self, ops) -> bool:
        return not ops or self.group in ops or GROUPS.get(self.group) in ops

    def measured_in(self, entries: dict) -> bool:
        """Whether these entries, by key, have it already."""
        if self.key not in entries or not self.compiled:
            return self.key in entries
        entry = entries[self.key]
        names = [*entry["refused"], *(name for d in entry["directions"].values() for name in d["speed"])]
        return any("compile" in name for name in names)


def choices(plan: Plan, makers: dict[str, Callable]) -> tuple[list[Choice], dict[str, str]]:
    """What is measured, by rank and in it the groups in turns so that none has to wait for all of another; and what
    could not be asked, with its reason."""
    ranks, failed = {}, {}
    order = list(GROUPS)
    for name, make_case in makers.items():
        own = getattr(make_case, "on_gpu", None)
        if own and own["full"] and not plan.full:
            continue
        dtypes = own["dtypes"] or plan.dtypes if own else plan.dtypes
        for size, shapes in (own[plan.own] if own else plan.shapes).items():
            for shape in shapes:
                for dtype in dtypes:
                    for layout in ("contiguous",) if own else plan.layouts:
                        try:
                            group = make_case(shape, directions_of(make_case)[0], dtype, layout).group
                        except Exception as error:
                            failed[name] = common.reason(error)
                            continue
                        choice = Choice(group, size, shape, dtype, layout, make_case)
                        compiled = layout == "contiguous" and any(size == asked for asked, _ in plan.compiled)
                        for one in (choice, replace(choice, compiled=True)) if compiled else (choice,):
                            ranks.setdefault((one.rank, group), []).append(one)
    turns = [
        (rank, turn, order.index(group) if group in order else len(order), choice)
        for (rank, group), of_group in ranks.items()
        for turn, choice in enumerate(of_group)
    ]
    return [choice for *_, choice in sorted(turns, key=lambda found: found[:3])], failed


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


def measure(device, steps: dict[str, Callable], rounds: int, cold: bool = True) -> dict[str, list[float]]:
    """Microseconds of every step on the device, one sample a round, the steps in turns: cold, each after the L2 cache
    was filled with other data, or warm, each after an untimed call of its own."""
    names = list(steps)
    head_starts = {name: 2 * host_us(device, steps[name]) + 20 for name in names}
    samples = {name: [] for name in names}
    for turn in range(rounds):
        marks = {}
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            device.flush() if cold else steps[name]()
            device.occupy(head_starts[name])
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
                self.baseline = self.candidate(baseline).numbers()
        for name in list(self.functions):
            if name != common.BASELINE:
                self.accept(name, self.functions[name])

    def candidate(self, function) -> common.Candidate:
        return common.Candidate(self.case, function, self.inputs, self.upstream)

    def accept(self, name: str, function) -> None:
        """Takes a function whose numbers are right; Skipped where camox's own are wrong."""
        try:
            with exact_float32():
                share = common.checked(self.case, self.candidate(function), self.baseline, self.truth)
        except Exception as error:
            if name == common.SUBJECT:
                raise
            self.functions.pop(name, None)
            self.refused[name] = common.reason(error)
            return
        self.check[name] = float(f"{share:.3g}")
        self.functions[name] = function

    def compile(self, deadline: float) -> None:
        """The compiled candidates too, each within COMPILE_LIMIT_S and before `deadline`."""
        missing = why_no_compiler() if self.inputs[0].is_cuda else ""
        if missing:
            self.refused |= dict.fromkeys(self.to_compile, missing)
            return
        common.forget_compiled()
        for name, function in self.to_compile.items():
            graphs = common.graphs_compiled()
            try:
                seconds = max(1, int(min(COMPILE_LIMIT_S, deadline - time.monotonic())))
                with common.time_limit(seconds, "torch.compile"):
                    self.accept(name, torch.compile(function, dynamic=False, fullgraph=True))
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
            candidate = self.candidate(function)
            if direction == "forward":
                makers[name] = lambda candidate=candidate: torch.no_grad()(
                    functools.partial(candidate.function, *candidate.inputs)
                )
            elif direction in ("forward_backward", "step"):
                makers[name] = lambda candidate=candidate: candidate.step
            elif name == common.SUBJECT:
                makers[name] = lambda candidate=candidate: backward_step(candidate)
        return makers

    def floor_bytes(self, direction: str) -> int:
        if direction == "backward":
            return self.cases["forward_backward"].floor_bytes - self.cases["forward"].floor_bytes
        return self.cases[direction].floor_bytes


def backward_step(candidate: common.Candidate) -> Callable:
    outputs = common.tensors_of(candidate.function(*candidate.inputs))
    asked = list(candidate.targets.values())
    return lambda: torch.autograd.grad(outputs, asked, candidate.upstream, retain_graph=True)


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
    warm = measure(device, {**steps, "copy": copy}, max(3, rounds // 3), cold=False)
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
        "warm_us": {name: record.spread(taken) for name, taken in warm.items()},
        "call_us": {name: call_us(device, step) for name, step in steps.items()},
        "graph_us": {name: record.spread(taken) for name, taken in graphs.items()},
        "speed": {n: over_ours(taken) for n, taken in plain.items() if n not in (common.SUBJECT, "copy")},
        "share_of_copy": over_ours(plain["copy"]),
        "rounds": rounds,
    }


def measured_case(device, choice: Choice, plan: Plan, deadline: float) -> dict:
    """An entry of the record; Skipped where camox is missing or wrong."""
    candidates = Candidates(device, choice.make_case, choice.shape, choice.dtype, choice.layout)
    entry = {
        "key": choice.key,
        "group": choice.group,
        "shape": list(choice.shape),
        "size": choice.size,
        "dtype": candidates.case.dtype_name,
        "layout": choice.layout,
        "directions": {},
    }
    tried = False
    for direction in directions_of(choice.make_case):
        if choice.compiled and not tried and (choice.size, direction) in plan.compiled:
            candidates.compile(deadline)
            if not candidates.to_compile:
                candidates.refused["compile"] = "left out of this case"
            tried = True
        entry["directions"][direction] = measured_direction(device, candidates, direction, plan.rounds)
    return {**entry, "check": candidates.check, "refused": candidates.refused}


def run(device, plan: Plan, deadline: float, known=None, ops=None, missing=False, begin=None) -> Iterator[dict]:
    """The bench section of the record after every case, until `deadline` (time.monotonic).

    known: the section so far, which this adds to; ops: only these; missing: only what the section lacks; begin: is
    called with the key of a case before it is measured."""
    found = known or deepcopy(EMPTY["bench"])
    entries = {entry["key"]: entry for entry in found["entries"]}
    reasons = found["not_measured"] = {k: why for k, why in found["not_measured"].items() if k not in GROUPS}
    wanted, failed = choices(plan, case_makers(device))
    reasons |= failed
    found["l2_bytes"] = device.l2_bytes
    found["copy_gb_per_s"] = copy_bandwidth(device, plan.copy_bytes, plan.rounds)
    absent = set()
    for choice in wanted:
        label = choice.key + " torch.compile" * choice.compiled
        if choice.measured_in(entries) and (missing or not choice.chosen(ops)):
            continue
        if missing and reasons.get(label, LATER[0]) not in LATER:  # tried before, and it could not be measured
            continue
        if choice.group in absent or (choice.compiled and choice.key not in entries):
            continue
        if not choice.chosen(ops) or time.monotonic() > deadline:
            reasons.setdefault(label, LATER[0] if choice.chosen(ops) else LATER[1])
            continue
        if begin is not None:
            begin(label)
        reasons.pop(label, None)
        try:
            entries[choice.key] = measured_case(device, choice, plan, deadline)
        except common.Skipped as error:
            reasons[label] = common.reason(error)
            if "not in this build" in reasons[label]:
                reasons[choice.group] = reasons.pop(label)
                absent.add(choice.group)
        except Exception as error:  # one case that fails must not cost the others
            reasons[label] = common.reason(error)
            device.check_alive(reasons[label])
        found["entries"] = list(entries.values())
        device.release()
        yield found
    for group in set(GROUPS) - {entry["group"] for entry in found["entries"]}:
        if not any(key.split("/")[0] == group for key in reasons):
            reasons[group] = "no benchmark of it gave a measurement"
    yield found
