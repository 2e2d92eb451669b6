"""The record of scripts/gpu_check.py: its schema, the targets it is compared with, the tables drawn from it.

Needs the standard library alone. A record is one JSON file for a GPU, benchmarks/results/<gpu-name>-gpu.json.
"""

import json
import math
import os
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.record import SPREAD, MapOf, Maybe, problems

SCHEMA_VERSION = 2
IMAGE_OPS = runpy.run_path(str(Path(__file__).resolve().parent.parent / "camox_ops" / "_ops.py"))["IMAGE_OPS"]
STATUSES = ("passed", "failed", "unavailable", "incomplete", "not run")
PARTS = ("environment", "correctness", "graphs", "bench", "tests", "memcheck", "racecheck", "initcheck")
SANITIZERS = PARTS[-3:]
# The benchmarks that run on CUDA: their group, the op's name in camox_ops.
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
    "bias_gelu": "bias_gelu",
    "bias_gelu_dropout": "bias_gelu",
    "box_mean_3": "box_mean",
    "box_mean_31": "box_mean",
    "structure_loss": "structure_loss",
    "linear_cross_entropy": "linear_cross_entropy",
    "grad_group_norms": "grad_group_norms",
    "linear_attention_feature": "linear_attention",
    "linear_attention_sum": "linear_attention",
    "linear_attention_causal": "linear_attention",
    "linear_attention_causal_sums": "linear_attention",
    "short_attention": "short_attention",
    "short_attention_causal": "short_attention",
    "moe_route": "moe_combine",
    "moe_dispatch": "moe_combine",
    "moe_combine": "moe_combine",
    "moe_layer": "moe_combine",
    "token_moe_gelu": "moe_combine",
    "bdh_attention": "bdh_attention",
    "vision_bdh_step": "bdh_attention",
    "k1_step": "short_attention",
    "emberformer_step": "short_attention",
    **{name: name for name in IMAGE_OPS},
}
OPS = tuple(dict.fromkeys(GROUPS.values()))
LATER = ("time was up", "was not asked for")  # why something is not measured that another run may measure
TARGET_DTYPES = ("float32", "bfloat16")
SMALL_SLACK = 1.2


class Target(NamedTuple):
    """What is compared with a bound: number(a direction's measurements), None where there is none."""

    what: str
    direction: str
    bound: float
    number: Callable
    dtypes: tuple[str, ...] = TARGET_DTYPES
    most: bool = False  # the bound is the largest that passes


def copy_target(direction: str, bound: float, **more) -> Target:
    return Target("share of copy bandwidth", direction, bound, lambda d: d["share_of_copy"]["median"], **more)


def speed_target(over: str, direction: str, bound: float, **more) -> Target:
    return Target(f"times {over}", direction, bound, lambda d: speed(d, over), **more)


# Of the large shapes of a group without targets of its own; its small ones have small_targets.
LARGE_TARGETS = (
    copy_target("forward", 0.85),
    copy_target("backward", 0.75),
    speed_target("eager", "forward_backward", 4.0),
    speed_target("compile", "forward_backward", 1.3),
)


def bytes_targets(eager: int, mask: int, ours: int) -> tuple[Target, ...]:
    """Large targets of an op that plain PyTorch runs at the speed of memory too: 85% of the ratio of the bytes.

    eager, ours: how many tensors are read and written, forward and backward; mask: how many masks of bytes."""
    ratios = {dtype: (eager * size + mask) / (ours * size) for dtype, size in (("float32", 4), ("bfloat16", 2))}
    return (
        *LARGE_TARGETS[:2],
        *(
            speed_target("eager", "forward_backward", round(0.85 * ratio, 2), dtypes=(dtype,))
            for dtype, ratio in ratios.items()
        ),
        speed_target("compile", "forward_backward", 0.9),
    )


# What torch.compile fuses moves as many bytes as ours, but for masks. Tensors of eager, forward and backward: dropout
# 2 + 2 and a mask each way; bias_gelu: + 2, gelu 2, its backward 3, the sum for the bias 1; sparse_gate: relu 2 + 2,
# * 3, dropout 2, backward 2, 3 + 3, 3 + 3; dropout_add_layer_norm: dropout 2, + 3, layer_norm 2, backward 3 + 2 + 2.
LARGE_TARGETS_OF = {
    "dropout": bytes_targets(4, 2, 4),
    "bias_gelu": bytes_targets(8, 0, 5),
    "bias_gelu_dropout": bytes_targets(12, 2, 5),
    "sparse_gate": bytes_targets(23, 2, 8),
    "dropout_add_layer_norm": bytes_targets(14, 2, 8),
}
LINEAR_ATTENTION = (copy_target("forward", 0.75, dtypes=("bfloat16",)),)
CAUSAL = (speed_target("fla", "forward_backward", 1.5),)
MOE_ROWS = (copy_target("forward", 0.8), copy_target("backward", 0.8))
OWN_TARGETS = {
    "linear_attention_feature": LINEAR_ATTENTION,
    "linear_attention_sum": LINEAR_ATTENTION,
    "linear_attention_causal": CAUSAL,
    "linear_attention_causal_sums": CAUSAL,
    "short_attention": (speed_target("eager", "forward_backward", 4.0),),
    "short_attention_causal": (speed_target("eager", "forward_backward", 1.0, dtypes=("bfloat16",)),),
    "moe_route": (Target("us of a graph replay", "forward", 15.0, lambda d: graph_us(d), most=True),),
    "moe_dispatch": MOE_ROWS,
    "moe_combine": MOE_ROWS,
    "moe_layer": (speed_target("eager", "forward_backward", 4.0),),
    "token_moe_gelu": (speed_target("scattermoe", "step", 1.0),),
    "bdh_attention": (),  # measured alone; its target is the model's step
    "vision_bdh_step": (speed_target("eager", "step", 2.5), speed_target("reduce_overhead", "step", 1.5)),
    "k1_step": (speed_target("eager", "step", 5.0),),
    "emberformer_step": (speed_target("eager", "step", 2.0),),
}

STATUS = {"status": str, "message": str, "seconds": float, "mode": str}
DIRECTION = {
    "floor_bytes": int,
    "time_us": MapOf(SPREAD),
    "warm_us": MapOf(SPREAD),
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
# Cases by op and shape: what a later run of the same commit and wheel measures again replaces them one by one.
CHECKED = {
    "not_in_this_build": [str],
    "cases": MapOf(MapOf(int)),
    "worst": MapOf(float),
    "failures": [{"op": str, "shape": str, "case": str, "message": str}],
}
TESTED = {
    "collected": int,
    "passed": int,
    "failed": int,
    "skipped": int,
    "not_run": int,
    "failures": [{"case": str, "message": str}],
}
SANITIZED = {"ops": MapOf(int), "errors": int, "foreign_errors": int, "findings": [str]}
RECORD = {
    "schema_version": int,
    "date": str,
    "device": str,
    "commit": str,
    "dirty": bool,
    "version": str,
    "wheel": Maybe({"name": str, "sha256": str, "bytes": int}),
    "seconds": float,
    "runs": [{"date": str, "mode": str, "asked": str, "seconds": float}],
    "environment": MapOf(str),
    "parts": MapOf(STATUS),
    "correctness": CHECKED,
    "graphs": CHECKED,
    "tests": MapOf(TESTED),
    "sanitizers": MapOf([SANITIZED]),
    "bench": {
        "copy_gb_per_s": Maybe(float),
        "l2_bytes": int,
        "entries": [ENTRY],
        "not_measured": MapOf(str),
    },
    "targets": [{"name": str, "bound": str, "measured": Maybe(float), "verdict": str}],
}
EMPTY = {
    "correctness": {"not_in_this_build": [], "cases": {}, "worst": {}, "failures": []},
    "graphs": {"not_in_this_build": [], "cases": {}, "worst": {}, "failures": []},
    "tests": {},
    "sanitizers": {},
    "bench": {"copy_gb_per_s": None, "l2_bytes": 0, "entries": [], "not_measured": {}},
}
SAME_MACHINE = ("gpu", "driver", "torch")


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


def earlier(path: Path, record: dict) -> tuple[dict | None, str]:
    """The record that lies at `path`, where a new run may add to it, and a sentence of what becomes of it."""
    if not path.exists():
        return None, ""
    try:
        old = json.loads(path.read_text())
        found = faults(old)
    except ValueError as error:
        old, found = {}, [str(error)]
    if found:
        return None, f"replaces {path.name}, which is not valid: {found[0]}"
    pairs = [("device", old["device"], record["device"]), ("commit", old["commit"], record["commit"])]
    pairs += [("wheel", *((r["wheel"] or {}).get("sha256", "none") for r in (old, record)))]
    pairs += [(name, *(r["environment"].get(name, "none") for r in (old, record))) for name in SAME_MACHINE]
    for name, before, now in pairs:
        if before != now:
            return None, f"replaces {path.name}, whose {name} is {before[:40]}, not {now[:40]}"
    return old, f"adds to {path.name}, begun {old['runs'][0]['date'] if old['runs'] else old['date']}"


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


def graph_us(direction: dict) -> float | None:
    return direction["graph_us"]["camox"]["median"] if "camox" in direction["graph_us"] else None


def verdict_at_least(measured: float, bound: float) -> str:
    return "pass" if measured >= bound else f"short by {100 * (1 - measured / bound):.0f}%"


def verdict_at_most(measured: float, bound: float) -> str:
    return "pass" if measured <= bound else f"over by {100 * (measured / bound - 1):.0f}%"


def targets(record: dict) -> list[dict]:
    """Every target of an H200 compared with the measurements: one of each group, shape, dtype and direction."""
    bench, outcomes = record["bench"], []
    for group in GROUPS:
        entries = [e for e in bench["entries"] if e["group"] == group and e["layout"] == "contiguous"]
        entries = [e for e in entries if e["dtype"] in TARGET_DTYPES]
        own = OWN_TARGETS.get(group)
        if own is not None:
            if own and not entries:
                outcomes.append(unmeasured(group, why_unmeasured(bench, group)))
            for entry in entries:
                outcomes += compared_with(entry, own)
            continue
        for size in ("large", "small"):
            if not any(e["size"] == size for e in entries):
                outcomes.append(unmeasured(f"{group}, {size} shapes", why_unmeasured(bench, group)))
        for entry in entries:
            large = entry["size"] == "large"
            wanted = LARGE_TARGETS_OF.get(group, LARGE_TARGETS)
            outcomes += compared_with(entry, wanted) if large else small_targets(entry, bench)
    return outcomes


def why_unmeasured(bench: dict, group: str) -> str:
    reasons = [reason for key, reason in bench["not_measured"].items() if key.split("/")[0] == group]
    return reasons[0] if reasons else "no measurement"


def unmeasured(name: str, why: str) -> dict:
    return {"name": name, "bound": "", "measured": None, "verdict": f"not measured: {why}"}


def compared_with(entry: dict, wanted: tuple[Target, ...]) -> list[dict]:
    found = []
    for target in wanted:
        if entry["dtype"] not in target.dtypes:
            continue
        name = f"{entry['key']}, {target.direction}: {target.what}"
        directions = entry["directions"]
        measured = target.number(directions[target.direction]) if target.direction in directions else None
        if measured is None:
            candidate = target.what.removeprefix("times ")
            found.append(unmeasured(name, entry["refused"].get(candidate, "no measurement")))
        else:
            verdict = (verdict_at_most if target.most else verdict_at_least)(measured, target.bound)
            sign = "<=" if target.most else ">="
            found.append({"name": name, "bound": f"{sign} {target.bound}", "measured": measured, "verdict": verdict})
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


BENCH_ROW = "{:58} {:16} {:>9} {:>5} {:>9} {:>9} {:>7} {:>7} {:>7} {:>7}"


def bench_table(bench: dict) -> str:
    """A line for each case and direction: microseconds, quartiles, graph replay, share of copy, times of others."""
    header = ("case", "direction", "us", "iqr", "warm us", "graph us", "%copy", "eager", "compile", "peer")
    lines = [BENCH_ROW.format(*header)]
    for entry in bench["entries"]:
        for direction, measured in entry["directions"].items():
            ours, warm, graph = (measured[name].get("camox") for name in ("time_us", "warm_us", "graph_us"))
            others = [n for n in measured["speed"] if n not in ("eager", "compile")]
            best = min((measured["speed"][n]["median"] for n in others), default=None)
            cells = (
                f"{ours['median']:.1f}",
                f"{100 * (ours['q3'] - ours['q1']) / ours['median']:.0f}%",
                *(f"{taken['median']:.1f}" if taken else "-" for taken in (warm, graph)),
                f"{100 * measured['share_of_copy']['median']:.0f}%",
                *(times(value) for value in (speed(measured, "eager"), speed(measured, "compile"), best)),
            )
            lines.append(BENCH_ROW.format(entry["key"], direction, *cells))
        lines += [f"    {name}: {reason}" for name, reason in entry["refused"].items()]
    if bench["copy_gb_per_s"]:
        lines.append(f"copy bandwidth, read plus written: {bench['copy_gb_per_s']:.0f} GB/s")
    reasons = bench["not_measured"]
    lines += [f"not measured: {key}: {reason}" for key, reason in sorted(reasons.items()) if reason not in LATER]
    later = sum(reason in LATER for reason in reasons.values())
    lines += [f"not measured yet: {later} cases, which --missing goes on with"] if later else []
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
    for name in ("correctness", "graphs"):
        failures = record[name]["failures"][:5]
        parts += [f"{name}: {one['op']} {one['shape']} {one['case']}: {one['message']}" for one in failures]
    failures = [one for file in record["tests"].values() for one in file["failures"]]
    parts += [f"tests: {one['case']}: {one['message']}" for one in failures[:5]]
    statuses = [(name, record["parts"][name]) for name in PARTS]
    rows = [f"{name:12} {p['status']:12} {p['seconds']:6.0f} s  {p['message']}" for name, p in statuses]
    where = record["environment"].get("gpu", "no GPU")
    rehearsal = "" if record["device"] == "cuda" else " - a rehearsal without a GPU: nothing in it counts"
    runs = f"{len(record['runs'])} runs, {record['seconds']:.0f} s"
    return "\n".join([*parts, f"{where}, {record['commit'][:12]}, {runs}{rehearsal}", *rows])


def failed(record: dict) -> bool:
    """Whether something is wrong; what could not be had or tried is not, and neither is a slow kernel."""
    return any(part["status"] == "failed" for part in record["parts"].values())
