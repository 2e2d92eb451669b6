"""Which part of a training step's time goes into the convolutions of backbone and decoder."""

import copy
import time

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .losses import AdvancedCODLoss
from .memory import step
from .steps import build_optimizer

CONVOLUTIONS = {torch.ops.aten.convolution.default: 1, torch.ops.aten.convolution_backward.default: 2}
PARTS = ("backbone", "decoder_blocks", "final_conv", "deep_heads")


class Stopwatch(TorchDispatchMode):
    """Adds up the seconds of the convolutions, forward and backward, whose weight is one of `weights`."""

    def __init__(self, weights):
        super().__init__()
        self.weights, self.seconds = {weight.data_ptr() for weight in weights}, 0.0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        place = CONVOLUTIONS.get(function)
        if place is None or args[place].data_ptr() not in self.weights:
            return function(*args, **(kwargs or {}))
        start = time.perf_counter()
        result = function(*args, **(kwargs or {}))
        self.seconds += time.perf_counter() - start
        return result


def convolution_share(model, images, masks, repeats=3):
    """Share of a step's time, on the CPU: the convolutions' of one step over the whole of another, fastest of each."""
    model = copy.deepcopy(model).train()
    arguments = model, AdvancedCODLoss(), build_optimizer(model, 1e-4), images, masks
    weights = [p for part in PARTS for p in getattr(model, part).parameters()]
    step(*arguments)
    inside, whole = [], []
    for _ in range(repeats):
        with Stopwatch(weights) as watch:
            step(*arguments)
        inside.append(watch.seconds)
        start = time.perf_counter()
        step(*arguments)
        whole.append(time.perf_counter() - start)
    return min(inside) / min(whole)
