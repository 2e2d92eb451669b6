"""Proofs in float64 for forwards that would not compute in it: those that cast to float32 themselves, and those with
operators that torch has in other dtypes alone. What casts do to dtypes is seen on inputs in the user's own."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch.overrides import TorchFunctionMode


class _FloatIsDouble(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            return args[0].double()
        return func(*args, **(kwargs or {}))


class _GroupedProducts(TorchFunctionMode):
    """grouped_mm of rows in float64. Rows past the last group, which torch leaves as they were in memory, are zeros."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        is_product = getattr(func, "__name__", "") in ("grouped_mm", "_grouped_mm")
        if not is_product or args[0].dtype is not torch.float64 or args[0].dim() != 2 or args[1].dim() != 3:
            return func(*args, **kwargs)
        rows, weights, ends = *args[:2], (kwargs["offs"] if len(args) < 3 else args[2]).tolist()
        parts = [rows[begin:end] @ w for w, (begin, end) in zip(weights, itertools.pairwise((0, *ends)), strict=True)]
        return torch.cat([*parts, rows.new_zeros(rows.shape[0] - ends[-1], weights.shape[2])])


def without_casts(original: Callable) -> Callable:
    """In it `x.float()` gives float64."""
    return _within(_FloatIsDouble, original)


def with_grouped_products(original: Callable) -> Callable:
    """In it torch's grouped product takes float64."""
    return _within(_GroupedProducts, original)


def _within(mode: type[TorchFunctionMode], original: Callable) -> Callable:
    def forward(*args, **kwargs):
        with mode():
            return original(*args, **kwargs)

    return forward
