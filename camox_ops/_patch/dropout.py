"""nn.Dropout -> camox_ops.dropout, which stores no mask."""

from __future__ import annotations

import torch
from torch import nn

from ..ops.dropout import MOST_DIMENSIONS, dropout
from . import _call, _proof
from ._recogniser import Planned, Recogniser


class Dropout(Recogniser):
    """By its exact type. p, inplace and training are read on each call."""

    name = "dropout"
    in_few_operators = True

    def is_candidate(self, module: nn.Module, planned: Planned) -> bool:
        return type(module) is nn.Dropout and module.p > 0

    def recognise(self, module: nn.Module, thorough: bool, planned: Planned) -> tuple[None, float]:
        if not thorough:
            return None, 0.0

        def fast(copy_of_module, x):
            return self.compute(copy_of_module, None, x) if copy_of_module.training else x

        def cases():
            yield (_proof.values((2, 3, 5, 7)),), {}
            yield (_proof.values((4, 33)).t(),), {}

        if not module.p < 1:
            raise _proof.NotAlike(f"it has p={module.p}")
        return None, _proof.compare64(module, nn.Dropout.forward, fast, cases, ("own",))

    def serves(self, module: nn.Module, settings, args: tuple, kwargs: dict) -> bool:
        if len(args) != 1 or kwargs or not module.training or not 0 < module.p < 1:
            return False
        x = args[0]
        return _call.is_served(x) and x.dim() <= MOST_DIMENSIONS and _call.outlasts_host(x)

    def compute(self, module: nn.Module, settings, x: torch.Tensor) -> torch.Tensor:
        result = dropout(x, float(module.p))
        return x.copy_(result) if module.inplace else result
