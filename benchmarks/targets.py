"""``make targets``: every target, the number measured, and pass or the shortfall.

Targets are data, ``benchmarks/targets.json``; measurements come from the records under ``benchmarks/results``, or from
a new run with --run. A target:

    name          what it says
    op            the benchmark whose record has the measurement
    metric        speed | times_floor | saved_ratio | peak_ratio | peak_over_needed | saved_share_of_inputs (see
                  benchmarks/record.py); times are those with cold caches
    over          the candidate that camox is compared with; default "eager"
    where         group, direction, dtype, layout and the name of a list of shapes; one entry is needed for each shape
    at_least or at_most   the bound on the geometric mean over the shapes
    noise         share by which a bound of "no slower" may be missed: repeated runs differ by as much
    left_alone_below   a gain that cx.train.tune_cpu does not take: PyTorch's own kernels run there, nothing is missed

A candidate whose results are wrong at some of the shapes is compared at the others, which the verdict says.
What was not measured, or only by a --quick run or on a busy machine, is never passed. Exit status 1 when --strict and
not all passed.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from benchmarks import record  # noqa: E402

TARGETS = Path(__file__).with_name("targets.json")
NEEDED = {"name", "op", "metric", "where"}
ALLOWED = NEEDED | {"over", "at_least", "at_most", "noise", "left_alone_below"}


@dataclass(frozen=True)
class Outcome:
    """A target compared with the records of one machine."""

    target: dict
    machine: str
    measured: float | None
    verdict: str

    @property
    def passed(self) -> bool:
        return self.verdict.startswith("pass")


def load_targets(path: Path = TARGETS) -> tuple[list[dict], dict]:
    """(targets, shapes by name); ValueError names the first target that cannot be evaluated."""
    data = json.loads(path.read_text())
    for target in data["targets"]:
        name = target.get("name", "?")
        if not NEEDED <= target.keys() <= ALLOWED:
            raise ValueError(f"target {name!r}: fields {sorted(target)}, expected {sorted(NEEDED)} and a bound")
        if ("at_least" in target) == ("at_most" in target):
            raise ValueError(f"target {name!r}: needs one of at_least and at_most")
        if target["metric"] not in record.METRICS:
            raise ValueError(f"target {name!r}: metric {target['metric']!r} is not one of {record.METRICS}")
        if target["where"].get("shapes") not in data["shapes"]:
            raise ValueError(f"target {name!r}: unknown shapes {target['where'].get('shapes')!r}")
    return data["targets"], data["shapes"]


def shortfall(target: dict, value: float) -> str:
    """ "pass", or by how much the bound is missed."""
    if value < target.get("left_alone_below", 0.0):
        return "pass: left alone, PyTorch's own kernels are not slower here"
    noise = target.get("noise", 0.0)
    if "at_least" in target:
        bound = target["at_least"]
        return "pass" if value >= bound * (1 - noise) else f"short by {100 * (1 - value / bound):.0f}%"
    bound = target["at_most"]
    return "pass" if value <= bound * (1 + noise) else f"over by {100 * (value / bound - 1):.0f}%"


def evaluate(target: dict, shapes: dict, found: dict | None, machine: str) -> Outcome:
    """The outcome of a target against the record of its op, which may be missing."""
    if found is None:
        return Outcome(target, machine, None, "not measured: no record")
    if found["quick"]:
        return Outcome(target, machine, None, "not measured: the record is of a --quick run")
    where = {name: value for name, value in target["where"].items() if name != "shapes"}
    values, wrong = [], []
    for shape in shapes[target["where"]["shapes"]]:
        entries = [e for e in found["entries"] if e["shape"] == shape and all(e[n] == v for n, v in where.items())]
        value = record.metric(entries[0], target["metric"], target.get("over", "eager")) if entries else None
        missing = "" if value is not None else why_missing(found, target, entries, shape)
        if value is not None:
            values.append(value)
        elif record.WRONG in missing:
            wrong.append("x".join(map(str, shape)))
        else:
            return Outcome(target, machine, None, f"not measured: {missing}")
    if not values:
        return Outcome(target, machine, None, f"not measured: {target['over']} gives wrong results at every shape")
    measured = record.geomean(values)
    left_out = f" ({target['over']} gives wrong results at {', '.join(wrong)}: left out)" if wrong else ""
    return Outcome(target, machine, measured, shortfall(target, measured) + left_out)


def why_missing(found: dict, target: dict, entries: list, shape: list) -> str:
    """What the record says about a number that it does not have."""
    size = "x".join(map(str, shape))
    measured = record.measurement(entries[0]) if entries else None
    if measured and record.noisy(measured):
        return f"{size}: other processes used {measured['other_cpu']:.2f} cores"
    if entries:
        over = target.get("over", "eager")
        return f"{size}: {entries[0]['refused'].get(over, f'no {over} in the record')}"
    where = target["where"]
    key = f"{where['group']}/{where['direction']}/{where['dtype']}/{where['layout']}/{size}"
    refused = {item["key"]: item["reason"] for item in found["refused"]}
    return f"{size}: {refused.get(key, 'no such case in the record')}"


def evaluate_all(targets: list[dict], shapes: dict, records: list[dict]) -> list[Outcome]:
    """Every target on every machine that has a record of any op; one "no record" line each where there is none."""
    machines = sorted({r["machine"]["name"] for r in records}) or ["-"]
    by_place = {(r["machine"]["name"], r["op"]): r for r in records}
    return [evaluate(t, shapes, by_place.get((m, t["op"])), m) for m in machines for t in targets]


def table(outcomes: list[Outcome]) -> str:
    """The outcomes as text, grouped by machine and op."""
    lines = []
    width = max((len(o.target["name"]) for o in outcomes), default=0)
    heading = None
    for outcome in outcomes:
        target = outcome.target
        if heading != (outcome.machine, target["op"]):
            heading = (outcome.machine, target["op"])
            lines += ["", f"{outcome.machine}: {target['op']}"]
        bound = f">= {target['at_least']:g}" if "at_least" in target else f"<= {target['at_most']:g}"
        bound += f" -{100 * target['noise']:g}%" if "at_least" in target and "noise" in target else ""
        bound += f" +{100 * target['noise']:g}%" if "at_most" in target and "noise" in target else ""
        measured = "-" if outcome.measured is None else f"{outcome.measured:.3g}"
        lines.append(f"  {target['name']:{width}}  {bound:>9}  {measured:>7}  {outcome.verdict}")
    passed, missing = sum(o.passed for o in outcomes), sum(o.measured is None for o in outcomes)
    failed = len(outcomes) - passed - missing
    lines += ["", f"{passed} passed, {failed} fell short, {missing} not measured"]
    return "\n".join(lines).lstrip("\n")


def provenance(records: list[dict]) -> str:
    """Where the numbers come from, one line a record."""
    return "\n".join(
        f"{r['machine']['name']} {r['op']}: commit {r['commit'][:12]}{' + changes' if r['dirty'] else ''}, "
        f"torch {r['torch']}, {r['isa']}, {r['threads']} threads, {r['date'][:10]}"
        f"{', quick' if r['quick'] else ''}{', forced: ' + '; '.join(r['forced']) if r['forced'] else ''}"
        for r in records
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Every target, the number measured: pass or the shortfall.")
    parser.add_argument("--op", help="only targets of this op")
    parser.add_argument("--run", action="store_true", help="measure again before")
    parser.add_argument("--strict", action="store_true", help="exit status 1 unless every target passes")
    parser.add_argument("--results", type=Path, default=record.RESULTS, help="folder of the records")
    parser.add_argument("--targets", type=Path, default=TARGETS)
    options = parser.parse_args(arguments)
    targets, shapes = load_targets(options.targets)
    targets = [t for t in targets if options.op in (None, t["op"])]
    if options.run:
        for op in dict.fromkeys(t["op"] for t in targets):
            command = [sys.executable, str(Path(__file__).with_name("run.py")), "--op", op]
            subprocess.run(command, check=False)
    records = [r for r in record.load_all(options.results) if options.op in (None, r["op"])]
    outcomes = evaluate_all(targets, shapes, records)
    print(table(outcomes))
    if records:
        print(provenance(records))
    return 1 if options.strict and not all(o.passed for o in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
