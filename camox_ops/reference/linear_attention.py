"""linear_attention from its formula (see camox_ops.linear_attention)."""

from __future__ import annotations

import torch


def feature_map_of(x: torch.Tensor, feature_map: str) -> torch.Tensor:
    if feature_map == "identity":
        return x
    if feature_map == "relu":
        return x.relu()
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


def over_sum(features: torch.Tensor) -> torch.Tensor:
    """Each row divided by its sum; a row whose sum is 0 becomes 0."""
    sums = features.sum(-1, keepdim=True)
    zero = sums == 0
    return torch.where(zero, 0, features / torch.where(zero, 1, sums))


def linear_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    initial_s: torch.Tensor | None = None,
    initial_z: torch.Tensor | None = None,
    *,
    feature_map: str = "elu1",
    normalize: str = "sum",
    key_mask: torch.Tensor | None = None,
    eps: float = 1e-6,
    layout: str = "bhtd",
) -> tuple[torch.Tensor, ...]:
    """q, k (B, H, T, N), v (B, H, T, D) or (B, T, H, ...) -> out like v, S (B, H, N, D) and with "sum" z (B, H, N)."""
    if layout == "bthd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    a, b = feature_map_of(q, feature_map), feature_map_of(k, feature_map)
    if normalize == "feature":
        a, b = over_sum(a), over_sum(b)
    if key_mask is not None:
        ignored = key_mask[:, None, :, None]
        b, v = torch.where(ignored, 0, b), torch.where(ignored, 0, v)
    s = b.transpose(-2, -1) @ v
    s = s if initial_s is None else s + initial_s.to(s.dtype)
    out = a @ s
    z = ()
    if normalize == "sum":
        z = (b.sum(-2) if initial_z is None else b.sum(-2) + initial_z.to(b.dtype),)
        out = out / (a @ z[0].unsqueeze(-1) + eps)
    return (out.transpose(1, 2) if layout == "bthd" else out, s, *z)
