"""spatial_gradient: derivatives of every channel along x and y, in one pass."""

from __future__ import annotations

import torch

from ..reference.spatial_gradient import WEIGHTS
from . import _check
from ._codes import BORDERS, border_of
from ._layout import empty_image, empty_plain_image, is_channels_last
from ._register import register, vmap_folded


def spatial_gradient(
    x: torch.Tensor, *, operator: str = "sobel", border: str = "zeros", normalized: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Derivatives of every channel of an image along x and y.

    The cross-correlation of each channel, x extended by one pixel as `border` says, with a kernel and its transpose:

        sobel:  -1  0  1     scharr:   -3  0   3
                -2  0  2              -10  0  10
                -1  0  1               -3  0   3

    Args:
        x: (B, C, H, W), float32, bfloat16, float16 or float64; any strides, any size from 0 on.
        operator: "sobel" or "scharr".
        border: "zeros", "replicate" (the edge pixel again) or "reflect" (mirrored about the edge pixel; H, W >= 2).
        normalized: divide by the sum of the kernel's absolute values: 8 for sobel, 32 for scharr. A ramp that rises by
            1 a pixel then has the derivative 1.

    Returns:
        (gx, gy), each of x's shape and dtype and in its memory format (contiguous or channels_last). Computed in
        float32 (float64 for float64) and rounded once; differences of pixels are taken first, so a large mean costs no
        accuracy. Autocast leaves x's dtype alone. NaN and inf spread over the 3x3 neighbourhood as in a convolution.

    Saved for backward: nothing, the op is linear. Derivatives of any order. The same bits on every run, for any number
    of threads and on every instruction set. Forward-mode AD raises NotImplementedError.

    Raises:
        TypeError: x is not a dense tensor of one of these dtypes, or normalized is not a bool.
        ValueError: x is not 4-dimensional or on an unsupported device, an unknown operator or border, "reflect" on a
            side of 1."""
    if type(operator) is str and operator in WEIGHTS and type(border) is str and type(normalized) is bool:
        gradients = _spatial_gradient.attempt(x, *_filter(operator, normalized), BORDERS.get(border))
        if gradients is not None:
            return gradients
    _check.image("spatial_gradient", "x", x)
    _check.choice("spatial_gradient", "operator", operator, tuple(WEIGHTS))
    border_code = border_of("spatial_gradient", border, x)
    _check.flag("spatial_gradient", "normalized", normalized)
    return _spatial_gradient(x, *_filter(operator, normalized), border_code)


def _filter(operator: str, normalized: bool) -> tuple[float, float]:
    """The kernel's weights beside the middle and in it."""
    side, middle = WEIGHTS[operator]
    scale = 1 / (4 * side + 2 * middle) if normalized else 1.0
    return scale * side, scale * middle


def _save(ctx, inputs, output):
    x, *ctx.filter = inputs
    ctx.channels_last = is_channels_last(x)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_gx, grad_gy):
    if grad_gx is None and grad_gy is None:
        return None, None, None, None
    return _spatial_gradient_backward(grad_gx, grad_gy, *ctx.filter, ctx.channels_last), None, None, None


def _save_backward(ctx, inputs, output):
    grad_gx, grad_gy, *ctx.filter, _ = inputs
    ctx.given = grad_gx is not None, grad_gy is not None
    ctx.set_materialize_grads(False)


def _backward_backward(ctx, grad):
    """The adjoint of the adjoint: the derivatives of the incoming gradient."""
    if grad is None:
        return (None,) * 6
    gradients = _spatial_gradient(grad, *ctx.filter)
    return *(g if given else None for g, given in zip(gradients, ctx.given, strict=True)), None, None, None, None


def _fake_backward(grad_gx, grad_gy, side, middle, border, channels_last):
    like = grad_gy if grad_gx is None else grad_gx
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty(like.shape, dtype=like.dtype, device=like.device, memory_format=memory_format)


def _backward_outputs(grad_gx, grad_gy, side, middle, border, channels_last):
    return empty_plain_image(grad_gy if grad_gx is None else grad_gx, 1, channels_last)


_spatial_gradient = register(
    "spatial_gradient",
    fake=lambda x, *_: tuple(empty_image(x, x.shape[1]) for _ in range(2)),
    outputs=lambda x, *_: (empty_plain_image(x), empty_plain_image(x)),
    setup_context=_save,
    backward=_backward,
    vmap=vmap_folded("spatial_gradient", 1),
)
_spatial_gradient_backward = register(
    "spatial_gradient_backward",
    fake=_fake_backward,
    outputs=_backward_outputs,
    setup_context=_save_backward,
    backward=_backward_backward,
    vmap=vmap_folded("spatial_gradient_backward", 2),
)
