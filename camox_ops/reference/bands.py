"""frequency_bands from its formula (see camox_ops.frequency_bands)."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def box(x: torch.Tensor, size: int) -> torch.Tensor:
    """Mean over size * size pixels of (B, C, H, W), zeros outside the image counted."""
    return F.avg_pool2d(x, size, stride=1, padding=size // 2)


def frequency_bands(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x (B, C, H, W) -> low, mid, high, each (B, C, H, W)."""
    if x.numel() == 0:
        return x + 0, x + 0, x + 0
    low = box(x, 3)
    return low, low - box(x, 5), x - low


def frequency_bands_backward(
    grad_low: torch.Tensor | None,
    grad_mid: torch.Tensor | None,
    grad_high: torch.Tensor | None,
    grad_input: torch.Tensor | None,
) -> torch.Tensor:
    """The gradient with respect to x of whichever gradients are given, at least one; linear in each of them."""
    given = [g for g in (grad_low, grad_mid, grad_high, grad_input) if g is not None]
    low, mid, high, rest = (
        torch.zeros_like(given[0]) if g is None else g for g in (grad_low, grad_mid, grad_high, grad_input)
    )
    if rest.numel() == 0:
        return rest + 0
    return box(low + mid - high, 3) - box(mid, 5) + high + rest
