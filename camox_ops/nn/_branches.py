"""What CamoXpert's edge and frequency experts share: four branches over four stacked maps, and their fusion."""

from __future__ import annotations

import torch
from torch import nn

from .norm2d import LayerNorm2d


def check_dim(name: str, dim: int) -> None:
    if dim < 4 or dim % 4:
        raise ValueError(f"{name}: dim must be a positive multiple of 4, got {dim}")


def branch(in_channels: int, out_channels: int) -> nn.Sequential:
    """1x1 convolution, LayerNorm2d, GELU."""
    return nn.Sequential(nn.Conv2d(in_channels, out_channels, 1), LayerNorm2d(out_channels), nn.GELU())


def stacked_branches(maps: torch.Tensor, convolutions: list[nn.Conv2d]) -> torch.Tensor:
    """Four 1x1 convolutions over the four channel ranges of maps (B, 4C, H, W) -> (B, 4*(C//4), H, W), as one product.

    One batched product over all branches and pictures beats four convolutions and a grouped one alike: see
    benchmarks/bench_edge_expert.py."""
    batch, channels, height, width = maps.shape
    weight = torch.stack([conv.weight.flatten(1) for conv in convolutions])
    bias = torch.stack([conv.bias for conv in convolutions])
    product = weight.unsqueeze(0) @ maps.reshape(batch, 4, channels // 4, height * width)
    return (product + bias[..., None]).reshape(batch, -1, height, width)


def fused_branches(
    x: torch.Tensor, maps: torch.Tensor, branches: tuple[nn.Sequential, ...], fusion: nn.Sequential
) -> torch.Tensor:
    """maps (B, 4C, H, W), x (B, C, H, W): each branch over its channel range, fusion over all four, plus x."""
    features = stacked_branches(maps, [layers[0] for layers in branches])
    parts = [layers[2](layers[1](part)) for layers, part in zip(branches, features.chunk(4, dim=1), strict=True)]
    return fusion(torch.cat(parts, dim=1)) + x
