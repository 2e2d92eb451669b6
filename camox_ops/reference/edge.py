"""edge_maps from its formula (see camox_ops.edge_maps)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

SOBEL_X = ((-1, 0, 1), (-2, 0, 2), (-1, 0, 1))
SOBEL_Y = ((-1, -2, -1), (0, 0, 0), (1, 2, 1))
LAPLACIAN = ((0, 1, 0), (1, -4, 1), (0, 1, 0))


def pad_border(x: torch.Tensor, border: str) -> torch.Tensor:
    return F.pad(x, (1, 1, 1, 1)) if border == "zeros" else F.pad(x, (1, 1, 1, 1), mode=border)


def correlate(padded: torch.Tensor, kernel) -> torch.Tensor:
    """Cross-correlation of every channel of an already padded (B, C, H+2, W+2) image with one 3x3 kernel."""
    channels = padded.shape[1]
    weight = torch.tensor(kernel, dtype=padded.dtype, device=padded.device)
    return F.conv2d(padded, weight.expand(channels, 1, 3, 3), groups=channels)


def edge_maps(
    x: torch.Tensor, eps: float = 1e-8, border: str = "zeros"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x (B, C, H, W) -> sobel, laplacian, gradient, each (B, C, H, W)."""
    if x.numel() == 0:
        return x + 0, x + 0, x + 0
    padded = pad_border(x, border)
    gx, gy, lap = correlate(padded, SOBEL_X), correlate(padded, SOBEL_Y), correlate(padded, LAPLACIAN)
    sobel = torch.sqrt(gx**2 + gy**2 + eps)
    laplacian = lap.abs()
    return sobel, laplacian, torch.sqrt(sobel**2 + laplacian**2 + eps)


def edge_maps_backward(
    x: torch.Tensor,
    grad_sobel: torch.Tensor | None,
    grad_laplacian: torch.Tensor | None,
    grad_gradient: torch.Tensor | None,
    grad_input: torch.Tensor | None,
    eps: float = 1e-8,
    border: str = "zeros",
) -> torch.Tensor:
    """The gradient with respect to x; differentiable in x and in every gradient that is given."""
    outputs, pullback = torch.func.vjp(lambda image: edge_maps(image, eps, border), x)
    grads = (grad_sobel, grad_laplacian, grad_gradient)
    (grad_x,) = pullback(tuple(torch.zeros_like(y) if g is None else g for y, g in zip(outputs, grads, strict=True)))
    return grad_x if grad_input is None else grad_x + grad_input
