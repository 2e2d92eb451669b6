"""short_attention's CUDA kernels on the CPU."""

import itertools
import math

import emulator
import pytest
import short_attention_cases
import torch
from dropout_inputs import normal
from emulator import doubled
from helpers import assert_close_to_reference, random_image

from camox_ops import reference


def short_attention_inputs(shapes, dtype, memory):
    """(grad, q, k, v, options, order): padding, dropout and causal in turn."""
    cases, orders = [], list(emulator.ORDERS)
    for i, shape in enumerate(shapes):
        s, t, h, d = shape
        x = random_image((s, t, 3 * h, d), dtype).view(s, t, 3, h, d).unbind(2)
        if memory == "strided":
            x = torch.stack([torch.stack(x, 2), torch.full((s, t, 3, h, d), math.nan, dtype=dtype)], -1)
            x = x[..., 0].unbind(2)
        elif memory == "expanded":
            x = [part[:1].expand(shape) for part in x]
        elif memory == "contiguous":
            x = [part.contiguous() for part in x]
        padding = random_image((1, 1, s, t), seed=3)[0, 0] > 0.7
        padding[0] = True
        for which in (i % 2, 2 + i % 2, 7):
            seed = torch.tensor(0x0123456789ABCDEF) if which & 2 else None
            options = (padding if which & 1 else None, seed, bool(which & 4), d**-0.5, 0.3)
            cases.append((random_image(shape, dtype, seed=1), *x, options, orders[len(cases) % len(orders)]))
    return cases


def assert_short_attention(shapes, dtype, memory, arch, share):
    first = list(emulator.DTYPES.values()).index(dtype) + short_attention_cases.MEMORY.index(memory)
    for turn, (grad, *qkv, options, order) in enumerate(short_attention_inputs(shapes, dtype, memory), start=first):
        if turn % 2 != share:
            continue
        ours = short_attention_cases.forward(*qkv, *options, arch=arch, order=order)
        same, truth = (reference.short_attention(*x, *options) for x in (qkv, doubled(*qkv)))
        assert_close_to_reference(ours, same, truth)
        ours = short_attention_cases.backward(grad, *qkv, *options, arch=arch, order=order)
        same = reference.short_attention_backward(grad, *qkv, *options)
        # A lone key's gradients are 0 but for rounding.
        truth = reference.short_attention_backward(*doubled(grad, *qkv), *options)
        truth = [t if t.any() else t + 8 * torch.finfo(torch.float32).eps for t in truth]
        assert_close_to_reference(ours, same, truth)


@pytest.mark.parametrize("memory", short_attention_cases.MEMORY)
def test_short_attention(dtype, memory, arch, share):
    assert_short_attention(short_attention_cases.SHAPES, dtype, memory, arch, share)


@pytest.mark.parametrize("memory", ("contiguous", "packed", "expanded"))
@pytest.mark.parametrize("dtype", emulator.HALVES, ids=str)
def test_short_attention_on_tensor_cores(dtype, memory, arch, share):
    assert_short_attention(short_attention_cases.MMA_SHAPES, dtype, memory, arch, share)


@pytest.mark.parametrize("dim", (12, 16))
def test_short_attention_strides_over_a_small_grid(dtype, order, dim):
    x = random_image((4, 50, 6, 4 * dim), dtype).unflatten(3, (4, dim)).transpose(1, 2)[:, :, :20]
    q, k, v, grad = x.unbind(3)
    options = (None, torch.tensor(7), False, 0.3, 0.2)
    capped = {"grid_cap": 2, "order": order}
    out = short_attention_cases.forward(q, k, v, *options)
    assert torch.equal(short_attention_cases.forward(q, k, v, *options, **capped), out)
    grads = short_attention_cases.backward(grad, q, k, v, *options)
    for mine, theirs in zip(short_attention_cases.backward(grad, q, k, v, *options, **capped), grads, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("dtype", "length", "dim"), [(torch.float32, 6, 6), (torch.bfloat16, 64, 64), (torch.float16, 21, 24)]
)
def test_short_attention_masks_are_those_of_the_cpu(dtype, length, dim):
    shape = (3, length, 4, dim)
    q, k = (random_image(shape, dtype, seed=seed) / dim for seed in (1, 2))
    options = (None, torch.tensor(-5), False, 1.0, 0.4)
    eye = torch.eye(length, dim, dtype=dtype).view(1, length, 1, dim).expand(shape)
    cpu = torch.ops.camox_ops.short_attention(q, k, eye, *options)
    assert torch.equal(short_attention_cases.forward(q, k, eye, *options) == 0, cpu == 0)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_short_attention_padded_keys_and_values_may_hold_anything(dtype):
    """Staged in shared memory, by vectors and by elements, for tensor cores, and read where they lie."""
    shapes = ((5, 6, 2, 12), (5, 5, 2, 7), (2, 40, 1, 32), (2, 9, 1, 2200))
    for shape, causal in itertools.product(shapes, (False, True)):
        grad, q, k, v = (normal(shape, dtype, seed=seed) for seed in range(4))
        padding = normal(shape[:2], seed=5) > 0.3
        options = (padding, None, causal, 0.3, 0.0)
        filled = [x.masked_fill(padding[:, :, None, None], math.nan) for x in (k, v)]
        zeros = [x.masked_fill(padding[:, :, None, None], 0) for x in (k, v)]
        out = short_attention_cases.forward(q, *filled, *options)
        assert torch.equal(out, short_attention_cases.forward(q, *zeros, *options))
        grads = short_attention_cases.backward(grad, q, *filled, *options)
        expected = short_attention_cases.backward(grad, q, *zeros, *options)
        for ours, theirs in zip(grads, expected, strict=True):
            assert torch.equal(ours, theirs)


def test_short_attention_empty():
    for shape in ((0, 3, 4, 4), (2, 0, 4, 4), (2, 3, 0, 4), (2, 3, 4, 0)):
        x = torch.empty(shape)
        assert short_attention_cases.forward(x, x, x, None, None, False, 1.0, 0.0).shape == shape
        assert short_attention_cases.backward(x, x, x, x, None, None, False, 1.0, 0.0)[0].shape == shape


@pytest.mark.slow
def test_short_attention_broken_build_is_noticed():
    options = (None, None, False, 0.5, 0.0)
    for shape, dtype in (((2, 3, 2, 4), torch.float32), ((2, 17, 2, 8), torch.float16)):
        x = random_image(shape, dtype)
        wrong = short_attention_cases.forward(x, x, x, *options, define="CAMOX_BREAK_SHORT_ATTENTION")
        assert not torch.allclose(wrong, short_attention_cases.forward(x, x, x, *options), atol=1e-4)
        wrong = short_attention_cases.backward(x, x, x, x, *options, define="CAMOX_BREAK_SHORT_ATTENTION")[0]
        assert not torch.allclose(wrong, short_attention_cases.backward(x, x, x, x, *options)[0], atol=1e-4)
