"""What scripts/benchmark_pages.py draws from records: the README's table, docs/benchmarks.md and the charts."""

import importlib
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT), str(ROOT / "scripts")]

import benchmark_groups  # noqa: E402
import benchmark_pages  # noqa: E402
import speed_chart  # noqa: E402

from benchmarks import record, run  # noqa: E402

SVG = "{http://www.w3.org/2000/svg}"


def measurement(times: dict) -> dict:
    """Times in microseconds by candidate, speeds made from them."""

    def spread(value):
        return {"median": value, "q1": value, "q3": value}

    return {
        "time_us": {name: {**spread(time), "rounds": 3, "reps": 1} for name, time in times.items()},
        "speed": {name: spread(time / times["camox"]) for name, time in times.items() if name != "camox"},
        "other_cpu": 0.0,
    }


def entry(group, shape, cold, direction="forward_backward", dtype="float32", warm=None, default=None, **changes):
    def memory(saved):
        return {"saved": saved, "saved_inputs": 1_000_000, "held_after_forward": 0, "peak": 0, "returned": 0}

    return {
        "key": f"{group}/{direction}/{dtype}/contiguous/{'x'.join(map(str, shape))}",
        "group": group,
        "direction": direction,
        "dtype": dtype,
        "layout": "contiguous",
        "shape": list(shape),
        "floor": None,
        "check": {},
        "kept": {"cold": measurement(cold), "warm": warm and measurement(warm)},
        "default": default and {"cold": measurement(default), "warm": None},
        "memory": {"camox": memory(1_000_000), "eager": memory(3_000_000)} if direction == "forward_backward" else {},
        "refused": {},
        **changes,
    }


def of_entries(*entries, **changes) -> dict:
    return {
        "schema_version": record.SCHEMA_VERSION,
        "op": "edge",
        "date": "2026-01-01T00:00:00+00:00",
        "commit": "0" * 40,
        "dirty": False,
        "version": "0.1.0",
        "torch": "2.10.0",
        "python": "3.10.0",
        "machine": {"name": "toy-1c", "cpu": "Toy", "cores": 1, "governor": "unknown"},
        "isa": "avx2",
        "threads": 1,
        "quick": False,
        "forced": [],
        "load": {"before": [0.0], "after": [0.0], "other_cpu_before": 0.0},
        "allocator": {"kept": {"set_by": "test", "reuse_page_faults": 0}},
        "caches": {"last_level": 8 << 20, "written_between_calls": 24 << 20},
        "entries": list(entries),
        "refused": [],
        **changes,
    }


def two_shapes() -> dict:
    """edge_maps 4 and 9 times as fast as eager, compiled only at the first shape and there faster than ours; a
    forward slower than eager; frequency_bands in two types, of which PyTorch is slow in the second."""
    slices = {"compile_slices": 250.0, "floor": 20.0}
    return of_entries(
        entry(
            "edge_maps",
            (1, 2),
            {"camox": 100.0, "eager": 400.0, "compile": 50.0, **slices},
            warm={"camox": 10.0, "eager": 20.0},
        ),
        entry("edge_maps", (3, 4), {"camox": 100.0, "eager": 900.0}, default={"camox": 100.0, "eager": 1800.0}),
        entry("edge_maps", (3, 4), {"camox": 100.0, "eager": 80.0}, direction="forward"),
        entry("frequency_bands", (1, 2), {"camox": 10.0, "eager": 300.0}),
        entry("frequency_bands", (1, 2), {"camox": 10.0, "eager": 600.0}, dtype="bfloat16"),
    )


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "README.md").write_text(f"before\n{benchmark_pages.START}\nold\n{benchmark_pages.END}\nafter\n")
    results = tmp_path / "results"
    record.write(two_shapes(), results / "toy.json")
    return ["--root", str(tmp_path), "--results", str(results)]


def row_of(text: str, label: str) -> list[str]:
    row = next(line for line in text.splitlines() if line.startswith(f"| {label}"))
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_pages_are_written_and_checked(tree, tmp_path, capsys):
    assert benchmark_pages.main([*tree, "--check"]) == 1
    assert "-old" in capsys.readouterr().out
    assert not (tmp_path / "docs").exists(), "a check wrote something"
    assert benchmark_pages.main(tree) == 0
    assert benchmark_pages.main([*tree, "--check"]) == 0
    readme = (tmp_path / "README.md").read_text()
    assert readme.startswith("before\n") and readme.endswith("after\n")
    for page in ("docs/benchmarks.md", "docs/img/speed-light.svg", "docs/img/speed-dark.svg"):
        (tmp_path / page).write_text((tmp_path / page).read_text().replace("6.0", "7.0"))
        assert benchmark_pages.main([*tree, "--check"]) == 1, page
        assert benchmark_pages.main(tree) == 0


def test_readme_table():
    text = benchmark_pages.readme_table([two_shapes()])
    assert row_of(text, "[`edge_maps`]")[2:] == ["6.00x (4.00x)", "0.50x (1 of 2 shapes)", "4.0 MB of 8.0 MB"]
    assert "[`frequency_bands`](docs/bands.md)¹" in text and "¹ PyTorch's CPU kernel of `avg_pool2d`" in text
    assert "Toy, 1 cores, AVX2, 1 thread, PyTorch 2.10.0; forward + backward, float32, contiguous, cold" in text
    assert "eager PyTorch: **0.80x**, `edge_maps`, forward, float32, contiguous, 3x4. Below 1x: 1 of 5 cases." in text
    assert "`torch.compile`: **0.50x**, `edge_maps`, forward + backward, float32, contiguous, 1x2." in text


def test_the_whole_table():
    text = benchmark_pages.benchmarks_page([two_shapes()])
    rows = [
        [c.strip() for c in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| [`edge")
    ]
    (both,) = [row for row in rows if row[1] == "forward + backward"]
    assert both[3:] == [
        "6.00x (4.00x)",
        "0.50x (1 of 2 shapes)",
        "2.50x (1 of 2 shapes)",
        "20% (1 of 2 shapes)",
        "2.00x (1 of 2 shapes)",
        "18.0x (1 of 2 shapes)",
        "4.0 MB of 8.0 MB",
    ]
    assert "[`frequency_bands`](bands.md)¹²" in text and "2 times" not in text
    assert "² Eager PyTorch takes more than 1.5 times as long here as in float32." in text
    assert "makes eager PyTorch itself 2.00x as fast" in text
    assert "100 us | 400 us | 50.0 us | 250 us (compile_slices) | 20.0 us | **20%** |" in text
    assert "Last-level cache: 8 MiB; written before each timed call: 24 MiB." in text


def test_what_is_missing_is_said():
    refused = two_shapes()
    refused["refused"] = [{"key": "edge_maps/x", "reason": "too slow"}]
    refused["entries"][1]["refused"] = {"compile": "graph breaks: 1"}
    text = benchmark_pages.benchmarks_page([refused])
    assert "- too slow (edge_maps/x)" in text and "- compile: graph breaks: 1 (edge_maps/forward_backward" in text
    busy = benchmark_pages.readme_table(
        [of_entries(*two_shapes()["entries"], forced=["other processes use 1.5 cores"])]
    )
    assert "`edge` was measured on a busy machine (--force): other processes use 1.5 cores." in busy
    assert benchmark_pages.readme_table([]) == "Nothing measured yet."
    assert "Nothing measured yet." in benchmark_pages.benchmarks_page([])
    ElementTree.fromstring(benchmark_pages.chart([], "light"))


def test_the_machine_with_most_cases_is_shown_first():
    small = of_entries(entry("edge_maps", (1, 2), {"camox": 1.0, "eager": 99.0}))
    small["machine"] = {**small["machine"], "name": "a-small-one"}
    assert "99.0x" not in benchmark_pages.readme_table([small, two_shapes()])
    page = benchmark_pages.benchmarks_page([small, two_shapes()])
    assert page.index("## toy-1c") < page.index("## a-small-one")


def bars_of(chart: str, height: str) -> list[tuple[float, float]]:
    found = ElementTree.fromstring(chart).iter(f"{SVG}rect")
    return [(float(r.get("x")), float(r.get("width"))) for r in found if r.get("height") == height]


def test_bars_are_as_long_as_their_logarithm():
    def bar(value):
        return speed_chart.Bar(value, value)

    rows = [speed_chart.Row("a", (bar(2.0), bar(8.0))), speed_chart.Row("b", (bar(0.5), speed_chart.Bar(None, None)))]
    chart = speed_chart.draw(rows, ("eager", "compile"), "t <&>", "s", ["¹ why"], "light")
    (two, doubled), (eight, cubed), (half, lost) = bars_of(chart, f"{speed_chart.BAR - 1}")
    assert cubed == pytest.approx(3 * doubled, abs=0.05) and lost == pytest.approx(doubled, abs=0.05)
    assert two == eight == pytest.approx(half + lost, abs=0.05), "wins begin where losses end, at 1x"
    assert "not measured" in chart and "t &lt;&amp;&gt;" in chart and "¹ why" in chart and "0.5x" in chart


def test_the_chart_of_records():
    chart = benchmark_pages.chart([two_shapes()], "dark")
    assert chart == benchmark_pages.chart([two_shapes()], "dark")
    assert chart.index(">frequency_bands¹<") < chart.index(">edge_maps<"), "the largest first"
    assert ">30x<" in chart and ">6.0x<" in chart and ">0.5x<" in chart


def test_every_group_is_described():
    cases = [case for op in run.all_ops() for case in importlib.import_module(f"benchmarks.bench_{op}").cases()]
    groups = benchmark_groups.GROUPS
    assert {case.group for case in cases} == set(groups)
    for group in groups.values():
        assert (ROOT / "docs" / f"{group.page}.md").is_file(), group
        assert set(group.remarks) <= set(benchmark_groups.REMARKS)
    for row in benchmark_groups.FEATURED:
        assert any(c.group in row.groups and row.shape in (None, c.shape) for c in cases), row


@pytest.mark.parametrize("text", ["nothing here", f"{benchmark_pages.END} {benchmark_pages.START}"])
def test_a_readme_without_markers_is_refused(tmp_path, capsys, text):
    (tmp_path / "README.md").write_text(text)
    assert benchmark_pages.main(["--root", str(tmp_path), "--results", str(tmp_path)]) == 2
    assert "bench:start" in capsys.readouterr().err
    assert (tmp_path / "README.md").read_text() == text
