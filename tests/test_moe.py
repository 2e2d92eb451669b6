"""moe_route, moe_routing, moe_dispatch, moe_combine and moe_aux_loss."""

import hashlib
import math

import pytest
import torch
from helpers import (
    DEVICE,
    FLOATS,
    REFUSAL,
    TWO_OF_FLOATS,
    assert_close_to_reference,
    assert_one_rounding,
    every_second,
    on_device,
    random_image,
)
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck

import camox_ops as cx
from camox_ops import reference

HALVES = (torch.bfloat16, torch.float16)
SCORES = ("topk_softmax", "softmax_topk", "softmax_topk_renorm", "sigmoid_topk")
AUX_LOSSES = ("switch", "importance_cv2", "z", "usage_mse")
# rows, E, K around a vector of rows (2 to 16 lanes), a block of rows (128), one and all experts.
ROUTES = ((1, 1, 1), (3, 7, 3), (15, 4, 4), (16, 8, 2), (17, 64, 8), (130, 5, 1), (300, 33, 6))
LAYOUTS = ("contiguous", "channels_last", "strided", "expanded")
ON_CPU = pytest.mark.skipif(DEVICE.type != "cpu", reason="float64, bits, threads and checks of values: on the CPU")
pytestmark = on_device


def logits_of(rows, num_experts, dtype=torch.float32, seed=0, kind="normal"):
    """ "offset": mean 1e4; "ties": a few values only; "masked": some are -inf."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(rows, num_experts, generator=generator, dtype=torch.float64, device="cpu")
    if kind == "offset":
        logits = logits + 1e4
    elif kind == "ties":
        logits = logits.round() / 2
    elif kind == "masked" and num_experts > 1:
        logits[:, ::2] = -torch.inf
    return logits.to(DEVICE, dtype)


def valid_of(rows, seed=3):
    return (torch.rand(rows, generator=torch.Generator().manual_seed(seed), device="cpu") < 0.7).to(DEVICE)


def weights_of(shape, dtype=torch.float32, seed=5):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, device="cpu").to(
        DEVICE, dtype
    )


def real_of(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def routed(rows, num_experts, top_k, capacity_factor=None, valid=False, **arguments):
    logits = logits_of(rows, num_experts, **arguments)
    mask = valid_of(rows) if valid else None
    return cx.moe_route(logits, top_k, capacity_factor=capacity_factor, valid=mask)


def indices_of(routing):
    return routing.experts, routing.offsets, routing.position


def capacity_of(routing, padded):
    if not padded:
        return None
    return routing.experts.shape[0] if routing.capacity is None else routing.capacity


def test_smoke():
    x, logits = torch.rand(6, 3, 4, 4), torch.rand(6, 5)
    routing = cx.moe_route(logits, 2)
    y = cx.moe_combine(cx.moe_dispatch(x, routing), routing)
    torch.testing.assert_close(y, x)  # the weights of a row add up to 1
    assert cx.moe_aux_loss(routing, logits).shape == ()


def test_known_values():
    logits = torch.tensor([[0.0, 2, 1], [5, 5, 5], [1, 0, 1], [math.log(3), 0, -9]])
    routing = cx.moe_route(logits, 2)
    assert routing.experts.tolist() == [[1, 2], [0, 1], [0, 2], [0, 1]]
    expected = [[1 / (1 + math.exp(-1)), 1 / (1 + math.e)], [0.5, 0.5], [0.5, 0.5], [0.75, 0.25]]
    torch.testing.assert_close(routing.weights, torch.tensor(expected))
    assert routing.counts.tolist() == [3, 3, 2]
    assert routing.offsets.tolist() == [0, 3, 6, 8]
    assert routing.order.tolist() == [2, 4, 6, 0, 3, 7, 1, 5]
    assert routing.position.tolist() == [3, 6, 0, 4, 1, 7, 2, 5]
    assert (routing.num_experts, routing.top_k, routing.capacity) == (3, 2, None)
    x = torch.tensor([1.0, 2, 3, 4])
    copies = cx.moe_dispatch(x, routing)
    assert copies.tolist() == [2, 3, 4, 1, 2, 4, 1, 3]
    combined = cx.moe_combine(torch.tensor([1.0, 1, 1, 10, 10, 10, 100, 100]), routing)
    by_expert = torch.tensor([1.0, 10, 100])
    torch.testing.assert_close(combined, (routing.weights * by_expert[routing.experts]).sum(1))
    half = cx.moe_route(logits, 2, score="softmax_topk")
    torch.testing.assert_close(half.weights[1], torch.tensor([1 / 3, 1 / 3]))
    half = cx.moe_route(logits, 2, score="sigmoid_topk")
    torch.testing.assert_close(half.weights[3], torch.tensor([0.75, 0.5]))


def test_known_values_of_capacity_and_valid():
    logits = torch.tensor([[1.0, 0, 0]]).repeat(6, 1)  # every row chooses 0, then 1
    valid = torch.tensor([True, False, True, True, True, True])
    routing = cx.moe_route(logits, 2, capacity_factor=0.7, valid=valid)
    assert routing.capacity == 3  # ceil(0.7 * 6 * 2 / 3)
    assert routing.counts.tolist() == [3, 3, 0]
    assert routing.offsets.tolist() == [0, 3, 6, 6]
    assert routing.position.tolist() == [0, 3, -1, -1, 1, 4, 2, 5, -1, -1, -1, -1]
    assert routing.order.tolist() == [0, 4, 6, 1, 5, 7] + [-1] * 6
    assert routing.weights[1].tolist() == routing.weights[4].tolist() == [0, 0]
    assert routing.experts.tolist() == [[0, 1]] * 6
    x = torch.arange(1.0, 7)
    assert cx.moe_dispatch(x, routing).tolist() == [1, 3, 4, 1, 3, 4] + [0] * 6
    padded = cx.moe_dispatch(x, routing, padded=True)
    assert padded.tolist() == [[1, 3, 4], [1, 3, 4], [0, 0, 0]]
    torch.testing.assert_close(cx.moe_combine(padded, routing), torch.tensor([1.0, 0, 3, 4, 0, 0]))
    everything = cx.moe_route(logits, 1, capacity_factor=100.0)
    assert everything.counts.tolist() == [6, 0, 0]


def test_known_values_of_aux_losses():
    logits = torch.zeros(4, 2)
    logits[:, 0] = math.log(3)  # p = (3/4, 1/4), everything goes to the first
    routing = cx.moe_route(logits, 1)
    expected = {
        "switch": 2 * 0.75,
        "importance_cv2": 1 / (4 + 1e-10),  # sums 3 and 1
        "z": math.log(4) ** 2,
        "usage_mse": 0.01 * 0.25,
    }
    for kind, value in expected.items():
        loss = cx.moe_aux_loss(routing, logits, kind)
        assert loss.dtype == torch.float32
        assert loss.item() == pytest.approx(value, rel=1e-6)
    valid = torch.tensor([True, True, False, False])
    routing = cx.moe_route(logits, 1, valid=valid)
    assert cx.moe_aux_loss(routing, logits, "switch", valid).item() == pytest.approx(1.5, rel=1e-6)
    none = cx.moe_route(logits, 1, valid=valid & False)
    for kind in ("switch", "importance_cv2", "z"):
        assert cx.moe_aux_loss(none, logits, kind, valid & False).item() == 0


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_matches_reference_route(dtype, score):
    for i, (rows, num_experts, top_k) in enumerate(ROUTES):
        for kind in ("normal", "ties", "offset"):
            logits = logits_of(rows, num_experts, dtype, kind=kind)
            real = logits.to(real_of(dtype))
            for capacity_factor in (None, 0.8):
                valid = valid_of(rows) if i % 2 == 0 else None
                ours = cx.moe_route(logits, top_k, score=score, capacity_factor=capacity_factor, valid=valid)
                options = {"score": score, "capacity": ours.capacity, "valid": valid}
                same = reference.moe_route(real, top_k, **options)
                truth = reference.moe_route(real.double(), top_k, **options)
                for mine, theirs in zip(ours[1:6], truth[1:], strict=True):
                    assert mine.dtype == torch.int64
                    assert torch.equal(mine, theirs)
                assert_close_to_reference(ours.weights, same[0], truth[0])


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_grad_matches_reference_route(dtype, score):
    for i, (rows, num_experts, top_k) in enumerate(ROUTES):
        for capacity_factor in (None, 0.8):
            logits = logits_of(rows, num_experts, dtype)
            valid = valid_of(rows) if i % 2 else None
            grad = weights_of((rows, top_k), real_of(dtype))
            leaf = logits.clone().requires_grad_()
            ours = cx.moe_route(leaf, top_k, score=score, capacity_factor=capacity_factor, valid=valid)
            (mine,) = torch.autograd.grad(ours.weights, leaf, grad)
            found = []
            for real in (real_of(dtype), torch.float64):
                leaf = logits.to(real).requires_grad_()
                weights = reference.moe_route(leaf, top_k, score=score, capacity=ours.capacity, valid=valid)[0]
                found += torch.autograd.grad(weights, leaf, grad.to(real))
            assert_close_to_reference(mine, found[0].to(dtype), found[1], scale64=1.0)


def test_known_values_of_routing():
    """An expert twice in a row; a capacity of ceil(0.75 * 4 * 2 / 3) = 2 and a row that is not valid."""
    weights = torch.tensor([[0.7, 0.3], [1.0, -2.0], [0.5, 0.25], [torch.nan, 4.0]])
    experts = torch.tensor([[2, 0], [2, 2], [2, 1], [0, 0]])
    routing = cx.moe_routing(weights, experts, 3)
    assert routing.counts.tolist() == [3, 1, 4]
    assert routing.offsets.tolist() == [0, 3, 4, 8]
    assert routing.order.tolist() == [1, 6, 7, 5, 0, 2, 3, 4]
    assert routing.position.tolist() == [4, 0, 5, 6, 7, 3, 1, 2]
    assert torch.equal(routing.weights[:3], weights[:3])
    x = torch.arange(4.0)[:, None]
    scaled = cx.moe_dispatch(x, routing) * torch.tensor([1.0, 1, 1, 10, 100, 100, 100, 100])[:, None]
    assert cx.moe_combine(scaled, routing)[:3, 0].tolist() == [0, -100, 2 * (50 + 2.5)]
    routing = cx.moe_routing(weights, experts, 3, capacity_factor=0.75, valid=torch.tensor([True, True, True, False]))
    assert routing.capacity == 2
    assert routing.counts.tolist() == [1, 1, 2]
    assert routing.position.tolist() == [2, 0, 3, -1, -1, 1, -1, -1]
    assert routing.weights.tolist() == [[weights[0, 0].item(), weights[0, 1].item()], [1, 0], [0, 0.25], [0, 0]]


@pytest.mark.parametrize("dtype", FLOATS)
def test_matches_reference_routing(dtype):
    """What moe_route chose gives its routing again, and its gradients."""
    for rows, num_experts, top_k in ROUTES:
        logits, valid = logits_of(rows, num_experts, dtype), torch.arange(rows) % 5 != 1
        for options in ({}, {"capacity_factor": 0.7, "valid": valid}):
            routed = cx.moe_route(logits, top_k, **options)
            weights = torch.rand(rows, top_k).to(dtype).requires_grad_()
            ours = cx.moe_routing(weights, routed.experts, num_experts, **options)
            for name in ("experts", "counts", "offsets", "order", "position"):
                assert torch.equal(getattr(ours, name), getattr(routed, name)), name
            assert ours[6:] == routed[6:]
            truth = reference.moe_routing(
                weights, ours.experts, num_experts, capacity=ours.capacity, valid=options.get("valid")
            )
            assert torch.equal(ours.weights, truth[0].to(ours.weights.dtype))
            ours.weights.sum().backward()
            assert torch.equal(weights.grad, (routed.position >= 0).view(rows, top_k).to(dtype))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"weights": [1.0]}, TypeError, "weights must be a torch.Tensor, got list"),
        ({"weights": torch.zeros(3, 2).int()}, TypeError, "weights must have dtype float32, .*, got int32"),
        ({"weights": torch.zeros(3)}, ValueError, r"weights must have shape \(rows, K\), got \(3,\)"),
        ({"weights": torch.zeros(3, 0)}, ValueError, r"experts must have the shape of weights, \(3, 0\), got \(3, 2\)"),
        ({"experts": torch.zeros(3, 2)}, TypeError, "experts must have dtype int64, got float32"),
        ({"experts": torch.zeros(2, 2).long()}, ValueError, r"experts must have the shape of weights, \(3, 2\), got"),
        ({"num_experts": 4.0}, TypeError, "num_experts must be an int, got 4.0"),
        ({"num_experts": 0}, ValueError, "num_experts must be from 1 to 1024, got 0"),
        ({"num_experts": 1025}, ValueError, "num_experts must be from 1 to 1024, got 1025"),
        ({"num_experts": 1}, ValueError, r"weights must have 1 to num_experts=1 columns, got \(3, 2\)"),
        ({"capacity_factor": 0}, ValueError, "capacity_factor must be > 0 and finite, got 0"),
        ({"valid": torch.ones(3)}, TypeError, "valid must have dtype bool, got float32"),
        ({"valid": torch.ones(4).bool()}, ValueError, r"valid must have shape \(3,\), one a row, got \(4,\)"),
    ],
)
def test_errors_of_routing(arguments, error, message):
    given = {"weights": torch.zeros(3, 2), "experts": torch.zeros(3, 2).long(), "num_experts": 4, **arguments}
    with pytest.raises(error, match="moe_routing: " + message):
        cx.moe_routing(**given)


@ON_CPU
def test_errors_of_given_experts():
    for bad in (-1, 4, 2**40):
        experts = torch.zeros(3, 2).long()
        experts[1, 1] = bad
        with pytest.raises(ValueError, match=f"routing.experts must be >= 0 and < 4, got {bad} in slot 3"):
            cx.moe_routing(torch.zeros(3, 2), experts, 4)
    place = torch.ops.camox_ops.moe_place
    with pytest.raises(REFUSAL, match="moe_place: experts must have 2 dimensions"):
        place(torch.zeros(3).long(), None, 4, None)
    with pytest.raises(REFUSAL, match="moe_place: capacity must be >= 0, got -1"):
        place(torch.zeros(3, 2).long(), None, 4, -1)
    with pytest.raises(REFUSAL, match="moe_place: experts must have dtype int64"):
        place(torch.zeros(3, 2).int(), None, 4, None)
    with pytest.raises(REFUSAL, match="the number of experts must be from 1 to 1024, got 2000"):
        place(torch.zeros(3, 2).long(), None, 2000, None)
    with pytest.raises(REFUSAL, match="top_k must be from 1 to the number of experts, 1, got 2"):
        place(torch.zeros(3, 2).long(), None, 1, None)


def test_masked_experts_are_not_chosen():
    logits = logits_of(9, 8, kind="masked").requires_grad_()
    for score in SCORES:
        routing = cx.moe_route(logits, 3, score=score)
        assert torch.all(routing.experts % 2 == 1)
        (grad,) = torch.autograd.grad(routing.weights.square().sum(), logits)
        assert torch.all(grad.isfinite())
    last = cx.moe_route(logits, 5)  # more than are left: the fifth is masked
    assert torch.all(last.experts[:, 4] == 0)
    assert torch.all(last.weights[:, 4] == 0)


def rows_of(shape, dtype, layout, seed=0):
    if len(shape) == 4:
        return random_image(shape, dtype, layout, seed=seed)
    x = random_image(
        (*shape, *[1] * (4 - len(shape))), dtype, "expanded" if layout == "expanded" else "contiguous", seed=seed
    )
    x = x.reshape(shape) if layout != "expanded" else x[(...,) + (0,) * (4 - len(shape))]
    return x.repeat_interleave(2, dim=-1)[..., ::2] if layout == "strided" else x


SHAPES = ((), (5,), (3, 4, 5), (7, 33, 3), (2, 66, 67))  # of a row: also around a vector and a chunk of 4096


@pytest.mark.parametrize("padded", [False, True])
@every_second(dtype=FLOATS, layout=LAYOUTS)
def test_matches_reference_rows(dtype, layout, padded):
    for shape in SHAPES:
        for capacity_factor, valid in ((None, False), (0.6, True)):
            routing = routed(9, 4, 3, capacity_factor, valid)
            x, capacity = rows_of((9, *shape), dtype, layout), capacity_of(routing, padded)
            copies = cx.moe_dispatch(x, routing, padded=padded)
            assert torch.equal(copies, reference.moe_dispatch(x, *indices_of(routing), capacity=capacity))
            y = rows_of((27, *shape), dtype, layout, seed=1)
            y = reference.moe_dispatch(x, *indices_of(routing), capacity=capacity) * 3 if padded else y
            ours = cx.moe_combine(y, routing, padded=padded)
            weights = routing.weights.to(real_of(dtype))
            same = reference.moe_combine(y, weights, *indices_of(routing), capacity=capacity).to(dtype)
            truth = reference.moe_combine(y.double(), weights.double(), *indices_of(routing), capacity=capacity)
            assert_close_to_reference(ours, same, truth, scale64=y.abs().max().item())
            if dtype in HALVES:
                assert_one_rounding(ours, cx.moe_combine(y.float(), routing, padded=padded))


@pytest.mark.parametrize("padded", [False, True])
@every_second(dtype=FLOATS, layout=LAYOUTS)
def test_grad_matches_reference_rows(dtype, layout, padded):
    for shape in SHAPES:
        for capacity_factor, valid in ((None, False), (0.6, True)):
            routing = routed(9, 4, 3, capacity_factor, valid)
            capacity = capacity_of(routing, padded)
            places = (4, capacity) if padded else (27,)
            y = torch.stack([rows_of((places[-1], *shape), dtype, layout, seed=i) for i in range(4)])
            y = y if padded else y[0]
            grad_x, grad_y = rows_of((9, *shape), dtype, layout, seed=9), y.roll(1, 0)
            weights = routing.weights.to(real_of(dtype))
            ours = torch.ops.camox_ops.moe_combine_backward(grad_x, y, weights, *indices_of(routing), capacity)
            summed = torch.ops.camox_ops.moe_dispatch_backward(grad_y, *indices_of(routing), capacity)
            found = []
            for real in (real_of(dtype), torch.float64):
                leaves = y.to(real).requires_grad_(), weights.to(real).requires_grad_()
                combined = reference.moe_combine(*leaves, *indices_of(routing), capacity=capacity)
                leaf = grad_x.to(real).requires_grad_()
                copies = reference.moe_dispatch(leaf, *indices_of(routing), capacity=capacity)
                grads = torch.autograd.grad(combined, leaves, grad_x.to(real))
                found.append((*grads, *torch.autograd.grad(copies, leaf, grad_y.to(real))))
            same, truth = found
            scale = math.prod(shape) * grad_x.abs().max().item() * y.abs().max().item()
            assert_close_to_reference(ours[0], same[0].to(dtype), truth[0])
            assert_close_to_reference(ours[1], same[1], truth[1], scale64=scale)
            assert_close_to_reference(summed, same[2].to(dtype), truth[2], scale64=grad_y.abs().max().item())


@pytest.mark.parametrize("kind", AUX_LOSSES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_matches_reference_aux(dtype, kind):
    for i, (rows, num_experts, top_k) in enumerate(ROUTES):
        logits = logits_of(rows, num_experts, dtype, kind="offset" if i == 1 else "normal")
        valid = valid_of(rows) if i % 2 else None
        routing = cx.moe_route(logits, top_k, valid=valid)
        ours = cx.moe_aux_loss(routing, logits, kind, valid)
        same, truth = (
            reference.moe_aux_loss(logits.to(real), routing.counts, top_k, kind=kind, valid=valid)
            for real in (real_of(dtype), torch.float64)
        )
        assert_close_to_reference(ours, same, truth, scale64=1.0)


@pytest.mark.parametrize("kind", AUX_LOSSES[:3])
@pytest.mark.parametrize("dtype", FLOATS)
def test_grad_matches_reference_aux(dtype, kind):
    for i, (rows, num_experts, top_k) in enumerate(ROUTES):
        logits = logits_of(rows, num_experts, dtype)
        valid = valid_of(rows) if i % 2 else None
        routing = cx.moe_route(logits, top_k, valid=valid)
        found = []
        for real in (None, real_of(dtype), torch.float64):
            leaf = logits.to(real or dtype).requires_grad_()
            if real is None:
                loss = cx.moe_aux_loss(routing, leaf, kind, valid)
            else:
                loss = reference.moe_aux_loss(leaf, routing.counts, top_k, kind=kind, valid=valid)
            found += torch.autograd.grad(3 * loss, leaf)
        assert_close_to_reference(found[0], found[1].to(dtype), found[2], scale64=1.0)


def test_usage_mse_has_no_gradient():
    logits = torch.rand(4, 3, requires_grad=True)
    assert not cx.moe_aux_loss(cx.moe_route(logits, 2), logits, "usage_mse").requires_grad
    assert cx.moe_aux_loss(cx.moe_route(logits, 2), logits).requires_grad


@ON_CPU
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("score", SCORES)
def test_grad(score, padded):
    """Through route, dispatch, an expert and combine, and the losses; differences small enough to leave the choices."""
    logits = logits_of(6, 4, torch.float64).requires_grad_()
    x = random_image((6, 2, 3, 1), torch.float64).requires_grad_()
    valid = torch.tensor([True, True, True, False, True, True])

    def op(logits, x):
        routing = cx.moe_route(logits, 2, score=score, capacity_factor=0.9, valid=valid)
        y = cx.moe_combine(cx.moe_dispatch(x, routing, padded=padded) ** 2, routing, padded=padded)
        return y, *(cx.moe_aux_loss(routing, logits, kind, valid) for kind in AUX_LOSSES[:3])

    assert gradcheck(op, (logits, x))


def test_one_expert_takes_all_or_none():
    x = torch.rand(40, 6, requires_grad=True)
    for wanted in (0, 2, 4):
        logits = torch.zeros(40, 5)
        logits[:, wanted] = 1
        routing = cx.moe_route(logits, 1)
        assert routing.counts.tolist() == [40 * (e == wanted) for e in range(5)]
        assert torch.equal(cx.moe_combine(cx.moe_dispatch(x, routing), routing), x)
    none = cx.moe_route(logits, 2, valid=torch.zeros(40, dtype=torch.bool))
    assert none.offsets.tolist() == [0] * 6
    y = cx.moe_combine(cx.moe_dispatch(x, none), none)
    assert torch.equal(y, torch.zeros_like(x))
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, torch.zeros_like(x))


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_noncontiguous_keeps_memory_format(layout):
    routing = routed(6, 4, 2, capacity_factor=0.8)
    x = random_image((6, 3, 5, 7), layout=layout).requires_grad_()
    expected = torch.channels_last if layout == "channels_last" else torch.contiguous_format
    copies = cx.moe_dispatch(x, routing)
    assert copies.is_contiguous(memory_format=expected)
    y = cx.moe_combine(copies, routing)
    assert y.is_contiguous(memory_format=expected)
    assert torch.autograd.grad(y.sum(), copies, retain_graph=True)[0].is_contiguous(memory_format=expected)
    assert torch.autograd.grad(copies, x, copies)[0].is_contiguous(memory_format=expected)
    padded = cx.moe_dispatch(x, routing, padded=True)
    assert padded.flatten(0, 1).is_contiguous(memory_format=expected)
    assert cx.moe_combine(padded, routing).is_contiguous(memory_format=expected)


def test_noncontiguous_logits_and_routing():
    wide = torch.randn(9, 12)
    logits, valid = wide[:, ::2], valid_of(18)[::2]
    ours = cx.moe_route(logits, 3, valid=valid)
    expected = cx.moe_route(logits.contiguous(), 3, valid=valid.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(ours[:6], expected[:6], strict=True))
    assert torch.equal(cx.moe_aux_loss(ours, logits), cx.moe_aux_loss(ours, logits.contiguous()))
    x, leaf = torch.randn(9, 4), ours.weights.t().contiguous().requires_grad_()
    apart = ours._replace(weights=leaf.t(), experts=ours.experts.t().contiguous().t())
    copies = cx.moe_dispatch(x, apart)
    assert torch.equal(copies, cx.moe_dispatch(x, ours))
    y = cx.moe_combine(copies, apart)
    assert torch.equal(y, cx.moe_combine(copies, ours))
    assert torch.autograd.grad(y.sum(), leaf)[0].shape == (3, 9)


@given(
    st.tuples(st.integers(1, 70), st.integers(1, 40)),
    st.data(),
    st.sampled_from(SCORES),
    st.sampled_from((None, 0.3, 1.0, 1.5)),
    st.sampled_from(FLOATS),
)
def test_shapes(size, data, score, capacity_factor, dtype):
    rows, num_experts = size
    top_k = data.draw(st.integers(1, num_experts))
    logits = logits_of(rows, num_experts, dtype, kind="ties")
    ours = cx.moe_route(logits, top_k, score=score, capacity_factor=capacity_factor)
    truth = reference.moe_route(logits.double(), top_k, score=score, capacity=ours.capacity)
    assert all(torch.equal(a, b) for a, b in zip(ours[1:6], truth[1:], strict=True))
    x = random_image((rows, 3, 2, 2), dtype)
    for padded in (False, True):
        copies = cx.moe_dispatch(x, ours, padded=padded)
        capacity = capacity_of(ours, padded)
        assert torch.equal(copies, reference.moe_dispatch(x, *indices_of(ours), capacity=capacity))
        y = cx.moe_combine(copies, ours, padded=padded)
        expected = x * ours.weights.sum(1).view(-1, 1, 1, 1)
        torch.testing.assert_close(y.double(), expected.double(), rtol=0.03, atol=0.03)


@pytest.mark.parametrize("dtype", TWO_OF_FLOATS)
def test_large_outputs_have_the_same_bits(dtype):
    """From 32 MiB on stores go past the caches; each channel alone is below that."""
    routing = routed(8, 4, 3)
    size = (32 << 20) // dtype.itemsize // 8 // 5 + 1
    x = random_image((8, 5, size, 1), dtype)
    y = cx.moe_dispatch(x, routing)
    out, weights = cx.moe_combine(y, routing), routing.weights.to(real_of(dtype))
    backward = torch.ops.camox_ops.moe_combine_backward
    grad_y, _ = backward(x, y, weights, *indices_of(routing), None)
    for channel in range(5):
        part = x[:, channel : channel + 1].contiguous()
        copies = cx.moe_dispatch(part, routing)
        assert torch.equal(y[:, channel : channel + 1], copies)
        assert torch.equal(out[:, channel : channel + 1], cx.moe_combine(copies, routing))
        expected, _ = backward(part, copies, weights, *indices_of(routing), None)
        assert torch.equal(grad_y[:, channel : channel + 1], expected)


def test_copies_keep_the_bits_of_nan():
    x = torch.full((4, 5), -1, dtype=torch.int16).view(torch.bfloat16)  # a NaN with a payload
    y = cx.moe_dispatch(x, routed(4, 3, 2))
    assert torch.all(y.view(torch.int16) == -1)


def numbers(seed=0, dtype=torch.float32):
    """Every output and gradient of one pass through all ops."""
    logits, x = logits_of(200, 9, dtype, seed).requires_grad_(), random_image((200, 3, 5, 5), dtype).requires_grad_()
    routing = cx.moe_route(logits, 3, score="softmax_topk", capacity_factor=0.9, valid=valid_of(200))
    copies = cx.moe_dispatch(x, routing)
    y = cx.moe_combine(copies * copies, routing)
    losses = [cx.moe_aux_loss(routing, logits, kind) for kind in AUX_LOSSES]
    total = y.float().square().sum() + sum(losses)
    return [*routing[:6], copies, y, *losses, *torch.autograd.grad(total, (logits, x))]


def digest_of(tensors):
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def test_forty_repeats_have_one_hash():
    assert len({digest_of(numbers()) for _ in range(40)}) == 1


@ON_CPU
def test_autocast_routes_in_float32():
    logits, x = logits_of(6, 4, torch.bfloat16), torch.rand(6, 3).bfloat16()
    expected = cx.moe_route(logits.float(), 2)
    with torch.autocast("cpu", torch.bfloat16):
        routing = cx.moe_route(logits, 2)
        assert torch.equal(routing.weights, expected.weights)
        loss = cx.moe_aux_loss(routing, logits)
        assert loss.dtype == torch.float32
        assert cx.moe_combine(cx.moe_dispatch(x, routing), routing).dtype == torch.bfloat16
    assert torch.equal(loss, cx.moe_aux_loss(expected, logits.float()))


@ON_CPU
def test_the_copies_are_memory_of_their_own():
    """Whatever the routing says: rows that are sorted already are copied too."""
    logits = torch.eye(4)[torch.tensor([0, 0, 1, 3, 3])]
    x = torch.rand(5, 3, requires_grad=True)
    copies = cx.moe_dispatch(x, cx.moe_route(logits, 1))
    assert torch.equal(copies, x)
    assert copies.data_ptr() != x.data_ptr()
    assert not copies._is_view()
    torch.testing.assert_close(torch.autograd.grad(copies, x, 2 * x)[0], 2 * x)


@ON_CPU
def test_sorted_rows_are_copied_while_traced():
    """torch.jit.trace would keep "nothing is copied" for every other routing."""

    def step(x, logits):
        routing = cx.moe_route(logits, 1)
        return cx.moe_combine(cx.moe_dispatch(x, routing) * torch.arange(4.0)[:, None], routing)

    x, by_order, mixed = torch.randn(4, 3), torch.eye(2)[[0, 0, 1, 1]], torch.eye(2)[[1, 0, 1, 0]]
    traced = torch.jit.trace(step, (x, by_order))
    assert torch.equal(traced(x, mixed), step(x, mixed))


@ON_CPU
def test_sorted_rows_under_another_default_device():
    x, routing = torch.rand(4, 3), cx.moe_route(torch.randn(4, 3), 1)
    with torch.device("meta"):
        copies = cx.moe_dispatch(x, routing)
    assert torch.equal(copies, cx.moe_dispatch(x, routing))


@pytest.mark.parametrize("padded", [False, True])
def test_compile_of_a_batch_that_could_be_either(padded):
    """With `padded` given a first batch of as many copies as experts does not tie the graph to its size."""

    def step(x, logits):
        routing = cx.moe_route(logits, 1)
        return cx.moe_combine(cx.moe_dispatch(x, routing, padded=padded) * 2, routing, padded=padded)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for rows in (4, 7):
        x, logits = torch.rand(rows, 5), logits_of(rows, 4)
        if rows == 4:
            for value in (x, logits):
                torch._dynamo.mark_dynamic(value, 0)
        with torch.compiler.set_stance("default" if rows == 4 else "fail_on_recompile"):
            torch.testing.assert_close(compiled(x, logits), step(x, logits))


def test_weights_of_another_dtype():
    """Weights that the caller changed, in the dtype of y."""
    routing, y = routed(6, 4, 2), torch.rand(12, 3).bfloat16()
    leaf = routing.weights.bfloat16().requires_grad_()
    ours = cx.moe_combine(y, routing._replace(weights=leaf))
    assert torch.equal(ours, cx.moe_combine(y, routing._replace(weights=leaf.detach().float())))
    assert torch.autograd.grad(ours.sum(), leaf)[0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"logits": [1.0]}, TypeError, "logits must be a torch.Tensor, got list"),
        ({"logits": torch.zeros(3, 4).int()}, TypeError, "logits must have dtype float32, .*, got int32"),
        ({"logits": torch.zeros(3, 4, 1)}, ValueError, r"logits must have shape \(rows, experts\), got \(3, 4, 1\)"),
        ({"logits": torch.zeros(3, 0)}, ValueError, r"logits must have 1 to 1024 columns, experts, got \(3, 0\)"),
        ({"logits": torch.zeros(1, 1025)}, ValueError, r"logits must have 1 to 1024 columns, experts, got \(1, 1025\)"),
        ({"top_k": 0}, ValueError, "top_k must be from 1 to the number of experts, 4, got 0"),
        ({"top_k": 5}, ValueError, "top_k must be from 1 to the number of experts, 4, got 5"),
        ({"top_k": 2.0}, TypeError, "top_k must be an int, got 2.0"),
        ({"top_k": True}, TypeError, "top_k must be an int, got True"),
        ({"score": "softmax"}, ValueError, "score must be one of 'topk_softmax', .*, got 'softmax'"),
        ({"capacity_factor": 0}, ValueError, "capacity_factor must be > 0 and finite, got 0"),
        ({"capacity_factor": -1.0}, ValueError, "capacity_factor must be > 0 and finite, got -1.0"),
        ({"capacity_factor": float("nan")}, ValueError, "capacity_factor must be > 0 and finite, got nan"),
        ({"capacity_factor": 1e30}, ValueError, r"capacity_factor must be at most 2147483648, got 1e\+30"),
        ({"capacity_factor": 1e308}, ValueError, r"capacity_factor must be at most 2147483648, got 1e\+308"),
        ({"capacity_factor": 10**400}, ValueError, "capacity_factor must be at most 2147483648, got 1000"),
        ({"capacity_factor": "1"}, TypeError, "capacity_factor must be a number, got '1'"),
        ({"valid": torch.ones(3)}, TypeError, "valid must have dtype bool, got float32"),
        ({"valid": torch.ones(4).bool()}, ValueError, r"valid must have shape \(3,\), one a row, got \(4,\)"),
    ],
)
def test_errors(arguments, error, message):
    given = {"logits": torch.zeros(3, 4), "top_k": 2, **arguments}
    with pytest.raises(error, match="moe_route: " + message):
        cx.moe_route(**given)


def test_errors_of_rows():
    routing = routed(6, 4, 2, 0.8)  # capacity 3
    x = torch.zeros(6, 3)
    with pytest.raises(TypeError, match="moe_dispatch: routing must be a Routing, what moe_route returns, got tuple"):
        cx.moe_dispatch(x, tuple(routing))
    with pytest.raises(TypeError, match="moe_dispatch: padded must be a bool, got 1"):
        cx.moe_dispatch(x, routing, padded=1)
    with pytest.raises(ValueError, match=r"moe_dispatch: x must have shape \(6, ...\), as many rows .*, got \(5, 3\)"):
        cx.moe_dispatch(x[:5], routing)
    with pytest.raises(ValueError, match=r"moe_dispatch: x must have shape \(6, ...\), .*, got \(\)"):
        cx.moe_dispatch(x[0, 0], routing)
    with pytest.raises(ValueError, match=r"moe_dispatch: routing.experts must be on the device of x"):
        cx.moe_dispatch(x.to("meta"), routing)
    with pytest.raises(ValueError, match=r"moe_combine: y must have shape \(12, ...\) or \(4, 3, ...\), .* \(11, 3\)"):
        cx.moe_combine(torch.zeros(11, 3), routing)
    with pytest.raises(
        ValueError, match=r"moe_combine: y must have shape \(4, 3, ...\) with padded=True, got \(12, 3\)"
    ):
        cx.moe_combine(torch.zeros(12, 3), routing, padded=True)
    with pytest.raises(TypeError, match="moe_combine: padded must be a bool, got 'yes'"):
        cx.moe_combine(torch.zeros(12, 3), routing, padded="yes")
    alike = routed(2, 4, 2, 1.5)  # capacity 2: (4, 2) may be either
    with pytest.raises(ValueError, match=r"moe_combine: y of shape \(4, 2\) may be .*: say which with padded="):
        cx.moe_combine(torch.zeros(4, 2), alike)
    unlimited = cx.moe_route(torch.randn(4, 4), 1)  # without a capacity it is 4, the rows
    padded = cx.moe_dispatch(torch.ones(4, 5), unlimited, padded=True)
    with pytest.raises(ValueError, match=r"moe_combine: y of shape \(4, 4, 5\) may be .*: say which with padded="):
        cx.moe_combine(padded, unlimited)
    assert cx.moe_combine(torch.zeros(4, 2), alike, padded=True).shape == (2,)
    assert cx.moe_combine(torch.zeros(4, 2), alike, padded=False).shape == (2, 2)


def test_padded_copies_that_could_be_either_layout_come_back():
    routing = cx.moe_route(torch.randn(4, 4), 1)  # without a capacity it is 4, the rows
    padded = cx.moe_dispatch(torch.ones(4, 5), routing, padded=True)
    assert torch.equal(cx.moe_combine(padded, routing, padded=True), torch.ones(4, 5))


def test_errors_of_a_routing_put_together():
    """Members that are no tensors of the right kind, or lie elsewhere than x."""
    routing, x, y, logits = routed(6, 4, 2), torch.zeros(6, 3), torch.zeros(12, 3), torch.zeros(6, 4)
    calls = {
        "moe_dispatch": (lambda r: cx.moe_dispatch(x, r), ("experts", "offsets", "position")),
        "moe_combine": (lambda r: cx.moe_combine(y, r), ("experts", "offsets", "position", "weights")),
        "moe_aux_loss": (lambda r: cx.moe_aux_loss(r, logits), ("experts", "counts")),
    }
    for op, (call, names) in calls.items():
        call(routing)
        for name in names:
            value = getattr(routing, name)
            wanted = "a tensor of a floating dtype" if name == "weights" else "a torch.Tensor"
            with pytest.raises(TypeError, match=f"{op}: routing.{name} must be {wanted}, got NoneType"):
                call(routing._replace(**{name: None}))
            wanted = "be a tensor of a floating dtype" if name == "weights" else "have dtype int64"
            with pytest.raises(TypeError, match=f"{op}: routing.{name} must {wanted}, got .*complex64"):
                call(routing._replace(**{name: value.to(torch.complex64)}))
            with pytest.raises(ValueError, match=f"{op}: routing.{name} must be on the device of .*, got meta"):
                call(routing._replace(**{name: value.to("meta")}))
            if name != "weights":
                with pytest.raises(ValueError, match=f"{op}: routing.{name} must have . dimensions, got shape"):
                    call(routing._replace(**{name: value[None]}))
    with pytest.raises(TypeError, match=r"moe_dispatch: routing\.capacity must be an int or None, got 2\.5"):
        cx.moe_dispatch(x, routing._replace(capacity=2.5), padded=True)
    with pytest.raises(TypeError, match="moe_aux_loss: top_k must be an int, got None"):
        cx.moe_aux_loss(routing._replace(top_k=None), logits)


def test_errors_of_aux():
    routing, logits = routed(6, 4, 2), torch.zeros(6, 4)
    with pytest.raises(TypeError, match="moe_aux_loss: routing must be a Routing"):
        cx.moe_aux_loss(logits, routing)
    with pytest.raises(ValueError, match=r"moe_aux_loss: logits must have the shape that was routed, \(6, 4\), got"):
        cx.moe_aux_loss(routing, logits[:, :3])
    with pytest.raises(ValueError, match=r"moe_aux_loss: kind must be one of 'switch', .*, got 'mse'"):
        cx.moe_aux_loss(routing, logits, "mse")
    with pytest.raises(ValueError, match=r"moe_aux_loss: valid must have shape \(6,\), one a row, got \(5,\)"):
        cx.moe_aux_loss(routing, logits, valid=torch.ones(5).bool())


@ON_CPU
def test_errors_of_values():
    logits = torch.zeros(5, 4)
    logits[2, 1] = logits[4, 3] = float("nan")
    with pytest.raises(ValueError, match="moe_route: logits hold NaN in 2 of 5 rows"):
        cx.moe_route(logits, 2)
    valid = torch.tensor([True, True, False, True, False])
    for score in SCORES:  # rows that are not valid are not looked at
        leaf = logits.clone().requires_grad_()
        routing = cx.moe_route(leaf, 2, score=score, valid=valid)
        assert torch.all(routing.weights[~valid] == 0)
        (grad,) = torch.autograd.grad(routing.weights.square().sum(), leaf)
        assert torch.all(grad[~valid] == 0)
        (grad,) = torch.autograd.grad(cx.moe_aux_loss(routing, leaf, valid=valid), leaf)
        assert torch.all(grad[~valid] == 0)
    x, routing = torch.ones(6, 3), routed(6, 4, 2, 0.8)
    for name, index, value, message in (
        ("position", 5, 12, "routing.position must be -1 or a place among 12, got 12 in slot 5"),
        ("position", 0, -2, "routing.position must be -1 or a place among 12, got -2 in slot 0"),
        ("offsets", 4, 13, "routing.offsets must rise from 0 to at most the 12 slots, got 13 at index 4"),
        ("offsets", 0, -1, "routing.offsets must rise from 0 to at most the 12 slots, got -1 at index 0"),
    ):
        wrong = getattr(routing, name).clone()
        wrong[index] = value
        with pytest.raises(ValueError, match="moe: " + message):
            cx.moe_dispatch(x, routing._replace(**{name: wrong}))
    for name, index, value, message in (
        ("experts", (0, 1), 4, "routing.experts must be >= 0 and < 4, got 4 in slot 1"),
        ("position", 3, 11, "routing.position must be -1 or a place among 12, got 11 in slot 3"),
    ):
        wrong = getattr(routing, name).clone()
        wrong[index] = value
        with pytest.raises(ValueError, match="moe: " + message):
            cx.moe_combine(cx.moe_dispatch(x, routing, padded=True), routing._replace(**{name: wrong}))
    doubled = cx.moe_routing(torch.ones(3, 2), torch.tensor([[1, 1], [1, 1], [0, 1]]), 2)
    with pytest.raises(ValueError, match=r"3 places for an expert, .* counts 5 copies for expert 1"):
        cx.moe_dispatch(x[:3], doubled, padded=True)


@ON_CPU
def test_errors_of_places_that_are_not_taken_once():
    """Each would leave a place as it was allocated, or write one twice."""
    routing, x = routed(6, 4, 2, 0.8), torch.ones(6, 3)
    copies = int(routing.offsets[-1])
    assert copies < 12 and routing.position.min() == -1
    free, taken = (routing.position == -1).nonzero()[0, 0], routing.position.argmax()
    for padded in (False, True):
        for changes, message in (
            ({"position": torch.zeros_like(routing.position)}, "routing.position must"),
            ({"position": routing.position.index_fill(0, taken, -1)}, f"must have each of the {copies} places"),
            ({"position": routing.position.index_fill(0, free, copies)}, "routing.position must"),
            ({"offsets": routing.offsets * 0}, "routing.position must"),
        ):
            with pytest.raises(ValueError, match="moe: .*" + message):
                cx.moe_dispatch(x, routing._replace(**changes), padded=padded)
    # any order of the places is a routing as good
    order = torch.randperm(copies)
    mixed = routing._replace(position=torch.where(routing.position < 0, -1, order[routing.position.clamp(min=0)]))
    assert torch.equal(cx.moe_dispatch(x, mixed).sum(1) > 0, torch.arange(12) < copies)


@ON_CPU
def test_a_backward_takes_what_its_forward_validated():
    """So autograd must notice what is written to the indices in between; a backward alone validates them."""
    x, routing = torch.rand(6, 3, requires_grad=True), routed(6, 4, 2)
    for step in (
        lambda routing: cx.moe_dispatch(x, routing),
        lambda routing: cx.moe_combine(torch.cat((x, x)), routing),
    ):
        changed = routing._replace(position=routing.position.clone())
        y = step(changed)
        changed.position[0] = 100
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
        with pytest.raises(ValueError, match=r"moe: routing\.position must"):
            step(changed)
    with pytest.raises(REFUSAL, match=r"moe: routing\.position must"):
        torch.ops.camox_ops.moe_dispatch_backward(torch.rand(12, 3), *indices_of(changed), None)


@ON_CPU
def test_errors_from_c():
    op, logits, routing, x = torch.ops.camox_ops, torch.zeros(6, 4), routed(6, 4, 2, 0.8), torch.zeros(6, 3)
    experts, offsets, position = indices_of(routing)
    weights, y = routing.weights, torch.zeros(12, 3)
    for message, call in (
        ("unknown score code 3", lambda: op.moe_route(logits, None, 2, 3, None)),
        ("top_k must be from 1 to .*, 4, got 5", lambda: op.moe_route(logits, None, 5, 0, None)),
        ("capacity must be >= 0, got -1", lambda: op.moe_route(logits, None, 2, 0, -1)),
        ("logits must have 2 dimensions", lambda: op.moe_route(x[0], None, 2, 0, None)),
        ("valid must have dtype bool", lambda: op.moe_route(logits, x[:, 0], 2, 0, None)),
        ("valid must have shape", lambda: op.moe_route(logits, x[:5, 0] > 0, 2, 0, None)),
        (
            "grad must have the shape of experts",
            lambda: op.moe_route_backward(weights[:5], logits, experts, position, 0),
        ),
        (
            "routing.experts must be >= 0 and < 4, got 7",
            lambda: op.moe_route_backward(weights, logits, experts + 7 - experts, position, 0),
        ),
        ("unknown kind code 4", lambda: op.moe_aux_loss(logits, routing.counts, None, 4, 2)),
        ("counts must have 4 elements, got 3", lambda: op.moe_aux_loss(logits, routing.counts[:3], None, 2, 2)),
        (
            "slope must have 4 elements",
            lambda: op.moe_aux_loss_backward(x[0, 0].clone(), logits, x[0].clone(), None, 2),
        ),
        (r"x must have shape \(6, ...\)", lambda: op.moe_dispatch(x[:5], experts, offsets, position, None)),
        ("position must have 12 elements, got 11", lambda: op.moe_dispatch(x, experts, offsets, position[:11], None)),
        ("experts must have dtype int64", lambda: op.moe_dispatch(x, experts.int(), offsets, position, None)),
        ("dtype must be float32", lambda: op.moe_dispatch(x.int(), experts, offsets, position, None)),
        (r"y must have shape \(4, 3, ...\)", lambda: op.moe_combine(y, weights, experts, offsets, position, 3)),
        ("weights must have dtype float32", lambda: op.moe_combine(y, weights.double(), *indices_of(routing), None)),
        (r"weights must have shape \(6, 2, ...\)", lambda: op.moe_combine(y, weights.t(), *indices_of(routing), None)),
        (
            r"grad must have shape \(6, 3, ...\)",
            lambda: op.moe_combine_backward(x[:, :2], y, weights, *indices_of(routing), None),
        ),
        ("grad must have the dtype", lambda: op.moe_combine_backward(x.half(), y, weights, *indices_of(routing), None)),
    ):
        with pytest.raises(REFUSAL, match="moe.*: " + message):
            call()
