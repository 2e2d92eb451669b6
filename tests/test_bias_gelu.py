"""bias_gelu: values, gradients, masks, what surrounds an op."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from dropout_inputs import LAYOUTS, affine, normal
from helpers import DEVICE, FLOATS, REFUSAL, assert_close_to_reference, assert_one_rounding, assert_reads_half_weights
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

import camox_ops as cx
from camox_ops import reference

HALVES = (torch.bfloat16, torch.float16)
# Around a vector, a block of masks, a piece of 1024 columns and the rows of a work item.
SHAPES = [(1,), (5, 1), (3, 7), (300, 16), (2, 3, 17), (259, 130), (2, 40, 96), (3, 1000), (2, 1025), (2, 3, 2080)]
ON_CPU = pytest.mark.skipif(DEVICE.type != "cpu", reason="float64, bits and threads: on the CPU")
op = torch.ops.camox_ops


def seed_of(value: int = 0x0123456789ABCDEF) -> torch.Tensor:
    return torch.tensor(value, device=DEVICE)


def bias_of(columns, dtype=torch.float32):
    return affine(columns, dtype)[1]


def doubles(tensors):
    return [tensor.double() for tensor in tensors]


def test_smoke():
    x, bias = normal((4, 6, 32)), bias_of(32)
    torch.testing.assert_close(cx.bias_gelu(x, bias), F.gelu(x + bias))
    y = cx.bias_gelu(x, bias, p=0.5, training=True)
    assert y.shape == x.shape
    assert 0.3 < (y == 0).float().mean() < 0.7


def test_known_values():
    x, bias = torch.tensor([[1.0, -2.0, 3.0]], device=DEVICE), torch.tensor([-1.0, 3.0, -4.0], device=DEVICE)
    expected = torch.tensor([[0.0, 0.8413447, -0.1586553]], device=DEVICE)
    torch.testing.assert_close(cx.bias_gelu(x, bias), expected)
    leaves = x.requires_grad_(), bias.requires_grad_()
    derivatives = torch.tensor([0.5, 1.0833154, -0.0833155], device=DEVICE)
    grad_x, grad_bias = torch.autograd.grad(cx.bias_gelu(*leaves).sum(), leaves)
    torch.testing.assert_close(grad_x, derivatives[None])
    torch.testing.assert_close(grad_bias, derivatives)


@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("dtype", FLOATS)
def test_matches_reference(dtype, p):
    seed = seed_of() if p else None
    for shape, layout in zip(SHAPES, itertools.cycle(LAYOUTS), strict=False):
        inputs = [normal(shape, dtype, layout), bias_of(shape[-1], dtype)]
        real = torch.float64 if dtype == torch.float64 else torch.float32
        ours = op.bias_gelu(inputs[0], inputs[1].to(real), seed, p)
        truth = reference.bias_gelu(*doubles(inputs), seed, p)
        assert_close_to_reference(ours, reference.bias_gelu(*inputs, seed, p), truth)
        if dtype in HALVES:
            assert_one_rounding(ours, op.bias_gelu(inputs[0].float(), inputs[1].float(), seed, p))


@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("dtype", FLOATS)
def test_grad_matches_reference(dtype, p):
    seed = seed_of() if p else None
    for shape, layout in zip(SHAPES, itertools.cycle(LAYOUTS), strict=False):
        leaves = [normal(shape, dtype, layout).requires_grad_(), bias_of(shape[-1], dtype).requires_grad_()]
        grad = normal(shape, dtype, layout, seed=2)
        real = torch.float64 if dtype == torch.float64 else torch.float32
        ours = torch.autograd.grad(op.bias_gelu(leaves[0], leaves[1].to(real), seed, p), leaves, grad)
        plain = [leaf.detach() for leaf in leaves]
        same = reference.bias_gelu_backward(grad, *plain, seed, p)
        assert_close_to_reference(
            ours, same, reference.bias_gelu_backward(*doubles([grad, *plain]), seed, p), scale64=9.0
        )


@pytest.mark.parametrize("dtype", HALVES)
def test_half_bias_is_read_as_it_is(dtype):
    for shape, seed in (((2, 3, 17), None), ((259, 128), seed_of())):
        inputs, grad = [normal(shape, dtype)], normal(shape, dtype, seed=2)
        bias = bias_of(shape[-1]).to(dtype)
        assert_reads_half_weights(lambda x, b, seed=seed: op.bias_gelu(x, b, seed, 0.1), inputs, [bias], grad)
    assert_reads_half_weights(cx.bias_gelu, inputs, [bias], grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_outputs_have_the_same_bits(dtype):
    """On the CPU y goes past the caches from 12 MiB on, the gradient of x from 8 and from 32 with prefetches: the whole
    and the first half of the rows; the first fifth is below that."""
    columns = 1040  # a whole piece, and a part of one
    x = normal(((33 << 20) // dtype.itemsize // columns, columns), dtype)
    grad, bias, first = x.flip(0), bias_of(columns, dtype).float(), slice(x.shape[0] // 5)
    for seed in (None, seed_of()):
        assert torch.equal(op.bias_gelu(x, bias, seed, 0.3)[first], op.bias_gelu(x[first], bias, seed, 0.3))
        grad_x, grad_bias = op.bias_gelu_backward(grad, x, bias, seed, 0.3)
        for part in (first, slice(x.shape[0] // 2)):
            assert torch.equal(grad_x[part], op.bias_gelu_backward(grad[part], x[part], bias, seed, 0.3)[0])
        close = {"rtol": 1e-2, "atol": 1.0} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-3}
        torch.testing.assert_close(grad_bias, grad_x.double().sum(0).to(grad_bias.dtype), **close)


@ON_CPU
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_grad(p):
    seed = seed_of() if p else None
    inputs = (normal((3, 4, 5), torch.float64).requires_grad_(), bias_of(5, torch.float64).requires_grad_())
    assert gradcheck(lambda *t: op.bias_gelu(*t, seed, p), inputs)
    assert gradgradcheck(lambda *t: op.bias_gelu(*t, seed, p), inputs, fast_mode=True)


def test_mask_is_that_of_dropout():
    for shape in ((9, 40), (3, 5, 1300)):
        x, bias = normal(shape), bias_of(shape[-1])
        torch.testing.assert_close(op.bias_gelu(x, bias, seed_of(), 0.3), op.dropout(F.gelu(x + bias), seed_of(), 0.3))
    mask = reference.dropout_mask((1000,), seed_of(), 0.5)
    x = torch.full((1000,), float("nan"), device=DEVICE)
    y = op.bias_gelu(x, torch.zeros_like(x), seed_of(), 0.5)
    assert torch.equal(y == 0, ~mask)
    assert torch.equal(y.isnan(), mask)


@given(st.tuples(st.integers(1, 40), st.integers(1, 200)), st.booleans(), st.sampled_from(FLOATS))
def test_shapes(shape, dropped, dtype):
    inputs, seed = [normal(shape, dtype), bias_of(shape[1], dtype)], seed_of() if dropped else None
    real = torch.float64 if dtype == torch.float64 else torch.float32
    ours = op.bias_gelu(inputs[0], inputs[1].to(real), seed, 0.2)
    truth = reference.bias_gelu(*doubles(inputs), seed, 0.2)
    assert_close_to_reference(ours, reference.bias_gelu(*inputs, seed, 0.2), truth)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": 1.0}, TypeError, "x must be a torch.Tensor, got float"),
        ({"x": torch.tensor(1.0)}, ValueError, r"x must have at least 1 dimension, got shape \(\)"),
        ({"x": torch.ones(2, 3).int()}, TypeError, "x must have dtype float32, .* got int32"),
        ({"bias": torch.ones(4)}, ValueError, r"bias must have shape \(3,\), one element per column of x, got \(4,\)"),
        ({"bias": torch.ones(3).double()}, TypeError, "bias must have dtype float32, got float64"),
        ({"p": -0.1}, ValueError, r"p must be in \[0, 1\), got -0.1"),
        ({"training": "yes"}, TypeError, "training must be a bool, got 'yes'"),
    ],
)
def test_errors(change, error, message):
    arguments = {"x": torch.ones(2, 3), "bias": torch.ones(3)} | change
    with pytest.raises(error, match=f"bias_gelu: {message}"):
        cx.bias_gelu(**arguments)


def test_errors_of_the_operator():
    x, bias = torch.ones(2, 3), torch.ones(3)
    for arguments, message in (
        ((x[0, 0], bias, None, 0.0), "x must have at least 1 dimension"),
        ((x, bias[:2], None, 0.0), "one element per column of x, 3, got 2"),
        ((x, torch.ones(6)[::2], None, 0.0), "bias must be contiguous, got stride 2"),
        ((x, bias.double(), None, 0.0), "bias must have dtype float32"),
        ((x, bias, torch.ones(2), 0.5), "seed must be one int64 number"),
        ((x, bias, None, 1.5), r"p must be in \[0, 1\), got 1.5"),
    ):
        with pytest.raises(REFUSAL, match=message):
            op.bias_gelu(*arguments)
    with pytest.raises(REFUSAL, match="grad must have the shape of x"):
        op.bias_gelu_backward(x[:1], x, bias, None, 0.0)
