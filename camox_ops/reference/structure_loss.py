"""structure_loss from its formula (see camox_ops.structure_loss)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .box import structure_weight


def structure_loss(
    logits: torch.Tensor,
    mask: torch.Tensor,
    weight: torch.Tensor | None = None,
    size: int = 31,
    gain: float = 5.0,
    bce: str = "weighted",
    smooth: float = 1.0,
    probabilities: bool = False,
    reduction: str = "mean",
) -> torch.Tensor:
    """logits, mask and weight (B, C, H, W) -> the loss, computed in float32 or float64; no gradient to the last two."""
    real = torch.promote_types(logits.dtype, torch.float32)
    logits, mask = logits.to(real), mask.detach().to(real)
    weight = structure_weight(mask, size, gain) if weight is None else weight.detach().to(real)
    cross_entropy = F.binary_cross_entropy if probabilities else F.binary_cross_entropy_with_logits
    entropy = cross_entropy(logits, mask, reduction="none")
    p = logits if probabilities else logits.sigmoid()
    inter, union = (p * mask * weight).sum((2, 3)), ((p + mask) * weight).sum((2, 3))
    iou = 1 - (inter + smooth) / (union - inter + smooth)
    entropy = (weight * entropy).sum((2, 3)) / weight.sum((2, 3)) if bce == "weighted" else entropy.mean()
    loss = entropy + iou
    return loss if reduction == "none" else getattr(loss, reduction)()
