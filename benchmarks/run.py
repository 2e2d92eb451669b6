"""Runs the benchmark of an op: ``python benchmarks/run.py --op edge [--quick]``.

Measures every case of ``benchmarks/bench_<op>.py``, with cold and with warm caches, in a child process whose allocator
keeps freed memory, and the chosen ones again, cold, in a child with the allocator's defaults; prints a table and writes
``benchmarks/results/<machine>-<op>.json``.
A run that is not the whole benchmark (--quick, --dtype, --case) writes only where --json says. With --base REF another
commit is built and compared with this tree instead (benchmarks/base.py); no record is written. --device cuda measures
the kernels of a GPU (benchmarks/cuda.py); the record is named by the GPU, ``<gpu>-<op>.json``.
"""

import argparse
import datetime
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # behind site-packages: an installed camox_ops is measured before an unbuilt tree

import torch  # noqa: E402

from benchmarks import base, common, cuda, machine, record  # noqa: E402
from benchmarks.device import open_device  # noqa: E402

NOT_MEASURED = 3
NOISY_IN_A_ROW = 3


def all_ops() -> list[str]:
    return sorted(path.stem.removeprefix("bench_") for path in Path(__file__).parent.glob("bench_*.py"))


def chosen_cases(options) -> list[common.Case]:
    cases = importlib.import_module(f"benchmarks.bench_{options.op}").cases()
    keys = [case.key for case in cases]
    if len(set(keys)) != len(keys):
        raise ValueError(f"bench_{options.op}: two cases share a key")
    return [
        case
        for case in cases
        if (not options.quick or case.quick)
        and (options.dtype is None or case.dtype_name == options.dtype)
        and (options.case is None or options.case in case.key)
    ]


def child(options) -> int:
    """Measures with one allocator and writes what it found to ``options.child_out``."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    kept = options.child == "kept"
    set_by = machine.keep_freed_memory() if kept else "the system's defaults"
    if set_by is None:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **machine.KEEP_FREED_MEMORY})
    faults = machine.reuse_page_faults()
    if kept and faults > 8:
        print(f"the allocator does not keep freed memory: {faults} page faults in 40 MiB just freed", file=sys.stderr)
        return NOT_MEASURED
    effort = common.QUICK if options.quick else common.FULL
    evict = machine.Eviction()
    found = {"allocator": {"set_by": set_by, "reuse_page_faults": faults}, "entries": [], "refused": []}
    found["caches"] = evict.facts()
    found["version"], found["isa"] = machine.package_facts()
    noisy = 0
    for case in chosen_cases(options):
        if not kept and not case.default_allocator:
            continue
        start = time.monotonic()
        try:
            # The allocator's defaults are one column, cold and beside eager alone.
            entry, measured = common.run_case(
                case,
                effort,
                evict,
                with_compile=options.compile and kept,
                with_memory=kept,
                with_warm=kept,
                force=options.force,
            )
            noisy = 0
            found["entries"].append({**entry, "kept": None, "default": None, options.child: measured})
            print(common.row(found["entries"][-1], options.child, time.monotonic() - start), flush=True)
        except Exception as error:  # one case that fails must not cost the others; its reason is in the record
            reason = common.reason(error)
            found["refused"].append({"key": case.key, "reason": reason})
            print(f"{case.key:62} refused: {reason}", flush=True)
            noisy = noisy + 1 if isinstance(error, common.NoisyMachine) else 0
            if noisy == NOISY_IN_A_ROW:
                print(
                    f"stopped: {noisy} cases in a row ran on a noisy machine; try again on a quiet one", file=sys.stderr
                )
                return NOT_MEASURED
    Path(options.child_out).write_text(json.dumps(found))
    return 0


def run_child(allocator: str, arguments: list[str]) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, __file__, *arguments, "--child", allocator, "--child-out", str(out)]
        clean = {name: value for name, value in os.environ.items() if name not in machine.KEEP_FREED_MEMORY}
        clean["KINETO_LOG_LEVEL"] = "99"  # the profiler that weighs memory would announce itself at every start
        code = subprocess.run(command, env=clean).returncode
        if code or not out.exists():
            raise SystemExit(code or NOT_MEASURED)
        return json.loads(out.read_text())


def merge(kept: dict, default: dict | None) -> tuple[list[dict], list[dict]]:
    """Entries with both allocators' measurements; a case refused by both children is reported once."""
    entries = {entry["key"]: entry for entry in kept["entries"]}
    refused = {item["key"]: item for item in kept["refused"]}
    for entry in default["entries"] if default else []:
        if entry["key"] in entries:
            entries[entry["key"]]["default"] = entry["default"]
    for item in default["refused"] if default else []:
        refused.setdefault(item["key"], {**item, "reason": f"default allocator: {item['reason']}"})
    return list(entries.values()), list(refused.values())


def measure(op: str, options, arguments: list[str]) -> dict:
    """The record of one op."""
    host = machine.facts()
    before, others = list(os.getloadavg()), machine.OtherCpu()
    time.sleep(1.0)
    busy = others.cores()
    reasons = []
    if busy > record.OTHER_CPU_LIMIT:
        reasons.append(f"other processes use {busy:.2f} cores (limit {record.OTHER_CPU_LIMIT})")
    if options.threads > host["cores"]:
        reasons.append(f"{options.threads} threads on {host['cores']} cores")
    if host["governor"] not in ("performance", "schedutil", "ondemand", "unknown"):
        reasons.append(f"CPU governor {host['governor']!r}")
    for reason in reasons:
        print(f"{'forced' if options.force else 'refused'}: {reason}", file=sys.stderr)
    if reasons and not options.force:
        raise SystemExit(NOT_MEASURED)

    arguments = [*arguments, "--op", op]
    print(f"{op}: allocator keeps freed memory, {options.threads} threads, torch {torch.__version__}", flush=True)
    kept = run_child("kept", arguments)
    default = None
    if not options.quick and kept["entries"]:
        print(f"{op}: allocator's defaults", flush=True)
        default = run_child("default", arguments)
    entries, refused = merge(kept, default)
    found = [record.measurement(entry, name, caches) for entry in entries for name, caches in record.WAYS]
    measured = list(filter(None, found))
    noisy = sum(record.noisy(found) for found in measured)
    if noisy:
        reasons.append(f"other processes used the machine during {noisy} of {len(measured)} measurements")
    commit, dirty = machine.git_state(ROOT)
    return {
        "schema_version": record.SCHEMA_VERSION,
        "op": op,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit,
        "dirty": dirty,
        "version": kept["version"],
        "torch": torch.__version__,
        "python": machine.python_version(),
        "machine": host,
        "isa": kept["isa"],
        "threads": options.threads,
        "quick": options.quick,
        "forced": reasons,
        "load": {"before": before, "after": list(os.getloadavg()), "other_cpu_before": round(busy, 3)},
        "allocator": {"kept": kept["allocator"], **({"default": default["allocator"]} if default else {})},
        "caches": kept["caches"],
        "entries": entries,
        "refused": refused,
    }


def parser() -> argparse.ArgumentParser:
    new = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    new.add_argument("--op", default="all", help=f"all, or one of: {', '.join(all_ops())}")
    new.add_argument("--quick", action="store_true", help="few cases, few rounds, one allocator")
    new.add_argument("--dtype", help="only this dtype, such as bfloat16")
    new.add_argument("--case", help="only cases whose key contains this")
    devices = ("cpu", "cuda", "rehearsal")
    new.add_argument("--device", choices=devices, default="cpu", help="rehearsal: what cuda does, tried on the CPU")
    new.add_argument("--threads", type=int, default=2)
    new.add_argument("--no-compile", dest="compile", action="store_false", help="leave torch.compile out")
    new.add_argument("--force", action="store_true", help="measure on a busy machine; the record says so")
    new.add_argument("--base", metavar="REF", help="compare with this commit, call by call")
    new.add_argument("--json", type=Path, help="where to write the record; also writes a partial one")
    new.add_argument("--child", choices=("kept", "default"), help=argparse.SUPPRESS)
    new.add_argument("--child-out", help=argparse.SUPPRESS)
    return new


def main(arguments: list[str]) -> int:
    options = parser().parse_args(arguments)
    if options.child:
        return child(options)
    ops = all_ops() if options.op == "all" else [options.op]
    if unknown := set(ops) - set(all_ops()):
        raise SystemExit(f"--op: {unknown.pop()!r} is not one of: {', '.join(all_ops())}")
    if options.json and len(ops) > 1:
        raise SystemExit("--json: one file holds one op, give --op as well")
    if options.base and options.device != "cpu":
        raise SystemExit("--base: compares on the CPU alone")
    if options.base:
        fine = True
        for op in ops:
            options.op = op
            fine &= base.compare(options.base, op, chosen_cases(options), options.threads)
        return 0 if fine else 1
    passed_on = ["--threads", str(options.threads)]
    passed_on += [f"--{name}" for name in ("quick", "force") if getattr(options, name)]
    passed_on += [] if options.compile else ["--no-compile"]
    passed_on += [
        x for name in ("dtype", "case") if getattr(options, name) for x in (f"--{name}", getattr(options, name))
    ]
    whole = options.compile and not (options.quick or options.dtype or options.case)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(f"--device cuda: torch {torch.__version__} finds no CUDA device")
    device = None if options.device == "cpu" else open_device(options.device)
    whole &= options.device != "rehearsal"
    missing = 0
    for op in ops:
        found = measure(op, options, passed_on) if device is None else cuda.run(op, device, options)
        path = options.json or (record.RESULTS / f"{found['machine']['name']}-{op}.json" if whole else None)
        if not found["entries"]:
            missing += 1
            print(f"{op}: nothing measured, no record written", file=sys.stderr)
        elif path:
            record.write(found, path)
            print(f"wrote {path}")
    return NOT_MEASURED if missing == len(ops) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
