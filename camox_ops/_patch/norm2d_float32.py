"""LayerNorm over channels that casts to float32 and back itself, timm's LayerNorm2dFp32, -> camox_ops.layer_norm2d,
which computes in float32 whatever it reads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ._recogniser import Planned
from ._wide import without_casts
from .norm2d import Norm2d, Settings, _names_in


class Norm2dInFloat32(Norm2d):
    """Proved without its casts, which decide about dtypes alone."""

    name = "layer_norm2d_float32"

    def is_candidate(self, module: nn.Module, planned: Planned) -> bool:
        return "float" in _names_in(module) and super().is_candidate(module, planned)

    def exact(self, original: Callable) -> Callable:
        return without_casts(original)

    def serves(self, module: nn.Module, settings: Settings, args: tuple, kwargs: dict, activated: bool = False) -> bool:
        if not super().serves(module, settings, args, kwargs, activated):
            return False
        return args[0].dtype is not torch.float64  # which the original rounds to float32
