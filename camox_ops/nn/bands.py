"""CamoXpert's FrequencyExpert on frequency_bands."""

from __future__ import annotations

import torch
from torch import nn

from ..ops.bands import frequency_bands
from ._branches import branch, check_dim, fused_branches


class FrequencyExpert(nn.Module):
    """Frequency features of (B, dim, H, W): low, middle and high band and x itself each through a 1x1 convolution to
    dim/4 channels, LayerNorm2d and GELU; the four together through a 1x1 convolution, LayerNorm2d and GELU; plus x.

    Stands for FrequencyExpert of mahi-chan/camoXpert (models/experts.py at 47e858c): same constructor and parameters.
    dim must be a multiple of 4."""

    def __init__(self, dim: int):
        super().__init__()
        check_dim("FrequencyExpert", dim)
        self.low_freq_conv = branch(dim, dim // 4)
        self.mid_freq_conv = branch(dim, dim // 4)
        self.high_freq_conv = branch(dim, dim // 4)
        self.spatial_conv = branch(dim, dim // 4)
        self.fusion = branch(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, dim, H, W) -> (B, dim, H, W)."""
        branches = (self.low_freq_conv, self.mid_freq_conv, self.high_freq_conv, self.spatial_conv)
        return fused_branches(x, frequency_bands(x, stacked=True), branches, self.fusion)
