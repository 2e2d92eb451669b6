"""bdh_attention: BDH's attention, whose queries are its keys, in one op; bdh_attention_step: one token of it."""

from __future__ import annotations

import math
import numbers

import torch

from .. import reference
from . import _check
from ._check import dtype_names
from ._layout import as_read


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

    rope turns neighbouring pairs (interleaved=True of camox_ops.rope).

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
        for float64). Autocast casts q and v to its dtype.

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
    out = reference.bdh_attention(q, v, cos, sin, relu=relu, causal=causal, softmax=softmax, scale=scale)
    return out


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
    return reference.bdh_attention_step(q, v, cos, sin, state, relu=relu, scale=scale)


def _autocast(op: str, *tensors) -> tuple[torch.Tensor, ...]:
    """In autocast's dtype where it is on; torch leaves float64 alone, and so does this."""
    for name, value in zip(("q", "v"), tensors, strict=True):
        _check.tensor(op, name, value)
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(value if value.dtype == torch.float64 else value.to(dtype) for value in tensors)


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
