"""box_mean and structure_weight: means over windows of any odd size, at a cost that grows with their logarithm."""

from __future__ import annotations

import math
import numbers

import torch

from . import _check
from ._layout import empty_image, is_channels_last
from ._register import register, vmap_folded


def box_mean(x: torch.Tensor, size: int | tuple[int, int], *, count_include_pad: bool = True) -> torch.Tensor:
    """The mean over a window around each pixel: average pooling at stride 1, for windows of any odd size.

    What torch.nn.functional.avg_pool2d(x, size, stride=1, padding=size // 2) gives, and avg_pool1d for (B, C, L), at a
    cost per pixel that grows with the logarithm of the window's width, and not with its height.

    Args:
        x: (B, C, H, W) or (B, C, L), float32, bfloat16, float16 or float64; any strides, any size from 0 on.
        size: an odd number, or for (B, C, H, W) a pair of them, height and width. It may exceed the image.
        count_include_pad: divide by the pixels of the window, as if zeros lay around the image; False: by those that
            lie in the image.

    Returns:
        A tensor of x's shape and dtype and in its memory format (contiguous or channels_last; for (B, C, L) also with
        the channels innermost). Computed in float32 (float64 for float64) and rounded once. Autocast leaves x's dtype
        alone. NaN and inf stay within the windows that hold them.

    Saved for backward: nothing, the op is linear. Derivatives of any order. Sums are restarted in blocks and nothing is
    ever subtracted from them, so they do not drift, however large the mean or the window. The same bits on every run,
    for any number of threads, in every memory format and on every instruction set. Forward-mode AD raises
    NotImplementedError.

    Raises:
        TypeError: x is not a dense tensor of one of these dtypes, size is not made of ints, or count_include_pad is not
            a bool.
        ValueError: x has neither 3 nor 4 dimensions or is on an unsupported device; size is even or not positive, or a
            pair for (B, C, L)."""
    images = _images("box_mean", "x", x)
    height, width = _window("box_mean", size, x.dim())
    _check.flag("box_mean", "count_include_pad", count_include_pad)
    return _like(_box_mean(images, height, width, count_include_pad), x)


def structure_weight(mask: torch.Tensor, *, size: int | tuple[int, int] = 31, gain: float = 5.0) -> torch.Tensor:
    """How much each pixel of a mask counts in structure_loss: more at the borders of objects.

    1 + gain |box_mean(mask, size) - mask|, in one pass.

    Args:
        mask: (B, C, H, W), float32, bfloat16, float16 or float64; any strides, any size from 0 on; values in [0, 1],
            fractions too, which is not checked.
        size: of the window, odd; an int or a pair.
        gain: what the distance of the mask from its mean is multiplied by.

    Returns:
        A tensor of the mask's shape and dtype and in its memory format, without a gradient. One serves several calls of
        structure_loss. Computed in float32 (float64 for float64) and rounded once.

    The same bits on every run, for any number of threads, in every memory format and on every instruction set.

    Raises:
        TypeError: mask is not a dense tensor of one of these dtypes, size is not made of ints, gain is not a number.
        ValueError: mask is not 4-dimensional or on an unsupported device; size is even or not positive; gain is not
            finite."""
    _check.image("structure_weight", "mask", mask)
    height, width = _window("structure_weight", size, 4)
    if isinstance(gain, bool) or not isinstance(gain, numbers.Real):
        raise TypeError(f"structure_weight: gain must be a number, got {gain!r}")
    if not -math.inf < gain < math.inf:  # as torch.compile can trace it
        raise ValueError(f"structure_weight: gain must be finite, got {gain!r}")
    return _structure_weight(mask.detach(), height, width, float(gain))


def _images(op: str, name: str, x) -> torch.Tensor:
    """x as the kernels read it: (B, C, L) becomes images of one channel whose rows are the channels, or, where the
    channels are innermost, images of one row."""
    if not isinstance(x, torch.Tensor) or x.dim() == 4:
        _check.image(op, name, x)
        return x
    _check.tensor(op, name, x)
    if x.dim() != 3:
        raise ValueError(f"{op}: {name} must have 4 dimensions (B, C, H, W) or 3 (B, C, L), got shape {tuple(x.shape)}")
    rows = x.unsqueeze(2)
    return rows if is_channels_last(rows) else x.unsqueeze(1)


def _like(images: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return images if x.dim() == 4 else images.view(x.shape)


def _window(op: str, size, dimensions: int) -> tuple[int, int]:
    """Height and width of the window over the images of `_images`."""
    given = tuple(size) if isinstance(size, (tuple, list)) else (size,)
    if not all(isinstance(n, numbers.Integral) and not isinstance(n, bool) for n in given):
        raise TypeError(f"{op}: size must be an int or a pair of ints, got {size!r}")
    if len(given) > 2 or len(given) < 1 or (dimensions == 3 and len(given) == 2):
        wanted = "an int for x of 3 dimensions" if dimensions == 3 else "an int or a pair of ints"
        raise ValueError(f"{op}: size must be {wanted}, got {size!r}")
    if any(n < 1 or n % 2 == 0 for n in given):
        raise ValueError(f"{op}: size must be odd and > 0, got {size!r}")
    return (1, int(given[0])) if dimensions == 3 else (int(given[0]), int(given[-1]))


def _save(ctx, inputs, output):
    x, *ctx.window = inputs
    ctx.channels_last = is_channels_last(x)


def _backward(ctx, grad):
    return _box_mean_backward(grad, *ctx.window, ctx.channels_last), None, None, None


def _save_backward(ctx, inputs, output):
    _, *ctx.window, _ = inputs


def _backward_backward(ctx, grad):
    """The adjoint of the adjoint: the op itself, of the incoming gradient."""
    return _box_mean(grad, *ctx.window), None, None, None, None


def _fake_backward(grad, height, width, count_include_pad, channels_last):
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty(grad.shape, dtype=grad.dtype, device=grad.device, memory_format=memory_format)


_box_mean = register(
    "box_mean",
    fake=lambda x, *_: empty_image(x, x.shape[1]),
    setup_context=_save,
    backward=_backward,
    vmap=vmap_folded("box_mean", 1),
)
_box_mean_backward = register(
    "box_mean_backward",
    fake=_fake_backward,
    setup_context=_save_backward,
    backward=_backward_backward,
    vmap=vmap_folded("box_mean_backward", 1),
)
_structure_weight = register(
    "structure_weight",
    fake=lambda mask, *_: empty_image(mask, mask.shape[1]),
    setup_context=lambda ctx, inputs, output: None,
    backward=lambda ctx, grad: (None,) * 4,
    vmap=vmap_folded("structure_weight", 1),
)
