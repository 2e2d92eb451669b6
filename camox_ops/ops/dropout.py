"""dropout, sparse_gate and dropout_add_layer_norm: masks that are computed where they are used and stored nowhere."""

from __future__ import annotations

import math

import torch

from .. import reference
from . import _check
from ._layout import weights_as_read
from ._random import draw_seed
from ._register import register, register_last_derivative

MOST_DIMENSIONS = 16


def dropout(
    x: torch.Tensor, p: float, *, training: bool = True, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Zeroes each element with probability p and scales the others, as torch.nn.functional.dropout, without a mask.

        out = x * scale where kept, 0 where dropped, whatever x is there

    The mask is computed from a seed and each element's index, by Philox4x32 with 7 rounds and 16 bits an element, in
    the forward and again in the backward. So p is rounded to a multiple of 1/65536 (and to less than 1), and scale is
    1/(1 - p) of the rounded p.

    Args:
        x: up to 16 dimensions, float32, bfloat16, float16 or float64; any strides, any size from 0 on.
        p: probability of an element to be dropped, in [0, 1).
        training: False returns x.
        generator: where the seed is drawn from, a generator of x's device; None for torch's own.

    Returns:
        A tensor of x's shape, dtype and memory format; x itself where p is 0 or training is False: no seed is drawn
        then. Computed in float32 (float64 for float64) and rounded once. Autocast leaves x's dtype alone.

    The seed is one int64 tensor drawn by torch.randint on x's device, so torch.manual_seed repeats the mask, activation
    checkpointing replays it and CUDA graphs draw a new one each time; nothing waits for its value. One seed and shape
    give one mask: on the CPU and on CUDA, for any strides, instruction set and number of threads. Under torch.vmap its
    `randomness` decides: "different" draws a seed for every sample, "same" one for all, "error" refuses.

    Saved for backward: the seed. Derivatives of any order. Forward-mode AD raises NotImplementedError.

    Raises:
        TypeError: x is not a dense tensor of one of these dtypes, p is not a number, training not a bool, generator not
            a torch.Generator.
        ValueError: p outside [0, 1), more than 16 dimensions, an unsupported device, a generator of another device."""
    _check_x("dropout", x)
    p = _check.probability("dropout", "p", p)
    seed = draw_seed("dropout", x, p, training, generator)
    return x if seed is None else _dropout(x, seed, p)


def sparse_gate(
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    p: float = 0.0,
    training: bool = False,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """dropout(relu(x) * relu(y), p) in one pass: the gate of Baby Dragon Hatchling.

    Args:
        x, y: of one shape and dtype, up to 16 dimensions, float32, bfloat16, float16 or float64; any strides.
        p, training, generator: as in camox_ops.dropout; p = 0 or training=False draws no seed and drops nothing.

    Returns:
        A tensor of x's shape, dtype and memory format. Computed in float32 (float64 for float64) and rounded once.
        Autocast leaves x's dtype alone.

    Saved for backward: x, y and the seed; the rectified tensors, their product and the mask are computed again.
    Derivatives of any order; the derivative of relu at 0 is 0. Masks and torch.vmap as in camox_ops.dropout.
    Forward-mode AD raises NotImplementedError.

    Raises:
        TypeError: x or y is not a dense tensor of one of these dtypes, their dtypes differ, p is not a number,
            training not a bool, generator not a torch.Generator.
        ValueError: shapes or devices differ, p outside [0, 1), more than 16 dimensions, an unsupported device.

    Source of the formula: x_sparse * y_sparse in takzen/vision-bdh, models/bdh.py at 71cb8ab."""
    _check_x("sparse_gate", x)
    _check.like("sparse_gate", "y", y, x)
    p = _check.probability("sparse_gate", "p", p)
    return _sparse_gate(x, y, draw_seed("sparse_gate", x, p, training, generator), p)


def dropout_add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    p: float = 0.0,
    training: bool = False,
    eps: float = 1e-5,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """layer_norm(residual + dropout(x, p)) over the last dimension, in one pass.

        s = residual + dropout(x)    y = (s - mean) / sqrt(var + eps) * weight + bias

    with the biased variance over the last dimension, taken from differences, so that mean 1e4 with standard deviation 1
    keeps its digits.

    Args:
        x, residual: (..., D) of one shape and dtype, float32, bfloat16, float16 or float64; any strides, of which all
            but contiguous ones are copied.
        weight, bias: (D,), in x's dtype; float32 is welcome beside a half-precision x. Where one of
            them alone is float32, the other is converted to it.
        p, training, generator: as in camox_ops.dropout; p = 0 or training=False draws no seed and drops nothing.
        eps: added to the variance, > 0 in float32 (float64 for float64). In the units of x squared.

    Returns:
        (..., D) in x's dtype, contiguous. Computed in float32 (float64 for float64) and rounded once; s is never
        rounded. Autocast leaves x's dtype alone.

    Saved for backward: x, residual, weight, the seed and two float32 numbers a row; s and the mask are computed again.
    The gradients of weight and bias have the same bits on every run and for any number of threads, as everything else.
    First derivatives; a second one raises NotImplementedError, and so does forward-mode AD. Masks and torch.vmap as in
    camox_ops.dropout.

    Raises:
        TypeError: x, residual, weight or bias is not a dense tensor of one of these dtypes, their dtypes do not go
            together, p or eps is not a number, training not a bool, generator not a torch.Generator.
        ValueError: x has no dimension, residual another shape, weight or bias is not (D,), devices differ, p outside
            [0, 1), eps <= 0, an unsupported device."""
    op = "dropout_add_layer_norm"
    _check.tensor(op, "x", x)
    if x.dim() < 1:
        raise ValueError(f"{op}: x must have at least 1 dimension, got shape {tuple(x.shape)}")
    _check.like(op, "residual", residual, x)
    _check.affine(op, "weight", weight, x, -1, "column")
    _check.affine(op, "bias", bias, x, -1, "column")
    p = _check.probability(op, "p", p)
    eps = _check.eps(op, eps, x)
    seed = draw_seed(op, x, p, training, generator)
    return _dropout_add_layer_norm(x, residual, *weights_as_read(weight, bias), seed, p, eps)[0]


def _check_x(op: str, x: torch.Tensor) -> None:
    _check.tensor(op, "x", x)
    if x.dim() > MOST_DIMENSIONS:
        raise ValueError(f"{op}: x must have at most {MOST_DIMENSIONS} dimensions, got {x.dim()}")


# ---- dropout: linear in x, and its own transpose ----


def _save_seed(ctx, inputs, output):
    _, seed, ctx.p = inputs
    ctx.save_for_backward(seed)
    ctx.set_materialize_grads(False)


def _dropout_backward(ctx, grad):
    (seed,) = ctx.saved_tensors
    return None if grad is None else _dropout(grad, seed, ctx.p), None, None


# ---- sparse_gate ----


def _save_gate(ctx, inputs, output):
    *tensors, ctx.p = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _gate_backward(ctx, grad):
    if grad is None:
        return (None,) * 4
    return (*_sparse_gate_backward(grad, *ctx.saved_tensors, ctx.p), None, None)


def _gate_backward_backward(ctx, *grads):
    grad, x, y, seed = ctx.saved_tensors

    def backward(*tensors):
        outputs = reference.sparse_gate_backward(*tensors, seed, ctx.p)
        return tuple(output for output, g in zip(outputs, grads, strict=True) if g is not None)

    given = tuple(g for g in grads if g is not None)
    if not given:
        return (None,) * 5
    _, pullback = torch.func.vjp(backward, grad, x, y)
    return (*pullback(given), None, None)


# ---- dropout_add_layer_norm ----


def _fake_norm(x, residual, weight, bias, seed, p, eps):
    rows = math.prod(x.shape[:-1])  # torch.Size.numel makes ints of SymInts, a graph for every shape
    stats = x.new_empty((2, rows), dtype=_check.computed_in(x))
    return torch.empty_like(x, memory_format=torch.contiguous_format), stats


def _save_norm(ctx, inputs, output):
    x, residual, weight, _, seed, ctx.p, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, residual, weight, output[1], seed)
    ctx.set_materialize_grads(False)


def _norm_backward(ctx, grad, _):
    if grad is None:
        return (None,) * 7
    *tensors, seed = ctx.saved_tensors
    grad_x, *others = _dropout_add_layer_norm_backward(grad, *tensors, seed, ctx.p)
    return (others[0] if seed is None else grad_x, *others, None, None, None)


def _fake_norm_backward(grad, x, residual, weight, stats, seed, p):
    grad_residual = torch.empty_like(x, memory_format=torch.contiguous_format)
    grad_x = x.new_empty(0) if seed is None else torch.empty_like(grad_residual)
    return grad_x, grad_residual, torch.empty_like(weight), torch.empty_like(weight)


_dropout = register(
    "dropout",
    fake=lambda x, seed, p: torch.empty_like(x),
    setup_context=_save_seed,
    backward=_dropout_backward,
)
_sparse_gate = register(
    "sparse_gate",
    fake=lambda x, y, seed, p: torch.empty_like(x),
    setup_context=_save_gate,
    backward=_gate_backward,
)
_sparse_gate_backward = register(
    "sparse_gate_backward",
    fake=lambda grad, x, y, seed, p: (torch.empty_like(x), torch.empty_like(y)),
    setup_context=_save_gate,
    backward=_gate_backward_backward,
)
_dropout_add_layer_norm = register(
    "dropout_add_layer_norm",
    fake=_fake_norm,
    setup_context=_save_norm,
    backward=_norm_backward,
)
_dropout_add_layer_norm_backward = register_last_derivative("dropout_add_layer_norm", fake=_fake_norm_backward)
