"""CamoXpert's LayerNorm2d on layer_norm2d."""

from __future__ import annotations

import torch
from torch import nn

from ..ops import _check
from ..ops._codes import ACTIVATIONS
from ..ops.norm2d import layer_norm2d


class LayerNorm2d(nn.Module):
    """Normalises (B, C, H, W) over C at every pixel, scales and shifts each channel, and activates.

    Drop-in replacement for LayerNorm2d of mahi-chan/camoXpert (models/backbone.py at 47e858c): same constructor and
    parameters, and the same dtype of the result in and out of autocast, the wider of x's and the parameters': a
    bfloat16 x (as convolutions give under autocast) and float32 parameters give float32, without the rounding to
    bfloat16 on the way that the public module's formula has. CUDA's autocast makes that formula's square float32, and
    with it the result, whatever the parameters are.

    Args:
        num_features: C.
        eps: added to the variance.
        activation, groups: as for camox_ops.layer_norm2d."""

    def __init__(self, num_features: int, eps: float = 1e-6, *, activation: str = "none", groups: int = 1):
        super().__init__()
        _check.positive("LayerNorm2d", "eps", eps)
        _check.choice("LayerNorm2d", "activation", activation, ACTIVATIONS)
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))
        self.eps = eps
        self.activation = activation
        self.groups = groups

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}, activation={self.activation!r}, groups={self.groups}"

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x and residual (B, C, H, W) -> (B, C, H, W)."""
        dtype = torch.promote_types(x.dtype, torch.promote_types(self.weight.dtype, self.bias.dtype))
        if x.is_cuda and torch.is_autocast_enabled("cuda"):
            dtype = torch.promote_types(dtype, torch.float32)
        weight, bias = self.weight.to(dtype), self.bias.to(dtype)
        residual = None if residual is None else residual.to(dtype)
        return layer_norm2d(
            x.to(dtype), weight, bias, self.eps, activation=self.activation, residual=residual, groups=self.groups
        )
