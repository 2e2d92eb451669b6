"""Tensors of any number of dimensions and layout, for the tests of the dropout family."""

import functools

import torch
from helpers import DEVICE

LAYOUTS = ("contiguous", "permuted", "sliced", "expanded")


@functools.lru_cache(maxsize=256)  # the same for every dtype and layout
def _drawn(shape, seed) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def normal(shape, dtype=torch.float32, layout="contiguous", kind="normal", seed=0) -> torch.Tensor:
    """Of any number of dimensions; "permuted" has its first dimension innermost in memory, "sliced" gaps in every
    dimension, "expanded" stride 0 in the first."""
    x = _drawn(tuple(shape), seed)
    x = x + 1e4 if kind == "offset" else x
    x = x.to(DEVICE, dtype, copy=True)
    if layout == "permuted" and x.dim() > 1:
        return x.movedim(0, -1).contiguous().movedim(-1, 0)
    if layout == "sliced" and x.dim() > 0:
        larger = torch.full([2 * n + 1 for n in shape], float("nan"), dtype=dtype, device=DEVICE)
        view = larger[tuple(slice(1, None, 2) for _ in shape)]
        return view.copy_(x)
    if layout == "expanded" and x.dim() > 0:
        return x[:1].expand(shape)
    return x


def affine(width, dtype=torch.float32, seed=5) -> list[torch.Tensor]:
    real = torch.float64 if dtype == torch.float64 else torch.float32
    return [normal((width,), real, seed=seed) + 1, normal((width,), real, seed=seed + 1)]
