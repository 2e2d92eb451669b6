"""linear_cross_entropy."""

import math
import sys

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    DEVICE,
    FLOATS,
    REFUSAL,
    TWO_OF_FLOATS,
    assert_close_to_reference,
    assert_one_rounding,
    float64_on_cpu,
    outputs_and_gradients,
    run_python_with_torch,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

import camox_ops as cx
from camox_ops import reference

# (rows, D, classes): around vectors, tiles of 256 x 512 logits, blocks of 4096 rows; sums along D longer than
# 384.
SHAPES = [(1, 1, 1), (5, 7, 9), (3, 400, 17), (256, 8, 512), (257, 33, 513), (40, 16, 1100), (4099, 5, 600)]
REDUCTIONS = ("mean", "sum", "none")


def inputs_of(shape, dtype=torch.float32, biased=False):
    """x, weight, target of which some are ignored, bias or None."""
    rows, depth, classes = shape
    generator = torch.Generator().manual_seed(rows + depth + classes)
    x, weight, bias = (
        torch.randn(size, generator=generator, dtype=torch.float64).to(DEVICE, dtype)
        for size in ((rows, depth), (classes, depth), (classes,))
    )
    target = torch.randint(classes, (rows,), generator=generator).to(DEVICE)
    target[1::3] = -100
    return x, weight, target, bias if biased else None


def loss_and_gradients(function, x, weight, target, bias, reduction="mean", **options):
    """The loss, and the gradients of x, weight and bias from upstream gradients that differ."""
    real = torch.promote_types(x.dtype, torch.float32)
    grad = torch.linspace(1, 2, x.shape[0], dtype=real, device=DEVICE)
    outputs, gradients = outputs_and_gradients(
        lambda x, weight, *bias: function(
            x, weight, target, bias=bias[0] if bias else None, reduction=reduction, **options
        ),
        [x, weight, *([] if bias is None else [bias])],
        [grad if reduction == "none" else grad.new_full((), 2)],
    )
    return [*outputs, *gradients]


def stock(x, weight, target, bias, **options):
    return F.cross_entropy(F.linear(x, weight, bias), target, **options)


def test_known_values():
    """Of equal logits the loss is log V; of logits 0 and log 3 it is log 4/3 and log 4."""
    x, weight = torch.zeros(4, 3), torch.ones(7, 3)
    torch.testing.assert_close(cx.linear_cross_entropy(x, weight, torch.arange(4)), torch.tensor(math.log(7)))
    x, weight, bias = torch.ones(2, 1), torch.zeros(2, 1), torch.tensor([0.0, math.log(3)])
    loss = cx.linear_cross_entropy(x, weight, torch.tensor([1, 0]), bias=bias, reduction="none")
    torch.testing.assert_close(loss, torch.tensor([4 / 3, 4.0]).log())
    smoothed = cx.linear_cross_entropy(x, weight, torch.tensor([1, 0]), bias=bias, label_smoothing=1.0)
    torch.testing.assert_close(smoothed, torch.tensor([4 / 3, 4.0]).log().mean())


def assert_right(dtype, shape, turn):
    """Loss and gradients; turn chooses bias, reduction and smoothing."""
    inputs = inputs_of(shape, dtype, biased=turn % 2 == 1)
    options = {"reduction": REDUCTIONS[turn % 3], "label_smoothing": (0.0, 0.2)[turn // 2 % 2]}
    ours = loss_and_gradients(cx.linear_cross_entropy, *inputs, **options)
    doubles = [t.double() if t is not None and t.is_floating_point() else t for t in inputs]
    same, truth = (
        loss_and_gradients(reference.linear_cross_entropy, *tensors, **options) for tensors in (inputs, doubles)
    )
    for mine, theirs, right in zip(ours, same, truth, strict=True):
        assert_close_to_reference(mine, theirs, right, scale64=8 * right.abs().max().item())
    assert ours[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    if dtype.itemsize == 2 and DEVICE.type == "cpu":
        floats = [t.float() if t is not None and t.is_floating_point() else t for t in inputs]
        for half, single in zip(ours, loss_and_gradients(cx.linear_cross_entropy, *floats, **options), strict=True):
            assert_one_rounding(half, single)


@pytest.mark.parametrize("dtype", FLOATS)
def test_matches_reference(dtype):
    for i, shape in enumerate(SHAPES):
        assert_right(dtype, shape, i)


@pytest.mark.parametrize("dtype", TWO_OF_FLOATS)
def test_matches_reference_of_many_logits(dtype):
    """More than 32 MiB of them, and more classes than a block of 2048."""
    assert_right(dtype, (4000, 3, 2200), 7)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_reference_is_cross_entropy(reduction):
    """In float64, with a bias, smoothing and ignored rows: PyTorch's own two functions."""
    inputs = inputs_of((50, 6, 21), torch.float64, biased=True)
    for options in ({}, {"label_smoothing": 0.3}, {"label_smoothing": 1.0}, {"ignore_index": 4}):
        options = {"reduction": reduction, **options}
        target = inputs[2].clamp(min=4) if "ignore_index" in options else inputs[2]
        given_inputs = (*inputs[:2], target, inputs[3])
        for function in (reference.linear_cross_entropy, *([cx.linear_cross_entropy] if DEVICE.type == "cpu" else [])):
            ours = loss_and_gradients(function, *given_inputs, **options)
            for mine, theirs in zip(ours, loss_and_gradients(stock, *given_inputs, **options), strict=True):
                torch.testing.assert_close(mine, theirs)


@settings(max_examples=20)
@given(
    st.tuples(st.integers(1, 300), st.integers(1, 40), st.integers(1, 700)),
    st.booleans(),
    st.sampled_from(REDUCTIONS),
    st.sampled_from((0.0, 0.1)),
)
def test_shapes(shape, biased, reduction, label_smoothing):
    inputs = inputs_of(shape, biased=biased)
    options = {"reduction": reduction, "label_smoothing": label_smoothing}
    doubles = [t.double() if t is not None and t.is_floating_point() else t for t in inputs]
    ours, same = (
        loss_and_gradients(function, *inputs, **options)
        for function in (cx.linear_cross_entropy, reference.linear_cross_entropy)
    )
    truth = loss_and_gradients(reference.linear_cross_entropy, *doubles, **options)
    for mine, theirs, right in zip(ours, same, truth, strict=True):
        assert_close_to_reference(mine, theirs, right, scale64=4 * right.abs().max().item())


@float64_on_cpu
def test_grad():
    for reduction in REDUCTIONS:
        x, weight, target, bias = inputs_of((5, 3, 7), torch.float64, biased=True)
        options = {"reduction": reduction, "label_smoothing": 0.2}
        assert gradcheck(
            lambda x, w, b, t=target, o=options: cx.linear_cross_entropy(x, w, t, bias=b, **o),
            [value.requires_grad_() for value in (x, weight, bias)],
        )


def test_inputs_without_gradient_change_no_bit():
    """What needs no gradient is not computed, and changes no bit of the others."""
    x, weight, target, bias = inputs_of((270, 9, 600), biased=True)
    _, *expected = loss_and_gradients(cx.linear_cross_entropy, x, weight, target, bias)
    for needed in range(1, 8):
        leaves = [t.clone().requires_grad_(bool(needed >> i & 1)) for i, t in enumerate((x, weight, bias))]
        (cx.linear_cross_entropy(*leaves[:2], target, bias=leaves[2]) * 2).backward()
        for i, leaf in enumerate(leaves):
            if needed >> i & 1:
                assert torch.equal(leaf.grad, expected[i])
            else:
                assert leaf.grad is None


def test_inputs_without_gradient_of_an_operator_that_made_others():
    """The backward computes all that are needed where the forward did not make each of them."""
    x, weight, target, bias = inputs_of((9, 5, 21), biased=True)
    _, *expected = loss_and_gradients(cx.linear_cross_entropy, x, weight, target, bias, "sum")
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    made = (True, False, False)
    loss, *_ = torch.ops.camox_ops.linear_cross_entropy(x, weight, target, bias, -100, 0.0, 1, *made)
    for ours, right in zip(torch.autograd.grad(2 * loss, leaves), expected, strict=True):
        torch.testing.assert_close(ours, right)


@pytest.mark.parametrize("dtype", [dtype for dtype in FLOATS if dtype != torch.float64])
def test_both_ways_to_the_gradient_agree(dtype):
    """That of the rows' losses added by hand, which the backward makes; again and again, by any upstream gradient,
    rounded once after it: float16 keeps what a scaled loss lifts out of its smallest numbers."""
    x, weight, target, bias = inputs_of((300, 9, 2100), dtype, biased=True)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    loss = cx.linear_cross_entropy(x, weight, target, bias=bias)
    rows = cx.linear_cross_entropy(x, weight, target, bias=bias, reduction="none").sum() / (target != -100).sum()
    for upstream in (1.0, 1 / 3, 2.0**14, 0.0):
        ours, right = (torch.autograd.grad(upstream * y, leaves, retain_graph=True) for y in (loss, rows))
        assert [g.dtype for g in ours] == [t.dtype for t in leaves]
        for mine, true in zip(ours, right, strict=True):
            atol = max(torch.finfo(mine.dtype).eps, 1e-5) * true.abs().max().item()
            torch.testing.assert_close(mine, true, rtol=torch.finfo(mine.dtype).eps, atol=atol)


def test_all_ignored_is_as_in_pytorch():
    x, weight, _, bias = inputs_of((6, 4, 9), biased=True)
    target = torch.full((6,), -100, device=DEVICE)
    for reduction in REDUCTIONS:
        for smoothing in (0.0, 0.1):
            options = {"reduction": reduction, "label_smoothing": smoothing}
            ours = loss_and_gradients(cx.linear_cross_entropy, x, weight, target, bias, **options)
            expected = F.cross_entropy(F.linear(x, weight, bias), target, **options)
            torch.testing.assert_close(ours[0], expected, equal_nan=True)
            assert all((gradient == 0).all() for gradient in ours[1:])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(0, 3, 1100), (0, 0, 600), (7, 0, 600)])
def test_nothing_beside_many_classes(shape, dtype):
    """A weight that is widened is copied without rows too."""
    x, weight, target, bias = inputs_of(shape, dtype, biased=True)
    for matrix in (weight, weight.t().contiguous().t()):
        numbers = loss_and_gradients(cx.linear_cross_entropy, x, matrix, target, bias, "sum")
        assert all(torch.isfinite(number).all() for number in numbers)


def test_empty_rows_are_as_in_pytorch():
    weight, target = torch.randn(5, 3, device=DEVICE), torch.zeros(0, dtype=torch.int64, device=DEVICE)
    for reduction in REDUCTIONS:
        ours = loss_and_gradients(cx.linear_cross_entropy, weight[:0], weight, target, None, reduction)
        expected = F.cross_entropy(F.linear(weight[:0], weight), target, reduction=reduction)
        torch.testing.assert_close(ours[0], expected, equal_nan=True)
        assert (ours[2] == 0).all()


@pytest.mark.parametrize("shape", [(513, 1, 100), (33, 1, 700), (17, 3, 513)])
def test_grad_of_large_logits(shape):
    """Of about a hundred: the logarithm of their sum, rounded, would be off by more than their softmax."""
    x, weight, target, bias = inputs_of(shape, biased=True)
    ours, same, truth = (
        loss_and_gradients(function, 30 * x.to(dtype), weight.to(dtype), target, bias.to(dtype), "sum")
        for function, dtype in (
            (cx.linear_cross_entropy, torch.float32),
            (stock, torch.float32),
            (stock, torch.float64),
        )
    )
    assert_close_to_reference(ours, same, truth)


def test_large_and_masked_logits():
    """Logits of 1e4 lose nothing to overflow, classes of bias -inf have no part; NaN spoils its row alone."""
    x, weight, target, bias = inputs_of((6, 4, 600), biased=True)
    target[:] = 3
    bias[10:] = -math.inf
    for function in (cx.linear_cross_entropy, reference.linear_cross_entropy):
        loss = function(x * 1e4, weight, target, bias=bias, reduction="none")
        truth = stock(x.double() * 1e4, weight.double(), target, bias.double(), reduction="none").float()
        torch.testing.assert_close(loss, truth, rtol=1e-5, atol=1e-2)
    bias[512:], bias[:512] = -math.inf, -1000.0  # a tile of classes that take no part, beside logits far below 0
    ours, truth = (
        loss_and_gradients(function, *(t.to(dtype) for t in (x, weight)), target, bias.to(dtype), "mean")
        for function, dtype in ((cx.linear_cross_entropy, torch.float32), (stock, torch.float64))
    )
    for mine, right in zip(ours, truth, strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=1e-4, atol=1e-5)
    x[2, 0] = math.nan
    ours, _ = outputs_and_gradients(
        lambda x: cx.linear_cross_entropy(x, weight, target, bias=bias, reduction="none"),
        [x],
        [torch.ones(6, device=DEVICE)],
    )
    assert ours[0].isnan().tolist() == [False, False, True, False, False, False]


def test_weight_of_float32_beside_half():
    """x is read as float32, and its gradient has its dtype."""
    x, weight, target, _ = inputs_of((9, 12, 30), torch.bfloat16)
    ours = loss_and_gradients(cx.linear_cross_entropy, x, weight.float(), target, None)
    expected = loss_and_gradients(cx.linear_cross_entropy, x.float(), weight.float(), target, None)
    assert [t.dtype for t in ours] == [torch.float32, torch.bfloat16, torch.float32]
    assert torch.equal(ours[0], expected[0])
    assert torch.equal(ours[2], expected[2])


PEAK = """
import re
import torch
import torch.nn.functional as F
import camox_ops as cx

torch.set_num_threads(2)
rows, depth, classes = {shape}
x, weight = torch.randn(rows, depth, requires_grad=True), torch.randn(classes, depth, requires_grad=True)
target = torch.randint(classes, (rows,))


def peak():  # in KiB; getrusage has that of the process that started this one too
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])


small = cx.linear_cross_entropy(x[:1], weight[:8], target[:1] * 0)
small.backward()
before = peak()
if "{side}" == "ours":
    loss = cx.linear_cross_entropy(x, weight, target)
else:
    loss = F.cross_entropy(F.linear(x, weight), target)
loss.backward()
print(peak() - before)
"""


@pytest.mark.skipif(DEVICE.type != "cpu" or sys.platform != "linux", reason="asks Linux for the process's memory")
def test_peak_memory_is_that_of_a_block_of_logits():
    """Of this many logits, 100 MB of float32, eager keeps several; gradients take 3 MB."""
    peaks = {}
    for side in ("ours", "eager"):
        peaks[side] = int(run_python_with_torch(PEAK.format(shape=(2048, 32, 12800), side=side)))
    assert peaks["eager"] > 190_000
    assert peaks["ours"] < 0.15 * peaks["eager"], peaks


@pytest.mark.skipif(DEVICE.type != "cuda", reason="asks the CUDA allocator")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peak_memory_on_cuda_is_that_of_a_block_of_logits(dtype):
    rows, depth, classes = 4096, 256, 32000
    x, weight = (torch.randn(n, depth, device=DEVICE, dtype=dtype, requires_grad=True) for n in (rows, classes))
    target = torch.randint(classes, (rows,), device=DEVICE)
    peaks = {}
    for side, function in (("ours", cx.linear_cross_entropy), ("eager", lambda *inputs: stock(*inputs, None))):
        function(x[:128], weight, target[:128]).backward()  # cuBLAS takes its workspace
        x.grad = weight.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function(x, weight, target).backward()
        peaks[side] = torch.cuda.max_memory_allocated() - before
        x.grad = weight.grad = None
    assert peaks["ours"] < 0.15 * peaks["eager"], peaks


X, W, T = torch.zeros(4, 3), torch.zeros(5, 3), torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("x", "weight", "target", "options", "error", "message"),
    [
        ([1], W, T, {}, TypeError, "x must be a torch.Tensor, got list"),
        (X[0], W, T, {}, ValueError, r"x must have 2 dimensions, got shape \(3,\)"),
        (X.long(), W, T, {}, TypeError, "x must have dtype .*, got int64"),
        (X, W[:, :2], T, {}, ValueError, r"weight must have shape \(V, 3\), .* got \(5, 2\)"),
        (X, W.half(), T, {}, TypeError, "weight must have dtype float32, got float16"),
        (X, W.to("meta"), T, {}, ValueError, "weight must be on the device of x, cpu, got meta"),
        (X, W, T[1:], {}, ValueError, r"target must have shape \(4,\), .* got \(3,\)"),
        (X, W, T.int(), {}, TypeError, "target must have dtype int64, got int32"),
        (X, W, T, {"bias": W[0]}, ValueError, r"bias must have shape \(5,\), .* got \(3,\)"),
        (X, W, T, {"bias": W[:, 0].double()}, TypeError, "bias must have dtype float32, got float64"),
        (X, W, T, {"ignore_index": 1.5}, TypeError, "ignore_index must be an int, got 1.5"),
        (X, W, T, {"label_smoothing": 1.5}, ValueError, r"label_smoothing must be in \[0, 1\], got 1.5"),
        (X, W, T, {"label_smoothing": math.nan}, ValueError, r"label_smoothing must be in \[0, 1\], got nan"),
        (X, W, T, {"label_smoothing": "1"}, TypeError, "label_smoothing must be a number, got '1'"),
        (X, W, T, {"reduction": "batchmean"}, ValueError, "reduction must be one of .*, got 'batchmean'"),
    ],
)
def test_errors(x, weight, target, options, error, message):
    with pytest.raises(error, match="linear_cross_entropy: " + message):
        cx.linear_cross_entropy(x, weight, target, **options)


def test_errors_of_a_target_that_is_no_class():
    for wrong in (5, -1, 2**40):
        target = torch.tensor([0, -100, wrong, 1])
        with pytest.raises(
            ValueError, match=rf"linear_cross_entropy: target must be in \[0, 5\) .* got {wrong} in row 2"
        ):
            cx.linear_cross_entropy(X, W, target)
    assert cx.linear_cross_entropy(X, W, torch.tensor([0, 7, 2, 1]), ignore_index=7).isfinite()


def test_errors_from_c():
    op, grad, zeros = torch.ops.camox_ops, torch.ones(()), torch.zeros(4)
    options = (None, -100, 0.0)
    made = (True, True, False)
    with pytest.raises(REFUSAL, match="linear_cross_entropy: weight must have 3 columns as x, got 2"):
        op.linear_cross_entropy(X, W[:, :2], T, *options, 0, *made)
    with pytest.raises(REFUSAL, match="linear_cross_entropy: unknown reduction code 3"):
        op.linear_cross_entropy(X, W, T, *options, 3, *made)
    with pytest.raises(REFUSAL, match=r"linear_cross_entropy: label_smoothing must be in \[0, 1\], got 2"):
        op.linear_cross_entropy(X, W, T, None, -100, 2.0, 0, *made)
    with pytest.raises(REFUSAL, match="linear_cross_entropy: target must have dtype int64"):
        op.linear_cross_entropy(X, W, T.int(), *options, 0, *made)
    with pytest.raises(REFUSAL, match="linear_cross_entropy: bias must have dtype float32 beside this x"):
        op.linear_cross_entropy(X, W, T, torch.zeros(5).double(), -100, 0.0, 0, *made)
    for values, reduction in (((X, W), 2), ((X.double(), W.double()), 0)):
        with pytest.raises(REFUSAL, match="linear_cross_entropy: the forward makes gradients of a mean or sum"):
            op.linear_cross_entropy(*values, T, *options, reduction, *made)
    with pytest.raises(REFUSAL, match=r"linear_cross_entropy_backward: target must be in .* got 9 in row 0"):
        op.linear_cross_entropy_backward(grad, X, W, T + 9, None, zeros, zeros, -100, 0.0, 0, True, True, False)
    with pytest.raises(REFUSAL, match=r"linear_cross_entropy_backward: top must have shape \(4,\), got 3 elements"):
        op.linear_cross_entropy_backward(grad, X, W, T, None, zeros[1:], zeros, -100, 0.0, 0, True, True, False)
