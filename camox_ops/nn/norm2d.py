"""LayerNorm over the channels of a picture."""

from __future__ import annotations

import torch
from torch import nn


class LayerNorm2d(nn.Module):
    """Normalises (B, C, H, W) over C at every pixel, then scales and shifts each channel: biased variance.

    Stands for LayerNorm2d of mahi-chan/camoXpert (models/backbone.py at 47e858c): same constructor and parameters."""

    def __init__(self, num_features: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        var, mean = torch.var_mean(x, dim=1, keepdim=True, correction=0)
        y = (x - mean) * torch.rsqrt(var + self.eps)
        return y * self.weight[:, None, None] + self.bias[:, None, None]
