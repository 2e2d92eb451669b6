"""structure_loss's CUDA kernels on the CPU."""

import functools

import emulator
import pytest
import structure_loss_cases as cases
import torch
from emulator import doubled
from helpers import assert_close_to_reference

from camox_ops import reference

SLOW = pytest.mark.slow
# Of tests of thousands of images, which are about work items and counters: the others test how elements are read.
FLOAT32_FIRST = [
    pytest.param(dtype, marks=() if dtype == torch.float32 else SLOW) for dtype in emulator.DTYPES.values()
]


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


@pytest.mark.parametrize("half", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("shape", [(2, 64), (3, 13), (1, 4100), (600, 12), (1100, 5)])
def test_structure_loss_reads_half_masks_as_they_are(half, shape):
    """The bits of a call with mask and weight in float32."""
    logits, mask, weight, grad = cases.inputs_of(shape, half, of_mask=half)
    for options in (cases.OPTIONS[0], cases.OPTIONS[7], cases.OPTIONS[8]):
        ours = cases.run(logits, mask, weight, grad, **options)
        assert all(map(torch.equal, ours, cases.run(logits, mask.float(), weight.float(), grad, **options)))


@functools.cache
def on_a_whole_grid(shape, dtype, kind):
    return cases.run(*cases.inputs_of(shape, dtype), **cases.OPTIONS[kind])


def test_structure_loss_strides_over_a_small_grid(dtype, order):
    for shape in ((3, 9000), (1100, 5)):
        inputs = cases.inputs_of(shape, dtype)
        for kind in (2, 6):
            ours = cases.run(*inputs, **cases.OPTIONS[kind], grid_cap=2, order=order)
            for mine, theirs in zip(ours, on_a_whole_grid(shape, dtype, kind), strict=True):
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
        for options in cases.OPTIONS:
            loss, grad = cases.run(*inputs, **options)
            expected = reference.structure_loss(*inputs[:3], smooth=0.5, **options)
            torch.testing.assert_close(loss, expected, equal_nan=True)
            assert grad.shape == inputs[0].shape


def test_the_gradient_of_an_infinite_logit_is_that_of_a_large_one(dtype):
    logits, *others = cases.inputs_of((2, 64), dtype)
    logits[:, :, :, 3::7], logits[:, :, :, 5::7] = 300, -300
    _, expected = cases.run(logits, *others, **cases.OPTIONS[0])
    _, ours = cases.run(torch.where(logits.abs() == 300, logits * float("inf"), logits), *others, **cases.OPTIONS[0])
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("logit", [float("inf"), -float("inf")])
def test_the_loss_of_an_infinite_logit_is_infinite(dtype, logit):
    """Beside a mask between 0 and 1, and of +inf beside 0 too, as PyTorch has it."""
    for options in cases.OPTIONS[:3] + cases.OPTIONS[6:9]:
        logits, mask, *others = cases.inputs_of((3, 64), dtype)
        logits[:, :, :, 5] = logit
        for value in (0.3, 0.0) if logit > 0 else (0.3,):
            mask[:, :, :, 5] = value
            assert (cases.run(logits, mask, *others, **options)[0] == float("inf")).all()


@pytest.mark.parametrize("logit", [-6, -10])
def test_the_loss_of_empty_images_keeps_its_digits(dtype, logit):
    """1 - (I+s)/(U-I+s), of which the quotient is nearly 1."""
    logits, mask, *others = cases.inputs_of((3, 64), dtype)
    inputs = (torch.full_like(logits, logit), torch.zeros_like(mask), *others)
    ours, truth = cases.run(*inputs, **cases.OPTIONS[2])[0], cases.plain(*doubled(*inputs), **cases.OPTIONS[2])[0]
    torch.testing.assert_close(ours.double(), truth, rtol=1e-6, atol=0)


@pytest.mark.parametrize("images", [8, 9, 17])
def test_structure_loss_adds_work_items_in_one_order(order, images):
    """By 32, 16 and 8 threads, whichever block is last."""
    inputs = cases.inputs_of((images, 2100), torch.float32)
    expected = cases.run(*inputs, **cases.OPTIONS[2])
    assert all(map(torch.equal, cases.run(*inputs, **cases.OPTIONS[2], order=order), expected))


@pytest.mark.parametrize("images, kinds", [(32, (0, 6, 8)), (33, (0, 6, 8)), (130, (0, 6, 8)), (127 * 32 + 1, (6,))])
def test_structure_loss_finishes_groups_of_images(images, kinds):
    """One group, groups of 32, and groups of 64 where there would be more groups than counters: so many images once, by
    few blocks, which are last in many groups."""
    few = {"order": "random", "grid_cap": 5}
    inputs = cases.inputs_of((images, 4 if images < 512 else 129), torch.float32)
    for options in (cases.OPTIONS[kind] for kind in kinds):
        ours = cases.run(*inputs, **options, **(few if images > 512 else {"order": "reverse"}))
        assert_close_to_reference(ours, cases.plain(*inputs, **options), cases.plain(*doubled(*inputs), **options))
        assert images > 512 or all(map(torch.equal, cases.run(*inputs, **options, **few), ours))


@pytest.mark.parametrize("dtype", FLOAT32_FIRST)
@pytest.mark.parametrize("images, kinds", [(512, (0, 6, 8)), (8 * 512 + 1, (6,))])
def test_structure_loss_of_many_small_images(dtype, images, kinds):
    """A warp has each of them; with more than 512 groups of eight, several."""
    inputs = cases.inputs_of((images, 3), dtype)
    for options in (cases.OPTIONS[kind] for kind in kinds):
        ours = cases.run(*inputs, **options, order="reverse")
        assert_close_to_reference(ours, cases.plain(*inputs, **options), cases.plain(*doubled(*inputs), **options))
        assert all(map(torch.equal, cases.run(*inputs, **options, order="random", grid_cap=5), ours))


@pytest.mark.parametrize("dtype", FLOAT32_FIRST)
def test_structure_loss_of_many_images_has_longer_work_items(dtype):
    """Of more than 2048 pixels, and more than a thread has at once. The reference has the first 32 of 2048 images, the
    others are their repetitions."""
    inputs = cases.inputs_of((32, 2052), dtype)
    ours = cases.run(*(tensor.repeat(64, *[1] * (tensor.dim() - 1)) for tensor in inputs), **cases.OPTIONS[2])
    first = [tensor[:32] for tensor in ours]
    for mine, each in zip(ours, first, strict=True):
        assert torch.equal(mine.unflatten(0, (64, 32)), each.expand(64, *each.shape))
    assert_close_to_reference(
        first, cases.plain(*inputs, **cases.OPTIONS[2]), cases.plain(*doubled(*inputs), **cases.OPTIONS[2])
    )


def test_structure_loss_counts_its_blocks_apart_on_every_stream_and_in_graphs():
    """A call finds the counters as it left them; streams without counters left, and captured ones, bring their own."""
    inputs = cases.inputs_of((3, 16), torch.float32)
    expected = cases.run(*inputs, **cases.OPTIONS[0])
    for stream in (None, *range(1, 70), 1):
        assert all(map(torch.equal, cases.run(*inputs, **cases.OPTIONS[0], stream=stream), expected))
    for shape in ((3, 16), (33, 1)):
        inputs = cases.inputs_of(shape, torch.float32)
        expected = cases.run(*inputs, **cases.OPTIONS[0])
        with emulator.captured():
            assert all(map(torch.equal, cases.run(*inputs, **cases.OPTIONS[0]), expected))


@pytest.mark.slow
def test_structure_loss_broken_build_is_noticed():
    inputs = cases.inputs_of((2, 8), torch.float32)
    wrong, right = (cases.run(*inputs, **cases.OPTIONS[0], define=d) for d in ("CAMOX_BREAK_STRUCTURE_LOSS", ""))
    for mine, theirs in zip(wrong, right, strict=True):
        assert not torch.allclose(mine, theirs, atol=1e-4)
