"""linear_cross_entropy: the cross entropy of a linear layer, whose logits never exist as a whole."""

from __future__ import annotations

import numbers

import torch

from .._torch_private import in_eager_transform, refuse_tangents
from . import _check, _linear_cross_entropy_cuda
from ._codes import LOSS_REDUCTIONS, code_of
from ._register import last_derivative, register, register_last_derivative

OP = "linear_cross_entropy"


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """F.cross_entropy(x @ weight.T + bias, target), with logits that exist a block at a time.

    Args:
        x: (rows, D), float32, bfloat16, float16 or float64; any strides.
        weight: (V, D), a row for each of V classes, in x's dtype; beside x in a half type also float32, and x is then
            read as float32.
        target: (rows,), int64: the class of each row, in [0, V), or ignore_index.
        bias: (V,) or None, in x's dtype or the one computed in.
        ignore_index: rows with this target have no loss, no gradient, and do not count in the mean.
        label_smoothing: in [0, 1]: the part of the target that is spread evenly over all classes.
        reduction: "mean" over the rows that are not ignored (NaN where all are, as in PyTorch), "sum", or "none": a
            loss for each row, 0 where it is ignored.

    Returns:
        A number, or (rows,), in float32 (float64 for float64), whatever the dtype of x. Everything is computed in that
        dtype, logits are not rounded; each gradient is rounded once. Autocast casts x, weight and bias to its dtype, as
        it does for F.linear.

    The forward of a mean or sum makes the gradients that are required too, three products instead of four; backward
    multiplies them by the loss' own gradient. It does not in float64 nor under torch.func.

    Saved for backward: x, weight, bias and target themselves, and two numbers for each row, its largest logit and
    the logarithm of its sum of exponentials relative to that; where the forward made gradients these too, in float32,
    as large as x, weight and bias. Elsewhere backward computes the logits again. Second derivatives and forward-mode
    AD raise NotImplementedError. The same bits on every run and for any number of threads.

    On CUDA the products are torch.mm's, in float32 as torch.set_float32_matmul_precision says; a row whose target is no
    class becomes NaN, and camox_ops.check_errors() raises.

    Raises:
        TypeError: x, weight or bias is not a dense tensor of one of these dtypes, target not one of int64; ignore_index
            or label_smoothing is not a number.
        ValueError: shapes or devices that do not fit; label_smoothing outside [0, 1]; an unknown reduction; a target
            that is no class (on the CPU)."""
    _matrix("x", x)
    _matrix("weight", weight)
    if weight.shape[1] != x.shape[1]:
        raise ValueError(
            f"{OP}: weight must have shape (V, {x.shape[1]}), a column for each of x's, got {tuple(weight.shape)}"
        )
    _check.tensor(OP, "target", target, dtypes=(torch.int64,))
    if target.shape != x.shape[:1]:
        raise ValueError(
            f"{OP}: target must have shape ({x.shape[0]},), one class per row of x, got {tuple(target.shape)}"
        )
    for name, value in (("weight", weight), ("target", target)):
        _check.same_device(OP, name, value, x)
    if bias is not None:
        _check.tensor(OP, "bias", bias)
        if bias.shape != weight.shape[:1]:
            raise ValueError(
                f"{OP}: bias must have shape ({weight.shape[0]},), one element per row of weight, "
                f"got {tuple(bias.shape)}"
            )
        _check.same_device(OP, "bias", bias, x)
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, numbers.Integral):
        raise TypeError(f"{OP}: ignore_index must be an int, got {ignore_index!r}")
    if isinstance(label_smoothing, bool) or not isinstance(label_smoothing, numbers.Real):
        raise TypeError(f"{OP}: label_smoothing must be a number, got {label_smoothing!r}")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"{OP}: label_smoothing must be in [0, 1], got {label_smoothing!r}")
    code = code_of(OP, "reduction", reduction, LOSS_REDUCTIONS)
    x, weight, bias = _check.autocast(x, weight, bias)
    real = _check.computed_in(x)
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None and value.dtype not in (x.dtype, real):
            names = _check.dtype_names(x.dtype, real)
            raise TypeError(f"{OP}: {name} must have dtype {names}, got {_check.dtype_names(value.dtype)}")
    if weight.dtype != x.dtype:
        x = x.to(real)
    if bias is not None:
        bias = bias.to(real)
    made = _made_in_forward(x, weight, bias, code)
    return _linear_cross_entropy(x, weight, target, bias, int(ignore_index), float(label_smoothing), code, *made)[0]


def _made_in_forward(x, weight, bias, reduction: int) -> tuple[bool, bool, bool]:
    """Which gradients, of x, weight and bias, the forward makes beside the loss: those that are required, where the
    loss is one number, by whose gradient they are multiplied later. Tensors that a transform of torch.func follows do
    not say whether a gradient is required."""
    one_number = reduction != LOSS_REDUCTIONS["none"] and x.device.type != "meta" and x.dtype != torch.float64
    makes = one_number and torch.is_grad_enabled() and not in_eager_transform(x, weight)
    return tuple(makes and value is not None and value.requires_grad for value in (x, weight, bias))


def _matrix(name: str, value) -> None:
    _check.tensor(OP, name, value)
    if value.dim() != 2:
        raise ValueError(f"{OP}: {name} must have 2 dimensions, got shape {tuple(value.shape)}")


def _fake(x, weight, target, bias, ignore_index, label_smoothing, reduction, make_x, make_weight, make_bias):
    real = _check.computed_in(x)
    rows = x.shape[:1]
    shapes = (
        rows if reduction == LOSS_REDUCTIONS["none"] else (),
        rows,
        rows,
        x.shape if make_x else (0, 0),
        weight.shape if make_weight else (0, 0),
        weight.shape[:1] if make_bias else (0,),
    )
    return tuple(x.new_empty(shape, dtype=real) for shape in shapes)


def _save(ctx, inputs, output):
    x, weight, target, bias, *options = inputs
    ctx.options, ctx.made = options[:3], options[3:]
    _, top, log, *gradients = output
    ctx.mark_non_differentiable(top, log, *gradients)
    made = (gradient for gradient, was_made in zip(gradients, ctx.made, strict=True) if was_made)
    ctx.save_for_backward(x, weight, target, bias, top, log, *made)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, *_):
    if grad is None:
        return (None,) * 10
    needed = (ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[3])
    if all(made or not need for made, need in zip(ctx.made, needed, strict=True)):
        grad_x, grad_weight, grad_bias = _multiplied(ctx, grad)
    else:
        x, weight, target, bias, top, log, *_ = ctx.saved_tensors
        grads = _linear_cross_entropy_backward(grad, x, weight, target, bias, top, log, *ctx.options, *needed)
        grad_x, grad_weight, grad_bias = (g if need else None for g, need in zip(grads, needed, strict=True))
    return grad_x, grad_weight, None, grad_bias, *(None,) * 6


@last_derivative(OP)
def _multiplied(ctx, grad):
    """The gradients that the forward has made, times that of its loss: new tensors, as another backward may follow."""
    refuse_tangents(f"{OP}_backward", (grad,))
    x, weight, _, _, _, _, *made = ctx.saved_tensors
    gradients = iter(made)
    places = zip(ctx.made, (x.dtype, weight.dtype, grad.dtype), strict=True)
    return tuple(_product(next(gradients), grad, dtype) if was_made else None for was_made, dtype in places)


def _product(gradient, grad, dtype):
    """In this dtype, rounded once and by one kernel."""
    return torch.mul(gradient, grad, out=gradient.new_empty(gradient.shape, dtype=dtype))


def _fake_backward(
    grad, x, weight, target, bias, top, log, ignore_index, label_smoothing, reduction, needs_x, needs_weight, needs_bias
):
    return (
        x.new_empty(x.shape if needs_x else (0, 0)),
        x.new_empty(weight.shape if needs_weight else (0, 0)),
        top.new_empty(weight.shape[:1] if needs_bias else (0,)),
    )


_linear_cross_entropy = register(OP, fake=_fake, setup_context=_save, backward=_backward)
_linear_cross_entropy_backward = register_last_derivative(OP, fake=_fake_backward)
torch.library.register_fake("camox_ops::linear_cross_entropy_rows_", lambda *_: None)

_cuda = torch.library.Library("camox_ops", "IMPL")
_cuda.impl("linear_cross_entropy", _linear_cross_entropy_cuda.forward, "CUDA")
_cuda.impl("linear_cross_entropy_backward", _linear_cross_entropy_cuda.backward, "CUDA")
