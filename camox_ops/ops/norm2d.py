"""layer_norm2d: LayerNorm over the channels of an image, an activation and a residual, in one pass."""

from __future__ import annotations

import torch

from .. import reference
from . import _check
from ._codes import ACTIVATIONS, code_of, name_of
from ._layout import empty_image, empty_plain_image, weights_as_read
from ._register import fold_batch, one_by_one, register, unfold_batch


def layer_norm2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float = 1e-6,
    *,
    activation: str = "none",
    residual: torch.Tensor | None = None,
    groups: int = 1,
) -> torch.Tensor:
    """Normalises every pixel of an image over its channels, then scales, shifts, activates and adds.

    Over each group of C/groups neighbouring channels, at every pixel:

        y = act((x - mean) / sqrt(var + eps) * weight + bias) [+ residual]

    with the biased variance, taken from differences, so that mean 1e4 with standard deviation 1 keeps its digits.

    Args:
        x: (B, C, H, W), float32, bfloat16, float16 or float64; any strides, any size from 0 on.
        weight, bias: (C,), in x's dtype; float32 is welcome beside a half-precision x. Where one of
            them alone is float32, the other is converted to it.
        eps: added to the variance, > 0 in float32 (float64 for float64). In the units of x squared.
        activation: "none", "gelu" (x Phi(x), with erf), "gelu_tanh" (its tanh form), "relu" or "silu".
        residual: None or a tensor of x's shape and dtype, added after the activation.
        groups: number of groups of channels that are normalised on their own; must divide C.

    Returns:
        (B, C, H, W) in x's dtype and memory format (contiguous or channels_last). Computed in float32 (float64 for
        float64) and rounded once. Autocast leaves x's dtype alone.

    Saved for backward: x, weight, bias and two float32 numbers per pixel and group (on the CPU one without an
    activation); the activation is computed again.
    The gradients of weight and bias have the same bits on every run and for any number of threads, as everything else.
    Derivatives of any order; relu's derivative at 0 is 0. Forward-mode AD raises NotImplementedError.

    Raises:
        TypeError: x, weight, bias or residual is not a dense tensor of one of these dtypes, their dtypes do not go
            together, or eps or groups is not a number.
        ValueError: x is not 4-dimensional or on an unsupported device, weight or bias is not (C,), residual has another
            shape, devices differ, eps <= 0, groups does not divide C, an unknown activation.

    Source of the formula: LayerNorm2d in mahi-chan/camoXpert, models/backbone.py at 47e858c."""
    if type(eps) is float and type(groups) is int and type(activation) is str and _are_alike(weight, bias):
        outputs = _layer_norm2d.attempt(x, weight, bias, residual, eps, groups, ACTIVATIONS.get(activation))
        if outputs is not None:
            return outputs[0]
    _check.image("layer_norm2d", "x", x)
    _check.affine("layer_norm2d", "weight", weight, x, 1, "channel")
    _check.affine("layer_norm2d", "bias", bias, x, 1, "channel")
    eps = _check.eps("layer_norm2d", eps, x)
    activation_code = code_of("layer_norm2d", "activation", activation, ACTIVATIONS)
    if residual is not None:
        _check.like("layer_norm2d", "residual", residual, x)
    _check_groups(groups, x)
    return _layer_norm2d(x, *weights_as_read(weight, bias), residual, eps, groups, activation_code)[0]


def _are_alike(weight, bias) -> bool:
    """Whether the kernel reads them as they are, where they are right at all."""
    return isinstance(weight, torch.Tensor) and isinstance(bias, torch.Tensor) and weight.dtype is bias.dtype


def _check_groups(groups: int, x: torch.Tensor) -> None:
    if isinstance(groups, bool) or not isinstance(groups, (int, torch.SymInt)):
        raise TypeError(f"layer_norm2d: groups must be an int, got {groups!r}")
    if groups < 1 or x.shape[1] % groups:
        raise ValueError(f"layer_norm2d: groups must be >= 1 and divide the {x.shape[1]} channels of x, got {groups}")


def _fake(x, weight, bias, residual, eps, groups, activation, save):
    saved = 1 if activation == ACTIVATIONS["none"] and not x.is_cuda else 2
    shape = (saved, x.shape[0] if save else 0, groups, *x.shape[2:])
    stats = x.new_empty(shape, dtype=_check.computed_in(x))
    return empty_image(x, x.shape[1]), stats


def _outputs(x, weight, bias, residual, eps, groups, activation, save):
    """As _fake, of a plain CPU tensor."""
    batch, _, height, width = x.shape
    saved = 1 if activation == ACTIVATIONS["none"] else 2
    kept, of_group = batch if save else 0, height * width
    of_image = groups * of_group
    dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    sizes, strides = (saved, kept, groups, height, width), (kept * of_image, of_image, of_group, width, 1)
    return empty_plain_image(x), torch.empty_strided(sizes, strides, dtype=dtype)


def _backward_outputs(grad, x, weight, bias, *_):
    """Of a plain CPU tensor."""
    grad_weight = torch.empty_strided(weight.shape, (1,), dtype=weight.dtype)
    return empty_plain_image(x), grad_weight, torch.empty_strided(bias.shape, (1,), dtype=bias.dtype)


def _save(ctx, inputs, output):
    x, weight, bias, residual, ctx.eps, ctx.groups, ctx.activation, _ = inputs
    ctx.has_residual = residual is not None
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, weight, bias, output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, _=None):
    if grad is None:
        return (None,) * 8
    x, weight, bias, stats = ctx.saved_tensors
    grads = _layer_norm2d_backward(grad, x, weight, bias, stats, ctx.eps, ctx.groups, ctx.activation)
    return (*grads, grad if ctx.has_residual else None, None, None, None, None)


def _save_backward(ctx, inputs, output):
    grad, x, weight, bias, _, ctx.eps, ctx.groups, ctx.activation = inputs
    ctx.save_for_backward(grad, x, weight, bias)
    ctx.set_materialize_grads(False)


def _backward_backward(ctx, *grads):
    """Differentiates the formula in the dtype computed in; stats are functions of x, whose derivative covers them."""
    tensors = ctx.saved_tensors
    real = _check.computed_in(tensors[1])

    def backward(grad, x, weight, bias):
        outputs = reference.layer_norm2d_backward(
            grad, x, weight, bias, ctx.eps, activation=name_of(ACTIVATIONS, ctx.activation), groups=ctx.groups
        )
        return tuple(output for output, g in zip(outputs, grads, strict=True) if g is not None)

    given = tuple(g.to(real) for g in grads if g is not None)
    if not given:
        return (None,) * 8
    _, pullback = torch.func.vjp(backward, *(tensor.to(real) for tensor in tensors))
    found = (value.to(tensor.dtype) for value, tensor in zip(pullback(given), tensors, strict=True))
    return (*found, None, None, None, None)


def _vmap(info, in_dims, x, weight, bias, residual, *scalars):
    op = torch.ops.camox_ops.layer_norm2d
    if in_dims[1] is not None or in_dims[2] is not None:
        # Weights that differ within the batch do not fold into B, and neither do sums over it.
        return one_by_one(op, info, in_dims, (x, weight, bias, residual, *scalars))
    x, residual = fold_batch(info, (in_dims[0], in_dims[3]), (x, residual), 2)
    y, stats = op(x, weight, bias, residual, *scalars)
    stats = stats.unflatten(1, (info.batch_size, stats.shape[1] // max(info.batch_size, 1)))
    return (unfold_batch(info, y), stats), (0, 1)


_layer_norm2d = register(
    "layer_norm2d",
    fake=_fake,
    outputs=_outputs,
    setup_context=_save,
    backward=_backward,
    vmap=_vmap,
    saves_if_asked=True,
)
_layer_norm2d_backward = register(
    "layer_norm2d_backward",
    fake=lambda grad, x, weight, bias, *_: (
        empty_image(x, x.shape[1]),
        torch.empty_like(weight, memory_format=torch.contiguous_format),
        torch.empty_like(bias, memory_format=torch.contiguous_format),
    ),
    setup_context=_save_backward,
    backward=_backward_backward,
    outputs=_backward_outputs,
)
