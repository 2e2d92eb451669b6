"""The demo's image: what was learned, by whom, how evenly, how fast, and on how many ranks."""

import numpy as np
import torch
from matplotlib import pyplot as plt

from ..common import report
from .data import KINDS, held_out_batch, kind_of_bytes
from .training import LN2

KIND_COLOURS = ("#4e79a7", "#f28e2b", "#e15759", "#d4d4d4", "#9c9c9c", "#59a14f", "#b07aa1", "#17becf")
BALANCE_STYLES = {"switch": ("#d95f02", "-"), "bias": ("#1b9e77", "-"), "none": ("#888888", "--")}
RANK_COLOURS = ("#d95f02", "#fdae6b", "#7570b3", "#bcbddc")
CURVE_COLOURS = ("#d9d9d9", "#fdae6b", "#a63603")
SMOOTH = 10  # steps


@torch.no_grad()
def kinds_read(model, corpus, config, count=64):
    """(layers, experts, kinds) rows of held-out text: which kinds of bytes the experts of each layer took."""
    kinds, found = kind_of_bytes(), 0
    was_training = model.training
    model.eval()
    for text in corpus.held_out.values():
        inputs, _ = held_out_batch(text, config.length, count)
        of_row = kinds[inputs.flatten()].repeat_interleave(config.top_k)
        layers = []
        for info in model(inputs)[2]:
            place = info["top_k_indices"].flatten() * len(KINDS) + of_row
            layers.append(place.bincount(minlength=config.num_experts * len(KINDS)))
        found = found + torch.stack(layers).view(-1, config.num_experts, len(KINDS))
    model.train(was_training)
    return found


def information(table):
    """Bits that knowing the expert tells about the kind of byte, of counts (experts, kinds)."""
    joint = table.double() / table.sum()
    alone = joint.sum(1, keepdim=True) * joint.sum(0)
    return torch.where(joint > 0, joint * (joint / alone.clamp(min=1e-300)).log2(), 0.0).sum().item()


def smooth(values, width=SMOOTH):
    """(steps, means of `width` values)"""
    width = min(width, len(values))
    return np.arange(width, len(values) + 1), np.convolve(values, np.ones(width) / width, mode="valid")


def draw(path, result):
    """Write the image of a demo's result."""
    figure, grid = plt.subplots(2, 3, figsize=(17, 9.5), constrained_layout=True)
    settings = result["settings"]
    sizes = [result["parameters"][name][0] / 1e6 for name in ("moe", "dense")]
    figure.suptitle(
        f"{settings['num_experts']} experts, {settings['top_k']} and a shared one per byte: {sizes[0]:.2f} million "
        f"parameters, against a dense model of equal FLOP per byte: {sizes[1]:.2f} million",
        fontsize=14,
    )
    draw_learning(grid[0, 0], result)
    draw_readers(grid[0, 1], result["kinds"])
    report.draw_times(grid[0, 2], result["times"])
    draw_balance(grid[1, 0], result["balance"])
    draw_same_curve(grid[1, 1], result["ranks"])
    draw_speeds(grid[1, 2], result["ranks"], result["cores"])
    figure.savefig(path, dpi=80)
    plt.close(figure)


def draw_learning(axes, result):
    """Losses of training, and of held-out text as points at the end."""
    rows = {"dense": result["dense"], **result["models"]}
    styles = {"dense": ("dense", "-", 2), "torch": ("mixture, torch", "-", 4), "camox": ("mixture, camox", "--", 1.6)}
    for name, (label, line, width) in styles.items():
        steps, losses = smooth(np.array(rows[name]["losses"]) / LN2)
        held_out = np.mean(list(rows[name]["held_out"].values()))
        colour = report.COLOURS[name]
        axes.plot(steps, losses, line, lw=width, color=colour, label=f"{label}: held out {held_out:.3f}")
    losses = [np.array(row["losses"]) / LN2 for row in rows.values()]
    limits = min(smooth(row)[1].min() for row in losses) - 0.1, max(row[len(row) // 10] for row in losses)
    axes.set(
        xlabel="step", ylabel=f"bits per byte (mean of {SMOOTH} steps)", title="same batches, equal FLOP", ylim=limits
    )
    axes.legend()


def draw_readers(axes, kinds):
    """A bar per expert: of which kinds of bytes its rows are; all text on top."""
    table = np.array(kinds["table"], float)
    whole = table.sum(0, keepdims=True)
    shares = table / np.maximum(table.sum(1, keepdims=True), 1)
    order = np.lexsort((shares.max(1), shares.argmax(1)))
    rows = np.concatenate((shares[order], whole / whole.sum()))
    places = np.append(np.arange(len(order)), len(order) + 0.6)
    left = np.zeros(len(rows))
    for kind, colour in enumerate(KIND_COLOURS):
        axes.barh(places, rows[:, kind], 0.82, left=left, color=colour, label=KINDS[kind])
        left += rows[:, kind]
    axes.set_yticks(places, [*(f"expert {number}" for number in order), "all text"], fontsize=8)
    axes.set_xticks([])
    axes.set(xlim=(0, 1), title=f"which bytes each expert reads (layer {kinds['layer'] + 1}, {kinds['bits']:.2f} bits)")
    axes.legend(ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.01), fontsize=8, frameon=False)


def draw_balance(axes, balance):
    """Load of the busiest expert over training, by how it is kept low."""
    labels = {"switch": "switch loss", "bias": "router bias, no loss", "none": "nothing"}
    for name, busy in balance.items():
        colour, line = BALANCE_STYLES[name]
        axes.plot(*smooth(np.array(busy), 5), line, color=colour, label=labels[name], lw=2)
    axes.axhline(1, color="#404040", lw=0.8)
    axes.text(0.99, 1, "a fair share", ha="right", va="bottom", transform=axes.get_yaxis_transform())
    axes.set(
        xlabel="step",
        ylabel="rows of the busiest expert / a fair share",
        title="balance, kept by ...",
        ylim=(0.9, None),
    )
    axes.legend()


def draw_same_curve(axes, ranks):
    """Loss curves of all numbers of ranks over one another; in an inset, how far they are from one process's."""
    inset = axes.inset_axes((0.5, 0.48, 0.47, 0.4))
    first = np.array(next(iter(ranks.values()))["losses"])
    for (name, row), width, colour in zip(ranks.items(), (7, 3.5, 1.2), CURVE_COLOURS, strict=False):
        losses = np.array(row["losses"])
        steps = np.arange(1, len(losses) + 1)
        axes.plot(steps, losses / LN2, color=colour, lw=width, label=ranks_label(name))
        if row["world"] > 1:
            gap = np.abs(losses - first) / first
            inset.semilogy(steps, np.maximum(gap, np.finfo(np.float32).eps / 2), color=colour, lw=1.8)
    inset.axhline(np.finfo(np.float32).eps, color="#404040", lw=0.8, ls=":")
    inset.set_title("difference from 1 process, as a share\n(dotted: one rounding of float32)", fontsize=8)
    inset.tick_params(labelsize=8)
    axes.set(xlabel="step", ylabel="bits per byte", title="the same run, its experts divided among ranks")
    axes.legend(loc="lower left")


def ranks_label(number):
    return "1 process" if int(number) == 1 else f"{number} ranks"


def draw_speeds(axes, ranks, cores):
    """Tokens/s: a part of a bar per rank."""
    for place, row in enumerate(ranks.values()):
        bottom = 0.0
        for rank, speed in enumerate(row["tokens_per_s"]):
            axes.bar(place, speed, 0.6, bottom=bottom, color=RANK_COLOURS[rank % len(RANK_COLOURS)], edgecolor="white")
            axes.text(
                place, bottom + speed / 2, f"rank {rank}: {speed / 1000:.1f}k", ha="center", va="center", color="white"
            )
            bottom += speed
        axes.text(place, bottom, f"{bottom / 1000:.1f}k", ha="center", va="bottom")
    axes.set_xticks(range(len(ranks)), [ranks_label(name) for name in ranks])
    axes.margins(y=0.12)
    axes.set(ylabel="tokens/s", title=f"one thread per rank, gloo, {cores} cores")
