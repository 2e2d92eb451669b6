"""What CamoXpert's edge and frequency experts share: four branches over four stacked maps, and their fusion."""

from __future__ import annotations

import torch
from torch import nn

from ..ops.norm2d import layer_norm2d
from .norm2d import LayerNorm2d


def check_dim(name: str, dim: int) -> None:
    if dim < 4 or dim % 4:
        raise ValueError(f"{name}: dim must be a positive multiple of 4, got {dim}")


def branch(in_channels: int, out_channels: int) -> nn.Sequential:
    """1x1 convolution, LayerNorm2d, GELU; the norm computes the GELU as well."""
    norm = LayerNorm2d(out_channels, activation="gelu")
    return nn.Sequential(nn.Conv2d(in_channels, out_channels, 1), norm, nn.Identity())


def stacked_product(maps: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Four 1x1 convolutions, weight (4D, C, 1, 1) and bias (4D,), over the four channel ranges of maps (B, 4C, H, W) ->
    (B, 4D, H, W).

    One batched product over all branches and pictures beats four convolutions and a grouped one alike: see
    benchmarks/bench_edge_expert.py."""
    batch, channels, height, width = maps.shape
    product = weight.view(1, 4, -1, channels // 4) @ maps.reshape(batch, 4, channels // 4, height * width)
    return product.add_(bias.view(4, -1, 1)).view(batch, bias.numel(), height, width)


def stacked_branches(maps: torch.Tensor, convolutions: list[nn.Conv2d]) -> torch.Tensor:
    """As stacked_product, of four modules."""
    weight = torch.cat([convolution.weight for convolution in convolutions])
    return stacked_product(maps, weight, torch.cat([convolution.bias for convolution in convolutions]))


def fused_branches(
    x: torch.Tensor, maps: torch.Tensor, branches: tuple[nn.Sequential, ...], fusion: nn.Sequential
) -> torch.Tensor:
    """maps (B, 4C, H, W), x (B, C, H, W): each branch over its channel range, fusion over all four, plus x.

    The four norms with their GELU are one call over four groups, the last norm takes its GELU and x along. The result
    has the widest dtype of x, the parameters and what the convolutions give, as where each step is a module."""
    convolutions, norms = [layers[0] for layers in branches], [layers[1] for layers in branches]
    vectors = [c.bias for c in convolutions] + [n.weight for n in norms] + [n.bias for n in norms]
    bias, norm_weight, norm_bias = torch.cat(vectors).view(3, -1).unbind()
    features = stacked_product(maps, torch.cat([c.weight for c in convolutions]), bias)
    features = layer_norm2d(features, norm_weight, norm_bias, norms[0].eps, activation=norms[0].activation, groups=4)
    return fusion[1](fusion[0](features), x)
