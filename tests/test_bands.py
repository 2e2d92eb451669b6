"""frequency_bands and FrequencyExpert."""

import pytest
import torch
import torch.nn.functional as F
from helpers import FLOATS, LAYOUTS, assert_close_to_reference, assert_one_rounding, module_numbers, picture, run_python
from hypothesis import given
from hypothesis import strategies as st
from test_edge import randomised
from torch.autograd import gradcheck, gradgradcheck
from torch.library import opcheck

import camox_ops as cx
from camox_ops import reference

# Below, at and above vectors of 16 lanes, flat units of 128 columns and 4096 or 8192 elements, lines of 2048 elements.
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


def test_smoke():
    bands = cx.frequency_bands(torch.rand(2, 3, 8, 9))
    assert bands._fields == ("low", "mid", "high")
    assert all(band.shape == (2, 3, 8, 9) and band.dtype == torch.float32 for band in bands)
    assert cx.frequency_bands(torch.rand(2, 3, 8, 9), stacked=True).shape == (2, 12, 8, 9)


def test_known_values():
    x = torch.zeros(1, 1, 7, 7)
    x[0, 0, 3, 3] = 225.0
    low, mid, high = (band[0, 0] for band in cx.frequency_bands(x))
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
    x = picture(shape, layout=layout, kind="offset")
    x[:1, :1] = picture((1, 1, *shape[2:]))  # beside channels without one
    bands = cx.frequency_bands(x)
    for ours, truth in zip(bands[1:], reference.frequency_bands(x.double())[1:], strict=True):
        inside = (ours.double() - truth)[..., 2:-2, 2:-2].abs().max()
        assert inside < 2e-6  # of values near 1 whose pixels are near 1e4
    for ours, plain in zip(bands, cx.frequency_bands(x.contiguous()), strict=True):
        assert torch.equal(ours, plain)


def test_stacked_is_the_bands_and_x():
    for layout in ("contiguous", "channels_last"):
        for shape in ((2, 3, 6, 7), (1, 66, 3, 5)):
            x = picture(shape, layout=layout)
            stacked = cx.frequency_bands(x, stacked=True)
            assert torch.equal(stacked, torch.cat([*cx.frequency_bands(x), x], dim=1))
            memory_format = torch.channels_last if layout == "channels_last" else torch.contiguous_format
            assert stacked.is_contiguous(memory_format=memory_format)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_matches_reference(dtype, layout):
    for shape in SHAPES:
        for kind in ("normal", "offset", "constant"):
            x = picture(shape, dtype, layout, kind)
            ours, same = cx.frequency_bands(x), reference.frequency_bands(x)
            truth = reference.frequency_bands(x.double())
            assert_close_to_reference(ours, same, truth, scale64=x.abs().max().item())
            if dtype in (torch.bfloat16, torch.float16):
                assert_one_rounding(ours, cx.frequency_bands(x.float()))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_grad_matches_reference(dtype, layout):
    for shape in SHAPES:
        for chosen_bits in (0b1111, 0b0111, 0b0001, 0b0010, 0b0100, 0b1000, 0b1101):
            grads = [picture(shape, dtype, "contiguous" if i == 1 else layout, seed=i + 1) for i in range(4)]
            grads = [grad if chosen_bits >> i & 1 else None for i, grad in enumerate(grads)]
            ours = backward(grads, layout == "channels_last")
            same = reference.frequency_bands_backward(*grads)
            truth = reference.frequency_bands_backward(*(None if g is None else g.double() for g in grads))
            assert_close_to_reference(ours, same, truth, scale64=8.0)
            if dtype in (torch.bfloat16, torch.float16):
                assert_one_rounding(ours, backward([None if g is None else g.float() for g in grads]))


def test_grad_of_some_bands():
    x = picture((2, 3, 6, 7), torch.float64).requires_grad_()
    for index, chosen in enumerate(("low", "mid", "high")):
        weight = picture(x.shape, torch.float64, seed=index + 1)
        (ours,) = torch.autograd.grad(getattr(cx.frequency_bands(x), chosen), x, weight)
        (truth,) = torch.autograd.grad(reference.frequency_bands(x)[index], x, weight)
        torch.testing.assert_close(ours, truth)


@pytest.mark.parametrize("stacked", [False, True])
def test_grad(stacked):
    for layout in ("contiguous", "channels_last"):
        x = picture((2, 3, 5, 4), torch.float64, layout).requires_grad_()

        def op(x):
            return cx.frequency_bands(x, stacked=stacked)

        assert gradcheck(op, (x,))
        assert gradgradcheck(op, (x,))


def test_grad_of_the_backward_of_some_bands():
    grads = [picture((1, 2, 4, 5), torch.float64, seed=i).requires_grad_() for i in range(4)]
    for chosen_bits in (0b1111, 0b0101, 0b1000):
        chosen = [grad if chosen_bits >> i & 1 else None for i, grad in enumerate(grads)]
        inputs = [grad for grad in chosen if grad is not None]

        def op(*some, chosen=chosen):
            rest = iter(some)
            return backward([None if grad is None else next(rest) for grad in chosen])

        assert gradcheck(op, inputs)


def test_grad_where_pixels_are_not_finite():
    x = picture((1, 1, 6, 6))
    x[0, 0, 3, 3] = float("nan")
    x.requires_grad_()
    (grad,) = torch.autograd.grad(cx.frequency_bands(x).mid.sum(), x)
    assert grad.isfinite().all()  # linear: x takes no part in its gradient


def test_saves_nothing():
    x = torch.rand(2, 3, 8, 8, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        cx.frequency_bands(x)
        cx.frequency_bands(x, stacked=True)
    assert saved == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_noncontiguous(layout):
    for shape in ((2, 3, 6, 9), (2, 70, 5, 6)):
        x = picture(shape, layout=layout)
        plain = x.clone(memory_format=torch.contiguous_format)
        memory_format = torch.channels_last if layout == "channels_last" else torch.contiguous_format
        for ours, expected in zip(cx.frequency_bands(x), cx.frequency_bands(plain), strict=True):
            assert torch.equal(ours, expected)
            assert ours.is_contiguous(memory_format=memory_format)
        leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        (grad,) = torch.autograd.grad(cx.frequency_bands(leaf).mid.square().sum(), leaf)
        leaf_plain = plain.detach().requires_grad_()
        (expected,) = torch.autograd.grad(cx.frequency_bands(leaf_plain).mid.square().sum(), leaf_plain)
        assert torch.equal(grad, expected)
    x = torch.rand(7, 4, 6, 3).transpose(0, 3)
    assert torch.equal(cx.frequency_bands(x).mid, cx.frequency_bands(x.contiguous()).mid)
    sliced = torch.rand(2, 8, 9, 9).to(memory_format=torch.channels_last)[:, :, 1:8]
    assert torch.equal(cx.frequency_bands(sliced).high, cx.frequency_bands(sliced.contiguous()).high)
    x = torch.rand(2, 3, 4, 5, requires_grad=True)
    cx.frequency_bands(x).low.sum().backward()  # a gradient whose strides are all 0
    (expected,) = torch.autograd.grad(cx.frequency_bands(x).low, x, torch.ones(2, 3, 4, 5))
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("shape", [(0, 3, 4, 4), (2, 0, 4, 4), (2, 3, 0, 4), (2, 3, 4, 0)])
def test_shapes_empty(shape):
    x = torch.rand(shape, requires_grad=True)
    assert all(band.shape == shape for band in cx.frequency_bands(x))
    stacked = cx.frequency_bands(x, stacked=True)
    assert stacked.shape == (shape[0], 4 * shape[1], *shape[2:])
    stacked.sum().backward()
    assert x.grad.shape == shape


@given(
    st.tuples(st.integers(1, 3), st.integers(1, 70), st.integers(1, 40), st.integers(1, 70)),
    st.sampled_from(LAYOUTS),
    st.sampled_from(FLOATS),
)
def test_shapes(shape, layout, dtype):
    x = picture(shape, dtype, layout)
    truth, same = reference.frequency_bands(x.double()), reference.frequency_bands(x)
    assert_close_to_reference(cx.frequency_bands(x), same, truth, scale64=x.abs().max().item())


@given(
    st.tuples(st.integers(1, 3), st.integers(1, 70), st.integers(1, 40), st.integers(1, 70)),
    st.sampled_from(LAYOUTS),
    st.sampled_from(FLOATS),
    st.integers(1, 15),
)
def test_shapes_of_the_backward(shape, layout, dtype, chosen_bits):
    grads = [picture(shape, dtype, layout, seed=i) if chosen_bits >> i & 1 else None for i in range(4)]
    truth = reference.frequency_bands_backward(*(None if grad is None else grad.double() for grad in grads))
    same = reference.frequency_bands_backward(*grads)
    assert_close_to_reference(backward(grads, layout == "channels_last"), same, truth, scale64=8.0)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_threads_do_not_change_bits(threads):
    for layout in ("contiguous", "channels_last"):
        x = picture((3, 17, 170, 33), layout=layout)
        grads = [picture(x.shape, seed=i) for i in range(4)]
        expected, expected_grad = cx.frequency_bands(x), backward(grads)
        torch.set_num_threads(threads)
        assert all(torch.equal(a, b) for a, b in zip(cx.frequency_bands(x), expected, strict=True))
        assert torch.equal(backward(grads), expected_grad)
        torch.set_num_threads(2)


ISA_CODE = """
import hashlib, sys, torch
sys.path.insert(0, {tests!r})
import camox_ops as cx
from helpers import FLOATS, picture
digest = hashlib.sha256()
for dtype in FLOATS:
    for layout in ("contiguous", "channels_last"):
        for shape in ((2, 3, 13, 35), (1, 66, 5, 19), (1, 2, 6, 600)):
            x = picture(shape, dtype, layout)
            x[:, 1:] += 1e3
            x[0, 0, 1, 5] = float("inf")
            grads = [picture(shape, dtype, seed=i) for i in range(4)]
            for y in (*cx.frequency_bands(x), torch.ops.camox_ops.frequency_bands_backward(*grads, False)):
                digest.update(y.nan_to_num(nan=7.0).contiguous().view(torch.uint8).numpy().tobytes())
print(cx.isa(), digest.hexdigest())
"""


def test_isa_agree(pytestconfig):
    code = ISA_CODE.format(tests=str(pytestconfig.rootpath / "tests"))
    results = [run_python(code, CAMOX_FORCE_ISA=isa).split() for isa in cx.supported_isas()]
    assert [name for name, _ in results] == cx.supported_isas()
    assert len({digest for _, digest in results}) == 1


SMALL_STACK = """
import threading, torch
import camox_ops as cx

def work():
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for shape, layout in (((1, 2, 6, 2100), torch.contiguous_format), ((1, 140, 6, 40), torch.channels_last)):
            x = torch.rand(shape, dtype=dtype).contiguous(memory_format=layout).requires_grad_()
            bands = cx.frequency_bands(x)
            torch.autograd.grad(bands, x, bands)
            strided = [torch.rand(*shape[:3], 2 * shape[3], dtype=dtype)[..., ::2]] * 4
            torch.ops.camox_ops.frequency_bands_backward(*strided, False)
    print("done")

threading.stack_size(256 << 10)
torch.set_num_threads(1)
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


def test_small_stacks_of_threads():
    assert run_python(SMALL_STACK).split() == ["done"]


@pytest.mark.parametrize("values", [("nan", "nan"), ("inf", "inf"), ("-inf", "-inf"), ("inf", "-inf"), ("nan", "inf")])
def test_nan_and_inf_as_in_avg_pool2d(values):
    for layout in ("contiguous", "channels_last"):
        x = picture((1, 2, 9, 40), layout=layout)
        x[0, 0, 4, 17], x[0, 0, 5, 19] = float(values[0]), float(values[1])
        x[0, 1, 0, 0], x[0, 1, 8, 39] = float(values[0]), float(values[1])
        for ours, theirs in zip(cx.frequency_bands(x), reference.frequency_bands(x), strict=True):
            torch.testing.assert_close(ours, theirs, equal_nan=True, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_opcheck(dtype, layout):
    x = picture((2, 3, 5, 4), dtype, layout).requires_grad_()
    grad = picture((2, 3, 5, 4), dtype).requires_grad_()
    opcheck(torch.ops.camox_ops.frequency_bands.default, (x,))
    opcheck(torch.ops.camox_ops.frequency_bands_stacked.default, (x,))
    opcheck(torch.ops.camox_ops.frequency_bands_backward.default, (grad, None, grad, None, layout == "channels_last"))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic):
    def step(x):
        return cx.frequency_bands(x, stacked=True).square().mean() + cx.frequency_bands(x).mid.square().sum()

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
        return sum((band**3).sum() for band in cx.frequency_bands(x))

    def truth(x):
        return sum((band**3).sum() for band in reference.frequency_bands(x))

    torch.testing.assert_close(torch.func.grad(loss)(xs[0]), torch.func.grad(truth)(xs[0]))
    torch.testing.assert_close(torch.vmap(torch.func.grad(loss))(xs), torch.vmap(torch.func.grad(truth))(xs))
    y, pullback = torch.func.vjp(lambda x: cx.frequency_bands(x, stacked=True), xs[0])
    weight = picture(y.shape, torch.float64, seed=1)
    x = xs[0].clone().requires_grad_()
    (expected,) = torch.autograd.grad(cx.frequency_bands(x, stacked=True), x, weight)
    torch.testing.assert_close(pullback(weight)[0], expected)
    by_dim = torch.vmap(lambda x: cx.frequency_bands(x, stacked=True), in_dims=2)(xs.movedim(0, 2))
    torch.testing.assert_close(by_dim, torch.stack([cx.frequency_bands(x, stacked=True) for x in xs]))

    def norm_of_grad(f):
        return torch.func.grad(lambda x: (torch.func.grad(f)(x) ** 2).sum())

    torch.testing.assert_close(norm_of_grad(loss)(xs[0]), norm_of_grad(truth)(xs[0]))


def test_grad_of_a_tensor_that_outlived_a_transform():
    x, kept = picture((1, 2, 5, 4)).requires_grad_(), []
    torch.func.grad(lambda inner: (kept.append(inner), inner.sum())[1])(x)
    (grad,) = torch.autograd.grad(cx.frequency_bands(kept[0]).high.sum(), x)
    (expected,) = torch.autograd.grad(cx.frequency_bands(x).high.sum(), x)
    torch.testing.assert_close(grad, expected, rtol=0, atol=0)


def test_autocast_keeps_dtype():
    with torch.autocast("cpu", torch.bfloat16):
        assert cx.frequency_bands(torch.rand(1, 2, 4, 4)).low.dtype == torch.float32
        assert cx.frequency_bands(torch.rand(1, 2, 4, 4).bfloat16()).low.dtype == torch.bfloat16


def test_checkpointing():
    def loss(x):
        return cx.frequency_bands(x).mid.square().sum()

    x = picture((1, 2, 6, 6)).requires_grad_()
    (expected,) = torch.autograd.grad(loss(x), x)
    y = torch.utils.checkpoint.checkpoint(loss, x, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(y, x)[0], expected)


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
    with pytest.raises(ValueError, match=r"frequency_bands: x must have 4 dimensions \(B, C, H, W\), got 3"):
        op.frequency_bands(x[0])
    with pytest.raises(ValueError, match="frequency_bands: dtype must be float32"):
        op.frequency_bands_stacked(x.long())
    with pytest.raises(ValueError, match="frequency_bands_backward: grad_high has size 5 in dimension 3, expected 4"):
        op.frequency_bands_backward(x, None, torch.zeros(1, 2, 3, 5), None, False)
    with pytest.raises(ValueError, match="frequency_bands_backward: grad_mid must have the dtype of x"):
        op.frequency_bands_backward(x, x.double(), None, None, False)


def test_forward_mode_is_refused():
    x = torch.rand(1, 1, 4, 4)
    with pytest.raises(NotImplementedError, match="frequency_bands: forward-mode AD is not implemented"):
        torch.func.jvp(lambda x: cx.frequency_bands(x).low, (x,), (x,))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="x carries a tangent"):
        cx.frequency_bands(torch.autograd.forward_ad.make_dual(x, x))


@pytest.mark.big
@pytest.mark.slow
def test_offsets_past_32_bits():
    """A picture whose rows lie further apart than 2^31 elements, in memory that is mapped, not touched elsewhere."""
    apart = 2**31 + 5
    storage = torch.empty(2 * apart + 64, dtype=torch.bfloat16)
    x = storage.as_strided((1, 1, 3, 8), (1, 1, apart, 1))
    x.copy_(picture((1, 1, 3, 8), torch.bfloat16))
    assert torch.equal(cx.frequency_bands(x).mid, cx.frequency_bands(x.contiguous()).mid)


def stock_frequency_expert_forward(expert, x):
    """The public module's forward from its formula: poolings, four branches, cat, fusion, plus x."""

    def branch(layers, y):
        y = layers[0](y).movedim(1, -1)
        return F.gelu(F.layer_norm(y, y.shape[-1:], layers[1].weight, layers[1].bias, layers[1].eps)).movedim(-1, 1)

    branches = (expert.low_freq_conv, expert.mid_freq_conv, expert.high_freq_conv, expert.spatial_conv)
    maps = (*reference.frequency_bands(x), x)
    features = torch.cat([branch(layers, y) for layers, y in zip(branches, maps, strict=True)], dim=1)
    return branch(expert.fusion, features) + x


@pytest.mark.parametrize("shape", [(2, 24, 6, 7), (1, 48, 14, 14), (3, 16, 1, 5)])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_expert_matches_reference(shape, layout):
    expert = randomised(cx.nn.FrequencyExpert(shape[1]))
    exact = randomised(cx.nn.FrequencyExpert(shape[1])).double()
    x, grad = picture(shape, layout=layout), picture(shape, seed=1)

    ours = module_numbers(expert, expert, x, grad)
    stock = module_numbers(expert, lambda x: stock_frequency_expert_forward(expert, x), x, grad)
    truth = module_numbers(exact, lambda x: stock_frequency_expert_forward(exact, x), x.double(), grad.double())
    assert_close_to_reference(ours, stock, truth)


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
    x = picture((1, 16, 5, 5))
    assert torch.equal(other(x), expert(x))


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
    x = picture((2, 16, 6, 7), of_x).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = expert(x)
        # the public LayerNorm2d multiplies by its parameters, which promotes to their dtype
        assert (
            y.dtype == torch.promote_types(torch.promote_types(of_module, expert.fusion[0](x).dtype), of_x) == expected
        )
    y.float().sum().backward()
    assert x.grad.dtype == of_x
    assert all(parameter.grad.dtype == of_module for parameter in expert.parameters())
    with torch.no_grad():
        truth = stock_frequency_expert_forward(expert.double(), x.double())
    assert (y.double() - truth).abs().max() <= (0.15 if torch.bfloat16 in (of_x, of_module) or autocast else 1e-5)


def test_expert_of_no_pictures():
    x = torch.rand(0, 16, 4, 5, requires_grad=True)
    y = cx.nn.FrequencyExpert(16)(x)
    assert y.shape == x.shape
    y.sum().backward()
    assert x.grad.shape == x.shape


def test_expert_compiles():
    expert = randomised(cx.nn.FrequencyExpert(16))
    x = picture((2, 16, 6, 7)).requires_grad_()
    expected = expert(x)
    (expected_grad,) = torch.autograd.grad(expected.square().sum(), x)
    y = torch.compile(expert, fullgraph=True)(x)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(torch.autograd.grad(y.square().sum(), x)[0], expected_grad, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("dim", [0, 6, -4])
def test_expert_errors(dim):
    with pytest.raises(ValueError, match=f"FrequencyExpert: dim must be a positive multiple of 4, got {dim}"):
        cx.nn.FrequencyExpert(dim)
