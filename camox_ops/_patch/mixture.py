"""A list of experts and a linear gate, each token through its top k, -> moe_route, moe_dispatch, moe_combine.

    logits = gate(x)      y[t] = sum over the k best experts e of  weight[t, e] * expert_e(x[t])

minimind's and Mixtral's. Experts are called as they are, each once, on its tokens in the order they have. Of experts
with equal logits those with the lower numbers are taken; which ones torch.topk takes is unspecified."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from ..ops.moe import moe_combine, moe_dispatch, moe_route
from . import _call, _proof
from ._recogniser import Planned, Recogniser
from ._wide import without_casts
from .blocks import Inner, inner_modules

MOST_EXPERTS = 64


class Choice(NamedTuple):
    """Names of inner modules; top_k and score as of moe_route; with_logits: (y, logits) comes back; idle: experts
    without a token are "skipped", get "zeros" for gradients in training, or are "called" on no rows. loss: the
    attribute that a loss of the load is left on, factor: what sum(tokens of an expert / tokens * its mean probability)
    is multiplied by in training; 0 in evaluation. inner: what has no parameters, such as a Softmax."""

    experts: str
    gate: str
    top_k: int
    score: str
    with_logits: bool
    idle: str
    loss: str | None
    factor: float
    inner: Inner


class TokenMixture(Recogniser):
    """The proof puts small linear layers in the experts' places: what they compute is their own matter."""

    name = "token_mixture"

    def is_candidate(self, module: nn.Module, planned: Planned) -> bool:
        return not module._parameters and not module._buffers and _roles(module) is not None

    def inner(self, module: nn.Module) -> list[tuple[str, nn.Module]]:
        return inner_modules(module, *_roles(module))

    def recognise(self, module: nn.Module, thorough: bool, planned: Planned) -> tuple[Choice, float]:
        experts, gate = _roles(module)
        count, width = len(module._modules[experts]), module._modules[gate].in_features
        small = _with_small_experts(module, experts, width)
        original = type(module).forward
        x = _proof.values((2, 9, width))
        form = self._form(small, experts, gate, original, x)

        def fast(copy_of_module, x):
            return _with_loss(lambda m, x: self.compute(m, settings, x), form.loss)(copy_of_module, x)

        for top_k in range(1, count + 1):
            for score in ("topk_softmax", "softmax_topk", "sigmoid_topk"):
                settings = form._replace(top_k=top_k, score=score)
                try:
                    with torch.no_grad():
                        ours = self.compute(copy.deepcopy(small).double().eval(), settings, x)
                        theirs = original(copy.deepcopy(small).double().eval(), x)
                except Exception:
                    raise _proof.OtherKind from None
                if form.with_logits:
                    ours, theirs = ours[0], theirs[0]
                if torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12):
                    break
            else:
                continue
            break
        else:
            raise _proof.OtherKind
        if any(isinstance(part, nn.Dropout) for _, part in self.inner(module)):  # its p of today may be 0
            raise _proof.NotAlike("it has a dropout of its own")
        calls = _calls_of_experts(small, experts, original, x[:1, :1])
        if any(len(shape) != 2 for shape in calls):
            raise _proof.NotAlike("its experts get all tokens, not rows of those that chose them")
        if form.loss is not None:
            settings = settings._replace(factor=_factor(small, original, self, settings, x))

        def cases() -> Iterator:
            yield (x,), {}
            if thorough:
                yield (_proof.values((1, 1, width)),), {}  # most experts have no token
                yield (3 * _proof.values((3, 17, width)),), {}

        compared = _with_loss(without_casts(original), form.loss)
        try:
            return settings, _proof.compare64(small, compared, fast, cases, ("own",))
        except _proof.NotAlike:
            idle_are_called = len(calls) == count > sum(shape[0] for shape in calls) == settings.top_k
            settings = settings._replace(idle="called" if idle_are_called else "zeros")
            return settings, _proof.compare64(small, compared, fast, cases, ("own",))

    def _form(self, small: nn.Module, experts: str, gate: str, original, x: torch.Tensor) -> Choice:
        side = copy.deepcopy(small).double().train()
        before = dict(vars(side))
        try:
            y = original(side, x)
        except Exception:
            raise _proof.OtherKind from None
        with_logits = isinstance(y, tuple)
        if with_logits and not (len(y) == 2 and isinstance(y[1], torch.Tensor) and y[1].dim() == 2):
            raise _proof.OtherKind
        y = y[0] if with_logits else y
        if not isinstance(y, torch.Tensor) or y.shape != x.shape:
            raise _proof.OtherKind
        left = [name for name, value in vars(side).items() if value is not before.get(name)]
        loss = left[0] if len(left) == 1 and isinstance(getattr(side, left[0]), torch.Tensor) else None
        inner = Inner.of(self.inner(side))
        return Choice(experts, gate, 1, "softmax_topk", with_logits, "skipped", loss, 0.0, inner)

    def serves(self, module: nn.Module, settings: Choice, args: tuple, kwargs: dict) -> bool:
        if len(args) != 1 or kwargs or torch.compiler.is_compiling() or not _call.is_served(args[0]):
            return False
        x, gate = args[0], module._modules[settings.gate]
        if settings.inner.names and not settings.inner.are_bypassed(module):
            return False
        if x.dim() < 2 or _call.autocast_dtype(x) is not None or _call.kind_of(gate) is not nn.Linear:
            return False
        if settings.loss is not None and x.dtype is not torch.float32:  # in which dtype a loss is kept differs
            return False
        return x.dtype is gate.weight.dtype and x.shape[-1] == gate.in_features

    def compute(self, module: nn.Module, settings: Choice, x: torch.Tensor):
        experts, gate = module._modules[settings.experts], module._modules[settings.gate]
        rows = x.reshape(-1, x.shape[-1])
        logits = gate(rows)
        if not logits.isfinite().all():  # moe_route refuses NaN
            return _call.original_forward(module)(module, x)
        routing = moe_route(logits, settings.top_k, score=settings.score)
        counts = routing.counts.tolist()
        parts = torch.unsafe_split_with_sizes(moe_dispatch(rows, routing), counts)
        called = settings.idle == "called"
        found = [expert(part) for expert, part in zip(experts, parts, strict=True) if called or part.shape[0]]
        y = moe_combine(torch.cat(found), routing, padded=False)
        if settings.idle == "zeros" and module.training and 0 in counts:
            idle = [p for expert, n in zip(experts, counts, strict=True) if not n for p in expert.parameters()]
            y = y + 0 * sum(p.sum() for p in idle)
        if settings.loss is not None:
            setattr(module, settings.loss, _loss(settings, module.training, logits, routing))
        y = y.view(x.shape)
        return (y, logits) if settings.with_logits else y


def _calls_of_experts(small: nn.Module, experts: str, original, x: torch.Tensor) -> list[torch.Size]:
    """The shapes that experts are called with."""
    side, shapes = copy.deepcopy(small).double().eval(), []
    for expert in side._modules[experts]:
        expert.register_forward_pre_hook(lambda _, args: shapes.append(args[0].shape))
    with torch.no_grad():
        without_casts(original)(side, x)
    return shapes


def _loss(settings: Choice, training: bool, logits: torch.Tensor, routing) -> torch.Tensor:
    if not training or settings.factor == 0:
        return logits.new_zeros(())
    load = routing.counts.to(logits.dtype) / logits.shape[0]
    return settings.factor * (load * logits.softmax(-1).mean(0)).sum()


def _factor(small: nn.Module, original, recogniser: TokenMixture, settings: Choice, x: torch.Tensor) -> float:
    """What the module's own loss is a multiple of; whether it is one is the proof's."""
    theirs, ours = (copy.deepcopy(small).double().train() for _ in range(2))
    with torch.no_grad():
        without_casts(original)(theirs, x)
        recogniser.compute(ours, settings._replace(factor=1.0), x)
    ratio = getattr(theirs, settings.loss) / getattr(ours, settings.loss)
    return float(f"{ratio.item():.7g}") if ratio.numel() == 1 else 0.0


def _with_loss(forward, name: str | None):
    """With what it leaves on the module among the outputs, so that it is compared."""

    def both(module, x):
        y = forward(module, x)
        return y if name is None else (y, getattr(module, name))

    return both


def _with_small_experts(module: nn.Module, experts: str, width: int) -> nn.Module:
    """A copy of the module, not of its experts."""
    light = copy.copy(module)
    light.__dict__ = {**module.__dict__, "_modules": dict(module._modules)}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        layers = [nn.Linear(width, width, device="cpu") for _ in module._modules[experts]]
    light._modules[experts] = nn.ModuleList(layers)
    return _proof.copied(light, torch.float64, "cpu")


def _roles(module: nn.Module) -> tuple[str, str] | None:
    """Names of the list and of the gate; nothing else has parameters."""
    lists, gates = [], []
    for name, part in module._modules.items():
        if isinstance(part, nn.ModuleList):
            lists.append(name)
        elif part is not None and _call.kind_of(part) is nn.Linear:
            gates.append(name)
        elif part is not None and (part._modules or part._parameters or part._buffers):
            return None
    if len(lists) != 1 or len(gates) != 1:
        return None
    count = len(module._modules[lists[0]])
    fits = 2 <= count <= MOST_EXPERTS and module._modules[gates[0]].out_features == count
    return (lists[0], gates[0]) if fits else None
