"""EmberFormer's TemporalTransformerEncoder on short_attention, dropout_add_layer_norm and bias_gelu."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ..ops.bias_gelu import bias_gelu
from ..ops.dropout import dropout_add_layer_norm
from ..ops.short_attention import short_attention


class TemporalEncoder(nn.Module):
    """A stack of post-norm transformer layers over the T steps of every patch, (B, N, T, d_model) -> (B, N, d_model).

    Stands for TemporalTransformerEncoder of tampueroc/emberformer (models/emberformer.py at 80135a5): same constructor,
    forward arguments, parameter names (those of an nn.TransformerEncoder called `transformer`) and initial values, and
    the same numbers with dropout 0. Like it, forward takes of each sequence the step `valid_t.sum(1) - 1`, or 0 where
    that is negative. That is the last valid step where valid steps come first; in batches padded on the left, as that
    project's collate function makes them, it is another slot, and may be a padded one.

    Of the last layer only that step is computed behind the attention. Differs from the module it stands for in two
    ways: dropout draws other masks (camox_ops.dropout), and a sequence without any valid step gives finite numbers, not
    NaN: its attention is zeros.

    Args:
        d_model: width of a token.
        nhead: number of heads, a divisor of d_model.
        num_layers: number of layers.
        dim_feedforward: width between the two products of a feed-forward block.
        dropout: of the attention weights, of what is added to the residual stream, and behind GELU."""

    def __init__(
        self, d_model: int, nhead: int = 4, num_layers: int = 3, dim_feedforward: int = 512, dropout: float = 0.1
    ):
        super().__init__()
        self.d_model = d_model
        layer = nn.TransformerEncoderLayer(d_model, nhead, dim_feedforward, dropout, "gelu", batch_first=True)
        # Holds the parameters; its own forward is not used.
        self.transformer = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)

    def forward(self, tokens: torch.Tensor, valid_t: torch.Tensor) -> torch.Tensor:
        """tokens (B, N, T, d_model), valid_t bool (B, T), True = a step that counts -> (B, N, d_model); T <= 64."""
        if tokens.dim() != 4 or tokens.shape[3] != self.d_model:
            raise ValueError(
                f"TemporalEncoder: tokens must have shape (B, N, T, {self.d_model}), got {tuple(tokens.shape)}"
            )
        batch, patches, length, width = tokens.shape
        if valid_t.dtype != torch.bool:
            raise TypeError(f"TemporalEncoder: valid_t must have dtype bool, got {valid_t.dtype}")
        if valid_t.shape != (batch, length):
            raise ValueError(
                f"TemporalEncoder: valid_t must have shape ({batch}, {length}), got {tuple(valid_t.shape)}"
            )
        padding = (~valid_t).unsqueeze(1).expand(-1, patches, -1).reshape(batch * patches, length)
        step = (valid_t.sum(1) - 1).clamp(min=0).view(batch, 1, 1, 1).expand(batch, patches, 1, width)
        step = step.reshape(batch * patches, 1, width)
        x = tokens.reshape(batch * patches, length, width)
        *before, last = self.transformer.layers
        for layer in before:
            x = _feed_forward(layer, *_attention(layer, x, padding))
        x = _feed_forward(last, *(part.gather(1, step) for part in _attention(last, x, padding)))
        return x.view(batch, patches, width)


def _attention(layer: nn.TransformerEncoderLayer, x: torch.Tensor, padding: torch.Tensor):
    """x (S, T, D) -> what the heads give, side by side, and x."""
    attention = layer.self_attn
    qkv = F.linear(x, attention.in_proj_weight, attention.in_proj_bias)
    q, k, v = qkv.view(*x.shape[:2], 3, attention.num_heads, attention.head_dim).unbind(2)
    heads = short_attention(q, k, v, key_padding_mask=padding, p=attention.dropout, training=layer.training)
    return heads.flatten(2), x


def _feed_forward(layer: nn.TransformerEncoderLayer, heads: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The rest of the layer."""
    x = _add_norm(layer.norm1, layer.self_attn.out_proj(heads), x, layer.dropout1)
    hidden = bias_gelu(
        F.linear(x, layer.linear1.weight), layer.linear1.bias, p=layer.dropout.p, training=layer.training
    )
    return _add_norm(layer.norm2, layer.linear2(hidden), x, layer.dropout2)


def _add_norm(norm: nn.LayerNorm, x: torch.Tensor, residual: torch.Tensor, dropout: nn.Dropout) -> torch.Tensor:
    """In the dtype of a sum of both; autocast on CUDA takes norms in float32."""
    dtype = torch.promote_types(x.dtype, residual.dtype)
    if x.is_cuda and torch.is_autocast_enabled("cuda"):
        dtype = torch.promote_types(dtype, torch.float32)
    x, residual = x.to(dtype), residual.to(dtype)
    options = {"p": dropout.p, "training": dropout.training, "eps": norm.eps}
    return dropout_add_layer_norm(x, residual, norm.weight, norm.bias, **options)
