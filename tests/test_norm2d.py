"""layer_norm2d and LayerNorm2d."""

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
    assert_reads_half_weights,
    assert_same_sums,
    every_second,
    float64_on_cpu,
    on_device,
    random_image,
    reference,
)
from hypothesis import given
from hypothesis import strategies as st
from norm2d_truth import HALVES, assert_right, forward_and_gradients, parameters
from torch.autograd import gradcheck, gradgradcheck

import camox_ops as cx
from camox_ops.reference.norm2d import ACTIVATIONS

# Around vectors (4, 8, 16 lanes), 4 and 8 channels at a time, tiles of 32 lines, blocks of 1024 pixels and of 65536
# elements.
SHAPES = [
    (2, 3, 5, 7),
    (1, 1, 1, 1),
    (2, 1, 3, 5),
    (1, 7, 1, 1),
    (3, 33, 1, 1),
    (1, 2, 1, 9),
    (1, 4, 9, 1),
    (1, 5, 3, 5),
    (1, 9, 4, 4),
    (2, 16, 3, 11),
    (1, 17, 8, 8),
    (1, 35, 5, 13),
    (1, 3, 31, 33),
    (1, 2, 1, 1027),
    (1, 6, 35, 59),
    (1, 600, 9, 13),
    (1, 4500, 3, 6),
]
SMALL = [shape for shape in SHAPES if torch.Size(shape).numel() < 3000]


def assert_all_close(x, weight, bias, grad, **options):
    """Output and gradients against float64 under the tolerance rule; halves also against our own float32."""
    ours = forward_and_gradients(lambda *t: cx.layer_norm2d(*t, **options), x, weight, bias, grad)
    assert_right(ours, x, weight, bias, grad, **options)
    if x.dtype in HALVES:
        single = {name: value.float() if isinstance(value, torch.Tensor) else value for name, value in options.items()}
        tensors = [tensor.float() for tensor in (x, weight, bias, grad)]
        full = forward_and_gradients(lambda *t: cx.layer_norm2d(*t, **single), *tensors)
        assert_one_rounding(ours, full)


def test_known_values():
    x = torch.tensor([1.0, 3.0]).view(1, 2, 1, 1).expand(2, 2, 3, 4)
    weight, bias = torch.tensor([2.0, 3.0]), torch.tensor([0.5, -0.5])
    y = cx.layer_norm2d(x, weight, bias, 1e-12)
    torch.testing.assert_close(y[:, 0], torch.full((2, 3, 4), -1.5))
    torch.testing.assert_close(y[:, 1], torch.full((2, 3, 4), 2.5))
    relu = cx.layer_norm2d(x, weight, bias, 1e-12, activation="relu", residual=x)
    torch.testing.assert_close(relu[:, :, 0, 0], torch.tensor([[1.0, 5.5]] * 2))
    # alone in its group, every channel is its own mean
    assert torch.equal(cx.layer_norm2d(x, weight, bias, groups=2)[:, :, 0, 0], bias.expand(2, 2))


def test_activation_of_zero_and_tails():
    """Channels of one value make z 0, so u is the bias: exact at 0, and precise in gelu's tail, unlike 1 + erf."""
    u = torch.tensor([0.0, -0.0, 1e-30, -1e-6, 3.0, -3.0, -5.0, 8.0, -20.0, 100.0])
    x = torch.full((1, len(u), 2, 2), 3.25)
    for activation in ACTIVATIONS:
        ours = cx.layer_norm2d(x, torch.ones_like(u), u, activation=activation)[0, :, 1, 1]
        truth = ACTIVATIONS[activation](u.double())
        torch.testing.assert_close(ours.double(), truth, rtol=1e-5, atol=4e-9)
        assert torch.equal(ours[:2], torch.zeros(2))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@every_second(dtype=FLOATS, layout=LAYOUTS)
def test_matches_reference(dtype, layout, activation):
    for shape in SHAPES if activation in ("none", "gelu") else SMALL:
        weight, bias = parameters(shape[1], dtype)
        x, grad = random_image(shape, dtype, layout), random_image(shape, dtype, layout, seed=1)
        assert_all_close(x, weight, bias, grad, activation=activation)


@pytest.mark.parametrize("kind", ["offset", "constant"])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_matches_reference_far_from_zero(layout, kind):
    for shape in SHAPES:
        weight, bias = parameters(shape[1])
        x, grad = random_image(shape, torch.float32, layout, kind), random_image(shape, seed=1)
        assert_all_close(x, weight, bias, grad, activation="gelu")


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_large_mean_keeps_its_digits(layout):
    """Mean 1e4, standard deviation 1: as close to float64 as without the mean, output and gradients alike."""
    shape = (2, 80, 9, 14)
    weight, bias = parameters(80)
    grad = random_image(shape, seed=1)
    x = random_image(shape, layout=layout, kind="offset")
    ours = forward_and_gradients(cx.layer_norm2d, x, weight, bias, grad)
    truth = forward_and_gradients(reference.layer_norm2d, *(t.double() for t in (x, weight, bias, grad)))
    for mine, true in zip(ours, truth, strict=True):
        assert (mine.double() - true).abs().max() <= 2e-6 * true.abs().max()


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("channels", [20, 300])
def test_first_channels_far_from_the_rest(layout, channels):
    """Neither 0 nor the first channels are near the mean of such pixels, which must not cost digits."""
    x = random_image((2, channels, 5, 9), layout=layout)
    x[:, :9] += 1e4
    weight, bias = parameters(channels)
    assert_all_close(x, weight, bias, random_image(x.shape, seed=1), activation="silu")


@every_second(dtype=FLOATS, layout=LAYOUTS)
def test_matches_reference_residual_and_groups(dtype, layout):
    for shape, groups in (((2, 12, 5, 7), 4), ((1, 36, 6, 9), 3), ((2, 6, 4, 4), 6), ((1, 80, 3, 17), 2)):
        weight, bias = parameters(shape[1], dtype)
        x, grad = random_image(shape, dtype, layout), random_image(shape, dtype, layout, seed=1)
        residual = random_image(shape, dtype, "contiguous" if groups % 2 else layout, seed=2)
        assert_all_close(x, weight, bias, grad, activation="gelu", groups=groups, residual=residual)


@pytest.mark.parametrize("dtype", HALVES)
def test_float32_parameters_beside_halves(dtype):
    weight, bias = parameters(12)
    x, grad = random_image((2, 12, 5, 7), dtype), random_image((2, 12, 5, 7), dtype, seed=1)
    y, grad_x, grad_weight, grad_bias = forward_and_gradients(cx.layer_norm2d, x, weight, bias, grad)
    assert y.dtype == grad_x.dtype == dtype
    assert grad_weight.dtype == grad_bias.dtype == torch.float32
    full = forward_and_gradients(cx.layer_norm2d, x.float(), weight, bias, grad.float())
    assert_one_rounding([y, grad_x], full[:2])
    assert_same_sums([grad_weight, grad_bias], full[2:])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", HALVES)
def test_half_weights_are_read_as_they_are(dtype, layout):
    for activation, shape in (("none", (2, 6, 5, 7)), ("gelu", (3, 32, 8, 16)), ("silu", (1, 80, 3, 5))):
        x, grad = random_image(shape, dtype, layout), random_image(shape, dtype, layout, seed=1)

        def op(x, weight, bias, activation=activation):
            return cx.layer_norm2d(x, weight, bias, activation=activation, groups=2)

        assert_reads_half_weights(op, [x], parameters(shape[1], dtype), grad)


@pytest.mark.parametrize("dtype", HALVES)
def test_weight_and_bias_of_two_dtypes(dtype):
    """The half-precision one is converted, and so is its gradient."""
    x, grad, (weight, bias) = (
        random_image((2, 12, 5, 7), dtype),
        random_image((2, 12, 5, 7), dtype),
        parameters(12, dtype),
    )
    wide = forward_and_gradients(cx.layer_norm2d, x, weight.float(), bias.float(), grad)
    for pair in ((weight, bias.float()), (weight.float(), bias)):
        ours = forward_and_gradients(cx.layer_norm2d, x, *pair, grad)
        assert [y.dtype for y in ours[2:]] == [t.dtype for t in pair]
        assert all(torch.equal(mine, other.to(mine.dtype)) for mine, other in zip(ours, wide, strict=True))


@float64_on_cpu
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_grad(activation):
    weight, bias = (v.requires_grad_() for v in parameters(6, torch.float64))
    for layout in ("contiguous", "channels_last"):
        x = random_image((2, 6, 2, 3), torch.float64, layout).requires_grad_()
        residual = random_image((2, 6, 2, 3), torch.float64, seed=3).requires_grad_()

        def op(x, weight, bias, residual):
            return cx.layer_norm2d(x, weight, bias, 1e-3, activation=activation, residual=residual, groups=2)

        assert gradcheck(op, (x, weight, bias, residual))
        assert gradgradcheck(op, (x, weight, bias, residual), fast_mode=True)


def test_grad_where_some_need_none():
    weight, bias = parameters(6)
    x = random_image((2, 6, 3, 4))
    full = forward_and_gradients(cx.layer_norm2d, x, weight, bias, torch.ones_like(x))
    for index in range(3):
        leaves = [x, weight, bias]
        leaves[index] = leaves[index].clone().requires_grad_()
        (grad,) = torch.autograd.grad(cx.layer_norm2d(*leaves).sum(), leaves[index])
        assert_same_sums(grad, full[index + 1])
    residual = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(cx.layer_norm2d(x, weight, bias, residual=residual).sum(), residual)
    assert torch.equal(grad, torch.ones_like(x))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_gradients_nothing_is_made_for_them(layout):
    op = torch.ops.camox_ops.layer_norm2d
    x, (weight, bias) = random_image((2, 12, 7, 9), layout=layout), parameters(12)
    y, stats = op(x, weight, bias, x, 1e-6, 3, 1, False)
    assert stats.numel() == 0
    assert torch.equal(y, op(x, weight, bias, x, 1e-6, 3, 1, True)[0])
    assert torch.equal(y, cx.layer_norm2d(x, weight, bias, activation="gelu", residual=x, groups=3))
    mapped = torch.vmap(lambda x: op(x, weight, bias, x, 1e-6, 3, 1, False))(x[None])
    assert mapped[1].numel() == 0 and torch.equal(mapped[0][0], y)
    asked = cx.layer_norm2d(x.requires_grad_(), weight, bias, activation="gelu", residual=x, groups=3)
    assert torch.equal(y, asked)


@on_device
def test_noncontiguous_of_every_kind():
    weight, bias = parameters(6)
    views = [
        torch.rand(7, 4, 6, 3).transpose(0, 3).transpose(1, 2).transpose(1, 0)[:, :6],
        torch.rand(2, 12, 5, 4).to(memory_format=torch.channels_last)[:, ::2],
        torch.rand(2, 9, 5, 4).to(memory_format=torch.channels_last)[:, 1:7],
        torch.rand(2, 6, 5, 1).expand(2, 6, 5, 4),
        torch.rand(1, 6, 1, 1).expand(2, 6, 5, 4),
        torch.rand(2, 6, 4, 5).transpose(2, 3),
        torch.rand(2, 6, 9, 8)[:, :, ::2, 1::2],
    ]
    for x in views:
        w, b = (weight, bias) if x.shape[1] == 6 else parameters(x.shape[1])
        grad = torch.rand(x.shape[::-1]).permute(3, 2, 1, 0)
        expected = forward_and_gradients(cx.layer_norm2d, x.contiguous(), w, b, grad.contiguous())
        for mine, theirs in zip(forward_and_gradients(cx.layer_norm2d, x, w, b, grad), expected, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    x = torch.rand(2, 6, 4, 5, requires_grad=True)
    cx.layer_norm2d(x, weight, bias, activation="relu").sum().backward()  # a gradient whose strides are all 0
    (expected,) = torch.autograd.grad(cx.layer_norm2d(x, weight, bias, activation="relu"), x, torch.ones(2, 6, 4, 5))
    assert_same_sums(x.grad, expected)
    strided = torch.rand(12)[::2]
    assert torch.equal(cx.layer_norm2d(x, strided, strided), cx.layer_norm2d(x, strided.clone(), strided.clone()))


@given(
    st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 24), st.integers(1, 24)),
    st.integers(1, 12),
    st.sampled_from(sorted(ACTIVATIONS)),
    st.sampled_from(LAYOUTS),
    st.sampled_from(FLOATS),
    st.booleans(),
)
def test_shapes(shape, group_channels, activation, layout, dtype, with_residual):
    batch, groups, height, width = shape
    shape = (batch, groups * group_channels, height, width)
    weight, bias = parameters(shape[1], dtype)
    residual = random_image(shape, dtype, layout, seed=2) if with_residual else None
    x, grad = random_image(shape, dtype, layout), random_image(shape, dtype, seed=1)
    assert_all_close(x, weight, bias, grad, activation=activation, groups=groups, residual=residual)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_and_inf_stay_in_their_pixel_and_group(value, activation):
    weight, bias = parameters(8)
    for layout in ("contiguous", "channels_last"):
        x = random_image((1, 8, 6, 20), layout=layout)
        x[0, 2, 2, 7] = value
        y = cx.layer_norm2d(x, weight, bias, activation=activation, groups=2)
        assert y[0, :4, 2, 7].isnan().all()
        assert y.isnan().sum() == 4 and y.isinf().sum() == 0
        grad = torch.autograd.grad(
            cx.layer_norm2d(x.requires_grad_(), weight, bias, activation=activation, groups=2).sum(), x
        )[0]
        assert grad[0, :4, 2, 7].isnan().all()
        assert grad.isnan().sum() == 4 and grad.isinf().sum() == 0


GOOD = {"x": torch.zeros(1, 6, 2, 4), "weight": torch.zeros(6), "bias": torch.zeros(6)}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"x": [1, 2]}, TypeError, "x must be a torch.Tensor, got list"),
        ({"x": torch.zeros(6, 2, 4)}, ValueError, r"x must have 4 dimensions \(B, C, H, W\), got shape \(6, 2, 4\)"),
        ({"x": torch.zeros(1, 6, 2, 4, dtype=torch.int64)}, TypeError, "x must have dtype .*, got int64"),
        ({"x": torch.zeros(1, 6, 2, 4).to_sparse()}, TypeError, "x must be a dense tensor"),
        ({"weight": None}, TypeError, "weight must be a torch.Tensor, got NoneType"),
        ({"weight": torch.zeros(5)}, ValueError, r"weight must have shape \(6,\).*, got \(5,\)"),
        ({"bias": torch.zeros(7)}, ValueError, r"bias must have shape \(6,\).*, got \(7,\)"),
        ({"bias": torch.zeros(6, 1)}, ValueError, r"bias must have shape \(6,\).*, got \(6, 1\)"),
        ({"weight": torch.zeros(6).double()}, TypeError, "weight must have dtype float32, got float64"),
        ({"bias": torch.zeros(6).bfloat16()}, TypeError, "bias must have dtype float32, got bfloat16"),
        (
            {"x": torch.zeros(1, 6, 2, 4).half(), "bias": torch.zeros(6).bfloat16()},
            TypeError,
            "float16 or float32, got b",
        ),
        ({"weight": torch.zeros(6, device="meta")}, ValueError, "weight must be on the device of x, cpu, got meta"),
        (
            {"residual": torch.zeros(1, 6, 2, 5)},
            ValueError,
            r"residual must have the shape of x, .*, got \(1, 6, 2, 5\)",
        ),
        (
            {"residual": torch.zeros(1, 6, 1, 1)},
            ValueError,
            r"residual must have the shape of x, .*, got \(1, 6, 1, 1\)",
        ),
        ({"residual": torch.zeros(1, 6, 2, 4).half()}, TypeError, "residual must have dtype float32, got float16"),
        ({"residual": 1.0}, TypeError, "residual must be a torch.Tensor, got float"),
        ({"eps": 0}, ValueError, "eps must be > 0 and finite, got 0"),
        ({"eps": 1e-50}, ValueError, "eps must be > 0 and finite in float32, got 1e-50"),
        ({"eps": -1e-6}, ValueError, "eps must be > 0 and finite, got -1e-06"),
        ({"eps": float("nan")}, ValueError, "eps must be > 0 and finite, got nan"),
        ({"eps": "1e-6"}, TypeError, "eps must be a number, got '1e-6'"),
        ({"activation": "tanh"}, ValueError, "activation must be one of 'none', 'gelu', .*, got 'tanh'"),
        ({"activation": None}, ValueError, "activation must be one of .*, got None"),
        ({"groups": 4}, ValueError, "groups must be >= 1 and divide the 6 channels of x, got 4"),
        ({"groups": 0}, ValueError, "groups must be >= 1 and divide the 6 channels of x, got 0"),
        ({"groups": -1}, ValueError, "groups must be >= 1 and divide the 6 channels of x, got -1"),
        ({"groups": 2.0}, TypeError, "groups must be an int, got 2.0"),
        ({"groups": True}, TypeError, "groups must be an int, got True"),
    ],
)
def test_errors(arguments, error, message):
    with pytest.raises(error, match="layer_norm2d: .*" + message):
        cx.layer_norm2d(**{**GOOD, **arguments})


def test_errors_from_c():
    op = torch.ops.camox_ops
    x, weight, bias = GOOD.values()

    def call(x=x, weight=weight, bias=bias, residual=None, eps=1e-6, groups=1, activation=0):
        return op.layer_norm2d(x, weight, bias, residual, eps, groups, activation, True)

    stats = call()[1]
    for arguments, message in (
        ({"x": x[0]}, "x must have 4 dimensions"),
        ({"x": x.int()}, "dtype must be float32, bfloat16, float16 or float64"),
        ({"weight": weight[:5]}, "weight must have one element per channel of x, 6, got 5"),
        ({"bias": torch.zeros(7)}, "bias must have one element per channel of x, 6, got 7"),
        ({"weight": torch.zeros(12)[::2]}, "weight must be contiguous, got stride 2"),
        ({"weight": weight.double()}, "weight must have dtype float32 beside this x"),
        ({"bias": bias.view(2, 3)}, "bias must have 1 dimensions, got 2"),
        ({"x": x.half(), "weight": weight.half()}, "bias must have the dtype of weight"),
        ({"x": x.half(), "bias": bias.half().view(2, 3)}, "bias must have 1 dimensions, got 2"),
        ({"x": x.half(), "weight": torch.zeros(12).half()[::2], "bias": bias.half()}, "weight must be contiguous"),
        ({"residual": torch.zeros(1, 6, 2, 5)}, "residual has size 5 in dimension 3, expected 4"),
        ({"residual": x.half()}, "residual must have the dtype of x"),
        ({"eps": 0.0}, "eps must be > 0 and finite, got 0"),
        ({"eps": 1e-50}, "eps must be > 0 and finite, got 1e-50"),
        ({"eps": float("inf")}, "eps must be > 0 and finite, got inf"),
        ({"groups": 4}, "groups must be >= 1 and divide the 6 channels of x, got 4"),
        ({"groups": 0}, "groups must be >= 1 and divide the 6 channels of x, got 0"),
        ({"activation": 5}, "unknown activation code 5"),
    ):
        with pytest.raises(REFUSAL, match="layer_norm2d: " + message):
            call(**arguments)
    with pytest.raises(REFUSAL, match="layer_norm2d_backward: grad has size 5 in dimension 3, expected 4"):
        op.layer_norm2d_backward(torch.zeros(1, 6, 2, 5), x, weight, bias, stats, 1e-6, 1, 0)
    for arguments, message in (
        ((2, 0), "size 1 in dimension 2, expected 2"),
        ((1, 1), "size 1 in dimension 0, expected 2"),
    ):
        with pytest.raises(REFUSAL, match="layer_norm2d_backward: stats has " + message):
            op.layer_norm2d_backward(x, x, weight, bias, stats, 1e-6, *arguments)


def test_least_eps():
    """Constant channels: what is divided by is sqrt(eps) alone."""
    for dtype, eps in ((torch.float32, 2.0**-149), (torch.float64, 1e-50)):
        x = torch.ones(1, 4, 1, 1, dtype=dtype)
        assert torch.equal(cx.layer_norm2d(x, x.flatten(), 0 * x.flatten(), eps=eps), 0 * x)


def stock(module, x):
    """The public module's forward from its formula."""
    mean = x.mean(dim=1, keepdim=True)
    var = (x - mean).pow(2).mean(dim=1, keepdim=True)
    return module.weight[:, None, None] * ((x - mean) / torch.sqrt(var + module.eps)) + module.bias[:, None, None]


@on_device
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_module_matches_reference(layout):
    module = cx.nn.LayerNorm2d(24, eps=1e-5)
    with torch.no_grad():
        module.weight.copy_(parameters(24)[0]), module.bias.copy_(parameters(24)[1])
    x, grad = random_image((2, 24, 6, 7), layout=layout), random_image((2, 24, 6, 7), seed=1)

    def outputs(forward, dtype):
        copy = cx.nn.LayerNorm2d(24, eps=1e-5)
        copy.load_state_dict(module.state_dict(), strict=True)
        copy, leaf = copy.to(dtype), x.to(dtype).requires_grad_()
        y = forward(copy, leaf)
        return [y, *torch.autograd.grad(y, [leaf, *copy.parameters()], grad.to(dtype))]

    ours = outputs(lambda m, x: m(x), torch.float32)
    assert_close_to_reference(ours, outputs(stock, torch.float32), outputs(stock, torch.float64))


@on_device
def test_module_is_the_op():
    module = cx.nn.LayerNorm2d(8, activation="gelu", groups=2)
    x = random_image((2, 8, 5, 5))
    expected = cx.layer_norm2d(x, module.weight, module.bias, activation="gelu", groups=2, residual=x)
    assert torch.equal(module(x, x), expected)
    assert list(module.state_dict()) == ["weight", "bias"]
    assert repr(module) == "LayerNorm2d(8, eps=1e-06, activation='gelu', groups=2)"
    assert torch.equal(cx.nn.LayerNorm2d(8)(x), cx.layer_norm2d(x, torch.ones(8), torch.zeros(8)))


@on_device
@pytest.mark.parametrize("parameter_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_module_keeps_the_stock_dtype(autocast, x_dtype, parameter_dtype):
    module = cx.nn.LayerNorm2d(6).to(parameter_dtype)
    x = random_image((1, 6, 4, 4), x_dtype).requires_grad_()
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast):
        ours, theirs = module(x), stock(module, x)
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, atol=0.05, rtol=0.05)
    grads = torch.autograd.grad(ours.sum(), [x, *module.parameters()])
    assert [grad.dtype for grad in grads] == [x_dtype, parameter_dtype, parameter_dtype]


def test_module_after_a_convolution_under_autocast():
    layers = torch.nn.Sequential(torch.nn.Conv2d(4, 8, 1), cx.nn.LayerNorm2d(8))
    with torch.autocast("cpu", torch.bfloat16):
        y = F.gelu(layers(torch.rand(1, 4, 6, 6)))
    assert y.dtype == torch.float32
