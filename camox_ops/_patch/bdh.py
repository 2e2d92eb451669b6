"""BDH's attention, whose keys are its queries, -> camox_ops.bdh_attention.

rotate Q by the frequencies;  Q Q^T [strictly causal | softmax];  times V"""

from __future__ import annotations

import inspect
import weakref
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import nn

from ..nn import bdh
from ..ops.bdh import bdh_attention
from . import _call, _proof
from ._recogniser import Planned, Recogniser

_NOTHING = object()
# Tables of cosines and sines that were made for a module; not on it, so that its attributes stay what they are.
_kept: weakref.WeakKeyDictionary[nn.Module, SimpleNamespace] = weakref.WeakKeyDictionary()


class Kind(NamedTuple):
    """freqs: name of the buffer or parameter with turns per position; arguments: names that forward has for Q, K, V."""

    freqs: str
    arguments: tuple[str, str, str]
    causal: bool
    softmax: bool


class BDHAttention(Recogniser):
    """One tensor (1, 1, 1, N) that is not trained, and forward(Q, K, V)."""

    name = "bdh_attention"

    def is_candidate(self, module: nn.Module, planned: Planned) -> bool:
        return has_frequencies(module)

    def widened(self, copy_of_module: nn.Module) -> nn.Module:
        return widened(copy_of_module)

    def recognise(self, module: nn.Module, thorough: bool, planned: Planned) -> tuple[Kind, float]:
        ((name, freqs),) = tensors_of(module).items()
        inputs = [_inputs(*shape, freqs.numel()) for shape in ((2, 2, 5, 1, 3), (1, 3, 7, 3, 4), (1, 1, 1, 1, 2))]

        def original(copy_of_module, q, v):
            return type(module).forward(copy_of_module, q, q, v)

        arguments = tuple(inspect.signature(type(module).forward).parameters)[1:4]
        for settings in (
            Kind(name, arguments, causal, softmax) for causal in (True, False) for softmax in (False, True)
        ):

            def fast(copy_of_module, q, v, settings=settings):
                return self.compute(copy_of_module, settings, q, q, v)

            def cases():
                return ((pair, {}) for pair in inputs)

            try:  # the frequencies keep their dtype, which some classes insist on
                error = _proof.compare64(module, original, fast, cases, ("own",), allowed=1e-6, dtype=None)
            except _proof.NotAlike:
                continue
            return settings, error
        raise _proof.OtherKind

    def serves(self, module: nn.Module, settings: Kind, args: tuple, kwargs: dict) -> bool:
        q, k, v = _bound(settings, args, kwargs)
        if k is not q:
            return False
        if not _call.is_served(q) or q.dim() != 4 or not has_tables(module, settings.freqs, q.shape[3], q):
            return False
        if not isinstance(v, torch.Tensor) or v.dim() != 4 or v.dtype is not q.dtype or v.device != q.device:
            return False
        return v.shape[0] == q.shape[0] and v.shape[2] == q.shape[2] and v.shape[1] in (1, q.shape[1])

    def compute(self, module: nn.Module, settings: Kind, *args, **kwargs) -> torch.Tensor:
        q, _, v = _bound(settings, args, kwargs)
        cos, sin = tables_of(module, settings.freqs, q)
        return bdh_attention(q, v, cos, sin, relu=False, causal=settings.causal, softmax=settings.softmax)


def has_frequencies(module: nn.Module) -> bool:
    """Whether a module consists of one tensor (1, 1, 1, N) that is not trained, and takes three arguments."""
    tensors = tensors_of(module)
    if any(True for _ in module.children()) or len(tensors) != 1:
        return False
    ((_, freqs),) = tensors.items()
    size = freqs.shape[-1] if freqs.dim() else 0
    if freqs.requires_grad or not freqs.is_floating_point() or size != freqs.numel() or size < 2 or size % 2:
        return False
    try:
        inspect.signature(type(module).forward).bind(module, None, None, None)
    except TypeError:
        return False
    return True


def _bound(settings: Kind, args: tuple, kwargs: dict) -> tuple:
    """Q, K and V; where the call has other arguments a K that is not Q."""
    names = settings.arguments[len(args) :]
    if len(args) + len(names) != 3 or set(kwargs) != set(names):
        return None, _NOTHING, None
    return *args, *(kwargs[name] for name in names)


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: t for name, t in (*module._parameters.items(), *module._buffers.items()) if t is not None}


def has_tables(module: nn.Module, name: str, size: int, x: torch.Tensor) -> bool:
    """Whether the frequencies of an attention are what the op takes beside x."""
    freqs = tensors_of(module).get(name)
    if freqs is None or freqs.requires_grad or freqs.dtype is not torch.float32:
        return False
    return freqs.numel() == size and freqs.device == x.device


def tables_of(module: nn.Module, name: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the attention's frequencies for the positions of x (B, H, T, N)."""
    cos, sin = _tables(module, tensors_of(module)[name], x.shape[2])
    return (cos.double(), sin.double()) if x.dtype is torch.float64 else (cos, sin)


def _tables(module: nn.Module, freqs: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    if torch.compiler.is_compiling():
        return bdh._tables(freqs.flatten(), length)
    kept = _kept.get(module)
    if kept is None:
        kept = _kept[module] = SimpleNamespace(_cached=None)
    kept.freqs = freqs
    return bdh.BidirectionalBDHAttention.tables(kept, length)


def widened(copy_of_module: nn.Module) -> nn.Module:
    """In float64, except frequencies: some classes insist on their dtype."""
    kept = [(part, dict(tensors_of(part))) for part in copy_of_module.modules() if has_frequencies(part)]
    kept = [(part, {name: tensor.detach().clone() for name, tensor in tensors.items()}) for part, tensors in kept]
    copy_of_module.double()
    for part, tensors in kept:
        for name, tensor in tensors.items():
            if name in part._parameters:
                part._parameters[name] = nn.Parameter(tensor, requires_grad=False)
            else:
                part._buffers[name] = tensor
    return copy_of_module


def _inputs(batch: int, heads: int, length: int, value_heads: int, width: int, size: int) -> tuple:
    return _proof.values((batch, heads, length, size)), _proof.values((batch, value_heads, length, width))
