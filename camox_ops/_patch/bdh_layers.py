"""Layers of Baby Dragon Hatchling inside a model's forward, whatever comes before, between and after them.

    s = relu(x E);  a = [norm](attention(s, s, x));  [drop](s * relu(a E')), heads side by side, times D

    x (B, 1, T, W)   E, E' (H, W, N)   D (H*N, W)   the attention is one that bdh_attention recognises

The heads' N are wide, and the model's time goes to the products with E, E' and D and to passes over (B, H, T, N). Here
all heads are projected by one product, no ReLU is stored, and gate and dropout are one pass."""

from __future__ import annotations

import operator

import torch
import torch.nn.functional as F
from torch import fx, nn

from ..nn.projections import project, project_heads
from ..ops.bdh import bdh_attention
from ..ops.dropout import sparse_gate
from . import _call, _graph, _proof, bdh
from ._recogniser import Planned
from ._swap import patch_of
from .blocks import NO_DROPOUT
from .rewritten import Rewritten


class BDHLayers(Rewritten):
    """Holds the weights and the attention itself."""

    name = "bdh_layers"

    def is_candidate(self, module: nn.Module, planned: Planned) -> bool:
        ranks = [parameter.dim() for parameter in module._parameters.values() if parameter is not None]
        attentions = [part for part in module.children() if _kind_of(part, planned) is not None]
        return len(attentions) == 1 and ranks.count(3) >= 2 and ranks.count(2) >= 1

    def inner(self, module: nn.Module) -> list[tuple[str, nn.Module]]:
        own = [(name, part) for name, part in module._modules.items() if part is not None]
        return [(name, part) for name, part in own if bdh.has_frequencies(part) or _call.kind_of(part) is nn.Dropout]

    def rewrite(self, module: nn.Module, graph: fx.Graph, planned: Planned) -> bool:
        found = [_replaced(module, node, planned) for node in list(graph.nodes)]
        return any(found)

    def in_float64(self, module: nn.Module) -> nn.Module:
        base = self.widened(_proof.copied(module, device="cpu"))
        generator = torch.Generator().manual_seed(0)
        for parameter in base._parameters.values():  # a new model may have zeros, which hide what comes after
            if parameter is not None:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.data.add_(noise, alpha=0.05)
        return base

    def widened(self, copy_of_module: nn.Module) -> nn.Module:
        return bdh.widened(copy_of_module)

    def shortened(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Two samples are enough: a layer has no sums over the samples of a batch."""
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        if len({value.shape[:1] for value in tensors}) != 1:
            return args, kwargs

        def few(value):
            return value[:2] if isinstance(value, torch.Tensor) else value

        return tuple(map(few, args)), {name: few(value) for name, value in kwargs.items()}


def _kind_of(part: nn.Module, planned: Planned) -> bdh.Kind | None:
    """Settings of an attention that is or will be patched."""
    patch = planned.get(id(part)) or patch_of(type(part))
    return patch.settings if patch is not None and isinstance(patch.recogniser, bdh.BDHAttention) else None


def _replaced(module: nn.Module, node: fx.Node, planned: Planned) -> bool:
    """Where a node is the last product of a layer, the operations from the layer's input on become one call."""
    side_by_side, decoder = _product(node, module, 2)
    heads_last = _only(side_by_side, torch.reshape, "reshape", "view")
    gated = _only(heads_last, torch.transpose, "transpose")
    drop = None
    if _graph.called(gated, module, nn.Dropout) is not None:
        drop, gated = gated.target, gated.args[0]
    if _only(gated, operator.mul, torch.mul, "mul") is None:
        return False
    for first, second in (gated.args, gated.args[::-1]):
        mixed, encoder_v = _product(_rectified(second, module, 1), module, 3)
        norm = None
        if _graph.called(mixed, module, nn.LayerNorm) is not None and _graph.is_used_once(mixed):
            norm, mixed = mixed.target, mixed.args[0]
        x, encoder = _product(_rectified(first, module, 2), module, 3)
        if x is None or not _graph.is_used_once(mixed) or mixed.op != "call_module":
            continue
        kind = _kind_of(module.get_submodule(mixed.target), planned)
        if kind is None or [*mixed.args, *mixed.kwargs.values()] != [first, first, x]:
            continue
        modules = [None if name is None else _graph.path_of(node, name) for name in (mixed.target, norm, drop)]
        weights = encoder, _all_heads(encoder), encoder_v, decoder
        _graph.replace(node, layer, x, weights, tuple(modules), kind)
        return True
    return False


def _product(node, module: nn.Module, rank: int) -> tuple:
    """(x, weight) of x @ weight, where weight is a parameter of the module with so many dimensions."""
    if not _graph.is_call_of(node, operator.matmul, torch.matmul, "matmul") or len(node.args) != 2:
        return None, None
    x, weight = node.args
    if not isinstance(x, fx.Node) or not isinstance(weight, fx.Node) or weight.op != "get_attr":
        return None, None
    parameter = module._parameters.get(weight.target)
    return (x, weight) if parameter is not None and parameter.dim() == rank else (None, None)


def _only(node, *functions):
    """The first argument of a node that calls one of the functions and is used once."""
    return node.args[0] if _graph.is_call_of(node, *functions) and _graph.is_used_once(node) else None


def _rectified(node, module: nn.Module, users: int):
    """y of relu(y), where no operation but so many sees the one, and none the other."""
    is_relu = _graph.is_call_of(node, F.relu, torch.relu, "relu") or _graph.called(node, module, nn.ReLU) is not None
    if not is_relu or node.kwargs.get("inplace") or len(node.users) != users:
        return None
    return node.args[0] if _graph.is_used_once(node.args[0]) else None


def _all_heads(encoder: fx.Node) -> fx.Node:
    """The weight as one matrix: made once for all layers of a forward."""
    for node in encoder.graph.nodes:
        if node.target is all_heads and node.args[0].target == encoder.target:
            return node
    first = next(node for node in encoder.graph.nodes if node.op == "get_attr" and node.target == encoder.target)
    with encoder.graph.inserting_after(first):
        return encoder.graph.call_function(all_heads, (first,))


def all_heads(encoder: torch.Tensor) -> torch.Tensor:
    """(H, W, N) -> (W, H*N)"""
    return encoder.transpose(0, 1).flatten(1)


def layer(x: torch.Tensor, weights: tuple, modules: tuple, kind: bdh.Kind) -> torch.Tensor:
    """One layer. weights: E, the same as one matrix, E', D; modules: attention, norm or None, dropout or None."""
    attention, norm, drop = modules
    encoder, one_matrix, encoder_v, decoder = weights
    if not _is_served(x, weights, modules, kind):
        sparse = F.relu(x @ encoder)
        mixed = attention(**dict(zip(kind.arguments, (sparse, sparse, x), strict=True)))
        gated = sparse * F.relu((mixed if norm is None else norm(mixed)) @ encoder_v)
        gated = gated if drop is None else drop(gated)
        return gated.transpose(1, 2).reshape(x.shape[0], 1, x.shape[2], -1) @ decoder
    drop = NO_DROPOUT if drop is None else drop
    latent = project(x[:, 0], one_matrix).unflatten(-1, (encoder.shape[0], -1)).transpose(1, 2)  # (B, H, T, N)
    cos, sin = bdh.tables_of(attention, kind.freqs, x)
    mixed = bdh_attention(latent, x, cos, sin, relu=True, causal=kind.causal, softmax=kind.softmax).transpose(1, 2)
    mixed = mixed if norm is None else norm(mixed)
    values = project_heads(mixed.flatten(0, 1), encoder_v).unflatten(0, mixed.shape[:2]).transpose(1, 2)
    # dropout's mask depends on the places of elements in (B, H, T, N), in whatever order they are in memory
    gated = sparse_gate(latent, values, p=float(drop.p), training=drop.training)
    return project(gated.transpose(1, 2).flatten(2), decoder)[:, None]


def _is_served(x, weights: tuple, modules: tuple, kind: bdh.Kind) -> bool:
    if x.dim() != 4 or x.shape[1] != 1 or type(x) is not torch.Tensor or _call.autocast_dtype(x) is not None:
        return False
    encoder, _, encoder_v, decoder = weights
    for weight in (encoder, encoder_v, decoder):  # wide: the layer's tensors are large whatever the batch is
        if not _call.is_served(weight) or weight.dtype is not x.dtype or weight.device != x.device:
            return False
    attention, norm, drop = modules
    kinds = {attention: _call.kind_of(attention), norm: nn.LayerNorm, drop: nn.Dropout}
    kinds.pop(None, None)
    if not _call.are_bypassed(list(kinds), list(kinds.values())) or not (drop is None or 0 <= drop.p < 1):
        return False
    return bdh.has_tables(attention, kind.freqs, encoder.shape[2], x)
