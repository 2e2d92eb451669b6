"""Proofs for forwards that cast to float32 themselves: in them `x.float()` of a float64 tensor leaves it as it is, so
that the formula can be compared in float64. What the casts do to dtypes is seen on inputs in the user's own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.overrides import TorchFunctionMode


class _FloatStaysDouble(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float and args[0].dtype is torch.float64:
            return args[0]
        return func(*args, **(kwargs or {}))


def without_casts(original: Callable) -> Callable:
    def forward(*args, **kwargs):
        with _FloatStaysDouble():
            return original(*args, **kwargs)

    return forward
