"""The CUDA kernels of mixtures of experts on the CPU."""

import emulator
import moe_cases
import pytest
import torch
from helpers import assert_close_to_reference, random_image
from moe_cases import moe_logits

from camox_ops import reference


def moe_valid(rows, i):
    return torch.rand(rows, generator=torch.Generator().manual_seed(3)) < 0.7 if i % 2 else None


@pytest.mark.parametrize("score", moe_cases.SCORES)
def test_moe_route(dtype, score, arch):
    orders = list(emulator.ORDERS)
    for i, (rows, num_experts, top_k) in enumerate(moe_cases.ROUTES):
        logits, valid = moe_logits(rows, num_experts, dtype, i), moe_valid(rows, i)
        capacity = None if i % 3 == 0 else -(-7 * rows * top_k // (10 * num_experts))
        options = {"score": score, "capacity": capacity, "valid": valid}
        how = {"arch": arch, "order": orders[i % len(orders)]}
        ours = moe_cases.route(logits, top_k, **options, **how)
        same = reference.moe_route(logits.float(), top_k, **options)
        truth = reference.moe_route(logits.double(), top_k, **options)
        for mine, theirs in zip(ours[1:], truth[1:], strict=True):
            assert torch.equal(mine, theirs)
        assert_close_to_reference(ours[0], same[0], truth[0])
        grad = torch.rand(rows, top_k, generator=torch.Generator().manual_seed(5))
        found = []
        for real in (torch.float32, torch.float64):
            leaf = logits.to(real).requires_grad_()
            weights = reference.moe_route(leaf, top_k, **options)[0]
            found += torch.autograd.grad(weights, leaf, grad.to(real))
        mine = moe_cases.route_backward(grad, logits, ours[1], ours[5], score=score, **how)
        assert_close_to_reference(mine, found[0].to(dtype), found[1])


def test_moe_route_of_equal_and_infinite_logits_in_any_layout(dtype, order):
    for num_experts in (8, 64, 72):
        logits = moe_logits(6, num_experts, dtype)
        logits[0], logits[0, 1::2] = 0.0, -0.0
        logits[1] = 1.0
        logits[2, 3:] = -torch.inf
        grad = torch.rand(6, 3, generator=torch.Generator().manual_seed(5))
        wide = torch.cat((logits[:, :1], logits), 1)
        for score in moe_cases.SCORES:
            truth = reference.moe_route(logits.double(), 3, score=score)
            expected = moe_cases.route(logits, 3, score=score)
            for mine, theirs in zip(expected[1:], truth[1:], strict=True):
                assert torch.equal(mine, theirs)
            gradient = moe_cases.route_backward(grad, logits, expected[1], expected[5], score=score)
            for strided in (logits, wide[:, 1:], logits.t().contiguous().t()):
                found = moe_cases.route(strided, 3, score=score, order=order)
                for mine, theirs in zip(found, expected, strict=True):
                    assert torch.equal(mine, theirs)
                mine = moe_cases.route_backward(grad, strided, found[1], found[5], score=score, order=order)
                assert torch.equal(mine, gradient)


def test_moe_place(arch):
    orders = list(emulator.ORDERS)
    for i, (rows, num_experts, top_k) in enumerate(moe_cases.ROUTES):
        generator = torch.Generator().manual_seed(i)
        experts = torch.randint(num_experts, (rows, top_k), generator=generator)  # also twice the same in a row
        capacity = None if i % 3 == 0 else -(-7 * rows * top_k // (10 * num_experts))
        options = {"capacity": capacity, "valid": moe_valid(rows, i)}
        ours = moe_cases.place(experts, num_experts, **options, arch=arch, order=orders[i % len(orders)])
        truth = reference.moe_routing(torch.ones(rows, top_k), experts, num_experts, **options)[2:]
        for mine, theirs in zip(ours, truth, strict=True):
            assert torch.equal(mine, theirs)


def test_moe_place_reports_experts_out_of_bounds(arch):
    for rows in (6, 200):  # one block, two
        experts = torch.arange(2 * rows).view(rows, 2) % 4
        experts[2, 1], experts[4, 0], experts[5, 0] = 4, -1, 2**40
        valid = torch.arange(rows) != 5
        found, errors = moe_cases.place(experts, 4, valid=valid, with_errors=True, arch=arch)
        assert errors == 4
        counts, _, order, position = found
        assert counts.sum() == 2 * rows - 4
        assert position[[5, 8]].tolist() == [2 * rows] * 2  # beyond all places: the row becomes NaN in combine
        assert position[[10, 11]].tolist() == [-1] * 2
        assert (order >= 0).sum() == 2 * rows - 4


@pytest.mark.parametrize("kind", ["switch", "importance_cv2", "z", "usage_mse"])
def test_moe_aux_loss(dtype, kind, arch):
    orders = list(emulator.ORDERS)
    for i, (rows, num_experts, top_k) in enumerate(moe_cases.ROUTES):
        logits, valid = moe_logits(rows, num_experts, dtype, 2 * i), moe_valid(rows, i)
        counts = reference.moe_route(logits.double(), top_k, valid=valid)[2]
        options, how = {"kind": kind, "valid": valid}, {"arch": arch, "order": orders[i % len(orders)]}
        loss, slope = moe_cases.aux_loss(logits, counts, top_k, **options, **how)
        found, grads = [], []
        for real in (torch.float32, torch.float64):
            leaf = logits.to(real).requires_grad_()
            found.append(reference.moe_aux_loss(leaf, counts, top_k, **options))
            if kind != "usage_mse":
                grads += torch.autograd.grad(3 * found[-1], leaf)
        assert_close_to_reference(loss, *found)
        if kind != "usage_mse":
            mine = moe_cases.aux_loss_backward(torch.tensor(3.0), logits, slope, **options, **how)
            assert_close_to_reference(mine, grads[0].to(dtype), grads[1])


def moe_rows(dtype):
    """(x, routing, capacity, order) of every kind of row; x lies with gaps every other time."""
    orders = list(emulator.ORDERS)
    for i, shape in enumerate(moe_cases.ROWS):
        rows, capacity = 5, None if i % 2 else 2
        weights, experts, _, offsets, _, position = reference.moe_route(
            moe_logits(rows, 4), 3, capacity=2 if i % 4 < 2 or capacity else None, valid=moe_valid(rows, i // 2)
        )
        x = random_image((rows, 2, shape[0], max(torch.Size(shape[1:]).numel(), 1)), dtype, seed=i)[:, i % 3 // 2]
        yield (
            x.reshape(rows, *shape) if i % 3 else x.contiguous().view(rows, *shape),
            weights,
            (
                experts,
                offsets,
                position,
            ),
            capacity,
            orders[i % len(orders)],
        )


def test_moe_rows(dtype, arch):
    for x, weights, routed, capacity, order in moe_rows(dtype):
        how = {"capacity": capacity, "arch": arch, "order": order}
        y = moe_cases.dispatch(x, *routed, **how)
        assert torch.equal(y, reference.moe_dispatch(x, *routed, capacity=capacity))
        y = y.roll(1, 0) * 3
        for given in (weights, None):
            scale = torch.ones_like(weights) if given is None else given
            same, truth = (
                reference.moe_combine(y.to(real), scale.to(real), *routed, capacity=capacity)
                for real in (torch.float32, torch.float64)
            )
            ours = moe_cases.combine(y, given, *routed, **how)
            assert_close_to_reference(ours, same.to(dtype), truth)
        found = []
        for real in (torch.float32, torch.float64):
            leaves = y.to(real).requires_grad_(), weights.to(real).requires_grad_()
            combined = reference.moe_combine(*leaves, *routed, capacity=capacity)
            found.append(torch.autograd.grad(combined, leaves, x.to(real)))
        ours = moe_cases.combine_backward(x, y, weights, *routed, **how)
        same, truth = found
        assert_close_to_reference(ours, (same[0].to(dtype), same[1]), truth)


def test_moe_strides_over_a_small_grid(dtype):
    logits, capped = moe_logits(300, 5, dtype), {"grid_cap": 2, "order": "random"}
    expected = moe_cases.route(logits, 2, capacity=90)
    for mine, theirs in zip(moe_cases.route(logits, 2, capacity=90, **capped), expected, strict=True):
        assert torch.equal(mine, theirs)
    weights, experts, counts, _, _, position = expected
    assert torch.equal(
        moe_cases.route_backward(weights, logits, experts, position, **capped),
        moe_cases.route_backward(weights, logits, experts, position),
    )
    loss, slope = moe_cases.aux_loss(logits, counts, 2)
    assert torch.equal(moe_cases.aux_loss(logits, counts, 2, **capped)[0], loss)
    assert torch.equal(
        moe_cases.aux_loss_backward(loss, logits, slope, **capped), moe_cases.aux_loss_backward(loss, logits, slope)
    )
    for x, weights, routed, capacity, _ in moe_rows(dtype):
        y = moe_cases.dispatch(x, *routed, capacity=capacity)
        assert torch.equal(moe_cases.dispatch(x, *routed, capacity=capacity, **capped), y)
        for name, arguments in (("combine", (y, weights)), ("combine_backward", (x, y, weights))):
            op = getattr(moe_cases, name)
            ours, theirs = (op(*arguments, *routed, capacity=capacity, **how) for how in (capped, {}))
            for mine, other in zip(ours, theirs, strict=True):
                assert torch.equal(mine, other)


def test_moe_bad_values_become_nan_and_are_reported(dtype, order):
    logits = moe_logits(6, 4, dtype)
    logits[2, 1] = logits[4, 0] = float("nan")
    valid = torch.tensor([True, True, True, True, False, True])
    (weights, experts, *_), errors = moe_cases.route(logits, 2, valid=valid, with_errors=True, order=order)
    assert errors == 2
    assert weights.isnan().all(1).tolist() == [False, False, True, False, False, False]
    assert torch.all(weights[4] == 0)
    assert torch.all((experts >= 0) & (experts < 4))
    good, errors = moe_cases.route(moe_logits(6, 4, dtype), 2, capacity=3, with_errors=True, order=order)
    weights, experts, _, offsets, _, position = good
    assert errors == 0
    x, y = random_image((6, 3, 2, 2), dtype), random_image((12, 3, 2, 2), dtype)
    for bad in (-2, 12, 2**40):
        wrong = position.clone()
        wrong[5] = bad  # of row 2
        for capacity in (None, 3):
            copies = y if capacity is None else y.view(4, 3, 3, 2, 2)
            how = {"capacity": capacity, "with_errors": True, "order": order}
            assert moe_cases.dispatch(x, experts, offsets, wrong, **how)[1] == 4
            combined, errors = moe_cases.combine(copies, weights, experts, offsets, wrong, **how)
            assert errors == 4
            assert combined.isnan().flatten(1).any(1).tolist() == [False, False, True, False, False, False]
            _, grad, errors = moe_cases.combine_backward(x, copies, weights, experts, offsets, wrong, **how)
            assert errors == 4
            assert grad.isnan().nonzero().tolist() == [[2, 1]]
    wrong = experts.clone()
    wrong[1, 0] = 4
    grad, errors = moe_cases.route_backward(weights, logits, wrong, position, with_errors=True, order=order)
    assert errors == 4
    assert torch.all(grad[1].isnan().sum() >= 1)


def test_moe_empty():
    weights, experts, counts, offsets, _, position = moe_cases.route(torch.empty(0, 4), 2)
    assert counts.tolist() == [0] * 4
    assert offsets.tolist() == [0] * 5
    assert moe_cases.aux_loss(torch.empty(0, 4), counts, 2)[0] == 0
    assert moe_cases.aux_loss_backward(torch.ones(()), torch.empty(0, 4), torch.ones(4)).shape == (0, 4)
    assert moe_cases.route_backward(weights, torch.empty(0, 4), experts, position).shape == (0, 4)
    x = torch.empty(0, 8)
    assert moe_cases.dispatch(x, experts, offsets, position).shape == (0, 8)
    padded = moe_cases.dispatch(x, experts, offsets, position, capacity=2)
    assert torch.equal(padded, torch.zeros(4, 2, 8))
    assert moe_cases.combine(padded, weights, experts, offsets, position, capacity=2).shape == (0, 8)
    grad, _ = moe_cases.combine_backward(x, padded, weights, experts, offsets, position, capacity=2)
    assert torch.equal(grad, torch.zeros(4, 2, 8))
    weights, experts, _, offsets, _, position = moe_cases.route(torch.rand(3, 4), 2)
    x = torch.empty(3, 0)
    y = moe_cases.dispatch(x, experts, offsets, position)
    assert y.shape == (6, 0)
    assert torch.equal(moe_cases.combine_backward(x, y, weights, experts, offsets, position)[1], torch.zeros(3, 2))


@pytest.mark.slow
def test_moe_broken_build_is_noticed():
    weights, experts, _, offsets, _, position = moe_cases.route(moe_logits(3, 4), 2)
    x, y = random_image((3, 4, 2, 2)), random_image((6, 4, 2, 2))
    for name, arguments in (("combine", (y, weights)), ("combine_backward", (x, y, weights))):
        op = getattr(moe_cases, name)
        wrong, right = (op(*arguments, experts, offsets, position, define=d) for d in ("CAMOX_BREAK_MOE", ""))
        assert not torch.allclose(wrong[0], right[0], atol=1e-4)
