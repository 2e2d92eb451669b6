"""What layer_norm2d must give, and how close, for its tests on every backend."""

from __future__ import annotations

import torch
from helpers import DEVICE, assert_close_to_reference, reference

HALVES = (torch.bfloat16, torch.float16)


def parameters(channels, dtype=torch.float32, seed=7):
    generator = torch.Generator().manual_seed(seed)
    weight, bias = torch.randn(2, channels, generator=generator, dtype=torch.float64, device="cpu")
    return weight.to(DEVICE, dtype), (bias / 2).to(DEVICE, dtype)


def eager(x, weight, bias, eps=1e-6, activation="none", residual=None, groups=1):
    """torch's own result in the dtype of x. Halves are rounded once, at the end: in float16 an eps of 1e-6 is gone."""
    real = torch.float32 if x.dtype in HALVES else x.dtype
    residual = None if residual is None else residual.to(real)
    options = {"activation": activation, "residual": residual, "groups": groups}
    return reference.layer_norm2d(x.to(real), weight.to(real), bias.to(real), eps, **options).to(x.dtype)


def forward_and_gradients(function, x, weight, bias, grad):
    """[y, grad_x, grad_weight, grad_bias]"""
    leaves = [tensor.detach().requires_grad_() for tensor in (x, weight, bias)]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad.to(y.dtype))]


def sizes_of_terms(x, weight, grad, groups):
    """How large the terms are that y, grad_x, grad_weight and grad_bias add up, from the largest 1/std and
    derivative, and what the rounding of the activation's argument makes of a derivative."""
    grouped = x.double().unflatten(1, (groups, -1))
    scale = (grouped.var(dim=2, correction=0).min() + 1e-6) ** -0.5
    z = 1 + scale * x.double().abs().max()
    g, w = 1.2 * grad.double().abs(), weight.double().abs().max()
    per_channel = g.sum(dim=(0, 2, 3)).max()
    derivatives = per_channel * (1 + w * z)
    return [size.item() for size in (w * z, g.max() * w * scale * z, derivatives * z, derivatives)]


def roundings_of_distances(x, weight, grad, groups, activation="none"):
    """What the rounding of z adds to y and to grad_x on CUDA, whose kernel subtracts the group's first channel from
    the others and then the mean of what remains.

    With that channel n standard deviations from the mean, at most sqrt(channels - 1), z is off by n eps of float32, and
    so are y and the activation's derivative, even where the activation leaves little, as gelu does of negative
    numbers."""
    grouped, rounding = x.double().unflatten(1, (groups, -1)), torch.finfo(torch.float32).eps
    scale = (grouped.var(dim=2, correction=0, keepdim=True) + 1e-6).rsqrt()
    distance = (grouped[:, :, :1] - grouped.mean(dim=2, keepdim=True)).abs() * scale
    w, g = weight.double().abs().view(groups, -1, 1, 1), grad.double().abs().unflatten(1, (groups, -1))
    curved = activation not in ("none", "relu")  # the derivatives of these are constant in pieces
    sizes = w * distance, curved * g * w * w * scale * distance
    return [rounding * size.max().item() for size in sizes]


def assert_right(ours, x, weight, bias, grad, **options):
    """[y, grad_x, grad_weight, grad_bias] against float64 under the tolerance rule.

    grad_x is what remains of d when its mean and its part along z are subtracted. Of groups of two or three channels
    nothing or little remains, so there the size of what is subtracted counts, not that of the remainder."""
    groups = options.get("groups", 1)
    same = forward_and_gradients(lambda *t: eager(*t, **options), x, weight, bias, grad)
    double = {name: value.double() if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    tensors = [tensor.double() for tensor in (x, weight, bias, grad)]
    truth = forward_and_gradients(lambda *t: reference.layer_norm2d(*t, **double), *tensors)
    sizes, intermediate = sizes_of_terms(x, weight, grad, groups), [0.0] * 4
    if x.is_cuda:
        intermediate[:2] = roundings_of_distances(x, weight, grad, groups, options.get("activation", "none"))
    for index, values in enumerate(zip(ours, same, truth, strict=True)):
        if index == 1 and x.shape[1] // groups < 4:
            error, theirs = ((value.double() - values[2]).abs().max().item() for value in values[:2])
            assert error <= 2 * theirs + 4 * torch.finfo(x.dtype).eps * sizes[1]
        else:
            assert_close_to_reference(*values, scale64=sizes[index], intermediate=intermediate[index])
