"""bias_gelu's CUDA kernels on the CPU."""

import bias_gelu_cases
import emulator
import pytest
import torch
from emulator import doubled
from helpers import assert_close_to_reference, random_image

from camox_ops import reference


def inputs_of(shape, dtype):
    """x, bias, and the gradient of the result"""
    x, grad = (random_image((1, 1, *shape), dtype, seed=k)[0, 0] for k in (0, 1))
    return x, random_image((1, 1, 1, shape[1]), seed=2).flatten(), grad


def assert_right(ours, x, bias, grad, seed):
    inputs, doubles = (x, bias), list(doubled(x, bias))
    same = [reference.bias_gelu(*inputs, seed, 0.3), *reference.bias_gelu_backward(grad, *inputs, seed, 0.3)]
    truth = [reference.bias_gelu(*doubles, seed, 0.3)]
    truth += reference.bias_gelu_backward(grad.double(), *doubles, seed, 0.3)
    assert_close_to_reference(ours, same, truth)


@pytest.mark.parametrize("dropped", [False, True])
def test_bias_gelu(dtype, dropped, arch):
    seed, orders = torch.tensor(99) if dropped else None, list(emulator.ORDERS)
    for i, shape in enumerate(bias_gelu_cases.SHAPES):
        inputs = inputs_of(shape, dtype)
        ours = bias_gelu_cases.run(*inputs, seed, 0.3, arch=arch, order=orders[i % len(orders)])
        assert_right(ours, *inputs, seed)


def test_bias_gelu_half_bias(arch):
    """The bits of a float32 bias of the same values; its gradient is rounded once."""
    for dtype in emulator.HALVES:
        for shape in ((70, 16), (5, 7), (3, 520)):
            x, bias, grad = inputs_of(shape, dtype)
            ours = bias_gelu_cases.run(x, bias.to(dtype), grad, torch.tensor(99), 0.3, arch=arch)
            full = bias_gelu_cases.run(x, bias.to(dtype).float(), grad, torch.tensor(99), 0.3, arch=arch)
            assert all(torch.equal(mine, other.to(dtype)) for mine, other in zip(ours, full, strict=True))


def test_bias_gelu_strides_over_a_small_grid(dtype, order):
    """A GPU that holds fewer blocks has fewer partial sums of grad_bias: the others have the same bits."""
    inputs, seed = inputs_of((90, 640), dtype), torch.tensor(5)
    few = bias_gelu_cases.run(*inputs, seed, 0.3, grid_cap=2, order=order)
    many = bias_gelu_cases.run(*inputs, seed, 0.3)
    assert all(map(torch.equal, few[:2], many[:2]))
    assert_right(few, *inputs, seed)


def test_bias_gelu_empty():
    assert bias_gelu_cases.run(torch.empty(0, 3), torch.ones(3), torch.empty(0, 3), None, 0.0)[2].eq(0).all()
    assert bias_gelu_cases.run(torch.empty(3, 0), torch.ones(0), torch.empty(3, 0), None, 0.0)[0].shape == (3, 0)


@pytest.mark.slow
def test_bias_gelu_broken_build_is_noticed():
    x, bias = random_image((1, 1, 2, 8))[0, 0], torch.ones(8)
    wrong, right = (bias_gelu_cases.run(x, bias, x, None, 0.0, define=d) for d in ("CAMOX_BREAK_BIAS_GELU", ""))
    for mine, theirs in zip(wrong, right, strict=True):
        assert not torch.allclose(mine, theirs, atol=1e-4)
