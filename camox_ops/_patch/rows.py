"""LayerNorm over the last dimension in tensor operations, as in pytorch_pretrained_bert, and residual norms with it.

row_norm       weight * (x - mean) / sqrt(variance + eps) + bias  ->  torch's layer_norm, one pass instead of nine
add_row_norm   norm([drop] [W] x + y) with such a norm            ->  dropout_add_layer_norm"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from . import _call, _proof
from ._recogniser import Planned, Recogniser
from .blocks import AddNorm, Parts, Residual, parts_of
from .norm2d import NAMES_IN_NORMS, _eps, _names_in, _path_of


class Row(NamedTuple):
    """weight, bias: names of parameters. eps: where it is, or the number."""

    weight: str
    bias: str
    eps: tuple[str, ...] | float


class RowNorm(Recogniser):
    """Two vectors of one length and nothing inside."""

    name = "row_norm"

    def is_candidate(self, module: nn.Module, planned: Planned) -> bool:
        if type(module).__module__.startswith("torch.") or module._buffers or module._modules:
            return False
        vectors = list(module._parameters.values())
        if len(vectors) != 2 or any(vector is None or vector.dim() != 1 or len(vector) < 2 for vector in vectors):
            return False
        return len(vectors[0]) == len(vectors[1]) and "sqrt" in " ".join(_names_in(module) & NAMES_IN_NORMS)

    def recognise(self, module: nn.Module, thorough: bool, planned: Planned) -> tuple[Row, float]:
        original = type(module).forward
        names = list(module._parameters)

        def over_channels(side, x):
            return original(side, x.movedim(1, -1)).movedim(-1, 1)

        wide = _proof.copied(module, torch.float64, "cpu")
        width = len(module._parameters[names[0]])
        for weight, bias in (names, names[::-1]):
            eps = _eps(wide, over_channels, width, weight, bias)
            if eps is None:
                continue
            settings = Row(weight, bias, _path_of(wide, over_channels, width, weight, bias, eps))
            return settings, self._proved(module, settings, width, thorough)
        raise _proof.OtherKind

    def _proved(self, module: nn.Module, settings: Row, width: int, thorough: bool) -> float:
        def fast(copy_of_module, x):
            return self.compute(copy_of_module, settings, x)

        def cases() -> Iterator:
            yield (_proof.values((2, 5, width)),), {}
            if not thorough:
                return
            yield (_proof.values((3, width)) * 1e-6,), {}
            yield (_proof.values((1, 9, 2, width)) + 1e4,), {}
            yield (torch.full((2, width), 3.0, dtype=torch.float64, device="cpu", requires_grad=True),), {}

        error = _proof.compare64(module, type(module).forward, fast, cases, ("own", 1) if thorough else (1,))
        if error == 0:  # it is torch's function that it calls
            raise _proof.OtherKind
        return error

    def serves(self, module: nn.Module, settings: Row, args: tuple, kwargs: dict) -> bool:
        if len(args) != 1 or kwargs or not _call.is_served(args[0]) or _call.autocast_dtype(args[0]) is not None:
            return False
        x, vectors = args[0], [module._parameters.get(name) for name in (settings.weight, settings.bias)]
        if any(v is None or v.dtype is not x.dtype or v.shape != x.shape[-1:] for v in vectors):
            return False
        return x.is_contiguous() and x.dim() > 1

    def compute(self, module: nn.Module, settings: Row, x: torch.Tensor) -> torch.Tensor:
        norm = as_layer_norm(module, settings)
        return F.layer_norm(x, norm.weight.shape, norm.weight, norm.bias, norm.eps)


def as_layer_norm(module: nn.Module, settings: Row) -> SimpleNamespace:
    """The parts by the names that nn.LayerNorm has for them."""
    eps = settings.eps if isinstance(settings.eps, float) else _call.at(module, settings.eps)
    parameters = module._parameters
    return SimpleNamespace(weight=parameters[settings.weight], bias=parameters[settings.bias], eps=eps)


class AddRowNorm(AddNorm):
    """AddNorm around a norm that is recognised as a RowNorm."""

    name = "add_row_norm"
    in_few_operators = False

    def parts(self, module: nn.Module, planned: Planned) -> Parts | None:
        norms = [name for name, part in module._modules.items() if part is not None and _row_of(part, planned)]
        return parts_of(module, norms) if norms else None

    def serves(self, module: nn.Module, settings: Residual, args: tuple, kwargs: dict) -> bool:
        """Not under autocast, which gives the operations of such a norm several dtypes."""
        if not args or not isinstance(args[0], torch.Tensor) or _call.autocast_dtype(args[0]) is not None:
            return False
        return super().serves(module, settings, args, kwargs)

    def row(self, module: nn.Module, name: str, planned: Planned) -> Row:
        return _row_of(module._modules[name], planned)

    def width(self, module: nn.Module, name: str) -> int:
        return next(module._modules[name].parameters()).numel()

    def norm(self, module: nn.Module, settings: Residual):
        return as_layer_norm(module._modules[settings.norm], settings.row)


def _row_of(module: nn.Module, planned: Planned) -> Row | None:
    patch = planned.get(id(module)) or type(module).__dict__.get("_camox_patch")
    return patch.settings if patch is not None and isinstance(patch.recogniser, RowNorm) else None
