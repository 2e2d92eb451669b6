"""CamoXpert's EdgeExpert on edge_maps."""

from __future__ import annotations

import torch
from torch import nn

from ..ops.edge import edge_maps
from ..reference.edge import LAPLACIAN, SOBEL_X, SOBEL_Y
from .norm2d import LayerNorm2d


def stacked_branches(maps: torch.Tensor, convolutions: list[nn.Conv2d]) -> torch.Tensor:
    """Four 1x1 convolutions over the four channel ranges of maps (B, 4C, H, W) -> (B, 4*(C//4), H, W), as one product.

    One batched product over all branches and pictures beats four convolutions and a grouped one alike: see
    benchmarks/bench_edge_expert.py."""
    batch, channels, height, width = maps.shape
    weight = torch.stack([conv.weight.flatten(1) for conv in convolutions])
    bias = torch.stack([conv.bias for conv in convolutions])
    product = weight.unsqueeze(0) @ maps.reshape(batch, 4, channels // 4, height * width)
    return (product + bias[..., None]).reshape(batch, -1, height, width)


class EdgeExpert(nn.Module):
    """Edge features of (B, dim, H, W): sobel, laplacian, gradient and x itself each through a 1x1 convolution to dim/4
    channels, LayerNorm2d and GELU; the four together through a 1x1 convolution, LayerNorm2d and GELU; plus x.

    Stands for EdgeExpert of mahi-chan/camoXpert (models/experts.py at 47e858c): same constructor, parameters and
    buffers. dim must be a multiple of 4."""

    def __init__(self, dim: int):
        super().__init__()
        if dim < 4 or dim % 4:
            raise ValueError(f"EdgeExpert: dim must be a positive multiple of 4, got {dim}")
        self.dim = dim
        for name, kernel in (("sobel_x", SOBEL_X), ("sobel_y", SOBEL_Y), ("laplacian", LAPLACIAN)):
            self.register_buffer(f"{name}_base", torch.tensor(kernel, dtype=torch.float32).view(1, 1, 3, 3))

        def branch(out_channels):
            return nn.Sequential(nn.Conv2d(dim, out_channels, 1), LayerNorm2d(out_channels), nn.GELU())

        self.sobel_branch = branch(dim // 4)
        self.laplacian_branch = branch(dim // 4)
        self.gradient_branch = branch(dim // 4)
        self.spatial_branch = branch(dim // 4)
        self.fusion = branch(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, dim, H, W) -> (B, dim, H, W)."""
        branches = (self.sobel_branch, self.laplacian_branch, self.gradient_branch, self.spatial_branch)
        features = stacked_branches(edge_maps(x, stacked=True), [branch[0] for branch in branches])
        parts = [branch[2](branch[1](part)) for branch, part in zip(branches, features.chunk(4, dim=1), strict=True)]
        return self.fusion(torch.cat(parts, dim=1)) + x
