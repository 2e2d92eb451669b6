"""The CUDA kernels of dropout, sparse_gate and dropout_add_layer_norm on the CPU."""

import dropout_cases
import emulator
import pytest
import torch
from dropout_cases import SEED
from dropout_inputs import LAYOUTS as DENSE_AND_STRIDED
from dropout_inputs import affine, normal
from helpers import assert_close_to_reference

from camox_ops import reference


def gate_inputs(shape, dtype, layout):
    """x in a layout, y in another, an incoming gradient."""
    other = "contiguous" if layout == "sliced" else layout
    return normal(shape, dtype, layout), normal(shape, dtype, other, seed=1), normal(shape, dtype, seed=2)


@pytest.mark.parametrize("layout", DENSE_AND_STRIDED)
def test_dropout_has_the_bits_of_the_cpu(dtype, layout, arch):
    ops = torch.ops.camox_ops
    for turn, shape in enumerate(dropout_cases.SHAPES):
        x, y, grad = gate_inputs(shape, dtype, layout)
        how = {"arch": arch, "order": list(emulator.ORDERS)[turn % len(emulator.ORDERS)]}
        assert torch.equal(dropout_cases.dropout(x, SEED, 0.3, **how), ops.dropout(x, SEED, 0.3))
        for seed in (SEED, None):
            assert torch.equal(dropout_cases.sparse_gate(x, y, seed, 0.3, **how), ops.sparse_gate(x, y, seed, 0.3))
            ours = dropout_cases.sparse_gate_backward(grad, x, y, seed, 0.3, **how)
            for mine, cpu in zip(ours, ops.sparse_gate_backward(grad, x, y, seed, 0.3), strict=True):
                assert torch.equal(mine, cpu)


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_dropout_add_layer_norm(dtype, p, arch, share):
    """Every shape in both dtypes of the quick run, with one of both probabilities in turn."""
    seed = SEED if p else None
    for turn, shape in enumerate(dropout_cases.NORM_SHAPES):
        if (turn + (p > 0) + list(emulator.DTYPES.values()).index(dtype)) % 2 != share:
            continue
        kind = "offset" if turn % 3 == 2 else "normal"
        inputs = [
            normal(shape, dtype),
            normal(shape, dtype, kind=kind, seed=1),
            *affine(shape[-1]),
            normal(shape, dtype),
        ]
        how = {"arch": arch, "order": list(emulator.ORDERS)[turn // 2 % len(emulator.ORDERS)]}
        ours = dropout_cases.norm(*inputs, seed, p, **how)

        def everything(x, residual, weight, bias, grad):
            y = reference.dropout_add_layer_norm(x, residual, weight, bias, seed, p)
            return [y, *reference.dropout_add_layer_norm_backward(grad, x, residual, weight, seed, p)]

        same, truth = everything(*inputs), everything(*(tensor.double() for tensor in inputs))
        given = [i for i in range(5) if ours[i] is not None]
        assert_close_to_reference(*([results[i] for i in given] for results in (ours, same, truth)))
        if p:
            assert torch.equal(ours[1] == 0, ~reference.dropout_mask(shape, seed, p) | (ours[2] == 0))


def test_dropout_add_layer_norm_half_weights(arch):
    """The bits of float32 weights of the same values; their gradients are rounded once."""
    for dtype in emulator.HALVES:
        for shape in ((33, 17), (70, 8), (3, 1000), (3, 1544), (2, 4104)):
            x, residual, grad = (normal(shape, dtype, seed=seed) for seed in range(3))
            halves = [weight.to(dtype) for weight in affine(shape[-1])]
            ours = dropout_cases.norm(x, residual, *halves, grad, SEED, 0.1, arch=arch)
            full = dropout_cases.norm(x, residual, *(t.float() for t in halves), grad, SEED, 0.1, arch=arch)
            assert all(torch.equal(mine, other.to(dtype)) for mine, other in zip(ours, full, strict=True))


def test_dropout_stays_inside_at_both_ends(dtype, order):
    """Flush against a guard page at the end in the tests above, at the start here; unaligned too. The same bits."""
    x, y, grad = gate_inputs((1029,), dtype, "contiguous")
    for begin in (0, 1):
        tensors = [tensor[begin:] for tensor in (grad, x, y)]
        expected = torch.ops.camox_ops.sparse_gate_backward(*tensors, SEED, 0.3)
        for flush in ("start", "end"):
            ours = dropout_cases.sparse_gate_backward(*tensors, SEED, 0.3, flush=flush, order=order)
            assert all(torch.equal(mine, cpu) for mine, cpu in zip(ours, expected, strict=True))
    inputs = [normal((5, 24), dtype), normal((5, 24), dtype), *affine(24), normal((5, 24), dtype)]
    for ours, other in zip(*(dropout_cases.norm(*inputs, SEED, 0.3, flush=f) for f in ("start", "end")), strict=True):
        assert torch.equal(ours, other)


def test_dropout_small_grid_strides_over_the_rest(dtype, order):
    x, y, grad = gate_inputs((3, 24, 111), dtype, "contiguous")
    ours = dropout_cases.sparse_gate_backward(grad, x, y, SEED, 0.3, grid_cap=2, order=order)
    expected = torch.ops.camox_ops.sparse_gate_backward(grad, x, y, SEED, 0.3)
    assert all(torch.equal(mine, cpu) for mine, cpu in zip(ours, expected, strict=True))
    for width in (40, 1544):
        inputs = [normal((67, width), dtype), normal((67, width), dtype), *affine(width), normal((67, width), dtype)]
        inputs = [tensor[:20] if width > 40 and tensor.dim() == 2 else tensor for tensor in inputs]
        for capped, whole in zip(
            dropout_cases.norm(*inputs, SEED, 0.3, grid_cap=2, order=order),
            dropout_cases.norm(*inputs, SEED, 0.3),
            strict=True,
        ):
            assert torch.equal(capped, whole)


def test_dropout_empty():
    for shape in ((0,), (3, 0), (0, 3)):
        x = torch.empty(shape)
        assert dropout_cases.dropout(x, SEED, 0.3).shape == shape
    inputs = [torch.empty(0, 3), torch.empty(0, 3), *affine(3), torch.empty(0, 3)]
    assert torch.equal(dropout_cases.norm(*inputs, SEED, 0.3)[3], torch.zeros(3))


@pytest.mark.slow
def test_dropout_broken_build_is_noticed():
    x = normal((64,))
    right, wrong = (dropout_cases.dropout(x, SEED, 0.3, define=define) for define in ("", "CAMOX_BREAK_DROPOUT"))
    torch.testing.assert_close((wrong - right)[::4], torch.full((16,), 1e-3), atol=1e-6, rtol=0)
    inputs = [normal((4, 8)), normal((4, 8)), *affine(8), normal((4, 8))]
    for right, wrong in zip(
        dropout_cases.norm(*inputs, SEED, 0.3)[:3],
        dropout_cases.norm(*inputs, SEED, 0.3, define="CAMOX_BREAK_DROPOUT")[:3],
        strict=True,
    ):
        assert not torch.equal(right, wrong)
