"""CamoXpert's experts and its mixture of experts, in whatever classes.

    edge_expert, frequency_expert   fusion(cat(branch_i(map_i))) + x with the maps of edge_maps or frequency_bands
    pixel_attention                 drop(P linear_attention(Q x)) + x over the pixels, Q and P 1x1 convolutions
    expert_mixture                  each image through the top k of a list of experts, one call for each expert

Branches, fusion, gate and experts are called, not read: their own patches, hooks and adapters work."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..nn.edge import usual_kernels
from ..ops.bands import frequency_bands
from ..ops.dropout import dropout
from ..ops.edge import edge_maps
from ..ops.linear_attention import linear_attention_packed
from ..ops.moe import moe_aux_loss, moe_combine, moe_dispatch, moe_route
from . import _call, _proof
from ._recogniser import Planned, Recogniser
from .blocks import NO_DROPOUT, Inner, have_probabilities, inner_modules


def _compared(module: nn.Module, fast: Callable, inputs: tuple, allowed=_proof.ALLOWED64, **how) -> float:
    """compare64 on calls with one tensor, with the module's own parameters."""

    def cases():
        return (((x,), {}) for x in inputs)

    return _proof.compare64(module, type(module).forward, fast, cases, ("own",), allowed=allowed, **how)


def _first_matching(settings_of, error_of: Callable) -> tuple:
    """The first settings for which error_of does not raise NotAlike, and what it gives."""
    for settings in settings_of:
        try:
            error = error_of(settings)
        except _proof.NotAlike:
            continue
        return settings, error
    raise _proof.OtherKind


class Branches(NamedTuple):
    """Names of inner modules; residual: whether fusion gets x as a second argument instead of x being added."""

    branches: tuple[str, ...]
    fusion: str
    residual: bool


class FourMaps(Recogniser):
    """Five inner modules and nothing else but filters: three maps of x and x itself each go through one of them."""

    def __init__(self, name: str, maps: Callable, filters: int):
        self.name, self.maps, self.filters = name, maps, filters

    def is_candidate(self, module: nn.Module, planned: Planned) -> bool:
        if module._parameters or len(module._modules) != 5 or len(module._buffers) != self.filters:
            return False
        if not _has_usual_filters(module):
            return False
        widths = [_width(part) for part in module._modules.values()]
        return None not in widths and len(set(widths)) == 1

    def recognise(self, module: nn.Module, thorough: bool, planned: Planned) -> tuple[Branches, float]:
        *branches, fusion = module._modules
        channels = _width(module._modules[fusion])
        first = _proof.values((2, channels, 5, 6))
        modes = (True, False) if thorough else (True,)

        def proved(settings, *inputs, **how) -> float:
            def fast(copy_of_module, x):
                return self.compute(copy_of_module, settings, x)

            return _compared(module, fast, inputs, **how)

        choice = Branches(tuple(branches), fusion, residual=_arguments_of(module, fusion, first) == 2)
        settings, error = _first_matching([choice], lambda settings: proved(settings, first, modes=modes))
        if not thorough:
            return settings, error
        return settings, max(error, proved(settings, _proof.values((1, channels, 1, 9)), modes=(True,)))

    def serves(self, module: nn.Module, settings: Branches, args: tuple, kwargs: dict) -> bool:
        if len(args) != 1 or kwargs or not _call.is_served(args[0]) or args[0].dim() != 4:
            return False
        # filters that were changed or are trained are used as they are
        return not self.filters or _has_usual_filters(module)

    def compute(self, module: nn.Module, settings: Branches, x: torch.Tensor) -> torch.Tensor:
        own = module._modules
        maps = (*self.maps(x), x)
        features = torch.cat([own[name](part) for name, part in zip(settings.branches, maps, strict=True)], 1)
        return own[settings.fusion](features, x) if settings.residual else own[settings.fusion](features) + x


def _arguments_of(module: nn.Module, name: str, x: torch.Tensor) -> int:
    """How many arguments an inner module is called with. Where it would add x itself, a sum outside of it gives the
    same numbers, but not to its hooks."""
    side, counts = _proof.copied(module, torch.float64, "cpu"), [0]
    inner = side._modules[name]
    inner.register_forward_pre_hook(lambda _, args, kwargs: counts.append(len(args) + len(kwargs)), with_kwargs=True)
    try:
        with torch.no_grad():
            type(module).forward(side, x)
    except Exception:
        raise _proof.OtherKind from None
    return counts[-1]


def _width(module: nn.Module) -> int | None:
    """Channels that the first convolution inside takes."""
    return next((part.in_channels for part in module.modules() if isinstance(part, nn.Conv2d)), None)


def _has_usual_filters(module: nn.Module) -> bool:
    """Whether buffers are those of edge_maps. Compares values, so only on the CPU; a compiled graph has the proof's."""
    filters = [buffer for buffer in module._buffers.values() if buffer is not None]
    if torch.compiler.is_compiling() or not filters:
        return len(filters) in (0, 3)
    if len(filters) != 3 or any(not f.is_cpu or f.requires_grad or f.shape != (1, 1, 3, 3) for f in filters):
        return False
    return all(torch.equal(f.float(), kernel) for f, kernel in zip(filters, usual_kernels(), strict=True))


class Formats(NamedTuple):
    """Whether the output is in channels_last, for an input that is not and for one that is."""

    from_contiguous: bool
    from_channels_last: bool

    def given(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """y as the original gives it for x."""
        last = not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
        wanted = self.from_channels_last if last else self.from_contiguous
        return y.contiguous(memory_format=torch.channels_last if wanted else torch.contiguous_format)


def _formats(module: nn.Module, channels: int) -> Formats:
    """In the module's own dtype: float64 has other convolutions."""
    side, found = _proof.copied(module, device="cpu"), []
    dtype = next(parameter.dtype for parameter in side.parameters())
    for given in (torch.contiguous_format, torch.channels_last):
        x = _proof.values((2, channels, 8, 9)).detach().to(dtype).contiguous(memory_format=given)
        try:
            with torch.no_grad():
                y = type(side).forward(side, x)
        except Exception:
            raise _proof.OtherKind from None
        y = y[0] if isinstance(y, tuple) and y else y
        if not isinstance(y, torch.Tensor) or y.dim() != 4:
            raise _proof.OtherKind
        found.append(not y.is_contiguous())
    return Formats(*found)


class Heads(NamedTuple):
    """Names of the inner modules, and how many heads there are. inner: what is read and not called."""

    qkv: str
    proj: str
    drop: str | None
    heads: int
    formats: Formats
    inner: Inner


class PixelAttention(Recogniser):
    """Two 1x1 convolutions, C to 3C and C to C, and perhaps a dropout."""

    name = "pixel_attention"

    def is_candidate(self, module: nn.Module, planned: Planned) -> bool:
        return not module._parameters and not module._buffers and _convolutions(module) is not None

    def inner(self, module: nn.Module) -> list[tuple[str, nn.Module]]:
        return inner_modules(module, *_convolutions(module)[:2])

    def recognise(self, module: nn.Module, thorough: bool, planned: Planned) -> tuple[Heads, float]:
        qkv, proj, drops = _convolutions(module)
        channels = module._modules[proj].in_channels
        numbers = {v for v in vars(module).values() if type(v) is int and v > 0 and channels % v == 0}

        def proved(settings, *inputs, **how) -> float:
            def fast(copy_of_module, x):
                return self.compute(copy_of_module, settings, x)

            return _compared(module, fast, inputs, **how)

        first = _proof.values((2, channels, 3, 5))
        modes = (True, False) if thorough else (True,)
        formats, inner = _formats(module, channels), Inner.of(self.inner(module))
        choices = (
            Heads(qkv, proj, d, n, formats, inner) for d, n in itertools.product(drops or [None], sorted(numbers))
        )
        settings, error = _first_matching(choices, lambda settings: proved(settings, first, modes=modes))
        if not thorough:
            return settings, error
        more = _proof.values((1, channels, 1, 1)), _proof.values((3, channels, 8, 2))
        return settings, max(error, proved(settings, *more, modes=(True,)))

    def serves(self, module: nn.Module, settings: Heads, args: tuple, kwargs: dict) -> bool:
        if len(args) != 1 or kwargs or not _call.is_served(args[0]) or args[0].dim() != 4:
            return False
        if settings.inner.names and not settings.inner.are_bypassed(module):
            return False
        return have_probabilities(module, settings.drop) and args[0].shape[2] * args[0].shape[3] > 0

    def compute(self, module: nn.Module, settings: Heads, x: torch.Tensor) -> torch.Tensor:
        own = module._modules
        heads = own[settings.qkv](x).flatten(2).unflatten(1, (3, settings.heads, -1)).transpose(-2, -1)
        mixed = linear_attention_packed(heads, feature_map="elu1", normalize="feature")
        image = mixed.transpose(-2, -1).flatten(1, 2).unflatten(2, x.shape[2:])
        drop = NO_DROPOUT if settings.drop is None else own[settings.drop]
        y = dropout(own[settings.proj](image), float(drop.p), training=drop.training) + x
        return settings.formats.given(y, x)


def _convolutions(module: nn.Module) -> tuple[str, str, list[str]] | None:
    """Names of the convolution to q, k and v, of the last one, and of dropouts."""
    found, drops = [], []
    for name, part in module._modules.items():
        kind = None if part is None else _call.kind_of(part)
        if kind is nn.Conv2d and part.kernel_size == (1, 1) and part.groups == 1 and part.stride == (1, 1):
            found.append(name)
        elif kind is nn.Dropout:
            drops.append(name)
        elif part is not None and (part._modules or part._parameters):
            return None
    if len(found) != 2 or len(drops) > 1:
        return None
    qkv, proj = (module._modules[name] for name in found)
    if proj.in_channels != proj.out_channels != qkv.out_channels or qkv.in_channels != proj.in_channels:
        return None
    return (*found, drops) if qkv.out_channels == 3 * proj.in_channels else None


class Mixture(NamedTuple):
    """Names of the inner modules, and how many experts an image goes through."""

    experts: str
    gate: str
    top_k: int
    formats: Formats


class ExpertMixture(Recogniser):
    """A list of experts and a gate; (output, aux_loss, info) with CamoXpert's loss of counts.

    The proof puts small convolutions in the experts' places: what they compute is their own matter. An expert sees its
    images together, so one that draws random numbers draws them for all at once, and dropout is switched off where
    the experts themselves are compared, on the first input."""

    name = "expert_mixture"

    def is_candidate(self, module: nn.Module, planned: Planned) -> bool:
        return not module._parameters and not module._buffers and _experts_and_gate(module) is not None

    def recognise(self, module: nn.Module, thorough: bool, planned: Planned) -> tuple[Mixture, float]:
        experts, gate = _experts_and_gate(module)
        count, channels = len(module._modules[experts]), _width(module._modules[gate])
        if channels is None:
            raise _proof.OtherKind
        small = _with_small_experts(module, experts, channels)
        numbers = sorted({v for v in vars(module).values() if type(v) is int and 0 < v <= count})

        def proved(settings, *inputs, **how) -> float:
            def fast(copy_of_module, x):
                return self.compute(copy_of_module, settings, x)

            return _compared(small, fast, inputs, 1e-6, **how)  # a routing's weights are float32

        first = _proof.values((3, channels, 8, 9))
        modes = (True, False) if thorough else (True,)
        formats = _formats(small, channels)
        choices = (Mixture(experts, gate, k, formats) for k in numbers)
        settings, error = _first_matching(choices, lambda settings: proved(settings, first, modes=modes))
        # said of what is a mixture alone: lists of layers with BatchNorm are in most vision models
        if any(isinstance(part, _BatchNorm) for part in module._modules[experts].modules()):
            raise _proof.NotAlike("its experts mix the images of a batch (BatchNorm)")
        if not thorough:
            return settings, error
        return settings, max(error, proved(settings, 3 * _proof.values((5, channels, 6, 6)), modes=(True,)))

    def prepared(self, copy_of_module: nn.Module) -> nn.Module:
        for part in copy_of_module.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
        return copy_of_module

    def serves(self, module: nn.Module, settings: Mixture, args: tuple, kwargs: dict) -> bool:
        if len(args) != 1 or kwargs or torch.compiler.is_compiling():
            return False
        return _call.is_served(args[0]) and args[0].dim() == 4 and args[0].shape[0] > 0

    def compute(self, module: nn.Module, settings: Mixture, x: torch.Tensor) -> tuple:
        experts, gate = module._modules[settings.experts], module._modules[settings.gate]
        logits = gate(x).flatten(1)
        if not logits.isfinite().all():  # moe_route refuses NaN
            return _call.original_forward(module)(module, x)
        routing = moe_route(logits, settings.top_k, score="topk_softmax")
        groups = moe_dispatch(x, routing)
        parts = torch.unsafe_split_with_sizes(groups, routing.counts.tolist())
        mixed = torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True) if part.shape[0]])
        output = settings.formats.given(moe_combine(mixed, routing).to(x.dtype), x)
        info = {
            "top_k_indices": routing.experts,
            "top_k_weights": routing.weights.detach().to(logits.dtype),
            "expert_usage": routing.counts.float(),
        }
        return output, moe_aux_loss(routing, logits, "usage_mse").float(), info


def _with_small_experts(module: nn.Module, experts: str, channels: int) -> nn.Module:
    """A copy of the module, not of its experts."""
    light = copy.copy(module)
    light.__dict__ = {**module.__dict__, "_modules": dict(module._modules)}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        convolutions = [nn.Conv2d(channels, channels, 1, device="cpu") for _ in module._modules[experts]]
    light._modules[experts] = nn.ModuleList(convolutions)
    return _proof.copied(light)


def _experts_and_gate(module: nn.Module) -> tuple[str, str] | None:
    lists = [name for name, part in module._modules.items() if isinstance(part, nn.ModuleList) and len(part) > 1]
    others = [name for name, part in module._modules.items() if part is not None and name not in lists]
    return (lists[0], others[0]) if len(lists) == len(others) == 1 else None


EDGES = FourMaps("edge_expert", edge_maps, 3)
BANDS = FourMaps("frequency_expert", frequency_bands, 0)
