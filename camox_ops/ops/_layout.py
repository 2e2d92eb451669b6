"""The memory format of outputs, decided for fake tensors by the same rule as in csrc/common/torch_util.h."""

from __future__ import annotations

import torch


def is_channels_last(x: torch.Tensor) -> bool:
    """torch's rule for "strides like channels_last": a 4-d tensor that is not also plainly contiguous."""
    sizes, strides = x.shape, x.stride()
    if strides[1] == 0:
        return False
    smallest = 0
    for d in (1, 3, 2, 0):
        if sizes[d] == 0 or strides[d] < smallest:
            return False
        if d == 0 and smallest == strides[1]:
            return False
        smallest = strides[d] * (sizes[d] if sizes[d] > 1 else 1)
    return True


def empty_picture(x: torch.Tensor, channels: int) -> torch.Tensor:
    """An uninitialised (B, channels, H, W) tensor in x's memory format."""
    memory_format = torch.channels_last if is_channels_last(x) else torch.contiguous_format
    return torch.empty(
        (x.shape[0], channels, x.shape[2], x.shape[3]), dtype=x.dtype, device=x.device, memory_format=memory_format
    )


def as_read(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A weight or table as the kernels read it, contiguous and in this dtype; what is done to it is differentiable."""
    value = value if value.dtype == dtype else value.to(dtype)
    return value if value.is_contiguous() else value.contiguous()


def dense_strides(x: torch.Tensor, last: int | None = None) -> list[int]:
    """Strides of a tensor of x's shape without gaps, its dimensions in memory in the order of x's strides, the last
    innermost. Dimensions of stride 0 or size 1 say nothing about the order. With `last` the last dimension has that
    size."""
    sizes, strides = list(x.shape), x.stride()
    if last is not None:
        sizes[-1] = last
    order = list(range(x.dim()))

    def says_nothing(d):
        return strides[d] == 0 or sizes[d] == 1

    for i in range(1, x.dim() - 1):
        place = i
        for j in reversed(range(i)):
            outer, inner = order[j], order[place]
            if says_nothing(outer) or says_nothing(inner):
                continue
            if strides[outer] >= strides[inner]:
                break
            order[j], order[place] = inner, outer
            place = j
    dense, step = [0] * x.dim(), 1
    for d in reversed(order):
        dense[d] = step
        step = step * (sizes[d] if sizes[d] > 1 else 1)
    return dense
