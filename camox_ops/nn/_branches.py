"""What CamoXpert's experts share: branches over stacked maps, computed together, and their fusion."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from ..ops.norm2d import layer_norm2d
from . import _plain
from .norm2d import LayerNorm2d

KINDS = (nn.Conv2d, LayerNorm2d, nn.Identity)


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

    One batched product over all branches and images beats four convolutions and a grouped one alike: see
    benchmarks/bench_edge_expert.py."""
    batch, channels, height, width = maps.shape
    product = weight.view(1, 4, -1, channels // 4) @ maps.reshape(batch, 4, channels // 4, height * width)
    return product.add_(bias.view(4, -1, 1)).view(batch, bias.numel(), height, width)


def stacked_branches(maps: torch.Tensor, convolutions: list[nn.Conv2d]) -> torch.Tensor:
    """As stacked_product, of four modules."""
    weight = torch.cat([convolution.weight for convolution in convolutions])
    return stacked_product(maps, weight, torch.cat([convolution.bias for convolution in convolutions]))


def why_not_merged(names: Sequence[str], branches: Sequence[nn.Module], kinds: Sequence[type] = KINDS) -> str | None:
    """Why branches made as by `branch`, or of these kinds, have to be called instead of computed together."""
    return _plain.not_alike(names, branches, kinds, one_norm=True)


def four_branches(x: torch.Tensor, maps_of: Callable, names: Sequence[str], branches: Sequence[nn.Module]):
    """maps_of(x), three maps like x, and x itself through a branch each -> (B, 4D, H, W).

    maps_of(x, stacked=True) gives the four as (B, 4C, H, W). Where branches may be computed together, their four norms
    with their GELU are one call over four groups."""
    if why_not_merged(names, branches) is not None:
        return torch.cat([layers(part) for layers, part in zip(branches, (*maps_of(x), x), strict=True)], 1)
    convolutions, norms, _ = zip(*(layers._modules.values() for layers in branches), strict=True)
    vectors = [c.bias for c in convolutions] + [n.weight for n in norms] + [n.bias for n in norms]
    bias, norm_weight, norm_bias = torch.cat(vectors).view(3, -1).unbind()
    features = stacked_product(maps_of(x, stacked=True), torch.cat([c.weight for c in convolutions]), bias)
    return layer_norm2d(features, norm_weight, norm_bias, norms[0].eps, activation=norms[0].activation, groups=4)


def why_residual_apart(name: str, fusion: nn.Module) -> str | None:
    """Why the norm of `fusion`, made as by `branch`, cannot take the residual along."""
    if type(fusion) is nn.Sequential and len(fusion._modules) == 3:
        _, *rest = fusion._modules.values()
        if _plain.all_plain([fusion, *rest], [nn.Sequential, LayerNorm2d, nn.Identity]):
            return _plain.global_hooks()
    return _plain.global_hooks() or _plain.not_plain_layers(name, fusion, (None, LayerNorm2d, nn.Identity))


def fused_with_residual(fusion: nn.Module, features: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """fusion(features) + x. The result has the widest dtype of x, the parameters and what the convolution gives."""
    if why_residual_apart("", fusion) is not None:
        return fusion(features) + x
    convolution, norm, _ = fusion._modules.values()
    return norm(convolution(features), x)
