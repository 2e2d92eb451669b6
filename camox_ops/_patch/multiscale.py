"""Linear attention over the pixels of q, k and v at several scales, EfficientViT's LiteMLA, -> linear_attention_packed.

qkv(x) ---+--------> cat over channels -> heads of q|k|v, D channels each -> relu attention over pixels -> proj
          +-> op --->
          +-> ...                                          (the inner modules are called as they are)"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import nn

from ..ops.linear_attention import linear_attention_packed
from . import _call, _proof
from ._recogniser import Planned, Recogniser
from ._wide import without_casts

LARGEST_HEAD = 256


class Scales(NamedTuple):
    """Names of inner modules and attributes; dim: channels of a head."""

    qkv: str
    others: str
    relu: str
    proj: str
    dim: int
    eps: str


class MultiscaleAttention(Recogniser):
    """Two modules, a list of further ones and a ReLU; the size of a head and eps are attributes."""

    name = "multiscale_attention"

    def is_candidate(self, module: nn.Module, planned: Planned) -> bool:
        return not module._parameters and not module._buffers and _roles(module) is not None

    def inner(self, module: nn.Module) -> list[tuple[str, nn.Module]]:
        relu = _roles(module)[1]
        return [(relu, module._modules[relu])]

    def recognise(self, module: nn.Module, thorough: bool, planned: Planned) -> tuple[Scales, float]:
        others, relu, ends = _roles(module)
        sizes = [n for n, value in vars(module).items() if type(value) is int and 0 < value <= LARGEST_HEAD]
        small = [n for n, value in vars(module).items() if type(value) is float and 0 < value < 1e-2]
        original = self.exact(type(module).forward)
        choices = [
            Scales(qkv, others, relu, proj, getattr(module, size), eps)
            for qkv, proj in (ends, ends[::-1])
            for size in sizes
            for eps in small
        ]

        def cases(channels) -> Iterator:
            yield (_proof.values((2, channels, 6, 7)),), {}
            if thorough:
                yield (_proof.values((1, channels, 1, 3)),), {}
                yield (_proof.values((3, channels, 17, 4)) * 1e-6,), {}  # so small that eps counts

        for settings in choices:
            channels = _channels(module._modules[settings.qkv])
            if channels is None:
                continue

            def fast(copy_of_module, x, settings=settings):
                return self.compute(copy_of_module, settings, x)

            try:
                given = (channels,)
                return settings, _proof.compare64(module, original, fast, lambda c=given: cases(*c), ("own",))
            except _proof.NotAlike:
                continue
        raise _proof.OtherKind

    def exact(self, original: Callable) -> Callable:
        return without_casts(original)

    def serves(self, module: nn.Module, settings: Scales, args: tuple, kwargs: dict) -> bool:
        if len(args) != 1 or kwargs or not _call.is_served(args[0]) or torch.compiler.is_compiling():
            return False
        x = args[0]
        if x.dim() != 4 or x.dtype is not torch.float32 or 0 in x.shape or _call.autocast_dtype(x) is not None:
            return False
        return _call.are_bypassed([module._modules.get(settings.relu)], [nn.ReLU])

    def compute(self, module: nn.Module, settings: Scales, x: torch.Tensor) -> torch.Tensor:
        own = module._modules
        first = own[settings.qkv](x)
        stacked = torch.cat([first, *(part(first) for part in own[settings.others])], 1)
        heads = stacked.flatten(2).unflatten(1, (-1, 3, settings.dim)).permute(0, 2, 1, 4, 3)
        eps = getattr(module, settings.eps)
        mixed = linear_attention_packed(heads, feature_map="relu", normalize="sum", eps=eps)
        return own[settings.proj](mixed.transpose(-2, -1).flatten(1, 2).unflatten(2, stacked.shape[2:]))


def _roles(module: nn.Module) -> tuple[str, str, tuple[str, str]] | None:
    """Names of the list, the ReLU and the two other modules."""
    lists, relus, ends = [], [], []
    for name, part in module._modules.items():
        kind = type(None) if part is None else _call.kind_of(part)
        names = lists if kind is nn.ModuleList else relus if kind is nn.ReLU else ends
        names.append(name)
    return (lists[0], relus[0], tuple(ends)) if (len(lists), len(relus), len(ends)) == (1, 1, 2) else None


def _channels(module: nn.Module) -> int | None:
    """That a module whose first layer is a convolution takes."""
    return next((part.in_channels for part in module.modules() if isinstance(part, nn.Conv2d)), None)
