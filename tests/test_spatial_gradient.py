"""spatial_gradient."""

import itertools

import pytest
import torch
from helpers import (
    FLOATS,
    LAYOUTS,
    REFUSAL,
    assert_close_to_reference,
    assert_one_rounding,
    every_pair,
    float64_on_cpu,
    random_image,
    reference,
)
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

import camox_ops as cx

BORDERS = ("zeros", "replicate", "reflect")
OPERATORS = ("sobel", "scharr")
SIDE_AND_MIDDLE = {"sobel": (1.0, 2.0), "scharr": (3.0, 10.0)}
# Below, at and above vector and tile widths: 16 lanes, 512 columns, 1536 elements of a row of a tile, 128 channels.
SHAPES = [
    (2, 3, 5, 7),
    (1, 2, 1, 1),
    (1, 1, 1, 9),
    (1, 1, 9, 1),
    (2, 2, 2, 2),
    (1, 3, 4, 15),
    (1, 3, 4, 16),
    (1, 3, 4, 17),
    (1, 2, 231, 33),
    (1, 1, 20, 512),
    (1, 1, 3, 513),
    (1, 1, 2, 1051),
    (1, 31, 3, 17),
    (1, 8, 2, 33),
    (1, 33, 66, 16),
    (2, 131, 3, 4),
]


def backward(grads, operator="sobel", border="zeros", channels_last=False):
    code = BORDERS.index(border)
    return torch.ops.camox_ops.spatial_gradient_backward(*grads, *SIDE_AND_MIDDLE[operator], code, channels_last)


def reachable(shape, border):
    return not (border == "reflect" and 1 in shape[2:])


def test_known_values():
    x = torch.zeros(1, 1, 5, 5)
    x[0, 0, 2, 2] = 1.0
    for operator, (side, middle) in SIDE_AND_MIDDLE.items():
        gx, gy = cx.spatial_gradient(x, operator=operator)
        # The pixel is the right neighbour of those to its left.
        expected = torch.tensor([[side, 0, -side], [middle, 0, -middle], [side, 0, -side]])
        assert torch.equal(gx[0, 0, 1:4, 1:4], expected)
        assert torch.equal(gy[0, 0, 1:4, 1:4], expected.T)
        assert gx.abs().sum() == gy.abs().sum() == 4 * side + 2 * middle


@pytest.mark.parametrize("operator", OPERATORS)
def test_known_values_of_a_ramp(operator):
    ramp = 3 * torch.arange(6.0).expand(1, 1, 4, 6)
    gx, gy = cx.spatial_gradient(ramp, operator=operator, border="replicate", normalized=True)
    torch.testing.assert_close(gx[..., 1:-1], torch.full((1, 1, 4, 4), 3.0))
    assert torch.equal(gy, torch.zeros(1, 1, 4, 6))
    gx, _ = cx.spatial_gradient(ramp, operator=operator, border="reflect")
    assert torch.equal(gx[..., ::5], torch.zeros(1, 1, 4, 2))


def test_known_values_of_a_large_mean():
    x = random_image((2, 3, 20, 40), kind="offset")
    for ours, truth in zip(cx.spatial_gradient(x), reference.spatial_gradient(x.double()), strict=True):
        assert (ours.double() - truth)[..., 1:-1, 1:-1].abs().max() < 4e-6  # of values near 4, pixels near 1e4


@every_pair(dtype=FLOATS, layout=LAYOUTS, border=BORDERS)
def test_matches_reference(dtype, layout, border):
    for shape, operator, normalized in itertools.product(SHAPES, OPERATORS, (False, True)):
        if not reachable(shape, border):
            continue
        kind = ("normal", "offset", "constant")[sum(shape) % 3]
        if dtype == torch.float16 and kind == "offset" and not normalized:
            continue  # ten times 1e4 is past float16's largest number
        x = random_image(shape, dtype, layout, kind)
        ours = cx.spatial_gradient(x, operator=operator, border=border, normalized=normalized)
        same = reference.spatial_gradient(x, operator, border, normalized)
        truth = reference.spatial_gradient(x.double(), operator, border, normalized)
        assert_close_to_reference(ours, same, truth, scale64=32 * x.abs().max().item())
        if dtype in (torch.bfloat16, torch.float16):
            exact = cx.spatial_gradient(x.float(), operator=operator, border=border, normalized=normalized)
            assert_one_rounding(ours, exact)


@every_pair(dtype=FLOATS, layout=LAYOUTS, border=BORDERS)
def test_grad_matches_reference(dtype, layout, border):
    for i, (shape, operator) in enumerate(itertools.product(SHAPES, OPERATORS)):
        if not reachable(shape, border):
            continue
        for given_ in ((True, True), ((True, False), (False, True))[(i + i // 2) % 2]):
            grads = [random_image(shape, dtype, "contiguous" if i else layout, seed=i) for i in range(2)]
            grads = [grad if here else None for grad, here in zip(grads, given_, strict=True)]
            ours = backward(grads, operator, border, layout == "channels_last")
            same = reference.spatial_gradient_backward(*grads, operator, border)
            wide = [None if grad is None else grad.double() for grad in grads]
            truth = reference.spatial_gradient_backward(*wide, operator, border)
            assert_close_to_reference(ours, same, truth, scale64=128.0)
            if dtype in (torch.bfloat16, torch.float16):
                exact = backward([None if grad is None else grad.float() for grad in grads], operator, border)
                assert_one_rounding(ours, exact)


@float64_on_cpu
@pytest.mark.parametrize("border", BORDERS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_grad(operator, border):
    for layout in ("contiguous", "channels_last"):
        x = random_image((1, 2, 5, 4), torch.float64, layout).requires_grad_()

        def op(x):
            return cx.spatial_gradient(x, operator=operator, border=border, normalized=True)

        assert gradcheck(op, (x,))
        assert gradgradcheck(op, (x,), fast_mode=True)


@float64_on_cpu
def test_grad_of_one_output():
    x = random_image((2, 3, 6, 7), torch.float64).requires_grad_()
    for index in range(2):
        (ours,) = torch.autograd.grad(cx.spatial_gradient(x)[index].square().sum(), x)
        (truth,) = torch.autograd.grad(reference.spatial_gradient(x)[index].square().sum(), x)
        torch.testing.assert_close(ours, truth)


@float64_on_cpu
def test_grad_of_the_backward():
    grads = [random_image((1, 2, 4, 5), torch.float64, seed=i).requires_grad_() for i in range(2)]
    assert gradcheck(lambda gx, gy: backward((gx, gy), border="reflect"), grads)
    assert gradcheck(lambda gy: backward((None, gy), border="replicate"), grads[1])


@given(
    st.tuples(st.integers(1, 3), st.integers(1, 70), st.integers(1, 40), st.integers(1, 70)),
    st.sampled_from(OPERATORS),
    st.sampled_from(BORDERS),
    st.sampled_from(LAYOUTS),
    st.sampled_from(FLOATS),
)
def test_shapes(shape, operator, border, layout, dtype):
    if not reachable(shape, border):
        return
    x = random_image(shape, dtype, layout)
    truth = reference.spatial_gradient(x.double(), operator, border)
    same = reference.spatial_gradient(x, operator, border)
    ours = cx.spatial_gradient(x, operator=operator, border=border)
    assert_close_to_reference(ours, same, truth, scale64=32 * x.abs().max().item())


@pytest.mark.parametrize("channels", [1, 3, 8, 32, 200])
@pytest.mark.parametrize("border", ["replicate", "reflect"])
def test_a_last_tile_of_one_column(channels, border):
    """channels_last tiles have 16 columns: at widths of 16k+1 the border folds into the tile before the last one."""
    for width in (17, 33, 49, 65, 129, 257):
        for height in (2, 5):
            shape = (2, channels, height, width)
            x, grads = random_image(shape), [random_image(shape, seed=i) for i in range(1, 3)]
            expected, expected_grad = cx.spatial_gradient(x, border=border), backward(grads, border=border)
            truth = reference.spatial_gradient_backward(*(grad.double() for grad in grads), "sobel", border)
            assert_close_to_reference(expected_grad, expected_grad, truth)
            for threads in (1, 2):
                torch.set_num_threads(threads)
                ours = cx.spatial_gradient(x.to(memory_format=torch.channels_last), border=border)
                assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
                assert torch.equal(backward(grads, border=border, channels_last=True), expected_grad)


@pytest.mark.parametrize("values", [("nan", "nan"), ("inf", "inf"), ("-inf", "-inf"), ("inf", "-inf")])
def test_nan_and_inf_as_in_a_convolution(values):
    for layout in ("contiguous", "channels_last"):
        x = random_image((1, 2, 6, 20), layout=layout)
        x[0, 0, 2, 7], x[0, 0, 3, 9] = float(values[0]), float(values[1])
        x[0, 1, 0, 0] = float(values[0])
        for ours, theirs in zip(cx.spatial_gradient(x), reference.spatial_gradient(x), strict=True):
            torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize(
    ("x", "arguments", "error", "message"),
    [
        ([1, 2], {}, TypeError, "x must be a torch.Tensor, got list"),
        (torch.zeros(3, 4, 4), {}, ValueError, r"x must have 4 dimensions \(B, C, H, W\), got shape \(3, 4, 4\)"),
        (torch.zeros(1, 1, 4, 4).long(), {}, TypeError, "x must have dtype .*, got int64"),
        (torch.zeros(1, 1, 4, 4), {"operator": "prewitt"}, ValueError, "operator must be one of .*, got 'prewitt'"),
        (torch.zeros(1, 1, 4, 4), {"border": "wrap"}, ValueError, "border must be one of .*, got 'wrap'"),
        (
            torch.zeros(1, 1, 1, 4),
            {"border": "reflect"},
            ValueError,
            "border 'reflect' needs sides of at least 2, got x of",
        ),
        (torch.zeros(1, 1, 4, 4), {"normalized": 8}, TypeError, "normalized must be a bool, got 8"),
    ],
)
def test_errors(x, arguments, error, message):
    with pytest.raises(error, match="spatial_gradient: " + message):
        cx.spatial_gradient(x, **arguments)


def test_errors_from_c():
    op = torch.ops.camox_ops
    x = torch.zeros(1, 2, 1, 4)
    with pytest.raises(REFUSAL, match="spatial_gradient: weights must be finite, got side inf and middle 2"):
        op.spatial_gradient(x, float("inf"), 2.0, 0)
    with pytest.raises(REFUSAL, match="spatial_gradient: unknown border code -1"):
        op.spatial_gradient(x, 1.0, 2.0, -1)
    with pytest.raises(REFUSAL, match="'reflect' needs sides of at least 2, got x with H=1, W=4"):
        op.spatial_gradient(x, 1.0, 2.0, 2)
    with pytest.raises(REFUSAL, match="x must have 4 dimensions"):
        op.spatial_gradient(x[0], 1.0, 2.0, 0)
    with pytest.raises(REFUSAL, match="dtype must be float32, bfloat16, float16 or float64"):
        op.spatial_gradient(x.int(), 1.0, 2.0, 0)
    with pytest.raises(REFUSAL, match="grad_gy has size 5 in dimension 3, expected 4"):
        op.spatial_gradient_backward(x, torch.zeros(1, 2, 1, 5), 1.0, 2.0, 0, False)
    with pytest.raises(REFUSAL, match="grad_gy must have the dtype of x"):
        op.spatial_gradient_backward(x, x.double(), 1.0, 2.0, 0, False)
