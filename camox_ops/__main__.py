"""The command line, python -m camox_ops."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from . import _cuda, _run, _selftest, _torch_private, build_info, isa, supported_isas, train
from ._patch.command import patch_report

USAGE = "python -m camox_ops [-h] info | check | bench | run ... | patch-report ..."
DESCRIPTION = """\
info          what runs on this machine
check         a self-test
bench         the table of speeds
run           an unedited script, tuned and patched (run --help)
patch-report  what camox_ops.patch would do to a model (patch-report --help)"""


def cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def info() -> int:
    facts = build_info()
    rows = {
        "camox_ops": facts["version"],
        "file": str(Path(__file__).parent),
        "built with": f"torch {facts['built_with_torch']}, compiler {facts['compiler']}",
        "runs on": f"torch {torch.__version__} (at least {facts['minimum_torch']}), Python {platform.python_version()}",
        "CPU": f"{cpu_name()}, {platform.machine()}",
        "kernels": f"{isa()} (supported: {', '.join(supported_isas())})",
        "threads": str(torch.get_num_threads()),
        "torch calls": _torch_private.state(),
        "CUDA": _cuda.status(),
        "allocator": allocator_state(),
    }
    if facts["broken_op"]:
        rows["broken"] = f"{facts['broken_op']} is wrong on purpose (CAMOX_BREAK), for testing the tests"
    for name, value in rows.items():
        print(f"{name:12} {value}")
    return 0


def allocator_state() -> str:
    report = train.tune_cpu_allocator()
    return f"can be tuned: {report}" if report.supported else str(report)


def check() -> int:
    row = "{:18} {:9} {:6} {:9} {:14} {:>10} {:>10}  {}"
    print(row.format("op", "pass", "device", "dtype", "layout", "max error", "allowed", ""))
    failed = count = 0
    for result in _selftest.check():
        count += 1
        failed += not result.passed
        numbers = (f"{result.error:.2e}", f"{result.allowed:.2e}", "ok" if result.passed else "WRONG")
        print(row.format(*result[:5], *numbers))
    print(f"{count - failed} passed, {failed} failed on {isa()}")
    return 1 if failed else 0


def bench() -> int:
    report = train.tune_cpu_allocator()
    shape = "x".join(map(str, _selftest.BENCH_SHAPE))
    print(f"float32 {shape}, {torch.get_num_threads()} threads, {isa()}; {report}")
    print(f"{'op':18} {'pass':18} {'camox_ops':>12} {'PyTorch':>12} {'ratio':>8}")
    for name, what, ours, theirs in _selftest.bench():
        print(f"{name:18} {what:18} {ours:9.3f} ms {theirs:9.3f} ms {theirs / ours:7.2f}x")
    return 0


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["run"]:
        return _run.main(arguments[1:])
    if arguments[:1] == ["patch-report"]:
        return _until_nobody_reads(lambda: patch_report(arguments[1:]))
    # The description's lines are a table; not the docstring, of which `python -OO` leaves nothing.
    parser = argparse.ArgumentParser(
        prog="python -m camox_ops",
        usage=USAGE,
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = {"info": info, "check": check, "bench": bench}
    parser.add_argument("command", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments).command
    if asked not in commands:
        parser.error(f"there is no command {asked!r}")
    return _until_nobody_reads(commands[asked])


def _until_nobody_reads(command: Callable[[], int]) -> int:
    """The command's status, or 1 without a traceback where nobody can read its output: its reader, such as head, has
    ended, or the disk is full."""
    try:
        status = command()
        print(end="", flush=True)  # also where stdout is closed and sys.stdout is None
    except BrokenPipeError:
        _discard_output()
        return 1
    except OSError as error:
        try:
            print(end="", flush=True)
        except OSError:
            print(f"python -m camox_ops: can't write the output: {error.strerror}", file=sys.stderr)
            _discard_output()
            return 1
        raise  # not of the output: of the model that patch-report makes
    return status


def _discard_output() -> None:
    """Python flushes once more at its end, which would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
