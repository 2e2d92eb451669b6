"""How an operator of the binary becomes differentiable, compilable and usable under torch.func, in one place.

`register` gives the operator a fake kernel, an autograd formula and a vmap rule. torch.func transforms need an
autograd.Function (register_autograd alone fails under them) and opcheck needs register_autograd (a Function alone fails
it), so both are made from the same two functions, and the callable that is returned picks by what is active, as
`_torch_private.differentiable_call` says. Tensors are arguments of their own, never in lists.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from .._torch_private import differentiable_call


def register(
    name: str,
    *,
    fake: Callable,
    setup_context: Callable,
    backward: Callable,
    vmap: Callable | None = None,
    outputs: Callable | None = None,
    saves_if_asked: bool = False,
):
    """name: the operator in camox_ops. fake(*args): outputs without data. setup_context(ctx, inputs, output) and
    backward(ctx, *grads): as for torch.library.register_autograd. vmap(info, in_dims, *args): as for
    torch.library.register_vmap; without one the op runs once per element. outputs(*args): as fake, but
    quicker, of plain CPU tensors, for operators that have a function in csrc/direct_list.h. saves_if_asked: the
    operator's last argument says whether what backward needs has to be made, and the callable gives it; of such an
    operator the first output alone is a result. Returns the differentiable callable."""
    qualified = f"camox_ops::{name}"
    overload = getattr(torch.ops.camox_ops, name).default
    torch.library.register_fake(qualified, fake)
    torch.library.register_autograd(qualified, backward, setup_context=setup_context)

    def vmap_rule(info, in_dims, *args):
        if info.batch_size == 0:
            return no_samples(overload, in_dims, args)
        return vmap(info, in_dims, *args) if vmap else one_by_one(overload, info, in_dims, args)

    torch.library.register_vmap(qualified, vmap_rule)
    title = "".join(part.capitalize() for part in name.split("_"))
    transformable = type(
        title,
        (torch.autograd.Function,),
        {
            "forward": staticmethod(lambda *args: overload(*args)),
            "setup_context": staticmethod(setup_context),
            "backward": staticmethod(backward),
            "generate_vmap_rule": True,
        },
    )
    return differentiable_call(name, overload, transformable, outputs or fake, saves_if_asked)


def register_last_derivative(name: str, *, fake: Callable, vmap: Callable | None = None):
    """The operator <name>_backward where <name> has no second derivative; as for register."""

    def refuse(ctx, *grads):
        raise NotImplementedError(f"{name}: second derivatives are not implemented")

    backward = f"{name}_backward"
    return register(backward, fake=fake, setup_context=lambda ctx, inputs, output: None, backward=refuse, vmap=vmap)


class _NoSecondDerivative(torch.autograd.Function):
    """Gradients as they are, which depend on `inputs` in a way that has no derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(name, count, *gradients_and_inputs):
        return tuple(x.view_as(x) for x in gradients_and_inputs[:count])

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.name = inputs[0]

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError(f"{ctx.name}: second derivatives are not implemented")


def last_derivative(name: str):
    """The backward(ctx, *grads) of an autograd.Function whose result has no derivative: a second one raises.

    torch's once_differentiable asks whether the incoming gradient requires one. That of a sum does not, and then what
    the result owes to the tensors that were saved would be missing from a second derivative, in silence."""

    def decorate(backward: Callable) -> Callable:
        @functools.wraps(backward)
        def once(ctx, *grads):
            if not torch.is_grad_enabled():
                return backward(ctx, *grads)
            with torch.no_grad():
                results = backward(ctx, *grads)
            results = results if isinstance(results, tuple) else (results,)
            inputs = [x for x in (*grads, *ctx.saved_tensors) if x is not None and x.requires_grad]
            there = [x for x in results if x is not None]
            if not inputs or not there:
                return results
            refusing = iter(_NoSecondDerivative.apply(name, len(there), *there, *inputs))
            return tuple(None if x is None else next(refusing) for x in results)

        return once

    return decorate


def fold_batch(info, in_dims, args, count: int):
    """Moves the mapped dimension of the first `count` arguments, (B, C, H, W) tensors or None, into B -> new args."""
    folded = []
    for position, value in enumerate(args[:count]):
        if value is None:
            folded.append(None)
            continue
        dim = in_dims[position]
        value = value.unsqueeze(0).expand(info.batch_size, *value.shape) if dim is None else value.movedim(dim, 0)
        folded.append(value.flatten(0, 1))
    return (*folded, *args[count:])


def unfold_batch(info, value: torch.Tensor) -> torch.Tensor:
    return value.unflatten(0, (info.batch_size, value.shape[0] // info.batch_size))


def with_dense(op, dense: tuple[int, ...]):
    """op, whose arguments at the places `dense` are tensors (or None) that it takes contiguous only: what a vmap makes
    of them, views of one sample among them, need not be."""
    if not dense:
        return op

    def call(*args):
        return op(*(x.contiguous() if i in dense and x is not None else x for i, x in enumerate(args)))

    return call


def vmap_folded(name: str, count: int, dense: tuple[int, ...] = ()):
    """The vmap of an operator whose first `count` arguments and whose outputs have a batch as first dimension.

    An output of one dimension is empty and has none. dense: as for with_dense.
    """

    def vmap(info, in_dims, *args):
        op = with_dense(getattr(torch.ops.camox_ops, name), dense)
        outputs = op(*fold_batch(info, in_dims, args, count))
        if isinstance(outputs, torch.Tensor):
            return unfold_batch(info, outputs), 0
        batched = [output.dim() > 1 for output in outputs]
        unfolded = (unfold_batch(info, y) if has else y for y, has in zip(outputs, batched, strict=True))
        return tuple(unfolded), tuple(0 if has else None for has in batched)

    return vmap


def fold_batch_at(info, in_dim: int, value: torch.Tensor, dim: int) -> torch.Tensor:
    """Moves the mapped dimension of a tensor into its dimension `dim`, before what is there."""
    return value.movedim(in_dim, dim).flatten(dim, dim + 1)


def no_samples(op, in_dims, args):
    """(outputs, their mapped dimensions) of the op mapped over nothing, in the shapes that it has for one sample on the
    meta device."""

    def one_sample(value, dim):
        if not isinstance(value, torch.Tensor):
            return value
        shape = [size for d, size in enumerate(value.shape) if d != dim]
        return torch.empty(shape, dtype=value.dtype, device="meta")

    device = next(value.device for value in args if isinstance(value, torch.Tensor))
    outputs = op(*(one_sample(value, dim) for value, dim in zip(args, in_dims, strict=True)))
    if isinstance(outputs, torch.Tensor):
        return outputs.new_empty((0, *outputs.shape), device=device), 0
    return tuple(y.new_empty((0, *y.shape), device=device) for y in outputs), (0,) * len(outputs)


def one_by_one(op, info, in_dims, args):
    """(outputs, their mapped dimensions) of the op run once per element, where what is mapped does not fold into B."""

    def at(i):
        return [arg if dim is None else arg.select(dim, i) for arg, dim in zip(args, in_dims, strict=True)]

    outputs = [op(*at(i)) for i in range(info.batch_size)]
    if isinstance(outputs[0], torch.Tensor):
        return torch.stack(outputs), 0
    stacked = tuple(torch.stack(parts) for parts in zip(*outputs, strict=True))
    return stacked, (0,) * len(stacked)
