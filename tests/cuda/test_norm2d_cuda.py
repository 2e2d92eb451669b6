"""layer_norm2d's CUDA kernels on the CPU."""

import emulator
import norm2d_cases
import pytest
import torch
from emulator import HALVES
from helpers import assert_close_to_reference, assert_one_rounding, random_image
from norm2d_cases import norm2d_inputs
from norm2d_truth import assert_right, eager, forward_and_gradients

from camox_ops import reference
from camox_ops.reference.norm2d import ACTIVATIONS


def norm2d_options(turn, shape, dtype=torch.float32, layout="contiguous"):
    """Every activation, number of groups and residual in turn."""
    return {
        "activation": list(ACTIVATIONS)[turn % len(ACTIVATIONS)],
        "groups": next(n for n in ((2, 5, 4, 1) if turn % 2 else (1,)) if shape[1] % n == 0),
        "residual": random_image(shape, dtype, layout, seed=2) if turn % 3 else None,
    }


@pytest.mark.parametrize("layout", norm2d_cases.LAYOUTS)
def test_norm2d_matches_reference(dtype, layout, arch):
    for turn, shape in enumerate(norm2d_cases.SHAPES, start=arch // 100):
        tensors, options = norm2d_inputs(shape, dtype, layout), norm2d_options(turn, shape, dtype, layout)
        order = list(emulator.ORDERS)[turn % len(emulator.ORDERS)]
        ours = norm2d_cases.forward_and_gradients(*tensors, arch=arch, order=order, **options)
        assert_right(ours, *tensors, **options)
        if dtype in HALVES:
            residual = options.pop("residual")
            residual = residual if residual is None else residual.float()
            floats = [tensor.float() for tensor in tensors]
            full = norm2d_cases.forward_and_gradients(*floats, residual=residual, arch=arch, **options)
            assert_one_rounding(ours[:2], full[:2])


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
def test_norm2d_activations(activation, layout, dtype):
    tensors = norm2d_inputs((2, 16, 4, 6), dtype, layout)
    ours = norm2d_cases.forward_and_gradients(*tensors, activation=activation)
    assert_right(ours, *tensors, activation=activation)


@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
def test_norm2d_activation_of_zero_and_tails(layout):
    """Channels of one value make z 0, so u is the bias."""
    u = torch.tensor([0.0, -0.0, 1e-30, -1e-6, 3.0, -3.0, -5.0, 8.0, -20.0, 100.0, -100.0, 0.5])
    x = torch.full((1, len(u), 2, 2), 3.25).to(
        memory_format=torch.channels_last if layout == "channels_last" else torch.contiguous_format
    )
    for activation, act in ACTIVATIONS.items():
        y = norm2d_cases.forward(x, torch.ones_like(u), u, activation=activation)[0][0, :, 1, 1]
        torch.testing.assert_close(y.double(), act(u.double()), rtol=1e-5, atol=4e-9)
        assert torch.equal(y[:2], torch.zeros(2))
        assert (
            norm2d_cases.backward(
                torch.ones_like(x), x, torch.ones_like(u), u, torch.ones(2, 1, 1, 2, 2), activation=activation
            )[2]
            .isfinite()
            .all()
        )


@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
def test_norm2d_more_channels_than_registers(layout, dtype):
    """Iterated in chunks."""
    for shape, order in zip(norm2d_cases.MANY_CHANNELS, ("random", "reverse"), strict=True):
        tensors = norm2d_inputs(shape, dtype, layout)
        ours = norm2d_cases.forward_and_gradients(*tensors, activation="silu", order=order)
        assert_right(ours, *tensors, activation="silu")


@pytest.mark.parametrize("groups", (1, 2, 10))
def test_norm2d_teams_smaller_than_a_warp(groups, dtype):
    """Of channels_last, with so many pixels that a lane has several vectors of a pixel; a lane's last may not exist.
    The reference has the pixels of every third column."""
    x, weight, bias, _ = norm2d_inputs((2, 80, 81, 103), dtype, "channels_last")
    y, stats = norm2d_cases.forward(x, weight, bias, activation="gelu", groups=groups, order="random")
    assert y.isfinite().all()
    x, y, stats = x[..., ::3], y[..., ::3], stats[..., ::3]
    real = (x.double(), weight.double(), bias.double())
    truth = reference.layer_norm2d(*real, activation="gelu", groups=groups)
    assert_close_to_reference(y, eager(x, weight, bias, activation="gelu", groups=groups), truth)
    grouped = real[0].unflatten(1, (groups, -1))
    mean = grouped.mean(dim=2) - grouped[:, :, 0]
    scale = (grouped.var(dim=2, correction=0) + 1e-6) ** -0.5
    torch.testing.assert_close(stats.double(), torch.stack((mean, scale)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
@pytest.mark.parametrize("kind", ("offset", "constant", "outlier"))
def test_norm2d_far_from_zero(kind, layout):
    """Mean 1e4, or the first channels there and the rest at 0."""
    for shape in ((2, 80, 3, 8), (1, 20, 3, 3)):
        x, *others = norm2d_inputs(shape, layout=layout, kind=kind)
        if kind == "outlier":
            x[:, :9] += 1e4
        ours = norm2d_cases.forward_and_gradients(x, *others, activation="gelu")
        assert_right(ours, x, *others, activation="gelu")
        if kind == "offset":
            truth = forward_and_gradients(
                lambda *t: reference.layer_norm2d(*t, activation="gelu"), *(t.double() for t in (x, *others))
            )
            for mine, true in zip(ours, truth, strict=True):
                assert (mine.double() - true).abs().max() <= 2e-6 * true.abs().max()


@pytest.mark.parametrize("layout", norm2d_cases.LAYOUTS)
def test_norm2d_stays_inside_at_both_ends(layout, dtype):
    """Every order, and flush against a guard page at the start instead of the end: the bits are the same."""
    for shape in ((1, 12, 4, 8), (2, 16, 5, 7)):
        tensors = norm2d_inputs(shape, dtype, layout)
        ends = norm2d_cases.forward_and_gradients(*tensors, activation="gelu_tanh")
        for order in emulator.ORDERS:
            starts = norm2d_cases.forward_and_gradients(*tensors, activation="gelu_tanh", flush="start", order=order)
            assert all(map(torch.equal, starts, ends))


@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
def test_norm2d_small_grid_strides_over_the_rest(layout, dtype, order):
    """A grid of two blocks does the work of many, groups among it. How grad_weight and grad_bias are shared out depends
    on how many blocks run at once."""
    tensors = norm2d_inputs((3, 24, 12, 16), dtype, layout)
    how = {"activation": "relu", "groups": 3}
    few = norm2d_cases.forward_and_gradients(*tensors, grid_cap=2, order=order, **how)
    many = norm2d_cases.forward_and_gradients(*tensors, **how)
    assert all(map(torch.equal, few[:2], many[:2]))
    assert_right(few, *tensors, **how)


@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
def test_norm2d_blocks_of_several_tiles(layout, share):
    """More tiles than shares of grad_weight and grad_bias: each block iterates over several, in chunks too, and
    adds."""
    planes, lines = norm2d_cases.MANY_PLANE_TILES, norm2d_cases.MANY_LINE_TILES
    for shape in planes if (layout == "contiguous") != share else lines:
        tensors = norm2d_inputs(shape, layout=layout)
        ours = norm2d_cases.forward_and_gradients(*tensors, activation="silu")
        assert_right(ours, *tensors, activation="silu")


@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
def test_norm2d_mixed_layouts(layout, dtype):
    """x in one layout, the gradient and the residual in the other: element by element."""
    x, weight, bias, _ = norm2d_inputs((2, 8, 4, 6), dtype, layout)
    other = "contiguous" if layout == "channels_last" else "channels_last"
    grad, residual = (random_image(x.shape, dtype, other, seed=seed) for seed in (1, 2))
    ours = norm2d_cases.forward_and_gradients(x, weight, bias, grad, residual=residual)
    assert_right(ours, x, weight, bias, grad, residual=residual)


def test_norm2d_slices(dtype):
    """Rows of planes, channels of lines, columns of lines, and planes and lines off their alignment."""
    whole = random_image((2, 24, 8, 12), dtype)
    last = whole.to(memory_format=torch.channels_last)
    for x in (whole[:, :, 2:6], last[:, 8:16], last[..., 1:9], whole[:, 1:, :, 1:], last[:, 1:], last[:, 2:3]):
        _, *others = norm2d_inputs(x.shape, dtype)
        ours = norm2d_cases.forward_and_gradients(x, *others, activation="gelu")
        assert_right(ours, x, *others, activation="gelu")
        ours = norm2d_cases.forward_and_gradients(x, *others[:2], x, activation="silu", residual=x)
        assert_right(ours, x, *others[:2], x, activation="silu", residual=x)


@pytest.mark.parametrize("layout", norm2d_cases.LAYOUTS)
def test_norm2d_half_weights(layout, arch):
    """The bits of float32 weights of the same values; their gradients are rounded once. Shapes of every access, and
    weights off the alignment of long ones."""
    for dtype in HALVES:
        for turn, shape in enumerate(((2, 24, 5, 7), (1, 12, 4, 4), (2, 32, 4, 8), (1, 1288, 1, 8), (1, 2056, 1, 8))):
            x, weight, bias, grad = norm2d_inputs(shape, dtype, layout)
            options = {"activation": "silu", "groups": 2 if turn % 2 else 1, "arch": arch}
            halves = weight.to(dtype), bias.to(dtype)
            ours = norm2d_cases.forward_and_gradients(x, *halves, grad, **options)
            full = norm2d_cases.forward_and_gradients(x, *(t.float() for t in halves), grad, **options)
            assert all(torch.equal(mine, other.to(dtype)) for mine, other in zip(ours, full, strict=True))
            assert_right(ours, x, *halves, grad, activation="silu", groups=options["groups"])


def test_norm2d_nan_and_inf_stay_in_their_pixel():
    for layout in ("contiguous", "channels_last"):
        for value in (float("nan"), float("inf")):
            x, weight, bias, grad = norm2d_inputs((1, 8, 4, 4), layout=layout)
            right = norm2d_cases.forward_and_gradients(x, weight, bias, grad, groups=2)
            x[0, 5, 1, 2] = value
            y, grad_x, *_ = norm2d_cases.forward_and_gradients(x, weight, bias, grad, groups=2)
            for ours, sound in zip((y, grad_x), right, strict=False):
                assert ours[0, 4:, 1, 2].isnan().all()
                ours[0, 4:, 1, 2] = sound[0, 4:, 1, 2]
                assert torch.equal(ours, sound)


@pytest.mark.parametrize("layout", norm2d_cases.LAYOUTS)
def test_norm2d_without_statistics(layout):
    x, weight, bias, _ = norm2d_inputs((2, 24, 5, 12), layout=layout)
    y, stats = norm2d_cases.forward(x, weight, bias, activation="gelu", groups=2, save=False)
    assert stats.isnan().all()
    assert torch.equal(y, norm2d_cases.forward(x, weight, bias, activation="gelu", groups=2)[0])


def test_norm2d_empty():
    for shape in ((0, 3, 4, 5), (2, 0, 4, 5), (2, 3, 0, 5), (2, 3, 4, 0)):
        x, weight = torch.empty(shape), torch.ones(shape[1])
        y, grad_x, *affine = norm2d_cases.forward_and_gradients(x, weight, weight, x)
        assert y.shape == grad_x.shape == x.shape
        assert all(torch.equal(grad, torch.zeros(shape[1])) for grad in affine)


@pytest.mark.slow
def test_norm2d_broken_build_is_noticed():
    for layout in ("contiguous", "channels_last"):
        tensors = norm2d_inputs((1, 8, 4, 8), layout=layout)
        right = norm2d_cases.forward_and_gradients(*tensors)
        wrong = norm2d_cases.forward_and_gradients(*tensors, define="CAMOX_BREAK_NORM2D")
        for index in range(2):
            assert (wrong[index] - right[index]).max() == pytest.approx(1e-3, abs=1e-5)
