"""Training of the two models of twins.py side by side, with a look at which experts each chose."""

import torch
from torch.utils.data import DataLoader

from ..common import duel
from .data import BuiltinSet, EpochSampler
from .losses import AdvancedCODLoss
from .steps import Precision, Stepper, build_optimizer, lr_factor
from .twins import RoutingRecorder, same_routing

HISTORY_PARTS = 40


def batches(dataset, batch_size, steps, seed=0):
    """`steps` batches (images, masks), epoch after epoch; ValueError when not even one batch can be filled."""
    if batch_size > len(dataset):
        raise ValueError(f"batch_size must be at most the {len(dataset)} images, got {batch_size}")
    sampler = EpochSampler(len(dataset), seed)
    loader = DataLoader(dataset, batch_size, sampler=sampler, drop_last=True)
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


def make_stepper(model, lr):
    """Float32 training of one model."""
    precision = Precision("cpu", enabled=False)
    return Stepper(model.train(), AdvancedCODLoss(), build_optimizer(model, lr), precision, deep_supervision=True)


def make_step(model, lr, factor):
    """A step for common/duel.py at factor(index) of the rate lr."""
    stepper = make_stepper(model, lr)

    def step(index, images, masks):
        stepper.accumulate(images, masks)
        stepper.step(factor(index))
        return stepper.take_loss()

    return step


def early_loss_gaps(models, dataset, batch_size, lr, warmup, seed=0):
    """common/duel.py's early_loss_gaps over EARLY_STEPS steps; in `warmup` steps the rate rises to lr."""
    return duel.early_loss_gaps(
        models,
        lambda model: make_step(model, lr, lambda index: (index + 1) / warmup),
        lambda: batches(dataset, batch_size, duel.EARLY_STEPS, seed),
        seed,
    )


def shares(usage):
    """Counts of images, steps of (layers, experts) -> each expert's share of its layer's images."""
    total = sum(usage)
    return total / total.sum(1, keepdim=True)


def train_both(models, dataset, batch_size, steps, lr, seed=0, report=None):
    """Train models {"torch", "camox"} in float32, step by step in turn.

    Returns ({name: {"losses", "step_ms", "step_ms_quartiles", "images_per_s", "expert_share_per_layer",
    "expert_share_history"}}, {"same_routing_share", "first_different_routing"}). The history is the experts' shares per
    part of the training, at most HISTORY_PARTS of them, and layer. report(step, losses) is called now and then.
    """
    recorders = {name: RoutingRecorder(model) for name, model in models.items()}
    usage = {name: [] for name in models}
    agreements = []

    def seen(index, losses):
        chosen = {}
        for name, recorder in recorders.items():
            chosen[name], counts = recorder.take()
            usage[name].append(torch.stack(counts))
        agreements.append(same_routing(chosen["torch"], chosen["camox"]))
        if report and (index + 1) % max(1, steps // 10) == 0:
            report(index + 1, losses)

    trained = duel.alternate(
        {name: make_step(model, lr, lambda index: lr_factor(index, steps)) for name, model in models.items()},
        batches(dataset, batch_size, steps, seed),
        seed,
        seen,
    )
    for name, row in trained.items():
        row["images_per_s"] = batch_size / row["step_ms"] * 1000
        parts = torch.stack(usage[name]).chunk(HISTORY_PARTS)
        row["expert_share_per_layer"] = shares(usage[name]).tolist()
        row["expert_share_history"] = [shares(part).tolist() for part in parts]
    split = agreements.index(False) if False in agreements else None
    return trained, {"same_routing_share": sum(agreements) / steps, "first_different_routing": split}
