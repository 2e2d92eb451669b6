"""The demo: train a small EmberFormer on simulated fires with stock PyTorch and with camox_ops side by side, compare,
and report.

Dropout is off there, for the two draw their masks differently; the public sizes are timed with it.
"""

import copy
import statistics
import time
from itertools import islice
from pathlib import Path

import torch
from matplotlib import pyplot as plt

from camox_ops.train import tune_cpu_allocator

from ..common import demo, duel, memory, parity, report
from . import sizes
from .config import Loss as LossSettings
from .config import Metrics as MetricsSettings
from .config import Simulator, Split, Train
from .data import Batch, NextFrames, collate, simulated, split
from .losses import Criterion, pixel_mask
from .model import EmberFormer
from .report import choose, draw_fires, predicted
from .training import Counts, outcomes, parameter_groups, pixel_loss

BATCH, PATCH, LEARNING_RATE = 8, 4, 2e-3
MODEL = {
    **{"d_model": 64, "nhead": 4, "num_layers": 2, "dim_feedforward": 256, "dropout": 0.0},
    **{"spatial_decoder": "unet", "spatial_base_channels": 8, "patch_size": PATCH, "slot": "last"},
}
FIRES = {
    "full": Simulator(enabled=True, sequences=72, size=80, frames=8, seed=0),
    "quick": Simulator(enabled=True, sequences=16, size=64, frames=7, seed=0),
}
STEPS = {"full": 140, "quick": 20}
TIMED_ROUNDS = {"full": 3, "quick": 2}
SIZES = {"full": ("small", "medium"), "quick": ()}
WARMUP_STEPS, SHOWN = 10, 4
CRITERION = Criterion(LossSettings(), pos_weight=None)
SETTINGS = MetricsSettings()


def build_twins():
    """{"torch": model, "camox": model} of equal weights."""
    torch.manual_seed(0)
    models = {name: EmberFormer(**MODEL, ops=name) for name in ("torch", "camox")}
    models["camox"].load_state_dict(models["torch"].state_dict())
    return models


def batches(dataset, count, seed=0):
    """`count` batches of shuffled samples, epoch after epoch."""
    generator = torch.Generator().manual_seed(seed)

    def endless():
        while True:
            order = torch.randperm(len(dataset), generator=generator).tolist()
            for begin in range(0, len(order) - BATCH + 1, BATCH):
                yield collate([dataset[index] for index in order[begin : begin + BATCH]])

    return islice(endless(), count)


def make_step(model, grid, steps=None):
    """Training of a model: a step for common/duel.py; the rate rises, then falls to a tenth by the last of `steps`."""
    settings = Train(lr_temporal=LEARNING_RATE, lr_spatial=LEARNING_RATE, train_refinement=True)
    optimizer = torch.optim.Adam(parameter_groups(model.train(), settings), weight_decay=1e-4, fused=True)

    def step(index, *tensors):
        factor = min(1.0, (index + 1) / WARMUP_STEPS) * (1.0 if steps is None else 1 - 0.9 * index / steps)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * factor
        loss = pixel_loss(model, Batch(*tensors), CRITERION, grid)[0]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def run_once(model, batch, grid, static, shift=0):
    """{name: tensor} of output, loss and gradients with this terrain and the batch rotated by shift, the output in the
    batch's own order."""
    model.zero_grad(set_to_none=True)
    rolled = Batch(*(tensor.roll(shift, 0) for tensor in batch._replace(static=static)))
    loss, logits, _ = pixel_loss(model, rolled, CRITERION, grid)
    loss.backward()
    found = {"output logits": logits.detach().roll(-shift, 0), "loss total": loss.detach()}
    return found | {f"gradient {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}


def compare(models, batch, grid):
    """Hold models {"torch", "camox"} to float64 by the rule of common/parity.py; "passed" says how that went."""
    stock, camox = (copy.deepcopy(models[name]).train() for name in ("torch", "camox"))
    double = Batch(*(tensor.double() if tensor.is_floating_point() else tensor for tensor in batch))
    exact = run_once(copy.deepcopy(stock).double(), double, grid, double.static)
    # Terrain is what is moved by one rounding: most shares of fire are 0 and would stay. A pixel whose ReLU is at 0 to
    # within a rounding turns over in some samples of either side.
    runs, samples = (
        parity.shifted_samples(
            lambda static, shift, model=model: run_once(model, batch, grid, static, shift), batch.static
        )
        for model in (camox, stock)
    )
    errors = parity.compare_with_float64(exact, runs, samples)
    return {"passed": not errors["missing"] and errors["worst"]["share_of_limit"] <= 1, **errors}


def used(model, batch, grid):
    """{"peak_mb", "saved_mb"} of a training step; the model is left as it is."""
    model = copy.deepcopy(model)
    step = make_step(model, grid)
    return memory.measure(model, lambda: pixel_loss(model, batch, CRITERION, grid)[0], lambda: step(0, *batch))


@torch.no_grad()
def scores(predict, dataset, grid):
    """f1, iou, ... of predict(batch) -> logits over a data set."""
    counts = Counts("cpu")
    for begin in range(0, len(dataset), BATCH):
        batch = collate([dataset[index] for index in range(begin, min(begin + BATCH, len(dataset)))])
        mask = pixel_mask(batch.valid, grid, PATCH)
        counts.update(outcomes(predict(batch), batch.target, mask, SETTINGS))
    return counts.scores()


def unchanged(grid):
    """Logits of "the next frame is the last one", from the patches that the model sees."""

    def predict(batch):
        last = batch.fire[:, :, -1].view(-1, 1, *grid)
        return last.repeat_interleave(PATCH, 2).repeat_interleave(PATCH, 3) - 0.5

    return predict


def trained_model(model, grid):
    return lambda batch: model.eval().forward_pixels(*batch.inputs(), grid)


def run(mode, folder):
    """Do all of it, write folder/report.png and report.json, print the table; returns the result."""
    started = time.perf_counter()
    allocator, steps = tune_cpu_allocator(), STEPS[mode]
    parts = split(simulated(FIRES[mode], PATCH), Split())
    training, held_out = NextFrames(parts["train"]), NextFrames(parts["val"] + parts["test"])
    grid = parts["train"][0].grid
    print(f"{len(training)} training samples, {len(held_out)} held out; comparing with float64", flush=True)
    models = build_twins()
    first = next(batches(training, 1))
    errors = compare(models, first, grid)
    rows = {name: used(model, first, grid) for name, model in models.items()}
    gaps = duel.early_loss_gaps(
        models, lambda model: make_step(model, grid), lambda: batches(training, duel.EARLY_STEPS)
    )

    def show(index, losses):
        if (index + 1) % (steps // 10) == 0:
            shown = "  ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
            print(f"step {index + 1}/{steps}  loss: {shown}", flush=True)

    trained = duel.alternate(
        {name: make_step(model, grid, steps) for name, model in models.items()}, batches(training, steps), seen=show
    )
    for name, model in models.items():
        rows[name] |= trained[name] | scores(trained_model(model, grid), held_out, grid)
        rows[name]["samples_per_s"] = BATCH / rows[name]["step_ms"] * 1000
        rows[name]["final_loss"] = statistics.mean(rows[name]["losses"][-10:])
    print("timing with and without tune_cpu", flush=True)
    step_of = {name: make_step(copy.deepcopy(model), grid) for name, model in models.items()}
    result = {
        "mode": mode,
        "machine": report.machine(),
        "allocator": str(allocator),
        "settings": {"batch": BATCH, "steps": steps, "lr": LEARNING_RATE, "model": MODEL, "fires": vars(FIRES[mode])},
        "models": rows,
        "times": duel.with_and_without_tune_cpu(step_of, tuple(first), TIMED_ROUNDS[mode]),
        "sizes": sizes.table(SIZES[mode], steps=2),
        "unchanged": scores(unchanged(grid), held_out, grid),
        "parity": errors,
        "early_loss_gaps": gaps,
    }
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    chosen = choose(parts["val"] + parts["test"], SHOWN)
    draw(folder / "report.png", result, [predicted(models, *place) for place in chosen])
    result["seconds"] = time.perf_counter() - started
    report.write_json(folder / "report.json", result)
    print(table(result))
    print(f"wrote {folder / 'report.png'} and {folder / 'report.json'} in {result['seconds']:.0f} s")
    return result


def table(result):
    """The numbers as lines of text."""
    rows = result["models"]
    lines = [
        report.HEADING,
        report.ratio_row("time per step, ms", rows, "step_ms", "{:.1f}"),
        report.ratio_row("samples/s", rows, "samples_per_s", "{:.1f}", better="higher"),
        report.ratio_row("peak memory of a step, MB", rows, "peak_mb", "{:.1f}"),
        report.ratio_row("kept for backward, MB", rows, "saved_mb", "{:.1f}"),
        *(report.plain_row(f"{name} (held out)", rows, name) for name in ("f1", "iou", "prec", "rec")),
        report.plain_row("final loss (last 10)", rows, "final_loss"),
        f"f1 of the last frame's patches, unchanged: {result['unchanged']['f1']:.4f}",
        *("", *report.tune_lines(result["times"])),
    ]
    if result["sizes"]:
        lines += ["", "the public sizes, logits of patches, dropout 0.1:", *sizes.lines(result["sizes"])]
    return "\n".join([*lines, "", *parity.lines(result["parity"]), duel.gap_line(result["early_loss_gaps"])])


def draw(path, result, shown):
    """Write the image: fires and their predictions, the losses, the time of a step."""
    figure = plt.figure(figsize=(13, 2.65 * len(shown) + 4), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=[2.65 * len(shown), 3.6])
    draw_fires(upper, shown)
    left, right = lower.subplots(1, 2, width_ratios=[1.6, 1])
    report.draw_losses(left, result["models"])
    report.draw_times(right, result["times"])
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
    floor = result["unchanged"]["f1"] if result["mode"] == "full" else 0.3
    for name, row in result["models"].items():
        if not row["f1"] > floor:
            found.append(f"--ops {name} reached an F1 of {row['f1']:.4f}, not above {floor:.4f}")
    return found


def main(arguments=None):
    return demo.main(STEPS, run, failures, arguments)
