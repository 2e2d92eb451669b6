"""short_attention from its formula, masks included (see camox_ops.short_attention)."""

from __future__ import annotations

import math

import torch

from .dropout import dropout


def short_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_padding_mask: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    p: float = 0.0,
) -> torch.Tensor:
    """q, k, v (S, T, H, D), key_padding_mask (S, T) with True = ignore, seed one int64 number -> (S, T, H, D)."""
    scale = default_scale(q.shape[3]) if scale is None else scale
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    ignored = torch.zeros(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device)
    if causal:
        ignored = ~torch.ones_like(ignored).tril()
    if key_padding_mask is not None:
        ignored = ignored | key_padding_mask[:, None, None, :]
    nothing = ignored.all(dim=-1, keepdim=True)
    scores = (q @ k.transpose(2, 3) * scale).masked_fill(ignored & ~nothing, -math.inf)
    weights = dropout(scores.softmax(dim=-1).masked_fill(nothing, 0), seed, p)
    return (weights @ v).transpose(1, 2)


def default_scale(dim: int) -> float:
    return dim**-0.5 if dim else 1.0


def short_attention_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *arguments, **options
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients with respect to q, k and v."""
    _, pullback = torch.func.vjp(lambda q, k, v: short_attention(q, k, v, *arguments, **options), q, k, v)
    return pullback(grad)
