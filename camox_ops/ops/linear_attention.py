"""linear_attention: attention over many positions through an N x D state, two passes over memory."""

from __future__ import annotations

import torch

from . import _check
from ._check import dtype_names
from ._codes import FEATURE_MAPS, LAYOUTS, NORMALIZATIONS, code_of
from ._layout import as_read, dense_strides
from ._register import register, register_last_derivative, vmap_folded

SUM = NORMALIZATIONS["sum"]
MOST_DIM = 256
OP = "linear_attention"


def linear_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    feature_map: str = "elu1",
    normalize: str = "sum",
    causal: bool | str = False,
    key_mask: torch.Tensor | None = None,
    initial_state: tuple[torch.Tensor, torch.Tensor | None] | None = None,
    return_state: bool = False,
    eps: float = 1e-6,
    layout: str = "bhtd",
) -> torch.Tensor | tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor | None]]:
    """Attention over T positions without the T x T matrix: f(q) (f(k)^T v), at the cost of reading q, k, v.

        S = S_0 + sum_t f(k_t) v_t^T    z = z_0 + sum_t f(k_t)
        normalize "sum":      out_t = f(q_t) S / (f(q_t) . z + eps)
        normalize "feature":  out_t = f(q_t) S, f(q_t) and f(k_t) each divided by its own sum over N; a sum of 0 gives 0
        normalize "none":     out_t = f(q_t) S

    Args:
        q, k: (B, H, T, N), or (B, T, H, N) with layout="bthd"; v: (B, H, T, D) or (B, T, H, D). N and D from 1 to 256.
            float32, bfloat16, float16 or float64, one dtype; any strides, nothing is copied: heads of the
            (B, 3C, H, W) output of a qkv convolution are read where they lie.
        feature_map: f: "elu1" (elu(x) + 1), "relu" or "identity".
        causal: False. True and "strict" raise NotImplementedError.
        key_mask: bool (B, T), True where a key is ignored; its k and v may hold anything, its query is answered.
        initial_state: (S_0, z_0), (B, H, N, D) and (B, H, N) whatever the layout, float32 (float64 for float64);
            None: zeros. z_0 is None unless normalize is "sum".
        return_state: also return (S, z), like initial_state.
        eps: added to the denominator of "sum", > 0 in float32 (float64 for float64).

    Returns:
        out, like v, in q's dtype and with its dimensions in memory in the order of q's strides, so that heads of an
        image give an image, contiguous or channels_last, as a view; with return_state (out, (S, z)). Computed in
        float32 (float64 for float64) and rounded once; sums over T are taken chunk by chunk. Under autocast q, k and v
        are cast to its dtype.

    Saved for backward: q, k, v, key_mask, S and z. The gradients of q, k and v lie in memory in the order of their
    strides. The same bits on every run and for any number of threads. First derivatives; a second one raises
    NotImplementedError, and so does forward-mode AD.

    Raises:
        TypeError: a tensor is not dense or of another dtype, dtypes differ, initial_state is not a pair, return_state
            is not a bool, eps is not a number.
        ValueError: shapes that disagree, N or D outside 1 ... 256, a mask or a state of another shape, a z that is
            missing or to spare, eps <= 0, tensors on different devices, an unknown feature_map, normalize, causal or
            layout.

    Source: Transformers are RNNs (arXiv 2006.16236, equations 4 to 7); "feature": SDTAEncoder.linear_attention of
    mahi-chan/camoXpert, models/backbone.py at 47e858c."""
    options = _codes_of(feature_map, normalize)
    _check.choice(OP, "layout", layout, LAYOUTS)
    _check.choice(OP, "causal", causal, (False, True, "strict"))
    if causal:
        raise NotImplementedError(f"{OP}: causal={causal!r}: causal linear attention is not implemented")
    _check.flag(OP, "return_state", return_state)
    for name, value in (("q", q), ("k", k), ("v", v)):
        _check.tensor(OP, name, value)
    q, k, v = _check.autocast(q, k, v)
    _check_shapes(q, k, v, layout)
    eps = _check.eps(OP, eps, q)
    if layout == "bthd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if key_mask is not None:
        _check_mask(key_mask, q.shape[0], q.shape[2], q)
    initial_s, initial_z = _check_state(initial_state, q, v, normalize)
    out, s, z = _linear_attention(q, k, v, key_mask, initial_s, initial_z, *options, eps)
    if layout == "bthd":
        out = out.transpose(1, 2)
    return (out, (s, z if normalize == "sum" else None)) if return_state else out


def linear_attention_packed(
    qkv: torch.Tensor,
    *,
    key_mask: torch.Tensor | None = None,
    feature_map: str = "elu1",
    normalize: str = "sum",
    eps: float = 1e-6,
) -> torch.Tensor:
    """linear_attention of the q, k and v of one (B, 3, H, T, N) tensor, any strides, to (B, H, T, N).

    For modules whose q, k and v are one layer's output: the gradient is one tensor too, in the order of qkv's strides,
    where three would be joined by a copy. Arguments, errors and numbers are those of linear_attention."""
    options = _codes_of(feature_map, normalize)
    _check.tensor(OP, "qkv", qkv)
    (qkv,) = _check.autocast(qkv)
    eps = _check.eps(OP, eps, qkv)
    if qkv.dim() != 5 or qkv.shape[1] != 3:
        raise ValueError(f"{OP}: qkv must have shape (B, 3, H, T, N), got {tuple(qkv.shape)}")
    if not 1 <= qkv.shape[4] <= MOST_DIM:
        raise ValueError(f"{OP}: the head size must be from 1 to {MOST_DIM}, got {qkv.shape[4]}")
    if key_mask is not None:
        _check_mask(key_mask, qkv.shape[0], qkv.shape[3], qkv)
    return _linear_attention_packed(qkv, key_mask, *options, eps)[0]


def linear_attention_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: tuple[torch.Tensor, torch.Tensor | None],
    *,
    feature_map: str = "elu1",
    normalize: str = "sum",
    strict: bool = False,
    eps: float = 1e-6,
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor | None]]:
    """One position of causal linear attention: raises NotImplementedError until causal linear attention exists."""
    raise NotImplementedError("linear_attention_step: causal linear attention is not implemented")


def _codes_of(feature_map: str, normalize: str) -> tuple[int, int]:
    return code_of(OP, "feature_map", feature_map, FEATURE_MAPS), code_of(OP, "normalize", normalize, NORMALIZATIONS)


def _check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str) -> None:
    axes = "B, H, T" if layout == "bhtd" else "B, T, H"
    if q.dim() != 4:
        raise ValueError(f"{OP}: q must have 4 dimensions ({axes}, N), got shape {tuple(q.shape)}")
    if k.shape != q.shape:
        raise ValueError(f"{OP}: k must have the shape of q, {tuple(q.shape)}, got {tuple(k.shape)}")
    if v.dim() != 4 or v.shape[:3] != q.shape[:3]:
        raise ValueError(f"{OP}: v must have shape ({axes}, D) beside q of {tuple(q.shape)}, got {tuple(v.shape)}")
    for name, value in (("q and k", q), ("v", v)):
        if not 1 <= value.shape[3] <= MOST_DIM:
            raise ValueError(f"{OP}: the head size of {name} must be from 1 to {MOST_DIM}, got {value.shape[3]}")
    for name, value in (("k", k), ("v", v)):
        if value.dtype != q.dtype:
            raise TypeError(
                f"{OP}: {name} must have the dtype of q, {dtype_names(q.dtype)}, got {dtype_names(value.dtype)}"
            )
        _check.same_device(OP, name, value, q, of="q")


def _check_mask(key_mask, batch: int, length: int, q: torch.Tensor) -> None:
    _check.tensor(OP, "key_mask", key_mask, dtypes=(torch.bool,))
    if key_mask.shape != (batch, length):
        raise ValueError(f"{OP}: key_mask must have shape {(batch, length)}, got {tuple(key_mask.shape)}")
    _check.same_device(OP, "key_mask", key_mask, q, of="q")


def _check_state(state, q: torch.Tensor, v: torch.Tensor, normalize: str):
    """(S_0, z_0) as the kernels read them."""
    if state is None:
        return None, None
    if not isinstance(state, (tuple, list)) or len(state) != 2:
        raise TypeError(f"{OP}: initial_state must be a pair (S, z), got {type(state).__name__}")
    s, z = state
    if (z is None) == (normalize == "sum"):
        wanted = "a tensor" if normalize == "sum" else "None"
        raise ValueError(f"{OP}: the z of initial_state must be {wanted} with normalize={normalize!r}")
    batch, heads, _, dim = q.shape
    read = []
    for name, value, shape in (("S", s, (batch, heads, dim, v.shape[3])), ("z", z, (batch, heads, dim))):
        if value is None and name == "z":
            read.append(None)
            continue
        real = _check.computed_in(q)
        _check.tensor(OP, f"initial_state's {name}", value, dtypes=(real,))
        if value.shape != shape:
            raise ValueError(f"{OP}: initial_state's {name} must have shape {tuple(shape)}, got {tuple(value.shape)}")
        _check.same_device(OP, f"initial_state's {name}", value, q, of="q")
        read.append(as_read(value, real))
    return read


def _like(x: torch.Tensor, dim: int) -> torch.Tensor:
    """(B, H, T, dim) in the order of x's strides."""
    shape = (*x.shape[:3], dim)
    return x.new_empty_strided(shape, dense_strides(x, shape, sort_last=True))


def _state(q: torch.Tensor, v: torch.Tensor, normalize: int) -> tuple[torch.Tensor, torch.Tensor]:
    real, (batch, heads, _, dim) = _check.computed_in(q), q.shape
    s = q.new_empty((batch, heads, dim, v.shape[3]), dtype=real)
    return s, q.new_empty((batch, heads, dim) if normalize == SUM else (0,), dtype=real)


def _fake(q, k, v, key_mask, initial_s, initial_z, feature_map, normalize, eps):
    return _like(q, v.shape[3]), *_state(q, v, normalize)


def _save(ctx, inputs, output):
    q, k, v, key_mask, ctx.initial_s, ctx.initial_z, *ctx.arguments = inputs
    ctx.initial_s, ctx.initial_z = ctx.initial_s is not None, ctx.initial_z is not None
    _, s, z = output
    ctx.save_for_backward(q, k, v, key_mask, s, z)
    ctx.set_materialize_grads(False)


def _given(grad, grad_s, grad_z, v, s, normalize: int):
    """The gradients that flow in, as the kernels read them."""
    if grad is None:
        grad = v.new_zeros(()).expand(v.shape)
    if normalize != SUM:
        grad_z = None
    return grad, *(g if g is None else as_read(g, s.dtype) for g in (grad_s, grad_z))


def _backward(ctx, grad, grad_s, grad_z):
    q, k, v, key_mask, s, z = ctx.saved_tensors
    if grad is None and grad_s is None and grad_z is None:
        return (None,) * 9
    grad, grad_s, grad_z = _given(grad, grad_s, grad_z, v, s, ctx.arguments[1])
    *grads, sum_s, sum_z = _linear_attention_backward(grad, grad_s, grad_z, q, k, v, key_mask, s, z, *ctx.arguments)
    return *grads, None, sum_s if ctx.initial_s else None, sum_z if ctx.initial_z else None, None, None, None


def _fake_backward(grad, grad_s, grad_z, q, k, v, key_mask, s, z, feature_map, normalize, eps):
    return _like(q, q.shape[3]), _like(k, k.shape[3]), _like(v, v.shape[3]), *_state(q, v, normalize)


def _fake_packed(qkv, key_mask, feature_map, normalize, eps):
    q, _, v = qkv.unbind(1)
    return _like(q, q.shape[3]), *_state(q, v, normalize)


def _save_packed(ctx, inputs, output):
    qkv, key_mask, *ctx.arguments = inputs
    _, s, z = output
    ctx.save_for_backward(qkv, key_mask, s, z)
    ctx.set_materialize_grads(False)


def _backward_packed(ctx, grad, grad_s, grad_z):
    qkv, key_mask, s, z = ctx.saved_tensors
    if grad is None and grad_s is None and grad_z is None:
        return (None,) * 5
    given = _given(grad, grad_s, grad_z, qkv[:, 2], s, ctx.arguments[1])
    return _linear_attention_packed_backward(*given, qkv, key_mask, s, z, *ctx.arguments), None, None, None, None


def _fake_packed_backward(grad, grad_s, grad_z, qkv, key_mask, s, z, feature_map, normalize, eps):
    return qkv.new_empty_strided(qkv.shape, dense_strides(qkv, sort_last=True))


_linear_attention = register(
    OP, fake=_fake, setup_context=_save, backward=_backward, vmap=vmap_folded("linear_attention", 6)
)
_linear_attention_backward = register_last_derivative(
    OP, fake=_fake_backward, vmap=vmap_folded("linear_attention_backward", 9)
)
_linear_attention_packed = register(
    "linear_attention_packed",
    fake=_fake_packed,
    setup_context=_save_packed,
    backward=_backward_packed,
    vmap=vmap_folded("linear_attention_packed", 2),
)
_linear_attention_packed_backward = register_last_derivative(
    "linear_attention_packed", fake=_fake_packed_backward, vmap=vmap_folded("linear_attention_packed_backward", 7)
)
