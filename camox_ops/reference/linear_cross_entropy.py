"""linear_cross_entropy from its formula (see camox_ops.linear_cross_entropy)."""

from __future__ import annotations

import torch


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """x (R, D), weight (V, D), target (R,), bias (V,) -> a number or (R,), computed in float32 or float64."""
    real = torch.promote_types(x.dtype, torch.float32)
    logits = x.to(real) @ weight.to(real).T
    if bias is not None:
        logits = logits + bias.to(real)
    counted = target != ignore_index
    lse = logits.logsumexp(1)
    if logits.shape[1] == 0:  # no class: every row is ignored
        loss = lse
    else:
        loss = lse - (1 - label_smoothing) * logits.gather(1, target.where(counted, 0)[:, None])[:, 0]
        if label_smoothing > 0:
            loss = loss - label_smoothing * logits.mean(1)
    loss = loss.where(counted, 0)
    if reduction == "none":
        return loss
    return loss.sum() / counted.sum() if reduction == "mean" else loss.sum()
