"""The demo's report: a table on the terminal, a picture, and the numbers as JSON."""

import json
import os
import platform
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import numpy as np
import torch
from matplotlib import pyplot as plt

from .duel import EARLY_STEPS
from .experts import CLASSES
from .parity import COLUMNS

COLOURS = {"torch": "#888888", "camox": "#d95f02"}
EXPERT_NAMES = [made.__name__.removesuffix("Expert") for made in CLASSES]
MEASURES = ("iou", "s_measure", "e_measure", "weighted_f", "mae")


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


def table(result):
    """The numbers as lines of text."""
    torch_row, camox_row = result["models"]["torch"], result["models"]["camox"]
    lines = [f"{'':26}{'torch':>12}{'camox':>12}{'ratio':>9}"]

    def add(label, key, form="{:.2f}", better="lower"):
        first, second = torch_row[key], camox_row[key]
        ratio = first / second if better == "lower" else second / first
        lines.append(f"{label:26}{form.format(first):>12}{form.format(second):>12}{ratio:>8.2f}x")

    add("time per step, ms", "step_ms", "{:.1f}")
    add("images/s", "images_per_s", "{:.1f}", better="higher")
    add("peak memory of a step, MB", "peak_mb", "{:.1f}")
    add("kept for backward, MB", "saved_mb", "{:.1f}")
    shares = (f"{100 * row['convolution_share']:.0f}%" for row in (torch_row, camox_row))
    lines.append(f"{'of it convolutions *':26}" + "".join(f"{share:>12}" for share in shares))
    for name in MEASURES:
        lines.append(f"{name + ' (held out)':26}{torch_row[name]:>12.4f}{camox_row[name]:>12.4f}")
    lines.append(f"{'final loss (last 10)':26}{torch_row['final_loss']:>12.4f}{camox_row['final_loss']:>12.4f}")
    untrained, constant = result["untrained"]["iou"], result["constant_mask_iou"]
    lines.append(f"IoU of the untrained model {untrained:.4f}, of a constant mask {constant:.4f}")
    parity, training = result["parity"], result["training"]
    lines.append("* of backbone and decoder, pointwise ones (linear layers) too; both op sets leave them to PyTorch")
    header = ("camox-torch", "torch-f64", "camox-f64", "largest value")
    lines += ["", f"{'largest difference of':26}" + "".join(f"{name:>15}" for name in header)]
    for kind, row in parity["kinds"].items():
        lines.append(f"{kind:26}" + "".join(f"{row[column]:>15.2e}" for column in COLUMNS))
    worst = parity["worst"]
    lines.append(f"nearest to its limit: {worst['tensor']} at {100 * worst['share_of_limit']:.0f}%")
    edge = f"pictures through the edge expert, per layer: {parity['edge_pictures']}"
    lines.append(f"routing_same {parity['routing_same']}; {edge}")
    gaps = training["early_loss_gaps"]
    lines.append(
        f"loss gap to torch over the first {EARLY_STEPS} steps: camox {gaps['camox']:.1e}, "
        f"torch from weights moved by one rounding {gaps['torch_one_rounding_away']:.1e}"
    )
    lines.append(f"both chose the same experts in {100 * training['same_routing_share']:.0f}% of the training steps")
    return "\n".join(lines)


def draw(path, result, samples):
    """Write the picture: samples is a list of (image (H,W,3) uint8, mask (H,W), {ops: probability (H,W)})."""
    figure = plt.figure(figsize=(2 * len(samples), 13.5), constrained_layout=True)
    grid = figure.add_gridspec(3, 1, height_ratios=[2.4, 1, 0.7])
    pictures = grid[0].subgridspec(4, len(samples))
    for column, (image, mask, predictions) in enumerate(samples):
        rows = {"picture": image, "mask": mask, "torch": predictions["torch"], "camox": predictions["camox"]}
        for row, (title, values) in enumerate(rows.items()):
            axes = figure.add_subplot(pictures[row, column])
            axes.imshow(values, cmap="gray", vmin=0, vmax=None if values.ndim == 3 else np.max([1, values.max()]))
            axes.set_xticks([])
            axes.set_yticks([])
            if column == 0:
                axes.set_ylabel(title, fontsize=12)
    lower = grid[1].subgridspec(1, 2, width_ratios=[2.2, 1])
    curves, bars = figure.add_subplot(lower[0]), figure.add_subplot(lower[1])
    for name, style in (("torch", "-"), ("camox", "--")):
        losses = np.array(result["models"][name]["losses"])
        width = min(10, len(losses))
        smooth = np.convolve(losses, np.ones(width) / width, mode="valid")
        curves.plot(np.arange(width, len(losses) + 1), smooth, style, color=COLOURS[name], label=f"--ops {name}")
    curves.set(xlabel="step", ylabel="loss (mean of 10 steps)", title="same weights, same batches")
    curves.legend()
    names = ("torch", "camox")
    heights = [result["models"][name]["step_ms"] for name in names]
    spread = [result["models"][name]["step_ms_quartiles"] for name in names]
    error = np.abs(np.array(spread).T - np.array(heights))
    bars.bar(names, heights, yerr=error, capsize=6, color=[COLOURS[name] for name in names])
    for position, height in enumerate(heights):
        bars.text(position, height / 2, f"{height:.0f} ms", ha="center", color="white", fontsize=12)
    bars.set(title="time per training step (median, quartiles)", ylabel="ms")
    history = np.array(result["models"]["camox"]["expert_share_history"])
    draw_usage(figure, grid[2], history, len(result["models"]["camox"]["losses"]))
    figure.savefig(path, dpi=80)
    plt.close(figure)


def draw_usage(figure, place, history, steps):
    """Expert usage over training: history (parts, layers, experts), one stack of shares for each layer."""
    places = place.subgridspec(1, history.shape[1])
    x = (np.arange(len(history)) + 0.5) * steps / len(history)
    for layer in range(history.shape[1]):
        axes = figure.add_subplot(places[layer])
        axes.stackplot(x, history[:, layer].T, labels=EXPERT_NAMES, colors=plt.get_cmap("tab10").colors)
        axes.set(ylim=(0, 1), xlim=(x[0], x[-1]) if len(x) > 1 else None, title=f"experts of layer {layer + 1}")
        axes.set(xlabel="step", ylabel="share of the choices" if layer == 0 else None)
        if layer:
            axes.set_yticks([])
    handles = axes.get_legend_handles_labels()[0][::-1]
    axes.legend(handles, EXPERT_NAMES[::-1], loc="center left", bbox_to_anchor=(1.02, 0.5), fontsize=9)


def write_json(path, result):
    Path(path).write_text(json.dumps(result, indent=1) + "\n")
