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
    op = "short_attention"
    _check.tensor(op, "q", q)
    if q.dim() != 4:
        raise ValueError(f"{op}: q must have 4 dimensions (S, T, H, D), got shape {tuple(q.shape)}")
    if q.shape[1] > LONGEST:
        raise ValueError(f"{op}: q must have at most {LONGEST} tokens in dimension 1, got shape {tuple(q.shape)}")
    q, k, v = _check.autocast(q, k, v)
    _check.like(op, "k", k, q, "q")
    _check.like(op, "v", v, q, "q")
    if key_padding_mask is not None:
        _check.tensor(op, "key_padding_mask", key_padding_mask, dtypes=(torch.bool,))
        if key_padding_mask.shape != q.shape[:2]:
            raise ValueError(
                f"{op}: key_padding_mask must have shape {tuple(q.shape[:2])}, S and T of q, "
                f"got {tuple(key_padding_mask.shape)}"
            )
        _check.same_device(op, "key_padding_mask", key_padding_mask, q, "q")
    _check.flag(op, "causal", causal)
    scale = _scale(op, scale, q.shape[3])
    p = _check.probability(op, "p", p)
    seed = draw_seed(op, q, p, training, generator, "q")
    return _short_attention(q, k, v, key_padding_mask, seed, causal, scale, p)


def _scale(op: str, scale, dim: int) -> float:
    if scale is None:
        return default_scale(dim)
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise TypeError(f"{op}: scale must be a number or None, got {scale!r}")
    if not -math.inf < scale < math.inf:  # as torch.compile can trace it
        raise ValueError(f"{op}: scale must be finite, got {scale!r}")
    return float(scale)


def _save(ctx, inputs, output):
    *tensors, ctx.causal, ctx.scale, ctx.p = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad):
    if grad is None:
        return (None,) * 8
    return *_short_attention_backward(grad, *ctx.saved_tensors, ctx.causal, ctx.scale, ctx.p), *(None,) * 5


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
