"""Causal linear_attention's CUDA kernels on the CPU."""

import emulator
import pytest
import torch
from attention_heads import FEATURE_MAPS, MEMORY, NORMALIZATIONS, heads
from causal_attention import MODES, SHAPES, backward, both, forward, inputs, step
from helpers import assert_close_to_reference

from camox_ops import reference

CU_SEQLENS = [0, 5, 5, 69, 70, 136]
CU_SEQLENS_ERROR = 16  # CAMOX_ERROR_CU_SEQLENS
# Of tests that take long: of each dtype every second mode, all normalizations and both kinds of causality.
MODES_IN_TURN = [
    pytest.param(dtype, *mode, marks=pytest.mark.slow if dtype == torch.float16 or (i + k // 2 + k) % 2 else ())
    for i, dtype in enumerate(emulator.DTYPES.values())
    for k, mode in enumerate(MODES)
]


def computed(dtype, given):
    """Results of the reference and gradients of its inputs, computed in a dtype."""
    qkv, initial, grads, options = given
    inputs = [tensor.to(dtype) for tensor in (*qkv, *initial)]
    results, pullback = torch.func.vjp(lambda *inputs: reference.linear_attention(*inputs, **options), *inputs)
    return [*results, *pullback(tuple(grad.to(y.dtype) for grad, y in zip(grads, results, strict=True)))]


def assert_right(given, feature_map="elu1", **way):
    given[3]["feature_map"] = feature_map
    truth, same = (computed(dtype, given) for dtype in (torch.float64, given[0][0].dtype))
    ours = both(given, **way)
    assert_close_to_reference(ours, [x.to(y.dtype) for x, y in zip(same, ours, strict=True)], truth)


@pytest.mark.parametrize("memory", MEMORY)
def test_causal_matches_reference(dtype, memory, arch):
    first = (arch > 800) + MEMORY.index(memory)
    for turn, shape in enumerate(SHAPES):
        if (turn + first) % 2:
            continue
        normalize, strict = MODES[(turn + first // 2) % len(MODES)]
        given = inputs(
            shape, dtype, memory, normalize=normalize, causal="strict" if strict else True, masked=turn % 3 == 1
        )
        assert_right(given, how={"arch": arch, "order": list(emulator.ORDERS)[turn % 4]})


@pytest.mark.parametrize(("normalize", "strict"), MODES)
@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
def test_causal_modes(feature_map, normalize, strict, arch, share):
    first = FEATURE_MAPS.index(feature_map) + NORMALIZATIONS.index(normalize) + strict
    for turn, dtype in enumerate((torch.float32, torch.bfloat16)):
        if (first + turn) % 2 != share:
            continue
        causal, cu_seqlens = "strict" if strict else True, CU_SEQLENS if turn else None
        given = inputs(
            (1, 1, 136, 16, 16), dtype, normalize=normalize, causal=causal, masked=turn == 1, cu_seqlens=cu_seqlens
        )
        if feature_map == "identity":  # sums that stay off 0
            given[0][:2] = (tensor.abs() for tensor in given[0][:2])
        assert_right(given, feature_map, how={"arch": arch})


@pytest.mark.parametrize("memory", ("dense", "strided"))
def test_causal_stays_inside_at_both_ends(dtype, memory, share):
    """Flush against a guard page at the end in the tests above, at the start here; the bits are the same."""
    given = inputs((1, 2, 70, 16, 24), dtype, memory, masked=True, cu_seqlens=[0, 3, 70])
    right = both(given)
    order = ("reverse", "random")[(share + (memory == "strided")) % 2]
    for ours, other in zip(both(given, flush="start", how={"order": order}), right, strict=True):
        assert torch.equal(ours, other)


def test_causal_small_grid_strides_over_the_rest(dtype):
    for memory in ("dense", "strided"):
        given = inputs((1, 2, 70, 24, 16), dtype, memory, normalize="feature")
        if dtype == torch.bfloat16 and memory == "dense":
            continue  # fewer blocks have longer segments, whose sums are others: test_segments_of_several_chunks
        for ours, other in zip(both(given, how={"grid_cap": 2, "order": "random"}), both(given), strict=True):
            assert torch.equal(ours, other)


@pytest.mark.parametrize(("normalize", "strict"), MODES)
def test_segments_of_several_chunks(normalize, strict, share):
    """A block goes from chunk to chunk with the state in registers: a smaller grid has longer segments."""
    causal = "strict" if strict else True
    for turn, (n, d, feature_map) in enumerate([(64, 64, "elu1"), (32, 48, "elu1"), (40, 16, "relu")]):
        if (turn + NORMALIZATIONS.index(normalize) + strict) % 2 != share:
            continue
        cu_seqlens = [0, 150, 150, 230] if turn != 1 else None
        given = inputs(
            (1, 1, 230, n, d),
            torch.bfloat16,
            normalize=normalize,
            causal=causal,
            masked=turn == 0,
            cu_seqlens=cu_seqlens,
            seed=turn,
        )
        assert_right(given, feature_map, how={"grid_cap": 1 + turn, "order": "random"})


@pytest.mark.parametrize(("dtype", "normalize", "strict"), MODES_IN_TURN)
@pytest.mark.parametrize("value", [float("nan"), pytest.param(float("inf"), marks=pytest.mark.slow)])
def test_what_is_not_finite_does_not_reach_back(dtype, normalize, strict, value):
    """From position 70 of 130 on, to both ends of time: what lies before has the bits that it has without, on tensor
    cores up to those of a sum of two bfloat16, which terms that are added one by one do not have."""

    def assert_same(ours, right):
        if dtype == torch.float32:
            assert torch.equal(ours, right)
        else:
            atol = 2**-14 * right.abs().max().item()
            torch.testing.assert_close(ours, right, rtol=torch.finfo(dtype).eps, atol=atol)

    causal, at = "strict" if strict else True, 70
    given = inputs((1, 1, 130, 16, 16), dtype, "strided" if strict else "dense", normalize=normalize, causal=causal)
    right = both(given)
    for spoilt in range(3):  # q, k, v
        qkv = [tensor.clone() for tensor in given[0]]
        qkv[spoilt][:, :, at] = value
        ours = both((qkv, *given[1:]))
        assert_same(ours[0][:, :, :at], right[0][:, :, :at])
        assert not ours[0][:, :, at:].isfinite().all()
        grad_q = -5 if normalize == "sum" else -4
        assert_same(ours[grad_q][:, :, :at], right[grad_q][:, :, :at])
    grads = [tensor.clone() for tensor in given[2]]
    grads[0][:, :, at] = value
    ours = both((*given[:2], grads, given[3]))
    for grad in (grad_q + 1, grad_q + 2):
        assert_same(ours[grad][:, :, at + 1 :], right[grad][:, :, at + 1 :])


@pytest.mark.parametrize("normalize", NORMALIZATIONS)
def test_ignored_keys_may_hold_anything(dtype, normalize):
    given = inputs((2, 1, 70, 16, 24), dtype, normalize=normalize, masked=True)
    mask, right = given[3]["key_mask"][:, None], both(given)
    spoilt = [tensor.clone() for tensor in given[0]]
    for tensor in spoilt[1:]:
        tensor[mask] = float("nan")
    ours = both((spoilt, *given[1:]))
    for mine, expected in zip(ours, right, strict=True):
        assert torch.equal(mine, expected)
    for grad in ours[-4:-2] if normalize == "sum" else ours[-3:-1]:
        assert (grad[mask] == 0).all()


def test_rows_whose_sum_is_zero(dtype):
    given = inputs((1, 1, 70, 16, 16), dtype, normalize="feature")
    for tensor in given[0][:2]:
        tensor[:, :, 3:5] = -1
    given[3]["feature_map"] = "relu"
    ours = both(given)
    assert all(tensor.isfinite().all() for tensor in ours)
    assert all((ours[i][:, :, 3:5] == 0).all() for i in (0, 2, 3, 4))


def test_empty():
    for shape, cu_seqlens in (
        ((0, 2, 4, 3, 5), None),
        ((2, 0, 4, 3, 5), None),
        ((2, 2, 0, 3, 5), None),
        ((1, 2, 0, 3, 5), [0, 0, 0]),
    ):
        given = inputs(shape, torch.float32, cu_seqlens=cu_seqlens)
        ours = both(given)
        for mine, expected in zip((*ours[1:3], *ours[-2:]), (*given[1], *given[2][1:]), strict=True):
            assert torch.equal(mine, expected)


@pytest.mark.parametrize("bounds", [[0, 2, 4], [1, 5], [0, 4, 3, 5], [0, -1, 5], [0, 9, 5], [0, 5, 7], [-3, 5], [5, 0]])
def test_values_of_cu_seqlens(bounds):
    """Refused in the word of the device; nothing is read or written out of bounds, and nothing stays unwritten."""
    given = inputs((1, 2, 5, 3, 4), torch.float32, cu_seqlens=bounds)
    results, error = forward(*given[0], *given[1], **given[3])
    assert error == CU_SEQLENS_ERROR
    assert all(tensor.isfinite().all() for tensor in (*results, *backward(given[2], *given[0], *given[1], **given[3])))


def test_many_sequences():
    """More than the threads that look for their bounds; empty ones between."""
    lengths = [i % 4 if i % 9 < 2 else 0 for i in range(270)]
    cu_seqlens = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    given = inputs((1, 1, cu_seqlens[-1], 4, 4), torch.float32, cu_seqlens=cu_seqlens)
    results, error = forward(*given[0], *given[1], **given[3], how={"order": "random"})
    assert error == 0
    expected = reference.linear_attention(*given[0], *given[1], **given[3])
    for mine, other in zip(results, expected, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize(("normalize", "strict"), MODES)
def test_step(dtype, normalize, strict, arch):
    for n, d in ((3, 5), (40, 16), (256, 200)):
        q, k, v, _ = (x[:, :, 0] for x in heads((2, 3, 1, n, d), dtype))
        generator = torch.Generator().manual_seed(n)
        s, z = (torch.rand(size, generator=generator) for size in ((2, 3, n, d), (2, 3, n)))
        state = (s, z) if normalize == "sum" else (s, None)
        options = {"normalize": normalize, "eps": 1e-2}
        ours = step(q, k, v, *state, causal="strict" if strict else True, **options, how={"arch": arch})
        truth, same = (
            reference.linear_attention_step(
                *(x if x is None else x.to(of) for x in (q, k, v, *state)), strict=strict, **options
            )
            for of in (torch.float64, dtype)
        )
        assert_close_to_reference(ours, [x.to(y.dtype) for x, y in zip(same, ours, strict=True)], truth)


@pytest.mark.slow
def test_causal_broken_build_is_noticed(dtype):
    given = inputs((1, 1, 20, 16, 16), dtype)
    right, wrong = both(given), both(given, how={"define": "CAMOX_BREAK_LINEAR_ATTENTION"})
    for index in (0, 3, 4, 5):
        assert not torch.allclose(right[index], wrong[index], atol=1e-4)
    rows = [x[:, :, 0] for x in given[0]]
    right, wrong = (step(*rows, *given[1], how=how) for how in ({}, {"define": "CAMOX_BREAK_LINEAR_ATTENTION"}))
    assert not torch.allclose(right[0], wrong[0], atol=1e-4)
