"""Rewrites the speed table of README.md from the records under benchmarks/results; --check fails when it would change.

The table stands between ``<!-- bench:start -->`` and ``<!-- bench:end -->``. One row per op, direction, dtype and
layout: geometric means over its shapes with the worst shape in brackets, losses as well as wins.
"""

import argparse
import difflib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from benchmarks import record  # noqa: E402

START, END = "<!-- bench:start -->", "<!-- bench:end -->"
HEADER = (
    "| op | pass | type, layout | vs eager | vs `torch.compile` | vs best peer | of the floor "
    "| vs eager, default malloc | saved for backward, ours / eager |\n|---|---|---|---:|---:|---:|---:|---:|---:|"
)


def times(value: float) -> str:
    return f"{value:.2f}x"


def percent(value: float) -> str:
    return f"{100 * value:.0f}%"


def span(values: list, show=times) -> str:
    """Geometric mean and, in brackets, the worst of several numbers; "-" where none was measured."""
    values = [v for v in values if v is not None]
    if not values:
        return "-"
    mean = show(record.geomean(values))
    return mean if len(values) == 1 else f"{mean} ({show(min(values))})"


def best_peer(entry: dict) -> float | None:
    """Speed against the fastest candidate that is neither eager, nor the compiled eager formula, nor camox itself."""
    speed = entry["kept"]["speed"] if entry["kept"] else {}
    peers = [n for n in speed if n not in ("eager", "compile", "floor") and not n.startswith("camox_")]
    return min(filter(None, (record.metric(entry, "speed", name) for name in peers)), default=None)


def megabytes(count: float) -> str:
    return f"{count / 1e6:.1f}" if count >= 50_000 or count == 0 else f"{count / 1e6:.3f}"


def saved(entries: list[dict]) -> str:
    """Bytes saved for backward over all shapes, inputs included, of camox and of eager."""
    pairs = [[e["memory"].get(name) for name in ("camox", "eager")] for e in entries]
    if not all(ours and theirs and None not in (ours["saved"], theirs["saved"]) for ours, theirs in pairs):
        return "-"
    sums = [sum(pair[i]["saved"] + pair[i]["saved_inputs"] for pair in pairs) for i in (0, 1)]
    return f"{megabytes(sums[0])} / {megabytes(sums[1])} MB"


def speeds(entries: list[dict], over: str, allocator: str = "kept") -> list:
    return [record.metric(e, "speed", over, allocator) for e in entries]


def row(entries: list[dict]) -> str:
    """One line of the table from the entries that differ in shape alone."""
    first = entries[0]
    cells = [
        f"`{first['group']}`",
        first["direction"].replace("_", " + "),
        f"{first['dtype']}, {first['layout']}",
        span(speeds(entries, "eager")),
        span(speeds(entries, "compile")),
        span([best_peer(e) for e in entries]),
        span(speeds(entries, "floor"), percent),
        span(speeds(entries, "eager", "default")),
        saved(entries),
    ]
    return f"| {' | '.join(cells)} |"


def table(records: list[dict]) -> str:
    """The tables of all machines, or a line that says that nothing was measured."""
    parts = []
    for machine in sorted({r["machine"]["name"] for r in records}):
        here = [r for r in records if r["machine"]["name"] == machine]
        facts = here[0]
        parts.append(
            f"{facts['machine']['cpu']}, {facts['machine']['cores']} cores, {facts['isa']}, {facts['threads']} "
            f"threads, torch {facts['torch']}: geometric mean over the measured shapes (worst shape)."
        )
        parts += [f"`{r['op']}` was measured with --force: {'; '.join(r['forced'])}." for r in here if r["forced"]]
        rows = {}
        for entry in (e for r in here for e in r["entries"]):
            rows.setdefault((entry["group"], entry["direction"], entry["dtype"], entry["layout"]), []).append(entry)
        parts.append("\n".join([HEADER, *(row(entries) for entries in rows.values())]))
    return "\n\n".join(parts) or "Nothing measured yet."


def rewritten(readme: str, records: list[dict]) -> str:
    """README with the text between the markers replaced; ValueError without exactly one pair of markers."""
    if readme.count(START) != 1 or readme.count(END) != 1 or readme.index(START) > readme.index(END):
        raise ValueError(f"README.md needs one {START} and, after it, one {END}")
    before, rest = readme.split(START)
    return f"{before}{START}\n{table(records)}\n{END}{rest.split(END)[1]}"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Rewrites the speed table of README.md.")
    parser.add_argument("--check", action="store_true", help="exit status 1 when README.md differs from the records")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    options = parser.parse_args(arguments)
    old = options.readme.read_text()
    try:
        new = rewritten(old, record.load_all(options.results))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if not options.check:
        options.readme.write_text(new)
        return 0
    difference = difflib.unified_diff(old.splitlines(), new.splitlines(), "README.md", "from the records", lineterm="")
    text = "\n".join(difference)
    if text:
        print(text)
    return 1 if text else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
