"""Holds patch against models of public repositories: python benchmarks/patch_repos.py DIR [--only NAME ...]

DIR holds clones, each in a folder with its repository's name, and what they import in DIR/site-packages
(pip install --target DIR/site-packages einops timm transformers). For each entry of patch_models.py, in a process of
its own: the same weights and batch, 20 training steps with the original in float64, the original and the patched
model; the most memory that a step of each holds; then steps in turn, timed: the original, the patched model, and the
patched model with PyTorch's kernels replaced by tune_cpu. Prints a table and writes
benchmarks/results/patch_repos/MACHINE.json; `--docs` writes the table of docs/patch.md from there.
"""

import argparse
import contextlib
import copy
import datetime
import json
import re
import statistics
import subprocess
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

RESULTS = ROOT / "benchmarks" / "results" / "patch_repos"
PAGE = ROOT / "docs" / "patch.md"
BEGIN, END = "<!-- patch_repos -->\n", "<!-- /patch_repos -->\n"
RATE = 1e-3
MARK = "RESULT "


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", metavar="DIR", type=Path, nargs="?", help="clones, and site-packages")
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="the entry of this name, or all whose names contain it"
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="of timed steps an entry; 0: nothing is timed")
    parser.add_argument("--steps", type=int, default=20, help="training steps to compare")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="the JSON; entries that it has already are kept unless run again")
    parser.add_argument("--docs", action="store_true", help="writes the table of docs/patch.md from the JSON and ends")
    parser.add_argument("--one", metavar="NAME", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.docs:
        return write_page(asked.out or newest())
    if asked.folder is None or not asked.folder.is_dir():
        parser.error(
            "DIR must be a folder with clones" if asked.folder is None else f"there is no folder {asked.folder}"
        )
    from benchmarks.patch_models import ENTRIES

    if asked.one:
        (entry,) = (entry for entry in ENTRIES if entry.name == asked.one)
        print(MARK + json.dumps(measure(entry, asked.folder.resolve(), asked.seconds, asked.threads, asked.steps)))
        return 0
    exact = [e for e in ENTRIES if asked.only and e.name in asked.only]
    chosen = exact or [e for e in ENTRIES if not asked.only or any(text in e.name for text in asked.only)]
    if not chosen:
        parser.error(f"no entry has one of {asked.only} in its name")
    from benchmarks import machine

    here = machine.facts()
    out = asked.out or RESULTS / f"{here['name']}.json"
    record = {"entries": []} if not out.exists() else json.loads(out.read_text())
    rows = {row["name"]: row for row in record["entries"]}
    for entry in chosen:
        rows[entry.name] = in_a_process(entry, asked)
        print(line(rows[entry.name]), flush=True)
        order = [e.name for e in ENTRIES if e.name in rows]
        save(out, here, asked.threads, [rows[name] for name in order])
    print("\n" + table([rows[entry.name] for entry in chosen]))
    for entry in chosen:
        for shortfall in shortfalls(rows[entry.name]):
            print(f"{entry.name}: {shortfall}")
    return 1 if any(wrong(rows[entry.name]) for entry in chosen) else 0


def in_a_process(entry, asked) -> dict:
    """What `--one` prints; imports and stand-ins of one repository must not reach the next."""
    from benchmarks import machine

    command = [sys.executable, __file__, str(asked.folder), "--one", entry.name]
    command += ["--seconds", str(asked.seconds), "--threads", str(asked.threads), "--steps", str(asked.steps)]
    commit, dirty = machine.git_state(ROOT)
    facts = {
        "name": entry.name,
        "repository": entry.repository,
        "commit": entry.commit,
        "note": entry.note,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "camox_commit": commit,
        "camox_dirty": dirty,
    }
    if not (asked.folder / entry.folder).is_dir() and not entry.needs:
        return {**facts, "error": f"no clone in {entry.folder}"}
    result = subprocess.run(command, capture_output=True, text=True)
    found = [text for text in result.stdout.splitlines() if text.startswith(MARK)]
    if result.returncode or not found:
        last = (result.stderr.strip().splitlines() or [f"exit status {result.returncode}"])[-1]
        print(result.stderr, file=sys.stderr)
        return {**facts, "error": last}
    return {**facts, **json.loads(found[0].removeprefix(MARK))}


def measure(entry, folder: Path, seconds: float, threads: int, steps: int) -> dict:
    """Everything about one entry, in a process that does nothing else."""
    import torch

    import camox_ops as cx
    from benchmarks import patch_models

    if (folder / patch_models.SITE).is_dir():
        sys.path.append(str(folder / patch_models.SITE))
    patch_models.stub(entry.stubs)
    torch.set_num_threads(threads)
    kept = cx.train.tune_cpu_allocator()
    torch.manual_seed(0)
    trial = entry.make(folder / entry.folder)
    original = trial.model.train()
    patched = copy.deepcopy(original)
    started = time.perf_counter()
    report = cx.patch(patched)
    patch_seconds = time.perf_counter() - started
    state = copy.deepcopy(original.state_dict())
    trial.run(patched, trial.batch).backward()  # the first input, which decides
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        trial.run(patched, trial.batch).backward()
    patched.load_state_dict(state)
    result = {
        "parameters": sum(parameter.numel() for parameter in original.parameters()),
        "patch_seconds": patch_seconds,
        "allocator": str(kept),
        "patched": dict(sorted(Counter(item.recogniser for item in report.patched).items())),
        "left_alone": dict(Counter(f"{item.recogniser}: {reason(item.reason)}" for item in report.skipped)),
        "modules_left_alone": [[item.name, item.of, item.recogniser, item.reason] for item in report.skipped],
        "calls": calls_of_ours(profile),
        "numbers": None,
        "peak": None,
        "step": None,
        "asked": entry.asked,
    }
    plain, fast = without_dropout(copy.deepcopy(original)), without_dropout(copy.deepcopy(patched))
    result["numbers"] = compare(plain, fast, trial, steps)
    result["peak"] = {"torch": peak(original, trial), "camox": peak(patched, trial)}
    if seconds:
        result["step"] = timed(original, patched, trial, seconds)
    result["given_back"] = [item.name for item in report.skipped if item.first_error is not None]
    return result


def reason(text: str) -> str:
    """Without the numbers, so that equal reasons count together."""
    return re.sub(r"\d[\d.]*e[+-]\d+", "...", text)


def calls_of_ours(profile) -> dict:
    """Operators of camox_ops that a step called, and how often."""
    return {e.key: e.count for e in sorted(profile.key_averages(), key=lambda e: e.key) if e.key.startswith("camox")}


def without_dropout(model):
    """All dropout and drop-path probabilities of the model 0: masks differ between PyTorch and camox_ops."""
    import torch

    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name in ("dropout", "drop_prob", "attn_drop", "dropout_p", "dropout_prob", "attention_dropout"):
            if isinstance(module.__dict__.get(name), float):
                setattr(module, name, 0.0)
    return model


def compare(plain, fast, trial, steps: int) -> dict:
    """Gradients and loss of the first step, losses of all steps, each beside the original in float64."""
    import torch

    state = copy.deepcopy(plain.state_dict())
    exact = copy.deepcopy(plain).double()
    for (name, buffer), of_exact in zip(plain.named_buffers(), exact.buffers(), strict=True):
        if name.endswith("freqs"):  # BDH asserts that it is float32
            of_exact.data = buffer.data.clone()
    found = {}
    for name, model in (("exact", exact), ("torch", plain), ("camox", fast)):
        batch = tuple(x.double() if name == "exact" and x.is_floating_point() else x for x in trial.batch)
        model.load_state_dict(state)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        losses, gradients = [], {}
        for step in range(steps):
            torch.manual_seed(step)
            optimizer.zero_grad()
            loss = trial.run(model, batch)
            loss.backward()
            if not step:
                gradients = {k: p.grad.double() for k, p in model.named_parameters() if p.grad is not None}
            optimizer.step()
            losses.append(loss.item())
        found[name] = losses, gradients
    (_, exact_gradients), (losses, gradients), (our_losses, ours) = (found[k] for k in ("exact", "torch", "camox"))
    return {
        "steps": steps,
        "without_gradient_alike": gradients.keys() == ours.keys() == exact_gradients.keys(),
        "gradient": {
            "torch": distance(gradients, exact_gradients),
            "camox": distance(ours, exact_gradients),
            "between": distance(ours, gradients),
        },
        "loss": {
            "first": losses[0],
            "last": losses[-1],
            "torch": distance_of_losses(losses, found["exact"][0]),
            "camox": distance_of_losses(our_losses, found["exact"][0]),
            "between": distance_of_losses(our_losses, losses),
        },
    }


def distance(gradients: dict, exact: dict) -> float:
    """The largest |g - g'| / |g'| of any parameter; |g'| at least 1e-4 of the largest: one that is zero but for
    rounding has no relative error."""
    norms = {name: value.norm().item() for name, value in exact.items()}
    least = 1e-4 * max(norms.values())
    return max(
        (gradients[n] - g).norm().item() / max(norms[n], least, 1e-300) for n, g in exact.items() if n in gradients
    )


def distance_of_losses(losses: list, exact: list) -> float:
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(losses, exact, strict=True))


def peak(model, trial) -> int:
    """The most bytes that a step holds beyond what it found, once there are gradients to be written over."""
    from benchmarks import common

    def step():
        model.zero_grad()
        trial.run(model, trial.batch).backward()

    step()
    return common.allocated_by(step)[0]


def timed(original, patched, trial, seconds: float) -> dict:
    """Steps in turn, dropout as configured -> medians in seconds, and of the ratios of neighbours: torch over camox,
    and over camox with tune_cpu."""
    import torch

    import camox_ops as cx
    from benchmarks import machine
    from camox_ops.train import tune

    replaced = [kernel.name for kernel in cx.train.tune_cpu(allocator=False).kernels if kernel.replaced]
    cx.train.restore_cpu()
    models = [(m, torch.optim.SGD(m.parameters(), lr=RATE)) for m in (original, patched)]
    names = ("torch", "camox", "tuned")
    rounds, others = [], machine.OtherCpu()
    deadline = time.perf_counter() + seconds
    while len(rounds) < 4 or (time.perf_counter() < deadline and len(rounds) < 200):
        times = {}
        for name in names if len(rounds) % 2 else reversed(names):
            model, optimizer = models[name != "torch"]
            with tune.replaced(*replaced) if name == "tuned" and replaced else contextlib.nullcontext():
                started = time.perf_counter()
                optimizer.zero_grad()
                trial.run(model, trial.batch).backward()
                optimizer.step()
                times[name] = time.perf_counter() - started
        rounds.append(times)
    rounds = rounds[1:]  # the first warms up
    found = {name: statistics.median(times[name] for times in rounds) for name in names}
    for name, other in (("ratio", "camox"), ("tuned_ratio", "tuned")):
        ratios = sorted(times["torch"] / times[other] for times in rounds)
        found |= {name: statistics.median(ratios)}
        found |= {f"{name}_q1": ratios[len(ratios) // 4], f"{name}_q3": ratios[(3 * len(ratios)) // 4]}
    return {**found, "pairs": len(rounds), "replaced": replaced, "other_cpu": round(others.cores(), 3)}


def wrong(row: dict) -> str:
    """Why an entry does not show that patch keeps the numbers; empty where it does. A distance from float64 may be
    three times PyTorch's own, or rounding of float32 where PyTorch's is smaller still."""
    if "error" in row:
        return row["error"]
    numbers = row["numbers"]
    if not numbers["without_gradient_alike"]:
        return "other parameters have a gradient"
    for what, least in (("gradient", 1e-5), ("loss", 1e-6)):
        if not numbers[what]["camox"] <= max(3 * numbers[what]["torch"], least):
            return f"{what}s differ by {numbers[what]['camox']:.1e}, PyTorch's by {numbers[what]['torch']:.1e}"
    return ""


def shortfalls(row: dict) -> list[str]:
    """What the entry does not reach: the speed that is asked for, the original's memory."""
    found, step, peaks = [], row.get("step"), row.get("peak")
    if step and row.get("asked") and step["tuned_ratio"] < row["asked"]:
        found.append(f"a step with tune_cpu {step['tuned_ratio']:.2f}x as fast, asked {row['asked']:.2f}x")
    if peaks and peaks["camox"] > peaks["torch"]:
        found.append(f"a step holds {peaks['camox'] / peaks['torch']:.2f} times the original's memory")
    return found


def save(out: Path, here: dict, threads: int, rows: list[dict]) -> None:
    import torch

    record = {"schema_version": 1, "machine": here, "torch": torch.__version__, "threads": threads, "entries": rows}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


def newest() -> Path:
    return max(RESULTS.glob("*.json"), key=lambda path: path.stat().st_mtime)


def line(row: dict) -> str:
    return " | ".join(cells(row))


HEAD = ("model", "repository @ commit", "patched", "left alone", "gradients", "losses", "peak", "step", "with tune_cpu")


def cells(row: dict) -> list[str]:
    """One row of the table."""
    where = f"{row['repository']} @ {row['commit'][:7]}"
    if "error" in row:
        return [row["name"], where, "", f"not run: {row['error']}", *[""] * (len(HEAD) - 4)]
    numbers, step, peaks = row["numbers"], row["step"] or {}, row.get("peak")
    patched = ", ".join(f"{count} {name}" for name, count in row["patched"].items()) or "none"
    left = "; ".join(f"{count} {text}" for text, count in row["left_alone"].items()) or "-"
    gradients, losses = (f"{numbers[k]['camox']:.0e} ({numbers[k]['torch']:.0e})" for k in ("gradient", "loss"))
    memory = f"{peaks['camox'] / peaks['torch']:.2f}" if peaks else "-"
    speeds = [f"{step[k]:.2f}x" if k in step else "-" for k in ("ratio", "tuned_ratio")]
    if row.get("asked"):
        speeds[1] += f" ({row['asked']:.2f}x)"
    return [row["name"], where, patched, left.replace("|", "\\|"), gradients, losses, memory, *speeds]


def table(rows: list[dict]) -> str:
    """In Markdown."""
    lines = [HEAD, ("---",) * len(HEAD), *(cells(row) for row in rows)]
    return "".join(f"| {' | '.join(row)} |\n" for row in lines)


def write_page(source: Path) -> int:
    """The table of docs/patch.md between its two marks, from a JSON."""
    record = json.loads(source.read_text())
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{PAGE.name} has no {BEGIN.strip()} and {END.strip()}")
    PAGE.write_text(before + begin + table(record["entries"]) + end + after)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Exception:
        traceback.print_exc()
        sys.exit(1)
