"""rope's CUDA kernels on the CPU."""

import emulator
import pytest
import rope_cases
import torch
from emulator import HALVES, doubled
from helpers import assert_close_to_reference, assert_one_rounding, random_image
from rope_cases import rope_input, rope_tables

from camox_ops import reference


def rope_inputs(dtype, memory, share):
    """(grad, x, cos, sin, options, order): pairings, tables, positions and orders in turn."""
    cases, orders = [], list(emulator.ORDERS)
    first = list(emulator.DTYPES.values()).index(dtype) + rope_cases.MEMORY.index(memory)
    for i, (shape, rotary_dim) in enumerate(rope_cases.SHAPES):
        for interleaved in (False, True):
            for kind in range(3):
                if (first + i + interleaved + kind) % 2 != share:
                    continue
                rows = (None, torch.arange(shape[2]).flip(0) * 2, torch.arange(shape[0] * shape[2]) % 3)[kind]
                rows = rows.view(shape[0], shape[2]) if kind == 2 else rows
                columns = rotary_dim if (kind + i) % 2 else rotary_dim // 2
                options = {"interleaved": interleaved, "rotary_dim": rotary_dim, "positions": rows}
                options["transposed"] = kind == 1
                x, grad = (rope_input(shape, dtype, memory, seed) for seed in (0, 1))
                order = orders[len(cases) % len(orders)]
                cases.append((grad, x, *rope_tables(2 * shape[2], columns), options, order))
    return cases


@pytest.mark.parametrize("memory", rope_cases.MEMORY)
def test_rope_forward(dtype, memory, arch, share):
    for _, x, cos, sin, options, order in rope_inputs(dtype, memory, share):
        how = {"arch": arch, "order": order}
        ours = rope_cases.forward(x, cos, sin, **options, how=how)
        truth = reference.rope(*doubled(x, cos, sin), **options)
        assert_close_to_reference(ours, reference.rope(x, cos, sin, **options), truth)
        if dtype in HALVES:
            assert_one_rounding(ours, rope_cases.forward(x.float(), cos, sin, **options, how={"arch": arch}))
        if memory != "expanded":
            assert torch.equal(rope_cases.forward(x, cos, sin, **options, inplace=True, how=how), ours)


@pytest.mark.parametrize("memory", rope_cases.MEMORY)
def test_rope_backward(dtype, memory, arch, share):
    for grad, x, cos, sin, options, order in rope_inputs(dtype, memory, share):
        ours = rope_cases.backward(grad, x, cos, sin, **options, how={"arch": arch, "order": order})
        truth = reference.rope_backward(*doubled(grad, x, cos, sin), **options)
        assert_close_to_reference(ours, reference.rope_backward(grad, x, cos, sin, **options), truth)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_layouts_and_packed_sequences(interleaved, dtype, order):
    x, (cos, sin) = random_image((2, 5, 6, 16), dtype), rope_tables(5, 8)
    how = {"order": order}
    expected = rope_cases.forward(x.transpose(1, 2).contiguous(), cos, sin, interleaved=interleaved, how=how)
    ours = rope_cases.forward(x, cos, sin, interleaved=interleaved, layout="bthd", how=how)
    assert torch.equal(ours, expected.transpose(1, 2))
    cu_seqlens = torch.tensor([0, 0, 4, 9, 10], dtype=torch.int32)
    packed, grad = x.flatten(0, 1), random_image((2, 5, 6, 16), dtype, seed=1).flatten(0, 1)
    options = {"interleaved": interleaved, "cu_seqlens": cu_seqlens}
    inputs = (packed, cos, sin)
    truth = reference.rope(*doubled(*inputs), **options)
    assert_close_to_reference(rope_cases.forward(*inputs, **options), reference.rope(*inputs, **options), truth)
    inputs = (grad, *inputs)
    truth = reference.rope_backward(*doubled(*inputs), **options)
    assert_close_to_reference(
        rope_cases.backward(*inputs, **options), reference.rope_backward(*inputs, **options), truth
    )


@pytest.mark.parametrize("inplace", [False, True])
def test_rope_bad_values_become_nan_and_are_reported(dtype, order, inplace):
    how = {"order": order}
    x, (cos, sin) = random_image((2, 5, 4, 20), dtype), rope_tables(6, 8)
    good = rope_cases.forward(x, cos, sin, rotary_dim=16, with_errors=True, inplace=inplace, how=how)
    assert good[1] == 0
    positions = torch.tensor([[0, -1, 2, 3], [0, 1, 6, 2**40]])
    for rotary_dim in (16, 8):
        options = {"rotary_dim": rotary_dim, "inplace": inplace, "positions": positions, "with_errors": True}
        narrow = (table[:, : rotary_dim // 2].clone() for table in (cos, sin))
        y, errors = rope_cases.forward(x, *narrow, **options, how=how)
        bad = (positions < 0) | (positions >= 6)
        assert errors == 1
        assert torch.equal(y.isnan().all(-1).all(1), bad)
        assert torch.equal(y.isnan().any(-1).any(1), bad)
    for cu_seqlens, bad in (
        ([1, 4], [True, False, False, False]),
        ([0, 2], [False, False, True, True]),
        ([0, 3, 1], [False, False, False, True]),
        ([0], [True] * 4),
    ):
        cu_seqlens = torch.tensor(cu_seqlens, dtype=torch.int32)
        packed = x[0].transpose(0, 1).contiguous()
        y, errors = rope_cases.forward(
            packed, cos, sin, rotary_dim=16, cu_seqlens=cu_seqlens, inplace=inplace, with_errors=True, how=how
        )
        assert errors == 1
        assert y.isnan().all(-1).all(-1).tolist() == bad
        assert y.isnan().any(-1).any(-1).tolist() == bad


def test_rope_strides_over_a_small_grid(dtype):
    x, grad, (cos, sin) = (
        random_image((3, 6, 5, 34), dtype),
        random_image((3, 6, 5, 34), dtype, seed=1),
        rope_tables(5, 17),
    )
    positions = torch.tensor([4, 4, 0, 1, 4])
    capped = {"grid_cap": 2, "order": "random"}
    assert torch.equal(rope_cases.forward(x, cos, sin, how=capped), rope_cases.forward(x, cos, sin))
    for options in ({}, {"positions": positions}):
        ours = rope_cases.backward(grad, x, cos, sin, **options, how=capped)
        for mine, theirs in zip(ours, rope_cases.backward(grad, x, cos, sin, **options), strict=True):
            assert torch.equal(mine, theirs)


def test_rope_many_heads_and_columns(order):
    """More heads than a thread serves at once, more columns than a block sums, more tokens than it scans at once."""
    if order == "forward":
        x, (cos, sin) = random_image((1, 5, 8200, 32)), rope_tables(8200, 16)
        ours = rope_cases.forward(x, cos, sin)
        assert_close_to_reference(ours, reference.rope(x, cos, sin), reference.rope(*doubled(x, cos, sin)))
    x, grad, (cos, sin) = random_image((2, 2, 150, 268)), random_image((2, 2, 150, 268), seed=1), rope_tables(3, 134)
    positions = torch.arange(300).view(2, 150) % 3
    ours = rope_cases.backward(grad, x, cos, sin, positions=positions, how={"order": order})
    truth = reference.rope_backward(*doubled(grad, x, cos, sin), positions=positions)
    assert_close_to_reference(ours, reference.rope_backward(grad, x, cos, sin, positions=positions), truth)


@pytest.mark.parametrize("positions", [None, torch.zeros(1, dtype=torch.int64)])
def test_rope_gradients_of_tables_of_many_tokens(positions):
    x, grad = random_image((9000, 1, 1, 4), kind="offset"), random_image((9000, 1, 1, 4), seed=1)
    cos, sin = rope_tables(1, 2)
    ours = rope_cases.backward(grad, x, cos, sin, positions=positions)
    truth = reference.rope_backward(*doubled(grad, x, cos, sin), positions=positions)
    assert_close_to_reference(ours, reference.rope_backward(grad, x, cos, sin, positions=positions), truth)


def test_rope_empty():
    for shape in ((0, 3, 4, 6), (2, 0, 4, 6), (2, 3, 0, 6), (2, 3, 4, 0)):
        x, (cos, sin) = torch.empty(shape), rope_tables(4, shape[3] // 2)
        assert rope_cases.forward(x, cos, sin).shape == shape
        assert torch.equal(rope_cases.backward(x, x, cos, sin)[1], torch.zeros_like(cos))


@pytest.mark.slow
def test_rope_broken_build_is_noticed():
    x, (cos, sin) = random_image((1, 2, 3, 8)), rope_tables(3, 4)
    broken = {"define": "CAMOX_BREAK_ROPE"}
    for interleaved in (False, True):
        wrong = rope_cases.forward(x, cos, sin, interleaved=interleaved, how=broken)
        assert not torch.allclose(wrong, rope_cases.forward(x, cos, sin, interleaved=interleaved), atol=1e-4)
    wrong = rope_cases.backward(x, x, cos, sin, how=broken)[0]
    assert not torch.allclose(wrong, rope_cases.backward(x, x, cos, sin)[0], atol=1e-4)
