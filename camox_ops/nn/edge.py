"""CamoXpert's EdgeExpert on edge_maps."""

from __future__ import annotations

import torch
from torch import nn

from ..ops.edge import edge_maps
from ..reference.edge import LAPLACIAN, SOBEL_X, SOBEL_Y
from ._branches import branch, check_dim, fused_branches


class EdgeExpert(nn.Module):
    """Edge features of (B, dim, H, W): sobel, laplacian, gradient and x itself each through a 1x1 convolution to dim/4
    channels, LayerNorm2d and GELU; the four together through a 1x1 convolution, LayerNorm2d and GELU; plus x.

    Stands for EdgeExpert of mahi-chan/camoXpert (models/experts.py at 47e858c): same constructor, parameters and
    buffers. dim must be a multiple of 4."""

    def __init__(self, dim: int):
        super().__init__()
        check_dim("EdgeExpert", dim)
        self.dim = dim
        for name, kernel in (("sobel_x", SOBEL_X), ("sobel_y", SOBEL_Y), ("laplacian", LAPLACIAN)):
            self.register_buffer(f"{name}_base", torch.tensor(kernel, dtype=torch.float32).view(1, 1, 3, 3))
        self.sobel_branch = branch(dim, dim // 4)
        self.laplacian_branch = branch(dim, dim // 4)
        self.gradient_branch = branch(dim, dim // 4)
        self.spatial_branch = branch(dim, dim // 4)
        self.fusion = branch(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, dim, H, W) -> (B, dim, H, W)."""
        branches = (self.sobel_branch, self.laplacian_branch, self.gradient_branch, self.spatial_branch)
        return fused_branches(x, edge_maps(x, stacked=True), branches, self.fusion)
