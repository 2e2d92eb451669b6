"""bias_gelu from its formula (see camox_ops.bias_gelu)."""

from __future__ import annotations

import torch

from .dropout import dropout


def bias_gelu(x: torch.Tensor, bias: torch.Tensor, seed: torch.Tensor | None = None, p: float = 0.0) -> torch.Tensor:
    """x (..., D), bias (D,), seed one int64 number -> (..., D) in x's dtype."""
    u = x + bias
    return dropout(u * 0.5 * (1 + torch.erf(u * 0.5**0.5)), seed, p).to(x.dtype)


def bias_gelu_backward(
    grad: torch.Tensor, x: torch.Tensor, bias: torch.Tensor, seed: torch.Tensor | None = None, p: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients with respect to x and bias; differentiable in all three tensors."""
    _, pullback = torch.func.vjp(lambda x, bias: bias_gelu(x, bias, seed, p), x, bias)
    return pullback(grad)
