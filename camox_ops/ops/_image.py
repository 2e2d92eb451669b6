"""Ops of one image and one image of its shape: checks, fake kernels, derivatives and vmap from the op's formula."""

from __future__ import annotations

from collections.abc import Callable

import torch

from . import _check
from ._codes import BORDERS, border_of, name_of
from ._layout import empty_image
from ._register import register, vmap_folded


def image_op(name: str, formula: Callable, check: Callable | None = None) -> Callable:
    """Registers the operators <name> and <name>_backward that CAMOX_BIND_IMAGE_OP(<name>) binds.

    formula(x, number, border): the op in plain torch, which second and further derivatives are taken of. check(name,
    number, x): the op's own number as a float, such as _check.eps; None where it has none. Returns op(x, border,
    number=0.0), which checks its arguments."""
    backward_name = f"{name}_backward"

    def pullback(x, grad, number, border):
        _, vjp = torch.func.vjp(lambda x: formula(x, number, name_of(BORDERS, border)), x)
        return vjp(grad)[0]

    def save(ctx, inputs, output):
        x, ctx.number, ctx.border = inputs
        ctx.save_for_backward(x)

    def backward(ctx, grad):
        return differentiate(*ctx.saved_tensors, grad, ctx.number, ctx.border), None, None

    def save_backward(ctx, inputs, output):
        *tensors, ctx.number, ctx.border = inputs
        ctx.save_for_backward(*tensors)

    def backward_backward(ctx, grad):
        _, vjp = torch.func.vjp(lambda *tensors: pullback(*tensors, ctx.number, ctx.border), *ctx.saved_tensors)
        return *vjp(grad), None, None

    run = register(
        name,
        fake=lambda x, *_: empty_image(x, x.shape[1]),
        setup_context=save,
        backward=backward,
        vmap=vmap_folded(name, 1),
    )
    differentiate = register(
        backward_name,
        fake=lambda x, *_: empty_image(x, x.shape[1]),
        setup_context=save_backward,
        backward=backward_backward,
        vmap=vmap_folded(backward_name, 2),
    )

    def op(x: torch.Tensor, border: str, number: float = 0.0) -> torch.Tensor:
        _check.image(name, "x", x)
        number = check(name, number, x) if check else number
        return run(x, number, border_of(name, border, x))

    return op
