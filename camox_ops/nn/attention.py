"""Attention over many positions: CamoXpert's SDTAEncoder over pixels, LinearAttention over tokens."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ..ops.linear_attention import linear_attention_packed


def _check_heads(module: str, dim: int, num_heads: int) -> None:
    if num_heads < 1:
        raise ValueError(f"{module}: num_heads must be >= 1, got {num_heads}")
    if dim < 1 or dim % num_heads:
        raise ValueError(f"{module}: dim must be a positive multiple of num_heads={num_heads}, got {dim}")


class SDTAEncoder(nn.Module):
    """Attention over the pixels of (B, dim, H, W) in num_heads heads between two 1x1 convolutions, plus x.

    Drop-in replacement for SDTAEncoder of mahi-chan/camoXpert (models/backbone.py at 47e858c): same constructor and
    parameters, the same numbers with dropout 0. Linear attention is camox_ops.linear_attention(feature_map="elu1",
    normalize="feature"): it reads the heads where the qkv convolution wrote them and writes an image, so nothing is
    rearranged, and keeps for the backward pass that convolution's output and a head_dim x head_dim state per head; the
    gradient of that output is written as one tensor.

    Args:
        dim: channels, a multiple of num_heads; at most 256 a head where attention is linear.
        num_heads: heads.
        drop_path: dropout of single elements of the result, as in the module it replaces, before x is added.
        use_linear_attention: False for softmax attention, F.scaled_dot_product_attention, whose cost grows with
            (H*W)^2."""

    def __init__(self, dim: int, num_heads: int = 8, drop_path: float = 0.1, use_linear_attention: bool = True):
        super().__init__()
        _check_heads("SDTAEncoder", dim, num_heads)
        self.dim = dim
        self.num_heads = num_heads
        self.use_linear_attention = use_linear_attention
        self.qkv = nn.Conv2d(dim, dim * 3, 1, bias=False)
        self.proj = nn.Conv2d(dim, dim, 1)
        self.drop_path = nn.Dropout(drop_path)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, use_linear_attention={self.use_linear_attention}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, dim, H, W) -> (B, dim, H, W), contiguous or channels_last as the convolutions give it."""
        if x.dim() != 4 or x.shape[1] != self.dim:
            raise ValueError(f"SDTAEncoder: x must have shape (B, {self.dim}, H, W), got {tuple(x.shape)}")
        heads = self.qkv(x).flatten(2).unflatten(1, (3, self.num_heads, self.dim // self.num_heads))
        qkv = heads.transpose(-2, -1)
        if self.use_linear_attention:
            mixed = linear_attention_packed(qkv, feature_map="elu1", normalize="feature")
        else:
            # fused kernels, which keep no matrix of all pairs, want the channels of a head side by side
            mixed = F.scaled_dot_product_attention(*qkv.contiguous().unbind(1))
        image = mixed.transpose(-2, -1).flatten(1, 2).unflatten(2, x.shape[2:])
        return self.drop_path(self.proj(image)) + x


class LinearAttention(nn.Module):
    """Multi-head linear attention over tokens (B, T, dim) between two linear layers, `qkv` and `proj`.

    Every token attends to every token at a cost that grows with T: camox_ops.linear_attention on views of the first
    layer's output.

    Args:
        dim: width of a token, a multiple of num_heads; at most 256 a head.
        num_heads: heads.
        qkv_bias: whether the first layer has a bias.
        feature_map, normalize, eps: as for camox_ops.linear_attention."""

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        qkv_bias: bool = False,
        feature_map: str = "elu1",
        normalize: str = "sum",
        eps: float = 1e-6,
    ):
        super().__init__()
        _check_heads("LinearAttention", dim, num_heads)
        self.dim = dim
        self.num_heads = num_heads
        self.options = {"feature_map": feature_map, "normalize": normalize, "eps": eps}
        self.qkv = nn.Linear(dim, dim * 3, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in {"num_heads": self.num_heads, **self.options}.items())

    def forward(self, x: torch.Tensor, key_mask: torch.Tensor | None = None) -> torch.Tensor:
        """x (B, T, dim), key_mask bool (B, T), True = a token that no other attends to -> (B, T, dim)."""
        if x.dim() != 3 or x.shape[2] != self.dim:
            raise ValueError(f"LinearAttention: x must have shape (B, T, {self.dim}), got {tuple(x.shape)}")
        heads = self.qkv(x).unflatten(2, (3, self.num_heads, self.dim // self.num_heads))
        mixed = linear_attention_packed(heads.permute(0, 2, 3, 1, 4), key_mask=key_mask, **self.options)
        return self.proj(mixed.transpose(1, 2).flatten(2))
