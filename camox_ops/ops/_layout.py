"""The memory format of outputs, decided for fake tensors by the same rule as in csrc/common/torch_util.h, and whether
tensors share memory."""

from __future__ import annotations

import functools
import math

import torch

from .._torch_private import internal_overlap, shares_storage


def is_channels_last(x: torch.Tensor) -> bool:
    """torch's rule for "strides like channels_last": a 4-d tensor that is not also plainly contiguous."""
    strides = x.stride()
    if strides[1] == 0 or strides[3] < strides[1]:  # the latter at once, as most images are contiguous
        return False
    sizes, smallest = x.shape, 0
    for d in (1, 3, 2, 0):
        if sizes[d] == 0 or strides[d] < smallest:
            return False
        if d == 0 and smallest == strides[1]:
            return False
        smallest = strides[d] * (sizes[d] if sizes[d] > 1 else 1)
    return True


def empty_image(x: torch.Tensor, channels: int) -> torch.Tensor:
    """An uninitialised (B, channels, H, W) tensor in x's memory format."""
    memory_format = torch.channels_last if is_channels_last(x) else torch.contiguous_format
    return torch.empty(
        (x.shape[0], channels, x.shape[2], x.shape[3]), dtype=x.dtype, device=x.device, memory_format=memory_format
    )


def empty_plain_image(x: torch.Tensor, times: int = 1, channels_last: bool | None = None) -> torch.Tensor:
    """An uninitialised (B, times * C, H, W) CPU tensor of x's dtype, as empty_image makes it, but quicker where code
    is cold. channels_last: None where x's memory format decides."""
    batch, channels, height, width = x.shape
    channels, plane = times * channels, height * width
    if channels_last is None:
        channels_last = is_channels_last(x)
    if channels * plane == 0:  # strides are then not the products of sizes
        memory_format = torch.channels_last if channels_last else torch.contiguous_format
        return torch.empty((batch, channels, height, width), dtype=x.dtype, device="cpu", memory_format=memory_format)
    strides = (
        (channels * plane, 1, channels * width, channels) if channels_last else (channels * plane, plane, width, 1)
    )
    return torch.empty_strided((batch, channels, height, width), strides, dtype=x.dtype)


def as_read(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A weight or table as the kernels read it, contiguous and in this dtype; what is done to it is differentiable."""
    value = value if value.dtype == dtype else value.to(dtype)
    return value if value.is_contiguous() else value.contiguous()


def weights_as_read(weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight and a bias as the kernels read them, contiguous and in the wider of their dtypes: a call has one for
    both."""
    dtype = weight.dtype if weight.dtype == bias.dtype else torch.promote_types(weight.dtype, bias.dtype)
    return as_read(weight, dtype), as_read(bias, dtype)


def memory_order(sizes, strides) -> list[int]:
    """Dimensions in the order of their strides, the innermost last. Those of stride 0 or size 1 say nothing of it."""
    order = list(range(len(sizes)))

    def says_nothing(d):
        return strides[d] == 0 or sizes[d] == 1

    for i in range(1, len(order)):
        place = i
        for j in reversed(range(i)):
            outer, inner = order[j], order[place]
            if says_nothing(outer) or says_nothing(inner):
                continue
            if strides[outer] >= strides[inner]:
                break
            order[j], order[place] = inner, outer
            place = j
    return order


def packed_strides(sizes, order: list[int]) -> list[int]:
    """Strides of a tensor without gaps whose dimensions lie in memory in this order, the innermost last."""
    dense, step = [0] * len(sizes), 1
    for d in reversed(order):
        dense[d] = step
        step = step * (sizes[d] if sizes[d] > 1 else 1)
    return dense


def dense_strides(x: torch.Tensor, sizes=None, sort_last: bool = False) -> list[int]:
    """Strides of a tensor of these sizes, or x's, without gaps, its dimensions in memory in the order of x's strides,
    the last innermost or in its place too."""
    last = x.dim() if sort_last else x.dim() - 1
    order = [*memory_order(x.shape[:last], x.stride()[:last]), *range(last, x.dim())]
    return packed_strides(x.shape if sizes is None else sizes, order)


def empty_rows(x: torch.Tensor, leading: int, outer: tuple[int, ...]) -> torch.Tensor:
    """An uninitialised tensor in which `outer` takes the place of the first `leading` dimensions of x: rows without
    gaps, their dimensions in memory in the order of x's strides."""
    inner, lead = x.shape[leading:], len(outer)
    sizes = (*outer, *inner)
    order = [*range(lead), *(lead + d for d in memory_order(inner, x.stride()[leading:]))]
    return x.new_empty_strided(sizes, packed_strides(sizes, order))


def has_internal_overlap(x: torch.Tensor) -> bool:
    """Whether two elements of x lie at the same address."""
    known = internal_overlap(x)
    return known == 1 or (known == 2 and _overlaps(x.shape, x.stride()))  # 2: torch leaves every x with gaps open


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether an element of a lies at the address of one of b, which has a's dtype."""
    if not shares_storage(a, b):
        return False
    return _meet(a.shape, a.stride(), b.shape, b.stride(), b.storage_offset() - a.storage_offset())


# Cached, as a model asks about the same few shapes at every step.
@functools.lru_cache(maxsize=1024)
def _overlaps(shape, strides) -> bool:
    dims = [(stride, 1 - n, n - 1) for stride, n in zip(strides, shape, strict=True) if n > 1]
    dims.sort(reverse=True)
    # Two places that differ first in dimension i, in which they are 1 to n - 1 steps apart.
    return any(_reaches([(dim[0], 1, dim[2]), *dims[i + 1 :]], 0) for i, dim in enumerate(dims))


@functools.lru_cache(maxsize=1024)
def _meet(shape_a, strides_a, shape_b, strides_b, distance: int) -> bool:
    """Whether a tensor has an element in common with one that begins `distance` elements after it."""
    if 0 in shape_a or 0 in shape_b:
        return False
    ranges: dict[int, list[int]] = {}
    for shape, strides, end in ((shape_a, strides_a, 1), (shape_b, strides_b, 0)):
        for stride, n in zip(strides, shape, strict=True):
            if stride > 0:
                ranges.setdefault(stride, [0, 0])[end] += n - 1 if end else 1 - n
    return _reaches(sorted(((stride, *ends) for stride, ends in ranges.items()), reverse=True), distance)


def _reaches(steps: list[tuple[int, int, int]], target: int) -> bool:
    """Whether sum(stride * k) can be `target`, with an integer k of each (stride, lowest k, highest k), the strides
    falling and > 0."""
    if not steps:
        return target == 0
    if target % math.gcd(*(stride for stride, _, _ in steps)):
        return False
    (stride, low, high), rest = steps[0], steps[1:]
    least, most = (sum(step[0] * step[end] for step in rest) for end in (1, 2))
    low, high = max(low, -((most - target) // stride)), min(high, (target - least) // stride)
    return any(_reaches(rest, target - stride * k) for k in range(low, high + 1))
