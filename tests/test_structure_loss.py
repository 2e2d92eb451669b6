"""structure_loss."""

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    DEVICE,
    FLOATS,
    LAYOUTS,
    REFUSAL,
    assert_close_to_reference,
    assert_same_sums,
    float64_on_cpu,
    outputs_and_gradients,
    random_image,
    reference,
)
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck

import camox_ops as cx

# Below and above vectors, runs of 32 vectors and work items of 8192 pixels.
SHAPES = [(2, 1, 5, 7), (1, 3, 1, 1), (1, 1, 1, 16), (3, 2, 40, 13), (1, 1, 64, 128), (2, 1, 91, 97), (1, 2, 130, 140)]
BCES = ("weighted", "mean")
REDUCTIONS = ("mean", "sum", "none")


def inputs_of(shape, dtype=torch.float32, layout="contiguous", probabilities=False, kind="fractions"):
    """Logits or probabilities, a mask and a weight."""
    logits, mask = random_image(shape, dtype, layout), random_image(shape, torch.float32, layout, seed=1)
    mask = mask.sigmoid() if kind == "fractions" else (mask > 0.5).float()
    weight = 1 + 5 * random_image(shape, torch.float32, layout, seed=2).sigmoid()
    return (logits.sigmoid() if probabilities else 2 * logits), mask.to(dtype), weight.to(dtype)


def test_known_values():
    """Of logits of 0 and a mask of ones the entropy is log 2, inter and union are 1/2 and 3/2 of the pixels."""
    loss = cx.structure_loss(torch.zeros(1, 1, 4, 4), torch.ones(1, 1, 4, 4), weight=torch.ones(1, 1, 4, 4), smooth=0)
    torch.testing.assert_close(loss, torch.tensor(0.5).add(torch.tensor(2.0).log()))
    p, mask = torch.tensor([[[[0.0, 1.0, 0.25, 1.0]]]]), torch.tensor([[[[0.0, 1.0, 1.0, 0.0]]]])
    found = cx.structure_loss(p, mask, weight=torch.ones_like(p), probabilities=True)
    entropy = (100 - torch.tensor(0.25).log()) / 4
    torch.testing.assert_close(found, entropy + 1 - (1.25 + 1) / (4.25 - 1.25 + 1))


def loss_and_gradient(function, logits, mask, weight, **options):
    """The loss, and the gradient of the logits from upstream gradients that differ."""
    real = torch.promote_types(logits.dtype, torch.float32)
    grad = torch.linspace(1, 2, logits.shape[0] * logits.shape[1], dtype=real, device=DEVICE).view(logits.shape[:2])
    grad = grad if options["reduction"] == "none" else grad[0, 0] + 1
    (loss,), (gradient,) = outputs_and_gradients(
        lambda z: function(z, mask, weight=weight, **options), [logits], [grad]
    )
    return loss, gradient


@pytest.mark.parametrize("bce", BCES)
@pytest.mark.parametrize("probabilities", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_matches_reference(dtype, probabilities, bce):
    """Loss and gradient."""
    for i, shape in enumerate(SHAPES):
        for kind in ("fractions", "binary"):
            layout, reduction = LAYOUTS[i % len(LAYOUTS)], REDUCTIONS[i % 3]
            inputs = inputs_of(shape, dtype, layout, probabilities, kind)
            options = {"bce": bce, "probabilities": probabilities, "reduction": reduction, "smooth": 0.5}
            ours = loss_and_gradient(cx.structure_loss, *inputs, **options)
            same, truth = (
                loss_and_gradient(reference.structure_loss, *given, **options)
                for given in (inputs, [x.double() for x in inputs])
            )
            # In float64 the truth adds up as many roundings as we do: a few of each term's.
            for mine, theirs, true in zip(ours, same, truth, strict=True):
                assert_close_to_reference(mine, theirs, true, scale64=8 * true.abs().max().item())
            assert ours[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_weight_is_made_of_the_mask():
    logits, mask, _ = inputs_of((2, 1, 40, 50))
    for size, gain in ((31, 5.0), (15, 2.0)):
        weight = cx.structure_weight(mask, size=size, gain=gain)
        given = cx.structure_loss(logits, mask, weight=weight)
        assert torch.equal(cx.structure_loss(logits, mask, size=size, gain=gain), given)
        torch.testing.assert_close(given, reference.structure_loss(logits, mask, None, size, gain))


def test_mask_of_another_dtype():
    logits, mask, weight = inputs_of((2, 1, 9, 11))
    expected = cx.structure_loss(logits.half().float(), mask, weight=weight)
    assert_same_sums(cx.structure_loss(logits.half(), mask, weight=weight), expected)
    binary = (mask > 0.5).half()
    assert_same_sums(cx.structure_loss(logits, binary), cx.structure_loss(logits, binary.float()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_mask_and_weight_are_read_as_they_are(dtype):
    """The bits of a call with both in float32; the given tensors are kept for backward."""
    logits, mask, weight = inputs_of((3, 2, 9, 11), dtype)
    for options in ({"reduction": "mean"}, {"bce": "mean", "reduction": "none"}):
        ours = loss_and_gradient(cx.structure_loss, logits, mask, weight, **options)
        for others in ((mask.float(), weight.float()), (mask, weight.float())):
            theirs = loss_and_gradient(cx.structure_loss, logits, *others, **options)
            assert all(map(torch.equal, ours, theirs))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        cx.structure_loss(logits.requires_grad_(), mask, weight=weight)
    assert {mask.data_ptr(), weight.data_ptr()} <= {x.data_ptr() for x in kept}


@pytest.mark.parametrize(
    "value", [0.0, -0.0, 20.0, -20.0, 90.0, -90.0, 1e4, -1e4, float("inf"), -float("inf"), float("nan")]
)
def test_extreme_logits(value):
    """As plain PyTorch has them: no overflow, no NaN that it has not."""
    for m in (0.0, 0.3, 1.0):
        logits, mask = torch.full((1, 1, 4, 9), value, device=DEVICE), torch.full((1, 1, 4, 9), m, device=DEVICE)
        for bce in BCES:
            (ours, grad), (theirs, expected) = (
                (y, torch.autograd.grad(y, z)[0])
                for function in (cx.structure_loss, reference.structure_loss)
                for z in [logits.clone().requires_grad_()]
                for y in [function(z, mask, bce=bce)]
            )
            if not theirs.isnan() or value != value:  # PyTorch has NaN for -inf and a mask between 0 and 1
                torch.testing.assert_close(ours, theirs, equal_nan=True)
            torch.testing.assert_close(grad, expected, equal_nan=True, atol=1e-9, rtol=1e-5)


@pytest.mark.parametrize("p", [0.0, 1.0, 1e-45, 1e-38, 1e-12, 1 - 2**-24, 0.5])
def test_extreme_probabilities(p):
    for m in (0.0, 0.3, 1.0):
        given, mask = torch.full((1, 1, 4, 9), p, device=DEVICE), torch.full((1, 1, 4, 9), m, device=DEVICE)
        (ours, grad), (theirs, expected) = (
            (y, torch.autograd.grad(y, z)[0])
            for function in (cx.structure_loss, reference.structure_loss)
            for z in [given.clone().requires_grad_()]
            for y in [function(z, mask, probabilities=True)]
        )
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(grad, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("p", [-1e-30, -0.5, 1.0 + 2**-20, 1.5, float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize(("mask", "weight"), [(0.0, 1.0), (1.0, 1.0), (0.5, 0.0)])
def test_what_is_no_probability_gives_nan(p, mask, weight):
    """Where a finite loss would hide it: what it is multiplied by may be 0."""
    given, masks, weights = (torch.full((2, 1, 5, 7), value, device=DEVICE) for value in (0.3, 0.5, 1.0))
    for values, value in ((given, p), (masks, mask), (weights, weight)):
        values[0, 0, 4, 6] = value
    loss = cx.structure_loss(given, masks, weight=weights, probabilities=True, reduction="none")
    assert loss.isnan().flatten().tolist() == [True, False]


@given(
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 60), st.integers(1, 70)),
    st.sampled_from(BCES),
    st.booleans(),
    st.sampled_from(REDUCTIONS),
    st.sampled_from(LAYOUTS),
)
def test_shapes(shape, bce, probabilities, reduction, layout):
    logits, mask, weight = inputs_of(shape, layout=layout, probabilities=probabilities)
    options = {"bce": bce, "probabilities": probabilities, "reduction": reduction}
    ours = cx.structure_loss(logits, mask, weight=weight, **options)
    same, truth = (
        reference.structure_loss(*given, **options)
        for given in ((logits, mask, weight), (logits.double(), mask.double(), weight.double()))
    )
    assert_close_to_reference(ours, same, truth)


@float64_on_cpu
@pytest.mark.parametrize("bce", BCES)
@pytest.mark.parametrize("probabilities", [False, True])
def test_grad(probabilities, bce):
    for reduction in REDUCTIONS:
        logits, mask, weight = inputs_of((2, 2, 4, 5), torch.float64, probabilities=probabilities)
        options = {"bce": bce, "probabilities": probabilities, "reduction": reduction}
        assert gradcheck(
            lambda z, m=mask, w=weight, o=options: cx.structure_loss(z, m, weight=w, **o), (logits.requires_grad_(),)
        )


def test_mask_and_weight_have_no_gradient():
    logits, mask, weight = (x.requires_grad_() for x in inputs_of((1, 1, 5, 6)))
    grads = torch.autograd.grad(
        cx.structure_loss(logits, mask, weight=weight), (logits, mask, weight), allow_unused=True
    )
    assert grads[0] is not None
    assert grads[1] is None
    assert grads[2] is None


def test_nothing_to_sum_is_as_in_the_formula():
    for shape in ((0, 1, 3, 3), (2, 1, 0, 3)):
        x = torch.zeros(shape, device=DEVICE)
        for bce in BCES:
            for reduction in REDUCTIONS:
                options = {"bce": bce, "reduction": reduction}
                ours, theirs = cx.structure_loss(x, x, **options), reference.structure_loss(x, x, **options)
                torch.testing.assert_close(ours, theirs, equal_nan=True)


def published(pred, mask):
    """As F3Net, PraNet and SINet-V2 write it, where reduce='none' gives a mean; from its formula."""
    weight = 1 + 5 * torch.abs(F.avg_pool2d(mask, 31, 1, 15) - mask)
    entropy = F.binary_cross_entropy_with_logits(pred, mask)
    entropy = (weight * entropy).sum((2, 3)) / weight.sum((2, 3))
    p = torch.sigmoid(pred)
    inter, union = (p * mask * weight).sum((2, 3)), ((p + mask) * weight).sum((2, 3))
    return (entropy + 1 - (inter + 1) / (union - inter + 1)).mean()


def test_is_the_published_loss():
    logits, mask, _ = inputs_of((3, 1, 60, 70), kind="binary")
    ours, grads = outputs_and_gradients(
        lambda z: cx.structure_loss(z, mask, bce="mean"), [logits], [torch.ones((), device=DEVICE)]
    )
    theirs, expected = outputs_and_gradients(lambda z: published(z, mask), [logits], [torch.ones((), device=DEVICE)])
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(grads, expected, rtol=1e-4, atol=1e-9)


X, HALF = torch.zeros(1, 2, 4, 4), torch.full((1, 2, 4, 4), 0.5)


@pytest.mark.parametrize(
    ("logits", "mask", "options", "error", "message"),
    [
        ([1], HALF, {}, TypeError, "logits must be a torch.Tensor, got list"),
        (X[0], HALF, {}, ValueError, r"logits must have 4 dimensions \(B, C, H, W\), got shape \(2, 4, 4\)"),
        (X.long(), HALF, {}, TypeError, "logits must have dtype .*, got int64"),
        (X, HALF[:, :1], {}, ValueError, r"mask must have the shape of logits, \(1, 2, 4, 4\), got \(1, 1, 4, 4\)"),
        (X, HALF.bool(), {}, TypeError, "mask must have dtype .*, got bool"),
        (X, None, {}, TypeError, "mask must be a torch.Tensor, got NoneType"),
        (X, HALF.to("meta"), {}, ValueError, "mask must be on the device of logits, cpu, got meta"),
        (
            X,
            HALF,
            {"weight": HALF[..., 1:]},
            ValueError,
            r"weight must have the shape of logits, .* got \(1, 2, 4, 3\)",
        ),
        (X, HALF, {"bce": "none"}, ValueError, "bce must be one of 'weighted', 'mean', got 'none'"),
        (X, HALF, {"reduction": "batch"}, ValueError, "reduction must be one of 'mean', 'sum', 'none', got 'batch'"),
        (X, HALF, {"smooth": -1}, ValueError, "smooth must be >= 0 and finite, got -1"),
        (X, HALF, {"smooth": float("inf")}, ValueError, "smooth must be >= 0 and finite, got inf"),
        (X, HALF, {"smooth": "1"}, TypeError, "smooth must be a number, got '1'"),
        (X, HALF, {"probabilities": 1}, TypeError, "probabilities must be a bool, got 1"),
    ],
)
def test_errors(logits, mask, options, error, message):
    with pytest.raises(error, match="structure_loss: " + message):
        cx.structure_loss(logits, mask, **options)


def test_errors_of_the_weight_that_is_made():
    with pytest.raises(ValueError, match="structure_weight: size must be odd and > 0, got 30"):
        cx.structure_loss(X, HALF, size=30)
    with pytest.raises(ValueError, match="structure_weight: gain must be finite, got nan"):
        cx.structure_loss(X, HALF, gain=float("nan"))


def test_errors_of_a_mask_outside_0_and_1():
    for value in (255.0, -1.0, 1.01):
        mask = torch.zeros(2, 1, 91, 97)
        mask[1, 0, 90, 96] = value
        with pytest.raises(ValueError, match=rf"structure_loss: mask must lie in \[0, 1\], got {value:g}"):
            cx.structure_loss(torch.zeros(2, 1, 91, 97), mask)
    rounding = torch.full((1, 1, 5, 5), 1 + 2**-9)
    assert cx.structure_loss(torch.zeros(1, 1, 5, 5), rounding).isfinite()


def test_errors_from_c():
    op, grad, sums = torch.ops.camox_ops, torch.ones(()), torch.zeros(2, 4)
    with pytest.raises(REFUSAL, match="structure_loss: mask has size 3 in dimension 3, logits 4"):
        op.structure_loss(X, HALF[..., 1:], HALF, 0, 1.0, False, 0)
    with pytest.raises(REFUSAL, match="structure_loss: weight must have dtype float32 beside this x"):
        op.structure_loss(X, HALF, HALF.double(), 0, 1.0, False, 0)
    with pytest.raises(REFUSAL, match="structure_loss: weight must have the dtype of x"):
        op.structure_loss(X.half(), HALF.half(), HALF, 0, 1.0, False, 0)
    with pytest.raises(REFUSAL, match="structure_loss: unknown bce code 2"):
        op.structure_loss(X, HALF, HALF, 2, 1.0, False, 0)
    with pytest.raises(REFUSAL, match="structure_loss: unknown reduction code 3"):
        op.structure_loss(X, HALF, HALF, 0, 1.0, False, 3)
    with pytest.raises(REFUSAL, match="structure_loss: smooth must be >= 0 and finite, got -1"):
        op.structure_loss(X, HALF, HALF, 0, -1.0, False, 0)
    with pytest.raises(REFUSAL, match=r"structure_loss_backward: sums must have shape \(2, 4\), got \(1, 4\)"):
        op.structure_loss_backward(grad, X, HALF, HALF, sums[:1], 0, 1.0, False, 0)
    with pytest.raises(REFUSAL, match="structure_loss_backward: grad must have 2 dimensions, got 0"):
        op.structure_loss_backward(grad, X, HALF, HALF, sums, 0, 1.0, False, 2)
