"""linear_attention: attention over many positions through an N x D state, two passes over memory, or causal, chunk by
chunk; linear_attention_step: one position of the causal form."""

from __future__ import annotations

import torch

from .. import reference
from .._torch_private import attempt_in_place, call_operator, in_transform
from . import _check
from ._check import dtype_names
from ._codes import FEATURE_MAPS, LAYOUTS, NORMALIZATIONS, code_of
from ._layout import as_read, dense_strides, has_internal_overlap, share_memory
from ._register import one_by_one, register, register_last_derivative, vmap_folded, with_dense

SUM = NORMALIZATIONS["sum"]
MOST_DIM = 256
OP = "linear_attention"
SOFTMAX = "softmax"
"""A feature map of all positions: computed here, by torch, and not by the kernels."""


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
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor | None]]:
    """Attention over T positions without the T x T matrix: f(q) (f(k)^T v), at the cost of reading q, k, v.

        S = S_0 + sum_t f(k_t) v_t^T    z = z_0 + sum_t f(k_t)
        normalize "sum":      out_t = f(q_t) S / (f(q_t) . z + eps)
        normalize "feature":  out_t = f(q_t) S, f(q_t) and f(k_t) each divided by its own sum over N; a sum of 0 gives 0
        normalize "none":     out_t = f(q_t) S

    Causal, the S and z of position t are the sums over the keys up to t, or before t with "strict".

        out, state = cx.linear_attention(q, k, v, causal=True, return_state=True)
        out, state = cx.linear_attention_step(next_q, next_k, next_v, state)

    Args:
        q, k: (B, H, T, N), or (B, T, H, N) with layout="bthd"; v: (B, H, T, D) or (B, T, H, D). N and D from 1 to 256.
            float32, bfloat16, float16 or float64, one dtype; any strides, nothing is copied: heads of the
            (B, 3C, H, W) output of a qkv convolution are read where they lie.
        feature_map: f: "elu1" (elu(x) + 1), "relu" or "identity"; "softmax", not causal: the softmax of q over its N
            features, and of k over the T positions that are not masked, by torch, before the passes over memory.
        causal: False; True: a position sees itself and what came before; "strict": only what came before, the first one
            nothing but the initial state.
        key_mask: bool (B, T), True where a key is ignored; its k and v may hold anything, its query is answered.
        initial_state: (S_0, z_0), (B, H, N, D) and (B, H, N) whatever the layout, float32 (float64 for float64);
            None: zeros. z_0 is None unless normalize is "sum".
        return_state: also return (S, z), like initial_state.
        eps: added to the denominator of "sum", > 0 in float32 (float64 for float64).
        cu_seqlens: int32 (S+1,), rising from 0 to T, with causal only: q, k and v have B = 1 and hold S sequences one
            after the other. Each begins with its own state: initial_state and the state returned are (S, H, N, D) and
            (S, H, N). On CUDA values that do not rise so give positions to other sequences, and check_errors() raises.

    Returns:
        out, like v, in q's dtype and with its dimensions in memory in the order of q's strides, so that heads of an
        image give an image, contiguous or channels_last, as a view; with return_state (out, (S, z)). Computed in
        float32 (float64 for float64) and rounded once; sums over T are taken chunk by chunk. Under autocast q, k and v
        are cast to its dtype.

    Saved for backward: q, k, v, key_mask, S and z; causal the inputs alone, from which the states are computed again.
    Nothing of the size of T states or of T x T is stored; on CUDA a state for every 64 positions while either runs.

    The gradients of q, k and v lie in memory in the order of their strides. The same bits on every run and for any
    number of threads. First derivatives; a second one raises NotImplementedError, and so does forward-mode AD.

    Raises:
        TypeError: a tensor is not dense or of another dtype, dtypes differ, initial_state is not a pair, return_state
            is not a bool, eps is not a number.
        ValueError: shapes that disagree, N or D outside 1 ... 256, a mask or a state of another shape, a z that is
            missing or to spare, eps <= 0, tensors on different devices, an unknown feature_map, normalize, causal or
            layout, cu_seqlens without causal, of another shape, beside B other than 1, or that do not rise from 0 to T.

    Source: Transformers are RNNs (arXiv 2006.16236, equations 4 to 7); "feature": SDTAEncoder.linear_attention of
    mahi-chan/camoXpert, models/backbone.py at 47e858c."""
    if (  # at once, as in linear_attention_step
        key_mask is initial_state is cu_seqlens is None
        and causal is return_state is False
        and type(eps) is float
        and type(feature_map) is type(normalize) is str
        and type(layout) is str
        and layout == "bhtd"
        and not torch.is_autocast_enabled("cpu")
    ):
        codes = FEATURE_MAPS.get(feature_map, -1), NORMALIZATIONS.get(normalize, -1)
        outputs = _linear_attention.attempt(q, k, v, None, None, None, *codes, eps)
        if outputs is not None:
            return outputs[0]
    _check.choice(OP, "feature_map", feature_map, (*FEATURE_MAPS, SOFTMAX))
    softmax = feature_map == SOFTMAX
    options = _codes_of("identity" if softmax else feature_map, normalize)
    _check.choice(OP, "layout", layout, LAYOUTS)
    _check.choice(OP, "causal", causal, (False, True, "strict"))
    if softmax and causal:
        raise ValueError(f"{OP}: feature_map 'softmax' sums over all positions: causal must be False, got {causal!r}")
    _check.flag(OP, "return_state", return_state)
    for name, value in (("q", q), ("k", k), ("v", v)):
        _check.tensor(OP, name, value)
    q, k, v = _check.autocast(q, k, v)
    _check_shapes(q, k, v, "B, H, T" if layout == "bhtd" else "B, T, H")
    eps = _check.eps(OP, eps, q)
    if layout == "bthd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if key_mask is not None:
        _check_mask(key_mask, q.shape[0], q.shape[2], q)
    cu_seqlens = _check_cu_seqlens(cu_seqlens, q, causal)
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    initial_s, initial_z = _check_state(OP, "initial_state", initial_state, sequences, q, v, normalize)
    dtype = q.dtype
    if softmax:
        q, k, v = _softmax_features(q, k, v, key_mask)
    if causal:
        arguments = (q, k, v, key_mask, initial_s, initial_z, cu_seqlens, *options, causal == "strict", eps)
        out, s, z = _linear_attention_causal(*arguments)
    else:
        out, s, z = _linear_attention(q, k, v, key_mask, initial_s, initial_z, *options, eps)
    if softmax:
        out = out.to(dtype)
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
    _check.choice(OP, "feature_map", feature_map, (*FEATURE_MAPS, SOFTMAX))
    _check.tensor(OP, "qkv", qkv)
    (qkv,) = _check.autocast(qkv)
    eps = _check.eps(OP, eps, qkv)
    if qkv.dim() != 5 or qkv.shape[1] != 3:
        raise ValueError(f"{OP}: qkv must have shape (B, 3, H, T, N), got {tuple(qkv.shape)}")
    if not 1 <= qkv.shape[4] <= MOST_DIM:
        raise ValueError(f"{OP}: the head size must be from 1 to {MOST_DIM}, got {qkv.shape[4]}")
    if key_mask is not None:
        _check_mask(key_mask, qkv.shape[0], qkv.shape[3], qkv)
    if feature_map == SOFTMAX:
        modes = {"feature_map": feature_map, "normalize": normalize, "eps": eps}
        return linear_attention(*qkv.unbind(1), key_mask=key_mask, **modes)
    options = _codes_of(feature_map, normalize)
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
    """One more position of causal linear attention: its cost does not depend on how many came before.

        S' = S + f(k) v^T    z' = z + f(k)    out as linear_attention with S' and z', or with S and z where `strict`

    Args:
        q, k: (B, H, N), v: (B, H, D), of this position, one dtype, as for linear_attention.
        state: (S, z), (B, H, N, D) and (B, H, N), float32 (float64 beside float64), as linear_attention returns it with
            return_state; z is None unless normalize is "sum".
        feature_map, normalize, eps: as for linear_attention.
        strict: the position does not see itself.

    Returns:
        (out (B, H, D) in q's dtype, the state). S and z are written in place, and are what comes back. Where a gradient
        is required, or under a transform, nothing is written: then torch derives, and the state that comes back is new.
        Autocast casts q, k and v to its dtype.

    Raises:
        TypeError, ValueError: as linear_attention; ValueError: a state some of whose elements share memory with others
            or with q, k or v."""
    if (  # at once: with cold caches the checks below take longer than the operator, which refuses the same tensors
        type(state) is tuple
        and len(state) == 2
        and (state[1] is None) == (normalize != "sum")
        and type(strict) is bool
        and type(eps) is float
        and type(feature_map) is type(normalize) is str
        and not torch.is_autocast_enabled("cpu")
    ):
        codes = FEATURE_MAPS.get(feature_map, -1), NORMALIZATIONS.get(normalize, -1)
        out = _attempt_step(q, k, v, *state, *codes, strict, eps)
        if out is not None:
            _move_versions(state)
            return out, state
    op = "linear_attention_step"
    options = _codes_of(feature_map, normalize, op)
    _check.flag(op, "strict", strict)
    for name, value in (("q", q), ("k", k), ("v", v)):
        _check.tensor(op, name, value)
    q, k, v = _check.autocast(q, k, v)
    _check_shapes(q, k, v, "B, H", op)
    eps = _check.eps(op, eps, q)
    if state is None:
        raise TypeError(f"{op}: state must be a pair (S, z), got NoneType")
    s, z = _check_state(op, "state", state, q.shape[0], q, v, normalize, as_given=True)
    tensors = (q, k, v, s) if z is None else (q, k, v, s, z)
    if in_transform(*tensors) or (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
        modes = {"feature_map": feature_map, "normalize": normalize, "strict": strict, "eps": eps}
        out, s, *rest = reference.linear_attention_step(q, k, v, s, z, **modes)
        return out, (s, rest[0] if rest else None)
    _check_written(op, s, z)
    q, k, v = (x.resolve_neg() for x in (q, k, v))
    dense = [None if x is None else x.resolve_neg().contiguous() for x in (s, z)]
    out = call_operator(torch.ops.camox_ops.linear_attention_step, q, k, v, *dense, *options, strict, eps)
    for given, written in zip((s, z), dense, strict=True):
        if given is not None and written is not given:
            given.copy_(written)
    if not torch.compiler.is_compiling():
        _move_versions((s, z))
    return out, (s, z)


def _check_written(op: str, s: torch.Tensor, z: torch.Tensor | None) -> None:
    """Everything that torch would refuse of a state, before S is written."""
    if torch.compiler.is_compiling():  # torch checks the copy that is made there
        return
    for name, value in (("S", s), ("z", z)):
        if value is not None and has_internal_overlap(value):
            raise ValueError(
                f"{op}: state's {name} is written: its elements must not share memory, got shape {tuple(value.shape)} "
                f"and strides {value.stride()}"
            )
    if z is not None and share_memory(s, z):
        raise ValueError(f"{op}: state's S and z are written: they must not share memory")


def _move_versions(state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    """An operator of the stable ABI moves no version counter: autograd would not see that what it saved was written."""
    torch.autograd.graph.increment_version([x for x in state if x is not None and not x.is_inference()])


def _softmax_features(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key_mask: torch.Tensor | None):
    """Features of q and k, and v, in what is computed in: the result is rounded once. In the order of their strides."""

    def softmax(x: torch.Tensor, dim: int) -> torch.Tensor:
        order = sorted(range(x.dim()), key=x.stride, reverse=True)
        back = [order.index(d) for d in range(x.dim())]
        return x.permute(order).softmax(back[dim], dtype=real).permute(back)

    real = _check.computed_in(q)
    if key_mask is not None:
        k = k.masked_fill(key_mask[:, None, :, None], float("-inf"))
    return softmax(q, 3), softmax(k, 2), v.to(real)


def _codes_of(feature_map: str, normalize: str, op: str = OP) -> tuple[int, int]:
    return code_of(op, "feature_map", feature_map, FEATURE_MAPS), code_of(op, "normalize", normalize, NORMALIZATIONS)


def _check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, axes: str, op: str = OP) -> None:
    """axes: the dimensions before the last one."""
    dimensions = axes.count(",") + 2
    if q.dim() != dimensions:
        raise ValueError(f"{op}: q must have {dimensions} dimensions ({axes}, N), got shape {tuple(q.shape)}")
    if k.shape != q.shape:
        raise ValueError(f"{op}: k must have the shape of q, {tuple(q.shape)}, got {tuple(k.shape)}")
    if v.dim() != dimensions or v.shape[:-1] != q.shape[:-1]:
        raise ValueError(f"{op}: v must have shape ({axes}, D) beside q of {tuple(q.shape)}, got {tuple(v.shape)}")
    for name, value in (("q and k", q), ("v", v)):
        if not 1 <= value.shape[-1] <= MOST_DIM:
            raise ValueError(f"{op}: the head size of {name} must be from 1 to {MOST_DIM}, got {value.shape[-1]}")
    for name, value in (("k", k), ("v", v)):
        if value.dtype != q.dtype:
            raise TypeError(
                f"{op}: {name} must have the dtype of q, {dtype_names(q.dtype)}, got {dtype_names(value.dtype)}"
            )
        _check.same_device(op, name, value, q, of="q")


def _check_mask(key_mask, batch: int, length: int, q: torch.Tensor) -> None:
    _check.tensor(OP, "key_mask", key_mask, dtypes=(torch.bool,))
    if key_mask.shape != (batch, length):
        raise ValueError(f"{OP}: key_mask must have shape {(batch, length)}, got {tuple(key_mask.shape)}")
    _check.same_device(OP, "key_mask", key_mask, q, of="q")


def _check_cu_seqlens(cu_seqlens, q: torch.Tensor, causal) -> torch.Tensor | None:
    if cu_seqlens is None:
        return None
    _check.tensor(OP, "cu_seqlens", cu_seqlens, dtypes=(torch.int32,))
    if not causal:
        raise ValueError(f"{OP}: cu_seqlens needs causal=True or 'strict', got causal={causal!r}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0:
        raise ValueError(f"{OP}: cu_seqlens must have shape (S+1,), got {tuple(cu_seqlens.shape)}")
    if q.shape[0] != 1:
        raise ValueError(f"{OP}: cu_seqlens needs q of one batch element, got {q.shape[0]}")
    _check.same_device(OP, "cu_seqlens", cu_seqlens, q, of="q")
    return cu_seqlens.contiguous()


def _check_state(op: str, argument: str, state, sequences: int, q, v, normalize: str, *, as_given: bool = False):
    """(S, z) of an argument, as the kernels read them, or as they were given."""
    if state is None:
        return None, None
    if not isinstance(state, (tuple, list)) or len(state) != 2:
        raise TypeError(f"{op}: {argument} must be a pair (S, z), got {type(state).__name__}")
    s, z = state
    if (z is None) == (normalize == "sum"):
        wanted = "a tensor" if normalize == "sum" else "None"
        raise ValueError(f"{op}: the z of {argument} must be {wanted} with normalize={normalize!r}")
    heads, dim = q.shape[1], q.shape[-1]
    read = []
    for name, value, shape in (("S", s, (sequences, heads, dim, v.shape[-1])), ("z", z, (sequences, heads, dim))):
        if value is None and name == "z":
            read.append(None)
            continue
        real = _check.computed_in(q)
        _check.tensor(op, f"{argument}'s {name}", value, dtypes=(real,))
        if value.shape != shape:
            raise ValueError(f"{op}: {argument}'s {name} must have shape {tuple(shape)}, got {tuple(value.shape)}")
        _check.same_device(op, f"{argument}'s {name}", value, q, of="q")
        read.append(value if as_given else as_read(value, real))
    return read


def _like(x: torch.Tensor, dim: int) -> torch.Tensor:
    """(B, H, T, dim) in the order of x's strides."""
    shape = (*x.shape[:3], dim)
    return x.new_empty_strided(shape, dense_strides(x, shape, sort_last=True))


def _state(q: torch.Tensor, v: torch.Tensor, normalize: int, sequences: int | None = None):
    real, (batch, heads, _, dim) = _check.computed_in(q), q.shape
    batch = batch if sequences is None else sequences
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


def _sequences(q: torch.Tensor, cu_seqlens: torch.Tensor | None) -> int:
    return q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _fake_causal(q, k, v, key_mask, initial_s, initial_z, cu_seqlens, feature_map, normalize, strict, eps):
    return _like(q, v.shape[3]), *_state(q, v, normalize, _sequences(q, cu_seqlens))


def _save_causal(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:7])
    ctx.arguments = inputs[7:]
    ctx.set_materialize_grads(False)


def _backward_causal(ctx, grad, grad_s, grad_z):
    if grad is None and grad_s is None and grad_z is None:
        return (None,) * 11
    inputs = ctx.saved_tensors
    q, v = inputs[0], inputs[2]
    given = _given(grad, grad_s, grad_z, v, q.new_empty((0,), dtype=_check.computed_in(q)), ctx.arguments[1])
    *grads, sum_s, sum_z = _linear_attention_causal_backward(*given, *inputs, *ctx.arguments)
    of_state = (None if x is None else y for x, y in zip(inputs[4:6], (sum_s, sum_z), strict=True))
    return *grads, None, *of_state, *(None,) * 5


def _fake_causal_backward(grad, grad_s, grad_z, q, k, v, key_mask, initial_s, initial_z, cu_seqlens, *arguments):
    state = _state(q, v, arguments[1], _sequences(q, cu_seqlens))
    return _like(q, q.shape[3]), _like(k, k.shape[3]), _like(v, v.shape[3]), *state


def _vmap_causal(name: str, count: int, dense: tuple[int, ...]):
    """Folded into B, but where several sequences lie in one batch element."""
    folded = vmap_folded(name, count, dense)

    def vmap(info, in_dims, *args):
        if args[count] is None:
            return folded(info, in_dims, *args)
        return one_by_one(with_dense(getattr(torch.ops.camox_ops, name), dense), info, in_dims, args)

    return vmap


def _fake_step(q, k, v, s, z, feature_map, normalize, strict, eps):
    return q.new_empty(v.shape)


_linear_attention = register(
    OP, fake=_fake, setup_context=_save, backward=_backward, vmap=vmap_folded("linear_attention", 6, (4, 5))
)
_linear_attention_backward = register_last_derivative(
    OP, fake=_fake_backward, vmap=vmap_folded("linear_attention_backward", 9, (1, 2, 7, 8))
)
_linear_attention_packed = register(
    "linear_attention_packed",
    fake=_fake_packed,
    setup_context=_save_packed,
    backward=_backward_packed,
    vmap=vmap_folded("linear_attention_packed", 2),
)
_linear_attention_packed_backward = register_last_derivative(
    "linear_attention_packed",
    fake=_fake_packed_backward,
    vmap=vmap_folded("linear_attention_packed_backward", 7, (1, 2, 5, 6)),
)
_linear_attention_causal = register(
    "linear_attention_causal",
    fake=_fake_causal,
    setup_context=_save_causal,
    backward=_backward_causal,
    vmap=_vmap_causal("linear_attention_causal", 6, (4, 5, 6)),
)
_linear_attention_causal_backward = register_last_derivative(
    "linear_attention_causal",
    fake=_fake_causal_backward,
    vmap=_vmap_causal("linear_attention_causal_backward", 9, (1, 2, 7, 8, 9)),
)
torch.library.register_fake("camox_ops::linear_attention_step", _fake_step)
_attempt_step = attempt_in_place("linear_attention_step", lambda q, k, v, *_: torch.empty_like(v))
