"""EmberFormer's decoders over the grid of patches; stock PyTorch in both op sets. Names of parameters as in the public
model (models/emberformer.py and models/baselines.py of tampueroc/emberformer at d511660)."""

import re
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

PUBLIC_SEGFORMER = "nvidia/segformer-b0-finetuned-ade-512-512"
# SegFormer's variants: channels of its four stages, width of its decoder (arXiv 2105.15203).
SEGFORMERS = {"b0": ((32, 64, 160, 256), 256), "b1": ((64, 128, 320, 512), 256)}
SEGFORMERS |= dict.fromkeys(("b2", "b3", "b4", "b5"), ((64, 128, 320, 512), 768))


def resized(x, like):
    if x.shape[-2:] == like.shape[-2:]:
        return x
    return F.interpolate(x, size=like.shape[-2:], mode="bilinear", align_corners=False)


class DoubleConv(nn.Module):
    def __init__(self, channels_in, channels_out):
        super().__init__()
        first, second = (nn.Conv2d(c, channels_out, 3, padding=1) for c in (channels_in, channels_out))
        self.block = nn.Sequential(first, nn.GELU(), second, nn.GELU())

    def forward(self, x):
        return self.block(x)


class Down(nn.Module):
    def __init__(self, channels_in, channels_out):
        super().__init__()
        self.conv = DoubleConv(channels_in, channels_out)

    def forward(self, x):
        return self.conv(F.max_pool2d(x, 2))


class Up(nn.Module):
    def __init__(self, channels_in, channels_out):
        super().__init__()
        self.conv = DoubleConv(channels_in, channels_out)

    def forward(self, x, skipped):
        return self.conv(torch.cat((skipped, resized(x, skipped)), 1))


class UNetDecoder(nn.Module):
    """(B, d_model, Gy, Gx) -> logits (B, 1, Gy, Gx): two levels down and up again."""

    def __init__(self, d_model, base_channels):
        super().__init__()
        c1, c2, c3 = base_channels, 2 * base_channels, 4 * base_channels
        self.proj_in = nn.Conv2d(d_model, c1, 1)
        self.inc = DoubleConv(c1, c1)
        self.down1, self.down2 = Down(c1, c2), Down(c2, c3)
        self.up1, self.up2 = Up(c3 + c2, c2), Up(c2 + c1, c1)
        self.outc = nn.Conv2d(c1, 1, 1)

    def forward(self, x):
        full = self.inc(self.proj_in(x))
        half = self.down1(full)
        return self.outc(self.up2(self.up1(self.down2(half), half), full))


class RefinementDecoder(nn.Module):
    """Features (B, d_model, Gy, Gx) and the logits of patches (B, 1, Gy, Gx) -> logits of pixels (B, 1, H, W): a stage
    of a transposed convolution and a convolution for each factor of 2 in patch_size."""

    def __init__(self, d_model, patch_size, base_channels):
        super().__init__()
        stages = patch_size.bit_length() - 1
        if 2**stages != patch_size:
            raise ValueError(f"patch_size must be a power of 2, got {patch_size}")
        channels = 4 * base_channels
        self.input_proj = nn.Conv2d(d_model + 1, channels, 1)
        layers, narrower = [], channels
        for _ in range(stages):
            layers += [nn.ConvTranspose2d(channels, narrower, 4, stride=2, padding=1, bias=False)]
            layers += [nn.BatchNorm2d(narrower), nn.ReLU(inplace=True)]
            layers += [nn.Conv2d(narrower, narrower, 3, padding=1, bias=False)]
            layers += [nn.BatchNorm2d(narrower), nn.ReLU(inplace=True)]
            channels, narrower = narrower, max(base_channels, narrower // 2)
        self.upsample_layers = nn.Sequential(*layers)
        self.output_conv = nn.Conv2d(channels, 1, 1)

    def forward(self, features, coarse):
        return self.output_conv(self.upsample_layers(self.input_proj(torch.cat((features, coarse), 1))))


class Projection(nn.Module):
    """A linear layer over the channels of a feature map."""

    def __init__(self, channels, width):
        super().__init__()
        self.proj = nn.Linear(channels, width)

    def forward(self, x):
        y = self.proj(x.flatten(2).transpose(1, 2))
        return y.transpose(1, 2).unflatten(2, x.shape[-2:])


class DecodeHead(nn.Module):
    """SegFormer's all-MLP head: every level to one width and to the size of the first, then mixed."""

    def __init__(self, channels, width, dropout=0.1):
        super().__init__()
        self.linear_c = nn.ModuleList(Projection(c, width) for c in channels)
        self.linear_fuse = nn.Conv2d(width * len(channels), width, 1, bias=False)
        self.batch_norm = nn.BatchNorm2d(width)
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Conv2d(width, 1, 1)
        for layer in (*(level.proj for level in self.linear_c), self.linear_fuse, self.classifier):
            nn.init.normal_(layer.weight, std=0.02)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)

    def forward(self, levels):
        levels = [resized(linear(level), levels[0]) for linear, level in zip(self.linear_c, levels, strict=True)]
        return self.classifier(self.dropout(F.relu(self.batch_norm(self.linear_fuse(torch.cat(levels[::-1], 1))))))


class SegFormer(nn.Module):
    def __init__(self, channels, width):
        super().__init__()
        self.decode_head = DecodeHead(channels, width)


class SegFormerDecoder(nn.Module):
    """(B, d_model, Gy, Gx) -> logits (B, 1, Gy, Gx): a pyramid of averages of the features through SegFormer's head.

    The public model holds a whole SegFormer, whose encoder it never calls: that is left out here, and its parameters in
    a checkpoint are skipped. So freeze_backbone, which freezes that encoder alone, changes nothing, as it changes no
    number there. pretrained: model_name is a file of SegFormer's weights (pytorch_model.bin), or the folder that has
    one; nothing is downloaded.
    """

    def __init__(self, d_model, pretrained, model_name, freeze_backbone=False):
        super().__init__()
        variant = re.search(r"b[0-5]", Path(model_name).name) or re.search(r"b[0-5]", str(model_name))
        if variant is None:
            raise ValueError(f"model_name must name a SegFormer, b0 to b5, got {model_name!r}")
        channels, width = SEGFORMERS[variant.group()]
        self.segformer = SegFormer(channels, width)
        self.feature_projections = nn.ModuleList(nn.Conv2d(d_model, c, 1) for c in channels)
        self.register_load_state_dict_pre_hook(without_encoder)
        if pretrained:
            self.load_head(model_name)

    def load_head(self, model_name):
        """The head's weights but for the classifier, whose number of classes is another one."""
        path = Path(model_name)
        path = path / "pytorch_model.bin" if path.is_dir() else path
        if not path.is_file():
            raise ValueError(
                f"model.spatial: nothing is downloaded, and {model_name!r} is no file or folder with SegFormer's "
                "pytorch_model.bin; name one, or set pretrained: false"
            )
        state = torch.load(path, map_location="cpu", weights_only=True)
        head = {name.removeprefix("decode_head."): v for name, v in state.items() if name.startswith("decode_head.")}
        head = {name: value for name, value in head.items() if not name.startswith("classifier.")}
        own = self.segformer.decode_head
        missing = [name for name in own.load_state_dict(head, strict=False).missing_keys if "classifier" not in name]
        if missing:
            raise ValueError(f"model.spatial: {path} lacks {', '.join('decode_head.' + name for name in missing)}")

    def unfreeze_backbone(self):
        """There is nothing that freeze_backbone froze."""

    def forward(self, x):
        if min(x.shape[-2:]) < 8:
            raise ValueError(f"the SegFormer decoder needs a grid of at least 8x8 patches, got {tuple(x.shape[-2:])}")
        levels = [projection(x) for projection in self.feature_projections]
        levels = [F.avg_pool2d(level, 2**i) if i else level for i, level in enumerate(levels)]
        return resized(self.segformer.decode_head(levels), x)


def without_encoder(module, state, prefix, *_):
    """Takes the encoder that is never called out of a checkpoint of the public model."""
    for name in [name for name in state if name.startswith(prefix + "segformer.segformer.")]:
        del state[name]
