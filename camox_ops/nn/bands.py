"""CamoXpert's FrequencyExpert on frequency_bands."""

from __future__ import annotations

import torch
from torch import nn

from ..ops.bands import frequency_bands
from ._branches import branch, check_dim, four_branches, fused_with_residual, why_not_merged, why_residual_apart
from ._plain import FusedModule

BRANCHES = ("low_freq_conv", "mid_freq_conv", "high_freq_conv", "spatial_conv")


class FrequencyExpert(FusedModule):
    """Frequency features of (B, dim, H, W): low, middle and high band and x itself each through a 1x1 convolution to
    dim/4 channels, LayerNorm2d and GELU; the four together through a 1x1 convolution, LayerNorm2d and GELU; plus x.

    Drop-in replacement for FrequencyExpert of mahi-chan/camoXpert (models/experts.py at 47e858c): same constructor and
    parameters. dim must be a multiple of 4. The four branches are computed together where their layers are what the
    constructor made, else called one by one: see camox_ops.nn.why_not_fused."""

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
        features = four_branches(x, frequency_bands, BRANCHES, self._branches())
        return fused_with_residual(self.fusion, features, x)

    def _branches(self) -> tuple[nn.Module, ...]:
        return self.low_freq_conv, self.mid_freq_conv, self.high_freq_conv, self.spatial_conv

    def why_not_fused(self) -> list[str]:
        reasons = why_not_merged(BRANCHES, self._branches()), why_residual_apart("fusion", self.fusion)
        return [reason for reason in reasons if reason is not None]
