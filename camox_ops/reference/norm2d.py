"""layer_norm2d from its formula (see camox_ops.layer_norm2d)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

ACTIVATIONS = {
    "none": lambda u: u,
    "gelu": F.gelu,
    "gelu_tanh": lambda u: F.gelu(u, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


def layer_norm2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float = 1e-6,
    *,
    activation: str = "none",
    residual: torch.Tensor | None = None,
    groups: int = 1,
) -> torch.Tensor:
    """x, residual (B, C, H, W), weight, bias (C,) -> (B, C, H, W) in x's dtype."""
    grouped = x.unflatten(1, (groups, x.shape[1] // groups))
    difference = grouped - grouped.mean(dim=2, keepdim=True)
    variance = (difference * difference).mean(dim=2, keepdim=True)
    z = (difference / torch.sqrt(variance + eps)).flatten(1, 2)
    y = ACTIVATIONS[activation](z * weight[:, None, None] + bias[:, None, None])
    return (y if residual is None else y + residual).to(x.dtype)


def layer_norm2d_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float = 1e-6,
    *,
    activation: str = "none",
    groups: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients with respect to x, weight and bias; differentiable in all four tensors."""

    def forward(x, weight, bias):
        return layer_norm2d(x, weight, bias, eps, activation=activation, groups=groups)

    _, pullback = torch.func.vjp(forward, x, weight, bias)
    return pullback(grad)
