"""Draws everything that shows measured speeds from the records under benchmarks/results: the table of README.md between
``<!-- bench:start -->`` and ``<!-- bench:end -->``, docs/benchmarks.md and the charts docs/img/speed-*.svg.

    python scripts/benchmark_pages.py [--check]

--check writes nothing and fails when a file would change. Needs the standard library alone.
"""

import argparse
import difflib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT), str(ROOT / "scripts")]

import speed_chart  # noqa: E402
from benchmark_groups import FEATURED, GROUPS, REMARKS, Featured, Group, Remark  # noqa: E402

from benchmarks import record  # noqa: E402

START, END = "<!-- bench:start -->", "<!-- bench:end -->"
GENERATED = "<!-- Written by scripts/benchmark_pages.py from benchmarks/results. Do not edit. -->"
SUPERSCRIPTS = "¹²³⁴⁵⁶⁷⁸⁹"
COMPILE = "`torch.compile`"
GENERATIONS = {"amd-epyc-2c": " (Zen 5)", "amd-epyc-zen4-2c": " (Zen 4)"}  # which a virtual machine does not say
ISA_NAMES = {"avx512": "AVX-512", "avx2": "AVX2", "portable": "portable kernels"}
SLOW_HALF = 1.5  # eager PyTorch in half precision, this much slower than in float32, is remarked upon
SLOW_HALF_REMARK = Remark(
    f"Eager PyTorch takes more than {SLOW_HALF:g} times as long here as in float32.", "eager is slow in this type"
)
STATE_TOKENS = 1024  # bdh_attention's cases of so many tokens are computed in its state form
DIRECTIONS = {"forward": "fwd", "forward_backward": "fwd + bwd", "step": "step"}
FAR_FROM_COPY = 1 / 3  # cases slower than this share of a copy of their bytes are set in bold

README_HEADER = (
    "| op or module | replaces | vs eager | vs `torch.compile` | kept for backward |\n|---|---|---:|---:|---:|"
)
SUMMARY_HEADER = (
    "| op | pass | type, layout | vs eager | vs `torch.compile` | vs fastest other | % of memcpy "
    "| vs eager, warm | vs eager, default malloc | kept for backward |\n"
    "|---|---|---|---:|---:|---:|---:|---:|---:|---:|"
)
CASES_HEADER = (
    "| case | camox_ops | eager | `torch.compile` | fastest other | memcpy | % of memcpy |\n"
    "|---|---:|---:|---:|---:|---:|---:|"
)
METHOD = """\
# Benchmarks

Every number on this page and in the [README](../README.md) is drawn by `scripts/benchmark_pages.py` from the JSON
files under `benchmarks/results`, one for each op and machine; CI fails when a page and the records differ.
`make bench OP=edge` measures one op on your machine; `make targets` compares the records with
`benchmarks/targets.json`.

## How it is measured

- **Cold caches.** Before each timed call, of whatever candidate, other memory is written: three times the last-level
  cache, at most 512 MiB (each machine's numbers stand with its results). This is how an op meets its inputs in a
  training step, where hundreds of megabytes pass between two calls of it. The column *warm* repeats one call on the
  same tensors instead, which may then stay in the caches. Steps of seconds are not measured warm.
- **Candidates take turns.** camox_ops, eager PyTorch, `torch.compile(fullgraph=True)` of the eager formula, other
  ways to write it, and a copy (`memcpy`) of as many bytes as an ideal kernel would read and write. Ratios are taken
  within a round; the median over the rounds is shown, and the quartiles are in the record.
- **Right results only.** A candidate whose outputs or gradients leave the tolerance against a float64 reference is not
  timed; nor is a compiled one that broke its graph. What was left out, and why, is listed for each machine.
- **Freed memory is kept** on all sides (`cx.train.tune_cpu_allocator`, [allocator.md](allocator.md)), because glibc by
  default returns large blocks to the kernel on every free. The column *default malloc* is with glibc's defaults.
- **A quiet machine.** A case during which other processes used the CPU is measured again, and otherwise dropped.

## How to read it

Ratios are *their time / our time*: 2x is twice as fast, below 1x is slower. A cell shows the geometric mean over the
measured shapes and, in brackets, the slowest shape; "2 of 5 shapes" where the other side could not be measured at the
rest. Forward (fwd) is without autograd, fwd + bwd a forward and a backward, step what the row names; contiguous
unless a layout is named. *vs fastest other* compares with the fastest of the other ways to write it. *% of memcpy* is
the time of the copy over ours; it can pass 100% for ops that are bound by matrix products and are compared with one of
as many operations. *Kept for backward* is what autograd keeps alive between forward and
backward, inputs included, ours of eager's, summed over the shapes.

Cases far below the speed of a copy are mostly of three kinds: small tensors, where the call itself takes as long as the
copy; half precision, whose arithmetic is float32's while its bytes are half; and ops whose arithmetic takes longer than
their memory (random numbers, GELU, softmax, roots and divisions, matrix products).
"""


def times(value: float) -> str:
    return f"{value:.1f}x" if value >= 10 else f"{value:.2f}x"


def percent(value: float) -> str:
    return f"{100 * value:.0f}%"


def microseconds(value: float) -> str:
    return f"{value:,.0f} us" if value >= 100 else f"{value:.1f} us"


def span(values: list, show=times) -> str:
    """Geometric mean and, in brackets, the worst of several numbers and how many there are where some are missing; "-"
    where none was measured."""
    found = [v for v in values if v is not None]
    if not found:
        return "-"
    inside = [show(min(found))] if len(found) > 1 else []
    inside += [f"{len(found)} of {len(values)} shapes"] if len(found) < len(values) else []
    return show(record.geomean(found)) + (f" ({', '.join(inside)})" if inside else "")


def speeds(entries: list[dict], over: str, **way) -> list:
    return [record.metric(entry, "speed", over, **way) for entry in entries]


def alternative(entry: dict) -> tuple[str, float] | None:
    """(name, our speed against it) of the fastest candidate besides eager and its compiled form, not counting ours."""
    cold = entry["kept"] and entry["kept"]["cold"]
    names = [n for n in (cold or {"speed": {}})["speed"] if n not in ("eager", "compile", "floor")]
    found = [(record.metric(entry, "speed", n), n) for n in names if not n.startswith("camox_")]
    measured = [(speed, name) for speed, name in found if speed is not None]
    return min(measured)[::-1] if measured else None


def megabytes(count: float) -> str:
    if count < 1000:
        return f"{count} bytes" if count else "0"
    return f"{count / 1e3:.1f} kB" if count < 50_000 else f"{count / 1e6:.1f} MB"


def kept(entries: list[dict]) -> str:
    """Bytes kept for backward over all shapes, inputs included, of camox and of eager."""
    sums = []
    for name in ("camox", "eager"):
        found = [entry["memory"].get(name) for entry in entries]
        if any(memory is None or None in (memory["saved"], memory["saved_inputs"]) for memory in found):
            return "-"
        sums.append(sum(memory["saved"] + memory["saved_inputs"] for memory in found))
    return f"{megabytes(sums[0])} of {megabytes(sums[1])}"


def group_of(name: str) -> Group:
    return GROUPS.get(name, Group(f"`{name}`", "", ""))


def slow_half(entries: list[dict], everything: list[dict]) -> bool:
    """Whether eager PyTorch is slower in a half-precision type than in float32 on the same shapes."""
    ratios = []
    for entry in entries:
        twins = [
            other
            for other in everything
            if other["dtype"] == "float32"
            and all(other[field] == entry[field] for field in ("group", "direction", "layout", "shape"))
        ]
        if entry["dtype"] in ("bfloat16", "float16") and twins:
            here, there = (e["kept"] and e["kept"]["cold"]["time_us"].get("eager") for e in (entry, twins[0]))
            ratios += [here["median"] / there["median"]] if here and there else []
    return bool(ratios) and record.geomean(ratios) > SLOW_HALF


class Footnotes:
    """The remarks of one table or chart, numbered as they come."""

    def __init__(self):
        self.remarks = []

    def mark(self, remarks: list[Remark]) -> str:
        self.remarks += [remark for remark in remarks if remark not in self.remarks]
        return "".join(SUPERSCRIPTS[self.remarks.index(remark)] for remark in remarks)

    def lines(self) -> str:
        return "\n".join(f"{SUPERSCRIPTS[i]} {remark.text}<br>" for i, remark in enumerate(self.remarks))

    def short(self) -> list[str]:
        return [f"{SUPERSCRIPTS[i]} {remark.short}" for i, remark in enumerate(self.remarks)]


def facts(records: list[dict]) -> str:
    """The machine of some records, in words."""
    first = records[0]
    threads = f"{first['threads']} thread{'s' if first['threads'] != 1 else ''}"
    isa = ISA_NAMES.get(first["isa"], first["isa"])
    cores = f"{first['machine']['cores']} core{'s' if first['machine']['cores'] != 1 else ''}"
    processor = first["machine"]["cpu"] + GENERATIONS.get(first["machine"]["name"], "")
    return f"{processor}, {cores}, {isa}, {threads}, PyTorch {first['torch']}"


def by_machine(records: list[dict]) -> dict[str, list[dict]]:
    """The records of each machine; the machine with most cases first."""
    found = {}
    for one in records:
        found.setdefault(one["machine"]["name"], []).append(one)
    return dict(sorted(found.items(), key=lambda item: (-sum(len(r["entries"]) for r in item[1]), item[0])))


def forced(records: list[dict]) -> list[str]:
    return [
        f"`{r['op']}` was measured on a busy machine (--force): {'; '.join(r['forced'])}."
        for r in records
        if r["forced"]
    ]


def case_name(entry: dict) -> str:
    direction = entry["direction"].replace("_", " + ")
    shape = "x".join(map(str, entry["shape"]))
    return f"{group_of(entry['group']).label}, {direction}, {entry['dtype']}, {entry['layout']}, {shape}"


def slowest(entries: list[dict]) -> list[str]:
    """The case with the smallest ratio against eager and against torch.compile, and how many lie below 1x."""
    entries = [entry for entry in entries if group_of(entry["group"]).used]
    lines = []
    for over, name in (("eager", "eager PyTorch"), ("compile", COMPILE)):
        found = [(speed, entry) for entry in entries if (speed := record.metric(entry, "speed", over)) is not None]
        if found:
            speed, entry = min(found, key=lambda item: item[0])
            below = f"{sum(speed < 1 for speed, _ in found)} of {len(found)} cases"
            lines.append(f"- Against {name}: **{times(speed)}**, {case_name(entry)}. Below 1x: {below}.")
    return lines


def featured(records: list[dict], row: Featured) -> list[dict]:
    return [
        entry
        for one in records
        for entry in one["entries"]
        if entry["group"] in row.groups
        and (entry["direction"], entry["dtype"], entry["layout"]) == ("forward_backward", "float32", "contiguous")
        and row.shape in (None, tuple(entry["shape"]))
    ]


def remarks_of(entries: list[dict]) -> list[Remark]:
    """The remarks of the entries' groups; that on the state form only where a shape is long enough for it."""
    keys = dict.fromkeys(key for entry in entries for key in group_of(entry["group"]).remarks)
    long = any(len(entry["shape"]) == 4 and entry["shape"][2] >= STATE_TOKENS for entry in entries)
    return [REMARKS[key] for key in keys if key != "state" or long]


def readme_table(records: list[dict]) -> str:
    if not records:
        return "Nothing measured yet."
    records = next(iter(by_machine(records).values()))
    notes, rows = Footnotes(), []
    for row in FEATURED:
        entries = featured(records, row) if row.in_readme else []
        if entries:
            group = group_of(row.groups[0])
            cells = [
                f"[{row.label or group.label}](docs/{group.page}.md){notes.mark(remarks_of(entries))}",
                group.compared_with,
                span(speeds(entries, "eager")),
                span(speeds(entries, "compile")),
                kept(entries),
            ]
            rows.append(f"| {' | '.join(cells)} |")
    parts = ["\n".join([README_HEADER, *rows])] if rows else []
    if notes.remarks:
        parts.append(notes.lines())
    parts.append(
        f"{facts(records)}; forward + backward, float32, contiguous, cold caches. Geometric mean over the measured "
        "shapes, in brackets the slowest of them; below 1x is slower. The slowest of all measured cases (every op, "
        "type, layout and pass):"
    )
    parts.append("\n".join(slowest([entry for one in records for entry in one["entries"]])))
    return "\n\n".join([*parts, *forced(records)])


def summary(entries: list[dict]) -> str:
    """One row for each op, pass, type and layout."""
    rows, notes = {}, Footnotes()
    for entry in entries:
        rows.setdefault((entry["group"], entry["direction"], entry["dtype"], entry["layout"]), []).append(entry)
    lines = []
    for (name, direction, dtype, layout), same in rows.items():
        group = group_of(name)
        remarks = remarks_of(same)
        if slow_half(same, entries):
            remarks.append(SLOW_HALF_REMARK)
        label = f"[{group.label}]({group.page}.md)" if group.page else group.label
        cells = [
            label + notes.mark(remarks),
            DIRECTIONS[direction],
            dtype if layout == "contiguous" else f"{dtype}, {layout}",
            span(speeds(same, "eager")),
            span(speeds(same, "compile")),
            span([found and found[1] for found in map(alternative, same)]),
            span(speeds(same, "floor"), percent),
            span(speeds(same, "eager", caches="warm")),
            span(speeds(same, "eager", allocator="default")),
            kept(same),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n\n".join(filter(None, ["\n".join([SUMMARY_HEADER, *lines]), notes.lines()]))


def case_row(entry: dict) -> str:
    cold = entry["kept"]["cold"]["time_us"]
    found, copy = alternative(entry), record.metric(entry, "speed", "floor")
    share = "-" if copy is None else percent(copy)
    cells = [
        f"{entry['group']}, {DIRECTIONS[entry['direction']]}, {entry['dtype']}, "
        + ("" if entry["layout"] == "contiguous" else f"{entry['layout']}, ")
        + "x".join(map(str, entry["shape"])),
        *(microseconds(cold[name]["median"]) if name in cold else "-" for name in ("camox", "eager", "compile")),
        f"{microseconds(cold[found[0]]['median'])} ({found[0]})" if found else "-",
        microseconds(cold["floor"]["median"]) if "floor" in cold else "-",
        f"**{share}**" if copy is not None and copy < FAR_FROM_COPY else share,
    ]
    return f"| {' | '.join(cells)} |"


def left_out(records: list[dict]) -> list[str]:
    """What was not measured and why, the same reason once."""
    reasons = {}
    for one in records:
        for item in one["refused"]:
            reasons.setdefault(item["reason"], []).append(item["key"])
        for entry in one["entries"]:
            for name, reason in entry["refused"].items():
                reasons.setdefault(f"{name}: {reason}", []).append(entry["key"])
    return [f"- {' '.join(reason.split())} ({', '.join(keys)})" for reason, keys in reasons.items()]


def allocator_effect(entries: list[dict]) -> str:
    """What keeping freed memory does to eager PyTorch alone."""
    ratios = []
    for entry in entries:
        if entry["kept"] and entry["default"]:
            pair = [entry[name]["cold"]["time_us"].get("eager") for name in ("default", "kept")]
            ratios += [pair[0]["median"] / pair[1]["median"]] if all(pair) else []
    if not ratios:
        return ""
    return (
        f"Keeping freed memory makes eager PyTorch itself {times(record.geomean(ratios))} as fast (geometric mean over "
        f"{len(ratios)} cases, from {times(min(ratios))} to {times(max(ratios))})."
    )


def machine_pages(records: list[dict]) -> list[str]:
    """The sections of one machine."""
    entries = [entry for one in records for entry in one["entries"]]
    caches = records[0]["caches"]
    parts = [
        f"## {records[0]['machine']['name']}",
        f"{facts(records)}. Last-level cache: {caches['last_level'] >> 20} MiB; written before each timed call: "
        f"{caches['written_between_calls'] >> 20} MiB.",
        *forced(records),
        allocator_effect(entries),
        "The slowest cases:",
        "\n".join(slowest(entries)),
        summary(entries),
        "### Every case",
        f"Median times, cold. In bold: less than {percent(FAR_FROM_COPY)} of the speed of a copy.",
    ]
    for one in records:
        rows = [case_row(entry) for entry in one["entries"] if entry["kept"]]
        if rows:
            title = f"<details><summary>{one['op']}: {len(rows)} cases</summary>"
            parts.append(f"{title}\n\n" + "\n".join([CASES_HEADER, *rows]) + "\n\n</details>")
    if reasons := left_out(records):
        parts += ["### Left out", "\n".join(reasons)]
    origins = [
        f"| {r['op']} | {r['date'][:10]} | {r['commit'][:12]}{' and changes' if r['dirty'] else ''} | {r['torch']} |"
        for r in records
    ]
    parts += ["### Records", "\n".join(["| record | date | commit | PyTorch |", "|---|---|---|---|", *origins])]
    return list(filter(None, parts))


def benchmarks_page(records: list[dict]) -> str:
    compared = [
        f"| {group.label} | `{name}` | {group.compared_with} |" for name, group in GROUPS.items() if group.compared_with
    ]
    table = "\n".join(["| op | name of its cases | eager side |", "|---|---|---|", *compared])
    parts = [GENERATED, METHOD.rstrip(), "What each op is compared with:", table]
    if not records:
        parts += ["## Results", "Nothing measured yet."]
    for same in by_machine(records).values():
        parts += machine_pages(same)
    return "\n\n".join(parts) + "\n"


def chart(records: list[dict], theme: str) -> str:
    records = next(iter(by_machine(records).values()), [])
    found = []
    for row in FEATURED:
        entries = featured(records, row)
        bars = []
        for over in ("eager", "compile"):
            values = [value for value in speeds(entries, over) if value is not None]
            bars.append(speed_chart.Bar(record.geomean(values), min(values)) if values else speed_chart.Bar(None, None))
        if bars[0].mean is not None:
            found.append((row, tuple(bars), remarks_of(entries)))
    found.sort(key=lambda item: -item[1][0].mean)
    notes, rows = Footnotes(), []
    for row, bars, remarks in found:
        label = (row.label or group_of(row.groups[0]).label).replace("`", "")
        rows.append(speed_chart.Row(f"{label}{notes.mark(remarks)}", bars))
    subtitle = f"{facts(records)}; float32, cold caches, logarithmic scale" if records else "nothing measured yet"
    title = "Speed-up of forward + backward: their time / ours"
    return speed_chart.draw(rows, ("eager PyTorch", "torch.compile"), title, subtitle, notes.short(), theme)


def rewritten(readme: str, records: list[dict]) -> str:
    """README with the text between the markers replaced; ValueError without exactly one pair of markers."""
    if readme.count(START) != 1 or readme.count(END) != 1 or readme.index(START) > readme.index(END):
        raise ValueError(f"README.md needs one {START} and, after it, one {END}")
    before, rest = readme.split(START)
    return f"{before}{START}\n{readme_table(records)}\n{END}{rest.split(END)[1]}"


def pages(root: Path, records: list[dict]) -> dict[Path, str]:
    """Every generated file and its text."""
    return {
        root / "README.md": rewritten((root / "README.md").read_text(encoding="utf-8"), records),
        root / "docs" / "benchmarks.md": benchmarks_page(records),
        **{root / "docs" / "img" / f"speed-{theme}.svg": chart(records, theme) for theme in speed_chart.THEMES},
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Draws the pages that show measured speeds from the records.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 when a file would change")
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree that holds README.md and docs")
    parser.add_argument("--results", type=Path, default=record.RESULTS, help="folder of the records")
    options = parser.parse_args(arguments)
    try:
        texts = pages(options.root, record.load_all(options.results))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    changed = False
    for path, new in texts.items():
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        if old == new:
            continue
        changed = True
        if options.check:
            name = path.relative_to(options.root).as_posix()
            print(
                "\n".join(
                    difflib.unified_diff(old.splitlines(), new.splitlines(), name, "from the records", lineterm="")
                )
            )
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(new, encoding="utf-8")
    return 1 if changed and options.check else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
