"""scripts/gpu_check.py without a GPU: the same code on the CPU, and what it makes of records, logs and crashes."""

import copy
import functools
import json
import os
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

import camox_ops as cx  # noqa: E402
from benchmarks import common, record  # noqa: E402
from camox_ops import _selftest  # noqa: E402
from scripts import gpu_bench, gpu_check, gpu_record  # noqa: E402
from scripts.gpu_device import Rehearsal  # noqa: E402

EDGE = next(op for op in _selftest.OPS if op.name == "edge_maps")


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
    """By the self-test, as correctness, graphs and sanitizers run it; the rest are its kernels writing elsewhere, and a
    product that some CPUs alone have."""
    ours = {s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith("camox_ops::")}
    with Called() as called:
        for op in _selftest.OPS:
            _selftest.run(op.ours, op.inputs((1, 2, 33, 6), torch.float32), None)
    assert ours - called.names == {
        f"camox_ops::{name}" for name in ("edge_maps_stacked", "frequency_bands_stacked", "rope_", "bdh_product")
    }


def test_a_part_that_is_killed_is_not_passed(section):
    assert written(section)["status"] == "incomplete"


def test_environment(section):
    gpu_check.environment(section)
    facts = section.data["environment"]
    assert section.status == "passed"
    assert facts["torch"] == torch.__version__
    assert section.data["version"] == cx.__version__


def test_environment_without_a_gpu_fails(section):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    section.device = "cuda"
    gpu_check.environment(section)
    assert section.status == "failed"
    assert "no CUDA device" in section.message


def test_correctness_of_every_op(section):
    gpu_check.correctness(section)
    found = section.data["correctness"]
    assert section.status == "passed", found["failures"]
    assert found["cases"] >= 12 * len(_selftest.OPS)
    assert 0 < max(found["worst"].values()) <= 1
    assert found["not_in_this_build"] == gpu_check.ops_here("cpu")[1]


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
    assert any(message in failure["message"] for failure in section.data["correctness"]["failures"])


def test_correctness_stops_in_time(section, monkeypatch):
    section.deadline = time.monotonic() - 1
    gpu_check.correctness(section)
    assert section.status == "incomplete"
    assert "time was up" in section.message


def test_graphs_of_every_op(section):
    gpu_check.graphs(section)
    assert section.status == "passed", section.data["graphs"]["failures"]
    assert section.data["graphs"]["cases"] == 12 * len(_selftest.OPS)


def test_graphs_find_what_does_not_follow_its_inputs(section, monkeypatch):
    first = {}

    def stale(x):
        key = (x.dtype, x.is_contiguous())
        return cx.edge_maps(first.setdefault(key, x.detach().clone()) + 0 * x)

    monkeypatch.setattr(_selftest, "OPS", (EDGE._replace(ours=stale),))
    monkeypatch.setattr(Rehearsal, "capture", lambda self, make: (lambda: None, make()()))
    gpu_check.graphs(section)
    assert section.status == "failed"
    assert len(section.data["graphs"]["failures"]) == 12


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


PLAN = replace(gpu_bench.PLANS["rehearsal"], rounds=2, dtypes=(torch.float32,), layouts=("contiguous",))


def run_bench(monkeypatch, make_case, plan=PLAN, seconds=60.0) -> dict:
    monkeypatch.setattr(gpu_bench, "case_makers", lambda device: {"toy": make_case})
    sections = list(gpu_bench.run(Rehearsal(), plan, time.monotonic() + seconds))
    assert record.problems(sections[-1], gpu_record.RECORD["bench"]) == []
    return sections[-1]


def test_bench_measures_three_directions(monkeypatch):
    found = run_bench(monkeypatch, toy_case)
    assert [entry["size"] for entry in found["entries"]] == ["large", "small"]
    for entry in found["entries"]:
        sizes = {name: measured["floor_bytes"] for name, measured in entry["directions"].items()}
        assert sizes == {"forward": 8192, "backward": 12288, "forward_backward": 20480}
        for measured in entry["directions"].values():
            assert {"camox", "copy"} <= measured["time_us"].keys()
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

    large, small = run_bench(monkeypatch, make_case, plan)["entries"]
    assert large["refused"] == {}
    assert "compile" in large["directions"]["forward_backward"]["speed"]
    assert "compile" not in small["directions"]["forward_backward"]["speed"]


REHEARSAL = gpu_bench.PLANS["rehearsal"]


def test_every_benchmark_is_found():
    choices = gpu_bench.choices(REHEARSAL, gpu_bench.case_makers(Rehearsal()))
    groups = {
        make(shape, gpu_bench.directions_of(make)[0], dtype, layout).group for _, shape, dtype, layout, make in choices
    }
    assert groups == gpu_record.GROUPS.keys()


def test_shapes_of_their_own():
    """What the targets of single ops name is measured at those shapes; a model's step in the full run alone."""
    makers = gpu_bench.case_makers(Rehearsal())
    quick, full = (gpu_bench.choices(gpu_bench.PLANS[mode], makers) for mode in ("quick", "full"))
    measured = {
        (make(shape, gpu_bench.directions_of(make)[0], dtype, layout).group, shape, str(dtype)[6:])
        for _, shape, dtype, layout, make in full
        if layout == "contiguous"
    }
    assert measured >= {
        ("linear_attention_sum", (16, 8, 7744, 32), "bfloat16"),
        ("short_attention", (6400, 6, 8, 12), "bfloat16"),
        ("moe_route", (16384, 64), "float32"),
        ("moe_dispatch", (32, 48, 56, 56), "float32"),
        ("moe_combine", (32, 48, 56, 56), "bfloat16"),
        ("moe_layer", (32, 48, 56, 56), "float32"),
        ("bdh_attention", (8, 6, 64, 1024), "bfloat16"),
        ("vision_bdh_step", (128, 3, 32, 32), "bfloat16"),
    }
    assert {c[0] for c in full} - {c[0] for c in quick} == {"step"}
    assert all(c[3] == "contiguous" for c in full if hasattr(c[4], "on_gpu"))


OWN = [
    pytest.param(name, marks=[pytest.mark.slow] if "layer" in name else [])
    for name, make in gpu_bench.case_makers(Rehearsal()).items()
    if hasattr(make, "on_gpu")
]


@pytest.mark.parametrize("name", OWN)
def test_benchmarks_of_their_own_shapes_run(name, monkeypatch):
    """Right numbers in every direction, at the shape of a rehearsal."""
    make_case = gpu_bench.case_makers(Rehearsal())[name]
    found = run_bench(monkeypatch, make_case, replace(REHEARSAL, rounds=2, dtypes=(torch.float32,)))
    (entry,) = found["entries"]
    assert entry["directions"].keys() == set(gpu_bench.directions_of(make_case))
    for measured in entry["directions"].values():
        assert "camox" in measured["time_us"]
        assert measured["floor_bytes"] > 0 or "step" in entry["directions"] or entry["group"] == "moe_layer"
    outcomes = gpu_record.targets(whole_record(entry))
    assert [one for one in outcomes if one["name"].startswith(f"{entry['group']}/")] or name.startswith(
        ("bench_bdh", "bench_linear")
    )


def spread(value):
    return {"median": value, "q1": value, "q3": value}


def entry(size="large", share=0.9, eager=5.0, compiled=1.5, graph=6.0, empty=4.0) -> dict:
    measured = {
        "floor_bytes": 4_000_000,
        "time_us": {"camox": spread(10.0)},
        "graph_us": {"camox": spread(graph), "empty": spread(empty)},
        "call_us": {"camox": 20.0},
        "speed": {"eager": spread(eager), "compile": spread(compiled)},
        "share_of_copy": spread(share),
        "rounds": 25,
    }
    directions = {name: copy.deepcopy(measured) for name in common.DIRECTIONS_ON_GPU}
    facts = {"key": f"edge_maps/float32/contiguous/{size}", "group": "edge_maps", "shape": [1], "size": size}
    return {**facts, "dtype": "float32", "layout": "contiguous", "directions": directions, "check": {}, "refused": {}}


def whole_record(*entries) -> dict:
    made = {
        "schema_version": 1,
        "date": "2026-01-01T00:00:00+00:00",
        "mode": "quick",
        "device": "cuda",
        "commit": "0" * 40,
        "dirty": False,
        "version": "0.1.0",
        "wheel": None,
        "seconds": 1.0,
        "environment": {"gpu": "NVIDIA H200"},
        "parts": {name: {"status": "passed", "message": "", "seconds": 1.0} for name in gpu_record.PARTS},
        "sanitizers": {},
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


def of_group(group, dtype="float32", **numbers) -> dict:
    made = entry(**numbers)
    made["directions"]["step"] = copy.deepcopy(made["directions"]["forward"])
    made["directions"]["step"]["speed"]["max_autotune"] = spread(1.6)
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
    with pytest.raises(ValueError, match="schema_version 2"):
        gpu_record.write({**made, "schema_version": 2}, path)
    made["parts"].pop("memcheck")
    with pytest.raises(ValueError, match=r"parts\.memcheck: missing"):
        gpu_record.write(made, path)


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
DONE = f"{gpu_check.SANITIZED} 12\n"


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
    ],
)
def test_sanitizer_is_judged(tool, output, log, status, message):
    got, said, found = gpu_check.judge_sanitizer(tool, output, log)
    assert got == status, said
    assert message in said
    assert record.problems({tool: found}, gpu_record.RECORD["sanitizers"]) == []


def test_sanitizer_that_is_not_there(section, monkeypatch):
    monkeypatch.setattr(gpu_check, "find_sanitizer", lambda: None)
    gpu_check.sanitize(section, "memcheck")
    assert (section.status, section.data["sanitizers"]) == ("unavailable", {})


def test_sanitizer_that_cannot_attach(section, monkeypatch, tmp_path):
    program = tmp_path / "compute-sanitizer"
    program.write_text("#!/bin/sh\necho '========= Error: Device not supported' >&2\nexit 1\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    gpu_check.sanitize(section, "memcheck")
    assert section.status == "unavailable"
    assert "Device not supported" in section.message


def test_sanitized_run_ends_with_its_count(capsys, monkeypatch):
    monkeypatch.setattr(gpu_check, "SANITIZER_SHAPES", [(1, 2, 3, 5)])
    assert gpu_check.sanitized_run("cpu") == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{gpu_check.SANITIZED} {6 * len(_selftest.OPS)}"


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


def test_suite_is_counted(section, tmp_path):
    suite = tmp_path / "test_tiny.py"
    suite.write_text(TINY_SUITE)
    gpu_check.tests(section, [str(suite)])
    assert (section.status, section.message) == ("passed", "1 passed, 0 failed, 1 skipped")
    suite.write_text("def test_wrong():\n    assert 1 == 2\n")
    gpu_check.tests(section, [str(suite)])
    assert section.status == "failed"
    assert "assert 1 == 2" in section.data["tests"]["failures"][0]["message"]
    suite.write_text("import no_such_module\n")
    gpu_check.tests(section, [str(suite)])
    assert section.status == "failed"


def test_suite_stops_in_time(section, tmp_path):
    suite = tmp_path / "test_tiny.py"
    suite.write_text("def test_a():\n    pass\n\ndef test_b():\n    pass\n")
    section.deadline = time.monotonic() + 2 * gpu_check.GRACE_S - 1
    gpu_check.tests(section, [str(suite)])
    assert section.status == "incomplete"
    assert section.data["tests"]["not_run"] == 1


def test_a_crash_is_a_failure(tmp_path):
    suite = tmp_path / "test_tiny.py"
    suite.write_text("import os\n\ndef test_a():\n    os.kill(os.getppid(), 9)\n")
    options = gpu_check.parser().parse_args(["all", "--device", "cpu", "--mode", "rehearsal", "--tests", str(suite)])
    status, _ = gpu_check.run_part("tests", options, 60.0, tmp_path)
    assert status["status"] == "failed"
    assert status["message"] == "exit status -9"


def test_record_of_a_run_that_was_cut_off(tmp_path, monkeypatch):
    """Each part leaves a valid record in which the parts after it were not reached."""
    arguments = ["all", "--device", "cpu", "--mode", "rehearsal", "--out", str(tmp_path), "--parts", "graphs"]
    seen = []

    def run_part(name, options, seconds, folder):
        seen.append(json.loads((tmp_path / "no-gpu-seen.json").read_text())["parts"] if seen else None)
        return {"status": "passed", "message": "", "seconds": 1.0}, {}

    monkeypatch.setattr(gpu_check, "run_part", run_part)
    assert gpu_check.main(arguments) == 0
    assert len(seen) == 2
    assert seen[1]["environment"]["status"] == "passed"
    assert seen[1]["graphs"]["message"] == "was not reached"
    last = json.loads((tmp_path / "no-gpu-seen.json").read_text())["parts"]
    assert (last["graphs"]["status"], last["initcheck"]["message"]) == ("passed", "was not asked for")
    monkeypatch.setattr(
        gpu_check, "run_part", lambda *_: ({"status": "passed", "message": "", "seconds": 1.0}, {"x": 1})
    )
    with pytest.raises(ValueError, match=r"record\.x: unknown field"):
        gpu_check.main(arguments)
    assert (tmp_path / "no-gpu-seen.invalid").exists()


def test_the_suite_has_a_file_for_every_op_with_kernels():
    names = [Path(name).name for name in gpu_check.test_files("quick")]
    assert len(names) == 1 + len(list((ROOT / "csrc").glob("*/*_cuda.cu")))
    assert Path(gpu_check.test_files("full")[0]).is_dir()


def test_times_of_the_quick_run():
    assert sum(gpu_check.SECONDS["quick"].values()) <= 8 * 60 - 10  # installing is part of the eight minutes


def test_script_refuses_a_rehearsal_as_a_result():
    script = str(ROOT / "scripts" / "gpu_check.sh")
    done = subprocess.run(["bash", script, "--rehearse"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "needs --out" in done.stderr
    done = subprocess.run(["bash", script, "--rehearse", "--frobnicate"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "--quick" in done.stderr


@pytest.mark.parametrize("arguments", [["all", "--mode", "quick", "--device", "cpu", "--out", "x"], ["bench"], ["all"]])
def test_errors(arguments):
    with pytest.raises(SystemExit, match="gpu_check: "):
        gpu_check.main(arguments)
