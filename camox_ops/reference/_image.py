"""What the formulas of ops on images share."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .edge import pad_border


class Neighbours(NamedTuple):
    """Every pixel's neighbours and the pixel itself, m, in tensors of the image's shape: top left, top, ..."""

    tl: torch.Tensor
    t: torch.Tensor
    tr: torch.Tensor
    l: torch.Tensor  # noqa: E741
    m: torch.Tensor
    r: torch.Tensor
    bl: torch.Tensor
    b: torch.Tensor
    br: torch.Tensor


def neighbours(x: torch.Tensor, border: str) -> Neighbours:
    """Of x (B, C, H, W), extended by one pixel as `border` says."""
    if x.numel() == 0:
        return Neighbours(*(x + 0 for _ in range(9)))
    height, width = x.shape[2:]
    padded = pad_border(x, border)
    return Neighbours(*(padded[..., i : i + height, j : j + width] for i in range(3) for j in range(3)))
