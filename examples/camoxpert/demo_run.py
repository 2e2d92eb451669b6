"""The demo: train the small model with stock PyTorch and with camox_ops side by side, compare, and report."""

import copy
import statistics
import time
from pathlib import Path

from torch.utils.data import DataLoader

from camox_ops.train import tune_cpu_allocator

from ..common import demo
from ..common.duel import with_and_without_tune_cpu
from ..common.report import machine, write_json
from . import memory, report, steptime
from .data import BuiltinSet, EpochSampler
from .duel import batches, early_loss_gaps, make_step, train_both, training_set
from .metrics import constant_mask_iou, evaluate, predict
from .parity import compare
from .steps import WARMUP_SHARE
from .twins import build_twins

SIZE, BATCH, LEARNING_RATE = 96, 8, 2e-3
STEPS = {"full": 400, "quick": 44}
TIMED_ROUNDS = {"full": 4, "quick": 2}
SHOWN = 6


def sample_predictions(models, dataset):
    """For the report: (image, mask, {ops: probability}) of the first held-out images."""
    shown = []
    for index in range(SHOWN):
        image, mask = dataset[(0, index)]
        predictions = {name: predict(model.eval(), image[None])[0].numpy() for name, model in models.items()}
        shown.append((dataset.images[index], mask[0].numpy(), predictions))
    return shown


def run(mode, folder):
    """Do all of it, write folder/report.png and report.json, print the table; returns the result."""
    started = time.perf_counter()
    allocator = tune_cpu_allocator()
    dataset, held_out = training_set(SIZE), BuiltinSet("val", SIZE)
    loader = DataLoader(held_out, BATCH, sampler=EpochSampler(len(held_out), shuffle=False))
    images, masks = next(iter(batches(dataset, 4 * BATCH, 1)))
    models = build_twins(images)
    untrained = evaluate(models["torch"], loader)
    print(f"{len(dataset)} training images, {len(held_out)} held out, {SIZE} px", flush=True)
    print("comparing with float64, measuring memory", flush=True)
    parity = compare(models, images[:BATCH], masks[:BATCH])
    used = {name: memory.measure(model, images[:BATCH], masks[:BATCH]) for name, model in models.items()}
    for name, model in models.items():
        used[name]["convolution_share"] = steptime.convolution_share(model, images[:BATCH], masks[:BATCH])

    def show(step, losses):
        shown = "  ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
        print(f"step {step}/{STEPS[mode]}  loss: {shown}", flush=True)

    gaps = early_loss_gaps(models, dataset, BATCH, LEARNING_RATE, warmup=WARMUP_SHARE * STEPS[mode])
    trained, training = train_both(models, dataset, BATCH, STEPS[mode], LEARNING_RATE, report=show)
    training["early_loss_gaps"] = gaps
    print("timing with and without tune_cpu", flush=True)
    steps = {name: make_step(copy.deepcopy(model), LEARNING_RATE, lambda _: 1.0) for name, model in models.items()}
    times = with_and_without_tune_cpu(steps, (images[:BATCH], masks[:BATCH]), TIMED_ROUNDS[mode])
    for name, model in models.items():
        trained[name] |= used[name] | evaluate(model, loader)
        trained[name]["final_loss"] = statistics.mean(trained[name]["losses"][-10:])
    result = {
        "mode": mode,
        "machine": machine(),
        "allocator": str(allocator),
        "settings": {"size": SIZE, "batch": BATCH, "steps": STEPS[mode], "lr": LEARNING_RATE, "backbone": "tiny"},
        "models": trained,
        "training": training,
        "times": times,
        "parity": parity,
        "untrained": untrained,
        "constant_mask_iou": constant_mask_iou([mask / 255 for mask in held_out.masks]),
    }
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    report.draw(folder / "report.png", result, sample_predictions(models, held_out))
    result["seconds"] = time.perf_counter() - started
    write_json(folder / "report.json", result)
    print(report.table(result))
    print(f"wrote {folder / 'report.png'} and {folder / 'report.json'} in {result['seconds']:.0f} s")
    return result


def failures(result):
    """What in a result must not be, as sentences."""
    found = []
    if not result["parity"]["passed"]:
        parity = result["parity"]
        found.append(
            f"camox differs from float64 by more than the rule allows: {parity['worst']}, "
            f"routing_same={parity['routing_same']}, missing={parity['missing']}, "
            f"edge_images={parity['edge_images']}"
        )
    floor = max(result["untrained"]["iou"], result["constant_mask_iou"])
    for name, row in result["models"].items():
        if not row["iou"] > floor:
            found.append(f"--ops {name} reached an IoU of {row['iou']:.4f}, not above {floor:.4f} without training")
    return found


def main(arguments=None):
    return demo.main(STEPS, run, failures, arguments)
