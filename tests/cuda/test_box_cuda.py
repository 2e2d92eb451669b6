"""box's CUDA kernels on the CPU."""

import box_cases
import emulator
import pytest
import torch
from helpers import assert_close_to_reference, random_image


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "strided"])
@pytest.mark.parametrize("kind", box_cases.KINDS)
def test_box(dtype, kind, layout, arch, share):
    orders = list(emulator.ORDERS)
    first = box_cases.KINDS.index(kind) + (layout == "channels_last") + list(emulator.DTYPES.values()).index(dtype)
    for i, shape in enumerate(box_cases.SHAPES):
        for k, window in enumerate(box_cases.WINDOWS):
            if (first + i + k) % 2 != share:
                continue
            x = random_image(shape, dtype, layout, "offset" if k // 2 % 2 else "normal")
            ours = box_cases.run(x, kind, window, arch=arch, order=orders[(i + k // 2) % len(orders)])
            same, truth = (box_cases.plain(y, kind, window) for y in (x, x.double()))
            assert_close_to_reference(ours, same, truth)


@pytest.mark.parametrize(
    "window, layout",
    [(window, "contiguous") for window in box_cases.ONE_LAUNCH_WINDOWS]
    + [(window, "channels_last") for window in box_cases.CHANNELS_LAST_WINDOWS],
)
def test_box_in_one_launch(dtype, window, layout, arch):
    orders = list(emulator.ORDERS)
    shapes = box_cases.ONE_LAUNCH_SHAPES if layout == "contiguous" else box_cases.CHANNELS_LAST_SHAPES
    for i, shape in enumerate(shapes):
        kind = box_cases.KINDS[(i + window[0] + window[1]) // 2 % len(box_cases.KINDS)]
        x = random_image(shape, dtype, layout, "offset" if i % 2 else "normal")
        ours = box_cases.run(x, kind, window, arch=arch, order=orders[i % len(orders)])
        same, truth = (box_cases.plain(y, kind, window) for y in (x, x.double()))
        assert_close_to_reference(ours, same, truth)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_box_strides_over_a_small_grid(dtype, layout, order):
    x = random_image((2, 5, 40, 37), dtype, layout)
    expected = box_cases.run(x, "MEAN", (7, 5))
    assert torch.equal(box_cases.run(x, "MEAN", (7, 5), grid_cap=2, order=order), expected)


@pytest.mark.parametrize("flush", ["start", "end"])
def test_box_stays_within_its_tensors(dtype, flush):
    for shape in ((1, 3, 5, 33), (2, 1, 7, 8)):
        for layout in ("contiguous", "channels_last", "strided"):
            x = random_image(shape, dtype, layout)
            truth = box_cases.plain(x.double(), "COUNTED", (5, 9))
            assert_close_to_reference(
                box_cases.run(x, "COUNTED", (5, 9), flush=flush), box_cases.plain(x, "COUNTED", (5, 9)), truth
            )


def test_box_keeps_what_is_not_finite_within_its_windows():
    x = random_image((1, 1, 40, 70))
    x[0, 0, 20, 33], x[0, 0, 3, 60] = float("inf"), float("nan")
    for window in ((3, 5), (11, 31)):
        ours, theirs = box_cases.run(x, "MEAN", window), box_cases.plain(x, "MEAN", window)
        torch.testing.assert_close(ours, theirs, equal_nan=True, atol=1e-6, rtol=1e-5)


def test_box_keeps_what_is_not_finite_within_its_windows_at_the_borders_of_tiles():
    """Tiles and segments end in every column once."""
    for window in ((3, 3), (5, 7), (7, 31)):
        for first in range(4):
            x = random_image((1, 1, 9, 1100))
            x[0, 0, 2, first::76], x[0, 0, 7, first + 37 :: 76] = float("inf"), float("nan")
            ours, theirs = box_cases.run(x, "MEAN", window), box_cases.plain(x, "MEAN", window)
            torch.testing.assert_close(ours, theirs, equal_nan=True, atol=1e-6, rtol=1e-5)


def test_box_empty():
    assert box_cases.run(torch.empty(2, 0, 3, 4), "MEAN", (3, 3)).shape == (2, 0, 3, 4)


@pytest.mark.slow
def test_box_broken_build_is_noticed():
    x = random_image((1, 1, 5, 8))
    wrong, right = (box_cases.run(x, "MEAN", (3, 3), define=d) for d in ("CAMOX_BREAK_BOX", ""))
    assert not torch.allclose(wrong, right, atol=1e-4)
