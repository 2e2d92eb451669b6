"""box_mean and structure_weight from their formulas (see camox_ops.box_mean)."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def box_mean(x: torch.Tensor, size: int | tuple[int, int], count_include_pad: bool = True) -> torch.Tensor:
    """The mean over a window of `size` pixels around each pixel of x (B, C, H, W) or (B, C, L)."""
    if x.numel() == 0:
        return x + 0
    if x.dim() == 3:
        return F.avg_pool1d(x, size, 1, size // 2, count_include_pad=count_include_pad)
    height, width = (size, size) if isinstance(size, int) else size
    return F.avg_pool2d(x, (height, width), 1, (height // 2, width // 2), count_include_pad=count_include_pad)


def box_mean_backward(grad: torch.Tensor, size: int | tuple[int, int], count_include_pad: bool = True) -> torch.Tensor:
    """The gradient of x: a window's gradient goes to each of its pixels, divided by what the window counts."""
    if grad.numel() == 0 or count_include_pad:
        return box_mean(grad, size)
    height, width = (size, size) if isinstance(size, int) else size
    inside = (1, size) if grad.dim() == 3 else (height, width)
    ones = torch.ones((1, 1, *([1] if grad.dim() == 3 else []), *grad.shape[2:]), dtype=grad.dtype, device=grad.device)
    pixels = inside[0] * inside[1]
    counts = (box_mean(ones, inside) * pixels).round()
    return box_mean(grad / (counts.squeeze(2) if grad.dim() == 3 else counts), size) * pixels


def structure_weight(mask: torch.Tensor, size: int = 31, gain: float = 5.0) -> torch.Tensor:
    """1 + gain |box_mean(mask, size) - mask|, without a gradient."""
    mask = mask.detach()
    return 1 + gain * (box_mean(mask, size) - mask).abs()
