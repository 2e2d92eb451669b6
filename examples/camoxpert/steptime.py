"""Which part of a training step's time goes into the convolutions of backbone and decoder."""

import copy
import time

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .losses import AdvancedCODLoss
from .memory import step
from .steps import build_optimizer

aten = torch.ops.aten
CONVOLUTIONS = {aten.convolution.default: 1, aten.convolution_backward.default: 2}
PRODUCTS = {aten.addmm.default, aten.mm.default}
PARTS = ("backbone", "decoder_blocks", "final_conv", "deep_heads")


class Stopwatch(TorchDispatchMode):
    """Adds up the seconds, forward and backward, of the convolutions and linear layers (pointwise convolutions) whose
    weight is one of `weights`."""

    def __init__(self, weights):
        super().__init__()
        self.weights, self.seconds = {weight.data_ptr() for weight in weights}, 0.0
        self.linear = {weight.shape for weight in weights if weight.dim() == 2}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        start = time.perf_counter()
        result = function(*args, **(kwargs or {}))
        if self.counts(function, args, result):
            self.seconds += time.perf_counter() - start
        return result

    def counts(self, function, args, result):
        if function in CONVOLUTIONS:
            return args[CONVOLUTIONS[function]].data_ptr() in self.weights
        # a linear layer's weight is a factor, or its gradient the result
        return function in PRODUCTS and (
            result.shape in self.linear or any(factor.data_ptr() in self.weights for factor in args[-2:])
        )


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
