"""The benchmark runner of every op: what a case is, how it is checked, timed and weighed.

An op's file, ``benchmarks/bench_<op>.py``, has one function, ``cases() -> list[Case]``; ``benchmarks/run.py`` does the
rest. The rules: no time is taken of a wrong result; all candidates of a case run interleaved in one process, and every
ratio is taken within a round before its median; the floor is a copy of as many bytes as the ideal kernel moves, timed
in the same rounds; a compiled candidate that broke its graph, recompiled or compiled nothing is refused, not recorded;
a backward pass is what autograd's engine runs, without the checks in Python of torch.autograd.grad before it, which a
training step pays once and not once per op.

Every case is timed twice. Cold: other memory is written before each timed call of each candidate, as between two calls
of an op in a training step; targets and tables use these times. Warm: the same call again and again on tensors that
stay in the caches as far as they fit.
"""

import contextvars
import copy
import gc
import importlib.util
import math
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

from benchmarks import machine, record

SUBJECT = "camox"
BASELINE = "eager"
CPU = torch.device("cpu")
COMPILE_LIMIT_S = 180
run_backward = torch.autograd.Variable._execution_engine.run_backward
GEMM_SIZE = 1024


class Skipped(Exception):
    """Why something was not measured; its text goes into the record."""


class NoisyMachine(Skipped):
    """Other processes used the machine while a case was timed."""


def camox_attr(path: str):
    """``camox_ops.<path>``, or Skipped, which says that this build has no such op."""
    try:
        import camox_ops
    except ImportError as error:
        raise Skipped(f"camox_ops cannot be imported: {error}") from None
    found = camox_ops
    for name in path.split("."):
        found = getattr(found, name, None)
        if found is None:
            raise Skipped(f"camox_ops.{path}: op not in this build")
    return found


class Captured:
    """A training step that examples.common.graph replays as a CUDA graph. The first call captures it: there a step that
    cannot be captured is rejected, and no later call takes longer than a replay."""

    def __init__(self, step):
        self.step, self.captured = step, False

    def __call__(self, *inputs):
        if not self.captured:
            from examples.common.graph import WARM_UP

            for _ in range(WARM_UP):
                self.step(*inputs)
            self.captured = True
        return self.step(*inputs)


@dataclass(frozen=True)
class Case:
    """One row of a benchmark.

    group        the op or variant, as targets and tables name it ("edge_maps")
    shape        shape of the main input
    make_inputs  () -> tuple of tensors, the positional arguments of every candidate
    candidates   () -> {"camox": f, "eager": f, ...}; functions or nn.Modules of the inputs that return a tensor or a
                 tuple of tensors. "compile" (absent: the eager one; None: left out) and names that begin with
                 "compile_" go through torch.compile; any other name is a peer. All must give the same numbers.
                 Skipped, raised here, leaves the case out.
    direction    "forward" (under no_grad), "forward_backward", or "step": the function does its own backward
    floor_bytes  bytes that the ideal kernel reads plus writes, all passes
    floor_flops  its FLOP instead, for ops bound by a GEMM
    compare_with {name: case}: that case's camox on its own inputs, timed in the same rounds as ``camox_<name>``
    grad_inputs  positions of the inputs that get gradients; None: all floating-point ones
    verify       (numbers by name, inputs) -> None or what is wrong, for ops whose numbers are random
    own_outputs  () -> camox as a function of the inputs that writes into given outputs: ``camox_own_outputs``
    default_allocator  also measured with the allocator's defaults
    rounds       so many, of one call each, cold only: for steps of seconds, which overwrite the caches themselves and
                 which the checks (and, of the baseline, the case itself) have called. None: by the effort
    quick        part of --quick
    """

    group: str
    shape: tuple[int, ...]
    make_inputs: Callable[[], tuple]
    candidates: Callable[[], dict]
    direction: str = "forward"
    dtype: torch.dtype = torch.float32
    layout: str = "contiguous"
    floor_bytes: int = 0
    floor_flops: int = 0
    compare_with: dict = field(default_factory=dict)
    grad_inputs: tuple[int, ...] | None = None
    verify: Callable | None = None
    own_outputs: Callable | None = None
    default_allocator: bool = True
    rounds: int | None = None
    quick: bool = False

    def __post_init__(self):
        if self.direction not in ("forward", "forward_backward", "step"):
            raise ValueError(f"direction: expected forward, forward_backward or step, got {self.direction!r}")
        if self.direction == "step" and self.verify is None:
            raise ValueError("verify: a step changes its own state and needs a check of its own")
        if self.layout not in ("contiguous", "channels_last"):
            raise ValueError(f"layout: expected contiguous or channels_last, got {self.layout!r}")
        if self.floor_bytes and self.floor_flops:
            raise ValueError("floor: give floor_bytes or floor_flops, not both")

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def key(self) -> str:
        shape = "x".join(map(str, self.shape))
        return f"{self.group}/{self.direction}/{self.dtype_name}/{self.layout}/{shape}"


DIRECTIONS_ON_GPU = ("forward", "backward", "forward_backward")


def on_gpu(shapes, rehearsal, size="large", directions=DIRECTIONS_ON_GPU, dtypes=None, full=False):
    """What run.py --device cuda measures of a make_case(shape, direction, dtype, layout), contiguous, in the place of
    images of a plan (cuda.py): these shapes, the one of a rehearsal, only these directions and dtypes (None: those of
    the plan), and with `full` only in a full run."""

    def mark(make_case):
        make_case.on_gpu = {
            **{"shapes": {size: shapes}, "rehearsal": {size: (rehearsal,)}},
            **{"directions": directions, "dtypes": dtypes, "full": full},
        }
        return make_case

    return mark


def if_installed(package: str, make: Callable[[], Callable]) -> Callable:
    """A peer, make(), or where its package is missing a function that is refused with that reason."""
    if importlib.util.find_spec(package) is not None:
        return make()

    def missing(*_):
        raise Skipped(f"{package} is not installed")

    return missing


_numbers_made_on = contextvars.ContextVar("numbers_made_on", default=CPU)


@contextmanager
def numbers_made_on(device: torch.device):
    """Where random_tensor makes its tensors: on a GPU those of large images take no time."""
    token = _numbers_made_on.set(device)
    try:
        yield
    finally:
        _numbers_made_on.reset(token)


def random_tensor(shape, *, dtype=torch.float32, layout="contiguous", seed=0, scale=1.0) -> torch.Tensor:
    """Normal numbers, the same for one seed on one device whatever the layout."""
    device = _numbers_made_on.get()
    x = torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device) * scale
    return x.to(dtype, memory_format=torch.channels_last if layout == "channels_last" else torch.contiguous_format)


def tensors_of(outputs) -> tuple[torch.Tensor, ...]:
    outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
    return tuple(t for t in outputs if isinstance(t, torch.Tensor) and t.is_floating_point())


class Candidate:
    """A candidate with inputs, gradients that flow in, and the tensors that gradients are asked of."""

    def __init__(self, case: Case, function, inputs, upstream=None):
        self.function, self.inputs, self.upstream = function, inputs, tuple(upstream or ())  # tuples, for the engine
        self.backward = case.direction == "forward_backward"
        named = sorted(function.named_parameters()) if isinstance(function, torch.nn.Module) else []
        self.parameters = {name.removeprefix("_orig_mod."): p for name, p in named}  # torch.compile adds the prefix
        picked = range(len(inputs)) if case.grad_inputs is None else case.grad_inputs
        leaves = {f"input{i}": inputs[i] for i in picked if inputs[i].is_floating_point()}
        self.targets = {**leaves, **self.parameters} if self.backward else {}
        self._asked = tuple(self.targets.values())
        for tensor in self._asked:
            tensor.requires_grad_()

    def step(self):
        """What is timed: a forward pass, or a forward and a backward pass."""
        outputs = self.function(*self.inputs)
        if not self.backward:
            return outputs
        graph = (tensors_of(outputs), self.upstream, False, False, self._asked, False)
        return run_backward(*graph, accumulate_grad=False)

    def numbers(self) -> dict[str, torch.Tensor]:
        """Every output and gradient by name."""
        outputs = tensors_of(self.function(*self.inputs))
        named = {f"output{i}": t.detach() for i, t in enumerate(outputs)}
        if self.backward:
            grads = torch.autograd.grad(outputs, self._asked, self.upstream)
            named |= {f"grad {name}": g for name, g in zip(self.targets, grads, strict=True)}
        return named


def upstream_like(case: Case, function, inputs) -> list[torch.Tensor]:
    """Fixed random gradients, one per output, in the memory format of the case."""
    with torch.no_grad():
        outputs = tensors_of(function(*inputs))
    layouts = [case.layout if t.dim() == 4 else "contiguous" for t in outputs]
    return [
        random_tensor(t.shape, dtype=t.dtype, layout=layout, seed=1000 + i)
        for i, (t, layout) in enumerate(zip(outputs, layouts, strict=True))
    ]


def float64_numbers(case: Case, function, inputs, upstream) -> dict[str, torch.Tensor]:
    """The baseline in float64: the truth that all candidates are compared with."""
    function = copy.deepcopy(function).double() if isinstance(function, torch.nn.Module) else function
    inputs = tuple(t.detach().double() if t.is_floating_point() else t for t in inputs)
    return Candidate(case, function, inputs, [g.double() for g in upstream]).numbers()


def share_of_tolerance(numbers: dict, baseline: dict, truth: dict) -> float:
    """Largest |candidate - truth| over 2 * max|baseline - truth| + 4 * eps * max|truth|; above 1 is a wrong result.

    Raises Skipped where names, shapes or dtypes differ from the baseline's.
    """
    if numbers.keys() != baseline.keys():
        raise Skipped(f"gives {sorted(numbers)} where {BASELINE} gives {sorted(baseline)}")
    worst = 0.0
    for name, value in numbers.items():
        expected = baseline[name]
        if value.shape != expected.shape or value.dtype != expected.dtype:
            got, wanted = (f"{tuple(t.shape)} {t.dtype}" for t in (value, expected))
            raise Skipped(f"{name} is {got}, {BASELINE}'s {wanted}")
        if not value.numel():
            continue
        error = (value.double() - truth[name]).abs().max().item()
        allowed = 2 * (expected.double() - truth[name]).abs().max().item()
        allowed += 4 * torch.finfo(value.dtype).eps * truth[name].abs().max().item()
        share = error / allowed if allowed else (0.0 if error == 0 else math.inf)
        worst = share if math.isnan(share) else max(worst, share)
        if math.isnan(worst):
            break
    return worst


def checked(case: Case, candidate: Candidate, baseline: dict, truth: dict) -> float:
    """How much of the tolerance a candidate uses; Skipped when its result is wrong."""
    numbers = candidate.numbers()
    if case.verify is not None:
        wrong = case.verify(numbers, candidate.inputs)
        if wrong:
            raise Skipped(f"{record.WRONG}: {wrong}")
        return 0.0
    share = share_of_tolerance(numbers, baseline, truth)
    if not share <= 1:
        raise Skipped(f"{record.WRONG}: {share:.3g} times the tolerance against float64")
    return share


@contextmanager
def time_limit(seconds: int, what: str):
    """Raises Skipped after ``seconds`` of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum, frame):
        raise Skipped(f"{what} did not finish in {seconds} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def forget_compiled():
    """Makes dynamo forget all earlier cases: their graphs, limits and counts."""
    torch._dynamo.reset()
    counters.clear()


def graphs_compiled() -> int:
    return counters["stats"]["unique_graphs"]


def compile_fault(graphs: int) -> str | None:
    """Why dynamo's counts forbid recording a compiled candidate when ``graphs`` were expected by now, or None."""
    breaks = sum(counters["graph_break"].values())
    if breaks:
        return f"graph breaks: {breaks}"
    if graphs_compiled() < graphs:
        return "dynamo compiled nothing"
    if graphs_compiled() > graphs:
        return f"recompiled: {graphs_compiled()} graphs where {graphs} were expected"
    return None


def reason(error: Exception, limit: int = 200) -> str:
    """An exception as one line of a record."""
    text = " ".join(str(error).split())
    return text if isinstance(error, Skipped) else f"{type(error).__name__}: {text}"[:limit]


@dataclass(frozen=True)
class Effort:
    """How long to measure: seconds of one warm sample at least, seconds of one case about with cold and with warm
    caches, rounds within bounds, how often a case on a noisy machine is tried and how many seconds each
    further attempt waits for quiet at most."""

    sample_s: float
    cold_s: float
    warm_s: float
    min_rounds: int
    max_rounds: int
    attempts: int
    patience_s: float

    def rounds(self, budget_s: float, round_s: float) -> int:
        return max(self.min_rounds, min(self.max_rounds, int(budget_s / round_s)))


FULL = Effort(sample_s=0.004, cold_s=1.5, warm_s=0.5, min_rounds=9, max_rounds=41, attempts=3, patience_s=45.0)
QUICK = Effort(sample_s=0.002, cold_s=0.5, warm_s=0.3, min_rounds=5, max_rounds=11, attempts=2, patience_s=3.0)


def seconds_of(step: Callable, reps: int) -> float:
    start = time.perf_counter_ns()
    for _ in range(reps):
        step()
    return (time.perf_counter_ns() - start) * 1e-9


def repetitions(step: Callable, sample_s: float) -> int:
    """How many calls fill one sample."""
    reps = 1
    while (taken := seconds_of(step, reps)) < sample_s:
        reps = max(reps + 1, min(10 * reps, math.ceil(1.1 * reps * sample_s / max(taken, 1e-9))))
    return reps


def held(step: Callable):
    """What a candidate's function needs while it is timed, put in place before and outside of the time."""
    function = getattr(getattr(step, "__self__", None), "function", None)
    return getattr(function, "held", nullcontext)()


def interleave(steps: dict[str, Callable], reps: dict[str, int], rounds: int, before: Callable) -> dict:
    """Seconds per call of every step, one sample of ``reps`` calls per round, ``before(step)`` called before each.

    The order of the steps is another in each round, the same ones in every run: a step that always came after one that
    runs the same code, such as the op on another layout, would find the processor's predictors trained.
    """
    order = list(steps)
    shuffled = random.Random(0)
    samples = {name: [] for name in order}
    enabled = gc.isenabled()
    gc.disable()
    try:
        for _ in range(rounds):
            shuffled.shuffle(order)
            for name in order:
                with held(steps[name]):
                    before(steps[name])
                    samples[name].append(seconds_of(steps[name], reps[name]) / reps[name])
    finally:
        if enabled:
            gc.enable()
    return samples


def time_cold(steps: dict, effort: Effort, evict: Callable, rounds: int | None) -> tuple[dict, dict]:
    """(samples, calls per sample) of single calls, other memory written before each. With ``rounds`` given, steps are
    long and were called before."""
    reps = dict.fromkeys(steps, 1)
    if rounds is None:
        for step in steps.values():
            seconds_of(step, 3)
        start = time.monotonic()
        for step in steps.values():
            evict()
            step()
        rounds = effort.rounds(effort.cold_s, time.monotonic() - start)
    return interleave(steps, reps, rounds, before=lambda step: evict()), reps


def time_warm(steps: dict, effort: Effort) -> tuple[dict, dict]:
    """(samples, calls per sample) of calls in a row, after one untimed call of the same step."""
    reps = {}
    for name, step in steps.items():
        seconds_of(step, 3)
        reps[name] = repetitions(step, effort.sample_s)
    round_s = sum(seconds_of(step, reps[name] + 1) for name, step in steps.items())
    rounds = effort.rounds(effort.warm_s, round_s)
    return interleave(steps, reps, rounds, before=lambda step: step()), reps


def on_quiet_machine(measure: Callable, effort: Effort, force: bool) -> tuple[dict, dict, float]:
    """What ``measure`` gives and the cores that other processes used meanwhile; NoisyMachine when those are too many in
    every attempt."""
    for attempt in range(effort.attempts):
        if attempt:
            machine.wait_for_quiet(effort.patience_s)
        others = machine.OtherCpu()
        samples, reps = measure()
        other_cpu = others.cores()
        if other_cpu <= record.OTHER_CPU_LIMIT or force:
            return samples, reps, other_cpu
    raise NoisyMachine(f"other processes used {other_cpu:.2f} cores in each of {effort.attempts} attempts")


def floor_step(case: Case) -> tuple[Callable, float]:
    """The floor as a step, and what its time has to be multiplied by."""
    if case.floor_bytes:
        src = torch.ones(max(1, case.floor_bytes // 8))
        dst = torch.zeros_like(src)
        return lambda: dst.copy_(src), 1.0
    a = torch.ones(GEMM_SIZE, GEMM_SIZE, dtype=case.dtype)
    out = torch.empty_like(a)
    return lambda: torch.mm(a, a, out=out), case.floor_flops / (2 * GEMM_SIZE**3)


def summarise(samples: dict[str, list[float]], reps: dict[str, int], other_cpu: float) -> dict:
    """The measurement of a record; ``speed[x]`` is time of x / time of camox, taken round by round."""
    ours = samples[SUBJECT]
    return {
        "time_us": {
            name: {**record.spread([1e6 * t for t in taken]), "rounds": len(taken), "reps": reps[name]}
            for name, taken in samples.items()
        },
        "speed": {
            name: record.spread([t / o for t, o in zip(taken, ours, strict=True)])
            for name, taken in samples.items()
            if name != SUBJECT
        },
        "other_cpu": round(other_cpu, 3),
    }


@contextmanager
def saved_for_backward(candidate: Candidate):
    """A dict that holds afterwards the bytes of the distinct storages that a forward pass in the block saved: inputs
    and parameters apart from what the op made. The graph keeps them while others are saved, not this function."""
    given = {t.untyped_storage().data_ptr() for t in (*candidate.inputs, *candidate.parameters.values())}
    sizes, found = {}, {}

    def note(tensor):
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # an output that its own node keeps would never be freed

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield found
    found["saved"] = sum(size for at, size in sizes.items() if at not in given)
    found["saved_inputs"] = sum(size for at, size in sizes.items() if at in given)


def allocated_by(step: Callable) -> tuple[int, int]:
    """(peak, end) bytes that PyTorch's CPU allocator holds beyond those held before, while what it returns is alive."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        result = step()
    del result
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak, now


def memory_of(candidate: Candidate) -> dict:
    """What a training step saves and holds.

    ``held_after_forward`` counts outputs and all that the graph keeps alive, also what a Function hides from the
    saved-tensor hooks; ``peak`` is the most of the whole step, gradients included; ``returned`` is the outputs and the
    gradients alone.
    """
    watched = (lambda: candidate.function(*candidate.inputs)) if candidate.backward else candidate.step
    try:
        with saved_for_backward(candidate) as saved:
            peak, held = allocated_by(watched)
    except Exception:  # a compiled function may refuse hooks; the profiler's numbers stand
        saved = {"saved": None, "saved_inputs": None}
        peak, held = allocated_by(watched)
    if candidate.backward:
        peak, _ = allocated_by(candidate.step)
    returned = sum(t.nbytes for t in candidate.numbers().values()) if candidate.backward else 0
    return {**saved, "held_after_forward": max(0, held), "peak": peak, "returned": returned}


def exact_float32(device: torch.device):
    """TF32 would loosen the tolerance; times are taken with torch's defaults."""
    return torch.backends.cudnn.flags(enabled=True, allow_tf32=False) if device.type == "cuda" else nullcontext()


class Candidates:
    """The candidates of a case whose results are right, by name in ``accepted``; why others were rejected goes into
    ``entry["refused"]``, the share of the tolerance that a result uses into ``entry["check"]``.

    Raises Skipped when camox itself is missing or wrong.
    """

    def __init__(self, case: Case, entry: dict, device: torch.device = CPU):
        self.case, self.entry, self.device = case, entry, device
        # where the modules among them are made, and by the same numbers as those that a case checks them with
        with nullcontext() if device == CPU else device, exact_float32(device):
            functions = dict(case.candidates())
        for needed in (SUBJECT, BASELINE):
            if needed not in functions:
                raise Skipped(f"the case has no candidate {needed!r}")
        baseline = functions.pop(BASELINE)
        functions.setdefault("compile", baseline)
        compiled = [name for name in functions if re.match(r"compile(_|$)", name)]
        self.to_compile = {name: functions.pop(name) for name in compiled}
        self.to_compile = {name: function for name, function in self.to_compile.items() if function is not None}
        self.inputs = case.make_inputs() if device == CPU else tuple(t.to(device) for t in case.make_inputs())
        backward = case.direction == "forward_backward"
        self.upstream = [g.to(device) for g in upstream_like(case, baseline, self.inputs)] if backward else []
        self.accepted = {BASELINE: Candidate(case, baseline, self.inputs, self.upstream)}
        self.truth, self.numbers = {}, {}
        if case.verify is None:
            with exact_float32(device):
                self.truth = float64_numbers(case, baseline, self.inputs, self.upstream)
                self.accepted[BASELINE].numbers()  # the first pass of a process may take another numeric path
                self.numbers = self.accepted[BASELINE].numbers()
        self.accept(SUBJECT, functions.pop(SUBJECT))
        for name, function in functions.items():
            try:
                self.accept(name, function)
            except Exception as error:
                entry["refused"][name] = reason(error)

    def accept(self, name: str, function) -> None:
        """Takes a function whose numbers are right; raises Skipped where they are wrong."""
        candidate = Candidate(self.case, function, self.inputs, self.upstream)
        with exact_float32(self.device):
            share = checked(self.case, candidate, self.numbers, self.truth)
        self.entry["check"][name] = float(f"{share:.3g}")
        self.accepted[name] = candidate

    def reject(self, name: str, why: str) -> None:
        self.entry["refused"][name] = why
        self.entry["check"].pop(name, None)
        self.accepted.pop(name, None)

    def compile(self, limit_s: Callable[[], int] = lambda: COMPILE_LIMIT_S) -> None:
        """Those that go through torch.compile too, each within limit_s()."""
        forget_compiled()
        for name, function in self.to_compile.items():
            graphs = graphs_compiled()
            try:
                with time_limit(limit_s(), "torch.compile"):
                    self.accept(name, torch.compile(function, dynamic=False, fullgraph=True))
                    for _ in range(3):
                        self.accepted[name].step()
                fault = compile_fault(graphs + 1)
            except Exception as error:
                fault = reason(error)
            if fault:
                self.reject(name, fault)

    def compiled(self) -> list[str]:
        return [name for name in self.accepted if name.startswith("compile")]


def candidates_of(case: Case, entry: dict, with_compile: bool) -> Candidates:
    """All candidates on the CPU, with what the case asks for beside them: own outputs, other cases to compare with."""
    candidates = Candidates(case, entry)
    if case.own_outputs is not None:
        candidates.accept(f"{SUBJECT}_own_outputs", case.own_outputs())
    for name, other in case.compare_with.items():
        if other.direction != case.direction:
            raise ValueError(f"compare_with {name}: direction {other.direction}, the case's is {case.direction}")
        candidates.accepted[f"{SUBJECT}_{name}"] = Candidates(other, {"check": {}, "refused": {}}).accepted[SUBJECT]
    if with_compile:
        candidates.compile()
    return candidates


def row(entry: dict, allocator: str, seconds: float) -> str:
    """One line of the table that a run prints: cold times in microseconds, then how many times slower than camox."""
    measured = entry[allocator]["cold"]
    ours = measured["time_us"][SUBJECT]
    iqr = 100 * (ours["q3"] - ours["q1"]) / ours["median"]
    ratios = "  ".join(f"{name} {spread['median']:.2f}x" for name, spread in measured["speed"].items())
    refused = "".join(f"  [{name}: {reason}]" for name, reason in entry["refused"].items())
    return f"{entry['key']:62} {ours['median']:9.1f} us +-{iqr:3.0f}%  {ratios}{refused}  ({seconds:.1f} s)"


def run_case(
    case: Case, effort: Effort, evict: Callable, *, with_compile=True, with_memory=True, with_warm=True, force=False
) -> tuple[dict, dict]:
    """(entry without measurements, {"cold": ..., "warm": ... or None}); Skipped when there is nothing to record."""
    entry = {
        "key": case.key,
        "group": case.group,
        "direction": case.direction,
        "dtype": case.dtype_name,
        "layout": case.layout,
        "shape": list(case.shape),
        "floor": {"bytes": case.floor_bytes} if case.floor_bytes else None,
        "check": {},
        "memory": {},
        "refused": {},
    }
    if case.floor_flops:
        entry["floor"] = {"flops": case.floor_flops}
    with torch.set_grad_enabled(case.direction != "forward"):
        candidates = candidates_of(case, entry, with_compile)
        accepted = candidates.accepted
        steps = {name: candidate.step for name, candidate in accepted.items()}
        scale = 1.0
        if entry["floor"]:
            steps["floor"], scale = floor_step(case)
            steps["floor"]()
        graphs = graphs_compiled()
        gc.collect()
        ways = {"cold": lambda: time_cold(steps, effort, evict, case.rounds)}
        if with_warm and case.rounds is None:
            ways["warm"] = lambda: time_warm(steps, effort)
        timed = {caches: on_quiet_machine(measure, effort, force) for caches, measure in ways.items()}
        compiled = candidates.compiled()
        if compiled and (fault := compile_fault(graphs)):
            for name in compiled:
                candidates.reject(name, fault)
                for samples, _, _ in timed.values():
                    del samples[name]
        for samples, _, _ in timed.values():
            if "floor" in samples:
                samples["floor"] = [t * scale for t in samples["floor"]]
        if with_memory and case.direction != "forward":
            own = f"{SUBJECT}_"
            entry["memory"] = {
                name: memory_of(candidate) for name, candidate in accepted.items() if not name.startswith(own)
            }
    return entry, {"warm": None, **{caches: summarise(*found) for caches, found in timed.items()}}
