"""Feed-forward blocks and residual norms of transformers, in classes of any name, on bias_gelu and
dropout_add_layer_norm.

    feed_forward   [drop] W2 [drop] gelu(W1 x), or gelu(W1 x) alone, perhaps with norm(... + x) around it
    add_norm       norm([drop] [W] x + y)

Where each dropout stands is found by running the module with another p in each of them, against every arrangement."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from ..nn import temporal
from ..ops.bias_gelu import bias_gelu
from ..ops.dropout import dropout
from . import _call, _proof
from ._recogniser import Planned, Recogniser

NO_DROPOUT = SimpleNamespace(p=0.0, training=False)


class Parts(NamedTuple):
    """Names of the inner modules by what they are."""

    linears: list[str]
    dropouts: list[str]
    norms: list[str]


def parts_of(module: nn.Module, norms: Sequence[str] = ()) -> Parts | None:
    """None where there is anything else that has parameters or buffers, or more of it inside. norms: names of modules
    that are norms whatever their class."""
    found = Parts([], [], [])
    if module._parameters or module._buffers or len(module._modules) > 8:
        return None
    for name, part in module._modules.items():
        if part is None:
            continue
        kind = _call.kind_of(part)
        if kind is nn.Linear:
            found.linears.append(name)
        elif kind is nn.Dropout:
            found.dropouts.append(name)
        elif name in norms or (kind is nn.LayerNorm and len(part.normalized_shape) == 1 and part.bias is not None):
            found.norms.append(name)
        elif part._modules or part._parameters or part._buffers:
            return None
    return found


class Inner(NamedTuple):
    """The inner modules that are read and not called, and their classes and forms at the proof."""

    names: tuple[str, ...]
    kinds: tuple[type, ...]
    forms: tuple

    @classmethod
    def of(cls, modules: Iterable[tuple[str, nn.Module]]) -> Inner:
        """Of (name, module)."""
        found = dict(modules)
        parts = tuple(found.values())
        return cls(tuple(found), tuple(map(_call.kind_of, parts)), tuple(map(_call.form_of, parts)))

    def are_bypassed(self, module: nn.Module) -> bool:
        parts = [module._modules.get(name) for name in self.names]
        return _call.are_bypassed(parts, self.kinds) and tuple(map(_call.form_of, parts)) == self.forms


def inner_modules(module: nn.Module, *called: str | None) -> list[tuple[str, nn.Module]]:
    """(name, module) of what a module contains, but for those that its fast forward calls."""
    return [(name, part) for name, part in module._modules.items() if part is not None and name not in called]


def inner_of(module: nn.Module) -> Inner:
    return Inner.of(inner_modules(module))


def arranged(
    module: nn.Module,
    parts: Parts,
    arrangements: Iterable,
    compute: Callable,
    args: tuple,
    channels_of: Callable = lambda module, settings: None,
):
    """The one of the arrangements that gives what the module does, each dropout with a p of its own."""
    base = _proof.copied(module, torch.float64, "cpu").train()
    for number, name in enumerate(parts.dropouts):
        base.get_submodule(name).p = 0.3 + 0.1 * number
    found: dict[int | None, _proof.Numbers] = {}
    trial = _proof.copied(base)  # for values alone, by which most arrangements differ: copies and gradients take longer
    for settings in arrangements:
        channels = channels_of(module, settings)
        if channels not in found:
            side = _proof.copied(base)
            try:
                found[channels] = _proof.run(type(side).forward, side, args, {}, channels=channels)
            except Exception:
                raise _proof.OtherKind from None

        def fast(part, *given, settings=settings):
            return compute(part, settings, *given)

        try:
            outputs = _proof.run(fast, trial, args, {}, gradients=False)
            if not _proof.has_outputs_of(found[channels], outputs):
                continue
            ours = _proof.run(fast, _proof.copied(base), args, {})
        except Exception:  # shapes that do not go together
            continue
        if _proof.difference(ours, found[channels]).reason is None:
            return settings
    raise _proof.OtherKind


class Block(NamedTuple):
    """Names of inner modules of a feed-forward block; None: it has no such one."""

    first: str
    second: str | None
    between: str | None
    last: str | None
    norm: str | None
    inner: Inner


class FeedForward(Recogniser):
    """One or two linear layers and GELU, wherever the GELU is: a module, a function or tensor operations."""

    name = "feed_forward"
    in_few_operators = True

    def is_candidate(self, module: nn.Module, planned: Planned) -> bool:
        if type(module).forward is nn.Sequential.forward:
            return False
        parts = parts_of(module)
        if parts is None or len(parts.linears) not in (1, 2) or len(parts.norms) > 1 or len(parts.dropouts) > 3:
            return False
        first, *others = (module._modules[name] for name in parts.linears)
        if others and others[0].out_features != first.in_features and others[0].in_features != first.out_features:
            return False
        return first.bias is not None and (not parts.norms or len(parts.linears) == 2)

    def inner(self, module: nn.Module) -> list[tuple[str, nn.Module]]:
        return inner_modules(module)

    def recognise(self, module: nn.Module, thorough: bool, planned: Planned) -> tuple[Block, float]:
        parts, inner = parts_of(module), inner_of(module)
        orders = [(*parts.linears, None)] if len(parts.linears) == 1 else itertools.permutations(parts.linears)
        drops = [None, *parts.dropouts]
        arrangements = [
            Block(first, second, between, last, norm, inner)
            for first, second in orders
            for between, last in itertools.product(drops, drops)
            for norm in (parts.norms or [None])
            if second is not None or last is None
        ]
        widths = {module._modules[block.first].in_features for block in arrangements}
        for width in widths:
            matching = [block for block in arrangements if module._modules[block.first].in_features == width]
            try:
                settings = arranged(module, parts, matching, self.compute, (_proof.values((3, 5, width)),))
                break
            except _proof.OtherKind:
                continue
        else:
            raise _proof.OtherKind

        def fast(copy_of_module, x):
            return self.compute(copy_of_module, settings, x)

        def cases():
            yield (_proof.values((2, 3, width)),), {}
            yield (_proof.values((2, 3, 2, width)) * 8,), {}
            yield (_proof.values((1, width)),), {}

        if not thorough:
            return settings, 0.0
        return settings, _proof.compare64(module, type(module).forward, fast, cases, ("own",))

    def serves(self, module: nn.Module, settings: Block, args: tuple, kwargs: dict) -> bool:
        if len(args) != 1 or kwargs or not _call.is_served(args[0]) or not settings.inner.are_bypassed(module):
            return False
        x, first = args[0], module._modules[settings.first]
        if x.dim() < 2 or x.shape[-1] != first.in_features or first.bias is None:
            return False
        if not _call.outlasts_host(x, first.out_features):
            return False
        if not have_probabilities(module, settings.between, settings.last):
            return False
        return x.dtype is first.weight.dtype is first.bias.dtype or _call.autocast_dtype(x) is not None

    def compute(self, module: nn.Module, settings: Block, x: torch.Tensor) -> torch.Tensor:
        own = module._modules
        between = NO_DROPOUT if settings.between is None else own[settings.between]
        last = NO_DROPOUT if settings.last is None else own[settings.last]
        first = own[settings.first]
        y = bias_gelu(F.linear(x, first.weight), first.bias, p=float(between.p), training=between.training)
        if settings.second is not None:
            y = F.linear(y, own[settings.second].weight, own[settings.second].bias)
        if settings.norm is not None:
            return temporal._add_norm(own[settings.norm], y, x, last)
        return dropout(y, float(last.p), training=last.training)


class Residual(NamedTuple):
    """Names of inner modules; residual: which argument is added; row: of a norm in tensor operations, see rows.py."""

    linear: str | None
    dropout: str | None
    norm: str
    residual: int
    inner: Inner
    row: tuple | None = None


class AddNorm(Recogniser):
    """Two tensors, of which one goes through dropout, and perhaps a linear layer before it."""

    name = "add_norm"
    in_few_operators = True
    slower_in_few_rows = "without dropout"

    def is_candidate(self, module: nn.Module, planned: Planned) -> bool:
        parts = self.parts(module, planned)
        return parts is not None and len(parts.norms) == 1 and len(parts.linears) < 2 and len(parts.dropouts) < 3

    def parts(self, module: nn.Module, planned: Planned) -> Parts | None:
        return parts_of(module)

    def row(self, module: nn.Module, name: str, planned: Planned) -> tuple | None:
        return None

    def width(self, module: nn.Module, name: str) -> int:
        return module._modules[name].normalized_shape[0]

    def norm(self, module: nn.Module, settings: Residual):
        """What has its weight, bias and eps."""
        return module._modules[settings.norm]

    def inner(self, module: nn.Module) -> list[tuple[str, nn.Module]]:
        return inner_modules(module)

    def recognise(self, module: nn.Module, thorough: bool, planned: Planned) -> tuple[Residual, float]:
        parts, inner = self.parts(module, planned), inner_of(module)
        norm, linear = parts.norms[0], parts.linears[0] if parts.linears else None
        width, row = self.width(module, norm), self.row(module, norm, planned)
        wide = width if linear is None else module._modules[linear].in_features
        for residual in (1, 0):

            def given(*shape, residual=residual):
                pair = [_proof.values((*shape, wide)), 2 * _proof.values((*shape, width))]
                return tuple(pair if residual else pair[::-1])

            drops = (*parts.dropouts, None)
            arrangements = [Residual(linear, drop, norm, residual, inner, row) for drop in drops]
            try:
                settings = arranged(module, parts, arrangements, self.compute, given(3, 5))
                break
            except _proof.OtherKind:
                continue
        else:
            raise _proof.OtherKind

        def fast(copy_of_module, *args):
            return self.compute(copy_of_module, settings, *args)

        def cases():
            yield given(2, 3), {}
            yield given(4), {}
            yield given(2, 3, 2), {}

        if not thorough:
            return settings, 0.0
        return settings, _proof.compare64(module, type(module).forward, fast, cases, ("own",))

    def serves(self, module: nn.Module, settings: Residual, args: tuple, kwargs: dict) -> bool:
        if len(args) != 2 or kwargs or not settings.inner.are_bypassed(module):
            return False
        residual, x = args[settings.residual], args[1 - settings.residual]
        if not _call.is_served(x) or not _call.is_served(residual) or not have_probabilities(module, settings.dropout):
            return False
        own = module._modules
        norm = self.norm(module, settings)
        shape = x.shape if settings.linear is None else (*x.shape[:-1], own[settings.linear].out_features)
        if residual.shape != shape or norm.weight is None or norm.bias is None:
            return False
        if self.in_few_operators and not self._is_faster(module, settings, residual):
            return False
        if x.dtype is residual.dtype is norm.weight.dtype is norm.bias.dtype:
            return True
        return _call.autocast_dtype(x) is not None

    def _is_faster(self, module: nn.Module, settings: Residual, residual: torch.Tensor) -> bool:
        """Than an addition and torch's layer_norm, with the dropout if it is active."""
        if not _call.outlasts_host(residual):
            return False
        drop = None if settings.dropout is None else module._modules[settings.dropout]
        return (drop is not None and drop.training and drop.p > 0) or not _call.is_small_in_rows(residual)

    def compute(self, module: nn.Module, settings: Residual, *args: torch.Tensor) -> torch.Tensor:
        own = module._modules
        residual, x = args[settings.residual], args[1 - settings.residual]
        if settings.linear is not None:
            x = F.linear(x, own[settings.linear].weight, own[settings.linear].bias)
        drop = NO_DROPOUT if settings.dropout is None else own[settings.dropout]
        return temporal._add_norm(self.norm(module, settings), x, residual, drop)


def have_probabilities(module: nn.Module, *dropouts: str | None) -> bool:
    return all(name is None or 0 <= module._modules[name].p < 1 for name in dropouts)
