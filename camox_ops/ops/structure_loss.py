"""structure_loss: F3Net's loss, weighted binary cross entropy plus IoU, in one pass forward and one backward."""

from __future__ import annotations

import math
import numbers

import torch

from . import _check
from ._codes import BCES, REDUCTIONS, code_of
from ._register import register, register_last_derivative
from .box import structure_weight


def structure_loss(
    logits: torch.Tensor,
    mask: torch.Tensor,
    *,
    weight: torch.Tensor | None = None,
    size: int | tuple[int, int] = 31,
    gain: float = 5.0,
    bce: str = "weighted",
    smooth: float = 1.0,
    probabilities: bool = False,
    reduction: str = "mean",
) -> torch.Tensor:
    """The structure loss of F3Net, PraNet, SINet-V2 and their kin: weighted binary cross entropy plus weighted IoU.

    For each image and channel, over its pixels, with p = sigmoid(logits), w = weight and s = smooth:

        sum(w bce) / sum(w)  +  1 - (sum(w p mask) + s) / (sum(w (p + mask)) - sum(w p mask) + s)

    Args:
        logits: (B, C, H, W), float32, bfloat16, float16 or float64; any strides.
        mask: of the logits' shape, in any of these dtypes; values in [0, 1], fractions too. Read as it is where it and
            weight have the dtype of the logits or the one computed in.
        weight: of the logits' shape; structure_weight(mask), made once for several outputs of one mask. None: it is
            made here, of `size` and `gain`, which a given weight makes meaningless.
        size, gain: as for structure_weight.
        bce: "weighted", the formula above, or "mean": the plain mean of bce over the whole batch in the place of its
            first term, which is what most public copies compute, as they pass reduce='none', a string that is true.
        smooth: added above and below the fraction, >= 0.
        probabilities: `logits` holds p itself; the logarithms are no less than -100, as in binary_cross_entropy. Of an
            image with one outside [0, 1] the loss is NaN, on every device.
        reduction: "mean" or "sum" over B and C, or "none": a loss (B, C).

    Returns:
        A number, or (B, C), in float32 (float64 for float64), whatever the dtype of the logits. Everything is computed
        in that dtype; the gradient is rounded once. Autocast changes nothing.

    A gradient flows to the logits alone: mask and weight have none, even where they require one.
    Saved for backward: logits, mask, weight and four numbers per image. Second derivatives and forward-mode AD raise
    NotImplementedError. The same bits on every run and for any number of threads.

    Raises:
        TypeError: logits, mask or weight is not a dense tensor of one of these dtypes, smooth is not a number,
            probabilities is not a bool.
        ValueError: another shape or device of mask or weight; a mask outside [0, 1] (on the CPU, where it costs
            nothing); an unknown bce or reduction; smooth negative or not finite; what structure_weight refuses."""
    _check.image("structure_loss", "logits", logits)
    _companion("mask", mask, logits)
    bce_code = code_of("structure_loss", "bce", bce, BCES)
    reduction_code = code_of("structure_loss", "reduction", reduction, REDUCTIONS)
    _check.flag("structure_loss", "probabilities", probabilities)
    if isinstance(smooth, bool) or not isinstance(smooth, numbers.Real):
        raise TypeError(f"structure_loss: smooth must be a number, got {smooth!r}")
    if not 0 <= smooth < math.inf:
        raise ValueError(f"structure_loss: smooth must be >= 0 and finite, got {smooth!r}")
    mask = mask.detach()
    if weight is not None:
        _companion("weight", weight, logits)
        weight = weight.detach()
    if weight is None or not mask.dtype == weight.dtype == logits.dtype:  # beside which kernels read them as they are
        real = _check.computed_in(logits)
        mask = mask.to(real)
        weight = structure_weight(mask, size=size, gain=gain) if weight is None else weight.to(real)
    return _structure_loss(logits, mask, weight, bce_code, float(smooth), probabilities, reduction_code)[0]


def _companion(name: str, value, logits: torch.Tensor) -> None:
    _check.tensor("structure_loss", name, value)
    if value.shape != logits.shape:
        raise ValueError(
            f"structure_loss: {name} must have the shape of logits, {tuple(logits.shape)}, got {tuple(value.shape)}"
        )
    _check.same_device("structure_loss", name, value, logits, "logits")


def _fake(logits, mask, weight, bce, smooth, probabilities, reduction):
    images, real = logits.shape[:2], _check.computed_in(logits)
    loss = logits.new_empty(images if reduction == REDUCTIONS["none"] else (), dtype=real)
    return loss, logits.new_empty((images[0] * images[1], 4), dtype=real)


def _save(ctx, inputs, output):
    logits, mask, weight, *ctx.options = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(logits, mask, weight, output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, _):
    if grad is None:
        return (None,) * 7
    return (_structure_loss_backward(grad, *ctx.saved_tensors, *ctx.options), *(None,) * 6)


_structure_loss = register("structure_loss", fake=_fake, setup_context=_save, backward=_backward)
_structure_loss_backward = register_last_derivative(
    "structure_loss",
    fake=lambda grad, logits, *_: torch.empty_like(logits, memory_format=torch.contiguous_format),
)
