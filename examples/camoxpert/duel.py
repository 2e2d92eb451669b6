"""Training of the two models of twins.py side by side: same batches, same dropout, alternating steps."""

import copy
import time

import torch
from torch.utils.data import DataLoader

from ..common.parity import moved_by_one_rounding
from ..common.report import summarise
from .data import BuiltinSet, EpochSampler
from .losses import AdvancedCODLoss
from .steps import Precision, Stepper, build_optimizer, lr_factor
from .twins import RoutingRecorder, same_routing

EARLY_STEPS = 5


def batches(pictures, batch_size, steps, seed=0):
    """`steps` batches (images, masks), epoch after epoch; ValueError when not even one batch can be filled."""
    if batch_size > len(pictures):
        raise ValueError(f"batch_size must be at most the {len(pictures)} pictures, got {batch_size}")
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


def early_loss_gaps(models, pictures, batch_size, lr, warmup, seed=0):
    """How fast training amplifies rounding: the largest loss differences from the stock model over EARLY_STEPS steps.

    Returns {"camox", "torch_one_rounding_away"}; the second is the stock model with weights moved by one rounding.
    The models are left as they are. warmup is the number of steps in which the rate rises to lr.
    """
    stock = copy.deepcopy(models["torch"])
    moved = copy.deepcopy(models["torch"])
    generator = torch.Generator().manual_seed(seed)
    for parameter in moved.parameters():
        parameter.data = moved_by_one_rounding(parameter.data, generator)
    losses = []
    for model in (stock, copy.deepcopy(models["camox"]), moved):
        stepper = make_stepper(model, lr)
        losses.append([])
        for index, batch in enumerate(batches(pictures, batch_size, EARLY_STEPS, seed)):
            torch.manual_seed(seed + index)
            stepper.accumulate(*batch)
            stepper.step((index + 1) / warmup)
            losses[-1].append(stepper.take_loss())
    gaps = [max(abs(a - b) for a, b in zip(losses[0], other, strict=True)) for other in losses[1:]]
    return {"camox": gaps[0], "torch_one_rounding_away": gaps[1]}


def make_stepper(model, lr):
    """Float32 training of one of the models."""
    precision = Precision("cpu", enabled=False)
    return Stepper(model.train(), AdvancedCODLoss(), build_optimizer(model, lr), precision, deep_supervision=True)


def train_both(models, pictures, batch_size, steps, lr, seed=0, report=None):
    """Train models {"torch", "camox"} in float32, in alternating order within a step so that drift meets both alike.

    Returns ({name: {"losses", "step_ms", "step_ms_quartiles", "images_per_s", "expert_share_per_layer"}},
    {"same_routing_share", "first_different_routing"}). report(step, losses) is called now and then.
    """
    steppers = {name: make_stepper(model, lr) for name, model in models.items()}
    recorders = {name: RoutingRecorder(model) for name, model in models.items()}
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
    return results, {"same_routing_share": agreeing / steps, "first_different_routing": first_split}
