"""Adaptive average pooling of images to four sizes at once, and their bilinear way back, as matrix products.

Both are separable: a (sum of LEVELS, size) matrix for the columns and one for the rows. The levels come and go
transposed, (B, C, w, h): what lies between works on single pixels."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from .._torch_private import in_dispatch_mode
from ..ops import _check
from ._kept import made_beside

LEVELS = (8, 4, 2, 1)

_made: dict[tuple, torch.Tensor] = {}


# Both matrices are made of whole numbers by tensor operations, with one division at the end: exact in every dtype, and
# one compiled graph serves any size.


def _pooling(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Rows: the means that adaptive pooling to each of LEVELS takes of `size` pixels."""
    pixel, rows = torch.arange(size, device=device), []
    for level in LEVELS:
        i = torch.arange(level, device=device)[:, None]
        begin, end = i * size // level, ((i + 1) * size + level - 1) // level
        rows.append(((begin <= pixel) & (pixel < end)).to(dtype) / (end - begin))
    return torch.cat(rows)


def _interpolation(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Rows: the share of each pixel of each of LEVELS in `size` pixels, bilinear with corners not aligned."""
    pixel, rows = torch.arange(size, device=device), []
    for level in LEVELS:
        # of 2*size parts of the distance of two pixels of the level
        place = ((2 * pixel + 1) * level - size).clamp(0, 2 * size * (level - 1))
        distance = (place - torch.arange(level, device=device)[:, None] * (2 * size)).abs()
        rows.append((2 * size - distance).clamp(min=0).to(dtype) / (2 * size))
    return torch.cat(rows)


def _matrix(make, size: int, x: torch.Tensor) -> torch.Tensor:
    """(sum of LEVELS, size), made once for each size, dtype and device."""
    if torch.compiler.is_compiling():
        return make(size, x.dtype, x.device)
    with made_beside(x):
        if in_dispatch_mode():  # kept matrices are no fake ones
            return make(size, x.dtype, x.device)
    key = (make, size, x.dtype, x.device)
    found = _made.get(key)
    if found is None:
        # one made in inference mode could not be saved for a later backward
        with torch.inference_mode(False), torch.no_grad():
            found = _made[key] = make(size, x.dtype, x.device)
    return found


def _without_autocast(x: torch.Tensor) -> AbstractContextManager:
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)  # meta has no autocast


def to_levels(x: torch.Tensor) -> list[torch.Tensor]:
    """x (B, C, H, W) -> adaptive_avg_pool2d(x, n) for n of LEVELS, each (B, C, w, h) and of x's dtype."""
    batch, channels, height, width = x.shape
    with _without_autocast(x):
        wide = x.to(_check.computed_in(x))
        columns = wide.reshape(-1, width) @ _matrix(_pooling, width, wide).t()
        rows = columns.view(batch, channels, height, sum(LEVELS)).transpose(2, 3).reshape(-1, height)
        pooled = (
            (rows @ _matrix(_pooling, height, wide).t()).view(batch, channels, sum(LEVELS), sum(LEVELS)).to(x.dtype)
        )
    ends = [sum(LEVELS[: i + 1]) for i in range(len(LEVELS))]
    return [pooled[:, :, end - n : end, end - n : end] for n, end in zip(LEVELS, ends, strict=True)]


def from_levels(levels: list[torch.Tensor], size: tuple[int, int]) -> torch.Tensor:
    """The sum of the levels, each (B, C, w, h) of LEVELS, brought to (B, C, H, W) bilinearly, in their dtype."""
    batch, channels = levels[0].shape[:2]
    height, width = size
    dtype = levels[0].dtype
    with _without_autocast(levels[0]):
        levels = [level.to(_check.computed_in(level)) for level in levels]
        shares = _matrix(_interpolation, height, levels[0]).split(LEVELS)
        rows = [level.reshape(-1, n) @ part for level, n, part in zip(levels, LEVELS, shares, strict=True)]
        rows = torch.cat([part.view(batch, channels, n, height) for part, n in zip(rows, LEVELS, strict=True)], 2)
        columns = rows.transpose(2, 3).reshape(-1, sum(LEVELS)) @ _matrix(_interpolation, width, levels[0])
        return columns.view(batch, channels, height, width).to(dtype)
