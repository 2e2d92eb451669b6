"""bdh_attention: BDH's attention, whose queries are its keys, in one op; bdh_attention_step: one token of it."""

from __future__ import annotations

import math
import numbers

import torch

from .. import reference
from .._torch_private import call_operator, in_transform
from . import _check
from ._check import dtype_names
from ._codes import LAYOUTS
from ._layout import as_read, dense_strides
from ._register import one_by_one, register, register_last_derivative, vmap_folded
from .rope import _rope_backward

# How the scores are computed (csrc/bdh/bdh.h); tests and benchmarks choose, users get BY_COST.
BY_COST, QUADRATIC, STATE = 0, 1, 2


def bdh_attention(
    q: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    relu: bool = True,
    causal: bool = False,
    softmax: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """BDH's attention from queries that are not yet rotated and are their own keys.

        r = rope(relu(q))    s = r r^T * scale    out = s v    or, with softmax, out = softmax(s) v

    rope rotates neighbouring pairs (interleaved=True of camox_ops.rope).

    Args:
        q: (B, H, T, N), N even; float32, bfloat16, float16 or float64; any strides.
        v: (B, 1, T, D), shared by the heads, or (B, H, T, D); q's dtype, any strides.
        cos, sin: (length, N/2) or (length, N), length >= T, as for camox_ops.rope; float32 or q's dtype.
        relu: q's negative elements count as 0.
        causal: row i sees the rows j < i, strictly: not itself. Row 0 of the result is 0.
        softmax: over the scores of a row.
        scale: > 0; None: 1, or N**-0.5 with softmax.

    Returns:
        (B, H, T, D) in q's dtype, its dimensions in memory in the order of q's strides. Computed in float32 (float64
        for float64); CPUs that multiply bfloat16 round what the backward of bfloat16 multiplies, for it.
        Autocast casts q and v to its dtype.

    On CUDA from sm_80 on float32 products are made in TF32 where torch.backends.cuda.matmul allows it (allow_tf32,
    torch.set_float32_matmul_precision), forward and backward alike.

    Where cos or sin requires a gradient, the backward of bfloat16 and float16 is that of float32 on the CPU, which
    takes its time and memory; on CUDA the gradients of the tables carry the rounding of q's dtype.

    First derivatives in q, v, cos and sin; a second one raises NotImplementedError, and so does forward-mode AD.

    Raises:
        TypeError: a tensor is not dense or of another dtype, the dtypes do not go together, relu, causal or softmax is
            not a bool, scale not a number.
        ValueError: another number of dimensions, N odd or 0, B or T of v other than q's, a v whose heads are neither 1
            nor H, tables of different shapes, of another width or shorter than T, scale not > 0 and finite, tensors on
            different devices.

    Source: Attention of takzen/vision-bdh, models/bdh.py at 71cb8ab (causal), BidirectionalAttentionV2 of
    models/vision_bdh_v2.py there; The Dragon Hatchling (arXiv 2509.26507)."""
    op = "bdh_attention"
    for name, value in (("relu", relu), ("causal", causal), ("softmax", softmax)):
        _check.flag(op, name, value)
    q, v = _autocast(op, q, v)
    _check_values(op, q, v, 4, "(B, H, T, N)", "(B, 1 or H, T, D)")
    if v.shape[2] != q.shape[2]:
        raise ValueError(f"{op}: v must have the {q.shape[2]} positions of q, got shape {tuple(v.shape)}")
    _check_tables(op, cos, sin, q)
    if cos.dim() != 2 or cos.shape[0] < q.shape[2]:
        raise ValueError(
            f"{op}: cos and sin must have a row for each of the {q.shape[2]} positions of q, got {tuple(cos.shape)}"
        )
    scale = _scale(op, scale, q.shape[-1] ** -0.5 if softmax else 1.0)
    cos, sin = (as_read(table, _check.computed_in(q)) for table in (cos, sin))
    save = _differentiated(q, v, cos, sin)
    return _bdh_attention(q, v, cos, sin, relu, causal, softmax, scale, save, BY_COST, _tf32(q))[0]


def bdh_attention_step(
    q: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    state: torch.Tensor | None,
    *,
    relu: bool = True,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One more token of causal bdh_attention without softmax: its cost does not depend on how many came before.

        r = rope(relu(q))    out = r S * scale    S' = S + r v^T

    Args:
        q: (B, H, N), N even, of this token; dtypes as for bdh_attention.
        v: (B, 1, D), shared by the heads, or (B, H, D), in q's dtype.
        cos, sin: the row of this position, (N/2,) or (N,).
        state: S, (B, H, N, D), float32 (float64 beside float64), or None: no token came before.
        relu, scale: as for bdh_attention.

    Returns:
        (out (B, H, D) in q's dtype, S' (B, H, N, D) contiguous). `state` is not written to.

    Differentiable where a gradient is required, then by plain torch. Autocast casts q and v to its dtype.

    Raises:
        TypeError, ValueError: as bdh_attention; a state of another shape, dtype or device."""
    op = "bdh_attention_step"
    _check.flag(op, "relu", relu)
    q, v = _autocast(op, q, v)
    _check_values(op, q, v, 3, "(B, H, N)", "(B, 1 or H, D)")
    _check_tables(op, cos, sin, q)
    if cos.dim() != 1:
        raise ValueError(f"{op}: cos and sin must be one row of a table, got shape {tuple(cos.shape)}")
    real = _check.computed_in(q)
    if state is not None:
        _check.tensor(op, "state", state, dtypes=(real,))
        expected = (*q.shape, v.shape[-1])
        if tuple(state.shape) != expected:
            raise ValueError(f"{op}: state must have shape {expected}, got {tuple(state.shape)}")
        _check.same_device(op, "state", state, q)
    scale = _scale(op, scale, 1.0)
    cos, sin = (as_read(table, real) for table in (cos, sin))
    if _differentiated(q, v, cos, sin, *(() if state is None else (state,))):
        return reference.bdh_attention_step(q, v, cos, sin, state, relu=relu, scale=scale)
    state = None if state is None else state.contiguous()
    return call_operator(torch.ops.camox_ops.bdh_attention_step, q, v, cos, sin, state, relu, scale)


def _tf32(q: torch.Tensor) -> bool:
    """Whether torch would multiply matrices like q in TF32: asked when the op is called, for its backward too."""
    if not q.is_cuda or q.dtype != torch.float32:
        return False
    matmul = torch.backends.cuda.matmul
    # The first is what dynamo knows and guards, the second what shows either way to allow it.
    return matmul.allow_tf32 if torch.compiler.is_compiling() else matmul.fp32_precision == "tf32"


def _differentiated(*tensors: torch.Tensor) -> bool:
    if in_transform(*tensors):
        return True
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _autocast(op: str, *tensors) -> tuple[torch.Tensor, ...]:
    """q and v, checked to be tensors, in autocast's dtype where it is on."""
    for name, value in zip(("q", "v"), tensors, strict=True):
        _check.tensor(op, name, value)
    return _check.autocast(*tensors)


def _check_values(op: str, q: torch.Tensor, v: torch.Tensor, dimensions: int, q_shape: str, v_shape: str) -> None:
    for name, value, shape in (("q", q, q_shape), ("v", v, v_shape)):
        if value.dim() != dimensions:
            raise ValueError(f"{op}: {name} must have {dimensions} dimensions {shape}, got shape {tuple(value.shape)}")
    if q.shape[-1] % 2 or q.shape[-1] == 0:
        raise ValueError(f"{op}: the last dimension of q must be even and > 0, got {q.shape[-1]}")
    if v.shape[0] != q.shape[0] or v.shape[1] not in (1, q.shape[1]):
        raise ValueError(
            f"{op}: v must have shape {v_shape} with B = {q.shape[0]} and H = {q.shape[1]} of q, got {tuple(v.shape)}"
        )
    if v.dtype != q.dtype:
        raise TypeError(f"{op}: v must have the dtype of q, {dtype_names(q.dtype)}, got {dtype_names(v.dtype)}")
    if v.device != q.device:
        raise ValueError(f"{op}: v must be on the device of q, {q.device}, got {v.device}")


def _check_tables(op: str, cos, sin, q: torch.Tensor) -> None:
    allowed = (q.dtype,) if q.dtype == torch.float32 else (q.dtype, torch.float32)
    n = q.shape[-1]
    for name, table in (("cos", cos), ("sin", sin)):
        _check.tensor(op, name, table)
        if table.dim() == 0 or table.shape[-1] not in (n // 2, n):
            raise ValueError(
                f"{op}: {name} must have {n // 2} or {n} columns, one a pair or an element of q, "
                f"got shape {tuple(table.shape)}"
            )
        if table.dtype not in allowed:
            listed = dtype_names(*allowed)
            raise TypeError(f"{op}: {name} must have dtype {listed} beside this q, got {dtype_names(table.dtype)}")
        _check.same_device(op, name, table, q)
    if cos.shape != sin.shape:
        raise ValueError(f"{op}: cos and sin must have the same shape, got {tuple(cos.shape)} and {tuple(sin.shape)}")
    if cos.dtype != sin.dtype:
        raise TypeError(
            f"{op}: cos and sin must have the same dtype, got {dtype_names(cos.dtype)} and {dtype_names(sin.dtype)}"
        )


def _scale(op: str, scale, default: float) -> float:
    if scale is None:
        return default
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise TypeError(f"{op}: scale must be None or a number, got {scale!r}")
    if not 0 < scale < math.inf:
        raise ValueError(f"{op}: scale must be > 0 and finite, got {scale!r}")
    return float(scale)


def _saved_shapes(q: torch.Tensor, v: torch.Tensor, causal: bool, softmax: bool, save: bool, form: int) -> tuple:
    """Of the scores and the rows' log of the sum of exp, by the rule of camox_bdh_saves_scores in csrc/bdh/bdh.h."""
    b, h, length, n = q.shape
    d = v.shape[-1]
    if not save:
        return (0,), (0,)
    costly = length * (n + (1 if causal else 2) * d) > 4 * n * d
    in_state = not softmax and (form == STATE or (form == BY_COST and costly))
    if not in_state and 4 * length <= n:
        return (b, h, length, length), (0,)
    return (0,), (b, h, length) if softmax else (0,)


def _fake(q, v, cos, sin, relu, causal, softmax, scale, save, form, tf32=False):
    sizes = (*q.shape[:3], v.shape[-1])
    out = q.new_empty_strided(sizes, dense_strides(q, sizes))
    return out, *(cos.new_empty(shape) for shape in _saved_shapes(q, v, causal, softmax, save, form))


def _save(ctx, inputs, output):
    q, v, cos, sin, *ctx.flags, _, ctx.form, ctx.tf32 = inputs
    out, *saved = output
    softmax = ctx.flags[2]
    ctx.mark_non_differentiable(*saved)
    ctx.save_for_backward(q, v, cos, sin, out if softmax else None, *saved)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, *_):
    if grad is None:
        return (None,) * 11
    q, v, cos, sin, out, *saved = ctx.saved_tensors
    relu = ctx.flags[0]
    if not (ctx.needs_input_grad[2] or ctx.needs_input_grad[3]):
        inputs = (grad, q, v, cos, sin, out, *saved)
        return *_bdh_attention_backward(*inputs, *ctx.flags, ctx.form, False, ctx.tf32), *(None,) * 9
    dtype = q.dtype
    if q.is_cpu and dtype in (
        torch.bfloat16,
        torch.float16,
    ):  # the tables' gradients sum what is not to be rounded first
        grad, q, v, out = (None if t is None else t.float() for t in (grad, q, v, out))
    inputs = (grad, q, v, cos, sin, out, *saved)
    grad_r, grad_v = _bdh_attention_backward(*inputs, *ctx.flags, ctx.form, True, ctx.tf32)
    x = q.relu() if relu else q
    grad_x, *grad_tables = _rope_backward(grad_r, x, cos, sin, None, None, True, LAYOUTS["bhtd"], None, False)
    grad_q = grad_x.masked_fill(q <= 0, 0) if relu else grad_x
    return grad_q.to(dtype), grad_v.to(dtype), *grad_tables, *(None,) * 7


def _fake_backward(grad, q, v, *_):
    return tuple(x.new_empty_strided(x.shape, dense_strides(x)) for x in (q, v))


def _vmap(info, in_dims, q, v, cos, sin, *arguments):
    if in_dims[2] is not None or in_dims[3] is not None:
        return one_by_one(torch.ops.camox_ops.bdh_attention, info, in_dims, (q, v, cos, sin, *arguments))
    return vmap_folded("bdh_attention", 2)(info, in_dims, q, v, cos, sin, *arguments)


def _fake_step(q, v, cos, sin, state, relu, scale):
    return q.new_empty((*q.shape[:2], v.shape[-1])), cos.new_empty((*q.shape, v.shape[-1]))


def _fake_product(a, b, by_row, bias=None):
    heads, rows, columns = *a.shape[:2], b.shape[2]
    return a.new_empty((rows, heads, columns)).transpose(0, 1) if by_row else a.new_empty((heads, rows, columns))


def _fake_product_and_sums(a, b):
    return _fake_product(a, b, False), b.new_empty((b.shape[0], b.shape[2]))


_bdh_attention = register("bdh_attention", fake=_fake, setup_context=_save, backward=_backward, vmap=_vmap)
_bdh_attention_backward = register_last_derivative("bdh_attention", fake=_fake_backward)
torch.library.register_fake("camox_ops::bdh_attention_step", _fake_step)
torch.library.register_fake("camox_ops::gemm", _fake_product)
torch.library.register_fake("camox_ops::gemm_sums", _fake_product_and_sums)
