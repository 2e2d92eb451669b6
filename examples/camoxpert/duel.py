"""Training of the two models of twins.py side by side: same batches, same dropout, alternating steps."""

import statistics
import time

import torch
from torch.utils.data import DataLoader

from .data import BuiltinSet, EpochSampler
from .losses import AdvancedCODLoss
from .steps import Precision, Stepper, build_optimizer, lr_factor
from .twins import RoutingRecorder, same_routing

WARMUP_STEPS = 5


def batches(pictures, batch_size, steps, seed=0):
    """`steps` batches (images, masks), epoch after epoch."""
    sampler = EpochSampler(len(pictures), seed)
    loader = DataLoader(pictures, batch_size, sampler=sampler, drop_last=True)
    given = 0
    while given < steps:
        for batch in loader:
            if given == steps:
                return
            yield batch
            given += 1
        sampler.epoch += 1


def training_set(size, seed=0):
    return BuiltinSet("train", size, seed, augmented=True)


def summarise(times):
    """Median and quartiles in milliseconds of step times in seconds, the warm-up left out."""
    quartiles = statistics.quantiles([1000 * seconds for seconds in times[WARMUP_STEPS:]], n=4)
    return {"step_ms": quartiles[1], "step_ms_quartiles": [quartiles[0], quartiles[2]]}


def train_both(models, pictures, batch_size, steps, lr, seed=0, report=None):
    """Train models {"torch", "camox"} in float32, in alternating order within a step so that drift meets both alike.

    Returns ({name: {"losses", "step_ms", "step_ms_quartiles", "images_per_s", "expert_share_per_layer"}},
    {"routing", "loss_gap_first_10", "loss_gap_largest"}). report(step, losses) is called now and then.
    """
    criterion, precision = AdvancedCODLoss(), Precision("cpu", enabled=False)
    steppers, recorders = {}, {}
    for name, model in models.items():
        model.train()
        steppers[name] = Stepper(model, criterion, build_optimizer(model, lr), precision, deep_supervision=True)
        recorders[name] = RoutingRecorder(model)
    times, losses = {name: [] for name in models}, {name: [] for name in models}
    usage = dict.fromkeys(models, 0)
    agreeing, first_split = 0, None
    for index, (images, masks) in enumerate(batches(pictures, batch_size, steps, seed)):
        order = list(models) if index % 2 == 0 else list(models)[::-1]
        chosen = {}
        for name in order:
            torch.manual_seed(seed + index)  # the same dropout in both
            start = time.perf_counter()
            steppers[name].accumulate(images, masks)
            steppers[name].step(lr_factor(index, steps))
            times[name].append(time.perf_counter() - start)
            losses[name].append(steppers[name].take_loss())
            chosen[name], counts = recorders[name].take()
            usage[name] = usage[name] + torch.stack(counts)
        same = same_routing(chosen["torch"], chosen["camox"])
        agreeing += same
        first_split = index if not same and first_split is None else first_split
        if report and (index + 1) % max(1, steps // 10) == 0:
            report(index + 1, {name: values[-1] for name, values in losses.items()})
    results = {}
    for name in models:
        summary = summarise(times[name])
        share = usage[name] / usage[name].sum(1, keepdim=True)
        results[name] = {
            **summary,
            "images_per_s": batch_size / summary["step_ms"] * 1000,
            "losses": losses[name],
            "expert_share_per_layer": share.tolist(),
        }
    gaps = [abs(a - b) for a, b in zip(losses["torch"], losses["camox"], strict=True)]
    routing = {"same_share_of_steps": agreeing / steps, "first_different_step": first_split}
    return results, {"routing": routing, "loss_gap_first_10": max(gaps[:10]), "loss_gap_largest": max(gaps)}
