"""``benchmarks/run.py --op edge --base REF``: this tree beside another commit, which is built for it under build/base.

Each build has a process of its own, with the cases of this tree's benchmarks; the two take turns call by call, cold
(other memory written before each call), then warm. Printed are base time / this time: above 1 this tree is faster. Exit
status 1 where the geometric mean over the shapes of a group is more than 5% slower cold, one case more than 10%, or
where more is saved for backward.
"""

import argparse
import importlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

import torch  # noqa: E402

from benchmarks import common, machine  # noqa: E402

COLD_ROUNDS, WARM_ROUNDS = 41, 9
SLOWER_GROUP, SLOWER_CASE = 0.95, 0.90


def build(ref: str) -> Path:
    """The folder with a built tree of the commit, without its CUDA part; built once."""

    def git(*arguments, **keywords):
        return subprocess.run(["git", "-C", str(ROOT), *arguments], check=True, capture_output=True, **keywords).stdout

    commit = git("rev-parse", "--verify", f"{ref}^{{commit}}", text=True).strip()
    folder = ROOT / "build" / "base" / commit[:12]
    built = folder / "built"
    if not built.exists():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["tar", "-x", "-C", str(folder)], input=git("archive", commit), check=True)
        print(f"building {ref} ({commit[:12]})", flush=True)
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        subprocess.run(command, cwd=folder, env={**os.environ, "CAMOX_NVCC": "none"}, check=True)
        built.touch()
    return folder


class Build:
    """A process that runs this tree's cases on the camox_ops of a folder."""

    def __init__(self, folder: Path, op: str, threads: int):
        command = [sys.executable, __file__, "--worker", str(folder), "--op", op, "--threads", str(threads)]
        environment = {**os.environ, **machine.KEEP_FREED_MEMORY, "KINETO_LOG_LEVEL": "99"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(self, **what):
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"the build's process ended with status {self._process.wait()}")
        return json.loads(answer)

    def close(self):
        self._process.stdin.close()
        self._process.wait()


def worker(folder: str, op: str, threads: int) -> int:
    """Answers the questions of a Build, one a line: the case to prepare, or how to call it."""
    answers = os.fdopen(os.dup(1), "w")  # what cases print goes elsewhere
    os.dup2(2, 1)
    sys.path.insert(0, folder)
    import camox_ops

    sys.path.remove(folder)  # what is imported from here on, the cases too, is of this tree
    if not Path(camox_ops.__file__).is_relative_to(folder):
        raise SystemExit(f"{camox_ops.__file__} is not of {folder}")
    torch.set_num_threads(threads)
    evict = machine.Eviction()
    cases = {case.key: case for case in importlib.import_module(f"benchmarks.bench_{op}").cases()}
    candidate = None
    for line in sys.stdin:
        question = json.loads(line)
        if "prepare" in question:
            torch.manual_seed(0)
            case = cases[question["prepare"]]
            torch.set_grad_enabled(case.direction != "forward")
            function, inputs = case.candidates()[common.SUBJECT], case.make_inputs()
            upstream = common.upstream_like(case, function, inputs) if case.direction == "forward_backward" else []
            candidate = common.Candidate(case, function, inputs, upstream)
            for _ in range(3):
                candidate.step()
            answer = common.memory_of(candidate)["saved"] if case.direction != "forward" else 0
        else:
            if question["cold"]:
                evict()
            else:
                candidate.step()
            answer = common.seconds_of(candidate.step, question["calls"]) / question["calls"]
        print(json.dumps(answer), file=answers, flush=True)
    return 0


def ratios(base: Build, this: Build, rounds: int, **call) -> list[float]:
    """base time / this time, round by round; who comes first alternates."""
    found = []
    for turn in range(rounds):
        times = {}
        for build in (base, this) if turn % 2 else (this, base):
            times[build] = build.ask(**call)
        found.append(times[base] / times[this])
    return found


def compare(ref: str, op: str, cases: list[common.Case], threads: int) -> bool:
    """Prints the comparison; whether this tree is no slower and saves no more."""
    base, this = Build(build(ref), op, threads), Build(ROOT, op, threads)
    groups, fine = {}, True
    for case in cases:
        saved = [build.ask(prepare=case.key) or 0 for build in (base, this)]
        start = time.monotonic()
        cold = statistics.median(ratios(base, this, case.rounds or COLD_ROUNDS, cold=True, calls=1))
        taken = time.monotonic() - start
        warm = statistics.median(ratios(base, this, WARM_ROUNDS, cold=False, calls=10)) if case.rounds is None else None
        groups.setdefault("/".join(case.key.split("/")[:-1]), []).append(cold)
        verdict = "" if cold >= SLOWER_CASE else "  slower"
        if saved[1] > saved[0]:
            verdict += f"  saves {saved[1]} bytes, base {saved[0]}"
        fine &= not verdict
        shown = f"{warm:5.2f}" if warm else "    -"
        print(f"{case.key:66} cold {cold:5.2f}  warm {shown}{verdict}  ({taken:.0f} s)", flush=True)
    for name, found in groups.items():
        mean = math.exp(statistics.fmean(map(math.log, found)))
        fine &= mean >= SLOWER_GROUP
        verdict = "" if mean >= SLOWER_GROUP else "  slower"
        print(f"{name:66} cold {mean:5.2f}  geometric mean of {len(found)}{verdict}")
    base.close(), this.close()
    return fine


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="The process of one build; benchmarks/run.py --base starts it.")
    parser.add_argument("--worker", required=True)
    parser.add_argument("--op", required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args(arguments)
    return worker(options.worker, options.op, options.threads)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
