"""What run.py --device cuda measures, and how: device events, the L2 cache cold before every call; beside it warm.

The cases are those of benchmarks/bench_<op>.py that take any shape (functions named make_case*, those with shapes of
their own marked by benchmarks.common.on_gpu); an op needs no entry here. As on the CPU, nothing is timed before its
numbers are right, all candidates take turns, ratios are taken within a round, and the floor is a copy of as many bytes
as the ideal kernel reads plus writes, in the same rounds. scripts/gpu_check.py adds what needs a GPU to be proven.
"""

import datetime
import functools
import importlib.util
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from benchmarks import common, machine, record
from benchmarks.device import why_no_compiler

BENCHMARKS = Path(common.__file__).parent
COMPILE_LIMIT_S = 90
FLOOR = "floor"


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


def case_makers(device, op: str = "*") -> dict[str, Callable]:
    """make_case of every benchmark, or of one, that has one, loaded so that its constants lie on the device."""
    found = {}
    for path in sorted(BENCHMARKS.glob(f"bench_{op}.py")):
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
    """What is measured of a maker's cases; `compiled`: once more, with torch.compile."""

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

    @property
    def directions(self) -> tuple[str, ...]:
        return getattr(self.make_case, "on_gpu", {"directions": common.DIRECTIONS_ON_GPU})["directions"]

    def cases(self) -> dict[str, common.Case]:
        """By direction, but for "backward", which is timed of the case with both."""
        made = [direction for direction in self.directions if direction != "backward"]
        return {d: self.make_case(self.shape, d, self.dtype, self.layout) for d in made}


def choices(plan: Plan, makers: dict[str, Callable], order=()) -> tuple[list[Choice], dict[str, str]]:
    """What is measured, by rank and in it the groups in turns, those of `order` first, so that none has to wait for all
    of another; and what could not be asked, with its reason."""
    ranks, failed = {}, {}
    order = list(order)
    for name, make_case in makers.items():
        own = getattr(make_case, "on_gpu", None)
        if own and own["full"] and not plan.full:
            continue
        dtypes = own["dtypes"] or plan.dtypes if own else plan.dtypes
        for size, shapes in (own[plan.own] if own else plan.shapes).items():
            for shape in shapes:
                for dtype in dtypes:
                    for layout in ("contiguous",) if own else plan.layouts:
                        choice = Choice("", size, shape, dtype, layout, make_case)
                        try:
                            group = make_case(shape, choice.directions[0], dtype, layout).group
                        except Exception as error:
                            failed[name] = common.reason(error)
                            continue
                        choice = replace(choice, group=group)
                        compiled = layout == "contiguous" and any(size == asked for asked, _ in plan.compiled)
                        for one in (choice, replace(choice, compiled=True)) if compiled else (choice,):
                            ranks.setdefault((one.rank, group), []).append(one)
    turns = [
        (rank, turn, order.index(group) if group in order else len(order), choice)
        for (rank, group), of_group in ranks.items()
        for turn, choice in enumerate(of_group)
    ]
    return [choice for *_, choice in sorted(turns, key=lambda found: found[:3])], failed


# ---- time ----


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


def measure(
    device, steps: dict[str, Callable], rounds: int, cold: bool = True, with_host: bool = False
) -> dict[str, list[float]]:
    """Seconds of every step on the device, one sample a round, the steps in turns: cold, each after the L2 cache was
    filled with other data, or warm, each after an untimed call of its own. with_host: the device waits for the host
    where that is slower."""
    names = list(steps)
    head_starts = {name: 0 if with_host else 2 * host_us(device, steps[name]) + 20 for name in names}
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
            samples[name].append(1e-6 * device.microseconds(begin, end))
    return samples


def copy_bandwidth(device, count: int, rounds: int) -> float:
    """GB/s, bytes read plus bytes written, of a copy far larger than the cache."""
    samples = measure(device, {"copy": copy_step(device, count)}, rounds)["copy"]
    return float(f"{count / 1e9 / record.spread(samples)['median']:.5g}")


# ---- cases ----


def backward_step(candidate: common.Candidate) -> Callable:
    outputs = common.tensors_of(candidate.function(*candidate.inputs))
    asked = list(candidate.targets.values())
    return lambda: torch.autograd.grad(outputs, asked, candidate.upstream, retain_graph=True)


def step_makers(accepted: dict[str, common.Candidate], direction: str) -> dict[str, Callable]:
    """name -> a function that makes the step; for "backward" it runs the forward pass first."""
    makers = {}
    for name, candidate in accepted.items():
        if direction == "forward":
            makers[name] = lambda c=candidate: torch.no_grad()(functools.partial(c.function, *c.inputs))
        elif direction in ("forward_backward", "step"):
            makers[name] = lambda c=candidate: c.step
        elif name == common.SUBJECT:
            makers[name] = lambda c=candidate: backward_step(c)
    return makers


@dataclass
class Timed:
    """Seconds of each step of a direction in every round, the floor's among them."""

    floor_bytes: int
    cold: dict[str, list[float]]
    warm: dict[str, list[float]]
    steps: dict[str, Callable]
    makers: dict[str, Callable]


@dataclass
class TimedCase:
    """A case whose results were right: `check` and `refused` as in a record, times by direction."""

    choice: Choice
    check: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    directions: dict[str, Timed] = field(default_factory=dict)


def time_case(device, choice: Choice, plan: Plan, deadline: float = math.inf, each=None) -> TimedCase:
    """Times all directions of a choice; Skipped where camox is missing or wrong.

    deadline: (time.monotonic) of compiling; each: called with the TimedCase and a direction once that is timed, while
    its steps can still be called."""
    timed = TimedCase(choice)
    with common.numbers_made_on(device.torch_device):
        cases = choice.cases()
        case = replace(cases[next(reversed(cases))], own_outputs=None, compare_with={})
        candidates = common.Candidates(case, {"check": timed.check, "refused": timed.refused}, device.torch_device)
        tried = False
        for direction in choice.directions:
            if choice.compiled and not tried and (choice.size, direction) in plan.compiled:
                compile_all(device, candidates, deadline)
                tried = True
            timed.directions[direction] = time_direction(device, candidates, cases, direction, plan.rounds)
            if each is not None:
                each(timed, direction)
    return timed


def compile_all(device, candidates: common.Candidates, deadline: float) -> None:
    missing = why_no_compiler() if device.kind == "cuda" else ""
    if missing:
        candidates.entry["refused"] |= dict.fromkeys(candidates.to_compile, missing)
    elif not candidates.to_compile:
        candidates.entry["refused"]["compile"] = "left out of this case"
    else:
        candidates.compile(lambda: max(1, int(min(COMPILE_LIMIT_S, deadline - time.monotonic()))))


def time_direction(device, candidates: common.Candidates, cases: dict, direction: str, rounds: int) -> Timed:
    makers = step_makers(candidates.accepted, direction)
    if direction == "backward":
        count = cases["forward_backward"].floor_bytes - cases["forward"].floor_bytes
    else:
        count = cases[direction].floor_bytes
    floor = {FLOOR: copy_step(device, count)}
    steps = {name: make() for name, make in makers.items()}
    for step in steps.values():
        step()  # under no_grad a compiled function is another one than that whose numbers were checked
    graphs = common.graphs_compiled()
    with_host = direction == "step"  # of a training loop, in which nothing goes before a step that could hide it
    cold = measure(device, {**steps, **floor}, rounds, with_host=with_host)
    if common.graphs_compiled() != graphs:
        for name in [name for name in steps if name.startswith("compile")]:
            candidates.entry["refused"][f"{direction} {name}"] = "recompiled while it was timed"
            del cold[name], steps[name], makers[name]
    warm = measure(device, {**steps, **floor}, max(3, rounds // 3), cold=False, with_host=with_host)
    return Timed(count, cold, warm, {**steps, **floor}, makers)


# ---- the record of run.py ----


def entries_of(timed: TimedCase) -> list[dict]:
    """A TimedCase as entries of a record, one for each direction."""
    choice, found = timed.choice, []
    for direction, times in timed.directions.items():
        dtype_name, shape = str(choice.dtype).removeprefix("torch."), list(choice.shape)
        measured = {
            caches: common.summarise(samples, dict.fromkeys(samples, 1), 0.0)
            for caches, samples in (("cold", times.cold), ("warm", times.warm))
        }
        found.append(
            {
                "key": f"{choice.group}/{direction}/{dtype_name}/{choice.layout}/{'x'.join(map(str, shape))}",
                "group": choice.group,
                "direction": direction,
                "dtype": dtype_name,
                "layout": choice.layout,
                "shape": shape,
                "floor": {"bytes": times.floor_bytes} if times.floor_bytes else None,
                "check": timed.check,
                "memory": {},
                "refused": timed.refused,
                "kept": measured,
                "default": None,
            }
        )
    return found


def selected(choice: Choice, options) -> bool:
    dtype_name = str(choice.dtype).removeprefix("torch.")
    return options.dtype in (None, dtype_name) and (options.case is None or options.case in choice.key)


def run(op: str, device, options) -> dict:
    """The record of one op on a device."""
    before = list(os.getloadavg())
    plan = PLANS["rehearsal" if device.kind != "cuda" else "quick" if options.quick else "full"]
    plan = plan if options.compile else replace(plan, compiled=())
    wanted, failed = choices(plan, case_makers(device, op))
    with_compile = {choice.key for choice in wanted if choice.compiled}
    wanted = [choice for choice in wanted if choice.compiled or choice.key not in with_compile]
    entries, refused = {}, dict(failed)
    for choice in (choice for choice in wanted if selected(choice, options)):
        label = choice.key + " torch.compile" * choice.compiled
        start = time.monotonic()
        try:
            found = entries_of(time_case(device, choice, plan))
        except Exception as error:  # one case that fails must not cost the others; its reason is in the record
            refused[label] = common.reason(error)
            print(f"{label:62} refused: {refused[label]}", flush=True)
            device.check_alive(refused[label])
            continue
        finally:
            device.release()
        entries |= {entry["key"]: entry for entry in found}
        for entry in found:
            print(common.row(entry, "kept", time.monotonic() - start), flush=True)
    version, _ = machine.package_facts()
    commit, dirty = machine.git_state(BENCHMARKS.parent)
    return {
        "schema_version": record.SCHEMA_VERSION,
        "op": op,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit,
        "dirty": dirty,
        "version": version,
        "torch": torch.__version__,
        "python": machine.python_version(),
        "machine": {**machine.facts(), "name": device.slug},
        "isa": device.architecture,
        "threads": torch.get_num_threads(),
        "quick": options.quick,
        "forced": [] if device.kind == "cuda" else ["a rehearsal on the CPU: nothing in it counts"],
        "load": {"before": before, "after": list(os.getloadavg()), "other_cpu_before": 0.0},
        "allocator": {"kept": {"set_by": "torch's caching allocator on the device", "reuse_page_faults": 0}},
        "caches": {"last_level": device.l2_bytes, "written_between_calls": device.flush_bytes},
        "entries": list(entries.values()),
        "refused": [{"key": key, "reason": why} for key, why in refused.items()],
    }
