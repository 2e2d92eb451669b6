"""linear_attention from its formula (see camox_ops.linear_attention)."""

from __future__ import annotations

from itertools import pairwise

import torch


def feature_map_of(x: torch.Tensor, feature_map: str) -> torch.Tensor:
    if feature_map == "identity":
        return x
    if feature_map == "relu":
        return x.relu()
    # No clamp: its gradient where x is 0 is 1 up to torch 2.13, and 0 since.
    return torch.where(x > 0, x + 1, x.masked_fill(x > 0, 0).exp())


def over_sum(features: torch.Tensor) -> torch.Tensor:
    """Each row divided by its sum; a row whose sum is 0 becomes 0."""
    sums = features.sum(-1, keepdim=True)
    zero = sums == 0
    return torch.where(zero, 0, features / torch.where(zero, 1, sums))


def features_of(q, k, v, feature_map: str, normalize: str, key_mask):
    """a, b and v of the formula: (B, H, T, N or D)."""
    if feature_map == "softmax":
        ignored = torch.zeros_like(k, dtype=torch.bool) if key_mask is None else key_mask[:, None, :, None]
        a, b = q.softmax(-1), k.masked_fill(ignored, float("-inf")).softmax(-2)
    else:
        a, b = feature_map_of(q, feature_map), feature_map_of(k, feature_map)
    if normalize == "feature":
        a, b = over_sum(a), over_sum(b)
    if key_mask is not None:
        ignored = key_mask[:, None, :, None]
        b, v = torch.where(ignored, 0, b), torch.where(ignored, 0, v)
    return a, b, v


def linear_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    initial_s: torch.Tensor | None = None,
    initial_z: torch.Tensor | None = None,
    *,
    feature_map: str = "elu1",
    normalize: str = "sum",
    causal: bool | str = False,
    key_mask: torch.Tensor | None = None,
    eps: float = 1e-6,
    layout: str = "bhtd",
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """q, k (B, H, T, N), v (B, H, T, D) or (B, T, H, ...) -> out like v, S (B, H, N, D) and with "sum" z (B, H, N).

    Causal in the quadratic form, without states in between; with cu_seqlens sequence by sequence."""
    if layout == "bthd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    options = {"feature_map": feature_map, "normalize": normalize, "causal": causal, "eps": eps}
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist()
        parts = []
        for i, (begin, end) in enumerate(pairwise(bounds)):
            state = (None if x is None else x[i : i + 1] for x in (initial_s, initial_z))
            mask = None if key_mask is None else key_mask[:, begin:end]
            parts.append(linear_attention(*(x[:, :, begin:end] for x in (q, k, v)), *state, key_mask=mask, **options))
        out, *state = zip(*parts, strict=True)
        out, state = torch.cat(out, 2), [torch.cat(part) for part in state]
        return (out.transpose(1, 2) if layout == "bthd" else out, *state)
    a, b, v = features_of(q, k, v, feature_map, normalize, key_mask)
    first = 0 if initial_s is None else initial_s.to(b.dtype)
    s = b.transpose(-2, -1) @ v + first
    first_z = 0 if initial_z is None else initial_z.to(b.dtype)
    z = (b.sum(-2) + first_z,) if normalize == "sum" else ()
    if causal:
        scores = (a @ b.transpose(-2, -1)).tril(-1 if causal == "strict" else 0)
        out = scores @ v if initial_s is None else scores @ v + a @ first
        sums = scores.sum(-1, keepdim=True)
        if initial_z is not None:
            sums = sums + a @ first_z.unsqueeze(-1)
    else:
        out = a @ s
        sums = a @ z[0].unsqueeze(-1) if z else None
    if normalize == "sum":
        out = out / (sums + eps)
    return (out.transpose(1, 2) if layout == "bthd" else out, s, *z)


def linear_attention_recurrence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    normalize: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of features, token by token, as flash-linear-attention defines it: q, k (B, T, H, N),
    v (B, T, H, D), state (B, H, N, D) -> out (B, T, H, D), the last state. scale of q: N ** -0.5 unless given.

        S_t = S_(t-1) + k_t v_t^T    out_t = scale q_t S_t
        normalize: out_t is divided by scale q_t . (k_1 + ... + k_t) + 1e-10

    No position is multiplied with what comes after it. Source: naive_recurrent_linear_attn of
    fla-org/flash-linear-attention, fla/ops/linear_attn/naive.py at 20ceee5."""
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    s = q.new_zeros((q.shape[0], q.shape[2], q.shape[3], v.shape[3])) if state is None else state
    z, rows = torch.zeros_like(q[:, 0]), []
    for query, key, value in zip(q.unbind(1), k.unbind(1), v.unbind(1), strict=True):
        s, z = s + key.unsqueeze(-1) * value.unsqueeze(-2), z + key
        out = ((factor * query).unsqueeze(-2) @ s).squeeze(-2)
        if normalize:
            out = out / ((factor * query * z).sum(-1, keepdim=True) + 1e-10)
        rows.append(out)
    return torch.stack(rows, 1), s


def linear_attention_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    s: torch.Tensor,
    z: torch.Tensor | None = None,
    *,
    feature_map: str = "elu1",
    normalize: str = "sum",
    strict: bool = False,
    eps: float = 1e-6,
) -> tuple[torch.Tensor, ...]:
    """q, k (B, H, N), v (B, H, D), S (B, H, N, D), z (B, H, N) -> out (B, H, D), the next S and with "sum" z."""
    tensors = (x.to(s.dtype).unsqueeze(2) for x in (q, k, v))
    causal = "strict" if strict else True
    options = {"feature_map": feature_map, "normalize": normalize, "causal": causal, "eps": eps}
    out, *state = linear_attention(*tensors, s, z, **options)
    return (out[:, :, 0].to(q.dtype), *state)
