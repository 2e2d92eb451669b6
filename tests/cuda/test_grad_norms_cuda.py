"""The CUDA kernels of grad_group_norms and scale_grads_ on the CPU."""

import emulator
import grad_norms_cases as cases
import pytest
import torch
from helpers import assert_close_to_reference

from camox_ops import reference


def truth_of(grads, groups, reduce):
    return reference.grad_group_norms([grad.double() for grad in grads], groups, cases.GROUPS, reduce)


@pytest.mark.parametrize("reduce", ["sum_of_norms", "l2"])
def test_norms(dtype, reduce, arch):
    grads = cases.gradients(dtype)
    groups = cases.groups_of(grads)
    for i, order in enumerate(emulator.ORDERS):
        repeats = 1 + 2.0 * i  # of an expanded gradient, whose squares count as often
        ours = cases.norms(grads, groups, reduce, repeats=repeats, arch=arch, order=order)
        assert torch.allclose(ours.double(), repeats**0.5 * truth_of(grads, groups, reduce), rtol=1e-6, atol=0)


def test_norms_over_a_small_grid(dtype, order):
    grads = cases.gradients(dtype)
    groups = cases.groups_of(grads)
    assert torch.equal(cases.norms(grads, groups, grid_cap=2, order=order), cases.norms(grads, groups))


def test_norms_of_mixed_dtypes_and_more_gradients_than_a_kernel_takes_as_parameters(order):
    """A launch may end the group of the one before and begin that of the next, its blocks in any order."""
    grads = [grad for dtype in emulator.DTYPES.values() for grad in cases.gradients(dtype, [3 + i for i in range(40)])]
    assert len(grads) > 2 * cases.BATCH
    for groups in (cases.groups_of(grads), [2] * len(grads), [2] * (len(grads) - 1) + [4]):
        for reduce in ("sum_of_norms", "l2"):
            ours = cases.norms(grads, groups, reduce, order=order)
            assert torch.allclose(ours.double(), truth_of(grads, groups, reduce), rtol=1e-6, atol=0)


def test_norms_of_more_elements_than_blocks_take_a_piece_of(order):
    """Several pieces of a block, and more blocks of a gradient than a thread adds up."""
    sizes = (cases.BLOCKS * 8192 + 17, 9 * 8192, 5)
    for dtype in (torch.float32, torch.bfloat16):
        grads = cases.gradients(dtype, sizes)
        ours = cases.norms(grads, [0, 0, 3], order=order)
        assert torch.allclose(ours.double(), truth_of(grads, [0, 0, 3], "sum_of_norms"), rtol=1e-6, atol=0)


def test_norms_of_no_gradients():
    assert torch.equal(cases.norms([], []), torch.zeros(cases.GROUPS))


def test_norms_count_their_blocks_apart_on_every_stream_and_in_graphs():
    """A call finds the counters as it left them; streams without counters left, and captured ones, bring their own."""
    grads = cases.gradients(torch.float32)
    groups = cases.groups_of(grads)
    expected = cases.norms(grads, groups)
    for stream in (None, *range(1, 70), 1):
        assert torch.equal(cases.norms(grads, groups, stream=stream), expected)
    with emulator.captured():
        assert torch.equal(cases.norms(grads, groups), expected)


@pytest.mark.parametrize("size", [1e-36, 1e-25, 1e25, 1e32])
def test_squares_that_float32_cannot_hold(size):
    grads = cases.gradients(torch.float32, (100, 9000), size)
    ours = cases.norms(grads, [0, 1])
    assert torch.allclose(ours.double(), truth_of(grads, [0, 1], "sum_of_norms"), rtol=1e-6, atol=0)


def test_nan_and_inf_stay_in_their_group():
    grads = cases.gradients(torch.float32, (9, 9000, 40, 8))
    grads[0][3], grads[1][8500], grads[3][:] = float("nan"), float("-inf"), 0
    ours = cases.norms(grads, [0, 1, 2, 3])
    assert ours[0].isnan() and ours[1] == float("inf") and ours[2].isfinite() and ours[3] == 0


@pytest.mark.parametrize("flush", ["start", "end"])
def test_scale(dtype, flush, arch):
    """Gradients with no, one and several groups; a product of 1 leaves the bits."""
    grads, scales = cases.gradients(dtype), torch.tensor([0.3, 1.0, -2.5, 0.0, 0.5])
    grads[1][0] = float("nan")
    listings = [(i, (i + k) % 5) for i in range(len(grads)) for k in range(i % 4)] + [(9, 1)] * 500
    factors = torch.ones(len(grads), dtype=torch.float64)
    for grad, group in listings:
        factors[grad] *= scales[group].double()
    for order in emulator.ORDERS:
        ours = cases.scale(grads, listings, scales, flush=flush, arch=arch, order=order, grid_cap=3)
        for mine, grad, factor in zip(ours, grads, factors, strict=True):
            expected = (grad.float() * factor.float()).to(dtype)
            assert torch.equal(mine.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))


def test_norms_within_their_tensors(dtype):
    """Addresses off 16 bytes, and both ends of every tensor."""
    grads = [grad[1:] for grad in cases.gradients(dtype, (9, 40, 8200))]
    for flush in ("start", "end"):
        ours = cases.norms(grads, [0, 1, 2], flush=flush)
        assert torch.equal(ours, cases.norms([grad.clone() for grad in grads], [0, 1, 2]))
        truth = truth_of(grads, [0, 1, 2], "sum_of_norms")
        assert_close_to_reference(ours, truth.float(), truth)


@pytest.mark.slow
def test_broken_build_is_noticed():
    grads = cases.gradients(torch.float32, (8, 100))
    for run in (
        lambda define: [cases.norms(grads, [0, 1], define=define)],
        lambda define: cases.scale(grads, [(0, 0), (1, 1)], torch.full((5,), 0.5), define=define),
    ):
        for wrong, right in zip(run("CAMOX_BREAK_GRAD_NORMS"), run(""), strict=True):
            assert not torch.allclose(wrong, right, atol=1e-4)
