"""The benchmark runner on toy ops: what it measures, what it refuses, what it writes; needs no camox_ops binary."""

import copy
import functools
import importlib
import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from benchmarks import base, bench_edge, common, machine, record, run, targets  # noqa: E402
from benchmarks.common import Case, Effort, Skipped  # noqa: E402

ONCE = Effort(sample_s=0.0, cold_s=0.0, warm_s=0.0, min_rounds=3, max_rounds=3, attempts=2, patience_s=0.0)
SHAPE = (4, 33)


def run_case(case, effort, **options):
    """common.run_case where no test waits for the caches to be overwritten."""
    return common.run_case(case, effort, evict=lambda: None, **options)


def toy(direction="forward", **candidates) -> Case:
    """x -> exp(x) + 1 with both needed candidates right unless given otherwise."""
    chosen = {"camox": lambda x: 1 + torch.exp(x), "eager": lambda x: torch.exp(x) + 1, "compile": None, **candidates}
    return Case(
        group="toy",
        shape=SHAPE,
        make_inputs=lambda: (common.random_tensor(SHAPE, seed=1),),
        candidates=lambda: chosen,
        direction=direction,
        floor_bytes=8 * 4 * 33,
    )


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch):
    """The load of the machine that runs the tests is no part of them."""
    monkeypatch.setattr(machine.OtherCpu, "cores", lambda self: 0.0)
    monkeypatch.setattr(common.time, "sleep", lambda seconds: None)


@pytest.fixture
def light_compile(monkeypatch):
    """Graphs as torch.compile captures them, without generating code."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))


def test_spread_is_median_and_quartiles():
    assert record.spread([1.0, 2.0, 3.0, 4.0, 100.0]) == {"median": 3.0, "q1": 2.0, "q3": 4.0}
    assert record.spread([7.0]) == {"median": 7.0, "q1": 7.0, "q3": 7.0}


def test_geomean():
    assert record.geomean([2, 8]) == pytest.approx(4)
    with pytest.raises(ValueError, match="positive"):
        record.geomean([1, 0])
    with pytest.raises(ValueError, match="positive"):
        record.geomean([])


def test_candidates_take_turns():
    calls = []
    steps = {name: functools.partial(calls.append, name) for name in "abc"}
    samples, reps = common.time_warm(steps, ONCE)
    assert reps == {"a": 1, "b": 1, "c": 1}
    assert {name: len(taken) for name, taken in samples.items()} == {"a": 3, "b": 3, "c": 3}
    timed = calls[-18:]
    assert timed[0::2] == timed[1::2], "each sample follows one untimed call of the same candidate"
    assert_rounds_in_changing_order(timed[0::2])


def assert_rounds_in_changing_order(names):
    rounds = [tuple(names[i : i + 3]) for i in range(0, 9, 3)]
    assert all(sorted(turn) == list("abc") for turn in rounds)
    followers = {pair for turn in rounds for pair in itertools.pairwise(turn)}
    assert any((b, a) in followers for a, b in followers), "no candidate always follows the same one"


@pytest.mark.parametrize("rounds", [None, 3])
def test_other_memory_is_written_before_every_cold_call(rounds):
    calls = []
    steps = {name: functools.partial(calls.append, name) for name in "abc"}
    samples, reps = common.time_cold(steps, ONCE, functools.partial(calls.append, "evict"), rounds)
    assert reps == {"a": 1, "b": 1, "c": 1}
    assert {name: len(taken) for name, taken in samples.items()} == {"a": 3, "b": 3, "c": 3}
    assert calls[-18::2] == ["evict"] * 9
    assert_rounds_in_changing_order(calls[-17::2])
    if rounds:
        assert len(calls) == 18, "a step of seconds is not called untimed"


def test_eviction_writes_three_times_the_last_level_cache(monkeypatch):
    monkeypatch.setattr(machine, "last_level_cache", lambda: 1 << 20)
    evict = machine.Eviction()
    evict()
    assert evict.facts() == {"last_level": 1 << 20, "written_between_calls": 3 << 20}
    assert evict._memory.nbytes == 3 << 20 and evict._memory.min() == 1
    monkeypatch.setattr(machine, "last_level_cache", lambda: 1 << 30)
    monkeypatch.setattr(machine, "EVICTION_LIMIT", 5 << 20)
    assert machine.Eviction().facts()["written_between_calls"] == 5 << 20


@pytest.mark.parametrize("of_step", [7_000, 3_000_000])
def test_a_sample_is_long_enough(monkeypatch, of_step):
    """By a clock that only the step moves, by so many nanoseconds."""
    now = 0

    def step():
        nonlocal now
        now += of_step

    monkeypatch.setattr(common, "time", SimpleNamespace(perf_counter_ns=lambda: now))
    reps = common.repetitions(step, 0.002)
    assert common.seconds_of(step, reps) >= 0.002
    assert reps == 1 or common.seconds_of(step, reps // 2) < 0.002


def test_ratios_are_taken_within_a_round():
    samples = {"camox": [1.0, 10.0, 2.0], "eager": [3.0, 30.0, 8.0]}
    measured = common.summarise(samples, {"camox": 5, "eager": 2}, 0.0)
    assert measured["speed"]["eager"]["median"] == 3.0
    assert measured["time_us"]["camox"] == {"median": 2e6, "q1": 1.5e6, "q3": 6e6, "rounds": 3, "reps": 5}


@pytest.mark.parametrize("direction", ["forward", "forward_backward"])
def test_a_right_case_is_measured(direction):
    entry, measured = run_case(toy(direction, other=lambda x: x.exp().add(1)), ONCE)
    for caches in ("cold", "warm"):
        assert measured[caches]["speed"].keys() == {"eager", "other", "floor"}
    assert entry["check"].keys() == {"camox", "other"}
    assert entry["refused"] == {}
    assert bool(entry["memory"]) == (direction == "forward_backward")
    whole = {**entry, "kept": measured, "default": None}
    assert record.problems(whole, record.ENTRY) == []


class WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.exp())
        return x.exp() + 1

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0] * 1.001


@pytest.mark.parametrize(
    ("direction", "wrong", "message"),
    [
        ("forward", lambda x: torch.exp(x) + 1.001, "wrong result"),
        ("forward", lambda x: torch.exp(x) * float("nan"), "wrong result: nan"),
        ("forward", lambda x: (torch.exp(x) + 1)[:2], "shape|output0 is"),
        ("forward", lambda x: (torch.exp(x) + 1).double(), "output0 is .*float64"),
        ("forward", lambda x: (torch.exp(x) + 1, x), "gives"),
        ("forward_backward", WrongBackward.apply, "wrong result"),
    ],
)
def test_wrong_results_are_not_timed(direction, wrong, message):
    with pytest.raises(Skipped, match=message):
        run_case(toy(direction, camox=wrong), ONCE)
    entry, measured = run_case(toy(direction, peer=wrong), ONCE)
    assert "peer" in entry["refused"]
    assert "peer" not in measured["cold"]["speed"]


def test_modules_are_compared_with_their_parameters_gradients():
    class Scale(torch.nn.Module):
        def __init__(self, trick=1.0):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.full((33,), 2.0))
            self.trick = trick

        def forward(self, x):
            return x * self.weight + (self.trick - 1) * (self.weight - self.weight.detach())

    entry, _ = run_case(toy("forward_backward", camox=Scale(), eager=Scale()), ONCE)
    assert entry["check"]["camox"] <= 1
    with pytest.raises(Skipped, match="wrong result"):
        run_case(toy("forward_backward", camox=Scale(1.5), eager=Scale()), ONCE)


def test_random_ops_bring_their_own_check():
    case = replace(toy(camox=torch.rand_like), verify=lambda numbers, inputs: None)
    assert run_case(case, ONCE)[0]["check"] == {"camox": 0.0}
    with pytest.raises(Skipped, match="wrong result: all alike"):
        run_case(replace(case, verify=lambda numbers, inputs: "all alike"), ONCE)


def test_a_step_needs_its_own_check():
    with pytest.raises(ValueError, match="verify"):
        toy("step")


def test_compiled_candidates_are_measured(light_compile):
    case = toy("forward_backward", compile=lambda x: torch.exp(x) + 1, compile_other=lambda x: 1 + x.exp())
    entry, measured = run_case(case, ONCE)
    assert entry["refused"] == {}
    assert {"compile", "compile_other"} <= measured["cold"]["speed"].keys()
    assert {"compile", "compile_other"} <= entry["memory"].keys()


def test_the_eager_candidate_is_compiled_by_default(light_compile):
    case = toy()
    chosen = {name: f for name, f in case.candidates().items() if name != "compile"}
    _, measured = run_case(replace(case, candidates=lambda: chosen), ONCE)
    assert "compile" in measured["cold"]["speed"]


def test_a_graph_break_is_refused(light_compile):
    def broken(x):
        y = torch.exp(x)
        torch._dynamo.graph_break()
        return y + 1

    assert_compile_refused_for(run_case(toy(compile=broken), ONCE), "graph_break")


class Guarded:
    """A number that dynamo guards: another value is another graph."""

    number = 0


def guarded(x):
    return torch.exp(x) + 1 + 0 * Guarded.number


traces_attributes = pytest.mark.skipif(
    torch.__version__ < (2, 13),
    reason="torch.compile does not recompile for a class's attribute, or cannot trace that it is set (2.10)",
)


def assert_compile_refused_for(found, why):
    entry, measured = found
    assert why in entry["refused"]["compile"].lower()
    assert all("compile" not in measured[caches]["speed"] for caches in ("cold", "warm"))
    assert "compile" not in entry["check"]
    assert "compile" not in entry["memory"]


@traces_attributes
def test_hitting_the_recompile_limit_is_refused(light_compile):
    def grows(x):
        Guarded.number += 1
        return guarded(x)

    assert_compile_refused_for(run_case(toy(compile=grows), ONCE), "recompile")


@traces_attributes
def test_recompiling_while_timed_is_refused(light_compile):
    calls = []

    def camox(x):
        calls.append(1)
        Guarded.number = len(calls) // 4
        return torch.exp(x) + 1

    assert_compile_refused_for(run_case(toy(camox=camox, compile=guarded), ONCE), "recompiled")


def test_a_column_that_is_silently_eager_is_refused(light_compile):
    with torch._dynamo.config.patch(disable=True):
        found = run_case(toy(compile=guarded), ONCE)
    assert_compile_refused_for(found, "compiled")
    common.forget_compiled()
    assert common.compile_fault(1) == "dynamo compiled nothing"


def test_a_compiled_function_with_wrong_numbers_is_refused(light_compile):
    assert_compile_refused_for(run_case(toy(compile=lambda x: torch.exp(x) + 1.01), ONCE), "wrong result")


def test_compiling_has_a_time_limit(monkeypatch):
    with pytest.raises(Skipped, match="did not finish in 1 s"), common.time_limit(1, "compiling"):
        while True:
            pass


def test_cases_to_compare_with_run_in_the_same_rounds():
    half = replace(toy(), dtype=torch.bfloat16, compare_with={"float32": toy()})
    _, measured = run_case(half, ONCE)
    for times in (measured["cold"]["time_us"], measured["warm"]["time_us"]):
        assert times["camox_float32"]["rounds"] == times["camox"]["rounds"]
    with pytest.raises(ValueError, match="compare_with float32: direction"):
        run_case(replace(half, compare_with={"float32": toy("forward_backward")}), ONCE)


def test_an_op_that_is_not_built_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "camox_ops", None)
    with pytest.raises(Skipped, match="cannot be imported"):
        common.camox_attr("edge_maps")
    monkeypatch.setitem(sys.modules, "camox_ops", type(sys)("camox_ops"))
    with pytest.raises(Skipped, match="edge_maps: op not in this build"):
        common.camox_attr("edge_maps")


def test_a_busy_machine_is_refused(monkeypatch):
    monkeypatch.setattr(machine.OtherCpu, "cores", lambda self: 1.5)
    with pytest.raises(Skipped, match=r"used 1\.50 cores in each of 2 attempts"):
        run_case(toy(), ONCE)
    assert run_case(toy(), ONCE, force=True)[1]["cold"]["other_cpu"] == 1.5
    options = run.parser().parse_args(["--op", "toy"])
    with pytest.raises(SystemExit) as stopped:
        run.measure("toy", options, [])
    assert stopped.value.code == run.NOT_MEASURED


def test_a_case_on_a_noisy_machine_is_tried_again(monkeypatch):
    seen = iter([1.5, 0.0, 0.1])
    monkeypatch.setattr(machine.OtherCpu, "cores", lambda self: next(seen))
    _, measured = run_case(toy(), replace(ONCE, patience_s=60.0), with_warm=False)
    assert (measured["cold"]["other_cpu"], measured["warm"]) == (0.1, None)
    assert list(seen) == [], "noisy, waited for quiet, measured"


def test_a_step_of_seconds_is_not_measured_warm():
    _, measured = run_case(replace(toy(), rounds=3), ONCE)
    assert measured["warm"] is None
    assert measured["cold"]["time_us"]["camox"]["rounds"] == 3


class HiddenSaving(torch.autograd.Function):
    """Keeps a tensor that saved-tensor hooks do not see."""

    @staticmethod
    def forward(ctx, x):
        ctx.hidden = x.exp()
        return ctx.hidden + 1

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.hidden


def test_memory_of_a_step():
    entry, _ = run_case(toy("forward_backward", camox=HiddenSaving.apply), ONCE)
    size = 4 * 4 * 33
    eager, hidden = entry["memory"]["eager"], entry["memory"]["camox"]
    assert (eager["saved"], eager["saved_inputs"]) == (size, 0)
    assert eager["held_after_forward"] == 2 * size, "the output and the saved exp(x)"
    assert eager["peak"] >= 3 * size, "and the gradient"
    assert eager["returned"] == 2 * size, "the output and the gradient"
    assert hidden["saved"] == 0
    assert hidden["held_after_forward"] == 2 * size

    product, _ = run_case(toy("forward_backward", camox=lambda x: x * x, eager=lambda x: x * x), ONCE)
    assert (product["memory"]["eager"]["saved"], product["memory"]["eager"]["saved_inputs"]) == (0, size)


def test_the_floor_moves_the_bytes_it_is_asked_for():
    step, scale = common.floor_step(toy())
    assert scale == 1.0
    assert step().nbytes * 2 == toy().floor_bytes
    product, scale = common.floor_step(replace(toy(), floor_bytes=0, floor_flops=4 * common.GEMM_SIZE**3))
    assert scale == 2.0
    assert product().shape == (common.GEMM_SIZE, common.GEMM_SIZE)


@pytest.mark.parametrize(
    ("cpu", "cores", "capability", "name"),
    [
        ("AMD EPYC", 2, "AVX512", "amd-epyc-2c"),
        ("AMD EPYC", 2, "AVX2", "amd-epyc-avx2-2c"),
        ("AMD EPYC", 2, "ZEN4", "amd-epyc-zen4-2c"),
        ("AMD EPYC 7B13 64-Core Processor", 4, "AVX2", "amd-epyc-7b13-avx2-4c"),
        ("Intel(R) Xeon(R) Gold 6248 CPU @ 2.50GHz", 16, "AVX512", "intel-xeon-gold-6248-16c"),
        ("", 1, "DEFAULT", "cpu-default-1c"),
    ],
)
def test_machine_names(cpu, cores, capability, name):
    assert machine.name_of(cpu, cores, capability) == name


@pytest.mark.parametrize(
    ("vendor", "family", "capability", "units"),
    [
        ("AuthenticAMD", "25", "AVX512", "ZEN4"),
        ("AuthenticAMD", "25", "AVX2", "AVX2"),
        ("AuthenticAMD", "26", "AVX512", "AVX512"),
        ("GenuineIntel", "6", "AVX512", "AVX512"),
        ("", "", "DEFAULT", "DEFAULT"),
    ],
)
def test_vector_units(monkeypatch, vendor, family, capability, units):
    monkeypatch.setattr(machine, "cpu_field", {"vendor_id": vendor, "cpu family": family}.get)
    assert machine.vector_units(capability) == units


@pytest.mark.slow
def test_a_child_keeps_freed_memory(tmp_path):
    """The whole way of a child process: re-executed with the allocator's setting, a case measured and written."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "bench_toy.py").write_text(
        "from benchmarks.common import Case, random_tensor\n"
        "def cases():\n"
        "    twice = lambda x: x + x\n"
        "    return [Case('toy', (9,), lambda: (random_tensor((9,)),), lambda: {'camox': twice, 'eager': twice},\n"
        "                 quick=True)]\n"
    )
    out = tmp_path / "found.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "run.py"), "--op", "toy", "--quick", "--no-compile", "--force"]
    environment = {name: value for name, value in os.environ.items() if name not in machine.KEEP_FREED_MEMORY}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(ROOT), environment.get("PYTHONPATH", "")])
    subprocess.run([*command, "--child", "kept", "--child-out", str(out)], env=environment, check=True)
    found = json.loads(out.read_text())
    assert found["allocator"]["reuse_page_faults"] <= 8
    assert found["caches"]["written_between_calls"] > 0
    assert [entry["key"] for entry in found["entries"]] == ["toy/forward/float32/contiguous/9"]


def example_record(**changes) -> dict:
    """A valid record with two shapes of one op; speeds 4 and 9, floor ratio 1/2, memory half of eager's."""
    spread = {"median": 1.0, "q1": 1.0, "q3": 1.0}
    memory = {"saved": 100, "saved_inputs": 100, "held_after_forward": 300, "peak": 500, "returned": 150}
    entries = []
    for shape, speed in (([1, 2], 4.0), ([3, 4], 9.0)):
        speeds = {"eager": speed, "peer": 0.5, "floor": 0.5, "camox_contiguous": 0.97}
        measured = {
            "time_us": {"camox": {**spread, "rounds": 3, "reps": 1}},
            "speed": {name: {**spread, "median": value} for name, value in speeds.items()},
            "other_cpu": 0.0,
        }
        entry = {"group": "toy", "direction": "forward", "dtype": "float32", "layout": "contiguous", "shape": shape}
        entry |= {"key": f"toy/forward/float32/contiguous/{shape[0]}x{shape[1]}", "floor": {"bytes": 8}, "check": {}}
        warm = {**measured, "speed": {name: {**spread, "median": 2 * value} for name, value in speeds.items()}}
        entry |= {"kept": {"cold": measured, "warm": warm}, "default": None}
        entry |= {"refused": {"compile": "graph breaks: 1"}}
        entries.append({**entry, "memory": {"camox": memory, "eager": {**memory, "saved": 200, "peak": 1000}}})
    return {
        "schema_version": record.SCHEMA_VERSION,
        "op": "toy",
        "date": "2026-01-01T00:00:00+00:00",
        "commit": "0" * 40,
        "dirty": False,
        "version": "0.1.0",
        "torch": "2.10.0",
        "python": "3.10.0",
        "machine": {"name": "toy-1c", "cpu": "Toy", "cores": 1, "governor": "unknown"},
        "isa": "portable",
        "threads": 1,
        "quick": False,
        "forced": [],
        "load": {"before": [0.0, 0.0, 0.0], "after": [1.0, 0.5, 0.2], "other_cpu_before": 0.0},
        "allocator": {"kept": {"set_by": "test", "reuse_page_faults": 0}},
        "caches": {"last_level": 1 << 20, "written_between_calls": 3 << 20},
        "entries": entries,
        "refused": [],
        **changes,
    }


def test_metrics_are_those_of_cold_caches_unless_asked():
    entry = example_record()["entries"][0]
    assert record.metric(entry, "speed") == 4.0
    assert record.metric(entry, "speed", caches="warm") == 8.0
    assert record.metric(entry, "speed", allocator="default") is None


def test_a_record_is_written_and_read(tmp_path):
    path = tmp_path / "results" / "toy-1c-toy.json"
    record.write(example_record(), path)
    assert record.load(path) == example_record()
    assert record.load_all(path.parent) == [example_record()]
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda r: r.pop("commit"), "record.commit: missing"),
        (lambda r: r.update(extra=1), "record.extra: unknown field"),
        (lambda r: r.update(threads=True), "record.threads: expected int, got True"),
        (lambda r: r.update(dirty=0), "record.dirty: expected bool"),
        (lambda r: r.update(schema_version=99), "schema_version"),
        (lambda r: r["entries"][0].update(shape=[1, "2"]), r"entries\[0\].shape\[1\]: expected int"),
        (lambda r: r["entries"][1]["kept"]["cold"]["speed"]["eager"].update(median=float("nan")), "not finite"),
        (lambda r: r["entries"][0].update(memory=[]), "memory: expected an object, got list"),
    ],
)
def test_an_invalid_record_is_refused(tmp_path, spoil, message):
    spoiled = copy.deepcopy(example_record())
    spoil(spoiled)
    path = tmp_path / "x.json"
    with pytest.raises(ValueError, match=message):
        record.write(spoiled, path)
    assert not path.exists()
    path.write_text(json.dumps(spoiled))
    with pytest.raises(ValueError, match=message):
        record.load(path)


def test_committed_records_are_valid():
    for found in record.load_all():
        assert found["op"] in run.all_ops()


SHAPES = {"both": [[1, 2], [3, 4]], "more": [[1, 2], [5, 6]]}


def target(**changes) -> dict:
    where = {"group": "toy", "direction": "forward", "dtype": "float32", "layout": "contiguous", "shapes": "both"}
    where |= changes.pop("where", {})
    return {"name": "toy", "op": "toy", "metric": "speed", "where": where, **changes}


@pytest.mark.parametrize(
    ("changes", "measured", "verdict"),
    [
        ({"at_least": 6}, 6, "pass"),
        ({"at_least": 12}, 6, "short by 50%"),
        (
            {"at_least": 12, "left_alone_below": 6.1},
            6,
            "pass: left alone, PyTorch's own kernels are not slower here",
        ),
        ({"at_least": 12, "left_alone_below": 6}, 6, "short by 50%"),
        ({"metric": "times_floor", "at_most": 2}, 2, "pass"),
        ({"metric": "times_floor", "at_most": 1.6}, 2, "over by 25%"),
        ({"over": "camox_contiguous", "at_least": 1, "noise": 0.05}, 0.97, "pass"),
        ({"over": "camox_contiguous", "at_least": 1, "noise": 0.02}, 0.97, "short by 3%"),
        ({"metric": "saved_ratio", "at_most": 0.4}, 0.5, "over by 25%"),
        ({"metric": "peak_ratio", "at_most": 0.5}, 0.5, "pass"),
        ({"metric": "peak_over_needed", "at_most": 1.1}, 2, "over by 82%"),
        ({"metric": "saved_share_of_inputs", "at_most": 1}, 1, "pass"),
        ({"over": "compile", "at_least": 3}, None, "not measured: 1x2: graph breaks: 1"),
        ({"at_least": 1, "where": {"shapes": "more"}}, None, "not measured: 5x6: no such case in the record"),
        ({"at_least": 1, "where": {"dtype": "float64"}}, None, "not measured: 1x2: no such case in the record"),
    ],
)
def test_targets_are_held_against_the_record(changes, measured, verdict):
    outcome = targets.evaluate(target(**changes), SHAPES, example_record(), "toy-1c")
    assert outcome.verdict == verdict
    assert outcome.measured == (None if measured is None else pytest.approx(measured))


def test_what_was_not_measured_is_never_passed():
    easy = target(at_least=0)
    assert targets.evaluate(easy, SHAPES, None, "-").verdict == "not measured: no record"
    quick = targets.evaluate(easy, SHAPES, example_record(quick=True), "toy-1c")
    assert (quick.measured, quick.passed) == (None, False)
    refused = example_record(entries=[], refused=[{"key": "toy/forward/float32/contiguous/1x2", "reason": "not built"}])
    assert targets.evaluate(easy, SHAPES, refused, "toy-1c").verdict == "not measured: 1x2: not built"


def test_what_a_noisy_machine_measured_is_never_passed():
    found = example_record()
    found["entries"][1]["kept"]["cold"]["other_cpu"] = 1.5
    outcome = targets.evaluate(target(at_least=0), SHAPES, found, "toy-1c")
    assert (outcome.measured, outcome.verdict) == (None, "not measured: 3x4: other processes used 1.50 cores")


def test_a_candidate_with_wrong_results_is_compared_where_it_is_right():
    found = example_record()
    found["entries"][0]["refused"]["compile"] = "wrong result: 3 times the tolerance against float64"
    found["entries"][1]["kept"]["cold"]["speed"]["compile"] = {"median": 2.0, "q1": 2.0, "q3": 2.0}
    outcome = targets.evaluate(target(over="compile", at_least=3), SHAPES, found, "toy-1c")
    assert (outcome.measured, outcome.verdict) == (
        2.0,
        "short by 33% (compile gives wrong results at 1x2: left out)",
    )
    assert targets.evaluate(target(over="compile", at_least=2), SHAPES, found, "toy-1c").passed
    del found["entries"][1]["kept"]["cold"]["speed"]["compile"]
    found["entries"][1]["refused"]["compile"] = found["entries"][0]["refused"]["compile"]
    nowhere = targets.evaluate(target(over="compile", at_least=0), SHAPES, found, "toy-1c")
    assert (nowhere.measured, nowhere.passed) == (None, False)


def run_targets(tmp_path, *arguments, **changes):
    (tmp_path / "t.json").write_text(json.dumps({"shapes": SHAPES, "targets": [target(**changes)]}))
    record.write(example_record(), tmp_path / "results" / "toy.json")
    return targets.main(["--targets", str(tmp_path / "t.json"), "--results", str(tmp_path / "results"), *arguments])


def test_the_targets_command(tmp_path, capsys):
    assert run_targets(tmp_path, "--strict", at_least=6) == 0
    shown = capsys.readouterr().out
    assert "toy-1c: toy" in shown
    assert "1 passed, 0 fell short, 0 not measured" in shown
    assert run_targets(tmp_path, at_least=7) == 0
    assert "short by 14%" in capsys.readouterr().out
    assert run_targets(tmp_path, "--strict", at_least=7) == 1
    assert run_targets(tmp_path, "--strict", at_least=1, over="compile") == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "one of at_least and at_most"),
        ({"at_least": 1, "at_most": 2}, "one of at_least and at_most"),
        ({"at_least": 1, "metric": "feeling"}, "metric 'feeling'"),
        ({"at_least": 1, "colour": "red"}, "fields"),
        ({"at_least": 1, "where": {"shapes": "none"}}, "unknown shapes 'none'"),
    ],
)
def test_a_malformed_target_is_named(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        run_targets(tmp_path, **changes)


def test_every_target_has_its_cases():
    """A target whose case the benchmark does not have could never be measured."""
    listed, shapes = targets.load_targets()
    cases = {op: importlib.import_module(f"benchmarks.bench_{op}").cases() for op in run.all_ops()}
    for item in listed:
        where = {name: value for name, value in item["where"].items() if name != "shapes"}
        for shape in shapes[item["where"]["shapes"]]:
            matching = [
                case
                for case in cases[item["op"]]
                if case.shape == tuple(shape)
                and where
                == {"group": case.group, "direction": case.direction, "dtype": case.dtype_name, "layout": case.layout}
            ]
            assert len(matching) == 1, f"{item['name']}: {len(matching)} cases of shape {shape}"
            over = item.get("over", "eager")
            assert not over.startswith("camox_") or over.removeprefix("camox_") in matching[0].compare_with


def test_keys_are_unique_and_quick_cases_exist():
    for op in run.all_ops():
        cases = importlib.import_module(f"benchmarks.bench_{op}").cases()
        assert len({case.key for case in cases}) == len(cases), op
        assert any(case.quick for case in cases), op


class FakeBuild:
    """A build whose calls take so long and whose forward saves so much."""

    def __init__(self, seconds: float, saved: int):
        self.seconds, self.saved = seconds, saved

    def ask(self, **what):
        return self.saved if "prepare" in what else self.seconds

    def close(self):
        pass


@pytest.mark.parametrize(
    "seconds, saved, fine, printed_line",
    [
        (1.0, 8, True, "cold  1.00"),
        (1.04, 8, True, "cold  0.96"),
        (1.2, 8, False, "slower"),
        (1.0, 9, False, "saves 9 bytes, base 8"),
    ],
)
def test_comparison_with_another_commit(monkeypatch, capsys, seconds, saved, fine, printed_line):
    builds = {"base": FakeBuild(1.0, 8), str(base.ROOT): FakeBuild(seconds, saved)}
    monkeypatch.setattr(base, "build", lambda ref: "base")
    monkeypatch.setattr(base, "Build", lambda folder, op, threads: builds[str(folder)])
    cases = [case for case in bench_edge.cases() if case.key.startswith("edge_maps/forward/float32/contiguous")]
    assert base.compare("HEAD", "edge", cases, 2) is fine
    printed = capsys.readouterr().out
    assert printed_line in printed and f"geometric mean of {len(cases)}" in printed
