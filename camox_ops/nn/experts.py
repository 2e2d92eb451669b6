"""CamoXpert's other experts on camox_ops' norms; EdgeExpert and FrequencyExpert lie in edge.py and bands.py.

None of them mixes the images of a batch: each image's result is the same alone or among others."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from .._torch_private import in_transform
from ..ops.norm2d import layer_norm2d
from ._branches import KINDS, branch, check_dim, fused_with_residual, why_not_merged, why_residual_apart
from ._plain import FusedModule, all_plain, not_alike, not_plain, not_plain_layers, not_pointwise, plain_layers
from ._pyramid import LEVELS, from_levels, to_levels
from .attention import SDTAEncoder
from .norm2d import LayerNorm2d

POOLS = ("pool_1", "pool_2", "pool_3", "pool_4")


class TextureExpert(FusedModule):
    """Texture of (B, dim, H, W) at four scales: 1x1 convolutions to dim/4 channels, 3x3 convolutions of dilation 1 to
    4, LayerNorm2d and GELU; the four together through a 1x1 convolution, LayerNorm2d and GELU; plus x.

    Drop-in replacement for TextureExpert of mahi-chan/camoXpert (models/experts.py at 47e858c): same constructor and
    parameters. dim must be a multiple of 4. The branches' 1x1 convolutions and norms are computed together where their
    layers are what the constructor made, else called one by one: see camox_ops.nn.why_not_fused."""

    BRANCHES = ("branch1", "branch2", "branch3", "branch4")
    KINDS = (nn.Conv2d, *KINDS)

    def __init__(self, dim: int):
        super().__init__()
        check_dim("TextureExpert", dim)
        self.branch1 = self._branch(dim, 1)
        self.branch2 = self._branch(dim, 2)
        self.branch3 = self._branch(dim, 3)
        self.branch4 = self._branch(dim, 4)
        self.fusion = branch(dim, dim)

    @staticmethod
    def _branch(dim: int, dilation: int) -> nn.Sequential:
        quarter = dim // 4
        return nn.Sequential(
            nn.Conv2d(dim, quarter, 1),
            nn.Conv2d(quarter, quarter, 3, padding=dilation, dilation=dilation),
            LayerNorm2d(quarter, activation="gelu"),
            nn.Identity(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, dim, H, W) -> (B, dim, H, W)."""
        return fused_with_residual(self.fusion, self._features(x), x)

    def _features(self, x: torch.Tensor) -> torch.Tensor:
        branches = self._branches()
        if why_not_merged(self.BRANCHES, branches, self.KINDS) is not None:
            return torch.cat([layers(x) for layers in branches], 1)
        narrow, dilated, norms, _ = zip(*(layers._modules.values() for layers in branches), strict=True)
        # the four 1x1 convolutions read the same x: one product of their stacked weights
        vectors = [c.bias for c in narrow] + [n.weight for n in norms] + [n.bias for n in norms]
        bias, norm_weight, norm_bias = torch.cat(vectors).view(3, -1).unbind()
        stacked = F.conv2d(x, torch.cat([c.weight for c in narrow]), bias)
        scales = torch.cat([conv(part) for conv, part in zip(dilated, stacked.chunk(4, 1), strict=True)], 1)
        dtype = torch.promote_types(scales.dtype, norm_weight.dtype)
        first = norms[0]
        return layer_norm2d(scales.to(dtype), norm_weight, norm_bias, first.eps, activation=first.activation, groups=4)

    def _branches(self) -> tuple[nn.Module, ...]:
        return self.branch1, self.branch2, self.branch3, self.branch4

    def why_not_fused(self) -> list[str]:
        branches = why_not_merged(self.BRANCHES, self._branches(), self.KINDS)
        return [r for r in (branches, why_residual_apart("fusion", self.fusion)) if r is not None]


class AttentionExpert(nn.Module):
    """Global context of (B, dim, H, W) by linear attention over its pixels.

    Drop-in replacement for AttentionExpert of mahi-chan/camoXpert (models/experts.py at 47e858c): same constructor and
    parameters. dim must be a multiple of num_heads. In training its dropout draws for the whole batch at once, other
    numbers than image by image."""

    def __init__(self, dim: int, num_heads: int = 8):
        super().__init__()
        self.attention = SDTAEncoder(dim, num_heads, drop_path=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, dim, H, W) -> (B, dim, H, W)."""
        return self.attention(x)


class HybridExpert(nn.Module):
    """(B, dim, H, W): a 5x5 depthwise convolution, LayerNorm2d, 1x1 convolution and GELU, times a gate for each channel
    from the image's mean, through a 1x1 convolution; plus x.

    Drop-in replacement for HybridExpert of mahi-chan/camoXpert (models/experts.py at 47e858c): same constructor and
    parameters. dim must be a multiple of 4."""

    def __init__(self, dim: int):
        super().__init__()
        check_dim("HybridExpert", dim)
        self.local_branch = nn.Sequential(
            nn.Conv2d(dim, dim, 5, padding=2, groups=dim), LayerNorm2d(dim), nn.Conv2d(dim, dim, 1), nn.GELU()
        )
        self.global_branch = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(dim, dim // 4, 1),
            nn.GELU(),
            nn.Conv2d(dim // 4, dim, 1),
            nn.Sigmoid(),
        )
        self.fusion = nn.Conv2d(dim, dim, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, dim, H, W) -> (B, dim, H, W)."""
        # PyTorch's CPU backward of the depthwise 5x5 weights is faster in this layout, which vmap does not have
        cpu = x.device.type == "cpu" and not in_transform(x)
        wide = x.contiguous(memory_format=torch.channels_last) if cpu else x
        hybrid = self.fusion(self.local_branch(wide) * self.global_branch(x))
        return x + hybrid


class SemanticContextExpert(FusedModule):
    """Context of (B, dim, H, W) from adaptive average poolings to 8x8, 4x4, 2x2 and 1: each through a 1x1 convolution
    to dim/4 channels, LayerNorm2d and GELU, and bilinearly back to HxW; the four together through a 1x1 convolution,
    LayerNorm2d and GELU; plus x.

    Drop-in replacement for SemanticContextExpert of mahi-chan/camoXpert (models/experts.py at 47e858c): same
    constructor and parameters. dim must be a multiple of 4.

    Interpolation acts on pixels and the last convolution on channels, so they change places: the convolution works on
    the 85 pooled pixels instead of H*W, and pooling and interpolation are two small matrix products each, in float32
    under autocast too. So it is where all layers are what the constructor made; else they are called one by one and
    the levels interpolated by PyTorch: see camox_ops.nn.why_not_fused."""

    BRANCHES = ("conv_1", "conv_2", "conv_3", "conv_4")

    def __init__(self, dim: int):
        super().__init__()
        check_dim("SemanticContextExpert", dim)
        self.pool_1, self.pool_2, self.pool_3, self.pool_4 = (nn.AdaptiveAvgPool2d(size) for size in LEVELS)
        self.conv_1 = branch(dim, dim // 4)
        self.conv_2 = branch(dim, dim // 4)
        self.conv_3 = branch(dim, dim // 4)
        self.conv_4 = branch(dim, dim // 4)
        self.context_fusion = branch(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, dim, H, W) -> (B, dim, H, W)."""
        branches = self._branches()
        if self._why_apart(branches) is not None:
            levels = [layers(pool(x)) for layers, pool in zip(branches, self._pools(), strict=True)]
            options = {"size": x.shape[2:], "mode": "bilinear", "align_corners": False}
            pyramid = torch.cat([F.interpolate(level, **options) for level in levels], 1)
            return fused_with_residual(self.context_fusion, pyramid, x)
        convolution, norm, _ = self.context_fusion._modules.values()
        weights = convolution.weight.chunk(4, 1)
        levels = [
            F.conv2d(layers(pooled), weight)
            for layers, pooled, weight in zip(branches, to_levels(x), weights, strict=True)
        ]
        context = from_levels(levels, x.shape[2:]) + convolution.bias.view(-1, 1, 1)
        return norm(context, x)

    def _branches(self) -> tuple[nn.Module, ...]:
        return self.conv_1, self.conv_2, self.conv_3, self.conv_4

    def _pools(self) -> tuple[nn.Module, ...]:
        return self.pool_1, self.pool_2, self.pool_3, self.pool_4

    def _why_apart(self, branches: tuple[nn.Module, ...]) -> str | None:
        reason = not_alike(self.BRANCHES, branches, KINDS)
        if reason is not None:
            return reason
        fusion = self.context_fusion
        layers = plain_layers([fusion], KINDS)
        if layers is None:
            return not_plain_layers("context_fusion", fusion, KINDS)
        reason = not_pointwise("context_fusion.0", layers[1])
        if reason is not None:
            return reason
        first = branches[0]._modules["0"]
        if layers[1]._parameters["weight"].shape[1] != 4 * first._parameters["weight"].shape[0]:
            return "context_fusion.0 does not take a quarter of its channels from each level"
        pools = [self._modules.get(name) for name in POOLS]
        if not all_plain(pools, [nn.AdaptiveAvgPool2d] * 4):
            for name, pool in zip(POOLS, pools, strict=True):
                reason = not_plain(pool, nn.AdaptiveAvgPool2d)
                if reason is not None:
                    return f"{name} {reason}"
        for name, pool, size in zip(POOLS, pools, LEVELS, strict=True):
            own = pool.__dict__["output_size"]
            if own != size and own != (size, size):
                return f"{name} has output_size={own}"
        return None

    def why_not_fused(self) -> list[str]:
        reason = self._why_apart(self._branches())
        return [] if reason is None else [reason]


class ContrastExpert(FusedModule):
    """Local contrast of (B, dim, H, W): a 3x3 depthwise convolution, LayerNorm2d, GELU, 1x1 convolution, LayerNorm2d;
    then a 1x1 convolution, LayerNorm2d and GELU; plus x.

    Drop-in replacement for ContrastExpert of mahi-chan/camoXpert (models/experts.py at 47e858c): same constructor and
    parameters. The last norm adds x where it is what the constructor made: see camox_ops.nn.why_not_fused."""

    def __init__(self, dim: int):
        super().__init__()
        self.local_contrast = nn.Sequential(
            nn.Conv2d(dim, dim, 3, padding=1, groups=dim),
            LayerNorm2d(dim, activation="gelu"),
            nn.Identity(),
            nn.Conv2d(dim, dim, 1),
            LayerNorm2d(dim),
        )
        self.fusion = branch(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, dim, H, W) -> (B, dim, H, W)."""
        return fused_with_residual(self.fusion, self.local_contrast(x), x)

    def why_not_fused(self) -> list[str]:
        reason = why_residual_apart("fusion", self.fusion)
        return [] if reason is None else [reason]
