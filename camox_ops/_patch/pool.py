"""Average pools of stride 1 -> camox_ops.box_mean, whose cost does not grow with the window."""

from __future__ import annotations

import torch
from torch import nn

from ..ops.box import box_mean
from . import _call, _proof
from ._recogniser import Planned, Recogniser

KINDS = {nn.AvgPool1d: 1, nn.AvgPool2d: 2}
LEAST_WINDOW = 5  # below, in elements of the longer side, PyTorch's loop is as quick


class AveragePool(Recogniser):
    """By its exact type: an odd window that is padded to keep the size. Read on each call."""

    name = "average_pool"
    in_few_operators = True

    def is_candidate(self, module: nn.Module, planned: Planned) -> bool:
        return type(module) in KINDS and _window(module) is not None

    def recognise(self, module: nn.Module, thorough: bool, planned: Planned) -> tuple[None, float]:
        if not thorough:
            return None, 0.0

        def fast(copy_of_module, x):
            return self.compute(copy_of_module, None, x)

        def cases():
            size = _window(module)
            for more in (2, 9):
                yield (_proof.values((2, 3, *(side + more for side in size))),), {}

        return None, _proof.compare64(module, type(module).forward, fast, cases, ("own",))

    def serves(self, module: nn.Module, settings, args: tuple, kwargs: dict) -> bool:
        if len(args) != 1 or kwargs or not _call.is_served(args[0]):
            return False
        dimensions = 1 if isinstance(module, nn.AvgPool1d) else 2
        return args[0].dim() == 2 + dimensions and _window(module) is not None and _call.outlasts_host(args[0])

    def compute(self, module: nn.Module, settings, x: torch.Tensor) -> torch.Tensor:
        window = _window(module)
        size = window[0] if len(window) == 1 else window
        return box_mean(x, size, count_include_pad=module.count_include_pad)


def _window(module: nn.Module) -> tuple[int, ...] | None:
    """Its sides, where box_mean computes the same and has less to do."""
    dimensions = 1 if isinstance(module, nn.AvgPool1d) else 2

    def sides(value) -> tuple:
        return tuple(value) if isinstance(value, (tuple, list)) else (value,) * dimensions

    size, stride, padding = sides(module.kernel_size), sides(module.stride), sides(module.padding)
    if module.ceil_mode or getattr(module, "divisor_override", None) is not None or max(size) < LEAST_WINDOW:
        return None
    if any(s != 1 for s in stride) or any(k % 2 == 0 or p != k // 2 for k, p in zip(size, padding, strict=True)):
        return None
    return size
