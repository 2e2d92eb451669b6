"""The benchmarks of scripts/gpu_check.py: what benchmarks/cuda.py times, and beside it the replay of a graph and calls
as a program makes them; case by case until the time is up, added to what an earlier run has."""

import time
from collections.abc import Callable, Iterator
from copy import deepcopy

from benchmarks import common, cuda, record
from scripts.gpu_record import EMPTY, GROUPS, LATER


def call_us(device, step: Callable, calls: int = 20) -> float:
    """Microseconds of a call as a program sees it: many in a row, launches and all."""
    begin = time.perf_counter()
    for _ in range(calls):
        step()
    device.synchronize()
    return float(f"{1e6 * (time.perf_counter() - begin) / calls:.4g}")


def graph_samples(device, timed: cuda.TimedCase, direction: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of replays of graphs that hold one call, an empty kernel's and the copy's among them."""
    times, graphs, kept = timed.directions[direction], {}, []
    replays = {"empty": device.empty_kernel, "copy": times.steps[cuda.FLOOR]}
    captured = {} if direction == "step" else times.makers  # an optimizer's step is not made for graphs
    for name, make in {**captured, **{n: lambda step=s: step for n, s in replays.items()}}.items():
        try:
            graphs[name], outputs = device.capture(make)
            kept.append(outputs)
        except Exception as error:
            timed.refused[f"graph {direction} {name}"] = common.reason(error)
    samples = cuda.measure(device, {name: graph.replay for name, graph in graphs.items()}, rounds) if graphs else {}
    for graph in graphs.values():
        graph.reset()
    return samples


def microseconds(samples: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    named = {"copy" if name == cuda.FLOOR else name: taken for name, taken in samples.items()}
    return {name: record.spread([1e6 * t for t in taken]) for name, taken in named.items()}


def entry_of(device, choice: cuda.Choice, plan: cuda.Plan, deadline: float) -> dict:
    """An entry of the record; Skipped where camox is missing or wrong."""
    directions = {}

    def note(timed: cuda.TimedCase, direction: str) -> None:
        times = timed.directions[direction]
        ratios = common.summarise(times.cold, dict.fromkeys(times.cold, 1), 0.0)["speed"]
        directions[direction] = {
            "floor_bytes": times.floor_bytes,
            "time_us": microseconds(times.cold),
            "warm_us": microseconds(times.warm),
            "call_us": {name: call_us(device, step) for name, step in times.steps.items() if name != cuda.FLOOR},
            "graph_us": microseconds(graph_samples(device, timed, direction, plan.rounds)),
            "share_of_copy": ratios.pop(cuda.FLOOR),
            "speed": ratios,
            "rounds": plan.rounds,
        }

    timed = cuda.time_case(device, choice, plan, deadline, each=note)
    return {
        "key": choice.key,
        "group": choice.group,
        "shape": list(choice.shape),
        "size": choice.size,
        "dtype": str(choice.dtype).removeprefix("torch."),
        "layout": choice.layout,
        "directions": directions,
        "check": timed.check,
        "refused": timed.refused,
    }


def measured_in(choice: cuda.Choice, entries: dict) -> bool:
    """Whether these entries, by key, have the choice already."""
    if choice.key not in entries or not choice.compiled:
        return choice.key in entries
    entry = entries[choice.key]
    names = [*entry["refused"], *(name for d in entry["directions"].values() for name in d["speed"])]
    return any("compile" in name for name in names)


def run(device, plan: cuda.Plan, deadline: float, known=None, ops=None, missing=False, begin=None) -> Iterator[dict]:
    """The bench section of the record after every case, until `deadline` (time.monotonic).

    known: the section so far, which this adds to; ops: only these; missing: only what the section lacks; begin: is
    called with the key of a case before it is measured."""
    found = known or deepcopy(EMPTY["bench"])
    entries = {entry["key"]: entry for entry in found["entries"]}
    reasons = found["not_measured"] = {k: why for k, why in found["not_measured"].items() if k not in GROUPS}
    wanted, failed = cuda.choices(plan, cuda.case_makers(device), GROUPS)
    reasons |= failed
    found["l2_bytes"] = device.l2_bytes
    found["copy_gb_per_s"] = cuda.copy_bandwidth(device, plan.copy_bytes, plan.rounds)
    absent = set()
    for choice in wanted:
        label = choice.key + " torch.compile" * choice.compiled
        chosen = not ops or choice.group in ops or GROUPS.get(choice.group) in ops
        if measured_in(choice, entries) and (missing or not chosen):
            continue
        if missing and reasons.get(label, LATER[0]) not in LATER:  # tried before, and it could not be measured
            continue
        if choice.group in absent or (choice.compiled and choice.key not in entries):
            continue
        if not chosen or time.monotonic() > deadline:
            reasons.setdefault(label, LATER[0] if chosen else LATER[1])
            continue
        if begin is not None:
            begin(label)
        reasons.pop(label, None)
        try:
            entries[choice.key] = entry_of(device, choice, plan, deadline)
        except common.Skipped as error:
            reasons[label] = common.reason(error)
            if "not in this build" in reasons[label]:
                reasons[choice.group] = reasons.pop(label)
                absent.add(choice.group)
        except Exception as error:  # one case that fails must not cost the others
            reasons[label] = common.reason(error)
            device.check_alive(reasons[label])
        found["entries"] = list(entries.values())
        device.release()
        yield found
    for group in set(GROUPS) - {entry["group"] for entry in found["entries"]}:
        if not any(key.split("/")[0] == group for key in reasons):
            reasons[group] = "no benchmark of it gave a measurement"
    yield found
