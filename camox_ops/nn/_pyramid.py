"""Adaptive average pooling of pictures to four sizes at once, and their bilinear way back, as matrix products.

Both are separable: a (sum of LEVELS, size) matrix for the columns and one for the rows. The levels come and go
transposed, (B, C, w, h): what lies between works on single pixels."""

from __future__ import annotations

import torch

from ..ops import _check

LEVELS = (8, 4, 2, 1)

_made: dict[tuple, torch.Tensor] = {}


def _pooling(size: int) -> list[list[float]]:
    """Rows: the means that adaptive pooling to each of LEVELS takes of `size` pixels."""
    rows = []
    for level in LEVELS:
        for i in range(level):
            begin, end = i * size // level, -(-(i + 1) * size // level)
            rows.append([1 / (end - begin) if begin <= j < end else 0.0 for j in range(size)])
    return rows


def _interpolation(size: int) -> list[list[float]]:
    """Rows: the share of each pixel of each of LEVELS in `size` pixels, bilinear with corners not aligned."""
    rows = []
    for level in LEVELS:
        shares = [[0.0] * size for _ in range(level)]
        for j in range(size):
            place = max(0.0, (j + 0.5) * level / size - 0.5)
            first = min(int(place), level - 1)
            shares[first][j] += 1 - (place - first)
            shares[min(first + 1, level - 1)][j] += place - first
        rows += shares
    return rows


def _matrix(make, size: int, x: torch.Tensor) -> torch.Tensor:
    """(sum of LEVELS, size), made once for each size, dtype and device."""
    key = (make, size, x.dtype, x.device)
    found = None if torch.compiler.is_compiling() else _made.get(key)
    if found is None:
        # one made in inference mode could not be saved for a later backward
        with torch.inference_mode(False), torch.no_grad():
            found = torch.tensor(make(size), dtype=x.dtype, device=x.device)
        if type(found) is torch.Tensor and not torch.compiler.is_compiling():  # a fake one would outlive its mode
            _made[key] = found
    return found


def to_levels(x: torch.Tensor) -> list[torch.Tensor]:
    """x (B, C, H, W) -> adaptive_avg_pool2d(x, n) for n of LEVELS, each (B, C, w, h) and of x's dtype."""
    batch, channels, height, width = x.shape
    with torch.autocast(x.device.type, enabled=False):
        wide = x.to(_check.computed_in(x))
        columns = wide.reshape(-1, width) @ _matrix(_pooling, width, wide).t()
        rows = columns.view(batch, channels, height, -1).transpose(2, 3).reshape(-1, height)
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
    with torch.autocast(levels[0].device.type, enabled=False):
        levels = [level.to(_check.computed_in(level)) for level in levels]
        shares = _matrix(_interpolation, height, levels[0]).split(LEVELS)
        rows = [level.reshape(-1, n) @ part for level, n, part in zip(levels, LEVELS, shares, strict=True)]
        rows = torch.cat([part.view(batch, channels, -1, height) for part in rows], 2)
        columns = rows.transpose(2, 3).reshape(-1, sum(LEVELS)) @ _matrix(_interpolation, width, levels[0])
        return columns.view(batch, channels, height, width).to(dtype)
