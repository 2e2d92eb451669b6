"""Models trained side by side: same batches, same random numbers, alternating steps."""

import copy
import time

import torch

from camox_ops.train import restore_cpu, tune_cpu

from .parity import moved_by_one_rounding
from .report import WARMUP_STEPS, summarise

EARLY_STEPS = 5
TUNED = " + tune_cpu"


def alternate(steps, batches, seed=0, seen=None, warmup=WARMUP_STEPS):
    """Train {name: step}, where step(index, *batch) returns the loss as a tensor, on every batch.

    The order alternates so that drift of the machine meets all alike. seen(index, {name: loss}) is called after each
    batch. Returns {name: {"losses", "step_ms", "step_ms_quartiles"}}.
    """
    times, losses = {name: [] for name in steps}, {name: [] for name in steps}
    for index, batch in enumerate(batches):
        for name in list(steps) if index % 2 == 0 else list(steps)[::-1]:
            torch.manual_seed(seed + index)  # the same dropout, where it is PyTorch's
            start = time.perf_counter()
            loss = steps[name](index, *batch)
            times[name].append(time.perf_counter() - start)
            losses[name].append(float(loss))
        if seen is not None:
            seen(index, {name: values[-1] for name, values in losses.items()})
    return {name: {"losses": losses[name], **summarise(times[name], warmup)} for name in steps}


def with_and_without_tune_cpu(steps, batch, rounds=4, length=3, seed=0):
    """Times of {name: step}, as for alternate, on one batch, with PyTorch's own CPU kernels and with those that
    tune_cpu puts in their places, in turn: {name: times, name + " + tune_cpu": times}, each as alternate gives them.

    The first of the `length` steps after each change is not counted. The models train on."""
    times = {name + added: [] for name in steps for added in ("", TUNED)}
    for _ in range(rounds):
        for added in ("", TUNED):
            if added:
                tune_cpu(allocator=False)
            try:
                for index in range(length):
                    for name, step in steps.items():
                        torch.manual_seed(seed + index)
                        start = time.perf_counter()
                        step(index, *batch)
                        if index > 0:
                            times[name + added].append(time.perf_counter() - start)
            finally:
                restore_cpu()
    return {name: summarise(taken, warmup=0) for name, taken in times.items()}


def early_loss_gaps(models, make_step, batches, seed=0):
    """How fast training amplifies rounding: the largest loss differences from the stock model over the batches.

    make_step(model) -> step as for alternate. batches() gives the first few, again for each model. Returns {"camox",
    "torch_one_rounding_away"}; the second is the stock model with weights moved by one rounding. The models are left
    as they are.
    """
    moved = copy.deepcopy(models["torch"])
    generator = torch.Generator().manual_seed(seed)
    for parameter in moved.parameters():
        parameter.data = moved_by_one_rounding(parameter.data, generator)
    losses = []
    for model in (copy.deepcopy(models["torch"]), copy.deepcopy(models["camox"]), moved):
        step = make_step(model)
        losses.append([])
        for index, batch in enumerate(batches()):
            torch.manual_seed(seed + index)
            losses[-1].append(float(step(index, *batch)))
    gaps = [max(abs(a - b) for a, b in zip(losses[0], other, strict=True)) for other in losses[1:]]
    return {"camox": gaps[0], "torch_one_rounding_away": gaps[1]}


def gap_line(gaps):
    """What early_loss_gaps returned, as a line of text."""
    return (
        f"loss gap to torch over the first {EARLY_STEPS} steps: camox {gaps['camox']:.1e}, "
        f"torch from weights moved by one rounding {gaps['torch_one_rounding_away']:.1e}"
    )
