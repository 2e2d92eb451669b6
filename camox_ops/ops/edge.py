"""edge_maps: Sobel, Laplacian and joint gradient magnitudes of every channel, in one pass."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .. import reference
from . import _check
from ._codes import BORDERS, border_of, name_of
from ._layout import empty_image, empty_plain_image
from ._register import register, vmap_folded


class EdgeMaps(NamedTuple):
    """The three maps of edge_maps, each of x's shape, dtype and memory format."""

    sobel: torch.Tensor
    laplacian: torch.Tensor
    gradient: torch.Tensor


def edge_maps(
    x: torch.Tensor, *, eps: float = 1e-8, border: str = "zeros", stacked: bool = False
) -> EdgeMaps | torch.Tensor:
    """Edge magnitudes of every channel of an image.

    With * the cross-correlation of each channel, x extended by one pixel as `border` says:

        gx = x * [[-1,0,1],[-2,0,2],[-1,0,1]]    gy = x * its transpose    lap = x * [[0,1,0],[1,-4,1],[0,1,0]]
        sobel = sqrt(gx^2 + gy^2 + eps)    laplacian = |lap|    gradient = sqrt(sobel^2 + laplacian^2 + eps)

    Args:
        x: (B, C, H, W), float32, bfloat16, float16 or float64; any strides, any size from 0 on.
        eps: added under both roots, > 0. In the units of x squared.
        border: "zeros", "replicate" (the edge pixel again) or "reflect" (mirrored about the edge pixel; H, W >= 2).
        stacked: return one (B, 4C, H, W) tensor instead: sobel, laplacian, gradient, x.

    Returns:
        EdgeMaps(sobel, laplacian, gradient), each of x's shape and dtype and in its memory format (contiguous or
        channels_last); or the stacked tensor. Computed in float32 (float64 for float64) and rounded once. Autocast
        leaves x's dtype alone. NaN and inf spread over the 3x3 neighbourhood as in a convolution.

    Saved for backward: x alone. Derivatives of any order; the derivative of |lap| at 0 is 0. The same bits on every
    run, for any number of threads and on every instruction set. Forward-mode AD raises NotImplementedError.

    Raises:
        TypeError: x is not a dense tensor of one of these dtypes, eps is not a number, or stacked is not a bool.
        ValueError: x is not 4-dimensional or on an unsupported device, eps is not > 0 in the dtype that is computed
            in, an unknown border, "reflect" on a side of 1.

    Source of the formula: EdgeExpert.compute_edges in mahi-chan/camoXpert, models/experts.py at 47e858c."""
    if type(eps) is float and type(border) is str and type(stacked) is bool:
        call = _edge_maps_stacked if stacked else _edge_maps
        maps = call.attempt(x, eps, BORDERS.get(border))
        if maps is not None:
            return maps if stacked else tuple.__new__(EdgeMaps, maps)  # without EdgeMaps' own __new__, which is Python
    _check.image("edge_maps", "x", x)
    eps = _check.eps("edge_maps", eps, x)
    border_code = border_of("edge_maps", border, x)
    _check.flag("edge_maps", "stacked", stacked)
    if stacked:
        return _edge_maps_stacked(x, eps, border_code)
    return EdgeMaps(*_edge_maps(x, eps, border_code))


def _save(ctx, inputs, output):
    x, ctx.eps, ctx.border = inputs
    ctx.save_for_backward(x)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_sobel, grad_laplacian, grad_gradient):
    (x,) = ctx.saved_tensors
    if grad_sobel is None and grad_laplacian is None and grad_gradient is None:
        return None, None, None
    return _edge_maps_backward(x, grad_sobel, grad_laplacian, grad_gradient, None, ctx.eps, ctx.border), None, None


def _backward_stacked(ctx, grad):
    (x,) = ctx.saved_tensors
    if grad is None:
        return None, None, None
    return _edge_maps_backward(x, *grad.chunk(4, dim=1), ctx.eps, ctx.border), None, None


def _save_backward(ctx, inputs, output):
    *tensors, ctx.eps, ctx.border = inputs
    ctx.save_for_backward(*tensors)


def _backward_backward(ctx, grad):
    tensors = ctx.saved_tensors
    given = [i for i, tensor in enumerate(tensors) if tensor is not None]

    def backward(*some):
        every = list(tensors)
        for i, tensor in zip(given, some, strict=True):
            every[i] = tensor
        return reference.edge_maps_backward(*every, ctx.eps, name_of(BORDERS, ctx.border))

    _, pullback = torch.func.vjp(backward, *(tensors[i] for i in given))
    grads = [None] * 7
    for i, value in zip(given, pullback(grad), strict=True):
        grads[i] = value
    return tuple(grads)


_edge_maps = register(
    "edge_maps",
    fake=lambda x, eps, border: tuple(empty_image(x, x.shape[1]) for _ in range(3)),
    outputs=lambda x, *_: (empty_plain_image(x), empty_plain_image(x), empty_plain_image(x)),
    setup_context=_save,
    backward=_backward,
    vmap=vmap_folded("edge_maps", 1),
)
_edge_maps_stacked = register(
    "edge_maps_stacked",
    fake=lambda x, eps, border: empty_image(x, 4 * x.shape[1]),
    outputs=lambda x, *_: empty_plain_image(x, 4),
    setup_context=_save,
    backward=_backward_stacked,
    vmap=vmap_folded("edge_maps_stacked", 1),
)
_edge_maps_backward = register(
    "edge_maps_backward",
    fake=lambda x, *_: empty_image(x, x.shape[1]),
    outputs=lambda x, *_: empty_plain_image(x),
    setup_context=_save_backward,
    backward=_backward_backward,
    vmap=vmap_folded("edge_maps_backward", 5),
)
