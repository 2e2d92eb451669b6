"""The benchmark record: what the JSON under ``benchmarks/results`` holds, its validation, the numbers drawn from it.

Needs the standard library alone, so that ``make targets`` and the README's tables work without PyTorch.
"""

import json
import math
import os
import statistics
from pathlib import Path

SCHEMA_VERSION = 2
OTHER_CPU_LIMIT = 0.25  # cores that other processes may use before a measurement does not count
WRONG = "wrong result"  # how the reason of a candidate begins whose numbers are off
RESULTS = Path(__file__).resolve().parent / "results"


class Maybe:
    """Marks a field of a schema that may be null."""

    def __init__(self, schema):
        self.schema = schema


class MapOf:
    """Marks a mapping from names to values of one schema."""

    def __init__(self, schema):
        self.schema = schema


SPREAD = {"median": float, "q1": float, "q3": float}
MEASUREMENT = {
    "time_us": MapOf({**SPREAD, "rounds": int, "reps": int}),
    "speed": MapOf(SPREAD),
    "other_cpu": float,
}
CACHES = {"cold": MEASUREMENT, "warm": Maybe(MEASUREMENT)}  # steps of seconds are not measured warm
MEMORY = {
    "saved": Maybe(int),
    "saved_inputs": Maybe(int),
    "held_after_forward": int,
    "peak": int,
    "returned": int,
}
ENTRY = {
    "key": str,
    "group": str,
    "direction": str,
    "dtype": str,
    "layout": str,
    "shape": [int],
    "floor": Maybe(MapOf(int)),
    "check": MapOf(float),
    "kept": Maybe(CACHES),
    "default": Maybe(CACHES),
    "memory": MapOf(MEMORY),
    "refused": MapOf(str),
}
RECORD = {
    "schema_version": int,
    "op": str,
    "date": str,
    "commit": str,
    "dirty": bool,
    "version": str,
    "torch": str,
    "python": str,
    "machine": {"name": str, "cpu": str, "cores": int, "governor": str},
    "isa": str,
    "threads": int,
    "quick": bool,
    "forced": [str],
    "load": {"before": [float], "after": [float], "other_cpu_before": float},
    "allocator": MapOf({"set_by": str, "reuse_page_faults": int}),
    "caches": {"last_level": int, "written_between_calls": int},
    "entries": [ENTRY],
    "refused": [{"key": str, "reason": str}],
}


def problems(value, schema=RECORD, where="record") -> list[str]:
    """Every place in which ``value`` departs from ``schema``, as sentences; empty when it is valid."""
    if isinstance(schema, Maybe):
        return [] if value is None else problems(value, schema.schema, where)
    if isinstance(schema, list):
        if not isinstance(value, list):
            return [f"{where}: expected a list, got {type(value).__name__}"]
        return [p for i, item in enumerate(value) for p in problems(item, schema[0], f"{where}[{i}]")]
    if isinstance(schema, (dict, MapOf)):
        if not isinstance(value, dict):
            return [f"{where}: expected an object, got {type(value).__name__}"]
        if isinstance(schema, MapOf):
            return [p for name, item in value.items() for p in problems(item, schema.schema, f"{where}.{name}")]
        found = [f"{where}.{name}: missing" for name in schema if name not in value]
        found += [f"{where}.{name}: unknown field" for name in value if name not in schema]
        return found + [
            p for name in schema if name in value for p in problems(value[name], schema[name], f"{where}.{name}")
        ]
    accepted = (int, float) if schema is float else schema
    if not isinstance(value, accepted) or (isinstance(value, bool) and schema is not bool):
        return [f"{where}: expected {schema.__name__}, got {value!r}"]
    if isinstance(value, float) and not math.isfinite(value):
        return [f"{where}: {value!r} is not finite"]
    return []


def write(record: dict, path: Path) -> None:
    """Validates ``record`` and puts it at ``path`` in one step; ValueError names what is wrong with it."""
    found = problems(record)
    if record.get("schema_version") != SCHEMA_VERSION:
        found.append(f"record.schema_version: expected {SCHEMA_VERSION}, got {record.get('schema_version')!r}")
    if found:
        raise ValueError("not a valid benchmark record: " + "; ".join(found[:10]))
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    os.replace(scratch, path)


def load(path: Path) -> dict:
    """The record at ``path``; ValueError when it is not a valid one of this schema version."""
    record = json.loads(path.read_text())
    found = problems(record)
    if not found and record["schema_version"] != SCHEMA_VERSION:
        found = [f"schema_version {record['schema_version']}, expected {SCHEMA_VERSION}"]
    if found:
        raise ValueError(f"{path.name}: " + "; ".join(found[:10]))
    return record


def load_all(folder: Path = RESULTS) -> list[dict]:
    """Every record in ``folder``, by file name; those of GPUs are of another kind (scripts/gpu_record.py)."""
    return [load(path) for path in sorted(folder.glob("*.json")) if not path.stem.endswith("-gpu")]


def spread(samples: list[float]) -> dict[str, float]:
    """Median and quartiles, four significant digits."""
    if len(samples) == 1:
        q1 = median = q3 = samples[0]
    else:
        q1, median, q3 = statistics.quantiles(samples, n=4, method="inclusive")
    return {name: float(f"{value:.4g}") for name, value in (("median", median), ("q1", q1), ("q3", q3))}


def geomean(values) -> float:
    """Geometric mean of positive numbers."""
    values = list(values)
    if not values or min(values) <= 0:
        raise ValueError(f"geomean: needs positive numbers, got {values}")
    return math.exp(math.fsum(math.log(v) for v in values) / len(values))


def noisy(measured: dict) -> bool:
    """Whether other processes used the machine during a measurement, which only --force records."""
    return measured["other_cpu"] > OTHER_CPU_LIMIT


METRICS = ("speed", "times_floor", "saved_ratio", "peak_ratio", "peak_over_needed", "saved_share_of_inputs")


WAYS = (("kept", "cold"), ("kept", "warm"), ("default", "cold"))


def measurement(entry: dict, allocator: str = "kept", caches: str = "cold") -> dict | None:
    """The times of an entry with one allocator and cold or warm caches, or None where they were not measured."""
    return entry[allocator] and entry[allocator][caches]


def metric(entry: dict, name: str, over: str = "eager", allocator: str = "kept", caches: str = "cold") -> float | None:
    """One number of an entry, or None where it was not measured, or timed while other processes used the machine.

    ``speed``: time of ``over`` / time of camox. ``times_floor``: time of camox / time of the floor. ``saved_ratio``,
    ``peak_ratio``: bytes of camox / bytes of ``over``, beyond the inputs. ``peak_over_needed``: bytes of camox's peak /
    bytes that must exist at once: what the step returns (outputs and gradients) and what the op saves for backward.
    ``saved_share_of_inputs``: bytes that camox saves beyond its inputs / bytes of those inputs that it keeps alive.
    """
    if name not in METRICS:
        raise ValueError(f"metric: expected one of {METRICS}, got {name!r}")
    if name in ("speed", "times_floor"):
        measured = measurement(entry, allocator, caches)
        other = "floor" if name == "times_floor" else over
        if measured is None or noisy(measured) or other not in measured["speed"]:
            return None
        speed = measured["speed"][other]["median"]
        return 1 / speed if name == "times_floor" else speed
    ours, theirs = entry["memory"].get("camox"), entry["memory"].get(over)
    if ours is None or (name != "peak_ratio" and ours["saved"] is None):
        return None
    if name == "saved_share_of_inputs":
        return ours["saved"] / ours["saved_inputs"] if ours["saved_inputs"] else None
    if name == "peak_over_needed":
        needed = ours["returned"] + ours["saved"]
        return ours["peak"] / needed if needed else None
    field = "saved" if name == "saved_ratio" else "peak"
    if theirs is None or not theirs[field]:
        return None
    return ours[field] / theirs[field]
