"""Channel LayerNorm, the SDTA encoder and a hierarchical backbone in the manner of EdgeNeXt.

Module and parameter names follow mahi-chan/camoXpert, models/backbone.py, commit 47e858c.
"""

import importlib

import torch
from torch import nn
from torch.nn import functional as F

# name -> (channels of the four stages, blocks in each)
CONFIGS = {
    "tiny": ((24, 48, 80, 128), (1, 1, 2, 1)),
    "edgenext_small": ((48, 96, 160, 304), (3, 3, 9, 3)),
    "edgenext_base": ((80, 160, 288, 584), (3, 3, 9, 3)),
}
KERNEL_SIZES = (3, 5, 7, 9)


class LayerNorm2d(nn.Module):
    """Normalise x (B,C,H,W) over C at every pixel, scale and shift by weight and bias (C,), activate, add the residual.

    activation: "none" or "gelu". camox_ops.nn.LayerNorm2d has the same interface and does all of it in one pass.
    """

    def __init__(self, num_features, eps=1e-6, *, activation="none"):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))
        self.eps = eps
        self.activate = {"none": nn.Identity, "gelu": nn.GELU}[activation]()

    def forward(self, x, residual=None):
        centred = x - x.mean(1, keepdim=True)
        variance = centred.square().mean(1, keepdim=True)
        normed = centred / (variance + self.eps).sqrt()
        output = self.activate(normed * self.weight.view(1, -1, 1, 1) + self.bias.view(1, -1, 1, 1))
        return output if residual is None else output + residual


class SDTAEncoder(nn.Module):
    """Multi-head attention over the pixels of x (B,C,H,W), with a residual; C must be divisible by num_heads.

    Linear attention maps q and k by elu + 1, divides each by its own sum over the head's channels, and multiplies
    k^T v before q, so that cost grows with H*W and not with its square.
    """

    def __init__(self, dim, num_heads=8, drop_path=0.1, use_linear_attention=True):
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"dim must be divisible by num_heads={num_heads}, got dim={dim}")
        self.num_heads = num_heads
        self.use_linear_attention = use_linear_attention
        self.qkv = nn.Conv2d(dim, dim * 3, 1, bias=False)
        self.proj = nn.Conv2d(dim, dim, 1)
        self.drop_path = nn.Dropout(drop_path)

    def forward(self, x):
        batch, channels, height, width = x.shape
        heads = self.qkv(x).view(batch, 3, self.num_heads, channels // self.num_heads, height * width)
        q, k, v = heads.transpose(-2, -1).unbind(1)  # each (B, heads, H*W, C/heads)
        if self.use_linear_attention:
            q, k = (F.elu(t) + 1 for t in (q, k))
            q, k = (t / t.sum(-1, keepdim=True) for t in (q, k))
            mixed = q @ (k.transpose(-2, -1) @ v)
        else:
            scores = q @ k.transpose(-2, -1) * (channels // self.num_heads) ** -0.5
            mixed = scores.softmax(-1) @ v
        mixed = mixed.transpose(-2, -1).reshape(batch, channels, height, width)
        return self.drop_path(self.proj(mixed)) + x


class EdgeNeXtBlock(nn.Module):
    """Depthwise convolution, channel norm, and a pointwise MLP of four times the width, with a residual."""

    def __init__(self, dim, kernel_size=7, drop_path=0.1, norm=LayerNorm2d):
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, kernel_size, padding=kernel_size // 2, groups=dim)
        self.norm = norm(dim)
        self.pwconv1 = nn.Linear(dim, 4 * dim)
        self.act = nn.GELU()
        self.pwconv2 = nn.Linear(4 * dim, dim)
        self.drop_path = nn.Dropout(drop_path)

    def forward(self, x):
        hidden = self.norm(self.dwconv(x)).permute(0, 2, 3, 1)
        hidden = self.pwconv2(self.act(self.pwconv1(hidden)))
        return x + self.drop_path(hidden.permute(0, 3, 1, 2))


class EdgeNeXtBackbone(nn.Module):
    """Images (B,3,H,W) -> four feature maps at strides 4, 8, 16 and 32; stages and downsamplers alternate."""

    def __init__(self, dims, depths, in_channels=3, drop_path_rate=0.1, norm=LayerNorm2d):
        super().__init__()
        self.feature_dims = list(dims)
        self.stem = nn.Sequential(nn.Conv2d(in_channels, dims[0], 4, stride=4), norm(dims[0], activation="gelu"))
        rates = iter(torch.linspace(0, drop_path_rate, sum(depths)).tolist())
        self.stages = nn.ModuleList()
        for stage, (dim, depth) in enumerate(zip(dims, depths, strict=True)):
            if stage:
                self.stages.append(nn.Sequential(norm(dims[stage - 1]), nn.Conv2d(dims[stage - 1], dim, 2, stride=2)))
            blocks = [EdgeNeXtBlock(dim, KERNEL_SIZES[stage], next(rates), norm) for _ in range(depth)]
            self.stages.append(nn.Sequential(*blocks))

    def forward(self, x):
        features = []
        x = self.stem(x)
        for index, stage in enumerate(self.stages):
            x = stage(x)
            if index % 2 == 0:
                features.append(x)
        return features


class TimmBackbone(nn.Module):
    """The last four feature maps of a timm model built with features_only=True."""

    def __init__(self, name, in_channels=3, pretrained=False):
        super().__init__()
        try:
            timm = importlib.import_module("timm")
        except ImportError as error:
            raise ImportError(
                f"backbone 'timm:{name}' needs the timm package, which does not import here ({error}); "
                f"install timm, or choose one of {sorted(CONFIGS)}"
            ) from error
        self.body = timm.create_model(name, pretrained=pretrained, features_only=True, in_chans=in_channels)
        channels = self.body.feature_info.channels()
        if len(channels) < 4:
            raise ValueError(f"backbone 'timm:{name}' gives {len(channels)} feature maps, CamoXpert needs 4")
        self.feature_dims = channels[-4:]

    def forward(self, x):
        return self.body(x)[-4:]


def build_backbone(name, in_channels=3, pretrained=False, norm=LayerNorm2d):
    """Build 'tiny', 'edgenext_small', 'edgenext_base' (from here) or 'timm:NAME'.

    ValueError for an unknown name or a stage width that is not a multiple of 8, ImportError when timm does not import.
    """
    if name.startswith("timm:"):
        backbone = TimmBackbone(name.removeprefix("timm:"), in_channels, pretrained)
    elif name not in CONFIGS:
        raise ValueError(f"backbone must be one of {sorted(CONFIGS)} or 'timm:NAME', got {name!r}")
    elif pretrained:
        raise ValueError(f"pretrained weights exist only for 'timm:NAME' backbones, got backbone={name!r}")
    else:
        backbone = EdgeNeXtBackbone(*CONFIGS[name], in_channels=in_channels, norm=norm)
    if any(dim % 8 for dim in backbone.feature_dims):
        raise ValueError(f"every stage width of backbone {name!r} must be a multiple of 8, got {backbone.feature_dims}")
    return backbone
