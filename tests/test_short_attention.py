"""short_attention: values, gradients, padding, masks of dropout, what surrounds an op."""

import math

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
    every_second,
    on_device,
    on_device_of_test,
)
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck

import camox_ops as cx
from camox_ops import reference
from camox_ops.ops.short_attention import short_attention_packed

HALVES = (torch.bfloat16, torch.float16)
MEMORY = ("contiguous", "packed", "strided", "heads_first", "expanded")
# (S, T, H, D): of EmberFormer; around vectors and both traversals (T 16, T D 256); more columns than a piece; odd ones;
# for tensor cores on CUDA, of K-1 and of rows that fill no tile; four heads whose rows are whole vectors.
SHAPES = [(9, 6, 8, 12), (3, 1, 1, 1), (5, 3, 3, 2), (2, 16, 5, 16), (2, 16, 3, 17), (3, 17, 2, 7), (2, 33, 1, 65)]
SHAPES += [(2, 64, 2, 32), (2, 21, 1, 40), (5, 7, 4, 4), (3, 2, 12, 16), (5, 3, 8, 8), (4, 3, 5, 8)]
ON_CPU = pytest.mark.skipif(DEVICE.type != "cpu", reason="float64, bits and threads: on the CPU")
op = torch.ops.camox_ops
pytestmark = on_device


def normal(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, device="cpu")


def qkv_of(shape, dtype=torch.float32, memory="contiguous", seed=0):
    """q, k and v; "packed": slices of one projection; "strided": every second column of something larger."""
    s, t, h, d = shape
    x = normal((s, t, 3, h, d), seed).to(DEVICE, dtype)
    if memory == "packed":
        return x.unbind(2)
    if memory == "heads_first":
        return x.transpose(1, 3).contiguous().transpose(1, 3).unbind(2)
    if memory == "expanded":
        return tuple(part[:1].expand(shape) for part in x.unbind(2))
    if memory == "strided":
        larger = torch.full((s, t + 1, 3, h, 2 * d + 1), math.nan, dtype=dtype, device=DEVICE)
        view = larger[:, 1:, :, :, 1::2]
        view.copy_(x)
        return view.unbind(2)
    return tuple(part.contiguous() for part in x.unbind(2))


def padding_of(shape, seed=5):
    """Some keys of some sequences, all keys of the first."""
    mask = normal(shape[:2], seed) > 0.7
    mask[:1] = True
    return mask.to(DEVICE)


def seed_of(value: int = 0x0123456789ABCDEF) -> torch.Tensor:
    return torch.tensor(value, device=DEVICE)


def options_of(shape, which: int):
    """(padding, seed, causal, scale, p): eight ways over `which`."""
    padding, seed = padding_of(shape) if which & 1 else None, seed_of() if which & 2 else None
    return padding, seed, bool(which & 4), shape[3] ** -0.5, 0.3 if which & 2 else 0.0


def half_of_options(shape, dtype):
    """Four of the eight: every two of padding, dropout and causality in all their pairs. The other four are those of
    the next shape and the second next dtype."""
    turn = SHAPES.index(shape) + FLOATS.index(dtype) // 2
    return [options_of(shape, which) for which in range(8) if (which.bit_count() + turn) % 2 == 0]


def assert_half(halves, floats, shape):
    """Within one rounding of our own float32 results. For tensor cores on CUDA weights and the gradients of scores are
    rounded before a second product takes them, by up to half an eps for each term that a result adds up."""
    if DEVICE.type == "cpu" or shape[1] <= 16 or shape[3] % 8 or shape[3] > 64:
        return assert_one_rounding(halves, floats)
    for half, high in zip(halves, floats, strict=True):
        eps, high = torch.finfo(half.dtype).eps, high.double()
        excess = (half.double() - high).abs() - eps * high.abs()
        assert excess.max() <= eps / 2 * high.abs().max(), f"max excess {excess.max().item():.3e}"


def doubled(tensors):
    return [tensor.double() for tensor in tensors]


def test_smoke():
    q, k, v = qkv_of((9, 6, 8, 12))
    out = cx.short_attention(q, k, v)
    assert out.shape == q.shape
    expected = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    torch.testing.assert_close(out, expected)
    assert cx.short_attention(q, k, v, p=0.1, training=True).shape == q.shape


def test_known_values():
    q = torch.tensor([1.0, 2]).view(1, 2, 1, 1)
    k = torch.tensor([0.0, math.log(3)]).view(1, 2, 1, 1)
    v = torch.tensor([[4.0, 8], [0, 16]]).view(1, 2, 1, 2)

    def check(expected, v=v[..., :1], **options):
        out = cx.short_attention(q, k, v, scale=1.0, **options)
        torch.testing.assert_close(out.flatten(), torch.tensor(expected))

    check([1.0, 0.4])  # weights 1/4, 3/4 and 1/10, 9/10
    check([14.0, 15.2], v=v[..., 1:])
    check([4.0, 0.4], causal=True)
    check([4.0, 4.0], key_padding_mask=torch.tensor([[False, True]]))
    check([0.0, 0.0], key_padding_mask=torch.tensor([[True, True]]))
    check([0.0, 0.0], key_padding_mask=torch.tensor([[True, False]]), causal=True, v=torch.zeros(1, 2, 1, 1))
    rows = cx.short_attention(q, k, v[..., 1:], key_padding_mask=torch.tensor([[True, False]]), causal=True)
    assert rows.flatten().tolist() == [0.0, 16.0]


@every_second(dtype=FLOATS, memory=MEMORY)
def test_matches_reference(dtype, memory):
    for shape in SHAPES:
        q, k, v = qkv_of(shape, dtype, memory)
        for options in half_of_options(shape, dtype):
            ours = op.short_attention(q, k, v, *options)
            same = reference.short_attention(q, k, v, *options)
            assert_close_to_reference(ours, same, reference.short_attention(*doubled((q, k, v)), *options), scale64=4.0)
            if dtype in HALVES:
                assert_half([ours], [op.short_attention(q.float(), k.float(), v.float(), *options)], shape)


@every_second(dtype=FLOATS, memory=MEMORY)
def test_grad_matches_reference(dtype, memory):
    for shape in SHAPES:
        inputs = [normal(shape, 9).to(DEVICE, dtype), *qkv_of(shape, dtype, memory)]
        for options in half_of_options(shape, dtype):
            ours = op.short_attention_backward(*inputs, *options)
            same = reference.short_attention_backward(*inputs, *options)
            truth = reference.short_attention_backward(*doubled(inputs), *options)
            # A lone key's gradients are 0 but for rounding.
            assert_close_to_reference(ours, same, truth, scale64=30.0, terms=30.0)
            if dtype in HALVES:
                floats = op.short_attention_backward(*(x.float() for x in inputs), *options)
                assert_half(ours, floats, shape)


@ON_CPU
@pytest.mark.parametrize("shape", [(3, 4, 2, 3), (2, 17, 1, 3)])
def test_grad(shape):
    inputs = [x.requires_grad_() for x in qkv_of(shape, torch.float64, "packed")]
    for which in (0, 7):
        options = options_of(shape, which)
        assert gradcheck(lambda *x, options=options: op.short_attention(*x, *options), inputs, fast_mode=True)


def test_grad_of_the_function():
    q, k, v = (x.requires_grad_() for x in qkv_of((9, 6, 8, 12)))
    mask = padding_of((9, 6))
    grad = normal(q.shape, 3).to(q)
    ours = torch.autograd.grad(cx.short_attention(q, k, v, key_padding_mask=mask, causal=True), (q, k, v), grad)
    truth = torch.autograd.grad(reference.short_attention(q, k, v, mask, causal=True), (q, k, v), grad)
    torch.testing.assert_close(ours, truth)
    assert not ours[2][0].any()  # a sequence without keys
    cx.short_attention(q, k, v).sum().backward()  # a gradient whose strides are all 0
    expected = op.short_attention_backward(torch.ones_like(q), q, k, v, None, None, False, 12**-0.5, 0.0)
    assert torch.equal(q.grad, expected[0])


@pytest.mark.parametrize("memory", ["packed", "strided", "length_first"])
@pytest.mark.parametrize("dtype", TWO_OF_FLOATS)
def test_packed_has_the_same_bits_and_one_gradient(memory, dtype):
    """In the order of qkv in memory; of few tokens, of more, and of 8 MiB of both, where stores go past the caches."""
    for shape in ((9, 6, 8, 12), (2, 33, 1, 65), (8192, 2, 4, 64), (1040, 33, 2, 32)):
        s, t, h, d = shape
        qkv = normal((s, t, 3, h, 2 * d)).to(DEVICE, dtype)[..., ::2]
        if memory == "packed":
            qkv = qkv.contiguous()
        elif memory == "length_first":
            qkv = qkv.transpose(0, 1).contiguous().transpose(0, 1)
        qkv.requires_grad_()
        options = {"key_padding_mask": padding_of(shape), "causal": True, "p": 0.3, "training": True}
        found = []
        for function in (short_attention_packed, lambda qkv, **options: cx.short_attention(*qkv.unbind(2), **options)):
            torch.manual_seed(0)
            out = function(qkv, **options)
            found.append([out, *torch.autograd.grad(out, qkv, normal(out.shape, 3).to(out))])
        (out, grad), expected = found
        assert torch.equal(out, expected[0]) and torch.equal(grad, expected[1])
        assert out.stride() == expected[0].stride()
        order = qkv if memory == "length_first" else qkv.detach().contiguous()
        assert grad.stride() == order.stride()


def test_errors_of_packed():
    for qkv, message in (
        (torch.ones(2, 3, 2, 4, 5), r"qkv must have shape \(S, T, 3, H, D\), got \(2, 3, 2, 4, 5\)"),
        (torch.ones(2, 3, 4, 5), r"qkv must have shape \(S, T, 3, H, D\), got \(2, 3, 4, 5\)"),
        (torch.ones(2, 65, 3, 4, 5), "qkv must have at most 64 tokens in dimension 1"),
    ):
        with pytest.raises(ValueError, match=f"short_attention: {message}"):
            short_attention_packed(qkv.to(DEVICE))
    with pytest.raises(ValueError, match=r"key_padding_mask must have shape \(2, 3\), S and T of qkv, got \(3, 2\)"):
        short_attention_packed(torch.ones(2, 3, 3, 4, 5), key_padding_mask=torch.zeros(3, 2, dtype=torch.bool))


def test_large_scores():
    for shape in ((4, 6, 2, 12), (2, 20, 2, 20)):
        q, k, v = (x * 300 for x in qkv_of(shape))
        options = (padding_of(shape), None, False, 1.0, 0.0)
        truth = reference.short_attention(*doubled((q, k, v)), *options)
        assert_close_to_reference(
            op.short_attention(q, k, v, *options), reference.short_attention(q, k, v, *options), truth
        )


def test_nan_stays_in_its_sequence_and_head():
    for shape in ((40, 6, 2, 12), (3, 20, 2, 20)):
        q, k, v = qkv_of(shape)
        expected = cx.short_attention(q, k, v)
        q[1, 2, 1, 0] = math.nan
        out = cx.short_attention(q, k, v)
        assert out[1, 2, 1].isnan().all()
        out[1, 2, 1] = expected[1, 2, 1]
        assert torch.equal(out, expected)


def test_scores_that_are_all_minus_infinity_give_zeros():
    for shape in ((2, 6, 2, 12), (2, 20, 2, 20)):
        q, k, v = torch.full(shape, -math.inf), torch.ones(shape), torch.ones(shape)
        assert torch.equal(cx.short_attention(q, k, v), torch.zeros(shape))
        if DEVICE.type == "cpu":  # on CUDA PyTorch's answer is that of the kernel it chooses, zeros or NaN
            assert not F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).any()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_padded_keys_and_values_may_hold_anything(value, dtype):
    """Of sequences by lanes and by rows, of more columns than a piece, for tensor cores, of sequences without keys."""
    for shape in ((40, 6, 2, 12), (9, 3, 1, 2), (3, 20, 2, 20), (2, 7, 1, 70), (2, 40, 2, 32)):
        q, k, v = qkv_of(shape, dtype)
        grad, padding = normal(shape, 7).to(DEVICE, dtype), padding_of(shape)
        for which in range(1, 8, 2):
            options = options_of(shape, which)
            expected = [op.short_attention(q, k, v, *options), *op.short_attention_backward(grad, q, k, v, *options)]
            filled = [x.masked_fill(padding[:, :, None, None], value) for x in (k, v)]
            found = [op.short_attention(q, *filled, *options), *op.short_attention_backward(grad, q, *filled, *options)]
            for ours, theirs in zip(found, expected, strict=True):
                assert torch.equal(ours, theirs)
            assert not any(x[padding].any() for x in found[2:])


def test_shapes_of_many_sequences():
    shape = (70_001, 2, 1, 3)
    q, k, v = qkv_of(shape, memory="packed")
    out = op.short_attention(q, k, v, None, None, False, 1.0, 0.0)
    grads = op.short_attention_backward(out, q, k, v, None, None, False, 1.0, 0.0)
    for part in (slice(0, 5), slice(-5, None)):
        ends = [x[part] for x in (q, k, v)]
        torch.testing.assert_close(out[part], reference.short_attention(*ends, scale=1.0))
        truth = reference.short_attention_backward(out[part], *ends, scale=1.0)
        torch.testing.assert_close(tuple(grad[part] for grad in grads), truth)


@given(
    st.tuples(st.integers(1, 5), st.integers(1, 64), st.integers(1, 4), st.integers(1, 70)),
    st.integers(0, 7),
    st.sampled_from(MEMORY),
    st.sampled_from(FLOATS),
)
def test_shapes(shape, which, memory, dtype):
    q, k, v = qkv_of(shape, dtype, memory)
    options = options_of(shape, which)
    truth = reference.short_attention(*doubled((q, k, v)), *options)
    ours, same = op.short_attention(q, k, v, *options), reference.short_attention(q, k, v, *options)
    assert_close_to_reference(ours, same, truth, scale64=4.0)


@pytest.mark.parametrize("dtype", TWO_OF_FLOATS)
def test_large_outputs_have_the_same_bits(dtype):
    """From 8 MiB on stores go past the caches; halves are below that."""
    few, more = ((6, 8, 12, False), (6, 1, 6, False), (6, 3, 8, False)), ((40, 2, 32, True), (33, 1, 72, True))
    for length, heads, dim, causal in few + more:
        sequences = (8 << 20) // (length * heads * dim * dtype.itemsize) + 7
        q, k, v = qkv_of((sequences, length, heads, dim), dtype, "packed")
        options, cut = (padding_of((sequences, length)), None, causal, 0.5, 0.0), sequences // 2
        whole = op.short_attention_backward(q, q, k, v, *options)
        whole = (op.short_attention(q, k, v, *options), *whole)
        for part in (slice(0, cut), slice(cut, None)):
            inputs, mine = [x[part] for x in (q, k, v)], (options[0][part], *options[1:])
            ours = op.short_attention(*inputs, *mine), *op.short_attention_backward(inputs[0], *inputs, *mine)
            assert all(torch.equal(a[part], b) for a, b in zip(whole, ours, strict=True))


# ---- dropout ----


@pytest.mark.parametrize("shape", [(9, 6, 8, 12), (2, 19, 3, 5)])
def test_mask_is_that_of_dropout(shape):
    """With one column a key the output is the row of weights: zeros where dropout of the weights drops."""
    s, t, h, _ = shape
    q, k, _ = qkv_of((s, t, h, t))
    v = torch.eye(t).view(1, t, 1, t).expand(s, t, h, t)
    weights = op.short_attention(q, k, v, None, None, False, 1.0, 0.0).transpose(1, 2)
    dropped = op.short_attention(q, k, v, None, seed_of(), False, 1.0, 0.3).transpose(1, 2)
    mask = reference.dropout_mask((s, h, t, t), seed_of(), 0.3)
    assert torch.equal(dropped != 0, mask)
    torch.testing.assert_close(dropped, op.dropout(weights.contiguous(), seed_of(), 0.3))


def test_seed_is_drawn_from_the_generator():
    q, k, v = qkv_of((9, 6, 8, 12))
    torch.manual_seed(7)
    first, second = (cx.short_attention(q, k, v, p=0.5, training=True) for _ in range(2))
    assert not torch.equal(first, second)
    own = torch.Generator(DEVICE).manual_seed(7)
    assert torch.equal(cx.short_attention(q, k, v, p=0.5, training=True, generator=own), first)
    state, plain = torch.get_rng_state(), cx.short_attention(q, k, v)
    assert torch.equal(cx.short_attention(q, k, v, p=0.5), plain)
    assert torch.equal(cx.short_attention(q, k, v, training=True), plain)
    assert torch.equal(torch.get_rng_state(), state)


# ---- what surrounds an op ----


# ---- errors ----


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": [1.0]}, TypeError, "q must be a torch.Tensor, got list"),
        ({"q": torch.ones(2, 3, 4)}, ValueError, r"q must have 4 dimensions \(S, T, H, D\), got shape \(2, 3, 4\)"),
        ({"q": torch.ones(2, 65, 4, 5)}, ValueError, r"at most 64 tokens in dimension 1, got shape \(2, 65, 4, 5\)"),
        ({"q": torch.ones(2, 3, 4, 5, dtype=torch.int64)}, TypeError, "q must have dtype float32, .* got int64"),
        ({"k": torch.ones(2, 3, 4, 6)}, ValueError, r"k must have the shape of q, \(2, 3, 4, 5\), got \(2, 3, 4, 6\)"),
        ({"v": torch.ones(1, 3, 4, 5)}, ValueError, r"v must have the shape of q, \(2, 3, 4, 5\), got \(1, 3, 4, 5\)"),
        ({"v": torch.ones(2, 3, 4, 5).bfloat16()}, TypeError, "v must have dtype float32, got bfloat16"),
        ({"k": torch.ones(2, 3, 4, 5, device="meta")}, ValueError, "k must be on the device of q, .*, got meta"),
        (
            {"key_padding_mask": torch.zeros(3, 2, dtype=torch.bool)},
            ValueError,
            r"key_padding_mask must have shape \(2, 3\), S and T of q, got \(3, 2\)",
        ),
        ({"key_padding_mask": torch.zeros(2, 3)}, TypeError, "key_padding_mask must have dtype bool, got float32"),
        ({"causal": 1}, TypeError, "causal must be a bool, got 1"),
        ({"scale": "1"}, TypeError, "scale must be a number or None, got '1'"),
        ({"scale": math.inf}, ValueError, "scale must be finite, got inf"),
        ({"p": 1.0}, ValueError, r"p must be in \[0, 1\), got 1.0"),
        ({"training": 1}, TypeError, "training must be a bool, got 1"),
        ({"generator": 5}, TypeError, "generator must be a torch.Generator, got int"),
    ],
)
def test_errors(change, error, message):
    arguments = {name: torch.ones(2, 3, 4, 5) for name in "qkv"} | on_device_of_test(change)
    with pytest.raises(error, match=f"short_attention: .*{message}"):
        cx.short_attention(**arguments)


def test_errors_of_the_operator():
    """The binding and the C check say the same to those who go around Python."""
    q = torch.ones(2, 3, 4, 5)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    for arguments, message in (
        ((q[0], q, q, None, None, False, 1.0, 0.0), "q must have 4 dimensions"),
        ((q, q[:, :2], q, None, None, False, 1.0, 0.0), "k must have the shape of q"),
        ((q, q, q.double(), None, None, False, 1.0, 0.0), "v must have the dtype of q"),
        ((q, q, q, mask.long(), None, False, 1.0, 0.0), "key_padding_mask must have dtype bool"),
        ((q, q, q, mask[:1], None, False, 1.0, 0.0), "key_padding_mask must have shape"),
        ((q, q, q, None, torch.ones(2), False, 1.0, 0.0), "seed must be one int64 number"),
        ((q, q, q, None, None, False, math.nan, 0.0), "scale must be finite, got nan"),
        ((q, q, q, None, None, False, 1.0, 1.0), r"p must be in \[0, 1\), got 1"),
        ((torch.ones(1, 65, 1, 1),) * 3 + (None, None, False, 1.0, 0.0), "at most 64 tokens in dimension 1, got 65"),
        ((q.long(), q.long(), q.long(), None, None, False, 1.0, 0.0), "dtype must be float32"),
    ):
        with pytest.raises(REFUSAL, match=message):
            op.short_attention(*arguments)
    with pytest.raises(REFUSAL, match="grad must have the shape of q"):
        op.short_attention_backward(q[:1], q, q, q, None, None, False, 1.0, 0.0)
    qkv = torch.ones(2, 3, 3, 4, 5)
    for unlike in (q, qkv[:, :, :2]):
        with pytest.raises(REFUSAL, match="qkv must have shape"):
            op.short_attention_packed(unlike, None, None, False, 1.0, 0.0)
    with pytest.raises(REFUSAL, match="grad must have the shape of q"):
        op.short_attention_packed_backward(q[:1], qkv, None, None, False, 1.0, 0.0)
