"""nn.TransformerEncoderLayer and nn.MultiheadAttention over short sequences -> short_attention and its companions."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from ..nn import temporal
from ..ops.bias_gelu import bias_gelu
from ..ops.dropout import dropout
from ..ops.short_attention import LONGEST, short_attention_packed
from . import _call, _proof
from ._recogniser import Planned, Recogniser


class EncoderLayer(Recogniser):
    """By its exact type, post-norm and pre-norm, any activation; masks that say which keys are padded, or causal ones.
    Settings of the layer are read on each call."""

    name = "transformer_encoder_layer"

    def is_candidate(self, module: nn.Module, planned: Planned) -> bool:
        return type(module) is nn.TransformerEncoderLayer

    def inner(self, module: nn.Module) -> list[tuple[str, nn.Module]]:
        return [(name, module._modules[name]) for name in temporal.KINDS]

    def recognise(self, module: nn.Module, thorough: bool, planned: Planned) -> tuple[None, float]:
        reason = why_not_plain(module)
        if reason is not None:
            raise _proof.NotAlike(reason)

        def fast(copy_of_module, *args, **kwargs):
            return self.compute(copy_of_module, None, *args, **kwargs)

        def cases() -> Iterator:
            for x, masks in _cases(module.self_attn):
                if "attn_mask" in masks:
                    masks = {"src_mask": masks["attn_mask"], "src_key_padding_mask": masks["key_padding_mask"]}
                yield (x,), masks

        if not thorough:
            return None, 0.0
        return None, _proof.compare64(module, nn.TransformerEncoderLayer.forward, fast, cases, ("own",))

    def serves(self, module: nn.Module, settings, args: tuple, kwargs: dict) -> bool:
        bound = _bound(("src", "src_mask", "src_key_padding_mask", "is_causal"), args, kwargs)
        if bound is None or not _serves(module.self_attn, *bound) or why_not_plain(module):
            return False
        inner = module._modules
        if not _call.are_bypassed([inner[name] for name in temporal.KINDS], list(temporal.KINDS.values())):
            return False
        # PyTorch has one op for a whole layer without gradients.
        return module.training or differentiated(module, bound[0])

    def compute(
        self,
        module: nn.TransformerEncoderLayer,
        settings,
        src: torch.Tensor,
        src_mask: torch.Tensor | None = None,
        src_key_padding_mask: torch.Tensor | None = None,
        is_causal: bool = False,
    ) -> torch.Tensor:
        def attention(x):
            own = module.self_attn
            return _attention(own, x, src_mask, src_key_padding_mask, not own.batch_first)

        if module.norm_first:
            x = src + _dropped(attention(module.norm1(src)), module.dropout1)
            return x + _dropped(_feed_forward(module, module.norm2(x)), module.dropout2)
        x = temporal._add_norm(module.norm1, attention(src), src, module.dropout1)
        return temporal._add_norm(module.norm2, _feed_forward(module, x), x, module.dropout2)


class Attention(Recogniser):
    """By its exact type, where it attends to its own input and no weights are asked for."""

    name = "multihead_attention"

    def is_candidate(self, module: nn.Module, planned: Planned) -> bool:
        return type(module) is nn.MultiheadAttention

    def recognise(self, module: nn.Module, thorough: bool, planned: Planned) -> tuple[None, float]:
        reason = _why_no_plain_attention(module)
        if reason is not None:
            raise _proof.NotAlike(reason)

        def original(copy_of_module, x, **masks):
            return nn.MultiheadAttention.forward(copy_of_module, x, x, x, need_weights=False, **masks)

        def fast(copy_of_module, x, **masks):
            return self.compute(copy_of_module, None, x, x, x, need_weights=False, **masks)

        def cases() -> Iterator:
            for x, masks in _cases(module):
                yield (x,), masks

        return None, _proof.compare64(module, original, fast, cases, ("own",)) if thorough else 0.0

    def serves(self, module: nn.Module, settings, args: tuple, kwargs: dict) -> bool:
        bound = _bound(ARGUMENTS, args, kwargs)
        if bound is None or bound[4] is not False or not bound[0] is bound[1] is bound[2]:
            return False
        if not _serves(module, bound[0], bound[5], bound[3], bound[7]) or _why_no_plain_attention(module) is not None:
            return False
        return module.training or differentiated(module, bound[0])

    def compute(
        self,
        module: nn.MultiheadAttention,
        settings,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, None]:
        mixed = _attention(module, query, attn_mask, key_padding_mask, True)
        return mixed.transpose(0, 1) if module.batch_first else mixed, None  # strides as of the original


ARGUMENTS = (
    "query",
    "key",
    "value",
    "key_padding_mask",
    "need_weights",
    "attn_mask",
    "average_attn_weights",
    "is_causal",
)


def _bound(names: tuple[str, ...], args: tuple, kwargs: dict) -> list | None:
    """Arguments by position, None for one not given; None where there are others, or where the first is a keyword."""
    if not 0 < len(args) <= len(names) or not all(name in names[len(args) :] for name in kwargs):
        return None
    return [*args, *(kwargs.get(name) for name in names[len(args) :])]


def _why_no_plain_attention(attention: nn.MultiheadAttention) -> str | None:
    if not attention._qkv_same_embed_dim or attention.in_proj_weight is None:
        return "it has separate projections"
    if attention.bias_k is not None or attention.bias_v is not None or attention.add_zero_attn:
        return "it has keys of its own"
    return None if 0 <= attention.dropout < 1 else f"it has dropout={attention.dropout}"


def why_not_plain(layer: nn.TransformerEncoderLayer) -> str | None:
    own = layer._modules
    for name, kind in temporal.KINDS.items():
        if own.get(name) is None or _call.kind_of(own[name]) is not kind:
            return f"its {name} is of another class"
    reason = _why_no_plain_attention(own["self_attn"])
    if reason is not None:
        return reason
    for name in ("dropout", "dropout1", "dropout2"):
        if not 0 <= own[name].p < 1:
            return f"its {name} has p={own[name].p}"
    if own["linear1"].bias is None or own["norm1"].bias is None or own["norm2"].bias is None:
        return "it has no biases"
    if any(len(own[name].normalized_shape) != 1 for name in ("norm1", "norm2")):
        return "its norms are over more than the last dimension"
    return None


def _serves(attention: nn.MultiheadAttention, x, mask, padding, is_causal) -> bool:
    if is_causal and mask is None:  # an error there
        return False
    if not _call.is_served(x) or x.dim() != 3 or x.shape[2] != attention.embed_dim:
        return False
    # Not by its name, which a parametrization computes: with spectral_norm each time is a step of its iteration.
    weight = attention._parameters.get("in_proj_weight")
    if weight is None or (x.dtype is not weight.dtype and _call.autocast_dtype(x) is None):
        return False
    batch, length = (0, 1) if attention.batch_first else (1, 0)
    if x.shape[length] > LONGEST or x.shape[length] == 0:
        return False
    if padding is not None:
        if (
            not isinstance(padding, torch.Tensor)
            or padding.requires_grad
            or padding.shape != (x.shape[batch], x.shape[length])
        ):
            return False
        if padding.dtype is not torch.bool and not _is_of_zeros_and_minus_infinity(padding):
            return False
    return mask is None or _is_causal(mask, x.shape[length])


def _is_of_zeros_and_minus_infinity(mask: torch.Tensor) -> bool:
    """What nn.TransformerEncoder makes of a mask of bools. Reads values, so only where nothing waits for them."""
    if torch.compiler.is_compiling() or not mask.is_cpu or not mask.is_floating_point():
        return False
    return bool(((mask == 0) | (mask == -math.inf)).all())


def _is_causal(mask: torch.Tensor, length: int) -> bool:
    if torch.compiler.is_compiling() or not isinstance(mask, torch.Tensor) or not mask.is_cpu or mask.requires_grad:
        return False
    if mask.dtype is not torch.bool and not mask.is_floating_point():  # an error there
        return False
    return mask.shape == (length, length) and torch.equal(mask, _causal(length, mask.dtype))


@functools.lru_cache(maxsize=32)
def _causal(length: int, dtype: torch.dtype) -> torch.Tensor:
    with torch.inference_mode(False):
        later = torch.ones(length, length, dtype=torch.bool, device="cpu").triu(1)
        return later if dtype is torch.bool else torch.zeros_like(later, dtype=dtype).masked_fill(later, -math.inf)


def differentiated(module: nn.Module, x: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in module.parameters()))


def _attention(attention: nn.MultiheadAttention, x: torch.Tensor, mask, padding, length_first: bool) -> torch.Tensor:
    """x (B, T, D), or (T, B, D) without batch_first -> (T, B, D) where length_first, else (B, T, D). mask: None or
    causal."""
    if padding is not None and padding.dtype is not torch.bool:
        padding = padding != 0
    qkv = F.linear(x, attention.in_proj_weight, attention.in_proj_bias)
    heads = qkv.view(*x.shape[:2], 3, attention.num_heads, attention.head_dim)
    if not attention.batch_first:
        heads = heads.transpose(0, 1)
    options = {"key_padding_mask": padding, "causal": mask is not None, "p": float(attention.dropout)}
    mixed = short_attention_packed(heads, training=attention.training, **options)
    if length_first:
        mixed = mixed.transpose(0, 1)
    return F.linear(mixed.flatten(2), attention.out_proj.weight, attention.out_proj.bias)


def _dropped(x: torch.Tensor, module: nn.Dropout) -> torch.Tensor:
    return dropout(x, float(module.p), training=module.training)


def _feed_forward(layer: nn.TransformerEncoderLayer, x: torch.Tensor) -> torch.Tensor:
    first, activation = layer.linear1, layer.activation
    is_stock = activation is F.gelu or _call.why_not_bypassed(activation, nn.GELU) is None
    if is_stock and getattr(activation, "approximate", "none") == "none":
        hidden = F.linear(x, first.weight)
        hidden = bias_gelu(hidden, first.bias, p=float(layer.dropout.p), training=layer.dropout.training)
    else:
        hidden = _dropped(activation(F.linear(x, first.weight, first.bias)), layer.dropout)
    return F.linear(hidden, layer.linear2.weight, layer.linear2.bias)


def _cases(attention: nn.MultiheadAttention) -> Iterator[tuple[torch.Tensor, dict]]:
    """Inputs and masks: none, padded keys (one sequence has no others), as numbers, causal."""
    batch, length, width = 3, 5, attention.embed_dim
    x = _proof.values((batch, length, width) if attention.batch_first else (length, batch, width))
    yield x, {}
    padding = torch.arange(length) >= torch.tensor([[5], [3], [0]])
    numbers = torch.zeros(batch, length, dtype=torch.float64).masked_fill(padding, -math.inf)
    yield x, {"attn_mask": None, "key_padding_mask": padding}
    yield x, {"attn_mask": _causal(length, torch.float64), "key_padding_mask": numbers}
