"""structure_loss's CUDA kernels on the CPU."""

import emulator
import pytest
import structure_loss_cases as cases
import torch
from emulator import doubled
from helpers import assert_close_to_reference


@pytest.mark.parametrize("probabilities", [False, True])
def test_structure_loss(dtype, probabilities, arch):
    orders = list(emulator.ORDERS)
    for i, shape in enumerate(cases.SHAPES):
        inputs = cases.inputs_of(shape, dtype, probabilities)
        for k, options in enumerate(o for o in cases.OPTIONS if o["probabilities"] == probabilities):
            if (i + k) % 2:
                continue
            ours = cases.run(*inputs, **options, arch=arch, order=orders[(i + k) % len(orders)])
            assert_close_to_reference(ours, cases.plain(*inputs, **options), cases.plain(*doubled(*inputs), **options))


def test_structure_loss_strides_over_a_small_grid(dtype, order):
    inputs = cases.inputs_of((3, 9000), dtype)
    for options in (cases.OPTIONS[2], cases.OPTIONS[6]):
        expected = cases.run(*inputs, **options)
        ours = cases.run(*inputs, **options, grid_cap=2, order=order)
        for mine, theirs in zip(ours, expected, strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("flush", ["start", "end"])
def test_structure_loss_stays_within_its_tensors(dtype, flush):
    for shape in ((2, 64), (3, 13)):
        inputs = cases.inputs_of(shape, dtype)
        ours = cases.run(*inputs, **cases.OPTIONS[0], flush=flush)
        truth = cases.plain(*doubled(*inputs), **cases.OPTIONS[0])
        assert_close_to_reference(ours, cases.plain(*inputs, **cases.OPTIONS[0]), truth)


def test_structure_loss_empty():
    for shape in ((0, 4), (2, 0)):
        inputs = cases.inputs_of(shape, torch.float32)
        if shape[0] == 0:
            inputs = (*inputs[:3], torch.zeros(1, 1))
        loss, grad = cases.run(*inputs, bce="weighted", probabilities=False, reduction="mean")
        assert loss.isnan()
        assert grad.shape == inputs[0].shape


@pytest.mark.slow
def test_structure_loss_broken_build_is_noticed():
    inputs = cases.inputs_of((2, 8), torch.float32)
    wrong, right = (cases.run(*inputs, **cases.OPTIONS[0], define=d) for d in ("CAMOX_BREAK_STRUCTURE_LOSS", ""))
    for mine, theirs in zip(wrong, right, strict=True):
        assert not torch.allclose(mine, theirs, atol=1e-4)
