"""What layer_norm2d must give, and how close, for its tests on every backend."""

from __future__ import annotations

import torch
from helpers import DEVICE, assert_close_to_reference

from camox_ops import reference

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
    derivative."""
    grouped = x.double().unflatten(1, (groups, -1))
    scale = (grouped.var(dim=2, correction=0).min() + 1e-6) ** -0.5
    z = 1 + scale * x.double().abs().max()
    g, w = 1.2 * grad.double().abs(), weight.double().abs().max()
    per_channel = g.sum(dim=(0, 2, 3)).max()
    return [size.item() for size in (w * z, g.max() * w * scale * z, per_channel * z, per_channel)]


def assert_right(ours, x, weight, bias, grad, **options):
    """[y, grad_x, grad_weight, grad_bias] against float64 under the tolerance rule.

    grad_x is what remains of d when its mean and its part along z are subtracted. Of groups of two or three channels
    nothing or little remains, so there the size of what is subtracted counts, not that of the remainder."""
    groups = options.get("groups", 1)
    same = forward_and_gradients(lambda *t: eager(*t, **options), x, weight, bias, grad)
    double = {name: value.double() if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    tensors = [tensor.double() for tensor in (x, weight, bias, grad)]
    truth = forward_and_gradients(lambda *t: reference.layer_norm2d(*t, **double), *tensors)
    sizes = sizes_of_terms(x, weight, grad, groups)
    for index, values in enumerate(zip(ours, same, truth, strict=True)):
        if index == 1 and x.shape[1] // groups < 4:
            error, theirs = ((value.double() - values[2]).abs().max().item() for value in values[:2])
            assert error <= 2 * theirs + 4 * torch.finfo(x.dtype).eps * sizes[1]
        else:
            assert_close_to_reference(*values, scale64=sizes[index])
