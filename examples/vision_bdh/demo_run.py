"""The demo: train the small model with stock PyTorch and with camox_ops side by side, compare, and report.

Dropout is off there, for the two draw their masks differently; the model of the published size is timed with it.
"""

import copy
import statistics
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
from matplotlib import pyplot as plt
from torch.nn import functional as F

from camox_ops.train import tune_cpu_allocator

from ..common import demo, duel, memory, parity, report
from .data import batches, open_digits
from .model import BDHConfig, VisionBDHv2
from .report import choose, draw_attention
from .training import Config, accuracy, lr_factor

BATCH = 32
SMALL = replace(Config().sizes(), dropout=0.0)
PUBLISHED = BDHConfig(n_layer=6, n_embd=192, n_head=6, mlp_internal_dim_multiplier=32, dropout=0.1)
LEARNING_RATE, WARMUP_STEPS = 2e-3, 50
STEPS = {"full": 540, "quick": 80}
PUBLISHED_STEPS = {"full": 4, "quick": 0}
# What the accuracy of both must reach; always choosing the most frequent digit gives 0.1.
FLOOR = {"full": 0.95, "quick": 0.3}


def build_twins(config, **arguments):
    """{"torch": model, "camox": model} of equal weights."""
    torch.manual_seed(0)
    models = {name: VisionBDHv2(config, **arguments, ops=name) for name in ("torch", "camox")}
    models["camox"].load_state_dict(models["torch"].state_dict())
    return models


def epochs_of(dataset, steps):
    """`steps` batches, epoch after epoch."""
    per_epoch = len(dataset) // BATCH
    every = (batch for epoch in range(-(-steps // per_epoch)) for batch in batches(dataset, BATCH, 0, epoch))
    return islice(every, steps)


def make_step(model, factor):
    """Training of a model: a step for common/duel.py at factor(index) of the learning rate."""
    trained = [parameter for parameter in model.train().parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.05, fused=True)

    def step(index, images, labels):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * factor(index)
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def run_once(model, images, labels, shift=0):
    """{name: tensor} of output, loss and gradients with the batch rotated by shift, in the batch's own order."""
    model.zero_grad(set_to_none=True)
    logits = model(images.roll(shift, 0))
    loss = F.cross_entropy(logits, labels.roll(shift, 0))
    loss.backward()
    found = {"output logits": logits.detach().roll(-shift, 0), "loss total": loss.detach()}
    return found | {f"gradient {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}


def compare(models, images, labels):
    """Hold models {"torch", "camox"} to float64 by the rule of common/parity.py; "passed" says how that went."""
    stock, camox = (copy.deepcopy(models[name]).train() for name in ("torch", "camox"))
    exact = run_once(copy.deepcopy(stock).double(), images.double(), labels)
    runs, samples = (
        parity.shifted_samples(lambda moved, shift, model=model: run_once(model, moved, labels, shift), images)
        for model in (camox, stock)
    )
    errors = parity.compare_with_float64(exact, runs, samples)
    return {"passed": not errors["missing"] and errors["worst"]["share_of_limit"] <= 1, **errors}


def used(model, images, labels):
    """{"peak_mb", "saved_mb"} of a training step; the model is left as it is."""
    model = copy.deepcopy(model)
    step = make_step(model, lambda index: 0.0)
    return memory.measure(model, lambda: F.cross_entropy(model(images), labels), lambda: step(0, images, labels))


def published_step(steps):
    """Time and memory of a step of the published model on a batch of CIFAR-10's size, dropout 0.1: {name: row}, and its
    times with and without tune_cpu."""
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.randn(BATCH, 3, 32, 32, generator=generator), torch.arange(BATCH) % 10
    models = build_twins(PUBLISHED)
    step_of = {name: make_step(model, lambda index: 0.0) for name, model in models.items()}
    rows = duel.alternate(step_of, [(images, labels)] * (1 + steps), warmup=1)
    for name, model in models.items():
        rows[name] |= {"images_per_s": BATCH / rows[name]["step_ms"] * 1000, **used(model, images, labels)}
    return rows, duel.with_and_without_tune_cpu(step_of, (images, labels))


def run(mode, folder):
    """Do all of it, write folder/report.png and report.json, print the table; returns the result."""
    started = time.perf_counter()
    allocator = tune_cpu_allocator()
    training, test = open_digits()
    models = build_twins(SMALL, in_channels=1)
    print(f"{len(training)} training images, {len(test)} held out; comparing with float64", flush=True)
    first = next(epochs_of(training, 1))
    errors = compare(models, *first)
    rows = {name: used(model, *first) for name, model in models.items()}
    steps = STEPS[mode]
    gaps = duel.early_loss_gaps(
        models,
        lambda model: make_step(model, lambda index: (index + 1) / WARMUP_STEPS),
        lambda: epochs_of(training, duel.EARLY_STEPS),
    )

    def show(index, losses):
        if (index + 1) % (steps // 10) == 0:
            shown = "  ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
            print(f"step {index + 1}/{steps}  loss: {shown}", flush=True)

    trained = duel.alternate(
        {name: make_step(model, lambda index: lr_factor(index, WARMUP_STEPS, steps)) for name, model in models.items()},
        epochs_of(training, steps),
        seen=show,
    )
    for name, model in models.items():
        rows[name] |= trained[name] | {"accuracy": accuracy(model, test)}
        rows[name]["images_per_s"] = BATCH / rows[name]["step_ms"] * 1000
        rows[name]["final_loss"] = statistics.mean(rows[name]["losses"][-10:])
    print("timing with and without tune_cpu", flush=True)
    if PUBLISHED_STEPS[mode]:
        published, times = published_step(PUBLISHED_STEPS[mode])
    else:
        step_of = {name: make_step(copy.deepcopy(model), lambda index: 0.0) for name, model in models.items()}
        published, times = None, duel.with_and_without_tune_cpu(step_of, first, rounds=2)
    result = {
        "mode": mode,
        "machine": report.machine(),
        "allocator": str(allocator),
        "settings": {"batch": BATCH, "steps": steps, "lr": LEARNING_RATE, "model": vars(SMALL)},
        "models": rows,
        "published": published,
        "times": times,
        "parity": errors,
        "early_loss_gaps": gaps,
    }
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    draw(folder / "report.png", result, models, choose(test))
    result["seconds"] = time.perf_counter() - started
    report.write_json(folder / "report.json", result)
    print(table(result))
    print(f"wrote {folder / 'report.png'} and {folder / 'report.json'} in {result['seconds']:.0f} s")
    return result


def table(result):
    """The numbers as lines of text."""

    def block(rows):
        return [
            report.ratio_row("time per step, ms", rows, "step_ms", "{:.1f}"),
            report.ratio_row("images/s", rows, "images_per_s", "{:.1f}", better="higher"),
            report.ratio_row("peak memory of a step, MB", rows, "peak_mb", "{:.1f}"),
            report.ratio_row("kept for backward, MB", rows, "saved_mb", "{:.1f}"),
        ]

    rows = result["models"]
    lines = [report.HEADING, *block(rows)]
    lines.append(report.plain_row("accuracy (held out)", rows, "accuracy"))
    lines.append(report.plain_row("final loss (last 10)", rows, "final_loss"))
    if result["published"]:
        described = ", ".join(f"{name} {value}" for name, value in vars(PUBLISHED).items() if name != "vocab_size")
        lines += ["", f"the published size, batch {BATCH}: {described}", *block(result["published"])]
    lines += ["", *report.tune_lines(result["times"])]
    return "\n".join([*lines, "", *parity.lines(result["parity"]), duel.gap_line(result["early_loss_gaps"])])


def draw(path, result, models, dataset):
    """Write the image: what both models attend to, their losses, the time of a step."""
    figure = plt.figure(figsize=(10, 12), constrained_layout=True)
    upper, lower = figure.subfigures(2, 1, height_ratios=[2.2, 1])
    upper.suptitle("what the patch in the middle attends to, mean over the heads")
    draw_attention(upper, models, dataset, passes=(0, -1))
    left, right = lower.subplots(1, 2, width_ratios=[2.2, 1])
    report.draw_losses(left, result["models"])
    report.draw_times(right, result["times"], f"time per step, {'published' if result['published'] else 'small'} size")
    figure.savefig(path, dpi=80)
    plt.close(figure)


def failures(result):
    """What in a result must not be, as sentences."""
    found = []
    errors = result["parity"]
    if not errors["passed"]:
        found.append(
            f"camox differs from float64 by more than the rule allows: {errors['worst']}, missing={errors['missing']}"
        )
    floor = FLOOR[result["mode"]]
    for name, row in result["models"].items():
        if not row["accuracy"] >= floor:
            found.append(f"--ops {name} reached an accuracy of {row['accuracy']:.4f}, less than {floor}")
    return found


def main(arguments=None):
    return demo.main(STEPS, run, failures, arguments)
