"""Transformer layers around an attention of any kind, and softmax attention in tensor operations over short sequences,
as Time-Series-Library's and its many copies have them.

    post_norm_layer    x = norm1(x + drop(attention(x, x, x)[0]));  norm2(x + drop(W2 drop(act(W1 x))))
    softmax_attention  drop(softmax(scale q k^T [+ causal mask])) v over (B, T, H, D), returned with None"""

from __future__ import annotations

import inspect
import itertools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from ..nn import temporal
from ..ops.bias_gelu import bias_gelu
from ..ops.dropout import dropout
from ..ops.short_attention import LONGEST, short_attention
from . import _call, _proof
from ._recogniser import Planned, Recogniser
from .blocks import NO_DROPOUT, Inner, Parts, arranged, have_probabilities, inner_modules


class Layer(NamedTuple):
    """Names of inner modules; after: dropouts behind attention, activation and second product; passed: names of
    arguments that go on to the attention."""

    attention: str
    first: str
    second: str
    norms: tuple[str, str]
    after: tuple[str | None, str | None, str | None]
    activation: str
    passed: tuple[str, ...]
    inner: Inner


class PostNormLayer(Recogniser):
    """The attention is called as it is; the products are linear layers or convolutions over one step."""

    name = "post_norm_layer"

    def is_candidate(self, module: nn.Module, planned: Planned) -> bool:
        found = _roles(module)
        return found is not None and len(found[0].linears) == 2 and len(found[0].norms) == 2

    def inner(self, module: nn.Module) -> list[tuple[str, nn.Module]]:
        return inner_modules(module, _roles(module)[1])

    def recognise(self, module: nn.Module, thorough: bool, planned: Planned) -> tuple[Layer, float]:
        parts, attention = _roles(module)
        inner = Inner.of(self.inner(module))
        passed = tuple(inspect.signature(type(module).forward).parameters)[2:]
        width = module._modules[parts.norms[0]].normalized_shape[0]
        arrangements = [
            Layer(attention, first, second, norms, after, activation, names, inner)
            for names in dict.fromkeys((passed, passed[:1], ()))
            for first, second in itertools.permutations(parts.linears)
            for norms in itertools.permutations(parts.norms)
            for after in itertools.product(parts.dropouts or [None], repeat=3)
            for activation in ("gelu", "relu")
        ]
        settings = arranged(module, parts, arrangements, self.compute, (_proof.values((2, 5, width)),), self.channels)

        def fast(copy_of_module, x):
            return self.compute(copy_of_module, settings, x)

        def cases():
            yield (_proof.values((2, 3, width)),), {}
            yield (_proof.values((1, 6, width)),), {}

        if not thorough:
            return settings, 0.0
        channels = self.channels(module, settings)
        return settings, _proof.compare64(module, type(module).forward, fast, cases, ("own",), channels)

    def channels(self, module: nn.Module, settings: Layer) -> int | None:
        first = module._modules[settings.first]
        return first.weight.shape[0] if first.weight.dim() == 3 else None

    def serves(self, module: nn.Module, settings: Layer, args: tuple, kwargs: dict) -> bool:
        if not args or len(args) > 1 + len(settings.passed) or not set(kwargs) <= set(settings.passed[len(args) - 1 :]):
            return False
        x = args[0]
        if not _call.is_served(x) or x.dim() != 3 or not settings.inner.are_bypassed(module):
            return False
        if not have_probabilities(module, *settings.after):
            return False
        first = module._modules[settings.first]
        return x.dtype is first.weight.dtype is first.bias.dtype or _call.autocast_dtype(x) is not None

    def compute(self, module: nn.Module, settings: Layer, x: torch.Tensor, *args, **kwargs) -> tuple:
        own = module._modules
        given = dict.fromkeys(settings.passed) | dict(zip(settings.passed, args, strict=False)) | kwargs
        mixed, weights = own[settings.attention](x, x, x, **given)
        drops = [NO_DROPOUT if name is None else own[name] for name in settings.after]
        first, second = own[settings.first], own[settings.second]
        x = temporal._add_norm(own[settings.norms[0]], mixed, x, drops[0])
        if settings.activation == "gelu":
            hidden = F.linear(x, _matrix(first))
            hidden = bias_gelu(hidden, first.bias, p=float(drops[1].p), training=drops[1].training)
        else:
            hidden = F.relu(F.linear(x, _matrix(first), first.bias))
            hidden = dropout(hidden, float(drops[1].p), training=drops[1].training)
        y = F.linear(hidden, _matrix(second), second.bias)
        return temporal._add_norm(own[settings.norms[1]], y, x, drops[2]), weights


def _matrix(module: nn.Module) -> torch.Tensor:
    return module.weight.squeeze(-1) if module.weight.dim() == 3 else module.weight


def _roles(module: nn.Module) -> tuple[Parts, str] | None:
    """Parts, and the name of the one other module that has something inside: the attention."""
    found, others = Parts([], [], []), []
    if module._parameters or module._buffers or len(module._modules) > 9:
        return None
    for name, part in module._modules.items():
        if part is None:
            continue
        kind = _call.kind_of(part)
        if kind is nn.Linear or (kind is nn.Conv1d and _is_pointwise(part)):
            if part.bias is None:
                return None
            found.linears.append(name)
        elif kind is nn.Dropout:
            found.dropouts.append(name)
        elif kind is nn.LayerNorm and len(part.normalized_shape) == 1 and part.bias is not None:
            found.norms.append(name)
        elif part._modules or part._parameters:
            others.append(name)
    return (found, others[0]) if len(others) == 1 and len(found.dropouts) <= 3 else None


def _is_pointwise(convolution: nn.Conv1d) -> bool:
    one = (convolution.kernel_size, convolution.stride, convolution.padding) == ((1,), (1,), (0,))
    return one and convolution.groups == 1


class Softmax(NamedTuple):
    """dropout: the name of the inner module; scale: of scores, None for 1/sqrt(D)."""

    dropout: str
    scale: float | None
    causal: bool


class SoftmaxAttention(Recogniser):
    """A module without parameters, a dropout in it, forward(q, k, v, mask=None, ...) -> (mixed, None)."""

    name = "softmax_attention"

    def is_candidate(self, module: nn.Module, planned: Planned) -> bool:
        if module._parameters or module._buffers or type(module).__module__.startswith("torch."):
            return False
        parts = [part for part in module._modules.values() if part is not None]
        code = getattr(type(module).forward, "__code__", None)
        return len(parts) == 1 and _call.kind_of(parts[0]) is nn.Dropout and "softmax" in getattr(code, "co_names", ())

    def inner(self, module: nn.Module) -> list[tuple[str, nn.Module]]:
        return inner_modules(module)

    def recognise(self, module: nn.Module, thorough: bool, planned: Planned) -> tuple[Softmax, float]:
        name = self.inner(module)[0][0]
        numbers = [value for value in vars(module).values() if type(value) is float and math.isfinite(value)]
        arrangements = [Softmax(name, scale, causal) for scale in (None, *numbers) for causal in (False, True)]
        nothing = [None] * (_required(module) - 3)

        def given(*shape):
            three = (_proof.values(shape) * factor for factor in (1.0, 0.7, -1.3))
            return (*(part.detach().requires_grad_() for part in three), *nothing)

        parts = Parts([], [name], [])
        settings = arranged(module, parts, arrangements, self.compute, given(2, 5, 3, 4))

        def fast(copy_of_module, *args):
            return self.compute(copy_of_module, settings, *args)

        def cases():
            yield given(2, 7, 2, 6), {}
            yield given(1, 3, 1, 9), {}
            yield given(1, LONGEST, 2, 2), {}

        if not thorough:
            return settings, 0.0
        return settings, _proof.compare64(module, type(module).forward, fast, cases, ("own",))

    def serves(self, module: nn.Module, settings: Softmax, args: tuple, kwargs: dict) -> bool:
        if len(args) < 3 or any(value is not None for value in (*args[3:], *kwargs.values())):
            return False
        q, k, v = args[:3]
        if not (_call.is_served(q) and _call.is_served(k) and _call.is_served(v)):
            return False
        if q.dim() != 4 or not 0 < q.shape[1] <= LONGEST or not q.shape == k.shape == v.shape:
            return False
        if not q.dtype is k.dtype is v.dtype or _call.autocast_dtype(q) is not None:
            return False
        drop = module._modules.get(settings.dropout)
        return _call.are_bypassed([drop], [nn.Dropout]) and 0 <= drop.p < 1

    def compute(self, module: nn.Module, settings: Softmax, q, k, v, *others, **nothing) -> tuple[torch.Tensor, None]:
        drop = module._modules[settings.dropout]
        options = {"causal": settings.causal, "scale": settings.scale, "p": float(drop.p), "training": drop.training}
        return short_attention(q, k, v, **options).contiguous(), None


def _required(module: nn.Module) -> int:
    """How many arguments forward wants, at least three."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    wanted = [p for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    return max(3, len(wanted))
