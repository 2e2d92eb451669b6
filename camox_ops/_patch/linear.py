"""Linear attention in tensor operations over (B, T, H, D), as LoFTR has it, -> camox_ops.linear_attention."""

from __future__ import annotations

import inspect
from typing import NamedTuple

import torch
from torch import nn

from ..ops.linear_attention import linear_attention
from . import _call, _proof
from ._recogniser import Planned, Recogniser

NAMES = {"elu", "feature_map", "einsum", "matmul"}
LARGEST_HEAD = 256


class Kind(NamedTuple):
    """feature_map and eps as of linear_attention."""

    feature_map: str
    eps: float


class LinearAttention(Recogniser):
    """A module without parameters, forward(q, k, v, ...) -> tensor, whose code names a product or a feature map."""

    name = "linear_attention"

    def is_candidate(self, module: nn.Module, planned: Planned) -> bool:
        if module._parameters or module._buffers or module._modules or type(module).__module__.startswith("torch."):
            return False
        code = getattr(type(module).forward, "__code__", None)
        if not NAMES & set(getattr(code, "co_names", ())):
            return False
        try:
            inspect.signature(type(module).forward).bind(module, None, None, None)
        except TypeError:
            return False
        return True

    def recognise(self, module: nn.Module, thorough: bool, planned: Planned) -> tuple[Kind, float]:
        numbers = [value for value in vars(module).values() if type(value) is float and 0 < value < 1e-2]

        def given(*shape) -> tuple:
            return tuple((_proof.values(shape) * factor).detach().requires_grad_() for factor in (1.0, 0.7, -1.3))

        def cases():
            # the last with keys so small that eps counts
            yield given(2, 7, 3, 4), {}
            yield given(1, 1, 1, 2), {}
            q, k, v = given(1, 5, 2, 3)
            yield (q, (k.detach() - 12).requires_grad_(), v), {}

        for settings in (Kind(f, e) for f in ("elu1", "relu") for e in dict.fromkeys((*numbers, 1e-6, 1e-15))):

            def fast(copy_of_module, *args, settings=settings):
                return self.compute(copy_of_module, settings, *args)

            try:
                error = _proof.compare64(module, type(module).forward, fast, cases, ("own",))
            except _proof.NotAlike:
                continue
            return settings, error
        raise _proof.OtherKind

    def serves(self, module: nn.Module, settings: Kind, args: tuple, kwargs: dict) -> bool:
        if len(args) < 3 or any(value is not None for value in (*args[3:], *kwargs.values())):
            return False
        q, k, v = args[:3]
        if not (_call.is_served(q) and _call.is_served(k) and _call.is_served(v)) or q.dim() != 4:
            return False
        if not q.shape == k.shape == v.shape or q.shape[3] > LARGEST_HEAD or q.numel() == 0:
            return False
        return q.dtype is k.dtype is v.dtype and _call.autocast_dtype(q) is None

    def compute(self, module: nn.Module, settings: Kind, q, k, v, *others, **nothing) -> torch.Tensor:
        y = linear_attention(q, k, v, feature_map=settings.feature_map, eps=settings.eps, layout="bthd")
        return y.contiguous()
