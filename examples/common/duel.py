"""Models trained side by side: same batches, same random numbers, alternating steps."""

import copy
import time

import torch

from .parity import moved_by_one_rounding
from .report import WARMUP_STEPS, summarise

EARLY_STEPS = 5


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
