"""Experts whose matrices are two tensors, each row through those that it was sent to -> moe_routing and TokenMoE's
experts: grouped products of rows that are sorted by expert.

    y[t] = sum over k of  weight[t, k] * (silu(a) * b) @ w_out[e]      a, b = halves of x[t] @ w_in[e]
                                                                       e = index[t, k]

transformers' since its version 5. An index one past the last expert may mean that another process has that expert."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from ..nn.token_moe import grouped_product_serves, run_experts
from ..ops._check import DTYPES
from ..ops.moe import MOST_EXPERTS, Routing, moe_routing
from . import _call, _proof
from ._recogniser import Planned, Recogniser
from ._wide import with_grouped_products
from .blocks import Inner, inner_modules

# Of the copies that the proof runs: rows of D, and H hidden; multiples of what torch's grouped product asks for.
D, H = 24, 8
# With fewer rows for each expert, on average, as while a model writes, PyTorch's products are faster: against torch's
# grouped product forwards of 16 to 64 experts took 0.9 to 1.5 times as long with 1, 0.6 to 1.1 times with 2 and 0.7 to
# 0.9 times with 4 (one thread).
ROWS_OF_EXPERT = 4


class Form(NamedTuple):
    """w_in, w_out: names of the tensors. outputs_first: they are (E, 2H, D) and (E, D, H), as nn.Linear has its own,
    not (E, D, 2H) and (E, H, D). casts: whether autocast holds for the products; None: the original runs under it.
    skips: whether a slot whose index is E adds nothing; else such a call is the original's. implementation: which one
    the module's config named."""

    w_in: str
    w_out: str
    outputs_first: bool
    casts: bool | None
    skips: bool
    implementation: object
    inner: Inner


class ExpertTensors(Recogniser):
    """The proof runs on a copy with smaller tensors of as many experts: those of one layer can be gigabytes."""

    name = "expert_tensors"

    def is_candidate(self, module: nn.Module, planned: Planned) -> bool:
        parts = [part for part in module._modules.values() if part is not None]
        if module._buffers or any(part._parameters or part._buffers or part._modules for part in parts):
            return False
        return _roles(module) is not None

    def inner(self, module: nn.Module) -> list[tuple[str, nn.Module]]:
        return inner_modules(module)

    def recognise(self, module: nn.Module, thorough: bool, planned: Planned) -> tuple[Form, float]:
        settings = Form(*_roles(module), False, False, _implementation(module), Inner.of(self.inner(module)))
        count = len(module._parameters[settings.w_in])
        if not _multiplies_without_waiting(module, settings):
            raise _proof.NotAlike("on a GPU only bfloat16 in sizes of multiples of 8 does not wait for the host")
        small = _with_small_tensors(module, settings, count)
        original = with_grouped_products(type(module).forward)

        def fast(copy_of_module, *args):
            return self.compute(copy_of_module, settings, *args)

        def cases() -> Iterator:
            yield _given(12, min(2, count), count), {}
            if thorough:
                yield _given(1, 1, count), {}  # most experts have no row
                x, index, weights = _given(9, min(3, count), count)
                yield (1e4 * x, index[:, :1].expand_as(index), weights), {}  # one expert several times; no limits

        def with_others() -> Iterator:
            x, index, weights = _given(7, min(2, count), count)
            yield (x, index.index_fill(0, torch.tensor([1, 4], device="cpu"), count), weights), {}

        error = _proof.compare64(small, original, fast, cases, (1,))
        with contextlib.suppress(_proof.NotAlike):
            _proof.compare64(small, original, fast, with_others, (1,), modes=(True,))
            settings = settings._replace(skips=True)
        return settings._replace(casts=_casts(small, type(module).forward, next(cases())[0])), error

    def serves(self, module: nn.Module, settings: Form, args: tuple, kwargs: dict) -> bool:
        if len(args) != 3 or kwargs or torch.compiler.is_compiling() or not _call.is_served(args[0]):
            return False
        x, index, weights = args
        w_in, w_out = (module._parameters.get(name) for name in (settings.w_in, settings.w_out))
        tensors = index, weights, w_in, w_out
        if any(type(tensor) not in _call.PLAIN or tensor.device != x.device for tensor in tensors):
            return False
        if index.dtype is not torch.int64 or weights.dtype not in DTYPES or w_in.dtype is not w_out.dtype:
            return False
        count, width = w_in.shape[0], w_in.shape[2 if settings.outputs_first else 1]
        if index.dim() != 2 or index.shape != weights.shape or x.shape != (len(index), width):
            return False
        if not 1 <= index.shape[1] <= count or index.numel() < ROWS_OF_EXPERT * count:
            return False
        if _call.autocast_dtype(x) is None:
            if x.dtype is not w_in.dtype:
                return False
        elif settings.casts is None or torch.float64 in (x.dtype, w_in.dtype):
            return False
        if _implementation(module) != settings.implementation or not settings.inner.are_bypassed(module):
            return False
        if x.is_cuda:
            return _multiplies_without_waiting(module, settings)
        least, most = index.aminmax()
        return bool(least >= 0 and most < count + settings.skips)

    def compute(self, module: nn.Module, settings: Form, x, index, weights) -> torch.Tensor:
        w_in, w_out = module._parameters[settings.w_in], module._parameters[settings.w_out]
        routing = _routing(weights, index, w_in.shape[0])
        if settings.outputs_first:
            w_in, w_out = w_in.mT, w_out.mT
        if settings.casts:
            return run_experts(x, routing, w_in, w_out, "swiglu").to(x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            return run_experts(x.to(w_in.dtype), routing, w_in, w_out, "swiglu").to(x.dtype)

    def exact(self, original):
        return with_grouped_products(original)


def _routing(weights: torch.Tensor, index: torch.Tensor, count: int) -> Routing:
    """Slots of index `count` have no copy: sorted as those of one more expert, they lie after all others."""
    routing = moe_routing(weights, index, count + 1)
    absent = index == count
    return routing._replace(
        weights=routing.weights.masked_fill(absent, 0),
        counts=routing.counts[:count],
        offsets=routing.offsets[: count + 1],
        order=routing.order.masked_fill(absent.flatten()[routing.order], -1),
        position=routing.position.masked_fill(absent.flatten(), -1),
        num_experts=count,
    )


def _roles(module: nn.Module) -> tuple[str, str, bool] | None:
    """Names of the tensors, and whether outputs are their first dimension after the experts'; each has one meaning."""
    tensors = list(module._parameters.items())
    if len(tensors) != 2 or any(tensor is None or tensor.dim() != 3 or 0 in tensor.shape for _, tensor in tensors):
        return None
    for (first, a), (second, b) in (tensors, tensors[::-1]):
        if a.shape[0] == b.shape[0] < MOST_EXPERTS:
            if a.shape[1] == 2 * b.shape[2] and a.shape[2] == b.shape[1]:
                return first, second, True
            if a.shape[2] == 2 * b.shape[1] and a.shape[1] == b.shape[2]:
                return first, second, False
    return None


def _implementation(module: nn.Module):
    """transformers' experts ask their config on each call which forward they run."""
    return getattr(getattr(module, "config", None), "_experts_implementation", None)


def _multiplies_without_waiting(module: nn.Module, settings: Form) -> bool:
    w_in, w_out = module._parameters[settings.w_in], module._parameters[settings.w_out]
    return not w_in.is_cuda or all(grouped_product_serves(w.dtype, w.shape[1:]) for w in (w_in, w_out))


def _given(rows: int, top_k: int, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, index and weights."""
    generator = torch.Generator().manual_seed(rows)
    index = torch.randint(count, (rows, top_k), generator=generator, device="cpu")
    return _proof.values((rows, D)), index, _proof.values((rows, top_k))


def _with_small_tensors(module: nn.Module, settings: Form, count: int) -> nn.Module:
    """A copy in float64 of all but the tensors; what is in those is drawn later."""
    shapes = {settings.w_in: (count, D, 2 * H), settings.w_out: (count, H, D)}
    light = copy.copy(module)
    tensors = {name: torch.zeros(shape, dtype=torch.float64, device="cpu") for name, shape in shapes.items()}
    if settings.outputs_first:
        tensors = {name: tensor.mT.contiguous() for name, tensor in tensors.items()}
    light.__dict__ = {**module.__dict__, "_parameters": {name: nn.Parameter(t) for name, t in tensors.items()}}
    return _proof.copied(light)


def _casts(small: nn.Module, original, args: tuple) -> bool | None:
    side = _proof.randomised(_proof.copied(small, torch.float32), 1)
    x, index, weights = args
    args = x.float(), index, weights.float()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        try:
            y = original(side, *args)
        except RuntimeError:  # where a sum has another dtype than its terms
            return None
        with torch.autocast("cpu", enabled=False):
            plain = original(side, *args)
    return None if y.dtype is not plain.dtype else not torch.allclose(y, plain, rtol=1e-4, atol=1e-4)
