"""frequency_bands and FrequencyExpert."""

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    DEVICE,
    FLOATS,
    LAYOUTS,
    REFUSAL,
    assert_close_to_reference,
    assert_one_rounding,
    each_backend,
    every_second,
    float64_on_cpu,
    module_numbers,
    on_device,
    random_image,
    reference,
)
from hypothesis import given
from hypothesis import strategies as st
from test_edge import randomised
from torch.autograd import gradcheck, gradgradcheck

import camox_ops as cx

# Below, at and above vectors of 16 lanes, flat tiles of 128 columns and 4096 or 8192 elements, lines of 2048 elements.
SHAPES = [
    (2, 3, 5, 7),
    (1, 2, 1, 1),
    (1, 1, 1, 9),
    (1, 1, 9, 1),
    (2, 2, 2, 2),
    (1, 3, 4, 15),
    (1, 3, 4, 16),
    (1, 3, 4, 17),
    (1, 3, 3, 35),
    (1, 2, 231, 33),
    (2, 60, 9, 9),
    (1, 1, 70, 128),
    (1, 1, 5, 129),
    (1, 1, 2, 2051),
    (1, 31, 3, 17),
    (1, 32, 66, 15),
    (1, 33, 5, 16),
    (2, 131, 3, 4),
    (1, 131, 5, 30),
]


def backward(grads, channels_last=False):
    return torch.ops.camox_ops.frequency_bands_backward(*grads, channels_last)


def test_known_values():
    x = torch.zeros(1, 1, 7, 7)
    x[0, 0, 3, 3] = 225.0
    bands = cx.frequency_bands(x)
    assert bands._fields == ("low", "mid", "high")
    low, mid, high = (band[0, 0] for band in bands)
    three, five = torch.zeros(7, 7), torch.zeros(7, 7)
    three[2:5, 2:5], five[1:6, 1:6] = 25.0, 9.0
    torch.testing.assert_close(low, three, atol=1e-5, rtol=0)
    torch.testing.assert_close(mid, three - five, atol=1e-5, rtol=0)
    torch.testing.assert_close(high, x[0, 0] - three, atol=1e-5, rtol=0)
    low, mid, high = cx.frequency_bands(torch.full((1, 1, 3, 5), 90.0))
    torch.testing.assert_close(low[0, 0, 0], torch.tensor([40.0, 60, 60, 60, 40]))  # zeros outside are counted
    torch.testing.assert_close(mid[0, 0, 1], torch.tensor([60 - 32.4, 90 - 43.2, 90 - 54, 90 - 43.2, 60 - 32.4]))
    torch.testing.assert_close(high[0, 0, 1], torch.tensor([30.0, 0, 0, 0, 30]))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(2, 3, 20, 40), (1, 2, 70, 128), (1, 2, 9, 140), (1, 140, 6, 20)])
def test_known_values_of_a_large_mean(shape, layout):
    x = random_image(shape, layout=layout, kind="offset")
    x[:1, :1] = random_image((1, 1, *shape[2:]))  # beside channels without one
    bands = cx.frequency_bands(x)
    for ours, truth in zip(bands[1:], reference.frequency_bands(x.double())[1:], strict=True):
        inside = (ours.double() - truth)[..., 2:-2, 2:-2].abs().max()
        assert inside < 2e-6  # of values near 1 whose pixels are near 1e4
    for ours, plain in zip(bands, cx.frequency_bands(x.contiguous()), strict=True):
        assert torch.equal(ours, plain)


def test_stacked_is_the_bands_and_x():
    for layout in ("contiguous", "channels_last"):
        for shape in ((2, 3, 6, 7), (1, 66, 3, 5)):
            x = random_image(shape, layout=layout)
            stacked = cx.frequency_bands(x, stacked=True)
            assert torch.equal(stacked, torch.cat([*cx.frequency_bands(x), x], dim=1))
            memory_format = torch.channels_last if layout == "channels_last" else torch.contiguous_format
            assert stacked.is_contiguous(memory_format=memory_format)


@every_second(dtype=FLOATS, layout=LAYOUTS)
def test_matches_reference(dtype, layout):
    for shape in SHAPES:
        for kind in ("normal", "offset", "constant"):
            x = random_image(shape, dtype, layout, kind)
            ours, same = cx.frequency_bands(x), reference.frequency_bands(x)
            truth = reference.frequency_bands(x.double())
            assert_close_to_reference(ours, same, truth, scale64=x.abs().max().item())
            if dtype in (torch.bfloat16, torch.float16):
                assert_one_rounding(ours, cx.frequency_bands(x.float()))


@every_second(dtype=FLOATS, layout=LAYOUTS)
def test_grad_matches_reference(dtype, layout):
    for shape in SHAPES:
        for chosen_bits in (0b1111, 0b0111, 0b0001, 0b0010, 0b0100, 0b1000, 0b1101):
            grads = [random_image(shape, dtype, "contiguous" if i == 1 else layout, seed=i + 1) for i in range(4)]
            grads = [grad if chosen_bits >> i & 1 else None for i, grad in enumerate(grads)]
            ours = backward(grads, layout == "channels_last")
            same = reference.frequency_bands_backward(*grads)
            truth = reference.frequency_bands_backward(*(None if g is None else g.double() for g in grads))
            assert_close_to_reference(ours, same, truth, scale64=8.0)
            if dtype in (torch.bfloat16, torch.float16):
                assert_one_rounding(ours, backward([None if g is None else g.float() for g in grads]))


@float64_on_cpu
def test_grad_of_some_bands():
    x = random_image((2, 3, 6, 7), torch.float64).requires_grad_()
    for index, chosen in enumerate(("low", "mid", "high")):
        weight = random_image(x.shape, torch.float64, seed=index + 1)
        (ours,) = torch.autograd.grad(getattr(cx.frequency_bands(x), chosen), x, weight)
        (truth,) = torch.autograd.grad(reference.frequency_bands(x)[index], x, weight)
        torch.testing.assert_close(ours, truth)


@float64_on_cpu
@pytest.mark.parametrize("stacked", [False, True])
def test_grad(stacked):
    for layout in ("contiguous", "channels_last"):
        x = random_image((2, 3, 5, 4), torch.float64, layout).requires_grad_()

        def op(x):
            return cx.frequency_bands(x, stacked=stacked)

        assert gradcheck(op, (x,))
        assert gradgradcheck(op, (x,), fast_mode=True)


@float64_on_cpu
def test_grad_of_the_backward_of_some_bands():
    grads = [random_image((1, 2, 4, 5), torch.float64, seed=i).requires_grad_() for i in range(4)]
    for chosen_bits in (0b1111, 0b0101, 0b1000):
        chosen = [grad if chosen_bits >> i & 1 else None for i, grad in enumerate(grads)]
        inputs = [grad for grad in chosen if grad is not None]

        def op(*some, chosen=chosen):
            rest = iter(some)
            return backward([None if grad is None else next(rest) for grad in chosen])

        assert gradcheck(op, inputs)


def test_grad_where_pixels_are_not_finite():
    x = random_image((1, 1, 6, 6))
    x[0, 0, 3, 3] = float("nan")
    x.requires_grad_()
    (grad,) = torch.autograd.grad(cx.frequency_bands(x).mid.sum(), x)
    assert grad.isfinite().all()  # linear: x takes no part in its gradient


@given(
    st.tuples(st.integers(1, 3), st.integers(1, 70), st.integers(1, 40), st.integers(1, 70)),
    st.sampled_from(LAYOUTS),
    st.sampled_from(FLOATS),
)
def test_shapes(shape, layout, dtype):
    x = random_image(shape, dtype, layout)
    truth, same = reference.frequency_bands(x.double()), reference.frequency_bands(x)
    assert_close_to_reference(cx.frequency_bands(x), same, truth, scale64=x.abs().max().item())


@given(
    st.tuples(st.integers(1, 3), st.integers(1, 70), st.integers(1, 40), st.integers(1, 70)),
    st.sampled_from(LAYOUTS),
    st.sampled_from(FLOATS),
    st.integers(1, 15),
)
def test_shapes_of_the_backward(shape, layout, dtype, chosen_bits):
    grads = [random_image(shape, dtype, layout, seed=i) if chosen_bits >> i & 1 else None for i in range(4)]
    truth = reference.frequency_bands_backward(*(None if grad is None else grad.double() for grad in grads))
    same = reference.frequency_bands_backward(*grads)
    assert_close_to_reference(backward(grads, layout == "channels_last"), same, truth, scale64=8.0)


@pytest.mark.parametrize("values", [("nan", "nan"), ("inf", "inf"), ("-inf", "-inf"), ("inf", "-inf"), ("nan", "inf")])
def test_nan_and_inf_as_in_avg_pool2d(values):
    for layout in ("contiguous", "channels_last"):
        x = random_image((1, 2, 9, 40), layout=layout)
        x[0, 0, 4, 17], x[0, 0, 5, 19] = float(values[0]), float(values[1])
        x[0, 1, 0, 0], x[0, 1, 8, 39] = float(values[0]), float(values[1])
        for ours, theirs in zip(cx.frequency_bands(x), reference.frequency_bands(x), strict=True):
            torch.testing.assert_close(ours, theirs, equal_nan=True, atol=1e-6, rtol=1e-5)


def test_grad_of_a_tensor_that_outlived_a_transform():
    x, kept = random_image((1, 2, 5, 4)).requires_grad_(), []
    torch.func.grad(lambda inner: (kept.append(inner), inner.sum())[1])(x)
    (grad,) = torch.autograd.grad(cx.frequency_bands(kept[0]).high.sum(), x)
    (expected,) = torch.autograd.grad(cx.frequency_bands(x).high.sum(), x)
    torch.testing.assert_close(grad, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        ([1, 2], TypeError, "x must be a torch.Tensor, got list"),
        (torch.zeros(3, 4, 4), ValueError, r"x must have 4 dimensions \(B, C, H, W\), got shape \(3, 4, 4\)"),
        (torch.zeros(1, 1, 4, 4, dtype=torch.int64), TypeError, "x must have dtype .*, got int64"),
        (torch.zeros(1, 1, 4, 4, dtype=torch.complex64), TypeError, "x must have dtype .*, got complex64"),
        (torch.zeros(1, 1, 4, 4).to_sparse(), TypeError, "x must be a dense tensor"),
    ],
)
def test_errors(x, error, message):
    with pytest.raises(error, match="frequency_bands: " + message):
        cx.frequency_bands(x)


def test_errors_of_stacked():
    with pytest.raises(TypeError, match="frequency_bands: stacked must be a bool, got 'no'"):
        cx.frequency_bands(torch.zeros(1, 1, 2, 2), stacked="no")


def test_errors_from_c():
    op = torch.ops.camox_ops
    x = torch.zeros(1, 2, 3, 4)
    with pytest.raises(REFUSAL, match=r"frequency_bands: x must have 4 dimensions \(B, C, H, W\), got 3"):
        op.frequency_bands(x[0])
    with pytest.raises(REFUSAL, match="frequency_bands: dtype must be float32"):
        op.frequency_bands_stacked(x.long())
    with pytest.raises(REFUSAL, match="frequency_bands_backward: grad_high has size 5 in dimension 3, expected 4"):
        op.frequency_bands_backward(x, None, torch.zeros(1, 2, 3, 5), None, False)
    with pytest.raises(REFUSAL, match="frequency_bands_backward: grad_mid must have the dtype of x"):
        op.frequency_bands_backward(x, x.double(), None, None, False)


def stock_frequency_expert_forward(expert, x):
    """The public module's forward from its formula: poolings, four branches, cat, fusion, plus x."""

    def branch(layers, y):
        y = layers[0](y).movedim(1, -1)
        return F.gelu(F.layer_norm(y, y.shape[-1:], layers[1].weight, layers[1].bias, layers[1].eps)).movedim(-1, 1)

    branches = (expert.low_freq_conv, expert.mid_freq_conv, expert.high_freq_conv, expert.spatial_conv)
    maps = (*reference.frequency_bands(x), x)
    features = torch.cat([branch(layers, y) for layers, y in zip(branches, maps, strict=True)], dim=1)
    return branch(expert.fusion, features) + x


@on_device
@pytest.mark.parametrize("shape", [(2, 24, 6, 7), (1, 48, 14, 14), (3, 16, 1, 5)])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_expert_matches_reference(shape, layout):
    expert = randomised(cx.nn.FrequencyExpert(shape[1]))
    exact = randomised(cx.nn.FrequencyExpert(shape[1])).double()
    x, grad = random_image(shape, layout=layout), random_image(shape, seed=1)

    ours = module_numbers(expert, expert, x, grad)
    if DEVICE.type == "cuda":  # where avg_pool2d's backward is wrong in channels_last: pytorch/pytorch#188344
        x = x.contiguous()
    stock = module_numbers(expert, lambda x: stock_frequency_expert_forward(expert, x), x, grad)
    truth = module_numbers(exact, lambda x: stock_frequency_expert_forward(exact, x), x.double(), grad.double())
    assert_close_to_reference(ours, stock, truth)


@on_device
def test_expert_names():
    layers = ("low_freq_conv", "mid_freq_conv", "high_freq_conv", "spatial_conv", "fusion")
    expert = cx.nn.FrequencyExpert(16)
    expected = {
        f"{name}.{index}.{what}": (out, 16, 1, 1) if (index, what) == (0, "weight") else (out,)
        for name in layers
        for out in [16 if name == "fusion" else 4]
        for index in (0, 1)
        for what in ("weight", "bias")
    }
    assert {name: tuple(value.shape) for name, value in expert.state_dict().items()} == expected
    other = cx.nn.FrequencyExpert(16)
    other.load_state_dict(expert.state_dict(), strict=True)
    x = random_image((1, 16, 5, 5))
    assert torch.equal(other(x), expert(x))


@on_device
@pytest.mark.parametrize(
    ("of_x", "of_module", "autocast", "expected"),
    [
        (torch.float32, torch.float32, False, torch.float32),
        (torch.bfloat16, torch.bfloat16, False, torch.bfloat16),
        (torch.float32, torch.float32, True, torch.float32),
        (torch.bfloat16, torch.float32, True, torch.float32),
        (torch.bfloat16, torch.bfloat16, True, torch.bfloat16),
    ],
)
def test_expert_dtype(of_x, of_module, autocast, expected):
    expert = randomised(cx.nn.FrequencyExpert(16)).to(of_module)
    x = random_image((2, 16, 6, 7), of_x).requires_grad_()
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast):
        y = expert(x)
        # the public LayerNorm2d multiplies by its parameters, which promotes to their dtype
        public = torch.promote_types(torch.promote_types(of_module, expert.fusion[0](x).dtype), of_x)
    if autocast and DEVICE.type == "cuda":
        public = expected = torch.float32  # autocast gives its pow float32 there
    assert y.dtype == public == expected
    y.float().sum().backward()
    assert x.grad.dtype == of_x
    assert all(parameter.grad.dtype == of_module for parameter in expert.parameters())
    with torch.no_grad():
        truth = stock_frequency_expert_forward(expert.double(), x.double())
    assert (y.double() - truth).abs().max() <= (0.15 if torch.bfloat16 in (of_x, of_module) or autocast else 1e-5)


def test_expert_of_no_images():
    x = torch.rand(0, 16, 4, 5, requires_grad=True)
    y = cx.nn.FrequencyExpert(16)(x)
    assert y.shape == x.shape
    y.sum().backward()
    assert x.grad.shape == x.shape


@on_device
@each_backend
def test_expert_compiles(backend):
    expert = randomised(cx.nn.FrequencyExpert(16))
    x = random_image((2, 16, 6, 7)).requires_grad_()
    expected = expert(x)
    (expected_grad,) = torch.autograd.grad(expected.square().sum(), x)
    y = torch.compile(expert, fullgraph=True, backend=backend)(x)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(torch.autograd.grad(y.square().sum(), x)[0], expected_grad, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("dim", [0, 6, -4])
def test_expert_errors(dim):
    with pytest.raises(ValueError, match=f"FrequencyExpert: dim must be a positive multiple of 4, got {dim}"):
        cx.nn.FrequencyExpert(dim)
