"""nn.Sequential: a norm over channels and the activation after it, or Linear, GELU and Dropout, in one op."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from .._torch_private import any_global_hook
from ..ops.bias_gelu import bias_gelu
from . import _call, _proof
from ._recogniser import Planned, Recogniser
from ._swap import Patch, apply, is_settled
from .norm2d import Norm2d


class _NormActivation(NamedTuple):
    """A norm and an activation of a Sequential."""

    norm: nn.Module
    activation: nn.Module


class _LinearGelu(NamedTuple):
    """A linear layer, GELU and, where there is one, dropout."""

    linear: nn.Linear
    gelu: nn.GELU
    dropout: nn.Dropout | None


class Sequential(Recogniser):
    """Any module with the forward of nn.Sequential. What is fused is decided on each call from the modules that are in
    it, so that it may be changed and sliced; a norm is where it is patched itself, from its first input on."""

    name = "sequential"
    checks_first_input = False  # a norm in it waits for its own, and the ops are proved without regard to inputs

    def is_candidate(self, module: nn.Module, planned: Planned) -> bool:
        return type(module).forward is nn.Sequential.forward and bool(_planned_groups(module, planned))

    def recognise(self, module: nn.Module, thorough: bool, planned: Planned) -> tuple[None, float]:
        error = 0.0
        for group in _planned_groups(module, planned) if thorough else ():
            error = max(error, self._proved(group, planned))
        return None, error

    def _proved(self, group: tuple, planned: Planned) -> float:
        parts = [part for part in group if part is not None]
        patch = _patch_of(parts[0], planned)

        def fast(pair, x):
            if patch is not None:
                apply(pair[0], patch)
            return self.compute(pair, None, x)

        def cases():
            if isinstance(group, _LinearGelu):
                shape = (2, math.ceil(_call.SMALLEST / parts[0].in_features), parts[0].in_features)
            else:
                channels = next((p.numel() for p in parts[0].parameters()), 8)
                shape = (2, channels, 8, math.ceil(_call.SMALLEST / channels / 8))
            yield (_proof.values(shape),), {}

        return _proof.compare64(nn.Sequential(*parts), nn.Sequential.forward, fast, cases, ("own", 1))

    def few_operators(self, module: nn.Module, settings) -> bool:
        """A norm in it has a line of its own in the report."""
        return any(_call.kind_of(part) is nn.Linear for part in module._modules.values())

    def serves(self, module: nn.Module, settings, args: tuple, kwargs: dict) -> bool:
        return len(args) == 1 and not kwargs and not any_global_hook()

    def compute(self, module: nn.Module, settings, x: torch.Tensor) -> torch.Tensor:
        parts = list(module._modules.values())
        place = 0
        while place < len(parts):
            first, following = parts[place], parts[place + 1 : place + 3]
            taken = 0
            if following and _call.is_served(x):
                taken = _taken(first, following, x)
            x = _fused(x, first, *following[: taken - 1]) if taken else first(x)
            place += taken or 1
        return x


def _taken(first: nn.Module, following: list[nn.Module], x: torch.Tensor) -> int:
    """How many modules are computed in one op from here."""
    kind = _call.kind_of(first)
    if kind is nn.Linear:
        gelu = following[0]
        if first.bias is None or _call.kind_of(gelu) is not nn.GELU or gelu.approximate != "none":
            return 0
        if x.dtype is not first.bias.dtype and first.bias.dtype is not torch.float32:
            return 0
        if not _call.outlasts_host(x, first.out_features):
            return 0
        if not _call.are_bypassed([first, gelu], [nn.Linear, nn.GELU]):
            return 0
        if len(following) == 2 and _call.why_not_bypassed(following[1], nn.Dropout) is None and following[1].p < 1:
            return 3
        return 2
    patch = type(first).__dict__.get("_camox_patch")
    if patch is None or not isinstance(patch.recogniser, Norm2d) or (patch.checking and torch.compiler.is_compiling()):
        return 0
    if _activation(following[0]) is None or _call.why_not_bypassed(first, patch.original) is not None:
        return 0
    return 2 if patch.recogniser.serves(first, patch.settings, (x,), {}, activated=True) else 0


def _fused(x: torch.Tensor, first: nn.Module, second: nn.Module, dropout: nn.Dropout | None = None) -> torch.Tensor:
    if isinstance(first, nn.Linear):
        options = {} if dropout is None else {"p": float(dropout.p), "training": dropout.training}
        return bias_gelu(F.linear(x, first.weight), first.bias, **options)
    patch = type(first)._camox_patch
    # Before the call and not in it: a call that checkpointing repeats has to save what the first one saved.
    if patch.checking and not is_settled(first, patch, (x,), {}):
        return second(patch.original.forward(first, x))
    patch = type(first).__dict__.get("_camox_patch")
    if patch is None or patch.checking:
        return second(first(x))
    return patch.recogniser.compute(first, patch.settings, x, _activation(second))


def _activation(module: nn.Module) -> str | None:
    """The name that layer_norm2d has for it; None: it has to be called."""
    kind = _call.kind_of(module)
    if kind is nn.GELU:
        name = {"none": "gelu", "tanh": "gelu_tanh"}.get(module.approximate)
    else:
        name = {nn.ReLU: "relu", nn.SiLU: "silu"}.get(kind)
    return None if name is None or _call.why_not_bypassed(module, kind) is not None else name


def _planned_groups(module: nn.Module, planned: Planned) -> list[tuple]:
    found, parts = [], [*module._modules.values(), None, None]
    for first, second, third in zip(parts, parts[1:], parts[2:], strict=False):
        if first is None or second is None:
            continue
        patch = _patch_of(first, planned)
        if type(first) is nn.Linear and first.bias is not None and _activation(second) == "gelu":
            dropout = third if third is not None and _call.kind_of(third) is nn.Dropout else None
            found.append(_LinearGelu(first, second, dropout))
        elif patch is not None and _activation(second) is not None:
            found.append(_NormActivation(first, second))
    return found


def _patch_of(module: nn.Module, planned: Planned) -> Patch | None:
    """What a norm over channels will be or is."""
    patch = planned.get(id(module)) or type(module).__dict__.get("_camox_patch")
    return patch._replace(checking=False) if patch is not None and isinstance(patch.recogniser, Norm2d) else None
