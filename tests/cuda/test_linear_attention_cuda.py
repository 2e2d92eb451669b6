"""linear_attention's CUDA kernels on the CPU."""

import emulator
import linear_attention_cases
import pytest
import torch
from attention_heads import FEATURE_MAPS, MEMORY, NORMALIZATIONS
from emulator import HALVES
from helpers import assert_close_to_reference
from linear_attention_cases import attention_inputs, attention_runs

from camox_ops import reference


def attention_truth(dtype, qkv, initial, grads, options):
    """Results of the reference and gradients of its inputs, computed in a dtype."""
    inputs = [tensor.to(dtype) for tensor in (*qkv, *initial)]
    results, pullback = torch.func.vjp(lambda *inputs: reference.linear_attention(*inputs, **options), *inputs)
    flowing = [*grads, *map(torch.zeros_like, results[len(grads) :])]
    return [*results, *pullback(tuple(grad.to(y.dtype) for grad, y in zip(flowing, results, strict=True)))]


def assert_attention_right(inputs, feature_map="elu1", arch=900, order="forward", **how):
    qkv, options, initial, grads = inputs
    options = {**options, "feature_map": feature_map}
    truth = attention_truth(torch.float64, qkv, initial, grads, options)
    same = attention_truth(qkv[0].dtype, qkv, initial, grads, options)
    results = linear_attention_cases.forward(*qkv, *initial, **options, how={"arch": arch, "order": order}, **how)
    state = [tensor.float() for tensor in truth[1 : len(results)]]
    gradients = linear_attention_cases.backward(
        grads, *qkv, state, **options, how={"arch": arch, "order": order}, **how
    )
    ours = [*results, *gradients[: 3 + len(initial)]]
    assert_close_to_reference(ours, [x.to(y.dtype) for x, y in zip(same, ours, strict=True)], truth)
    return ours


@pytest.mark.parametrize("memory", MEMORY)
def test_linear_attention_matches_reference(dtype, memory, arch):
    """Every shape by one of both architectures, in turn with modes, masks, states and orders."""
    first = (arch > 800) + MEMORY.index(memory)
    for turn, shape in enumerate(linear_attention_cases.SHAPES):
        if (turn + first) % 2:
            continue
        normalize = NORMALIZATIONS[(turn + first // 2) % 3]
        inputs = attention_inputs(shape, dtype, memory, normalize, turn % 3 == 1, turn % 4 < 2)
        assert_attention_right(inputs, "relu" if turn % 5 == 2 else "elu1", arch, list(emulator.ORDERS)[turn % 4])


@pytest.mark.parametrize("normalize", NORMALIZATIONS)
@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
def test_linear_attention_modes(feature_map, normalize, arch):
    dtypes = list(emulator.DTYPES.values())
    for turn in range(4):
        dtype = dtypes[turn % len(dtypes)]
        n = (16, 32, 10, 1 if normalize == "none" else 3)[turn]  # of one feature no division leaves a gradient
        qkv, *rest = attention_inputs((1, 2, 20, n, 16), dtype, "dense", normalize, turn & 1, turn & 2)
        if feature_map == "identity":  # sums that stay off 0
            qkv[:2] = (tensor.abs() for tensor in qkv[:2])
        assert_attention_right((qkv, *rest), feature_map, arch, list(emulator.ORDERS)[turn])


@pytest.mark.parametrize("memory", ["image", "dense", "strided"])
def test_linear_attention_stays_inside_at_both_ends(dtype, memory, order):
    """Flush against a guard page at the end in the tests above, at the start here; the bits are the same."""
    for shape in ((1, 2, 21, 16, 16), (1, 2, 40, 32, 32), (1, 1, 19, 10, 6)):
        inputs = attention_inputs(shape, dtype, memory, masked=True, state=True)
        for ours, other in zip(*attention_runs(inputs, {"flush": "start", "how": {"order": order}}, {}), strict=True):
            assert torch.equal(ours, other)


def test_linear_attention_small_grid_strides_over_the_rest(dtype):
    for dim in (16, 12, 70):
        inputs = attention_inputs((1, 2, 136, dim, dim), dtype, "image")
        capped = {"how": {"grid_cap": 2, "order": "random"}}
        for ours, other in zip(*attention_runs(inputs, capped, {}), strict=True):
            assert torch.equal(ours, other)


@pytest.mark.parametrize("normalize", ["sum", "feature"])
def test_linear_attention_chunks(dtype, normalize, order):
    """One chunk, several, and one that ends with the last position."""
    for chunk in (64, 128, 192):
        inputs = attention_inputs((1, 1, 192, 16, 16), dtype, "image", normalize)
        assert_attention_right(inputs, order=order, chunk=chunk)


@pytest.mark.parametrize("normalize", NORMALIZATIONS)
@pytest.mark.parametrize("dim", [16, 7, 66])
def test_linear_attention_ignored_keys_may_hold_anything(dtype, normalize, dim):
    inputs = attention_inputs((2, 1, 20, dim, dim), dtype, "dense", normalize, masked=True)
    qkv, options, *rest = inputs
    spoilt = [tensor.clone() for tensor in qkv]
    for tensor in spoilt[1:]:
        tensor[options["key_mask"][:, None]] = float("nan")
    (right,), (ours,) = attention_runs(inputs, {}), attention_runs((spoilt, options, *rest), {})
    for mine, expected in zip(ours, right, strict=True):
        assert torch.equal(mine, expected)
    for grad in ours[-4:-2] if normalize == "sum" else ours[-3:-1]:
        assert (grad[options["key_mask"][:, None]] == 0).all()


def test_linear_attention_rows_whose_sum_is_zero(dtype):
    for dim in (16, 6):
        qkv, options, *rest = attention_inputs((1, 1, 20, dim, dim), dtype, "dense", "feature")
        for tensor in qkv[:2]:
            tensor[:, :, 3:5] = -1
        options["feature_map"] = "relu"
        (ours,) = attention_runs((qkv, options, *rest), {})
        assert all(tensor.isfinite().all() for tensor in ours)
        assert all((ours[i][:, :, 3:5] == 0).all() for i in (0, 2, 3, 4))


def test_linear_attention_of_tiny_features():
    """1 / sum of features of 1e-35, times values of 1e6, is infinite; the gradient is not."""
    for dim in (16, 6):
        (q, k, v), options, *rest = attention_inputs((1, 1, 20, dim, dim), torch.float32, "dense", "feature")
        q[:, :, 3:9], k[:, :, 5:15] = -80, -80
        (ours,) = attention_runs(((q, k, 1e6 * v), options, *rest), {})
        assert all(tensor.isfinite().all() for tensor in ours)


def test_linear_attention_empty():
    for shape in ((0, 2, 4, 3, 5), (2, 0, 4, 3, 5), (2, 2, 0, 3, 5)):
        inputs = attention_inputs(shape, torch.float32, state=True)
        (ours,) = attention_runs(inputs, {})
        assert torch.equal(ours[1], inputs[2][0])
        assert torch.equal(ours[2], inputs[2][1])
        assert torch.equal(ours[-2], inputs[3][1])
        assert torch.equal(ours[-1], inputs[3][2])


@pytest.mark.parametrize("dim", [16, 32, 64])
@pytest.mark.parametrize("memory", ["image", "dense"])
def test_linear_attention_rounds_once(dim, memory):
    """On tensor cores as without, up to the 16 bits of a sum of two bfloat16."""
    for dtype, normalize in zip(HALVES, ("sum", "feature"), strict=True):
        qkv, options, *_ = attention_inputs((1, 2, 72, dim, dim), dtype, memory, normalize)
        low, high = (
            linear_attention_cases.forward(*(x.to(kind) for x in qkv), **options)[0] for kind in (dtype, torch.float32)
        )
        torch.testing.assert_close(low.float(), high, rtol=torch.finfo(dtype).eps / 2, atol=2**-16)


@pytest.mark.slow
def test_linear_attention_long():
    assert_attention_right(attention_inputs((1, 1, 100_000, 16, 16), torch.bfloat16, "image"), chunk=4096)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [16, 12, 72])
def test_linear_attention_broken_build_is_noticed(dtype, dim):
    inputs = attention_inputs((1, 1, 20, dim, dim), dtype)
    right, wrong = attention_runs(inputs, {}, {"how": {"define": "CAMOX_BREAK_LINEAR_ATTENTION"}})
    for index in (0, 3):
        assert not torch.allclose(right[index], wrong[index], atol=1e-4)
