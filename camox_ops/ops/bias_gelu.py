"""bias_gelu: the bias of a linear layer, GELU and dropout in one pass."""

from __future__ import annotations

import torch

from .. import reference
from . import _check
from ._layout import as_read
from ._random import draw_plain_seed, draw_seed
from ._register import register


def bias_gelu(
    x: torch.Tensor,
    bias: torch.Tensor,
    *,
    p: float = 0.0,
    training: bool = False,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """dropout(gelu(x + bias), p) in one pass: what stands between the two products of a feed-forward block.

        gelu(u) = u/2 (1 + erf(u / sqrt(2)))

    Args:
        x: (..., D), float32, bfloat16, float16 or float64: a product without its bias; any strides, of which all but
            contiguous ones are copied.
        bias: (D,), in x's dtype; float32 is welcome beside a half-precision x.
        p, training, generator: as in camox_ops.dropout; p = 0 or training=False draws no seed and drops nothing.

    Returns:
        (..., D) in x's dtype, contiguous. Computed in float32 (float64 for float64) and rounded once; x + bias is never
        rounded. Autocast leaves x's dtype alone.

    Saved for backward: x, bias and the seed; x + bias, the derivative of GELU and the mask are computed again. The
    gradient of bias is summed over rows in a fixed order: the same bits on every run and for any number of threads.
    Derivatives of any order. Forward-mode AD raises NotImplementedError. Masks and torch.vmap as in camox_ops.dropout.

    Raises:
        TypeError: x or bias is not a dense tensor of one of these dtypes, their dtypes do not go together, p is not a
            number, training not a bool, generator not a torch.Generator.
        ValueError: x has no dimension, bias is not (D,), devices differ, p outside [0, 1), an unsupported device, a
            generator of another device.

    Source of the formula: Hendrycks and Gimpel, arXiv 1606.08415."""
    seed = None
    if type(p) is float and 0.0 <= p < 1.0 and type(training) is bool and generator is None:
        drops = training and p > 0.0
        seed = draw_plain_seed(x) if drops else None
        if seed is not None or not drops:
            y = _bias_gelu.attempt(x, bias, seed, p)
            if y is not None:
                return y
    op = "bias_gelu"
    _check.tensor(op, "x", x)
    if x.dim() < 1:
        raise ValueError(f"{op}: x must have at least 1 dimension, got shape {tuple(x.shape)}")
    _check.affine(op, "bias", bias, x, -1, "column")
    p = _check.probability(op, "p", p)
    if seed is None:
        seed = draw_seed(op, x, p, training, generator)
    return _bias_gelu(x, as_read(bias, bias.dtype), seed, p)


def _save(ctx, inputs, output):
    *tensors, ctx.p = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad):
    if grad is None:
        return (None,) * 4
    return (*_bias_gelu_backward(grad, *ctx.saved_tensors, ctx.p), None, None)


def _backward_backward(ctx, *grads):
    """Differentiates the formula in the dtype computed in."""
    grad, x, bias, seed = ctx.saved_tensors
    real = _check.computed_in(x)

    def backward(*tensors):
        outputs = reference.bias_gelu_backward(*tensors, seed, ctx.p)
        return tuple(output for output, g in zip(outputs, grads, strict=True) if g is not None)

    given = tuple(g.to(real) for g in grads if g is not None)
    if not given:
        return (None,) * 5
    _, pullback = torch.func.vjp(backward, *(tensor.to(real) for tensor in (grad, x, bias)))
    found = (value.to(tensor.dtype) for value, tensor in zip(pullback(given), (grad, x, bias), strict=True))
    return (*found, None, None)


def _fake(x, *_):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_bias_gelu = register("bias_gelu", fake=_fake, setup_context=_save, backward=_backward)
_bias_gelu_backward = register(
    "bias_gelu_backward",
    fake=lambda grad, x, bias, seed, p: (_fake(x), _fake(bias)),
    setup_context=_save,
    backward=_backward_backward,
)
