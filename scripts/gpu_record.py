"""The record of scripts/gpu_check.py: its schema, the targets it is held against, the tables drawn from it.

Needs the standard library alone. A record is one JSON file for a GPU, benchmarks/results/<gpu-name>-gpu.json.
"""

import json
import math
import os
import re
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.record import SPREAD, MapOf, Maybe, problems

SCHEMA_VERSION = 1
STATUSES = ("passed", "failed", "unavailable", "incomplete", "not run")
PARTS = ("environment", "correctness", "graphs", "bench", "tests", "memcheck", "racecheck", "initcheck")
SANITIZERS = PARTS[-3:]
# The ops that have CUDA targets: group of the benchmark, the name in camox_ops.
GROUPS = {
    "edge_maps": "edge_maps",
    "spatial_gradient": "spatial_gradient",
    "frequency_bands": "frequency_bands",
    "layer_norm2d_gelu": "layer_norm2d",
    "dropout": "dropout",
    "sparse_gate": "sparse_gate",
    "dropout_add_layer_norm": "dropout_add_layer_norm",
    "rope_interleaved": "rope",
    "rope_half_split": "rope",
}
TARGET_DTYPES = ("float32", "bfloat16")
SMALL_SLACK = 1.2
# (what, direction, bound, the number of a direction that it bounds)
LARGE_TARGETS = (
    ("share of copy bandwidth", "forward", 0.85, lambda d: d["share_of_copy"]["median"]),
    ("share of copy bandwidth", "backward", 0.75, lambda d: d["share_of_copy"]["median"]),
    ("times eager", "forward_backward", 4.0, lambda d: speed(d, "eager")),
    ("times compile", "forward_backward", 1.3, lambda d: speed(d, "compile")),
)

STATUS = {"status": str, "message": str, "seconds": float}
DIRECTION = {
    "floor_bytes": int,
    "time_us": MapOf(SPREAD),
    "graph_us": MapOf(SPREAD),
    "call_us": MapOf(float),
    "speed": MapOf(SPREAD),
    "share_of_copy": SPREAD,
    "rounds": int,
}
ENTRY = {
    "key": str,
    "group": str,
    "shape": [int],
    "size": str,
    "dtype": str,
    "layout": str,
    "check": MapOf(float),
    "directions": MapOf(DIRECTION),
    "refused": MapOf(str),
}
RECORD = {
    "schema_version": int,
    "date": str,
    "mode": str,
    "device": str,
    "commit": str,
    "dirty": bool,
    "version": str,
    "wheel": Maybe({"name": str, "sha256": str, "bytes": int}),
    "seconds": float,
    "environment": MapOf(str),
    "parts": MapOf(STATUS),
    "correctness": {
        "cases": int,
        "not_in_this_build": [str],
        "worst": MapOf(float),
        "failures": [{"case": str, "message": str}],
    },
    "graphs": {"cases": int, "failures": [{"case": str, "message": str}]},
    "tests": {
        "collected": int,
        "passed": int,
        "failed": int,
        "skipped": int,
        "not_run": int,
        "failures": [{"case": str, "message": str}],
    },
    "sanitizers": MapOf({"calls": int, "errors": int, "foreign_errors": int, "findings": [str]}),
    "bench": {
        "copy_gb_per_s": Maybe(float),
        "l2_bytes": int,
        "entries": [ENTRY],
        "not_measured": MapOf(str),
    },
    "targets": [{"name": str, "bound": str, "measured": Maybe(float), "verdict": str}],
}
EMPTY = {
    "correctness": {"cases": 0, "not_in_this_build": [], "worst": {}, "failures": []},
    "graphs": {"cases": 0, "failures": []},
    "tests": {"collected": 0, "passed": 0, "failed": 0, "skipped": 0, "not_run": 0, "failures": []},
    "bench": {"copy_gb_per_s": None, "l2_bytes": 0, "entries": [], "not_measured": {}},
}


def file_name(gpu: str | None) -> str:
    """Of the record of a GPU; a run that saw none is no result and is not named like one."""
    if gpu is None:
        return "no-gpu-seen.json"
    return "-".join(re.findall(r"[a-z0-9]+", gpu.lower())) + "-gpu.json"


def faults(record: dict) -> list[str]:
    """Everything that is wrong with a record; empty when it is valid."""
    found = problems(record, RECORD)
    if found:
        return found
    if record["schema_version"] != SCHEMA_VERSION:
        found.append(f"schema_version {record['schema_version']}, expected {SCHEMA_VERSION}")
    found += [f"parts.{name}: missing" for name in PARTS if name not in record["parts"]]
    found += [f"parts.{name}: unknown part" for name in record["parts"] if name not in PARTS]
    for name, part in record["parts"].items():
        if part["status"] not in STATUSES:
            found.append(f"parts.{name}: unknown status {part['status']!r}")
        if part["status"] != "passed" and not part["message"]:
            found.append(f"parts.{name}: {part['status']} without a message")
    return found


def write(record: dict, path: Path) -> None:
    """Validates a record and puts it at `path` in one step; ValueError names what is wrong with it."""
    found = faults(record)
    if found:
        raise ValueError("not a valid GPU record: " + "; ".join(found[:10]))
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    os.replace(scratch, path)


def speed(direction: dict, over: str) -> float | None:
    return direction["speed"][over]["median"] if over in direction["speed"] else None


def verdict_at_least(measured: float, bound: float) -> str:
    return "pass" if measured >= bound else f"short by {100 * (1 - measured / bound):.0f}%"


def verdict_at_most(measured: float, bound: float) -> str:
    return "pass" if measured <= bound else f"over by {100 * (measured / bound - 1):.0f}%"


def targets(record: dict) -> list[dict]:
    """Every target of an H200 held against the measurements: one of each group, shape, dtype and direction."""
    bench, outcomes = record["bench"], []
    for group in GROUPS:
        entries = [e for e in bench["entries"] if e["group"] == group and e["layout"] == "contiguous"]
        entries = [e for e in entries if e["dtype"] in TARGET_DTYPES]
        for size in ("large", "small"):
            if not any(e["size"] == size for e in entries):
                outcomes.append(unmeasured(f"{group}, {size} shapes", why_unmeasured(bench, group)))
        for entry in entries:
            outcomes += large_targets(entry) if entry["size"] == "large" else small_targets(entry, bench)
    return outcomes


def why_unmeasured(bench: dict, group: str) -> str:
    reasons = [reason for key, reason in bench["not_measured"].items() if key.split("/")[0] == group]
    return reasons[0] if reasons else "no measurement"


def unmeasured(name: str, why: str) -> dict:
    return {"name": name, "bound": "", "measured": None, "verdict": f"not measured: {why}"}


def large_targets(entry: dict) -> list[dict]:
    found = []
    for what, direction, bound, number in LARGE_TARGETS:
        name = f"{entry['key']}, {direction}: {what}"
        measured = number(entry["directions"][direction]) if direction in entry["directions"] else None
        if measured is None:
            candidate = what.removeprefix("times ")
            found.append(unmeasured(name, entry["refused"].get(candidate, "no measurement")))
        else:
            verdict = verdict_at_least(measured, bound)
            found.append({"name": name, "bound": f">= {bound}", "measured": measured, "verdict": verdict})
    return found


def small_targets(entry: dict, bench: dict) -> list[dict]:
    """Graph replay of a small shape against 1.2 times the sum of an empty kernel and the bytes at copy bandwidth."""
    found = []
    for direction in ("forward", "backward"):
        name = f"{entry['key']}, {direction}: graph replay over an empty kernel plus the floor"
        measured = entry["directions"].get(direction)
        graphs = measured["graph_us"] if measured else {}
        if "camox" not in graphs or "empty" not in graphs or not bench["copy_gb_per_s"]:
            found.append(unmeasured(name, entry["refused"].get(f"graph {direction} camox", "no measurement")))
            continue
        floor_us = measured["floor_bytes"] / (1e3 * bench["copy_gb_per_s"])
        ratio = float(f"{graphs['camox']['median'] / (graphs['empty']['median'] + floor_us):.4g}")
        verdict = verdict_at_most(ratio, SMALL_SLACK)
        found.append({"name": name, "bound": f"<= {SMALL_SLACK}", "measured": ratio, "verdict": verdict})
    return found


BENCH_ROW = "{:58} {:16} {:>9} {:>5} {:>9} {:>7} {:>7} {:>7} {:>7}"


def bench_table(bench: dict) -> str:
    """A line for each case and direction: microseconds, quartiles, graph replay, share of copy, times of others."""
    header = ("case", "direction", "us", "iqr", "graph us", "%copy", "eager", "compile", "peer")
    lines = [BENCH_ROW.format(*header)]
    for entry in bench["entries"]:
        for direction, measured in entry["directions"].items():
            ours, graph = measured["time_us"]["camox"], measured["graph_us"].get("camox")
            others = [n for n in measured["speed"] if n not in ("eager", "compile")]
            best = min((measured["speed"][n]["median"] for n in others), default=None)
            cells = (
                f"{ours['median']:.1f}",
                f"{100 * (ours['q3'] - ours['q1']) / ours['median']:.0f}%",
                f"{graph['median']:.1f}" if graph else "-",
                f"{100 * measured['share_of_copy']['median']:.0f}%",
                *(times(value) for value in (speed(measured, "eager"), speed(measured, "compile"), best)),
            )
            lines.append(BENCH_ROW.format(entry["key"], direction, *cells))
        lines += [f"    {name}: {reason}" for name, reason in entry["refused"].items()]
    if bench["copy_gb_per_s"]:
        lines.append(f"copy bandwidth, read plus written: {bench['copy_gb_per_s']:.0f} GB/s")
    lines += [f"not measured: {key}: {reason}" for key, reason in bench["not_measured"].items()]
    return "\n".join(lines)


def times(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.2f}x"


def target_table(outcomes: list[dict]) -> str:
    lines = []
    for one in outcomes:
        measured = "-" if one["measured"] is None else f"{one['measured']:.3g}"
        lines.append(f"{one['name']:88} {one['bound']:>7} {measured:>7}  {one['verdict']}")
    passed = sum(one["verdict"] == "pass" for one in outcomes)
    return "\n".join([*lines, f"{passed} of {len(outcomes)} targets of an H200 pass"])


def summary(record: dict) -> str:
    """The tables of a record, worst news last where a terminal still shows it."""
    parts = [bench_table(record["bench"]), target_table(record["targets"])]
    for name in ("correctness", "graphs", "tests"):
        parts += [f"{name}: {one['case']}: {one['message']}" for one in record[name]["failures"][:5]]
    rows = [f"{name:12} {p['status']:12} {p['seconds']:6.0f} s  {p['message']}" for name, p in record["parts"].items()]
    where = record["environment"].get("gpu", "no GPU")
    rehearsal = "" if record["device"] == "cuda" else " - a rehearsal without a GPU: nothing in it counts"
    return "\n".join([*parts, f"{where}, {record['mode']}, {record['seconds']:.0f} s{rehearsal}", *rows])


def failed(record: dict) -> bool:
    """Whether something is wrong; what could not be had or tried is not, and neither is a slow kernel."""
    return any(part["status"] == "failed" for part in record["parts"].values())
