"""The seven experts of CamoXpert in plain PyTorch; each maps x (B,C,H,W) to the same shape, C divisible by 8.

Module, parameter and buffer names follow mahi-chan/camoXpert, models/experts.py, commit 47e858c. A norm computes the
GELU that follows it. camox_ops.nn has the same seven on its ops.
"""

import torch
from torch import nn
from torch.nn import functional as F

from .backbone import LayerNorm2d, SDTAEncoder

EDGE_EPS = 1e-8


class Pointwise(nn.Sequential):
    """1x1 convolution, norm and GELU, and the residual when there is one."""

    def __init__(self, in_channels, out_channels):
        super().__init__(nn.Conv2d(in_channels, out_channels, 1), LayerNorm2d(out_channels, activation="gelu"))

    def forward(self, x, residual=None):
        convolution, norm = self
        return norm(convolution(x), residual)


def dilated(dim, dilation):
    """1x1 convolution to a quarter of the channels, dilated 3x3 convolution, norm, GELU."""
    quarter = dim // 4
    return nn.Sequential(
        nn.Conv2d(dim, quarter, 1),
        nn.Conv2d(quarter, quarter, 3, padding=dilation, dilation=dilation),
        LayerNorm2d(quarter, activation="gelu"),
    )


class TextureExpert(nn.Module):
    """Texture at four scales: 3x3 convolutions of dilation 1 to 4."""

    def __init__(self, dim):
        super().__init__()
        self.branch1 = dilated(dim, 1)
        self.branch2 = dilated(dim, 2)
        self.branch3 = dilated(dim, 3)
        self.branch4 = dilated(dim, 4)
        self.fusion = Pointwise(dim, dim)

    def forward(self, x):
        scales = [branch(x) for branch in (self.branch1, self.branch2, self.branch3, self.branch4)]
        return self.fusion(torch.cat(scales, 1), x)


class AttentionExpert(nn.Module):
    """Global context by attention over all pixels."""

    def __init__(self, dim, num_heads=8, encoder=SDTAEncoder):
        super().__init__()
        self.attention = encoder(dim=dim, num_heads=num_heads, drop_path=0.1)

    def forward(self, x):
        return self.attention(x)


class HybridExpert(nn.Module):
    """A depthwise local branch weighted by a global channel gate."""

    def __init__(self, dim):
        super().__init__()
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

    def forward(self, x):
        return self.fusion(self.local_branch(x) * self.global_branch(x)) + x


class FrequencyExpert(nn.Module):
    """Low, middle and high frequency bands of box filters, and the input itself, each through its own branch."""

    def __init__(self, dim):
        super().__init__()
        self.low_freq_conv = Pointwise(dim, dim // 4)
        self.mid_freq_conv = Pointwise(dim, dim // 4)
        self.high_freq_conv = Pointwise(dim, dim // 4)
        self.spatial_conv = Pointwise(dim, dim // 4)
        self.fusion = Pointwise(dim, dim)

    def forward(self, x):
        low = F.avg_pool2d(x, 3, stride=1, padding=1)
        # the users' code pools a second time instead of using `low` again; stock keeps their cost
        mid = F.avg_pool2d(x, 3, stride=1, padding=1) - F.avg_pool2d(x, 5, stride=1, padding=2)
        bands = [
            self.low_freq_conv(low),
            self.mid_freq_conv(mid),
            self.high_freq_conv(x - low),
            self.spatial_conv(x),
        ]
        return self.fusion(torch.cat(bands, 1), x)


class EdgeExpert(nn.Module):
    """Sobel magnitude, Laplacian and their combination by grouped convolutions, each through its own branch."""

    def __init__(self, dim):
        super().__init__()
        sobel_x = torch.tensor([[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]])
        laplacian = torch.tensor([[0.0, 1.0, 0.0], [1.0, -4.0, 1.0], [0.0, 1.0, 0.0]])
        self.register_buffer("sobel_x_base", sobel_x.view(1, 1, 3, 3))
        self.register_buffer("sobel_y_base", sobel_x.t().reshape(1, 1, 3, 3))
        self.register_buffer("laplacian_base", laplacian.view(1, 1, 3, 3))
        self.sobel_branch = Pointwise(dim, dim // 4)
        self.laplacian_branch = Pointwise(dim, dim // 4)
        self.gradient_branch = Pointwise(dim, dim // 4)
        self.spatial_branch = Pointwise(dim, dim // 4)
        self.fusion = Pointwise(dim, dim)

    def compute_edges(self, x):
        """x (B,C,H,W) -> (sobel, laplacian, gradient), each like x."""
        channels = x.shape[1]
        gx, gy, lap = (
            F.conv2d(x, kernel.repeat(channels, 1, 1, 1), padding=1, groups=channels)
            for kernel in (self.sobel_x_base, self.sobel_y_base, self.laplacian_base)
        )
        sobel = torch.sqrt(gx**2 + gy**2 + EDGE_EPS)
        laplacian = lap.abs()
        return sobel, laplacian, torch.sqrt(sobel**2 + laplacian**2 + EDGE_EPS)

    def forward(self, x):
        sobel, laplacian, gradient = self.compute_edges(x)
        maps = [
            self.sobel_branch(sobel),
            self.laplacian_branch(laplacian),
            self.gradient_branch(gradient),
            self.spatial_branch(x),
        ]
        return self.fusion(torch.cat(maps, 1), x)


class SemanticContextExpert(nn.Module):
    """A pyramid of adaptive poolings to 8, 4, 2 and 1, brought back to the size of x."""

    def __init__(self, dim):
        super().__init__()
        self.pool_1 = nn.AdaptiveAvgPool2d(8)
        self.pool_2 = nn.AdaptiveAvgPool2d(4)
        self.pool_3 = nn.AdaptiveAvgPool2d(2)
        self.pool_4 = nn.AdaptiveAvgPool2d(1)
        self.conv_1 = Pointwise(dim, dim // 4)
        self.conv_2 = Pointwise(dim, dim // 4)
        self.conv_3 = Pointwise(dim, dim // 4)
        self.conv_4 = Pointwise(dim, dim // 4)
        self.context_fusion = Pointwise(dim, dim)

    def forward(self, x):
        levels = (
            (self.pool_1, self.conv_1),
            (self.pool_2, self.conv_2),
            (self.pool_3, self.conv_3),
            (self.pool_4, self.conv_4),
        )
        pyramid = [
            F.interpolate(conv(pool(x)), size=x.shape[2:], mode="bilinear", align_corners=False)
            for pool, conv in levels
        ]
        return self.context_fusion(torch.cat(pyramid, 1), x)


class ContrastExpert(nn.Module):
    """Local contrast by a depthwise 3x3 convolution between norms."""

    def __init__(self, dim):
        super().__init__()
        self.local_contrast = nn.Sequential(
            nn.Conv2d(dim, dim, 3, padding=1, groups=dim),
            LayerNorm2d(dim, activation="gelu"),
            nn.Identity(),  # the GELU's place, which numbers the parameters after it
            nn.Conv2d(dim, dim, 1),
            LayerNorm2d(dim),
        )
        self.fusion = Pointwise(dim, dim)

    def forward(self, x):
        return self.fusion(self.local_contrast(x), x)


# in the order in which a MoE layer takes them
CLASSES = (
    TextureExpert,
    AttentionExpert,
    HybridExpert,
    FrequencyExpert,
    EdgeExpert,
    SemanticContextExpert,
    ContrastExpert,
)
