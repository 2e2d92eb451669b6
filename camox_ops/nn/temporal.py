"""EmberFormer's TemporalTransformerEncoder on short_attention, dropout_add_layer_norm and bias_gelu."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from .._torch_private import in_transform
from ..ops import _check
from ..ops._layout import as_read
from ..ops._random import draw_seed
from ..ops._register import last_derivative
from ..ops.bias_gelu import bias_gelu
from ..ops.dropout import dropout_add_layer_norm
from ..ops.short_attention import short_attention_packed
from ._plain import FusedModule, all_plain, global_hooks, not_plain
from .projections import multiply, multiply_and_sum, project

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

    Of the last layer only that step is computed after the attention. In float32 on the CPU the products are this
    library's own, and backward computes GELU and its dropout again from the first product.

    Differs from the module it replaces in two ways: dropout draws other masks (camox_ops.dropout), and a sequence
    without any valid step gives finite numbers, not NaN: its attention is zeros.

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
    qkv = _linear(x, attention.in_proj_weight, attention.in_proj_bias)
    qkv = qkv.view(*x.shape[:2], 3, attention.num_heads, attention.head_dim)
    heads = short_attention_packed(qkv, key_padding_mask=padding, p=attention.dropout, training=attention.training)
    return heads.flatten(2), x


def _feed_forward(layer: nn.TransformerEncoderLayer, heads: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The rest of the layer."""
    mixed = _linear(heads, layer.self_attn.out_proj.weight, layer.self_attn.out_proj.bias)
    x = _add_norm(layer.norm1, mixed, x, layer.dropout1)
    first, second, p, training = layer.linear1, layer.linear2, layer.dropout.p, layer.dropout.training
    if _multiplies(x, first.weight, first.bias, second.weight, second.bias):
        seed = draw_seed("bias_gelu", x, p, training, None)
        bias = as_read(first.bias, x.dtype)
        y, _ = _FeedForward.apply(x.flatten(0, -2), first.weight, bias, second.weight, second.bias, seed, p)
        y = y.view_as(x)
    else:
        hidden = bias_gelu(F.linear(x, first.weight), first.bias, p=p, training=training)
        y = F.linear(hidden, second.weight, second.bias)
    return _add_norm(layer.norm2, y, x, layer.dropout2)


def _multiplies(*tensors: torch.Tensor | None) -> bool:
    """Whether this library multiplies them: float32 on the CPU, where MKL takes AVX2 kernels on AMD's processors. What
    autocast casts, oneDNN multiplies as fast; torch.func and tensors of other classes need PyTorch's own operators."""
    given = [tensor for tensor in tensors if tensor is not None]
    for tensor in given:
        if type(tensor) not in _PLAIN or tensor.dtype != torch.float32 or tensor.device.type != "cpu":
            return False
    return not torch.is_autocast_enabled("cpu") and not in_transform(*given)


_PLAIN = (torch.Tensor, nn.Parameter)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if not _multiplies(x, weight, bias):
        return F.linear(x, weight, bias)
    return project(x, weight.t(), bias)


class _FeedForward(torch.autograd.Function):
    """x (M, D) through the first product, bias_gelu and the second product -> (M, D).

    Saves the first product and not what bias_gelu makes of it, which is as large: backward computes that again, from
    the same seed, in one pass over memory."""

    @staticmethod
    def forward(x, weight1, bias1, weight2, bias2, seed, p):
        inner = multiply(x, weight1.t())
        return multiply(torch.ops.camox_ops.bias_gelu(inner, bias1, seed, p), weight2.t(), bias2), inner

    @staticmethod
    def setup_context(ctx, inputs, outputs):
        *operands, _, seed, ctx.p = inputs
        ctx.mark_non_differentiable(outputs[1])
        ctx.save_for_backward(*operands, seed, outputs[1])

    @staticmethod
    @last_derivative("TemporalEncoder")
    def backward(ctx, grad, _):
        x, weight1, bias1, weight2, seed, inner = ctx.saved_tensors
        needs_x, needs_weight1, _, needs_weight2, needs_bias2, *_ = ctx.needs_input_grad
        grad_x = grad_weight1 = grad_weight2 = grad_bias2 = None
        if needs_weight2 or needs_bias2:
            hidden = torch.ops.camox_ops.bias_gelu(inner, bias1, seed, ctx.p)
            grad_weight2, grad_bias2 = multiply_and_sum(hidden.t(), grad)
            grad_weight2 = grad_weight2.t()
            del hidden
        grad_hidden = multiply(grad, weight2)
        grad_inner, grad_bias1 = torch.ops.camox_ops.bias_gelu_backward(grad_hidden, inner, bias1, seed, ctx.p)
        del grad_hidden
        if needs_x:
            grad_x = multiply(grad_inner, weight1)
        if needs_weight1:
            grad_weight1 = multiply(grad_inner.t(), x)
        return grad_x, grad_weight1, grad_bias1, grad_weight2, grad_bias2, None, None


def _add_norm(norm: nn.LayerNorm, x: torch.Tensor, residual: torch.Tensor, dropout: nn.Dropout) -> torch.Tensor:
    """In the dtype of a sum of both; autocast on CUDA takes norms in float32."""
    dtype = torch.promote_types(x.dtype, residual.dtype)
    if x.is_cuda and torch.is_autocast_enabled("cuda"):
        dtype = torch.promote_types(dtype, torch.float32)
    x, residual = x.to(dtype), residual.to(dtype)
    options = {"p": dropout.p, "training": dropout.training, "eps": norm.eps}
    return dropout_add_layer_norm(x, residual, norm.weight, norm.bias, **options)
