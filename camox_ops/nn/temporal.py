"""EmberFormer's TemporalTransformerEncoder on short_attention, dropout_add_layer_norm and bias_gelu."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ..ops import _check
from ..ops.bias_gelu import bias_gelu
from ..ops.dropout import dropout_add_layer_norm
from ..ops.short_attention import short_attention
from ._plain import FusedModule, all_plain, global_hooks, not_plain

# what an nn.TransformerEncoderLayer holds
KINDS = {
    "self_attn": nn.MultiheadAttention,
    "linear1": nn.Linear,
    "dropout": nn.Dropout,
    "linear2": nn.Linear,
    "norm1": nn.LayerNorm,
    "norm2": nn.LayerNorm,
    "dropout1": nn.Dropout,
    "dropout2": nn.Dropout,
}


class TemporalEncoder(FusedModule):
    """A stack of post-norm transformer layers over the T steps of every patch, (B, N, T, d_model) -> (B, N, d_model).

    Drop-in replacement for TemporalTransformerEncoder of tampueroc/emberformer (models/emberformer.py at 80135a5): same
    constructor, forward arguments, parameter names (those of an nn.TransformerEncoder called `transformer`) and initial
    values, and the same numbers with dropout 0. Like it, forward takes of each sequence the step `valid_t.sum(1) - 1`,
    or 0 where that is negative. That is the last valid step where valid steps come first; in batches padded on the
    left, as that project's collate function makes them, it is another slot, and may be a padded one.

    Of the last layer only that step is computed after the attention. Differs from the module it replaces in two
    ways: dropout draws other masks (camox_ops.dropout), and a sequence without any valid step gives finite numbers, not
    NaN: its attention is zeros.

    A layer is computed so where its inner modules and settings are what the constructor made; another one (with an
    adapter, a hook, a parametrization, an inner module of another class, another activation) is called as PyTorch's
    nn.TransformerEncoderLayer, whose dropout and NaN it then has: see camox_ops.nn.why_not_fused.

    Args:
        d_model: width of a token.
        nhead: number of heads, a divisor of d_model.
        num_layers: number of layers.
        dim_feedforward: width between the two products of a feed-forward block.
        dropout: of the attention weights, of what is added to the residual stream, and after GELU; in [0, 1)."""

    def __init__(
        self, d_model: int, nhead: int = 4, num_layers: int = 3, dim_feedforward: int = 512, dropout: float = 0.1
    ):
        super().__init__()
        _check.probability("TemporalEncoder", "dropout", dropout)
        self.d_model = d_model
        layer = nn.TransformerEncoderLayer(d_model, nhead, dim_feedforward, dropout, "gelu", batch_first=True)
        # Holds the parameters; its own forward is used only where it has to be.
        self.transformer = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)

    def forward(self, tokens: torch.Tensor, valid_t: torch.Tensor) -> torch.Tensor:
        """tokens (B, N, T, d_model), valid_t bool (B, T), True = a step that counts -> (B, N, d_model); T <= 64."""
        if tokens.dim() != 4 or tokens.shape[3] != self.d_model:
            raise ValueError(
                f"TemporalEncoder: tokens must have shape (B, N, T, {self.d_model}), got {tuple(tokens.shape)}"
            )
        batch, patches, length, width = tokens.shape
        if length == 0:
            raise ValueError(f"TemporalEncoder: tokens must have at least one step, got {tuple(tokens.shape)}")
        if valid_t.dtype != torch.bool:
            raise TypeError(f"TemporalEncoder: valid_t must have dtype bool, got {valid_t.dtype}")
        if valid_t.shape != (batch, length):
            raise ValueError(
                f"TemporalEncoder: valid_t must have shape ({batch}, {length}), got {tuple(valid_t.shape)}"
            )
        if self._why_called() is not None:
            padding, step = _padding_and_step(tokens, valid_t)
            x = self.transformer(tokens.flatten(0, 1), src_key_padding_mask=padding)
            return x.gather(1, step).view(batch, patches, width)
        return last_steps(self.transformer.layers, tokens, valid_t, _fused)

    def _why_called(self) -> str | None:
        """Why the whole stack has to be called."""
        reason = global_hooks()
        if reason is not None:
            return reason
        for name, module, kind in (
            ("transformer", self.transformer, nn.TransformerEncoder),
            ("transformer.layers", self.transformer.layers, nn.ModuleList),
        ):
            reason = not_plain(module, kind)
            if reason is not None:
                return f"{name} {reason}"
        return None if self.transformer.norm is None else "transformer.norm is there"

    def why_not_fused(self) -> list[str]:
        reason = self._why_called()
        if reason is not None:
            return [reason]
        found = ((number, _why_layer_called(layer)) for number, layer in enumerate(self.transformer.layers))
        return [f"transformer.layers.{number} {reason}" for number, reason in found if reason is not None]


def _why_layer_called(layer: nn.Module) -> str | None:
    reason = not_plain(layer, nn.TransformerEncoderLayer)
    if reason is not None:
        return reason
    inner = layer._modules
    if not all_plain([inner.get(name) for name in KINDS], list(KINDS.values())):
        for name, kind in KINDS.items():
            reason = not_plain(inner.get(name), kind)
            if reason is not None:
                return f"{name} {reason}"
    attention, first = inner["self_attn"], inner["linear1"]
    reason = not_plain(attention.out_proj, NonDynamicallyQuantizableLinear)
    if reason is not None:
        return f"self_attn.out_proj {reason}"
    activation = layer.activation
    if activation is not F.gelu and (not_plain(activation, nn.GELU) is not None or activation.approximate != "none"):
        return "activation is not GELU"
    if layer.norm_first or not attention.batch_first:
        return "has norm_first or another batch_first"
    if attention.in_proj_weight is None or attention.in_proj_bias is None or first.bias is None:
        return "has separate projections or no bias"
    if attention.bias_k is not None or attention.add_zero_attn:
        return "has keys of its own"
    for name in ("norm1", "norm2"):
        norm = inner[name]
        if len(norm.normalized_shape) != 1 or norm.weight is None or norm.bias is None:
            return f"{name} has no weight or bias, or another shape"
    return None


def _fused(layer: nn.Module) -> bool:
    return _why_layer_called(layer) is None


def last_steps(layers: nn.ModuleList, tokens: torch.Tensor, valid_t: torch.Tensor, is_fused: Callable) -> torch.Tensor:
    """tokens (B, N, T, D) through the layers -> (B, N, D), the step `valid_t.sum(1) - 1` of each sequence. Layers for
    which is_fused is not true are called."""
    padding, step = _padding_and_step(tokens, valid_t)
    x = tokens.flatten(0, 1)
    *before, last = layers
    for layer in before:
        x = _feed_forward(layer, *_attention(layer, x, padding)) if is_fused(layer) else _called(layer, x, padding)
    if is_fused(last):
        x = _feed_forward(last, *(part.gather(1, step) for part in _attention(last, x, padding)))
    else:
        x = _called(last, x, padding).gather(1, step)
    return x.view(*tokens.shape[:2], tokens.shape[3])


def _padding_and_step(tokens: torch.Tensor, valid_t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(B*N, T), True where a step does not count; (B*N, 1, D), the step to take, as gather wants it."""
    batch, patches, length, width = tokens.shape
    padding = (~valid_t).unsqueeze(1).expand(-1, patches, -1).reshape(batch * patches, length)
    step = (valid_t.sum(1) - 1).clamp(min=0).view(batch, 1, 1, 1).expand(batch, patches, 1, width)
    return padding, step.reshape(batch * patches, 1, width)


def _called(layer: nn.Module, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    return layer(x, src_key_padding_mask=padding)


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
