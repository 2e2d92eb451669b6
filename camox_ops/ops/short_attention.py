"""short_attention: exact softmax attention over many short sequences."""

from __future__ import annotations

import math
import numbers

import torch

from ..reference.short_attention import default_scale
from . import _check
from ._layout import dense_strides
from ._random import draw_seed
from ._register import one_by_one, register, register_last_derivative, vmap_folded

OP = "short_attention"
LONGEST = 64


def short_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    key_padding_mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    p: float = 0.0,
    training: bool = False,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Softmax attention within each of S sequences of at most 64 tokens, every head on its own.

        out[s, i, h] = sum_j dropout(softmax_j(scale * q[s, i, h] . k[s, j, h]), p) v[s, j, h]

    over the keys j that count: not padded, and j <= i where causal. For thousands of sequences of a few tokens, with
    heads of any size, which kernels for long sequences pad or refuse.

    Args:
        q, k, v: (S, T, H, D) of one shape and dtype, T <= 64, any S, H and D; float32, bfloat16, float16 or float64;
            any strides: slices of one (S, T, 3*H*D) projection are read where they lie.
        key_padding_mask: bool (S, T), True = ignore this key: its k and v may hold anything, NaN as well, its query
            is answered; any strides.
        causal: token i sees the tokens up to and including i.
        scale: of the scores, finite; None: 1/sqrt(D).
        p, training, generator: dropout of the weights as in camox_ops.dropout, whose mask counts the elements of the
            (S, H, T, T) weights in row-major order; p = 0 or training=False draws no seed and drops nothing.

    Returns:
        (S, T, H, D) in the dtype of q, its dimensions in memory in the order of q's strides. A token without any key
        that counts gives zeros (and zero gradients), and one whose scores are all -inf zeros, as torch's function does.
        Computed in float32 (float64 for float64) and rounded once; the weights are never rounded. Under
        autocast q, k and v are cast to its dtype first.

    Saved for backward: q, k, v, key_padding_mask and the seed: nothing of size T * T, and not the output. The scores
    and the dropout mask are computed again. First derivatives; a second one raises NotImplementedError, and so does
    forward-mode AD. The same bits on every run and for any number of threads. Masks under torch.vmap as in
    camox_ops.dropout.

    Raises:
        TypeError: q, k or v is not a dense tensor of one of these dtypes, their dtypes differ, key_padding_mask is not
            bool, scale or p is not a number, a flag is not a bool, generator not a torch.Generator.
        ValueError: another number of dimensions, shapes or devices differ, T > 64, key_padding_mask is not (S, T),
            scale is not finite, p outside [0, 1), an unsupported device, a generator of another device.

    The formula is that of torch.nn.functional.scaled_dot_product_attention."""
    out = _attempt(_short_attention, (q, k, v), key_padding_mask, causal, scale, p, training, generator)
    if out is not None:
        return out
    _check.tensor(OP, "q", q)
    if q.dim() != 4:
        raise ValueError(f"{OP}: q must have 4 dimensions (S, T, H, D), got shape {tuple(q.shape)}")
    _check_length("q", q)
    q, k, v = _check.autocast(q, k, v)
    _check.like(OP, "k", k, q, "q")
    _check.like(OP, "v", v, q, "q")
    return _short_attention(q, k, v, *_options("q", q, key_padding_mask, causal, scale, p, training, generator))


def short_attention_packed(
    qkv: torch.Tensor,
    *,
    key_padding_mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    p: float = 0.0,
    training: bool = False,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """short_attention of the q, k and v of one (S, T, 3, H, D) tensor, any strides, to (S, T, H, D).

    For modules whose q, k and v are one layer's output: the gradient is one tensor too, in the order of qkv's strides,
    where three would be joined by a copy. Arguments, errors and numbers are those of short_attention."""
    out = _attempt(_short_attention_packed, (qkv,), key_padding_mask, causal, scale, p, training, generator)
    if out is not None:
        return out
    _check.tensor(OP, "qkv", qkv)
    if qkv.dim() != 5 or qkv.shape[2] != 3:
        raise ValueError(f"{OP}: qkv must have shape (S, T, 3, H, D), got {tuple(qkv.shape)}")
    _check_length("qkv", qkv)
    (qkv,) = _check.autocast(qkv)
    return _short_attention_packed(qkv, *_options("qkv", qkv, key_padding_mask, causal, scale, p, training, generator))


def _attempt(call, tensors, key_padding_mask, causal, scale, p, training, generator) -> torch.Tensor | None:
    """The output of a plain call that drops nothing, all of whose other arguments the operator checks, or None."""
    x = tensors[0]
    if (
        generator is None
        and type(causal) is type(training) is bool
        and type(p) is float
        and (p == 0.0 or (not training and 0.0 < p < 1.0))
        and (scale is None or type(scale) is float)
        and isinstance(x, torch.Tensor)
        and x.dim() > 0
        and not torch.is_autocast_enabled("cpu")
    ):
        return call.attempt(*tensors, key_padding_mask, None, causal, _scale(scale, x.shape[-1]), p)
    return None


def _check_length(name: str, x: torch.Tensor) -> None:
    if x.shape[1] > LONGEST:
        raise ValueError(f"{OP}: {name} must have at most {LONGEST} tokens in dimension 1, got shape {tuple(x.shape)}")


def _options(name: str, x: torch.Tensor, key_padding_mask, causal, scale, p, training, generator) -> tuple:
    """What the operators take beside x, called `name`, and the like: (S, T, ..., D)."""
    if key_padding_mask is not None:
        _check.tensor(OP, "key_padding_mask", key_padding_mask, dtypes=(torch.bool,))
        if key_padding_mask.shape != x.shape[:2]:
            raise ValueError(
                f"{OP}: key_padding_mask must have shape {tuple(x.shape[:2])}, S and T of {name}, "
                f"got {tuple(key_padding_mask.shape)}"
            )
        _check.same_device(OP, "key_padding_mask", key_padding_mask, x, name)
    _check.flag(OP, "causal", causal)
    scale = _scale(scale, x.shape[-1])
    p = _check.probability(OP, "p", p)
    return key_padding_mask, draw_seed(OP, x, p, training, generator, name), causal, scale, p


def _scale(scale, dim: int) -> float:
    if scale is None:
        return default_scale(dim)
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise TypeError(f"{OP}: scale must be a number or None, got {scale!r}")
    if not -math.inf < scale < math.inf:  # as torch.compile can trace it
        raise ValueError(f"{OP}: scale must be finite, got {scale!r}")
    return float(scale)


def _save(ctx, inputs, output):
    *tensors, ctx.causal, ctx.scale, ctx.p = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad):
    if grad is None:
        return (None,) * 8
    return *_short_attention_backward(grad, *ctx.saved_tensors, ctx.causal, ctx.scale, ctx.p), *(None,) * 5


def _backward_packed(ctx, grad):
    if grad is None:
        return (None,) * 6
    return _short_attention_packed_backward(grad, *ctx.saved_tensors, ctx.causal, ctx.scale, ctx.p), *(None,) * 5


def _fake(q, *_):
    return q.new_empty_strided(q.shape, dense_strides(q))


def _vmap(name: str, tensors: int):
    """The first `tensors` arguments and the padding are (S, ...): more sequences, but where a seed counts weights."""
    folded = vmap_folded(name, tensors + 1)

    def rule(info, in_dims, *args):
        if args[tensors + 1] is not None:
            return one_by_one(getattr(torch.ops.camox_ops, name), info, in_dims, args)
        return folded(info, in_dims, *args)

    return rule


_short_attention = register(
    "short_attention", fake=_fake, setup_context=_save, backward=_backward, vmap=_vmap("short_attention", 3)
)
_short_attention_backward = register_last_derivative(
    "short_attention",
    fake=lambda grad, q, k, v, *_: (_fake(q), _fake(k), _fake(v)),
    vmap=_vmap("short_attention_backward", 4),
)
_short_attention_packed = register(
    "short_attention_packed",
    fake=lambda qkv, *_: _fake(qkv[:, :, 0]),
    setup_context=_save,
    backward=_backward_packed,
    vmap=_vmap("short_attention_packed", 1),
)
_short_attention_packed_backward = register_last_derivative(
    "short_attention_packed",
    fake=lambda grad, qkv, *_: _fake(qkv),
    vmap=_vmap("short_attention_packed_backward", 2),
)
