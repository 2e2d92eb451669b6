"""scripts/gpu_check.py without a GPU: the same code on the CPU, and what it makes of records, logs and crashes."""

import copy
import functools
import gc
import json
import os
import re
import stat
import subprocess
import sys
import time
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

import camox_ops as cx  # noqa: E402
from benchmarks import common, cuda, record, run  # noqa: E402
from benchmarks import device as device_module  # noqa: E402
from benchmarks.device import ContextLost, Rehearsal  # noqa: E402
from camox_ops import _selftest  # noqa: E402
from scripts import gpu_bench, gpu_check, gpu_record  # noqa: E402

BY_NAME = {op.name: op for op in _selftest.OPS}
EDGE, BDH, LINEAR = (BY_NAME[name] for name in ("edge_maps", "bdh_attention", "linear_attention"))


@pytest.fixture
def section(tmp_path):
    return gpu_check.Section(tmp_path / "part.json", 60.0, "cpu", "rehearsal")


def written(section) -> dict:
    return json.loads(section.path.read_text())


class Called(TorchDispatchMode):
    """Names of our operators that ran."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        self.names.add(function.name().removesuffix(".default"))
        return function(*arguments, **(named or {}))


def test_every_operator_is_checked():
    """By the self-test, as correctness, graphs and sanitizers run it; the rest are its kernels writing elsewhere,
    products and activations that the CPU alone has, and a kernel that CUDA alone calls."""
    ours = {s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith("camox_ops::")}
    with Called() as called:
        for op in _selftest.OPS:
            _selftest.run(op.ours, op.inputs((1, 2, 33, 6), torch.float32), None)
    assert ours - called.names == {
        f"camox_ops::{name}"
        for name in (
            *("edge_maps_stacked", "frequency_bands_stacked", "rope_", "gemm", "gemm_sums"),
            *("moe_experts_mm", "moe_experts_mm_tn", "moe_activation", "moe_activation_backward"),
            "linear_cross_entropy_rows_",
        )
    }


def test_a_part_that_is_killed_is_not_passed(section):
    assert written(section)["status"] == "incomplete"


def test_environment(section):
    gpu_check.environment(section)
    facts = section.data["environment"]
    assert section.status == "passed"
    assert facts["torch"] == torch.__version__
    assert section.data["version"] == cx.__version__


def test_a_wheel_of_another_commit_is_noticed(section, monkeypatch, tmp_path):
    other = tmp_path / "_selftest.py"
    other.write_text("OPS = ()")
    monkeypatch.setattr(_selftest, "__file__", str(other))
    gpu_check.environment(section)
    assert section.status == "failed"
    assert "another commit" in section.message


def test_environment_without_a_gpu_fails(section):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    section.device = "cuda"
    gpu_check.environment(section)
    assert section.status == "failed"
    assert "no CUDA device" in section.message


def cases_in(found) -> int:
    return sum(sum(by_shape.values()) for by_shape in found["cases"].values())


def test_correctness_of_every_op(section):
    gpu_check.correctness(section)
    found = section.data["correctness"]
    assert section.status == "passed", found["failures"]
    assert found["cases"].keys() == BY_NAME.keys()
    assert found["cases"]["edge_maps"] == {"2x3x5x7": 12, "1x2x1x1": 12}
    assert found["cases"]["rope"] == {"2x3x5x7": 12, "1x2x64x32": 8, "1x2x1x1": 12}
    assert found["cases"]["linear_attention"] == {"2x3x5x7": 9, "1x2x64x32": 6, "1x2x1x1": 9}
    assert 0 < max(found["worst"].values()) <= 1
    assert found["not_in_this_build"] == gpu_check.ops_here("cpu")[1]


def test_what_training_uses_is_tried():
    """Whole 16-byte accesses of halves in rows and in channels; heads as rows and as an image's columns."""
    for shapes in (gpu_check.SHAPES["quick"], gpu_check.SHAPES["full"], gpu_check.WIDE):
        assert {(2, 16, 24, 32), (1, 8, 9, 264)} <= set(shapes)
    assert gpu_check.HEADS in gpu_check.SHAPES["quick"]
    assert gpu_check.layouts_of(EDGE, gpu_check.HEADS) == ()
    assert gpu_check.layouts_of(LINEAR, gpu_check.HEADS) == ("contiguous", "positions")
    for name, strides in (("contiguous", (1, 32)), ("positions", (64, 1))):
        for tensor in LINEAR.inputs(gpu_check.HEADS, torch.bfloat16):
            arranged = _selftest.arranged(tensor, name)
            assert torch.equal(arranged, tensor)
            assert (arranged.stride(3), arranged.stride(2)) == strides
    (packed,) = BY_NAME["linear_attention packed"].inputs(gpu_check.HEADS, torch.float32)
    assert _selftest.arranged(packed, "positions").stride(-2) == 1


def test_inputs_that_the_ops_can_take():
    """linear_attention has no heads wider than 256, and no reference holds scores of 70001 x 70001."""
    for name in ("linear_attention", "linear_attention packed"):
        assert BY_NAME[name].inputs((1, 1, 3, 513), torch.float32)[0].shape[-1] == 256
    for name in ("bdh_attention", "bdh_attention causal", "bdh_attention causal softmax"):
        q, v, tables = BY_NAME[name].inputs((1, 1, 70001, 3), torch.float32)
        assert q.shape[2] == v.shape[2] == tables.shape[1] <= 2048
    assert LINEAR.inputs((1, 1, 70001, 3), torch.float32)[0].shape[2] == 70001


class ProductsOf(Rehearsal):
    """A rehearsal that says that it is a CUDA device."""

    kind = "cuda"


def rounded(x):
    """Two roundings off, as where tensor cores round what they multiply."""
    return (x * (1 + 3 * torch.finfo(x.dtype).eps) if x.itemsize == 2 else x) + 0


@pytest.mark.parametrize(
    "kind, slack, fails",
    [(Rehearsal, None, 1), (ProductsOf, None, 0), (ProductsOf, _selftest.FLOAT32_SLACK, 1), (ProductsOf, 0.1, 0)],
)
def test_products_that_cuda_rounds(kind, slack, fails):
    op = _selftest.Op("x", rounded, lambda x: x * (1 + 0 * x.std()) + x - x, _selftest.image, half_slack=slack)
    problems = gpu_check.check_op(op, (1, 1, 2, 3), torch.bfloat16, 0.0, "contiguous", kind(), {}, {})
    assert problems.count("more than one rounding") == fails
    assert (BDH.half_slack, LINEAR.half_slack, EDGE.half_slack) == (None, 2**-19, 2**-21)


def test_attention_makes_its_mask_on_the_device():
    """A CUDA graph cannot capture a copy from the host."""
    with torch.device("meta"):
        q, k, v = (torch.empty(2, 6, 4, 12) for _ in range(3))

    def function(q, k, v, padding, *_):
        assert padding.device == q.device
        return q

    class NoCopies(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), named=None):
            assert "copy" not in function.name()
            return function(*arguments, **(named or {}))

    with NoCopies():
        _selftest.attention_with_padding(q, k, v, function)


def wrong_forward(x):
    maps = cx.edge_maps(x)
    return (maps.sobel, maps.laplacian + 1e-2, maps.gradient)


def half_too_rough(x):
    """Right within the tolerance of float32, two roundings off in halves."""
    maps = cx.edge_maps(x)
    return tuple(m * (1 + 3 * torch.finfo(m.dtype).eps) if m.dtype == torch.bfloat16 else m for m in maps)


def raises(x):
    raise RuntimeError("an illegal memory access was encountered")


@pytest.mark.parametrize(
    ("ours", "message"),
    [
        (wrong_forward, "outputs: error"),
        (half_too_rough, "more than one rounding"),
        (raises, "illegal memory access"),
    ],
)
def test_correctness_finds(section, monkeypatch, ours, message):
    monkeypatch.setattr(_selftest, "OPS", (EDGE._replace(ours=ours),))
    gpu_check.correctness(section)
    assert section.status == "failed"
    failures = section.data["correctness"]["failures"]
    assert any(message in failure["message"] for failure in failures)
    assert {failure["op"] for failure in failures} == {"edge_maps"}


def numbers_of(op, shape=(1, 1, 4001, 3)) -> dict:
    inputs = op.inputs(shape, torch.float32)
    truth = _selftest.run(op.reference, tuple(t.double() for t in inputs), None)
    return {"inputs": inputs, "truth": truth, "same": _selftest.run(op.reference, inputs, None)}


def test_two_orders_of_one_sum():
    """A sum of PyTorch's that happens to be exact does not forbid ours to round; nor does it hide a wrong one."""
    op = BY_NAME["layer_norm2d gelu"]
    numbers = numbers_of(op)
    numbers["same"][1] = [t.float() for t in numbers["truth"][1]]
    found, truth = gpu_check.farther_of_two_orders(op, numbers), numbers["truth"][1]
    assert [t.shape for t in found] == [t.shape for t in truth]
    off = [(t.double() - true).abs().max().item() for t, true in zip(found, truth, strict=True)]
    assert 1e-7 < off[2] < 1e-3 * truth[2].abs().item()


def test_an_op_with_another_result_in_the_other_order():
    op = BY_NAME["layer_norm2d gelu"]._replace(reference=lambda x, weight, bias: (x.cumsum(2) * weight + bias).square())
    numbers = numbers_of(op)
    assert gpu_check.farther_of_two_orders(op, numbers) is numbers["same"][1]


def test_a_reference_that_fails_is_no_passed_case(section, monkeypatch):
    def no_memory(x):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(_selftest, "OPS", (EDGE._replace(reference=no_memory),))
    gpu_check.correctness(section)
    assert section.status == "failed"
    assert "the reference on the CPU: RuntimeError" in section.data["correctness"]["failures"][0]["message"]


def test_correctness_stops_in_time(section):
    """Also within one shape of one op, whose result then does not count."""
    section.deadline = time.monotonic() - 1
    gpu_check.correctness(section)
    assert section.status == "incomplete"
    assert "not measured yet" in section.message
    calls = []
    section.time_is_up = lambda: calls.append(1) or len(calls) > 5
    gpu_check.correctness(section)
    assert len(calls) <= 8
    assert cases_in(section.data["correctness"]) == 0


def one_shape(section, monkeypatch, *ops):
    monkeypatch.setitem(gpu_check.SHAPES, "rehearsal", [(1, 2, 3, 4)])
    monkeypatch.setattr(_selftest, "OPS", ops)
    gpu_check.correctness(section)
    return section.data["correctness"]


def test_correctness_of_chosen_ops_adds_to_what_is_known(tmp_path, monkeypatch):
    bands = BY_NAME["frequency_bands"]

    def run(known, ops, missing=False, wrong=False):
        section = gpu_check.Section(tmp_path / "part.json", 60.0, "cpu", "rehearsal", known, ops, missing)
        edge = EDGE._replace(ours=raises) if wrong else EDGE
        return section, one_shape(section, monkeypatch, edge, bands)

    section, first = run(None, ["edge_maps"], wrong=True)
    assert section.status == "failed"
    assert first["cases"] == {"edge_maps": {"1x2x3x4": 12}}
    section, both = run({"correctness": first}, ["frequency_bands"])
    assert section.status == "failed"  # what was found before stands
    assert both["cases"].keys() == {"edge_maps", "frequency_bands"}
    assert len(both["failures"]) == 12
    section, again = run({"correctness": both}, None, missing=True)
    assert again == both
    section, mended = run({"correctness": both}, ["edge_maps"])
    assert (section.status, section.message) == ("passed", "24 cases")
    assert mended["failures"] == []
    section, _ = run(None, ["edge_maps"])
    assert section.status == "incomplete"
    assert "1 of 2 pairs" in section.message


@pytest.mark.slow
def test_graphs_of_every_op(section):
    gpu_check.graphs(section)
    assert section.status == "passed", section.data["graphs"]["failures"]
    assert section.data["graphs"]["cases"]["rope"] == {"2x5x33x37": 12, "2x16x24x32": 6, "1x8x9x264": 6, "1x2x64x32": 6}
    assert section.data["graphs"]["cases"].keys() == BY_NAME.keys()


def test_graphs_find_what_does_not_follow_its_inputs(section, monkeypatch):
    first = {}

    def stale(x):
        key = (x.dtype, x.is_contiguous())
        return cx.edge_maps(first.setdefault(key, x.detach().clone()) + 0 * x)

    monkeypatch.setattr(_selftest, "OPS", (EDGE._replace(ours=stale),))
    monkeypatch.setattr(Rehearsal, "capture", lambda self, make: (lambda: None, make()()))
    gpu_check.graphs(section)
    assert section.status == "failed"
    assert len(section.data["graphs"]["failures"]) == 24


def lost(x):
    raise RuntimeError("an illegal memory access was encountered")


class Mortal(Rehearsal):
    """A device that no error leaves usable."""

    def check_alive(self, message=""):
        raise ContextLost(message)


def test_a_lost_device_is_noticed(section, monkeypatch):
    """No later case is then called wrong for it."""
    monkeypatch.setattr(device_module, "open_device", lambda kind: Mortal())
    monkeypatch.setattr(_selftest, "OPS", (EDGE._replace(ours=lost), LINEAR))
    with pytest.raises(ContextLost, match="RuntimeError: an illegal memory access"):
        gpu_check.correctness(section)
    state = written(section)
    assert (state["status"], state["now"]) == ("incomplete", ["edge_maps", "2x3x5x7", "float32 contiguous"])


DIES = """
import json, os, sys, time
from pathlib import Path
value = dict(zip(sys.argv[2::2], sys.argv[3::2]))
known = json.loads(Path(value["--known"]).read_text())
found = known.get("graphs", {"not_in_this_build": [], "cases": {}, "worst": {}, "failures": []})
if "a" not in found["cases"]:
    state = {"status": "incomplete", "message": "was killed or crashed", "now": ["a", "1x1", "float32"]}
else:
    found["cases"]["b"] = {"1x1": 3}
    state = {"status": "passed", "message": "4 cases", "now": None}
Path(value["--section"]).write_text(json.dumps({**state, "data": {"graphs": found}}))
if "a" not in found["cases"]:
    DEATH
"""


@pytest.mark.parametrize("death, how", [("os._exit(3)", "exit status 3"), ("time.sleep(60)", "hung for 1 s")])
def test_what_a_part_does_not_survive_fails_and_the_rest_is_run(tmp_path, monkeypatch, death, how):
    program = tmp_path / "part.py"
    program.write_text(DIES.replace("DEATH", death))
    monkeypatch.setattr(gpu_check, "__file__", str(program))
    monkeypatch.setitem(gpu_check.STALLED_S, "graphs", 1)
    options = gpu_check.parser().parse_args(["all"])
    status, data = gpu_check.run_part("graphs", options, 60.0, tmp_path, {}, False)
    assert status["status"] == "failed"
    assert how in status["message"]
    assert data["graphs"]["cases"] == {"a": {"1x1": 1}, "b": {"1x1": 3}}
    assert [(one["op"], one["case"]) for one in data["graphs"]["failures"]] == [("a", "float32")]


def test_a_benchmark_that_is_not_survived_is_named():
    data = {}
    gpu_check.note_loss("bench", data, "edge_maps/float32/contiguous/1x1", "hung")
    assert data["bench"]["not_measured"] == {"edge_maps/float32/contiguous/1x1": "hung"}


def toy_case(shape, direction, dtype, layout, **candidates):
    return common.Case(
        group="edge_maps",
        shape=shape,
        make_inputs=lambda: (common.random_tensor(shape, dtype=dtype, layout=layout, seed=1),),
        candidates=lambda: {"camox": torch.sin, "eager": torch.sin, "compile": None, **candidates},
        direction=direction,
        dtype=dtype,
        layout=layout,
        floor_bytes=(5 if direction == "forward_backward" else 2) * 4 * 1024,
    )


PLAN = replace(cuda.PLANS["rehearsal"], rounds=2, dtypes=(torch.float32,), layouts=("contiguous",))


def run_bench(monkeypatch, make_case, plan=PLAN, seconds=60.0, **more) -> dict:
    monkeypatch.setattr(cuda, "case_makers", lambda device, op="*": {"toy": make_case})
    sections = list(gpu_bench.run(Rehearsal(), plan, time.monotonic() + seconds, **more))
    assert record.problems(sections[-1], gpu_record.RECORD["bench"]) == []
    return sections[-1]


def test_bench_measures_three_directions(monkeypatch):
    found = run_bench(monkeypatch, toy_case)
    assert [entry["size"] for entry in found["entries"]] == ["large", "small"]
    for entry in found["entries"]:
        sizes = {name: measured["floor_bytes"] for name, measured in entry["directions"].items()}
        assert sizes == {"forward": 8192, "backward": 12288, "forward_backward": 20480}
        for measured in entry["directions"].values():
            assert {"camox", "copy"} <= measured["time_us"].keys() == measured["warm_us"].keys()
            assert {"camox", "copy", "empty"} <= measured["graph_us"].keys()
        assert "eager" in entry["directions"]["forward_backward"]["speed"]
        assert "eager" not in entry["directions"]["backward"]["speed"]
    assert "edge_maps/float32" in gpu_record.bench_table(found)


def test_bench_times_nothing_wrong(monkeypatch):
    found = run_bench(monkeypatch, functools.partial(toy_case, camox=lambda x: torch.sin(x) + 1e-2))
    assert found["entries"] == []
    assert any("wrong result" in reason for reason in found["not_measured"].values())
    found = run_bench(monkeypatch, functools.partial(toy_case, peer=torch.cos))
    assert all("wrong result" in entry["refused"]["peer"] for entry in found["entries"])
    assert all("peer" not in entry["directions"]["forward"]["time_us"] for entry in found["entries"])


def test_bench_names_what_is_missing(monkeypatch):
    def make_case(*arguments):
        return replace(toy_case(*arguments), candidates=lambda: {"camox": common.camox_attr("no_such_op")})

    found = run_bench(monkeypatch, make_case)
    assert found["not_measured"]["edge_maps"] == "camox_ops.no_such_op: op not in this build"
    found = run_bench(monkeypatch, toy_case, seconds=-1.0)
    assert set(found["not_measured"].values()) >= {"time was up"}


def test_cold_and_warm_calls():
    """Cold: other data in the cache before each timed call; warm: a call of its own."""
    happened = []

    class Device(Rehearsal):
        def flush(self):
            happened.append("flush")

        def mark(self):
            happened.append("mark")
            return super().mark()

    steps = {"camox": lambda: happened.append("call")}
    for cold, before in ((True, "flush"), (False, "call")):
        cuda.measure(Device(), steps, 2, cold)
        assert happened[2:] == [before, "mark", "call", "mark"] * 2
        happened.clear()


def run_on(device_name, tmp_path, *arguments) -> dict:
    """The record that run.py --device writes of toy cases of edge_maps."""
    path = tmp_path / "record.json"
    assert run.main(["--device", device_name, "--op", "edge", "--json", str(path), *arguments]) == 0
    return record.load(path)


def test_the_runner_measures_a_device(monkeypatch, tmp_path, capsys):
    """Entries as of the CPU, one for each direction; names and refusals as there; a partial run writes where asked."""
    make_case = functools.partial(toy_case, peer=torch.cos)
    monkeypatch.setattr(cuda, "case_makers", lambda device, op="*": {f"bench_{op}.make_case": make_case})
    found = run_on("rehearsal", tmp_path)
    assert (found["op"], found["machine"]["name"], found["refused"]) == ("edge", "rehearsal", [])
    assert found["forced"] == ["a rehearsal on the CPU: nothing in it counts"]
    keys = [entry["key"] for entry in found["entries"]]
    for direction in common.DIRECTIONS_ON_GPU:
        assert f"edge_maps/{direction}/float32/contiguous/2x3x17x19" in keys
        assert f"edge_maps/{direction}/bfloat16/channels_last/1x4x5x5" in keys
    assert len(keys) == len(set(keys)) == 3 * 2 * 2 * 2
    for entry in found["entries"]:
        others = {"floor"} if entry["direction"] == "backward" else {"eager", "floor"}
        for caches in ("cold", "warm"):
            assert entry["kept"][caches]["speed"].keys() == others
        assert "wrong result" in entry["refused"]["peer"]
        assert record.metric(entry, "times_floor") > 0
    assert "edge_maps/forward/float32/contiguous/2x3x17x19" in capsys.readouterr().out
    found = run_on("rehearsal", tmp_path, "--dtype", "bfloat16", "--case", "1x4x5x5")
    assert {(entry["dtype"], *entry["shape"]) for entry in found["entries"]} == {("bfloat16", 1, 4, 5, 5)}


def test_the_runner_records_what_it_could_not_measure(monkeypatch, tmp_path):
    def make_case(shape, direction, dtype, layout):
        if shape[0] == 1:
            return toy_case(shape, direction, dtype, layout, camox=torch.cos)
        return toy_case(shape, direction, dtype, layout)

    monkeypatch.setattr(cuda, "case_makers", lambda device, op="*": {"toy": make_case})
    found = run_on("rehearsal", tmp_path, "--dtype", "float32")
    assert {tuple(entry["shape"]) for entry in found["entries"]} == {(2, 3, 17, 19)}
    assert {item["key"] for item in found["refused"]} == {
        "edge_maps/float32/contiguous/1x4x5x5",
        "edge_maps/float32/channels_last/1x4x5x5",
    }
    assert all("wrong result" in item["reason"] for item in found["refused"])


def test_the_record_of_a_device_is_named_by_it(monkeypatch, tmp_path):
    """A whole run on CUDA; here its device imitates one, with the times that it says."""

    class Named(Rehearsal):
        kind, slug, architecture, l2_bytes, flush_bytes = "cuda", "nvidia-h200", "sm_90", 50 << 20, 200 << 20

        def microseconds(self, begin, end):
            return 10.0

    plan = replace(cuda.PLANS["rehearsal"], dtypes=(torch.float32,), layouts=("contiguous",))
    monkeypatch.setattr(cuda, "PLANS", {"full": plan, "quick": plan})
    monkeypatch.setattr(cuda, "case_makers", lambda device, op="*": {"toy": toy_case})
    monkeypatch.setattr(run, "open_device", lambda kind: Named())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    assert run.main(["--device", "cuda", "--op", "edge", "--quick"]) == 0
    assert list(tmp_path.iterdir()) == []
    assert run.main(["--device", "cuda", "--op", "edge"]) == 0
    found = record.load(tmp_path / "nvidia-h200-edge.json")
    assert (found["isa"], found["forced"], found["caches"]["written_between_calls"]) == ("sm_90", [], 200 << 20)
    for entry in found["entries"]:
        assert entry["kept"]["cold"]["time_us"]["camox"]["median"] == 10.0
        assert entry["kept"]["cold"]["speed"]["floor"]["median"] == 1.0


def test_the_runner_without_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"--device cuda: torch .* finds no CUDA device"):
        run.main(["--device", "cuda", "--op", "edge"])
    with pytest.raises(SystemExit, match="--base: compares on the CPU alone"):
        run.main(["--device", "cuda", "--op", "edge", "--base", "HEAD"])


def test_the_flush_is_larger_than_any_cache(monkeypatch):
    made = []
    monkeypatch.setattr(torch, "empty", lambda size, **_: made.append(4 * size) or torch.zeros(1))
    for l2_bytes in (50 << 20, 126 << 20):
        device = object.__new__(device_module.Cuda)
        monkeypatch.setattr(device_module.Cuda, "l2_bytes", l2_bytes)
        device._flush, device.torch_device = None, None
        device.flush()
        assert made.pop() >= 3 * l2_bytes


def test_bench_adds_to_what_is_known(monkeypatch):
    first = run_bench(monkeypatch, toy_case, seconds=-1.0)
    assert [why for key, why in first["not_measured"].items() if "/" in key] == ["time was up"] * 2
    other = run_bench(monkeypatch, toy_case, known=copy.deepcopy(first), ops=["frequency_bands"])
    assert other["entries"] == []
    both = run_bench(monkeypatch, toy_case, known=copy.deepcopy(first), ops=["edge_maps"], missing=True)
    assert len(both["entries"]) == 2
    assert not any(key.startswith("edge_maps") for key in both["not_measured"])
    begun = []
    again = run_bench(monkeypatch, toy_case, known=copy.deepcopy(both), missing=True, begin=begun.append)
    assert (begun, again["entries"]) == ([], both["entries"])
    again = run_bench(monkeypatch, toy_case, known=copy.deepcopy(both), begin=begun.append)
    assert begun == [entry["key"] for entry in both["entries"]]
    assert [entry["key"] for entry in again["entries"]] == begun


def test_bench_with_a_wrong_result_fails(section, monkeypatch):
    make_case = functools.partial(toy_case, camox=lambda x: torch.sin(x) + 1e-2)
    monkeypatch.setattr(cuda, "case_makers", lambda device, op="*": {"toy": make_case})
    gpu_check.bench(section)
    assert section.status == "failed"
    assert "wrong result" in section.message


def test_bench_records_a_failed_capture(monkeypatch):
    def capture(self, make_step):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(Rehearsal, "capture", capture)
    entry = run_bench(monkeypatch, toy_case)["entries"][0]
    assert entry["directions"]["forward"]["graph_us"] == {}
    assert "not permitted" in entry["refused"]["graph forward camox"]


def test_bench_compiles(monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    plan = replace(PLAN, compiled=(("large", "forward"), ("large", "forward_backward")))

    def make_case(*arguments):
        case = toy_case(*arguments)
        return replace(case, candidates=lambda: {"camox": torch.sin, "eager": lambda x: torch.sin(x)})

    begun = []
    large, small = run_bench(monkeypatch, make_case, plan, begin=begun.append)["entries"]
    assert large["refused"] == {}
    assert begun == [large["key"], small["key"], f"{large['key']} torch.compile"]
    known = {"entries": [large, small], "not_measured": {}, "l2_bytes": 0, "copy_gb_per_s": 1.0}
    begun.clear()
    run_bench(monkeypatch, make_case, plan, known=known, missing=True, begin=begun.append)
    assert begun == []
    assert "compile" in large["directions"]["forward_backward"]["speed"]
    assert "compile" not in small["directions"]["forward_backward"]["speed"]


REHEARSAL = cuda.PLANS["rehearsal"]


def test_why_there_is_no_compiler(monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert "needs a C compiler" in device_module.why_no_compiler()
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr("sysconfig.get_path", lambda name: "nowhere")
    assert "needs Python's C headers" in device_module.why_no_compiler()


def test_every_benchmark_is_found():
    choices, failed = cuda.choices(REHEARSAL, cuda.case_makers(Rehearsal()))
    assert failed == {}
    assert {choice.group for choice in choices} == gpu_record.GROUPS.keys()
    for choice in choices:
        first = choice.directions[0]
        case = choice.make_case(choice.shape, first, choice.dtype, choice.layout)
        assert choice.key == f"{case.group}/{case.dtype_name}/{case.layout}/{'x'.join(map(str, case.shape))}"


def test_no_op_waits_for_all_cases_of_another():
    """A run that is cut off after a minute has measured each op once, in the order of the targets."""
    choices, _ = cuda.choices(cuda.PLANS["quick"], cuda.case_makers(Rehearsal()), gpu_record.GROUPS)
    large = [choice for choice in choices if choice.rank == 0]
    assert choices[: len(large)] == large
    groups = list(dict.fromkeys(choice.group for choice in large))
    assert [choice.group for choice in large[: len(groups)]] == groups
    assert groups[:4] == ["edge_maps", "spatial_gradient", "frequency_bands", "layer_norm2d_gelu"]
    # what takes a minute of compiling comes after every time without it
    first = next(i for i, choice in enumerate(choices) if choice.compiled)
    assert all(choice.layout != "contiguous" for choice in choices[first:] if not choice.compiled)


def test_shapes_of_their_own():
    """What the targets of single ops name is measured at those shapes; a model's step in the full run alone."""
    makers = cuda.case_makers(Rehearsal())
    quick, full = (cuda.choices(cuda.PLANS[mode], makers)[0] for mode in ("quick", "full"))
    measured = {(c.group, c.shape, str(c.dtype)[6:]) for c in full if c.layout == "contiguous"}
    assert measured >= {
        ("linear_attention_sum", (16, 8, 7744, 32), "bfloat16"),
        ("short_attention", (6400, 6, 8, 12), "bfloat16"),
        ("short_attention_causal", (32, 64, 96, 32), "bfloat16"),
        ("moe_route", (16384, 64), "float32"),
        ("moe_dispatch", (32, 48, 56, 56), "float32"),
        ("moe_combine", (32, 48, 56, 56), "bfloat16"),
        ("moe_layer", (32, 48, 56, 56), "float32"),
        ("bdh_attention", (8, 6, 64, 1024), "bfloat16"),
        ("vision_bdh_step", (128, 3, 32, 32), "bfloat16"),
        ("k1_step", (32, 64), "bfloat16"),
        ("emberformer_step", (32, 400, 6, 128), "bfloat16"),
    }
    assert {c.size for c in full} - {c.size for c in quick} == {"step"}
    assert full[-1].size == "step"
    assert all(c.layout == "contiguous" for c in full if hasattr(c.make_case, "on_gpu"))


LAYERS_AND_STEPS = re.compile("layer|token_moe|k1|emberformer|vision_bdh")  # seconds each
OWN = [
    pytest.param(name, marks=[pytest.mark.slow] if LAYERS_AND_STEPS.search(name) else [])
    for name, make in cuda.case_makers(Rehearsal()).items()
    if hasattr(make, "on_gpu")
]


@pytest.mark.parametrize("name", OWN)
def test_benchmarks_of_their_own_shapes_run(name, monkeypatch):
    """Right numbers in every direction, at the shape of a rehearsal."""
    make_case = cuda.case_makers(Rehearsal())[name]
    found = run_bench(monkeypatch, make_case, replace(REHEARSAL, rounds=2, dtypes=(torch.float32,)))
    (entry,) = found["entries"]
    assert entry["directions"].keys() == set(getattr(make_case, "on_gpu", {})["directions"])
    for measured in entry["directions"].values():
        assert "camox" in measured["time_us"]
        assert measured["floor_bytes"] > 0 or "step" in entry["directions"] or entry["group"] == "moe_layer"
    outcomes = gpu_record.targets(whole_record(entry))
    assert [one for one in outcomes if one["name"].startswith(f"{entry['group']}/")] or name.startswith(
        ("bench_bdh", "bench_linear", "bench_short_attention.make_case_causal")
    )


def spread(value):
    return {"median": value, "q1": value, "q3": value}


def entry(size="large", share=0.9, eager=5.0, compiled=1.5, graph=6.0, empty=4.0) -> dict:
    measured = {
        "floor_bytes": 4_000_000,
        "time_us": {"camox": spread(10.0)},
        "warm_us": {"camox": spread(8.0)},
        "graph_us": {"camox": spread(graph), "empty": spread(empty)},
        "call_us": {"camox": 20.0},
        "speed": {"eager": spread(eager), "compile": spread(compiled)},
        "share_of_copy": spread(share),
        "rounds": 25,
    }
    directions = {name: copy.deepcopy(measured) for name in common.DIRECTIONS_ON_GPU}
    facts = {"key": f"edge_maps/float32/contiguous/{size}", "group": "edge_maps", "shape": [1], "size": size}
    return {**facts, "dtype": "float32", "layout": "contiguous", "directions": directions, "check": {}, "refused": {}}


PASSED = {"status": "passed", "message": "", "seconds": 1.0, "mode": "rehearsal"}


def whole_record(*entries) -> dict:
    made = {
        "schema_version": 2,
        "date": "2026-01-01T00:00:00+00:00",
        "runs": [{"date": "2026-01-01T00:00:00+00:00", "mode": "quick", "asked": "everything", "seconds": 1.0}],
        "device": "cuda",
        "commit": "0" * 40,
        "dirty": False,
        "version": "0.1.0",
        "wheel": None,
        "seconds": 1.0,
        "environment": {"gpu": "NVIDIA H200"},
        "parts": {name: {**PASSED, "mode": "quick"} for name in gpu_record.PARTS},
        **copy.deepcopy(gpu_record.EMPTY),
    }
    made["bench"] |= {"copy_gb_per_s": 4000.0, "entries": list(entries)}
    return {**made, "targets": gpu_record.targets(made)}


def verdicts(made: dict) -> list[str]:
    return [one["verdict"] for one in gpu_record.targets(made) if one["name"].startswith("edge_maps/")]


def test_targets_of_large_shapes():
    assert verdicts(whole_record(entry())) == ["pass"] * 4
    slow = entry(share=0.8, eager=3.0, compiled=1.2)
    # 0.80 of the copy is short of 0.85 forward, enough for 0.75 backward
    assert verdicts(whole_record(slow)) == ["short by 6%", "pass", "short by 25%", "short by 8%"]
    broken = entry()
    del broken["directions"]["forward_backward"]["speed"]["compile"]
    broken["refused"]["compile"] = "graph breaks: 1"
    assert verdicts(whole_record(broken))[-1] == "not measured: graph breaks: 1"


def test_targets_of_small_shapes():
    # 4 MB at 4 TB/s is 1 us, so that an ideal call takes 5 us and may take 6
    assert verdicts(whole_record(entry(size="small", graph=6.0))) == ["pass", "pass"]
    assert verdicts(whole_record(entry(size="small", graph=9.0))) == ["over by 50%", "over by 50%"]


@pytest.mark.parametrize("group", gpu_record.LARGE_TARGETS_OF)
@pytest.mark.parametrize("dtype", gpu_record.TARGET_DTYPES)
def test_targets_that_memory_allows(group, dtype):
    """Eager's passes move so many bytes that a kernel at the bound of the copy is as much faster, and no more."""
    passes = {"dropout": 4, "bias_gelu": 8, "bias_gelu_dropout": 12, "sparse_gate": 23, "dropout_add_layer_norm": 14}
    ours = {"dropout": 4, "bias_gelu": 5, "bias_gelu_dropout": 5}.get(group, 8)
    ideal = (passes[group] + (0.5 if dtype == "float32" else 1.0) * (group != "bias_gelu")) / ours
    for eager, verdict in ((0.86 * ideal, "pass"), (0.8 * ideal, "short by 6%")):
        made = whole_record(of_group(group, dtype, eager=eager, compiled=0.9))
        found = [one for one in made["targets"] if one["name"].startswith(f"{group}/")]
        assert [one["verdict"] for one in found] == ["pass", "pass", verdict, "pass"]
        assert found[2]["name"].endswith("times eager")


def of_group(group, dtype="float32", **numbers) -> dict:
    made = entry(**numbers)
    made["directions"]["step"] = copy.deepcopy(made["directions"]["forward"])
    made["directions"]["step"]["speed"]["reduce_overhead"] = spread(1.6)
    return {**made, "group": group, "key": f"{group}/{dtype}/contiguous/1", "dtype": dtype}


@pytest.mark.parametrize(
    ("group", "dtype", "numbers", "expected"),
    [
        ("linear_attention_sum", "bfloat16", {"share": 0.76}, ["pass"]),
        ("linear_attention_feature", "bfloat16", {"share": 0.6}, ["short by 20%"]),
        ("linear_attention_sum", "float32", {"share": 0.1}, []),
        ("short_attention", "float32", {"eager": 4.0}, ["pass"]),
        ("moe_route", "float32", {"graph": 15.0}, ["pass"]),
        ("moe_route", "float32", {"graph": 30.0}, ["over by 100%"]),
        ("moe_dispatch", "bfloat16", {"share": 0.81}, ["pass", "pass"]),
        ("moe_combine", "float32", {"share": 0.4}, ["short by 50%", "short by 50%"]),
        ("moe_layer", "float32", {"eager": 2.0}, ["short by 50%"]),
        ("bdh_attention", "bfloat16", {"share": 0.1}, []),
        ("vision_bdh_step", "bfloat16", {"eager": 2.0}, ["short by 20%", "pass"]),
        ("k1_step", "bfloat16", {"eager": 4.0}, ["short by 20%"]),
        ("emberformer_step", "bfloat16", {"eager": 1.6}, ["short by 20%"]),
    ],
)
def test_targets_of_single_ops(group, dtype, numbers, expected):
    outcomes = gpu_record.targets(whole_record(of_group(group, dtype, **numbers)))
    assert [one["verdict"] for one in outcomes if one["name"].startswith(f"{group}/")] == expected
    missing = [one["verdict"] for one in gpu_record.targets(whole_record()) if one["name"] == group]
    assert missing == (["not measured: no measurement"] if gpu_record.OWN_TARGETS[group] else [])


def test_targets_without_a_measurement_are_not_passed():
    made = whole_record()
    made["bench"]["not_measured"] = {"edge_maps/float32/contiguous/1x1": "wrong result: 3 times the tolerance"}
    outcomes = gpu_record.targets(made)
    assert not any(one["verdict"] == "pass" for one in outcomes)
    assert "wrong result" in outcomes[0]["verdict"]
    assert f"0 of {len(outcomes)} targets" in gpu_record.target_table(outcomes)


def test_record_is_validated(tmp_path):
    made = whole_record(entry(), entry(size="small"))
    path = tmp_path / gpu_record.file_name("NVIDIA H200")
    gpu_record.write(made, path)
    assert path.name == "nvidia-h200-gpu.json"
    assert json.loads(path.read_text()) == made
    assert record.load_all(tmp_path) == []  # the other benchmarks' readers leave it alone
    assert "NVIDIA H200" in gpu_record.summary(made)
    with pytest.raises(ValueError, match=r"parts\.bench: failed without a message"):
        gpu_record.write(
            {**made, "parts": {**made["parts"], "bench": {**made["parts"]["bench"], "status": "failed"}}}, path
        )
    with pytest.raises(ValueError, match=r"record\.targets: missing"):
        gpu_record.write({name: value for name, value in made.items() if name != "targets"}, path)
    with pytest.raises(ValueError, match="schema_version 1"):
        gpu_record.write({**made, "schema_version": 1}, path)
    made["parts"].pop("memcheck")
    with pytest.raises(ValueError, match=r"parts\.memcheck: missing"):
        gpu_record.write(made, path)


def test_summary():
    """In the order of the parts, with what is merely not measured yet counted."""
    made = whole_record(entry())
    made["parts"] = dict(sorted(made["parts"].items()))
    made["bench"]["not_measured"] = {"a/1": "time was up", "b/1": "was not asked for", "c/1": "wrong result: 2 times"}
    lines = gpu_record.summary(made).splitlines()
    assert [line.split()[0] for line in lines[-len(gpu_record.PARTS) :]] == list(gpu_record.PARTS)
    assert [line for line in lines if line.startswith("not measured")] == [
        "not measured: c/1: wrong result: 2 times",
        "not measured yet: 2 cases, which --missing goes on with",
    ]


def test_what_a_run_may_add_to(tmp_path):
    made = whole_record(entry())
    path = tmp_path / "nvidia-h200-gpu.json"
    assert gpu_record.earlier(path, made) == (None, "")
    gpu_record.write(made, path)
    old, said = gpu_record.earlier(path, made)
    assert (old, said[:8]) == (made, "adds to ")
    wheel = {"name": "x.whl", "sha256": "1", "bytes": 1}
    for change, reason in (
        ({"commit": "1" * 40}, "whose commit is 000"),
        ({"wheel": wheel}, "whose wheel is none, not 1"),
        ({"environment": {"gpu": "NVIDIA H200", "driver": "580.1"}}, "whose driver is none, not 580.1"),
    ):
        old, said = gpu_record.earlier(path, {**made, **change})
        assert old is None
        assert said.startswith("replaces nvidia-h200-gpu.json")
        assert reason in said
    path.write_text("{}")
    assert "is not valid" in gpu_record.earlier(path, made)[1]


MEMCHECK_CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
INVALID_READ = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at void edge_kernel<float, (int)4>(edge_plan)+0x2f0
=========     by thread (31,0,0) in block (0,0,0)
=========     Address 0x7f0000000200 is out of bounds
=========     Saved host backtrace up to driver entry point at kernel launch time
=========
========= ERROR SUMMARY: 1 error
"""
FOREIGN_READ = INVALID_READ.replace("void edge_kernel<float, (int)4>(edge_plan)", "void at::native::fill<float>(int)")
UNINITIALISED = INVALID_READ.replace("Invalid __global__ read", "Uninitialized __global__ memory read")
RACE = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at void norm2d_kernel<float>(plan)+0x150
=========     and Read access at void norm2d_kernel<float>(plan)+0x1a0 [4096 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
DONE = f"{gpu_check.SANITIZED} 12 edge_maps\n{gpu_check.SANITIZED_ALL}\n"
CUT_OFF = f"{gpu_check.SANITIZED} 12 edge_maps\nthe run did not finish in 40 s"
NAN = f"{gpu_check.WRONG_CALLS} edge_maps 2x3 float32: a result is not finite\n{DONE}"


@pytest.mark.parametrize(
    ("tool", "output", "log", "status", "message"),
    [
        ("memcheck", DONE, MEMCHECK_CLEAN, "passed", "12 calls"),
        ("memcheck", DONE, INVALID_READ, "failed", "Invalid __global__ read"),
        ("memcheck", "", INVALID_READ, "failed", "Invalid __global__ read"),
        ("initcheck", DONE, UNINITIALISED, "failed", "Uninitialized"),
        ("memcheck", DONE, FOREIGN_READ, "passed", "1 errors in others' kernels"),
        ("racecheck", DONE, RACE, "failed", "Race reported"),
        ("racecheck", DONE, "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", "passed", ""),
        ("memcheck", DONE, "========= ERROR SUMMARY: 3 errors\n", "failed", "counts 3 errors"),
        (
            "memcheck",
            "",
            "========= COMPUTE-SANITIZER\n========= Device not supported\n",
            "unavailable",
            "not supported",
        ),
        ("memcheck", DONE, "", "unavailable", "did not complete"),
        ("memcheck", "ModuleNotFoundError: No module named 'torch'", MEMCHECK_CLEAN, "unavailable", "ModuleNotFound"),
        ("racecheck", "the run did not finish in 40 s", "", "unavailable", "did not finish in 40 s"),
        ("racecheck", CUT_OFF, "", "incomplete", "did not finish in 40 s"),
        ("memcheck", NAN, MEMCHECK_CLEAN, "failed", "not finite"),
    ],
)
def test_sanitizer_is_judged(tool, output, log, status, message):
    got, said, found = gpu_check.judge_sanitizer(tool, output, log)
    assert got == status, said
    assert message in said
    assert record.problems({tool: [found]}, gpu_record.RECORD["sanitizers"]) == []
    assert found["ops"] == ({"edge_maps": 12} if status == "passed" or (output == DONE and log) else found["ops"])


def test_sanitizer_that_is_not_there(section, monkeypatch):
    monkeypatch.setattr(gpu_check, "find_sanitizer", lambda: None)
    gpu_check.sanitize(section, "memcheck")
    assert (section.status, section.data["sanitizers"]) == ("unavailable", {})


def test_sanitizer_of_a_package(monkeypatch, tmp_path):
    folder = tmp_path / "nvidia" / "cu13" / "bin"
    folder.mkdir(parents=True)
    program = folder / "compute-sanitizer"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    if not any(Path("/usr/local").glob("cuda*/bin/compute-sanitizer")):
        assert gpu_check.find_sanitizer() == str(program)


SANITIZER = """#!/bin/sh
while [ "$1" != --log-file ]; do shift; done
printf '========= COMPUTE-SANITIZER\\n========= ERROR SUMMARY: 0 errors\\n' > "$2"
while [ "$1" != --ops ]; do shift; done
for op in $(echo "$2" | tr ',' ' '); do echo "sanitized calls: 3 $op"; done
echo "sanitized run ended"
"""


def test_sanitizer_adds_to_what_is_known(tmp_path, monkeypatch):
    program = tmp_path / "compute-sanitizer"
    program.write_text(SANITIZER)
    program.chmod(0o755)
    monkeypatch.setattr(gpu_check, "find_sanitizer", lambda: str(program))
    monkeypatch.setattr(_selftest, "OPS", (EDGE, BDH))

    def run(known, ops, missing=False):
        section = gpu_check.Section(tmp_path / "part.json", 60.0, "cpu", "rehearsal", known, ops, missing)
        gpu_check.sanitize(section, "memcheck")
        return section.status, section.message, section.data

    status, message, first = run({}, ["edge_maps"])
    assert (status, message) == ("incomplete", "3 calls; 1 ops are not run yet")
    status, message, both = run(first, None, missing=True)
    assert (status, message) == ("passed", "6 calls")
    assert [run["ops"] for run in both["sanitizers"]["memcheck"]] == [{"edge_maps": 3}, {"bdh_attention": 3}]
    first["sanitizers"]["memcheck"][0] |= {"errors": 1, "findings": ["Invalid read"]}
    assert run(first, ["bdh_attention"])[:2] == ("failed", "Invalid read")
    assert run(first, None)[:2] == ("passed", "6 calls")


def test_sanitizer_that_cannot_attach(section, monkeypatch, tmp_path):
    program = tmp_path / "compute-sanitizer"
    program.write_text("#!/bin/sh\necho '========= Error: Device not supported' >&2\nexit 1\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    gpu_check.sanitize(section, "memcheck")
    assert section.status == "unavailable"
    assert "Device not supported" in section.message


def test_sanitized_run_tells_of_every_op(capsys, monkeypatch):
    monkeypatch.setattr(gpu_check, "SANITIZER_SHAPES", [(1, 2, 3, 5)])
    assert gpu_check.sanitized_run("cpu", list(BY_NAME), 60.0) == 0
    *ops, last = capsys.readouterr().out.splitlines()
    assert last == gpu_check.SANITIZED_ALL
    assert ops == [f"{gpu_check.SANITIZED} {22 if op.heads else 18} {op.name}" for op in _selftest.OPS]
    assert gpu_check.sanitized_run("cpu", list(BY_NAME), -1.0) == 0  # it ends in time, and its sanitizer sums up
    assert capsys.readouterr().out.splitlines() == [gpu_check.SANITIZED_ALL]


def test_ops_without_kernels_for_the_device_are_skipped(capsys, monkeypatch):
    usable, absent = gpu_check.ops_here("cpu")
    assert usable == list(_selftest.OPS)
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda name, key: False)
    usable, absent = gpu_check.ops_here("cuda")
    assert usable == []
    assert {op.name.split()[0] for op in _selftest.OPS} <= set(absent)
    assert "skipped: edge_maps: not in this build" in capsys.readouterr().out


TINY_SUITE = """
import pytest

def test_right():
    assert 1 == 1

@pytest.mark.skip
def test_skipped():
    pass

@pytest.mark.slow
def test_slow():
    raise AssertionError
"""


@pytest.mark.slow
def test_suite_is_counted(section, tmp_path):
    suite = tmp_path / "test_tiny.py"
    suite.write_text(TINY_SUITE)
    gpu_check.tests(section, [str(suite)])
    assert (section.status, section.message) == ("passed", "1 passed, 0 failed, 1 skipped")
    suite.write_text("def test_wrong():\n    assert 1 == 2\n")
    gpu_check.tests(section, [str(suite)])
    assert section.status == "failed"
    assert "assert 1 == 2" in section.data["tests"]["test_tiny.py"]["failures"][0]["message"]
    suite.write_text("import no_such_module\n")
    gpu_check.tests(section, [str(suite)])
    assert section.status == "failed"
    suite.write_text("import os\n\ndef test_a():\n    os._exit(7)\n")
    gpu_check.tests(section, [str(suite)])
    assert section.data["tests"]["test_tiny.py"]["failures"][0]["message"] == "pytest's exit status 7"


@pytest.mark.slow
def test_suite_runs_each_file_in_a_process_of_its_own(tmp_path):
    """What one file leaves behind, such as a lost device or the emulator's functions, is not the next one's."""
    files = []
    for name in ("one", "two"):
        files.append(tmp_path / f"test_{name}.py")
        files[-1].write_text("import sys\n\ndef test_a():\n    assert not hasattr(sys, 'seen')\n    sys.seen = 1\n")
    section = gpu_check.Section(tmp_path / "part.json", 60.0, "cpu", "rehearsal")
    gpu_check.tests(section, list(map(str, files)))
    assert (section.status, section.message) == ("passed", "2 passed, 0 failed, 0 skipped")
    assert section.data["tests"].keys() == {"test_one.py", "test_two.py"}
    known = {"tests": {"test_one.py": section.data["tests"]["test_one.py"] | {"skipped": 5}}}
    section = gpu_check.Section(tmp_path / "part.json", 60.0, "cpu", "rehearsal", known, None, True)
    gpu_check.tests(section, list(map(str, files)))
    assert section.message == "2 passed, 0 failed, 5 skipped"  # only the file that was missing ran


def test_suite_stops_in_time_and_compiles_nothing_where_triton_cannot_build(tmp_path):
    suite = tmp_path / "test_tiny.py"
    suite.write_text("def test_compile():\n    assert False\n\ndef test_a():\n    pass\n\ndef test_b():\n    pass\n")
    known = {"environment": {"c_compiler": "torch.compile needs a C compiler"}}
    section = gpu_check.Section(tmp_path / "part.json", 60.0, "cpu", "rehearsal", known)
    section.deadline = time.monotonic() + 2 * gpu_check.GRACE_S - 1
    gpu_check.tests(section, [str(suite)])
    assert section.status == "incomplete"
    assert section.message == "1 passed, 0 failed, 0 skipped, 1 tests and 0 files not run yet"
    section.deadline = time.monotonic() - 1
    gpu_check.tests(section, [str(suite), str(suite.with_name("test_other.py"))])
    assert (section.status, section.data["tests"]) == ("incomplete", {})
    assert "2 files not run yet" in section.message


def test_a_crash_is_a_failure(tmp_path):
    suite = tmp_path / "test_tiny.py"
    suite.write_text("import os\n\ndef test_a():\n    os.kill(os.getppid(), 9)\n")
    options = gpu_check.parser().parse_args(["all", "--device", "cpu", "--mode", "rehearsal", "--tests", str(suite)])
    status, _ = gpu_check.run_part("tests", options, 60.0, tmp_path, {}, False)
    assert status["status"] == "failed"
    assert status["message"] == "exit status -9"


def all_parts(monkeypatch, tmp_path, *more, data=None, status="passed", seen=None) -> int:
    """gpu_check.main where each part finds `data`."""

    def run_part(name, options, seconds, folder, known, missing):
        if seen is not None:
            seen[name] = copy.deepcopy(known)
        found = {name: data[name]} if data and name in data else {}
        return {**PASSED, "status": "passed" if name == "environment" else status, "message": "m"}, found

    monkeypatch.setattr(gpu_check, "run_part", run_part)
    return gpu_check.main(["all", "--device", "cpu", "--mode", "rehearsal", "--out", str(tmp_path), *more])


def test_record_of_a_run_that_was_cut_off(tmp_path, monkeypatch):
    """Each part leaves a valid record in which the parts after it were not reached."""
    seen = {}
    assert all_parts(monkeypatch, tmp_path, "--parts", "graphs", seen=seen) == 0
    assert seen.keys() == {"environment", "graphs"}
    assert seen["graphs"]["parts"]["environment"]["status"] == "passed"
    assert seen["graphs"]["parts"]["graphs"]["message"] == "was not reached"
    last = json.loads((tmp_path / "no-gpu-seen.json").read_text())["parts"]
    assert (last["graphs"]["status"], last["initcheck"]["message"]) == ("passed", "was not asked for")
    with pytest.raises(ValueError, match=r"record\.graphs\.x: unknown field"):
        all_parts(monkeypatch, tmp_path, "--parts", "graphs", data={"graphs": {**gpu_record.EMPTY["graphs"], "x": 1}})
    assert (tmp_path / "no-gpu-seen.invalid").exists()


def test_a_second_run_adds_to_the_record(tmp_path, monkeypatch, capsys):
    copies = tmp_path / "copies"
    graphs = {**gpu_record.EMPTY["graphs"], "cases": {"edge_maps": {"1x1": 2}}}
    record_file = tmp_path / "no-gpu-seen.json"
    monkeypatch.setenv("CAMOX_COMMIT", "a" * 40)
    all_parts(monkeypatch, tmp_path, "--parts", "graphs", "--ops", "edge_maps", data={"graphs": graphs})
    seen = {}
    more = ("--parts", "bench", "--copy", str(copies))
    all_parts(monkeypatch, tmp_path, *more, seen=seen, status="incomplete")
    assert "adds to no-gpu-seen.json" in capsys.readouterr().out
    assert seen["bench"]["graphs"] == graphs
    made = json.loads(record_file.read_text())
    assert (made["parts"]["graphs"]["status"], made["parts"]["bench"]["status"]) == ("passed", "incomplete")
    asked = [run["asked"] for run in made["runs"]]
    assert asked == ["--parts graphs --ops edge_maps", "--parts bench"]
    assert made["graphs"] == graphs
    assert json.loads((copies / "no-gpu-seen.json").read_text()) == made
    seen.clear()
    all_parts(monkeypatch, tmp_path, "--missing", "--parts", "graphs,bench", seen=seen)
    assert seen.keys() == {"environment", "bench"}  # the graphs have passed
    seen.clear()
    all_parts(monkeypatch, tmp_path, "--ops", "rope", seen=seen)
    assert seen.keys() == {"environment", *gpu_check.WITH_OPS}
    monkeypatch.setenv("CAMOX_COMMIT", "b" * 40)
    all_parts(monkeypatch, tmp_path, "--parts", "bench")
    assert "replaces no-gpu-seen.json, whose commit is aaa" in capsys.readouterr().out
    assert json.loads(record_file.read_text())["graphs"] == gpu_record.EMPTY["graphs"]


def test_what_saw_no_gpu_is_no_result(tmp_path, monkeypatch):
    def run_part(*_):
        return {**PASSED, "status": "failed", "message": "finds no CUDA device"}, {"environment": {"torch": "2"}}

    monkeypatch.setattr(gpu_check, "run_part", run_part)
    arguments = ["all", "--out", str(tmp_path / "results"), "--logs", str(tmp_path / "logs")]
    assert gpu_check.main(arguments) == 1
    assert not list(tmp_path.glob("results/*"))
    made = json.loads((tmp_path / "logs" / "no-gpu-seen.json").read_text())
    assert made["parts"]["bench"]["message"] == "the environment failed"


def test_the_suite_has_a_file_for_every_op_with_kernels():
    names = [Path(name).name for name in gpu_check.test_files("quick")]
    assert len(names) == 2 + len(list((ROOT / "csrc").glob("*/*_cuda.cu")))
    full = {Path(name).name for name in gpu_check.test_files("full")}
    assert full >= {*names, "test_contract.py", "test_train.py", "test_vision_bdh.py"}
    assert not full & {"test_gpu_scripts.py", "test_docs.py", "test_package.py", "test_bench_runner.py"}


def test_times_of_the_quick_run():
    """Ten minutes are what a machine that is lent gives to one command; installing is part of them."""
    quick = gpu_check.SECONDS["quick"]
    assert sum(max(quick[name] for name in stage) for stage in gpu_check.STAGES) <= 9.5 * 60 - 10
    assert sorted(name for stage in gpu_check.STAGES for name in stage) == sorted(gpu_record.PARTS)
    assert quick["environment"] >= 120  # the first start of CUDA


def test_script_refuses_a_rehearsal_as_a_result():
    script = str(ROOT / "scripts" / "gpu_check.sh")
    done = subprocess.run(["bash", script, "--rehearse"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "needs --out" in done.stderr
    done = subprocess.run(["bash", script, "--rehearse", "--frobnicate"], capture_output=True, text=True)
    assert done.returncode == 2
    assert all(option in done.stderr for option in ("--quick", "--ops", "--missing", "--copy", "CAMOX_COMMIT"))


@pytest.mark.parametrize(
    "arguments",
    [
        ["all", "--mode", "quick", "--device", "cpu", "--out", "x"],
        ["bench"],
        ["all"],
        ["all", "--out", "x", "--parts", "speed"],
        ["all", "--out", "x", "--ops", "edge_maps,no_such_op"],
    ],
)
def test_errors(arguments):
    with pytest.raises(SystemExit, match="gpu_check: "):
        gpu_check.main(arguments)


def test_ops_that_can_be_named():
    assert {op.name.split()[0] for op in _selftest.OPS} == set(gpu_record.OPS)


def test_a_record_has_no_folders_of_a_machine():
    text = "/some/tests/test_a.py:3: and /opt/v/lib/site-packages/torch/nn.py, tests/b.py, 3/camox_ops/4"
    found = gpu_check.without_folders({"failures": [{"message": text}], "count": 3})
    cut = "tests/test_a.py:3: and site-packages/torch/nn.py, tests/b.py, 3/camox_ops/4"
    assert found == {"failures": [{"message": cut}], "count": 3}
    text = "CUDA error: out of memory"
    more = " Search for `cudaErrorMemoryAllocation' in https://github.com/c.html for more informat"
    assert gpu_check.without_folders([text + more]) == [text]


def test_a_captured_step_keeps_what_it_reads():
    """A backward pass reads what its forward pass made before the capture."""

    class Made:
        value = 1.0

    def make_step():
        made = Made()
        alive.append(weakref.ref(made))
        return lambda: torch.full((2,), made.value)

    alive = []
    captured, _ = Rehearsal().capture(make_step)
    gc.collect()
    assert alive[0]() is not None
    captured.replay()
    captured.reset()
    gc.collect()
    assert alive[0]() is None
