"""The demo's report: a table on the terminal, an image, and the numbers as JSON."""

import numpy as np
from matplotlib import pyplot as plt

from ..common import parity, report
from ..common.duel import gap_line
from .experts import CLASSES

EXPERT_NAMES = [made.__name__.removesuffix("Expert") for made in CLASSES]
MEASURES = ("iou", "s_measure", "e_measure", "weighted_f", "mae")


def table(result):
    """The numbers as lines of text."""
    rows = result["models"]
    lines = [
        report.HEADING,
        report.ratio_row("time per step, ms", rows, "step_ms", "{:.1f}"),
        report.ratio_row("images/s", rows, "images_per_s", "{:.1f}", better="higher"),
        report.ratio_row("peak memory of a step, MB", rows, "peak_mb", "{:.1f}"),
        report.ratio_row("kept for backward, MB", rows, "saved_mb", "{:.1f}"),
        report.plain_row("of it convolutions *", rows, "convolution_share", "{:.0%}"),
        *(report.plain_row(f"{name} (held out)", rows, name) for name in MEASURES),
        report.plain_row("final loss (last 10)", rows, "final_loss"),
    ]
    untrained, constant = result["untrained"]["iou"], result["constant_mask_iou"]
    lines.append(f"IoU of the untrained model {untrained:.4f}, of a constant mask {constant:.4f}")
    errors, training = result["parity"], result["training"]
    lines.append("* of backbone and decoder, pointwise ones (linear layers) too; both op sets leave them to PyTorch")
    lines += ["", *report.tune_lines(result["times"]), "", *parity.lines(errors)]
    edge = f"images through the edge expert, per layer: {errors['edge_images']}"
    lines.append(f"routing_same {errors['routing_same']}; {edge}")
    lines.append(gap_line(training["early_loss_gaps"]))
    lines.append(f"both chose the same experts in {100 * training['same_routing_share']:.0f}% of the training steps")
    return "\n".join(lines)


def draw(path, result, samples):
    """Write the image: samples is a list of (image (H,W,3) uint8, mask (H,W), {ops: probability (H,W)})."""
    figure = plt.figure(figsize=(2 * len(samples), 13.5), constrained_layout=True)
    grid = figure.add_gridspec(3, 1, height_ratios=[2.4, 1, 0.7])
    shown = grid[0].subgridspec(4, len(samples))
    for column, (image, mask, predictions) in enumerate(samples):
        rows = {"image": image, "mask": mask, "torch": predictions["torch"], "camox": predictions["camox"]}
        for row, (title, values) in enumerate(rows.items()):
            axes = figure.add_subplot(shown[row, column])
            axes.imshow(values, cmap="gray", vmin=0, vmax=None if values.ndim == 3 else np.max([1, values.max()]))
            axes.set_xticks([])
            axes.set_yticks([])
            if column == 0:
                axes.set_ylabel(title, fontsize=12)
    lower = grid[1].subgridspec(1, 2, width_ratios=[2.2, 1])
    report.draw_losses(figure.add_subplot(lower[0]), result["models"])
    report.draw_times(figure.add_subplot(lower[1]), result["times"])
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
