"""rope from its formula (see camox_ops.rope)."""

from __future__ import annotations

import torch


def rope(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    layout: str = "bhtd",
    rotary_dim: int | None = None,
    positions: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    transposed: bool = False,
) -> torch.Tensor:
    """x (B, H, T, D), (B, T, H, D) or with cu_seqlens (total, H, D) -> the same shape, in x's dtype.

    transposed: by the negative angles, the matrix that the backward multiplies with."""
    rotary_dim = x.shape[-1] if rotary_dim is None else rotary_dim
    heads_inside = cu_seqlens is not None or layout == "bthd"
    rows = _rows(x.shape[0 if cu_seqlens is not None else 1 if heads_inside else 2], positions, cu_seqlens)
    cos, sin = (_angles(table, rows, rotary_dim, interleaved, heads_inside) for table in (cos, sin))
    to_rotate, passing = x[..., :rotary_dim], x[..., rotary_dim:]
    if transposed:
        rotated = to_rotate * cos - _partners(to_rotate * sin, interleaved)
    else:
        rotated = to_rotate * cos + _partners(to_rotate, interleaved) * sin
    return torch.cat([rotated.to(x.dtype), passing], dim=-1)


def _rows(length: int, positions: torch.Tensor | None, cu_seqlens: torch.Tensor | None) -> torch.Tensor | slice:
    """Which rows of the tables the tokens take."""
    if positions is not None:
        return positions
    if cu_seqlens is None:
        return slice(0, length)
    tokens = torch.arange(length, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return tokens - cu_seqlens[torch.searchsorted(cu_seqlens, tokens, right=True) - 1]


def _angles(table, rows, rotary_dim: int, interleaved: bool, heads_inside: bool) -> torch.Tensor:
    """The tables' rows, one column an element, to be broadcast over x."""
    taken = table[rows]
    if taken.shape[-1] != rotary_dim:
        taken = taken.repeat_interleave(2, dim=-1) if interleaved else torch.cat([taken, taken], dim=-1)
    if heads_inside:
        return taken.unsqueeze(-2)
    return taken.unsqueeze(1) if taken.dim() == 3 else taken


def _partners(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """-x[b] in the place of a and x[a] in the place of b."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1) if x.shape[-1] else (x, x)
    return torch.cat([-second, first], dim=-1)


def rope_backward(
    grad: torch.Tensor, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, **arguments
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients with respect to x, cos and sin; differentiable in all four tensors."""
    _, pullback = torch.func.vjp(lambda x, cos, sin: rope(x, cos, sin, **arguments), x, cos, sin)
    return pullback(grad)
