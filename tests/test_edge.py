"""edge_maps and EdgeExpert."""

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
    every_pair,
    float64_on_cpu,
    module_numbers,
    on_device,
    random_image,
    reference,
)
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

import camox_ops as cx

BORDERS = ("zeros", "replicate", "reflect")
# Around vector and tile sizes: 16 lanes, 512 columns and 4096 elements of a flat tile, 1536 elements and 128 channels
# of another.
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
    (1, 2, 131, 33),
    (1, 1, 3, 511),
    (1, 1, 20, 512),
    (1, 1, 3, 513),
    (1, 1, 2, 2051),
    (1, 127, 3, 18),
    (1, 129, 5, 17),
    (2, 131, 3, 4),
]


def backward(x, grads, eps=1e-8, border="zeros"):
    return torch.ops.camox_ops.edge_maps_backward(x, *grads, eps, BORDERS.index(border))


def reachable(shape, border):
    return not (border == "reflect" and 1 in shape[2:])


def test_known_values():
    x = torch.zeros(1, 1, 5, 5)
    x[0, 0, 2, 2] = 1.0
    maps = cx.edge_maps(x, eps=1e-12)
    assert maps._fields == ("sobel", "laplacian", "gradient")
    sobel, laplacian, gradient = maps
    root2 = 2**0.5
    expected = torch.tensor([[root2, 2, root2], [2, 0, 2], [root2, 2, root2]])
    torch.testing.assert_close(sobel[0, 0, 1:4, 1:4], expected, atol=2e-6, rtol=0)
    torch.testing.assert_close(laplacian[0, 0, 1:4, 1:4], torch.tensor([[0.0, 1, 0], [1, 4, 1], [0, 1, 0]]))
    torch.testing.assert_close(gradient, torch.sqrt(sobel**2 + laplacian**2 + 1e-12))
    ramp = torch.arange(6.0).expand(1, 1, 4, 6)
    assert torch.equal(cx.edge_maps(ramp, border="replicate").laplacian[..., 1:-1], torch.zeros(1, 1, 4, 4))
    torch.testing.assert_close(cx.edge_maps(ramp, border="replicate").sobel[..., 1:-1], torch.full((1, 1, 4, 4), 8.0))


def test_stacked_is_the_maps_and_x():
    for layout in ("contiguous", "channels_last"):
        for shape in ((2, 3, 6, 7), (1, 66, 3, 5)):
            x = random_image(shape, layout=layout)
            assert torch.equal(cx.edge_maps(x, stacked=True), torch.cat([*cx.edge_maps(x), x], dim=1))


@every_pair(dtype=FLOATS, layout=LAYOUTS, border=BORDERS)
def test_matches_reference(dtype, layout, border):
    for shape in SHAPES:
        if not reachable(shape, border):
            continue
        for kind in ("normal", "offset", "constant"):
            x = random_image(shape, dtype, layout, kind)
            ours, same = cx.edge_maps(x, border=border), reference.edge_maps(x, 1e-8, border)
            truth = reference.edge_maps(x.double(), 1e-8, border)
            assert_close_to_reference(ours, same, truth, scale64=16 * x.abs().max().item())
            if dtype in (torch.bfloat16, torch.float16):
                assert_one_rounding(ours, cx.edge_maps(x.float(), border=border))


@every_pair(dtype=FLOATS, layout=LAYOUTS, border=BORDERS)
def test_grad_matches_reference(dtype, layout, border):
    for shape in SHAPES:
        if not reachable(shape, border):
            continue
        x = random_image(shape, dtype, layout)
        grads = [random_image(shape, dtype, "contiguous" if i % 2 else layout, seed=i + 1) for i in range(4)]
        eps = 1e-2  # away from the kink of the root at 0, where float32 itself is lost
        ours = backward(x, grads, eps, border)
        same = reference.edge_maps_backward(x, *grads, eps, border)
        truth = reference.edge_maps_backward(x.double(), *(g.double() for g in grads), eps, border)
        assert_close_to_reference(ours, same, truth, scale64=16 * max(g.abs().max().item() for g in grads))
        if dtype in (torch.bfloat16, torch.float16):
            assert_one_rounding(ours, backward(x.float(), [g.float() for g in grads], eps, border))


@float64_on_cpu
def test_grad_of_some_maps():
    x = random_image((2, 3, 6, 7), torch.float64).requires_grad_()
    for chosen in ("sobel", "laplacian", "gradient"):
        (ours,) = torch.autograd.grad(getattr(cx.edge_maps(x), chosen).sum(), x)
        index = ("sobel", "laplacian", "gradient").index(chosen)
        (truth,) = torch.autograd.grad(reference.edge_maps(x)[index].sum(), x)
        torch.testing.assert_close(ours, truth)
    unused = cx.edge_maps(x.detach().requires_grad_()).sobel.detach()
    assert not unused.requires_grad


@float64_on_cpu
@pytest.mark.parametrize("border", BORDERS)
@pytest.mark.parametrize("stacked", [False, True])
def test_grad(border, stacked):
    for layout in ("contiguous", "channels_last"):
        x = random_image((1, 2, 5, 4), torch.float64, layout).requires_grad_()

        def op(x):
            return cx.edge_maps(x, eps=1e-3, border=border, stacked=stacked)

        assert gradcheck(op, (x,))
        assert gradgradcheck(op, (x,), fast_mode=True)


@given(
    st.tuples(st.integers(1, 3), st.integers(1, 70), st.integers(1, 40), st.integers(1, 70)),
    st.sampled_from(BORDERS),
    st.sampled_from(LAYOUTS),
    st.sampled_from(FLOATS),
)
def test_shapes(shape, border, layout, dtype):
    if not reachable(shape, border):
        return
    x = random_image(shape, dtype, layout)
    truth = reference.edge_maps(x.double(), 1e-8, border)
    same = reference.edge_maps(x, 1e-8, border)
    assert_close_to_reference(cx.edge_maps(x, border=border), same, truth, scale64=16 * x.abs().max().item())


def test_grad_of_strided_gradients():
    """Gradients that are read in place, or in rows that are copied, across the ends of planes and blocks of rows."""
    for shape in ((3, 5, 9, 9), (2, 3, 40, 33), (1, 2, 5, 512), (2, 2, 3, 300), (1, 3, 1, 40)):
        x = random_image(shape)
        dense = [random_image(shape, seed=i) for i in range(1, 4)]
        dense.append(random_image(shape, seed=4)[:1, :1, :1, :1].expand(shape))
        strided = [
            dense[0],
            dense[1].transpose(2, 3).contiguous().transpose(2, 3),
            torch.cat([dense[2], dense[2]], dim=1)[:, shape[1] :],
            dense[3],
        ]
        expected = backward(x, [grad.contiguous() for grad in dense])
        for image in (x, x.transpose(2, 3).contiguous().transpose(2, 3)):
            if DEVICE.type == "cpu":
                assert torch.equal(backward(image, strided), expected)
            else:  # other strides have another kernel, in which other products are fused with an addition
                torch.testing.assert_close(backward(image, strided), expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_inf_as_in_a_convolution(value):
    for layout in ("contiguous", "channels_last"):
        x = random_image((1, 2, 6, 20), layout=layout)
        x[0, 0, 2, 7] = value
        x[0, 1, 0, 0] = value
        for ours, theirs in zip(cx.edge_maps(x), reference.edge_maps(x), strict=True):
            torch.testing.assert_close(ours, theirs, equal_nan=True)
        xg = x.clone().requires_grad_()
        (ours,) = torch.autograd.grad(cx.edge_maps(xg).gradient.sum(), xg)
        (theirs,) = torch.autograd.grad(reference.edge_maps(xg)[2].sum(), xg)
        assert torch.equal(ours.isfinite(), theirs.isfinite())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([1, 2],), TypeError, "x must be a torch.Tensor, got list"),
        ((torch.zeros(3, 4, 4),), ValueError, r"x must have 4 dimensions \(B, C, H, W\), got shape \(3, 4, 4\)"),
        ((torch.zeros(1, 1, 4, 4, dtype=torch.int64),), TypeError, "x must have dtype .*, got int64"),
        ((torch.zeros(1, 1, 4, 4, dtype=torch.complex64),), TypeError, "x must have dtype .*, got complex64"),
        ((torch.zeros(1, 1, 4, 4).to_sparse(),), TypeError, "x must be a dense tensor"),
    ],
)
def test_errors_of_x(arguments, error, message):
    with pytest.raises(error, match="edge_maps: " + message):
        cx.edge_maps(*arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"eps": 0}, ValueError, "eps must be > 0 and finite, got 0"),
        ({"eps": -1e-8}, ValueError, "eps must be > 0 and finite, got -1e-08"),
        ({"eps": 1e-46}, ValueError, "eps must be > 0 and finite in float32, got 1e-46"),
        ({"eps": float("nan")}, ValueError, "eps must be > 0 and finite, got nan"),
        ({"eps": float("inf")}, ValueError, "eps must be > 0 and finite, got inf"),
        ({"eps": "1e-8"}, TypeError, "eps must be a number, got '1e-8'"),
        ({"border": "wrap"}, ValueError, "border must be one of 'zeros', 'replicate', 'reflect', got 'wrap'"),
        ({"border": "reflect"}, ValueError, r"border 'reflect' needs sides of at least 2, got x of shape"),
        ({"stacked": "no"}, TypeError, "stacked must be a bool, got 'no'"),
        ({"stacked": 1}, TypeError, "stacked must be a bool, got 1"),
    ],
)
def test_errors(arguments, error, message):
    with pytest.raises(error, match="edge_maps: " + message):
        cx.edge_maps(torch.zeros(1, 1, 1, 4), **arguments)


def test_errors_of_nested_tensors():
    x = torch.nested.nested_tensor([torch.ones(1, 3, 3)] * 2)
    with pytest.raises(TypeError, match="edge_maps: x must be a dense tensor, got a nested one of 2 tensors"):
        cx.edge_maps(x)


def test_errors_from_c():
    op = torch.ops.camox_ops
    x = torch.zeros(1, 1, 1, 4)
    with pytest.raises(REFUSAL, match="edge_maps: eps must be > 0 and finite, got 0"):
        op.edge_maps(x, 0.0, 0)
    with pytest.raises(REFUSAL, match="edge_maps: eps must be > 0 and finite, got 1e-46"):
        op.edge_maps(x, 1e-46, 0)
    assert op.edge_maps(x.double(), 1e-46, 0)[0].min() > 0
    with pytest.raises(REFUSAL, match="edge_maps: unknown border code 3"):
        op.edge_maps(x, 1e-8, 3)
    with pytest.raises(REFUSAL, match="'reflect' needs sides of at least 2, got x with H=1, W=4"):
        op.edge_maps_stacked(x, 1e-8, 2)
    with pytest.raises(REFUSAL, match="x must have 4 dimensions"):
        op.edge_maps(x[0], 1e-8, 0)
    with pytest.raises(REFUSAL, match="dtype must be float32, bfloat16, float16 or float64"):
        op.edge_maps(x.int(), 1e-8, 0)
    with pytest.raises(REFUSAL, match="grad_sobel has size 5 in dimension 3, expected 4"):
        op.edge_maps_backward(x, torch.zeros(1, 1, 1, 5), None, None, None, 1e-8, 0)
    with pytest.raises(REFUSAL, match="grad_gradient must have the dtype of x"):
        op.edge_maps_backward(x, None, None, x.double(), None, 1e-8, 0)


def stock_edge_expert_forward(expert, x):
    """The public module's forward from its formula: three grouped convolutions, four branches, cat, fusion, plus x."""
    channels = x.shape[1]

    def filtered(kernel):
        return F.conv2d(x, kernel.repeat(channels, 1, 1, 1), padding=1, groups=channels)

    def normalised(norm, y):
        mean = y.mean(dim=1, keepdim=True)
        var = (y - mean).pow(2).mean(dim=1, keepdim=True)
        return norm.weight[:, None, None] * ((y - mean) / torch.sqrt(var + norm.eps)) + norm.bias[:, None, None]

    def branch(layers, y):
        return F.gelu(normalised(layers[1], layers[0](y)))

    gx, gy = filtered(expert.sobel_x_base.to(x)), filtered(expert.sobel_y_base.to(x))
    laplacian = filtered(expert.laplacian_base.to(x)).abs()
    sobel = torch.sqrt(gx**2 + gy**2 + 1e-8)
    gradient = torch.sqrt(sobel**2 + laplacian**2 + 1e-8)
    maps = (sobel, laplacian, gradient, x)
    branches = (expert.sobel_branch, expert.laplacian_branch, expert.gradient_branch, expert.spatial_branch)
    features = torch.cat([branch(layers, y) for layers, y in zip(branches, maps, strict=True)], dim=1)
    return branch(expert.fusion, features) + x


def randomised(module, seed=0):
    torch.manual_seed(seed)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return module


@on_device
@pytest.mark.parametrize("shape", [(2, 24, 6, 7), (1, 48, 14, 14), (3, 16, 1, 5)])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_expert_matches_reference(shape, layout):
    expert = randomised(cx.nn.EdgeExpert(shape[1]))
    exact = randomised(cx.nn.EdgeExpert(shape[1])).double()
    x, grad = random_image(shape, layout=layout), random_image(shape, seed=1)

    ours = module_numbers(expert, expert, x, grad)
    truth = module_numbers(exact, lambda x: stock_edge_expert_forward(exact, x), x.double(), grad.double())
    # Parameters' gradients are sums that nearly cancel: torch's error is the larger one of two orders of summation.
    formats = (torch.contiguous_format, torch.channels_last)
    stocks = [
        module_numbers(expert, lambda x: stock_edge_expert_forward(expert, x), x.to(memory_format=memory_format), grad)
        for memory_format in formats
    ]
    stock = [
        max(pair, key=lambda value, true=true: (value.double() - true).abs().max().item())
        for *pair, true in zip(*stocks, truth, strict=True)
    ]
    assert_close_to_reference(ours, stock, truth)


@on_device
def test_expert_state_dict():
    expert = cx.nn.EdgeExpert(8)
    branches = ("sobel_branch", "laplacian_branch", "gradient_branch", "spatial_branch", "fusion")
    names = [f"{name}_base" for name in ("sobel_x", "sobel_y", "laplacian")]
    names += [f"{branch}.{layer}.{kind}" for branch in branches for layer in (0, 1) for kind in ("weight", "bias")]
    assert list(expert.state_dict()) == names
    assert all(isinstance(getattr(expert, branch)[0], torch.nn.Conv2d) for branch in branches)
    assert expert.sobel_x_base.shape == (1, 1, 3, 3)
    other = cx.nn.EdgeExpert(8)
    other.load_state_dict(expert.state_dict(), strict=True)
    x = random_image((1, 8, 5, 5))
    assert torch.equal(other(x), expert(x))


@pytest.mark.parametrize("dim", [0, 6, -4])
def test_expert_errors(dim):
    with pytest.raises(ValueError, match=f"EdgeExpert: dim must be a positive multiple of 4, got {dim}"):
        cx.nn.EdgeExpert(dim)
