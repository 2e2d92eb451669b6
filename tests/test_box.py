"""box_mean and structure_weight."""

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    DEVICE,
    FLOATS,
    LAYOUTS,
    REFUSAL,
    TWO_OF_FLOATS,
    assert_close_to_reference,
    assert_one_rounding,
    assert_same_sums,
    every_second,
    float64_on_cpu,
    random_image,
    reference,
)
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

import camox_ops as cx

# Below, at and above vectors of 16 lanes, groups of 2048 elements, blocks and bands of rows, windows beyond the image.
SHAPES = [
    (2, 3, 5, 7),
    (1, 2, 1, 1),
    (1, 1, 1, 9),
    (1, 1, 9, 1),
    (1, 3, 4, 16),
    (1, 3, 4, 17),
    (1, 2, 131, 33),
    (2, 20, 9, 9),
    (1, 1, 70, 128),
    (1, 1, 2, 2051),
    (2, 131, 3, 4),
    (1, 35, 40, 30),
]
SIZES = [1, 3, 8191, (1, 9), (9, 1), (31, 3), (11, 255)]
COUNTED = [True, False]


def terms64(x, size) -> float:
    """The size of what a float64 truth adds up, where it is no better than we are: avg_pool2d adds the pixels of a
    window one by one, the box some of each row and column."""
    sizes = (size,) * 2 if isinstance(size, int) else size
    pixels = min(sizes[0], 2 * x.shape[-2]) * min(sizes[1], 2 * x.shape[-1])
    return x.abs().max().item() * max(1.0, pixels / 8)


def beyond(batch: int, channels: int, height: int, width: int) -> int | tuple[int, int]:
    """A window larger than the image; in height alone where torch, pixel by pixel, would add up 20 million."""
    few = batch * channels * (height * width) ** 2 < 20_000_000
    return 2 * max(height, width) + 1 if few else (2 * height + 1, 3)


def backward(grad, size, count_include_pad, channels_last=False):
    height, width = (size, size) if isinstance(size, int) else size
    return torch.ops.camox_ops.box_mean_backward(grad, height, width, count_include_pad, channels_last)


def test_known_values():
    x = torch.zeros(1, 1, 7, 7)
    x[0, 0, 3, 3] = 225.0
    expected = torch.zeros(7, 7)
    expected[1:6, 2:5] = 15.0
    assert torch.equal(cx.box_mean(x, (5, 3))[0, 0], expected)
    ones = torch.full((1, 1, 3, 5), 90.0)
    assert torch.equal(cx.box_mean(ones, 3)[0, 0, 0], torch.tensor([40.0, 60, 60, 60, 40]))
    for size in (1, 3, 5, 99, (3, 77)):
        assert torch.equal(cx.box_mean(ones, size, count_include_pad=False), ones)
    assert torch.equal(cx.box_mean(ones, 1), ones)
    assert torch.equal(cx.box_mean(torch.arange(1.0, 6.0).view(1, 1, 5), 3)[0, 0], torch.tensor([1.0, 2, 3, 4, 3]))
    assert torch.equal(cx.box_mean(torch.ones(1, 1, 3, 3), 9)[0, 0], torch.full((3, 3), 9 / 81))


@every_second(dtype=FLOATS, layout=LAYOUTS)
def test_matches_reference(dtype, layout):
    """Every size with every layout; with a shape every third one."""
    first = FLOATS.index(dtype) + LAYOUTS.index(layout)
    for i, shape in enumerate(SHAPES):
        for kind in ("normal", ("offset", "constant")[i % 2]):
            x = random_image(shape, dtype, layout, kind)
            for size in SIZES[(first + i) % 3 :: 3]:
                if size == 8191 and max(shape[2:]) > 40:
                    size = beyond(*shape)
                for counted in COUNTED if kind == "normal" else COUNTED[:1]:
                    ours = cx.box_mean(x, size, count_include_pad=counted)
                    same, truth = (reference.box_mean(y, size, counted) for y in (x, x.double()))
                    assert_close_to_reference(ours, same, truth, scale64=terms64(x, size))
                    if dtype in (torch.bfloat16, torch.float16):
                        assert_one_rounding(ours, cx.box_mean(x.float(), size, count_include_pad=counted))


@pytest.mark.parametrize("dtype", TWO_OF_FLOATS)
@pytest.mark.parametrize("size", [31, 255])
def test_matches_reference_where_running_sums_would_drift(size, dtype):
    """A constant of 1e4 with noise, over an image of several blocks of rows; float32 sums that add and subtract lose
    digits at every pixel of it."""
    shape = (1, 1, 300, 280) if size == 31 else (1, 1, 130, 140)
    x = random_image(shape, dtype, kind="offset")
    truth = reference.box_mean(x.double(), size)
    assert_close_to_reference(cx.box_mean(x, size), reference.box_mean(x, size), truth, scale64=terms64(x, size))
    if dtype == torch.float32:
        assert (cx.box_mean(x, size).double() - truth).abs().max() < 1e-6 * truth.max()
    constant = torch.full((1, 1, 300, 280), 1e4, device=DEVICE)
    inside = cx.box_mean(constant, size)[..., size // 2 : -(size // 2), size // 2 : -(size // 2)]
    assert (inside.double() / 1e4 - 1).abs().max() < 2e-6


@every_second(dtype=FLOATS, layout=LAYOUTS)
def test_grad_matches_reference(dtype, layout):
    for shape in SHAPES:
        grad = random_image(shape, dtype, layout)
        for size in (3, (1, 9), (31, 3), (11, 255)):
            for counted in COUNTED:
                ours = backward(grad, size, counted, layout == "channels_last")
                same, truth = (reference.box_mean_backward(g, size, counted) for g in (grad, grad.double()))
                assert_close_to_reference(ours, same, truth, scale64=terms64(grad, size))


@pytest.mark.parametrize("counted", COUNTED)
def test_reference_of_the_backward_is_the_gradient(counted):
    for shape, size in (((2, 2, 5, 6), (3, 5)), ((2, 2, 7), 5), ((1, 2, 3, 4), 31)):
        x, grad = (random_image((*shape, 1)[:4], torch.float64, seed=i).view(shape) for i in range(2))
        x.requires_grad_()
        (truth,) = torch.autograd.grad(reference.box_mean(x, size, counted), x, grad)
        torch.testing.assert_close(reference.box_mean_backward(grad, size, counted), truth)


@float64_on_cpu
@pytest.mark.parametrize("counted", COUNTED)
def test_grad(counted):
    for layout in ("contiguous", "channels_last"):
        x = random_image((2, 3, 5, 4), torch.float64, layout).requires_grad_()
        for size in (3, (5, 7), 11):

            def op(x, size=size):
                return cx.box_mean(x, size, count_include_pad=counted)

            assert gradcheck(op, (x,))
            assert gradgradcheck(op, (x,), fast_mode=True)
    x = random_image((2, 3, 6, 1), torch.float64)[..., 0].requires_grad_()
    assert gradcheck(lambda x: cx.box_mean(x, 5, count_include_pad=counted), (x,))
    assert gradgradcheck(lambda x: cx.box_mean(x, 5, count_include_pad=counted), (x,), fast_mode=True)


@given(
    st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(1, 40), st.integers(1, 70)),
    st.tuples(st.integers(0, 45), st.integers(0, 45)),
    st.booleans(),
    st.sampled_from(LAYOUTS),
    st.sampled_from(FLOATS),
)
def test_shapes(shape, radii, counted, layout, dtype):
    size = (2 * radii[0] + 1, 2 * radii[1] + 1)
    x = random_image(shape, dtype, layout)
    same, truth = (reference.box_mean(y, size, counted) for y in (x, x.double()))
    ours = cx.box_mean(x, size, count_include_pad=counted)
    assert_close_to_reference(ours, same, truth, scale64=terms64(x, size))
    same, truth = (reference.box_mean_backward(y, size, counted) for y in (x, x.double()))
    ours = backward(x, size, counted, layout == "channels_last")
    assert_close_to_reference(ours, same, truth, scale64=terms64(x, size))


@given(
    st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(1, 400)),
    st.integers(0, 45),
    st.booleans(),
    st.booleans(),
    st.sampled_from(FLOATS),
)
def test_shapes_of_one_dimension(shape, radius, counted, channels_innermost, dtype):
    x = random_image((*shape, 1), dtype)[..., 0]
    if channels_innermost:
        x = x.mT.contiguous().mT
    size = 2 * radius + 1
    same, truth = (reference.box_mean(y, size, counted) for y in (x, x.double()))
    ours = cx.box_mean(x, size, count_include_pad=counted)
    assert_close_to_reference(ours, same, truth, scale64=terms64(x, size))
    assert_same_sums(ours, cx.box_mean(x.contiguous(), size, count_include_pad=counted))


def test_channels_last_is_kept():
    x = random_image((2, 40, 9, 11), layout="channels_last")
    for size in (3, 31):
        assert cx.box_mean(x, size).is_contiguous(memory_format=torch.channels_last)
        assert_same_sums(cx.box_mean(x, size), cx.box_mean(x.contiguous(), size))
    series = random_image((2, 40, 9, 1))[..., 0].mT.contiguous().mT  # (B, L, C) turned round, as forecasting models do
    assert cx.box_mean(series, 3).stride() == series.stride()


@pytest.mark.parametrize("values", [("nan", "nan"), ("inf", "inf"), ("-inf", "-inf"), ("inf", "-inf"), ("nan", "inf")])
def test_nan_and_inf_as_in_avg_pool2d(values):
    for layout in ("contiguous", "channels_last"):
        x = random_image((1, 2, 39, 40), layout=layout)
        x[0, 0, 4, 17], x[0, 0, 5, 19] = float(values[0]), float(values[1])
        x[0, 1, 0, 0], x[0, 1, 38, 39] = float(values[0]), float(values[1])
        for size in (3, 11, (1, 31), 77):
            for counted in COUNTED:
                ours, theirs = cx.box_mean(x, size, count_include_pad=counted), reference.box_mean(x, size, counted)
                torch.testing.assert_close(ours, theirs, equal_nan=True, atol=1e-6, rtol=1e-5)


def test_window_beyond_every_bound():
    x = random_image((1, 2, 5, 6), torch.float64 if DEVICE.type == "cpu" else torch.float32)
    huge = 2**40 + 1
    mean = x.sum((2, 3), keepdim=True).expand_as(x)
    torch.testing.assert_close(cx.box_mean(x, huge) * float(huge) ** 2, mean)
    torch.testing.assert_close(cx.box_mean(x, huge, count_include_pad=False) * 30, mean)


@every_second(dtype=FLOATS, layout=LAYOUTS)
def test_weight_matches_reference(dtype, layout):
    for shape in ((2, 1, 40, 37), (1, 5, 9, 130)):
        mask = (random_image(shape, torch.float32) > 0.3).to(dtype)
        fractions = random_image(shape, dtype, layout).sigmoid()
        for x in (mask, fractions, random_image(shape, dtype, layout)):
            for size, gain in ((31, 5.0), ((3, 5), -2), (255, 0)):
                ours = cx.structure_weight(x, size=size, gain=gain)
                same, truth = (reference.structure_weight(y, size, gain) for y in (x, x.double()))
                assert_close_to_reference(ours, same, truth, scale64=1 + abs(gain) * terms64(x, size))
    ones = torch.ones(1, 1, 70, 70, dtype=dtype, device=DEVICE)
    assert torch.equal(cx.structure_weight(ones)[..., 15:-15, 15:-15], ones[..., 15:-15, 15:-15])


def test_weight_has_no_gradient():
    mask = random_image((1, 1, 5, 6)).requires_grad_()
    weight = cx.structure_weight(mask)
    assert not weight.requires_grad
    (grad,) = torch.autograd.grad((weight * mask).sum(), mask)
    assert torch.equal(grad, weight)
    assert torch.func.grad(lambda mask: cx.structure_weight(mask).sum())(mask.detach()).eq(0).all()


def test_weight_of_avg_pool2d():
    """As the public losses write it."""
    mask = random_image((2, 1, 80, 70), torch.float32).sigmoid()
    theirs = 1 + 5 * torch.abs(F.avg_pool2d(mask, kernel_size=31, stride=1, padding=15) - mask)
    torch.testing.assert_close(cx.structure_weight(mask), theirs, rtol=1e-5, atol=0)


X = torch.zeros(1, 1, 4, 4)


@pytest.mark.parametrize(
    ("x", "size", "error", "message"),
    [
        ([1, 2], 3, TypeError, "x must be a torch.Tensor, got list"),
        (torch.zeros(4, 4), 3, ValueError, r"x must have 4 .*\(B, C, H, W\) or 3 \(B, C, L\), got shape \(4, 4\)"),
        (X.long(), 3, TypeError, "x must have dtype .*, got int64"),
        (X.to_sparse(), 3, TypeError, "x must be a dense tensor"),
        (X[0].cfloat(), 3, TypeError, "x must have dtype .*, got complex64"),
        (X, 4, ValueError, "size must be odd and > 0, got 4"),
        (X, 0, ValueError, "size must be odd and > 0, got 0"),
        (X, (3, -1), ValueError, r"size must be odd and > 0, got \(3, -1\)"),
        (X, (3, 3, 3), ValueError, r"size must be an int or a pair of ints, got \(3, 3, 3\)"),
        (X, (), ValueError, r"size must be an int or a pair of ints, got \(\)"),
        (X[0], (3, 3), ValueError, r"size must be an int for x of 3 dimensions, got \(3, 3\)"),
        (X, 3.0, TypeError, "size must be an int or a pair of ints, got 3.0"),
        (X, True, TypeError, "size must be an int or a pair of ints, got True"),
        (X, "3", TypeError, "size must be an int or a pair of ints, got '3'"),
    ],
)
def test_errors(x, size, error, message):
    with pytest.raises(error, match="box_mean: " + message):
        cx.box_mean(x, size)


def test_errors_of_options():
    with pytest.raises(TypeError, match="box_mean: count_include_pad must be a bool, got 1"):
        cx.box_mean(X, 3, count_include_pad=1)
    for gain, error in ((float("nan"), ValueError), (float("inf"), ValueError), ("5", TypeError), (True, TypeError)):
        with pytest.raises(error, match=f"structure_weight: gain must be .*, got {gain!r}"):
            cx.structure_weight(X, gain=gain)
    with pytest.raises(ValueError, match="structure_weight: size must be odd and > 0, got 30"):
        cx.structure_weight(X, size=30)
    with pytest.raises(ValueError, match=r"structure_weight: mask must have 4 dimensions .* got shape \(1, 4, 4\)"):
        cx.structure_weight(X[0])


def test_errors_from_c():
    op = torch.ops.camox_ops
    with pytest.raises(REFUSAL, match=r"box_mean: x must have 4 dimensions \(B, C, H, W\), got 3"):
        op.box_mean(X[0], 3, 3, True)
    with pytest.raises(REFUSAL, match=r"box_mean: size must be odd and > 0, got \(3, 2\)"):
        op.box_mean(X, 3, 2, True)
    with pytest.raises(REFUSAL, match="box_mean_backward: dtype must be float32"):
        op.box_mean_backward(X.long(), 3, 3, True, False)
    with pytest.raises(REFUSAL, match="structure_weight: gain must be finite, got inf"):
        op.structure_weight(X, 3, 3, float("inf"))
