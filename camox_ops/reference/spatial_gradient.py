"""spatial_gradient from its formula (see camox_ops.spatial_gradient)."""

from __future__ import annotations

import torch

from .edge import correlate, pad_border

WEIGHTS = {"sobel": (1.0, 2.0), "scharr": (3.0, 10.0)}


def spatial_gradient(
    x: torch.Tensor, operator: str = "sobel", border: str = "zeros", normalized: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """x (B, C, H, W) -> gx, gy, each (B, C, H, W)."""
    if x.numel() == 0:
        return x + 0, x + 0
    side, middle = WEIGHTS[operator]
    if normalized:
        total = 4 * side + 2 * middle
        side, middle = side / total, middle / total
    padded = pad_border(x, border)
    gx = correlate(padded, ((-side, 0, side), (-middle, 0, middle), (-side, 0, side)))
    return gx, correlate(padded, ((-side, -middle, -side), (0, 0, 0), (side, middle, side)))


def spatial_gradient_backward(
    grad_gx: torch.Tensor | None,
    grad_gy: torch.Tensor | None,
    operator: str = "sobel",
    border: str = "zeros",
    normalized: bool = False,
) -> torch.Tensor:
    """The gradient with respect to x of whichever gradients are given, at least one; linear in each of them."""
    like = grad_gy if grad_gx is None else grad_gx
    grads = tuple(torch.zeros_like(like) if g is None else g for g in (grad_gx, grad_gy))
    _, pullback = torch.func.vjp(lambda x: spatial_gradient(x, operator, border, normalized), torch.zeros_like(like))
    return pullback(grads)[0]
