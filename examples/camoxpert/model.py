"""CamoXpert: backbone, attention and mixture of experts at four scales, decoder with deep supervision.

Module and parameter names follow mahi-chan/camoXpert, models/camoxpert.py, commit 47e858c (the backbone's follow its
models/backbone.py, since the users' own runs take that part from timm).
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from . import ops as op_sets
from .backbone import build_backbone

LOGIT_LIMIT = 15.0
DECODER_WIDTH = 64


class SDTABlock(nn.Module):
    """Channel attention, then spatial attention, on x (B,C,H,W)."""

    def __init__(self, dim, reduction=8):
        super().__init__()
        self.channel_attention = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(dim, dim // reduction, 1),
            nn.ReLU(inplace=True),
            nn.Conv2d(dim // reduction, dim, 1),
            nn.Sigmoid(),
        )
        self.spatial_attention = nn.Sequential(nn.Conv2d(dim, 1, 7, padding=3), nn.Sigmoid())

    def forward(self, x):
        x = x * self.channel_attention(x)
        return x * self.spatial_attention(x)


class DecoderBlock(nn.Module):
    """Double the size of x, join skip_channels of an encoder stage, and convolve twice."""

    def __init__(self, in_channels, out_channels, skip_channels=0):
        super().__init__()
        self.upsample = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
        layers = []
        for width in (in_channels + skip_channels, out_channels):
            layers += [
                nn.Conv2d(width, out_channels, 3, padding=1),
                nn.BatchNorm2d(out_channels),
                nn.ReLU(inplace=True),
            ]
        self.conv = nn.Sequential(*layers)

    def forward(self, x, skip=None):
        x = self.upsample(x)
        if skip is not None:
            if x.shape[2:] != skip.shape[2:]:
                x = F.interpolate(x, size=skip.shape[2:], mode="bilinear", align_corners=False)
            x = torch.cat([x, skip], 1)
        return self.conv(x)


class CamoXpert(nn.Module):
    """Images (B,in_channels,H,W) -> (logits (B,num_classes,H,W), aux_loss, deep logits or None).

    Logits are clamped to +-15. aux_loss is the sum over the four MoE layers. With return_deep_supervision the third
    value is a list of logits at 1/16, 1/8 and 1/4 of the size. Every image takes max(2, num_experts // 2) experts, or
    the only one.

    ops: 'camox' or 'torch', see ops.py. aux_loss: 'usage_mse', the users', which only reports how unevenly the experts
    are used, or 'switch', which balances them. gradient_checkpointing recomputes the backbone and each expert layer in
    the backward pass; the decoder is left out because recomputing a BatchNorm moves its running statistics twice.
    """

    def __init__(
        self,
        in_channels=3,
        num_classes=1,
        pretrained=False,
        backbone="edgenext_small",
        num_experts=5,
        *,
        ops="camox",
        aux_loss="usage_mse",
        gradient_checkpointing=False,
    ):
        super().__init__()
        self.gradient_checkpointing = gradient_checkpointing
        self.backbone = build_backbone(backbone, in_channels, pretrained, op_sets.layer_norm_class(ops))
        dims = self.backbone.feature_dims
        moe_layer = op_sets.moe_class(ops)
        self.sdta_blocks = nn.ModuleList(SDTABlock(dim) for dim in dims)
        top_k = min(num_experts, max(2, num_experts // 2))
        self.moe_layers = nn.ModuleList(moe_layer(dim, num_experts, top_k, aux_loss=aux_loss) for dim in dims)
        self.decoder_blocks = nn.ModuleList(
            [
                DecoderBlock(dims[3], dims[2], skip_channels=dims[2]),
                DecoderBlock(dims[2], dims[1], skip_channels=dims[1]),
                DecoderBlock(dims[1], dims[0], skip_channels=dims[0]),
                DecoderBlock(dims[0], DECODER_WIDTH),
            ]
        )
        self.deep_heads = nn.ModuleList(nn.Conv2d(dim, num_classes, 1) for dim in (dims[2], dims[1], dims[0]))
        self.final_conv = nn.Sequential(
            nn.Conv2d(DECODER_WIDTH, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(inplace=True),
            nn.Conv2d(32, num_classes, 1),
        )

    def forward(self, x, return_deep_supervision=False):
        features, aux_loss = self.encode(x)
        deep = []
        decoded = features[3]
        for block, skip, head in zip(self.decoder_blocks[:3], features[2::-1], self.deep_heads, strict=True):
            decoded = block(decoded, skip)
            if return_deep_supervision:
                deep.append(head(decoded).clamp(-LOGIT_LIMIT, LOGIT_LIMIT))
        decoded = self.decoder_blocks[3](decoded)
        full_size = F.interpolate(decoded, size=x.shape[2:], mode="bilinear", align_corners=False)
        logits = self.final_conv(full_size).clamp(-LOGIT_LIMIT, LOGIT_LIMIT)
        return logits, aux_loss, deep if return_deep_supervision else None

    def encode(self, x):
        """Images -> (four enhanced feature maps, summed aux_loss)."""
        features, aux_loss = [], 0.0
        for feature, sdta, moe in zip(self.run(self.backbone, x), self.sdta_blocks, self.moe_layers, strict=True):
            feature, aux, _ = self.run(lambda t, sdta=sdta, moe=moe: moe(sdta(t)), feature)
            features.append(feature)
            aux_loss = aux_loss + aux
        return features, aux_loss

    def run(self, function, x):
        """function(x), kept for the backward pass or, under gradient checkpointing, recomputed there."""
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            return checkpoint(function, x, use_reentrant=False)
        return function(x)
