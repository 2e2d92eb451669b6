"""Self-attention whose mask is added to the scores, with the linear layers before it and perhaps those after it.

    masked_attention   heads(W_q x), heads(W_k x), heads(W_v x) -> drop(softmax(q k^T / sqrt(D) + mask)) v
                       and, where the module has them, norm(drop(W mixed) + x)

That is BERT's and RecBole's. A mask of zeros and of numbers so low that their exponential is 0, or of bools where the
original takes them, goes to short_attention as padding and causality; any other mask, and more tokens than it takes,
are computed with the weights in memory."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from ..nn import temporal
from ..ops.dropout import dropout
from ..ops.short_attention import LONGEST, short_attention
from . import _call, _proof
from ._recogniser import Planned, Recogniser
from .blocks import NO_DROPOUT, Inner, Parts, arranged, have_probabilities, inner_modules, inner_of, parts_of

# exp(score + mask - largest score) is 0 in float64 where the mask is at most LOW and scores are at most LARGEST_SCORE.
LOW, LARGEST_SCORE = -9999.0, 4500.0


class Self(NamedTuple):
    """Names of inner modules: query, key, value and, where there is one, the layer after them, its dropout and norm.

    dropout, probability: the module that drops weights, or the attribute with its p, or neither. x, mask: names of the
    arguments; optional: whether the mask may be None; bools: whether it may be of bools, True where a key counts.
    ignored: arguments without effect. in_tuple: (y, None) comes back. implementation: which one the config named."""

    linears: tuple[str, ...]
    heads: int
    dropout: str | None
    probability: str | None
    last: str | None
    norm: str | None
    x: str
    mask: str
    optional: bool
    bools: bool
    implementation: object
    ignored: frozenset[str]
    in_tuple: bool
    inner: Inner


class MaskedAttention(Recogniser):
    """forward(x, mask, ...) with three linear layers of one shape, or four with a residual norm."""

    name = "masked_attention"

    def is_candidate(self, module: nn.Module, planned: Planned) -> bool:
        parts = parts_of(module)
        if parts is None or len(parts.linears) != 3 + len(parts.norms) or len(parts.norms) > 1:
            return False
        linears = [module._modules[name] for name in parts.linears]
        if len({(part.in_features, part.out_features) for part in linears[:3]}) > 1 or len(parts.dropouts) > 2:
            return False
        names = list(inspect.signature(type(module).forward).parameters)[1:]
        return len(names) >= 2 and bool(_heads(module, linears[0].out_features))

    def inner(self, module: nn.Module) -> list[tuple[str, nn.Module]]:
        return inner_modules(module)

    def recognise(self, module: nn.Module, thorough: bool, planned: Planned) -> tuple[Self, float]:
        parts = parts_of(module)
        width = module._modules[parts.linears[0]].in_features
        x, mask = _proof.values((2, 5, width)), _mask(2, 5, causal=True)
        form = self._without_dropout(module, parts, x, mask)
        numbers = [name for name, value in vars(module).items() if type(value) is float and 0 < value < 1]
        drops = [(None, None), *((name, None) for name in parts.dropouts), *((None, name) for name in numbers)]
        lasts = [None, *parts.dropouts] if parts.norms else [None]
        arrangements = [
            form._replace(dropout=drop, probability=probability, last=last)
            for (drop, probability), last in itertools.product(drops, lasts)
        ]
        settings = arranged(module, parts, arrangements, self.compute, (x, mask))

        def fast(copy_of_module, *args):
            return self.compute(copy_of_module, settings, *args)

        def cases() -> Iterator:
            if settings.optional:
                yield (_proof.values((2, 3, width)), None), {}
            yield (_proof.values((3, 7, width)), _mask(3, 7, causal=False)), {}
            yield (_proof.values((2, 6, width)), _proof.values((2, 1, 1, 6)).detach()), {}
            if settings.bools:
                yield (_proof.values((3, 7, width)), _mask(3, 7, causal=False) == 0), {}
                yield (_proof.values((2, 6, width)), _mask(2, 6, causal=True).flip(-1) == 0), {}  # no padding
            yield (_proof.values((1, LONGEST + 3, width)), _mask(1, LONGEST + 3, causal=True)), {}

        if not thorough:
            return settings, 0.0
        return settings, _proof.compare64(module, type(module).forward, fast, cases, ("own",))

    def _without_dropout(self, module: nn.Module, parts: Parts, x: torch.Tensor, mask: torch.Tensor) -> Self:
        """In evaluation mode: the order of the linear layers, the number of heads, what is returned."""
        base = _proof.copied(module, torch.float64, "cpu").eval()
        original = type(base).forward
        x_name, mask_name, *others = list(inspect.signature(original).parameters)[1:]
        try:
            with torch.no_grad():
                y = original(base, x, mask)
        except Exception:
            raise _proof.OtherKind from None
        in_tuple = isinstance(y, tuple)
        if in_tuple and (len(y) != 2 or y[1] is not None):
            raise _proof.OtherKind
        norm, inner = parts.norms[0] if parts.norms else None, inner_of(module)
        chosen = _implementation(module)
        names = x_name, mask_name
        form = Self((), 0, None, None, None, norm, *names, False, False, chosen, frozenset(), in_tuple, inner)
        y = y[0] if in_tuple else y
        for order in itertools.permutations(parts.linears):
            shapes = [base._modules[name].weight.shape for name in order]
            if len(set(shapes[:3])) > 1 or (norm is not None and shapes[3] != shapes[0][::-1]):
                continue
            for heads in _heads(module, shapes[0][0]):
                settings = form._replace(linears=order, heads=heads)
                if self._gives(base, settings, x, mask, y):
                    optional, bools = (self._takes(base, settings, x, given) for given in (None, mask == 0))
                    ignored = _ignored(base, others, x, mask, y)
                    return settings._replace(optional=optional, bools=bools, ignored=ignored)
        raise _proof.OtherKind

    def _gives(self, base: nn.Module, settings: Self, x, mask: torch.Tensor | None, y: torch.Tensor) -> bool:
        with torch.no_grad():
            ours = self.compute(base, settings, x, mask)
        ours = ours[0] if settings.in_tuple else ours
        return y.shape == ours.shape and torch.allclose(y, ours, rtol=1e-9, atol=1e-9)

    def _takes(self, base: nn.Module, settings: Self, x, mask: torch.Tensor | None) -> bool:
        """Whether such a mask means to the original what it does here: some are causal where they get none."""
        try:
            with torch.no_grad():
                y = type(base).forward(base, x, mask)
        except Exception:
            return False
        y = y[0] if isinstance(y, tuple) else y
        return isinstance(y, torch.Tensor) and self._gives(base, settings, x, mask, y)

    def serves(self, module: nn.Module, settings: Self, args: tuple, kwargs: dict) -> bool:
        args, kwargs = _by_position(settings, args, kwargs)
        if not args or len(args) > 2 or not settings.inner.are_bypassed(module) or torch.compiler.is_compiling():
            return False
        x = args[0]
        if not _call.is_served(x) or x.dim() != 3 or 0 in x.shape or _call.autocast_dtype(x) is not None:
            return False
        for name, value in kwargs.items():
            if value is None or value is False or name == settings.mask:
                continue
            if name not in settings.ignored or type(value) is not torch.Tensor or value.shape != x.shape[1:2]:
                return False
        mask = args[1] if len(args) == 2 else kwargs.get(settings.mask)
        if not (settings.optional if mask is None else _is_mask(mask, x, settings.bools)):
            return False
        if _implementation(module) != settings.implementation:
            return False
        if not have_probabilities(module, settings.dropout, settings.last):
            return False
        p, training = _dropped(module, settings)
        if (type(p) is not float and type(p) is not int) or not 0 <= p < 1:
            return False
        linears = [module._modules[name] for name in settings.linears]
        if any(part.weight.dtype is not x.dtype for part in linears):
            return False
        return x.shape[1] <= LONGEST or (p > 0 and training)

    def compute(self, module: nn.Module, settings: Self, *args, **kwargs):
        (x, *args), kwargs = _by_position(settings, args, kwargs)
        mask = args[0] if args else kwargs.get(settings.mask)
        own = module._modules
        first = [own[name] for name in settings.linears[:3]]
        q, k, v = (F.linear(x, part.weight, part.bias).unflatten(-1, (settings.heads, -1)) for part in first)
        p, training = _dropped(module, settings)
        found = _padding(mask, q, k) if x.shape[1] <= LONGEST else None
        if found is not None:
            padding, causal = found
            mixed = short_attention(q, k, v, key_padding_mask=padding, causal=causal, p=float(p), training=training)
        else:
            mixed = _with_weights(q, k, v, mask, float(p), training)
        y = mixed.flatten(2)
        if settings.norm is not None:
            dense = own[settings.linears[3]]
            last = NO_DROPOUT if settings.last is None else own[settings.last]
            y = temporal._add_norm(own[settings.norm], F.linear(y, dense.weight, dense.bias), x, last)
        return (y, None) if settings.in_tuple else y


def _by_position(settings: Self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments with the input before all others, where it is the first keyword."""
    if args or next(iter(kwargs), None) != settings.x:
        return args, kwargs
    others = dict(kwargs)
    return (others.pop(settings.x),), others


def _with_weights(q, k, v, mask: torch.Tensor | None, p: float, training: bool) -> torch.Tensor:
    """(B, T, H, D), the weights of all heads in memory."""
    q, k, v = (part.transpose(1, 2) for part in (q * q.shape[-1] ** -0.5, k, v))
    scores = q @ k.transpose(-2, -1)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask
    return (dropout(scores.softmax(-1), p, training=training) @ v).transpose(1, 2)


def _padding(mask: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor | None, bool] | None:
    """The mask as (keys that do not count, causal); None: it is something else, or some token has no key."""
    if mask is None:
        return None, False
    open_ = mask if mask.dtype is torch.bool else mask == 0
    if mask.dtype is not torch.bool and not (
        bool((open_ | (mask <= LOW)).all()) and _largest_score(q, k) <= LARGEST_SCORE
    ):
        return None
    open_ = open_[:, 0]
    keys, causal = open_[:, -1], False
    if not bool(keys.any(-1).all()):
        return None
    if open_.shape[1] > 1:
        tokens = open_.shape[1]
        lower = torch.ones(tokens, tokens, dtype=torch.bool, device=mask.device).tril()
        causal = tokens > 1 and not bool(open_[:, 0].eq(keys).all())
        if causal and not bool(keys[:, 0].all()):
            return None
        if not torch.equal(open_, (keys[:, None] & lower if causal else keys[:, None].expand_as(open_))):
            return None
    return ~keys.expand(q.shape[0], -1), causal


def _largest_score(q: torch.Tensor, k: torch.Tensor) -> float:
    """No smaller than any |q . k| / sqrt(D)."""
    with torch.no_grad():
        lengths = [part.detach().abs().amax().double() for part in (q, k)]
        return (lengths[0] * lengths[1] * math.sqrt(q.shape[-1])).item()


def _is_mask(mask, x: torch.Tensor, bools: bool) -> bool:
    """Reads its values, for which a GPU would have to be waited for."""
    if type(mask) is not torch.Tensor or mask.requires_grad or not (mask.is_cpu and x.is_cpu) or mask.dim() != 4:
        return False
    batch, tokens = x.shape[:2]
    is_bool = bools and mask.dtype is torch.bool
    if not (is_bool or mask.dtype is x.dtype) or mask.shape[0] not in (1, batch) or mask.shape[1] != 1:
        return False
    # A token that sees no key at all is NaN in one original and zeros in another.
    closed = ~mask if is_bool else mask == -math.inf
    return mask.shape[2:] in ((1, tokens), (tokens, tokens)) and not bool(closed.all(-1).any())


def _implementation(module: nn.Module):
    """transformers' attentions ask their config on each call which function they run, and whether weights come back."""
    return getattr(getattr(module, "config", None), "_attn_implementation", None)


def _dropped(module: nn.Module, settings: Self) -> tuple:
    """p of the weights, and whether they are dropped."""
    if settings.dropout is not None:
        part = module._modules[settings.dropout]
        return part.p, part.training
    return (0.0 if settings.probability is None else getattr(module, settings.probability)), module.training


def _heads(module: nn.Module, width: int) -> list[int]:
    found = [value for value in vars(module).values() if type(value) is int and 0 < value <= width]
    return [value for value in dict.fromkeys(found) if width % value == 0]


def _mask(batch: int, tokens: int, causal: bool) -> torch.Tensor:
    """RecBole's and BERT's: -10000 where a key does not count."""
    hidden = torch.zeros(batch, 1, tokens if causal else 1, tokens, dtype=torch.bool, device="cpu")
    hidden[-1, ..., -1] = True  # a key of padding
    if causal:
        hidden |= torch.ones(tokens, tokens, dtype=torch.bool, device="cpu").triu(1)
    return torch.zeros(hidden.shape, dtype=torch.float64, device="cpu").masked_fill(hidden, -10000.0)


def _ignored(base: nn.Module, names: list[str], x, mask, y: torch.Tensor) -> frozenset[str]:
    """Arguments that may be a number for each token, whichever, without any effect."""
    numbers = torch.arange(x.shape[1], device="cpu")
    given = itertools.product(names, (numbers, numbers.flip(0) + 3, torch.zeros_like(numbers)))
    changed = {name for name, value in given if not _without_effect(base, name, value, x, mask, y)}
    return frozenset(names) - changed


def _without_effect(base: nn.Module, name: str, value: torch.Tensor, x, mask, y: torch.Tensor) -> bool:
    try:
        with torch.no_grad():
            other = type(base).forward(base, x, mask, **{name: value})
    except Exception:
        return False
    other = other[0] if isinstance(other, tuple) else other
    return isinstance(other, torch.Tensor) and torch.equal(other, y)
