"""Parts of a demo's report: rows of its table, plots of a training side by side, the numbers as JSON."""

import json
import os
import platform
import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import numpy as np
import torch

COLOURS = {"torch": "#888888", "torch + tune_cpu": "#7570b3", "camox": "#d95f02", "camox + tune_cpu": "#a63603"}
COLOURS |= {"dense": "#66a61e", "dense + tune_cpu": "#33691e"}
HEADING = f"{'':26}{'torch':>12}{'camox':>12}{'ratio':>9}"
WARMUP_STEPS = 5


def machine():
    """What the numbers were measured on."""
    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    return {"cpu": cpu, "threads": torch.get_num_threads(), "load": os.getloadavg()[0], "torch": torch.__version__}


def summarise(times, warmup=WARMUP_STEPS):
    """Median and quartiles in milliseconds of step times in seconds, the warm-up left out."""
    quartiles = statistics.quantiles([1000 * seconds for seconds in times[warmup:]], n=4)
    return {"step_ms": quartiles[1], "step_ms_quartiles": [quartiles[0], quartiles[2]]}


def ratio_row(label, rows, key, form="{:.2f}", better="lower"):
    """A line of the table: rows["torch"][key], rows["camox"][key], and how many times better camox is."""
    first, second = rows["torch"][key], rows["camox"][key]
    ratio = first / second if better == "lower" else second / first
    return f"{label:26}{form.format(first):>12}{form.format(second):>12}{ratio:>8.2f}x"


def plain_row(label, rows, key, form="{:.4f}"):
    """A line of the table without a ratio."""
    return f"{label:26}{form.format(rows['torch'][key]):>12}{form.format(rows['camox'][key]):>12}"


def tune_lines(times):
    """What duel.with_and_without_tune_cpu returned, as lines of text: a column for each, and how many times as fast as
    the first."""
    base = next(iter(times.values()))["step_ms"]
    return [
        f"{'the same steps in turn':26}" + "".join(f"{name:>18}" for name in times),
        f"{'time per step, ms':26}" + "".join(f"{row['step_ms']:>18.1f}" for row in times.values()),
        f"{'times as fast':26}" + "".join(f"{base / row['step_ms']:>18.2f}" for row in times.values()),
    ]


def draw_losses(axes, rows):
    """Losses of rows {"torch", "camox"}, each with "losses", as means of 10 steps."""
    for name, style in (("torch", "-"), ("camox", "--")):
        losses = np.array(rows[name]["losses"])
        width = min(10, len(losses))
        smooth = np.convolve(losses, np.ones(width) / width, mode="valid")
        axes.plot(np.arange(width, len(losses) + 1), smooth, style, color=COLOURS[name], label=f"--ops {name}")
    axes.set(xlabel="step", ylabel="loss (mean of 10 steps)", title="same weights, same batches")
    axes.legend()


def draw_times(axes, rows, title="time per training step (median, quartiles)"):
    """Bars of rows {name: {"step_ms", "step_ms_quartiles"}}."""
    names = list(rows)
    heights = [rows[name]["step_ms"] for name in names]
    spread = [rows[name]["step_ms_quartiles"] for name in names]
    error = np.abs(np.array(spread).T - np.array(heights))
    axes.bar(
        [name.replace(" ", "\n", 1) for name in names],
        heights,
        yerr=error,
        capsize=6,
        color=[COLOURS[name] for name in names],
    )
    for position, height in enumerate(heights):
        axes.text(position, height / 2, f"{height:.0f} ms", ha="center", color="white")
    axes.set(title=title, ylabel="ms")


def write_json(path, result):
    Path(path).write_text(json.dumps(result, indent=1) + "\n")
