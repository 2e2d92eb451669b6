"""What every differentiable op has from camox_ops.ops._register: forward-mode AD refused, vmap over no samples."""

import pytest
import torch
from helpers import DEVICE, each
from torch.autograd import forward_ad

from camox_ops import _selftest

SHAPE = (2, 4, 6, 8)


def inputs_of(op):
    return tuple(value.to(DEVICE) for value in op.inputs(SHAPE, torch.float32))


@pytest.mark.parametrize("op", _selftest.OPS, ids=lambda op: op.name)
@pytest.mark.parametrize("create_graph", [False, True])
def test_a_tangent_of_the_upstream_gradient_is_refused(op, create_graph):
    """It would be dropped: the kernels have no rule of forward mode."""
    inputs = [value.requires_grad_() for value in inputs_of(op)]
    y = each(op.ours(*inputs))[0]
    options = {"allow_unused": True, "retain_graph": True, "create_graph": create_graph}
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones_like(y), torch.ones_like(y))
        with pytest.raises(NotImplementedError, match=r"\w+: forward-mode AD is not implemented, and .* carries"):
            torch.autograd.grad(y, inputs, dual, **options)
        torch.autograd.grad(y, inputs, torch.ones_like(y), **options)  # a level without a tangent changes nothing


@pytest.mark.parametrize("op", _selftest.OPS, ids=lambda op: op.name)
def test_vmap_over_no_samples(op):
    one = inputs_of(op)
    expected = [(y.shape, y.dtype) for y in each(op.ours(*one))]
    none = [value.new_empty((0, *value.shape)) for value in one]
    for in_dims in {(0,) * len(one), (0, *(None,) * (len(one) - 1))}:
        given = [a if dim is None else b for a, b, dim in zip(one, none, in_dims, strict=True)]
        found = [(y.shape, y.dtype) for y in each(torch.vmap(op.ours, in_dims)(*given))]
        assert found == [((0, *shape), dtype) for shape, dtype in expected]

        def loss(*values, in_dims=in_dims):
            return sum(y.sum() for y in each(torch.vmap(op.ours, in_dims)(*values)))

        grads = torch.func.grad(loss, tuple(range(len(given))))(*given)
        assert all(torch.equal(grad, torch.zeros_like(value)) for grad, value in zip(grads, given, strict=True))
