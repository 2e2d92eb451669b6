"""frequency_bands: low, middle and high band of every channel, in one pass."""

from __future__ import annotations

from typing import NamedTuple

import torch

from . import _check
from ._layout import empty_image, empty_plain_image, is_channels_last
from ._register import register, vmap_folded


class FrequencyBands(NamedTuple):
    """The three bands of frequency_bands, each of x's shape, dtype and memory format."""

    low: torch.Tensor
    mid: torch.Tensor
    high: torch.Tensor


def frequency_bands(x: torch.Tensor, *, stacked: bool = False) -> FrequencyBands | torch.Tensor:
    """Splits every channel of an image into three bands by box filters.

    With box_k the mean over k*k pixels, zeros outside the image counted (avg_pool2d(k, stride=1, padding=k//2)):

        low = box_3(x)    mid = box_3(x) - box_5(x)    high = x - box_3(x)

    Args:
        x: (B, C, H, W), float32, bfloat16, float16 or float64; any strides, any size from 0 on.
        stacked: return one (B, 4C, H, W) tensor instead: low, mid, high, x.

    Returns:
        FrequencyBands(low, mid, high), each of x's shape and dtype and in its memory format (contiguous or
        channels_last); or the stacked tensor. Computed in float32 (float64 for float64) and rounded once, with an error
        of the order of eps times the largest pixel of the window. Two pixels or more inside the borders, in rows of
        more than 8 pixels, mid and high are sums of differences from the pixel in the middle, so a large mean costs
        them no accuracy. Autocast leaves x's dtype alone. NaN and inf give what the formulas give, in the windows that
        hold them.

    Saved for backward: nothing, the op is linear. Derivatives of any order. The same bits on every run, for any number
    of threads and on every instruction set. Forward-mode AD raises NotImplementedError.

    Raises:
        TypeError: x is not a dense tensor of one of these dtypes, or stacked is not a bool.
        ValueError: x is not 4-dimensional or on an unsupported device.

    Source of the formula: FrequencyExpert in mahi-chan/camoXpert, models/experts.py at 47e858c."""
    if type(stacked) is bool:
        call = _frequency_bands_stacked if stacked else _frequency_bands
        bands = call.attempt(x)
        if bands is not None:
            return bands if stacked else FrequencyBands(*bands)
    _check.image("frequency_bands", "x", x)
    _check.flag("frequency_bands", "stacked", stacked)
    if stacked:
        return _frequency_bands_stacked(x)
    return FrequencyBands(*_frequency_bands(x))


def _save(ctx, inputs, output):
    ctx.channels_last = is_channels_last(inputs[0])
    ctx.set_materialize_grads(False)


def _backward(ctx, low, mid, high):
    if low is None and mid is None and high is None:
        return None
    return _frequency_bands_backward(low, mid, high, None, ctx.channels_last)


def _backward_stacked(ctx, grad):
    return None if grad is None else _frequency_bands_backward(*grad.chunk(4, dim=1), ctx.channels_last)


def _save_backward(ctx, inputs, output):
    ctx.given = tuple(grad is not None for grad in inputs[:4])
    ctx.set_materialize_grads(False)


def _backward_backward(ctx, grad):
    """The adjoint of the adjoint: the bands of the incoming gradient."""
    if grad is None:
        return None, None, None, None, None
    bands = (*_frequency_bands(grad), grad) if any(ctx.given[:3]) else (None, None, None, grad)
    return *(band if given else None for band, given in zip(bands, ctx.given, strict=True)), None


def _given(*grads) -> torch.Tensor:
    return next(grad for grad in grads if grad is not None)


def _backward_outputs(*arguments):
    *grads, channels_last = arguments
    return empty_plain_image(_given(*grads), 1, channels_last)


def _fake_backward(*arguments):
    *grads, channels_last = arguments
    like = _given(*grads)
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty(like.shape, dtype=like.dtype, device=like.device, memory_format=memory_format)


_frequency_bands = register(
    "frequency_bands",
    fake=lambda x: tuple(empty_image(x, x.shape[1]) for _ in range(3)),
    outputs=lambda x: (empty_plain_image(x), empty_plain_image(x), empty_plain_image(x)),
    setup_context=_save,
    backward=_backward,
    vmap=vmap_folded("frequency_bands", 1),
)
_frequency_bands_stacked = register(
    "frequency_bands_stacked",
    fake=lambda x: empty_image(x, 4 * x.shape[1]),
    outputs=lambda x: empty_plain_image(x, 4),
    setup_context=_save,
    backward=_backward_stacked,
    vmap=vmap_folded("frequency_bands_stacked", 1),
)
_frequency_bands_backward = register(
    "frequency_bands_backward",
    fake=_fake_backward,
    outputs=_backward_outputs,
    setup_context=_save_backward,
    backward=_backward_backward,
    vmap=vmap_folded("frequency_bands_backward", 4),
)
