"""bdh_attention and its step from their formulas (see camox_ops.bdh_attention)."""

from __future__ import annotations

import torch

from .rope import rope


def bdh_attention(
    q: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    relu: bool = True,
    causal: bool = False,
    softmax: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """q (B, H, T, N), v (B, 1 or H, T, D), tables (>= T, N/2 or N) -> (B, H, T, D)."""
    rotated = rope(q.relu() if relu else q, cos, sin, interleaved=True)
    scores = rotated @ rotated.mT
    if scale is None:
        scale = q.shape[-1] ** -0.5 if softmax else 1
    if scale != 1:
        scores = scores * scale
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu()
        scores = scores.masked_fill(later, -torch.inf if softmax else 0)
    if softmax:
        scores = scores.softmax(-1)
        if causal:  # row 0 has no keys
            scores = torch.cat([torch.zeros_like(scores[..., :1, :]), scores[..., 1:, :]], dim=-2)
    return scores @ v


def bdh_attention_backward(
    grad: torch.Tensor, q: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, **arguments
) -> tuple[torch.Tensor, ...]:
    """The gradients with respect to q, v, cos and sin."""
    _, pullback = torch.func.vjp(lambda *tensors: bdh_attention(*tensors, **arguments), q, v, cos, sin)
    return pullback(grad)


def bdh_attention_step(
    q: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    state: torch.Tensor | None,
    *,
    relu: bool = True,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q (B, H, N), v (B, 1 or H, D), tables (N/2,) or (N,), state (B, H, N, D) or None -> (out (B, H, D), state)."""
    q, v = q.unsqueeze(2), v.unsqueeze(2)
    rotated = rope(q.relu() if relu else q, cos[None], sin[None], interleaved=True)
    if state is None:
        real = torch.float64 if q.dtype == torch.float64 else torch.float32
        state = rotated.new_zeros((*q.shape[:2], q.shape[-1], v.shape[-1]), dtype=real)
    rotated, values = rotated.to(state.dtype), v.to(state.dtype)
    out = (rotated @ state).squeeze(2)
    if scale is not None:
        out = out * scale
    return out.to(v.dtype), state + rotated.mT * values
