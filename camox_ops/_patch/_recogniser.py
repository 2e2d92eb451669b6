"""What a recogniser is: one kind of module, how to tell it by behaviour, and its fast forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ._swap import Patch

Planned = dict[int, "Patch"]
"""By id, what modules further inside will be."""


class Recogniser:
    """One of the table in `_table.py`. Stateless: what it learns of a module are `settings`, a hashable value."""

    name: str
    # Whether the module gets its final forward only after a comparison on its first input.
    checks_first_input = True
    # Whether the originals are so few operators that on a GPU only large tensors are served (_call.outlasts_host).
    in_few_operators = False
    # Of those: in which form the original is the faster one on the CPU for few rows (_call.is_small_in_rows).
    slower_in_few_rows = ""

    def is_candidate(self, module: nn.Module, planned: Planned) -> bool:
        """Whether parameters and children allow the module to be of this kind. Reads attributes only, never the name
        of a class; exact types of torch.nn are known. planned: what the modules inside will be."""
        raise NotImplementedError

    def inner(self, module: nn.Module) -> list[tuple[str, nn.Module]]:
        """The inner modules that the fast forward reads instead of calling, with their names."""
        return []

    def recognise(self, module: nn.Module, thorough: bool, planned: Planned) -> tuple[Any, float]:
        """Runs copies of the module -> (settings, largest difference). Raises NotAlike. thorough: with all proofs, not
        only what is needed to find the settings."""
        raise NotImplementedError

    def serves(self, module: nn.Module, settings, args: tuple, kwargs: dict) -> bool:
        """Whether a call is one that the fast forward computes. Asked on each call."""
        raise NotImplementedError

    def compute(self, module: nn.Module, settings, *args, **kwargs):
        """The fast forward."""
        raise NotImplementedError

    def few_operators(self, module: nn.Module, settings) -> bool:
        """in_few_operators of this module."""
        return self.in_few_operators

    def prepared(self, copy_of_module: nn.Module) -> nn.Module:
        """The copy, without what may differ by design in a comparison."""
        return copy_of_module

    def widened(self, copy_of_module: nn.Module) -> nn.Module:
        """The copy in float64."""
        return copy_of_module.double()

    def exact(self, original: Callable) -> Callable:
        """The original forward as it is run in float64."""
        return original

    def channels(self, module: nn.Module, settings) -> int | None:
        """Where the original drops elements of a (B, C, T) that the fast forward has as (B, T, C): C."""
        return None

    def shortened(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The arguments of a first input, or so many samples of them that a comparison in float64 takes little memory.

        Samples are counted in the first dimension, where all tensors agree on it and none is a keyword."""
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        counts = {value.shape[0] if value.dim() else 0 for value in tensors}
        largest = max((value.numel() for value in tensors), default=0)
        if len(counts) != 1 or largest <= ENOUGH or any(isinstance(v, torch.Tensor) for v in kwargs.values()):
            return args, kwargs
        few = max(1, ENOUGH * counts.pop() // largest)
        made = {id(value): value[:few] for value in tensors}  # what is one tensor stays one
        return tuple(made.get(id(value), value) for value in args), kwargs


# Elements of a tensor.
ENOUGH = 1 << 20
