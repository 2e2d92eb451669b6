"""spatial_gradient."""

import itertools

import pytest
import torch
from helpers import FLOATS, LAYOUTS, assert_close_to_reference, assert_one_rounding, on_small_stack, picture, run_python
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck
from torch.library import opcheck

import camox_ops as cx
from camox_ops import reference

BORDERS = ("zeros", "replicate", "reflect")
OPERATORS = ("sobel", "scharr")
SIDE_AND_MIDDLE = {"sobel": (1.0, 2.0), "scharr": (3.0, 10.0)}
# Below, at and above vector and tile widths: 16 lanes, 512 columns, or 16 columns and 32 channels, of a strip.
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


def test_smoke():
    gx, gy = cx.spatial_gradient(torch.rand(2, 3, 8, 9))
    assert gx.shape == gy.shape == (2, 3, 8, 9)
    assert gx.dtype == gy.dtype == torch.float32


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
    x = picture((2, 3, 20, 40), kind="offset")
    for ours, truth in zip(cx.spatial_gradient(x), reference.spatial_gradient(x.double()), strict=True):
        assert (ours.double() - truth)[..., 1:-1, 1:-1].abs().max() < 4e-6  # of values near 4, pixels near 1e4


@pytest.mark.parametrize("border", BORDERS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_matches_reference(dtype, layout, border):
    for shape, operator, normalized in itertools.product(SHAPES, OPERATORS, (False, True)):
        if not reachable(shape, border):
            continue
        kind = ("normal", "offset", "constant")[sum(shape) % 3]
        if dtype == torch.float16 and kind == "offset" and not normalized:
            continue  # ten times 1e4 is past float16's largest number
        x = picture(shape, dtype, layout, kind)
        ours = cx.spatial_gradient(x, operator=operator, border=border, normalized=normalized)
        same = reference.spatial_gradient(x, operator, border, normalized)
        truth = reference.spatial_gradient(x.double(), operator, border, normalized)
        assert_close_to_reference(ours, same, truth, scale64=32 * x.abs().max().item())
        if dtype in (torch.bfloat16, torch.float16):
            exact = cx.spatial_gradient(x.float(), operator=operator, border=border, normalized=normalized)
            assert_one_rounding(ours, exact)


@pytest.mark.parametrize("border", BORDERS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_grad_matches_reference(dtype, layout, border):
    for shape, operator in itertools.product(SHAPES, OPERATORS):
        if not reachable(shape, border):
            continue
        for given_ in ((True, True), (True, False), (False, True)):
            grads = [picture(shape, dtype, "contiguous" if i else layout, seed=i) for i in range(2)]
            grads = [grad if here else None for grad, here in zip(grads, given_, strict=True)]
            ours = backward(grads, operator, border, layout == "channels_last")
            same = reference.spatial_gradient_backward(*grads, operator, border)
            wide = [None if grad is None else grad.double() for grad in grads]
            truth = reference.spatial_gradient_backward(*wide, operator, border)
            assert_close_to_reference(ours, same, truth, scale64=128.0)
            if dtype in (torch.bfloat16, torch.float16):
                exact = backward([None if grad is None else grad.float() for grad in grads], operator, border)
                assert_one_rounding(ours, exact)


@pytest.mark.parametrize("border", BORDERS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_grad(operator, border):
    for layout in ("contiguous", "channels_last"):
        x = picture((2, 3, 5, 4), torch.float64, layout).requires_grad_()

        def op(x):
            return cx.spatial_gradient(x, operator=operator, border=border, normalized=True)

        assert gradcheck(op, (x,))
        assert gradgradcheck(op, (x,))


def test_grad_of_one_output():
    x = picture((2, 3, 6, 7), torch.float64).requires_grad_()
    for index in range(2):
        (ours,) = torch.autograd.grad(cx.spatial_gradient(x)[index].square().sum(), x)
        (truth,) = torch.autograd.grad(reference.spatial_gradient(x)[index].square().sum(), x)
        torch.testing.assert_close(ours, truth)


def test_grad_of_the_backward():
    grads = [picture((1, 2, 4, 5), torch.float64, seed=i).requires_grad_() for i in range(2)]
    assert gradcheck(lambda gx, gy: backward((gx, gy), border="reflect"), grads)
    assert gradcheck(lambda gy: backward((None, gy), border="replicate"), grads[1])


def test_saves_nothing():
    x = torch.rand(2, 3, 8, 8, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        cx.spatial_gradient(x)
    assert saved == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_noncontiguous(layout):
    for shape in ((2, 3, 6, 9), (2, 70, 5, 6)):
        x = picture(shape, layout=layout)
        plain = x.clone(memory_format=torch.contiguous_format)
        memory_format = torch.channels_last if layout == "channels_last" else torch.contiguous_format
        for ours, expected in zip(cx.spatial_gradient(x), cx.spatial_gradient(plain), strict=True):
            assert torch.equal(ours, expected)
            assert ours.is_contiguous(memory_format=memory_format)
    x = torch.rand(7, 4, 6, 3).transpose(0, 3)
    assert torch.equal(cx.spatial_gradient(x)[0], cx.spatial_gradient(x.contiguous())[0])
    sliced = torch.rand(2, 8, 9, 9).to(memory_format=torch.channels_last)[:, :, 1:8]
    assert torch.equal(cx.spatial_gradient(sliced)[1], cx.spatial_gradient(sliced.contiguous())[1])
    x = torch.rand(2, 3, 4, 5, requires_grad=True)
    cx.spatial_gradient(x)[0].sum().backward()  # a gradient whose strides are all 0
    (expected,) = torch.autograd.grad(cx.spatial_gradient(x)[0], x, torch.ones(2, 3, 4, 5))
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("shape", [(0, 3, 4, 4), (2, 0, 4, 4), (2, 3, 0, 4), (2, 3, 4, 0)])
@pytest.mark.parametrize("border", BORDERS)
def test_shapes_empty(shape, border):
    x = torch.rand(shape, requires_grad=True)
    gx, gy = cx.spatial_gradient(x, border=border)
    assert gx.shape == gy.shape == shape
    (gx + gy).sum().backward()
    assert x.grad.shape == shape


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
    x = picture(shape, dtype, layout)
    truth = reference.spatial_gradient(x.double(), operator, border)
    same = reference.spatial_gradient(x, operator, border)
    ours = cx.spatial_gradient(x, operator=operator, border=border)
    assert_close_to_reference(ours, same, truth, scale64=32 * x.abs().max().item())


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_threads_do_not_change_bits(threads):
    for layout in ("contiguous", "channels_last"):
        channels_last = layout == "channels_last"
        x = picture((3, 17, 170, 33), layout=layout)
        grads = [picture(x.shape, seed=i) for i in range(2)]
        expected, expected_grad = cx.spatial_gradient(x), backward(grads, "sobel", "reflect", channels_last)
        torch.set_num_threads(threads)
        assert all(torch.equal(a, b) for a, b in zip(cx.spatial_gradient(x), expected, strict=True))
        assert torch.equal(backward(grads, "sobel", "reflect", channels_last), expected_grad)
        torch.set_num_threads(2)


@pytest.mark.parametrize("channels", [1, 3, 8, 32, 200])
@pytest.mark.parametrize("border", ["replicate", "reflect"])
def test_a_last_tile_of_one_column(channels, border):
    """channels_last tiles have 16 columns: at widths of 16k+1 the border folds into the tile before the last one."""
    for width in (17, 33, 49, 65, 129, 257):
        for height in (2, 5):
            shape = (2, channels, height, width)
            x, grads = picture(shape), [picture(shape, seed=i) for i in range(1, 3)]
            expected, expected_grad = cx.spatial_gradient(x, border=border), backward(grads, border=border)
            truth = reference.spatial_gradient_backward(*(grad.double() for grad in grads), "sobel", border)
            assert_close_to_reference(expected_grad, expected_grad, truth)
            for threads in (1, 2):
                torch.set_num_threads(threads)
                ours = cx.spatial_gradient(x.to(memory_format=torch.channels_last), border=border)
                assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
                assert torch.equal(backward(grads, border=border, channels_last=True), expected_grad)


def test_small_stack():
    assert run_python(on_small_stack("spatial_gradient")) == "done\n"


ISA_CODE = """
import hashlib, sys, torch
sys.path.insert(0, {tests!r})
import camox_ops as cx
from helpers import FLOATS, picture
digest = hashlib.sha256()
for dtype in FLOATS:
    for layout in ("contiguous", "channels_last"):
        for shape in ((2, 3, 13, 35), (1, 66, 4, 19), (1, 1, 3, 600)):
            for code, border in enumerate(("zeros", "replicate", "reflect")):
                x = picture(shape, dtype, layout)
                grads = [picture(shape, dtype, seed=i) for i in range(2)]
                for y in (*cx.spatial_gradient(x, operator="scharr", border=border, normalized=True),
                          torch.ops.camox_ops.spatial_gradient_backward(*grads, 3.0, 10.0, code, False)):
                    digest.update(y.contiguous().view(torch.uint8).numpy().tobytes())
print(cx.isa(), digest.hexdigest())
"""


def test_isa_agree(pytestconfig):
    code = ISA_CODE.format(tests=str(pytestconfig.rootpath / "tests"))
    results = [run_python(code, CAMOX_FORCE_ISA=isa).split() for isa in cx.supported_isas()]
    assert [name for name, _ in results] == cx.supported_isas()
    assert len({digest for _, digest in results}) == 1


@pytest.mark.parametrize("values", [("nan", "nan"), ("inf", "inf"), ("-inf", "-inf"), ("inf", "-inf")])
def test_nan_and_inf_as_in_a_convolution(values):
    for layout in ("contiguous", "channels_last"):
        x = picture((1, 2, 6, 20), layout=layout)
        x[0, 0, 2, 7], x[0, 0, 3, 9] = float(values[0]), float(values[1])
        x[0, 1, 0, 0] = float(values[0])
        for ours, theirs in zip(cx.spatial_gradient(x), reference.spatial_gradient(x), strict=True):
            torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_opcheck(dtype, layout):
    x = picture((2, 3, 5, 4), dtype, layout).requires_grad_()
    grad = picture((2, 3, 5, 4), dtype).requires_grad_()
    opcheck(torch.ops.camox_ops.spatial_gradient.default, (x, 1.0, 2.0, 2))
    opcheck(
        torch.ops.camox_ops.spatial_gradient_backward.default,
        (grad, None, 3.0, 10.0, 1, layout == "channels_last"),
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic):
    def step(x):
        gx, gy = cx.spatial_gradient(x, operator="scharr", border="reflect")
        return (gx * gy).square().mean()

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)
    shapes = ((2, 3, 8, 9), (1, 4, 7, 6), (3, 2, 5, 12)) if dynamic else ((2, 3, 8, 9),)
    for shape in shapes:
        for layout in ("contiguous", "channels_last"):
            x = picture(shape, layout=layout).requires_grad_()
            expected = step(x)
            (expected_grad,) = torch.autograd.grad(expected, x)
            torch.testing.assert_close(compiled(x), expected)
            (grad,) = torch.autograd.grad(compiled(x), x)
            torch.testing.assert_close(grad, expected_grad)


def test_func_transforms():
    xs = picture((4, 3, 5, 4), torch.float64).unsqueeze(1)

    def loss(x):
        return sum((g**3).sum() for g in cx.spatial_gradient(x, border="replicate"))

    def truth(x):
        return sum((g**3).sum() for g in reference.spatial_gradient(x, border="replicate"))

    torch.testing.assert_close(torch.func.grad(loss)(xs[0]), torch.func.grad(truth)(xs[0]))
    torch.testing.assert_close(torch.vmap(torch.func.grad(loss))(xs), torch.vmap(torch.func.grad(truth))(xs))
    by_dim = torch.vmap(lambda x: cx.spatial_gradient(x)[0], in_dims=2)(xs.movedim(0, 2))
    torch.testing.assert_close(by_dim, torch.stack([cx.spatial_gradient(x)[0] for x in xs]))

    def norm_of_grad(f):
        return torch.func.grad(lambda x: (torch.func.grad(f)(x) ** 2).sum())

    torch.testing.assert_close(norm_of_grad(loss)(xs[0]), norm_of_grad(truth)(xs[0]))


def test_autocast_keeps_dtype():
    with torch.autocast("cpu", torch.bfloat16):
        assert cx.spatial_gradient(torch.rand(1, 2, 4, 4))[0].dtype == torch.float32
        assert cx.spatial_gradient(torch.rand(1, 2, 4, 4).bfloat16())[0].dtype == torch.bfloat16


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
    with pytest.raises(ValueError, match="spatial_gradient: weights must be finite, got side inf and middle 2"):
        op.spatial_gradient(x, float("inf"), 2.0, 0)
    with pytest.raises(ValueError, match="spatial_gradient: unknown border code -1"):
        op.spatial_gradient(x, 1.0, 2.0, -1)
    with pytest.raises(ValueError, match="'reflect' needs sides of at least 2, got x with H=1, W=4"):
        op.spatial_gradient(x, 1.0, 2.0, 2)
    with pytest.raises(ValueError, match="x must have 4 dimensions"):
        op.spatial_gradient(x[0], 1.0, 2.0, 0)
    with pytest.raises(ValueError, match="dtype must be float32, bfloat16, float16 or float64"):
        op.spatial_gradient(x.int(), 1.0, 2.0, 0)
    with pytest.raises(ValueError, match="grad_gy has size 5 in dimension 3, expected 4"):
        op.spatial_gradient_backward(x, torch.zeros(1, 2, 1, 5), 1.0, 2.0, 0, False)
    with pytest.raises(ValueError, match="grad_gy must have the dtype of x"):
        op.spatial_gradient_backward(x, x.double(), 1.0, 2.0, 0, False)


def test_forward_mode_is_refused():
    x = torch.rand(1, 1, 4, 4)
    with pytest.raises(NotImplementedError, match="spatial_gradient: forward-mode AD is not implemented"):
        torch.func.jvp(lambda x: cx.spatial_gradient(x)[0], (x,), (x,))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="x carries a tangent"):
        cx.spatial_gradient(torch.autograd.forward_ad.make_dual(x, x))


@pytest.mark.big
@pytest.mark.slow
def test_offsets_past_32_bits():
    """A picture whose rows lie further apart than 2^31 elements, in memory that is mapped, not touched elsewhere."""
    apart = 2**31 + 5
    storage = torch.empty(2 * apart + 64, dtype=torch.bfloat16)
    x = storage.as_strided((1, 1, 3, 8), (1, 1, apart, 1))
    x.copy_(picture((1, 1, 3, 8), torch.bfloat16))
    assert torch.equal(cx.spatial_gradient(x)[1], cx.spatial_gradient(x.contiguous())[1])
