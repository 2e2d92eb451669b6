"""Recognisers that replace operations inside the forward of a module (_graph.py), and the blocks around
nn.MultiheadAttention that no other recogniser knows.

    attention_block    weights, mixed = attention(x, y, z)    weights unused: they are not asked for
                       norm(x + [drop](y))                    dropout_add_layer_norm
                       [drop](gelu(linear(x)))                bias_gelu

A function that stands in for operations computes the operations themselves where it does not serve them, as under
hooks on a module that it reads, so that a graph fits all inputs of the module."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import fx, nn

from ..nn import temporal
from ..ops.bias_gelu import bias_gelu
from . import _call, _graph, _proof
from ._recogniser import Planned, Recogniser
from .blocks import NO_DROPOUT

# Parameters of a module that is copied whole, in float64, for a proof.
LARGEST = 1 << 27


class Rewriting(NamedTuple):
    """rank: dimensions of the first argument; variants: for the arguments that a call may give; opened: paths of the
    nn.Sequentials whose modules the graphs call, and names of these."""

    signature: _graph.Signature
    rank: int
    variants: tuple[_graph.Variant, ...]
    opened: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]


class Rewritten(Recogniser):
    """A module whose graph `rewrite` changes."""

    def rewrite(self, module: nn.Module, graph: fx.Graph, planned: Planned) -> bool:
        """Replaces operations; whether there were any."""
        raise NotImplementedError

    def in_float64(self, module: nn.Module) -> nn.Module:
        """A copy for the proof, on the CPU."""
        return _proof.copied(module, torch.float64, "cpu")

    def recognise(self, module: nn.Module, thorough: bool, planned: Planned) -> tuple[Rewriting, float]:
        signature = _graph.signature_of(module)
        if signature is None:
            raise _proof.OtherKind
        if sum(parameter.numel() for parameter in module.parameters()) > LARGEST:
            raise _proof.NotAlike("it has too many parameters to be copied")
        variants, opened, worst, rank, exact = [], {}, 0.0, 0, None
        for given in _given(signature):
            try:
                graph = _graph.traced(module, given)
            except _proof.OtherKind:
                continue
            inputs, kept = _graph.examples(module, graph), _graph.unused(graph)
            sequentials = _graph.opened(module, graph)
            if not self.rewrite(module, graph, planned):
                continue
            exact = self.in_float64(module) if exact is None else exact
            accepted = (_accepted(exact, given, x) for x in inputs)
            cases = list(itertools.islice(filter(None, accepted), 2))
            if not cases:
                continue
            opened.update(sequentials)
            made = _graph.variant(graph, given, kept)
            if thorough:
                worst = max(worst, _proved(exact, made, cases))
            variants.append(made)
            rank = cases[0][0].dim()
        if not variants:
            raise _proof.OtherKind
        return Rewriting(signature, rank, tuple(variants), tuple(opened.items())), worst

    def serves(self, module: nn.Module, settings: Rewriting, args: tuple, kwargs: dict) -> bool:
        given = settings.signature.bound(args, kwargs)
        made = None if given is None else _variant(settings, given)
        if made is None or not all(isinstance(value, torch.Tensor) for value in given.values()):
            return False
        first = given[made.given[0]]
        if first.dim() != settings.rank or torch.jit.is_tracing() or torch.compiler.is_exporting():
            return False
        for path, names in settings.opened:
            part = _call.at(module, path)
            if tuple(part._modules) != names or not _call.are_bypassed([part], [nn.Sequential]):
                return False
        return True

    def compute(self, module: nn.Module, settings: Rewriting, *args, **kwargs):
        given = settings.signature.bound(args, kwargs)
        made = _variant(settings, given)
        return made.function(module, *(given[name] for name in made.given))


def _given(signature: _graph.Signature) -> Iterator[tuple[str, ...]]:
    """Which arguments a call may give: those that it must, and others that are None where they are not given."""
    required, others = signature.names[: signature.required], signature.names[signature.required :]
    free = [name for name, default in zip(others, signature.defaults, strict=True) if default is None]
    yield required
    for name in free:
        yield (*required, name)
    if len(free) > 1:
        yield (*required, *free)


def _variant(settings: Rewriting, given: dict) -> _graph.Variant | None:
    return next((made for made in settings.variants if given.keys() == set(made.given)), None)


def _proved(exact: nn.Module, made: _graph.Variant, cases: list[tuple]) -> float:
    def original(copy_of_module, *args):
        return type(copy_of_module).forward(copy_of_module, **dict(zip(made.given, args, strict=True)))

    def fast(copy_of_module, *args):
        return made.function(copy_of_module, *args)

    def compared(args, training):
        return _proof.compare64(exact, original, fast, lambda: [(args, {})], ("own",), dtype=None, modes=(training,))

    return max(compared(cases[0], True), compared(cases[-1], False))


def _accepted(exact: nn.Module, given: tuple[str, ...], x: torch.Tensor) -> tuple | None:
    """Arguments of these names with which the module runs: x, and masks or tensors like x."""
    batch, length, *_ = (*x.shape, 1)
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    padding = (torch.arange(length) >= length - 1).expand(batch, length)
    alike = x.detach().clone()
    others = (later, padding, alike) if x.is_floating_point() else (alike, later, padding)
    for choice in itertools.product(others, repeat=len(given) - 1) if len(given) < 4 else ():
        args = (x, *choice)
        try:
            with torch.no_grad():
                type(exact).forward(_proof.copied(exact), **dict(zip(given, args, strict=True)))
        except Exception:
            continue
        return args
    return None


class AttentionBlock(Rewritten):
    """Has an nn.MultiheadAttention."""

    name = "attention_block"

    def is_candidate(self, module: nn.Module, planned: Planned) -> bool:
        if type(module).__module__.startswith("torch."):
            return False
        return any(_call.kind_of(part) is nn.MultiheadAttention for part in module.children())

    def rewrite(self, module: nn.Module, graph: fx.Graph, planned: Planned) -> bool:
        found = [rule(module, node) for rule in (_attention, _residual_norm, _gelu) for node in list(graph.nodes)]
        return any(found)


def _attention(module: nn.Module, node: fx.Node) -> bool:
    if node.op != "call_module" or len(node.args) > 4 or node.kwargs.get("need_weights", True) is not True:
        return False
    if _call.kind_of(module.get_submodule(node.target)) is not nn.MultiheadAttention:
        return False
    for user in node.users:
        if not _graph.is_call_of(user, operator.getitem) or (user.args[1] != 0 and user.users):
            return False
    _graph.replace(node, attended, _graph.path_of(node, node.target), *node.args, **node.kwargs)
    return True


def attended(attention: nn.MultiheadAttention, *args, **kwargs) -> tuple:
    """What the attention gives, its weights only where a hook could see them."""
    if not _call.are_bypassed([attention], [nn.MultiheadAttention]):
        return attention(*args, **kwargs)
    if kwargs.get("attn_mask") is not None and "is_causal" in kwargs:
        kwargs["is_causal"] = False  # without weights it replaces the mask
    return attention(*args, **{**kwargs, "need_weights": False})


def _residual_norm(module: nn.Module, node: fx.Node) -> bool:
    norm = _graph.called(node, module, nn.LayerNorm)
    if norm is None or len(norm.normalized_shape) != 1 or norm.bias is None:
        return False
    total = node.args[0]
    if not _graph.is_call_of(total, operator.add, torch.add, "add") or not _graph.is_used_once(total):
        return False
    if len(total.args) != 2 or total.kwargs or not all(isinstance(part, fx.Node) for part in total.args):
        return False
    residual, x = total.args
    for first, second in ((residual, x), (x, residual)):
        if _graph.called(second, module, nn.Dropout) is not None and _graph.is_used_once(second):
            drop = _graph.path_of(node, second.target)
            _graph.replace(node, normalised, _graph.path_of(node, node.target), second.args[0], first, drop)
            return True
    _graph.replace(node, normalised, _graph.path_of(node, node.target), x, residual, None)
    return True


def normalised(norm: nn.LayerNorm, x, residual, drop: nn.Dropout | None) -> torch.Tensor:
    """norm(residual + drop(x))"""
    parts, kinds = ([norm], [nn.LayerNorm]) if drop is None else ([norm, drop], [nn.LayerNorm, nn.Dropout])
    served = _call.are_bypassed(parts, kinds) and _call.is_served(x) and _call.is_served(residual)
    served = served and x.shape == residual.shape and x.dtype is residual.dtype and (drop is None or 0 <= drop.p < 1)
    served = served and norm.weight is not None and norm.bias is not None and len(norm.normalized_shape) == 1
    if not served or x.dtype is not norm.weight.dtype:
        return norm(residual + (x if drop is None else drop(x)))
    return temporal._add_norm(norm, x, residual, NO_DROPOUT if drop is None else drop)


def _gelu(module: nn.Module, node: fx.Node) -> bool:
    activation = _graph.called(node, module, nn.GELU)
    if activation is None and not (_graph.is_call_of(node, F.gelu) and len(node.args) == 1 and not node.kwargs):
        return False
    if activation is not None and activation.approximate != "none":
        return False
    product = node.args[0]
    linear = _graph.called(product, module, nn.Linear)
    if linear is None or linear.bias is None or not _graph.is_used_once(product):
        return False
    last, drop = node, None
    (user, *others) = node.users
    if not others and _graph.called(user, module, nn.Dropout) is not None:
        last, drop = user, _graph.path_of(node, user.target)
    gelu = None if activation is None else _graph.path_of(node, node.target)
    _graph.replace(last, activated, _graph.path_of(node, product.target), gelu, drop, product.args[0])
    return True


def activated(linear: nn.Linear, gelu: nn.GELU | None, drop: nn.Dropout | None, x: torch.Tensor) -> torch.Tensor:
    """drop(gelu(linear(x)))"""
    parts = [(linear, nn.Linear), (gelu, nn.GELU), (drop, nn.Dropout)]
    parts = [pair for pair in parts if pair[0] is not None]
    served = _call.are_bypassed(*zip(*parts, strict=True)) and _call.is_served(x)
    served = served and linear.bias is not None and (gelu is None or gelu.approximate == "none")
    if not served or x.dtype is not linear.weight.dtype or not (drop is None or 0 <= drop.p < 1):
        y = linear(x)
        y = F.gelu(y) if gelu is None else gelu(y)
        return y if drop is None else drop(y)
    drop = NO_DROPOUT if drop is None else drop
    return bias_gelu(F.linear(x, linear.weight), linear.bias, p=float(drop.p), training=drop.training)
