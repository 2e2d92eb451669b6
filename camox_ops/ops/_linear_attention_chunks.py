"""Causal linear attention composed of torch's operators, chunk by chunk: what its operators run on CUDA."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F

from ..reference.linear_attention import features_of
from . import _check
from ._codes import FEATURE_MAPS, NORMALIZATIONS
from ._layout import dense_strides

CHUNK = 64
WHY = "composed of torch's operators, chunk by chunk: the causal form has no CUDA kernel"
_FEATURE_MAPS = {code: name for name, code in FEATURE_MAPS.items()}
_NORMALIZATIONS = {code: name for name, code in NORMALIZATIONS.items()}


def _triangle(a, b, v, strict: bool, sums: bool):
    """The triangle of a b^T times v, and its sums over keys, of a chunk of a power of two rows: by halves, quarters and
    so on, in each of which all rows of the one are multiplied with all that lie before them. Products with the zeros of
    a whole triangle would carry a NaN or an infinity to rows before it."""
    diagonal = torch.zeros_like(a[..., :1]) if strict else (a * b).sum(-1, keepdim=True)
    out, totals = (torch.zeros_like(v) if strict else diagonal * v), diagonal
    half = 1
    while half < a.shape[-2]:
        rows, keys, values = (x.unflatten(-2, (-1, 2, half)) for x in (a, b, v))
        scores = rows[..., 1, :, :] @ keys[..., 0, :, :].mT
        out = out + _second_half(scores @ values[..., 0, :, :])
        totals = totals + _second_half(scores.sum(-1, keepdim=True)) if sums else totals
        half *= 2
    return out, totals


def _second_half(x):
    """(..., blocks, half, D) -> (..., blocks * 2 * half, D), zeros in the first half of each block."""
    return F.pad(x.unsqueeze(-3), (0, 0, 0, 0, 1, 0)).flatten(-4, -2)


def _sequence(tensors, s, z, normalize: str, strict: bool, eps: float):
    """out, S and z of one sequence, from a, b and v (B, H, T, N or D)."""
    outputs, length = [], tensors[0].shape[2]
    chunk = min(CHUNK, 1 << max(length - 1, 0).bit_length())
    tensors = (F.pad(x, (0, 0, 0, -length % chunk)) for x in tensors)
    for a, b, v in zip(*(x.split(chunk, 2) for x in tensors), strict=True):
        out, sums = _triangle(a, b, v, strict, normalize == "sum")
        out = out + a @ s
        if normalize == "sum":
            sums = sums + a @ z.unsqueeze(-1) + eps
            out = torch.where(sums == 0, 0, out / torch.where(sums == 0, 1, sums))
            z = z + b.sum(2)
        s = s + b.mT @ v
        outputs.append(out)
    return torch.cat(outputs, 2)[:, :, :length], s, z


def compose(q, k, v, key_mask, initial_s, initial_z, cu_seqlens, feature_map, normalize, strict, eps):
    """linear_attention_causal, differentiable. cu_seqlens is read on the host, which waits for the device."""
    real, heads, (n, d) = _check.computed_in(q), q.shape[1], (q.shape[3], v.shape[3])
    bounds = None if cu_seqlens is None else check_bounds(cu_seqlens.tolist(), q.shape[2])
    mode = _NORMALIZATIONS[normalize]
    tensors = features_of(q.to(real), k.to(real), v.to(real), _FEATURE_MAPS[feature_map], mode, key_mask)
    states = q.shape[0] if bounds is None else len(bounds) - 1
    s = q.new_zeros((states, heads, n, d), dtype=real) if initial_s is None else initial_s
    z = q.new_zeros((states, heads, n), dtype=real) if initial_z is None else initial_z
    if bounds is None:
        out, s, z = _sequence(tensors, s, z, mode, strict, eps)
    else:
        parts = []
        for i, (begin, end) in enumerate(pairwise(bounds)):
            rows = tuple(x[:, :, begin:end] for x in tensors)
            parts.append(_sequence(rows, s[i : i + 1], z[i : i + 1], mode, strict, eps))
        if parts:
            outs, all_s, all_z = zip(*parts, strict=True)
            out, s, z = torch.cat(outs, 2), torch.cat(all_s), torch.cat(all_z)
        else:
            out = tensors[2]
    return out.to(q.dtype), s, z if mode == "sum" else z.new_empty((0,))


def check_bounds(bounds: list[int], length: int) -> list[int]:
    """The values of cu_seqlens, with the words of csrc/linear_attention/linear_attention.c."""
    if bounds[0] != 0:
        raise ValueError(f"linear_attention: cu_seqlens[0] must be 0, got {bounds[0]}")
    for i, (begin, end) in enumerate(pairwise(bounds)):
        if end < begin:
            raise ValueError(f"linear_attention: cu_seqlens must not fall, got {end} after {begin} at index {i + 1}")
    if bounds[-1] != length:
        raise ValueError(f"linear_attention: cu_seqlens must end with the {length} positions of q, got {bounds[-1]}")
    return bounds


def _in_order(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return x.new_empty_strided(x.shape, dense_strides(like, x.shape, sort_last=True)).copy_(x)


def forward(q, *arguments):
    out, s, z = compose(q, *arguments)
    return _in_order(out, q), s.clone(), z.clone()


def backward(grad, grad_s, grad_z, q, k, v, key_mask, initial_s, initial_z, *arguments):
    """The operator linear_attention_causal_backward: derives the forward, which is computed again."""
    real, states = _check.computed_in(q), arguments[0].shape[0] - 1 if arguments[0] is not None else q.shape[0]
    with torch.enable_grad():
        if initial_s is None:
            initial_s = q.new_zeros((states, q.shape[1], q.shape[3], v.shape[3]), dtype=real)
        if initial_z is None:
            initial_z = q.new_zeros((states, q.shape[1], q.shape[3]), dtype=real)
        leaves = [x.detach().requires_grad_() for x in (q, k, v, initial_s, initial_z)]
        outputs = compose(*leaves[:3], key_mask, *leaves[3:], *arguments)
        given = [(y, g) for y, g in zip(outputs, (grad, grad_s, grad_z), strict=True) if g is not None]
        kept = [(y, g) for y, g in given if y.requires_grad]
        found = torch.autograd.grad(
            [y for y, _ in kept], leaves, [g for _, g in kept], allow_unused=True, materialize_grads=True
        )
    *grads, sum_s, sum_z = found
    if arguments[2] != NORMALIZATIONS["sum"]:
        sum_z = sum_z.new_empty((0,))
    return *(_in_order(g, x) for g, x in zip(grads, (q, k, v), strict=True)), sum_s, sum_z


def step(q, k, v, s, z, feature_map, normalize, strict, eps):
    """The operator linear_attention_step, which writes to s and z."""
    rows = (x.unsqueeze(2) for x in (q, k, v))
    out, new_s, new_z = compose(*rows, None, s, z, None, feature_map, normalize, strict, eps)
    s.copy_(new_s)
    if z is not None:
        z.copy_(new_z)
    return out[:, :, 0].contiguous()


OPERATORS = {
    "linear_attention_causal": forward,
    "linear_attention_causal_backward": backward,
    "linear_attention_step": step,
}


def register_on_cuda() -> None:
    for name, function in OPERATORS.items():
        torch.library.impl(f"camox_ops::{name}", "CUDA")(function)
