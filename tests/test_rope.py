"""rope, rope_tables and RotaryEmbedding."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from helpers import (
    DEVICE,
    FLOATS,
    REFUSAL,
    TWO_OF_FLOATS,
    assert_close_to_reference,
    assert_one_rounding,
    each_backend,
    every_second,
    on_device,
    random_image,
)
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck

import camox_ops as cx
from camox_ops import reference
from camox_ops.ops._layout import has_internal_overlap, share_memory

HALVES = (torch.bfloat16, torch.float16)
MEMORY = ("contiguous", "strided", "expanded", "swapped")
# Dimensions of a head around one and two vectors of pairs (4, 8, 16 lanes), and far from them.
DIMS = (2, 6, 16, 18, 32, 34, 64, 130)
ON_CPU = pytest.mark.skipif(DEVICE.type != "cpu", reason="float64, bits, threads and checks of values: on the CPU")
pytestmark = on_device


def heads(shape, dtype=torch.float32, memory="contiguous", seed=0):
    """A (B, H, T, D) input; "swapped": (B, T, H, D) in memory; "expanded" and "strided": see image."""
    if memory == "swapped":
        b, h, t, d = shape
        return random_image((b, t, h, d), dtype, seed=seed).transpose(1, 2)
    return random_image(shape, dtype, memory, seed=seed)


def tables(length, columns, dtype=torch.float32, seed=9):
    """Any numbers: the op does not ask that they be cosines and sines."""
    generator = torch.Generator().manual_seed(seed)
    both = torch.randn(2, length, columns, generator=generator, dtype=torch.float64, device="cpu").to(DEVICE, dtype)
    return both[0], both[1]


def real_of(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def positions_of(kind, batch, length, rows):
    generator = torch.Generator().manual_seed(4)
    if kind == "rows":
        return torch.randint(rows, (length,), generator=generator, device="cpu").to(DEVICE)
    if kind == "batched":
        return torch.randint(rows, (batch, length), generator=generator, device="cpu").to(DEVICE)
    return None


def doubled(tensors):
    return tuple(t.double() for t in tensors)


def backward(grad, x, cos, sin, interleaved=False, layout="bhtd", rotary_dim=None, positions=None, cu_seqlens=None):
    op = torch.ops.camox_ops.rope_backward
    return op(grad, x, cos, sin, positions, cu_seqlens, interleaved, ("bhtd", "bthd").index(layout), rotary_dim, False)


def test_smoke():
    x = torch.rand(2, 3, 5, 8)
    y = cx.rope(x, *cx.rope_tables(8, 5))
    assert y.shape == x.shape
    assert y.dtype == torch.float32
    assert torch.equal(y[:, :, 0], x[:, :, 0])  # position 0 is not rotated
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))


def test_known_values():
    x = torch.tensor([1.0, 2, 3, 4, 5]).view(1, 1, 1, 5)
    zero, one = torch.zeros(1, 2), torch.ones(1, 2)

    def check(expected, *arguments, **options):
        y = cx.rope(x, *arguments, rotary_dim=4, **options)
        torch.testing.assert_close(y, torch.tensor(expected).view(x.shape), rtol=0, atol=0)

    check([1.0, 2, 3, 4, 5], one, zero)
    check([-2.0, 1, -4, 3, 5], zero, one, interleaved=True)  # a quarter turn of (1,2) and (3,4)
    check([-3.0, -4, 1, 2, 5], zero, one)  # and of (1,3) and (2,4)
    each = torch.tensor([[1.0, 10, 100, 1000]]), torch.tensor([[2.0, 20, 200, 2000]])
    check([1.0 - 4, 20 + 20, 300 - 800, 4000 + 6000, 5], *each, interleaved=True)
    check([1.0 - 6, 20 - 80, 300 + 200, 4000 + 4000, 5], *each)


@pytest.mark.parametrize("interleaved", [False, True])
@every_second(dtype=FLOATS, memory=MEMORY)
def test_matches_reference(dtype, memory, interleaved):
    for dim in DIMS:
        for each in (False, True):
            for kind in ("none", "rows", "batched"):
                for layout in ("bhtd", "bthd"):
                    rotary_dim = None if dim % 4 else dim // 2
                    columns = (rotary_dim or dim) // (1 if each else 2)
                    shape = (2, 3, 5, dim) if layout == "bhtd" else (2, 5, 3, dim)
                    x, (cos, sin) = heads(shape, dtype, memory), tables(7, columns, real_of(dtype))
                    options = {"interleaved": interleaved, "layout": layout, "rotary_dim": rotary_dim}
                    options["positions"] = positions_of(kind, 2, 5, 7)
                    ours = cx.rope(x, cos, sin, **options)
                    truth = reference.rope(*doubled((x, cos, sin)), **options)
                    assert_close_to_reference(ours, reference.rope(x, cos, sin, **options), truth)
                    if dtype in HALVES:
                        assert_one_rounding(ours, cx.rope(x.float(), cos, sin, **options))


@pytest.mark.parametrize("interleaved", [False, True])
@every_second(dtype=FLOATS, memory=MEMORY)
def test_grad_matches_reference(dtype, memory, interleaved):
    """Each kind of positions with one of the two widths of tables, the other one at the next size and the second next
    dtype."""
    first = FLOATS.index(dtype) // 2
    for i, dim in enumerate(DIMS):
        for j, kind in enumerate(("none", "rows", "batched")):
            each = (first + i + j) % 2 == 1
            rotary_dim = None if dim % 4 else dim // 2
            columns = (rotary_dim or dim) // (1 if each else 2)
            x, (cos, sin) = heads((2, 3, 5, dim), dtype, memory), tables(7, columns, real_of(dtype))
            grad = heads((2, 3, 5, dim), dtype, "contiguous" if each else memory, seed=1)
            options = {"interleaved": interleaved, "rotary_dim": rotary_dim}
            options["positions"] = positions_of(kind, 2, 5, 7)
            ours = backward(grad, x, cos, sin, **options)
            same = reference.rope_backward(grad, x, cos, sin, **options)
            truth = reference.rope_backward(*doubled((grad, x, cos, sin)), **options)
            scale = 6 * grad.abs().max().item() * x.abs().max().item()
            assert_close_to_reference(ours, same, truth, scale64=scale)
            alone = torch.autograd.grad(cx.rope(x.requires_grad_(), cos, sin, **options), x, grad)
            assert torch.equal(alone[0], ours[0])


@pytest.mark.parametrize("kind", ["normal", "offset"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_grad_of_tables_of_many_tokens(dtype, kind):
    """30,000 terms of a row, whose float32 sum in the order of the tokens would be off by many roundings."""
    x, grad = random_image((30_000, 1, 2, 4), dtype, kind=kind), random_image((30_000, 1, 2, 4), dtype, seed=1)
    for positions in (None, torch.zeros(2, dtype=torch.int64, device=DEVICE)):
        inputs = (grad, x, *tables(2, 2, real_of(dtype)))
        ours = backward(*inputs, positions=positions)[1:]
        same = reference.rope_backward(*inputs, positions=positions)[1:]
        truth = reference.rope_backward(*doubled(inputs), positions=positions)[1:]
        assert_close_to_reference(ours, same, truth, scale64=60_000 * x.abs().max().item())


@ON_CPU
@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_grad(interleaved, each):
    x = heads((2, 2, 3, 6), torch.float64).requires_grad_()
    cos, sin = (t.requires_grad_() for t in tables(4, 4 if each else 2, torch.float64))
    for layout in ("bhtd", "bthd"):
        for kind in ("none", "batched"):

            def op(x, cos, sin, layout=layout, kind=kind):
                positions = positions_of(kind, 2, x.shape[2 if layout == "bhtd" else 1], 4)
                return cx.rope(x, cos, sin, interleaved=interleaved, layout=layout, rotary_dim=4, positions=positions)

            assert gradcheck(op, (x, cos, sin))
            assert gradgradcheck(op, (x, cos, sin), fast_mode=True)
    fixed = cos.detach(), sin.detach()
    assert gradcheck(lambda x: cx.rope(x, *fixed, rotary_dim=4), (x,))
    assert gradgradcheck(lambda x: cx.rope(x, *fixed, rotary_dim=4), (x,), fast_mode=True)


@ON_CPU
def test_grad_of_packed_sequences():
    x = random_image((1, 7, 2, 6), torch.float64)[0].requires_grad_()
    cos, sin = (t.requires_grad_() for t in tables(4, 3, torch.float64))
    cu_seqlens = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
    assert gradcheck(lambda *t: cx.rope(*t, cu_seqlens=cu_seqlens), (x, cos, sin))


def test_nothing_turns():
    x = torch.ones(1, 1, 2, 5)
    assert torch.equal(cx.rope(x, *tables(2, 0), rotary_dim=0), x)


@pytest.mark.parametrize("interleaved", [False, True])
def test_packed_sequences_begin_again(interleaved):
    lengths = (3, 0, 70, 1, 0, 64, 2)
    cu_seqlens = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    x, (cos, sin) = random_image((1, sum(lengths), 3, 10))[0], tables(70, 5)
    for layout in ("bhtd", "bthd"):
        y = cx.rope(x, cos, sin, interleaved=interleaved, layout=layout, cu_seqlens=cu_seqlens)
        parts = (cx.rope(part[None], cos, sin, interleaved=interleaved, layout="bthd")[0] for part in x.split(lengths))
        assert torch.equal(y, torch.cat(list(parts)))
    assert cx.rope(x[:0], cos, sin, cu_seqlens=cu_seqlens[:1]).shape == (0, 3, 10)


def test_tuple_of_tensors():
    q, k, v = heads((2, 8, 5, 6)), heads((2, 2, 5, 6), seed=1), heads((2, 1, 4, 8), seed=2)
    cos, sin = tables(5, 2)
    rotated = cx.rope((q, k, v), cos, sin, rotary_dim=4)
    assert isinstance(rotated, tuple)
    for ours, x in zip(rotated, (q, k, v), strict=True):
        assert torch.equal(ours, cx.rope(x, cos, sin, rotary_dim=4))
    both = (q.clone(), k.clone())
    assert all(a is b for a, b in zip(cx.rope(both, cos, sin, rotary_dim=4, inplace=True), both, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(both, rotated, strict=False))


@given(
    st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 70), st.integers(1, 70)),
    st.booleans(),
    st.booleans(),
    st.sampled_from(MEMORY),
    st.sampled_from(FLOATS),
)
def test_shapes(shape, interleaved, each, memory, dtype):
    rotary_dim = shape[3] // 2 * 2
    x = heads(shape, dtype, memory)
    cos, sin = tables(shape[2], rotary_dim if each else rotary_dim // 2, real_of(dtype))
    options = {"interleaved": interleaved, "rotary_dim": rotary_dim}
    truth = reference.rope(*doubled((x, cos, sin)), **options)
    assert_close_to_reference(cx.rope(x, cos, sin, **options), reference.rope(x, cos, sin, **options), truth)


@pytest.mark.parametrize("dtype", TWO_OF_FLOATS)
def test_large_outputs_have_the_same_bits(dtype):
    """From 8 MiB on stores go past the caches; two halves of the batch are below that."""
    for dim, interleaved in ((128, True), (128, False), (136, False), (24, True)):
        size = (8 << 20) // dtype.itemsize
        x, (cos, sin) = (
            heads((2, 2, size // (4 * dim) + 1, dim), dtype),
            tables(size // (4 * dim) + 1, dim // 2, real_of(dtype)),
        )
        whole = cx.rope(x, cos, sin, interleaved=interleaved)
        parts = [cx.rope(half, cos, sin, interleaved=interleaved) for half in x.split(1)]
        assert torch.equal(whole, torch.cat(parts))


def table_gradients(transform, x, cos, sin):
    """Of the sum over three pairs of tables: by a loop, by autograd or torch.func through vmap."""

    def loss(cos, sin):
        return cx.rope(x, cos, sin).square().sum()

    if transform == "loop":
        return torch.autograd.grad(sum(loss(c, s) for c, s in zip(cos, sin, strict=True)), (cos, sin))
    if transform == "autograd":
        return torch.autograd.grad(torch.vmap(loss)(cos, sin).sum(), (cos, sin))
    if transform == "func":
        return torch.func.grad(lambda *t: torch.vmap(loss)(*t).sum(), (0, 1))(cos.detach(), sin.detach())
    return torch.vmap(torch.func.grad(loss, (0, 1)))(cos.detach(), sin.detach())


@ON_CPU
@pytest.mark.parametrize("transform", ["autograd", "func", "vmap of grad"])
def test_grad_of_tables_through_vmap(transform):
    x = heads((1, 2, 4, 6), torch.float64)
    cos, sin = (torch.stack([t, 2 * t, t - 1]).requires_grad_() for t in tables(4, 3, torch.float64))
    expected = table_gradients("loop", x, cos, sin)
    for ours, theirs in zip(table_gradients(transform, x, cos, sin), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@ON_CPU
def test_tables_of_x_dtype_are_read_as_they_are():
    x, (cos, sin) = heads((1, 2, 3, 8), torch.bfloat16), tables(3, 4, torch.bfloat16)
    assert torch.equal(cx.rope(x, cos, sin), cx.rope(x, cos.float(), sin.float()))
    cos.requires_grad_()
    (grad,) = torch.autograd.grad(cx.rope(x, cos, sin).sum(), cos)
    assert grad.dtype == torch.bfloat16
    wide, single = heads((1, 2, 3, 8), torch.float64), tables(3, 4)
    assert torch.equal(cx.rope(wide, *single), cx.rope(wide, *doubled(single)))


# ---- in place ----


@pytest.mark.parametrize("memory", ["contiguous", "strided", "swapped"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_inplace_matches(dtype, memory):
    for interleaved in (False, True):
        for dim in (16, 40):
            x, (cos, sin) = heads((2, 3, 5, dim), dtype, memory), tables(5, 8, real_of(dtype))
            options = {"interleaved": interleaved, "rotary_dim": 16}
            expected = cx.rope(x, cos, sin, **options)
            before = x._version
            assert cx.rope(x, cos, sin, **options, inplace=True) is x
            assert torch.equal(x, expected)
            assert x._version == before + 1


def test_inplace_moves_the_version_counter_of_views():
    x, (cos, sin) = heads((2, 3, 4, 6)), tables(4, 3)
    part = x[:, 1:]
    before = x._version
    cx.rope(part, cos, sin, inplace=True)
    assert x._version == part._version == before + 1


def test_inplace_makes_a_stale_backward_raise():
    x, (cos, sin) = heads((2, 3, 4, 6)).requires_grad_(), tables(4, 3)
    for carries_gradient in (False, True):
        y = x * 1 if carries_gradient else x.detach().clone()
        product = y * x  # its backward needs y's old values
        cx.rope(y, cos, sin, inplace=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


@ON_CPU
def test_inplace_carries_the_gradient():
    x, (cos, sin) = heads((2, 3, 4, 6), torch.float64).requires_grad_(), tables(4, 3, torch.float64)

    def in_place(x):
        y = x * 2
        before = y._version
        assert cx.rope(y, cos, sin, inplace=True) is y
        assert y._version == before + 1
        return y

    (ours,) = torch.autograd.grad(in_place(x).square().sum(), x)
    (theirs,) = torch.autograd.grad(cx.rope(x * 2, cos, sin).square().sum(), x)
    assert torch.equal(ours, theirs)
    assert gradcheck(in_place, (x,))
    assert gradgradcheck(in_place, (x,), fast_mode=True)
    qkv = (x * 1).view(2, 3, 4, 6)
    cx.rope(qkv[:, 1:], cos, sin, inplace=True)  # a view of what carries a gradient
    (ours,) = torch.autograd.grad(qkv.square().sum(), x)
    torch.testing.assert_close(ours[:, :1], 2 * x[:, :1])
    q, k = (x * 1, x * 3)
    cx.rope((q, k), cos, sin, inplace=True)
    (ours,) = torch.autograd.grad((q * k).sum(), x)
    expected = torch.autograd.grad((cx.rope(x, cos, sin) * cx.rope(3 * x, cos, sin)).sum(), x)[0]
    torch.testing.assert_close(ours, expected)


def test_inplace_without_grad_mode():
    x, (cos, sin) = heads((2, 3, 4, 6)).requires_grad_(), tables(4, 3)
    expected = cx.rope(x.detach(), cos, sin)
    with torch.no_grad():
        cx.rope(x, cos, sin, inplace=True)
    assert torch.equal(x, expected)
    assert x._version == 1
    with torch.inference_mode():
        y = heads((2, 3, 4, 6)) * 1
        assert torch.equal(cx.rope(y, cos, sin, inplace=True), expected)


def test_errors_of_inplace():
    x, (cos, sin) = torch.zeros(1, 2, 3, 4), tables(3, 2)
    for message, arguments in (
        ("a leaf that requires a gradient", (torch.zeros(1, 2, 3, 4, requires_grad=True), cos, sin)),
        ("gradient of cos and sin", (x, cos.clone().requires_grad_(), sin)),
        (
            r"elements of x that do not share memory, got shape \(2, 2, 3, 4\) and strides \(0, 12, 4, 1\)",
            (x.expand(2, 2, 3, 4), cos, sin),
        ),
        (r"do not share memory; x\[0\] and x\[1\] do", ((x, x), cos, sin)),
    ):
        with pytest.raises(ValueError, match=message):
            cx.rope(*arguments, inplace=True)
    with pytest.raises(REFUSAL, match="share memory, their stride is 0"):
        torch.ops.camox_ops.rope_(x.expand(2, 2, 3, 4), cos, sin, None, None, False, 0, None, False)


@pytest.mark.parametrize("case", ["view of a leaf", "unbind", "split", "chunk"])
def test_errors_of_inplace_leave_what_autograd_protects(case):
    cos, sin = tables(4, 4)
    leaf = torch.randn(2, 4, 3, 2, 8, requires_grad=True)
    qkv = leaf * 1
    x, message = {
        "view of a leaf": (leaf[:, :, 0], r"on x, a leaf that requires a gradient or a view of one"),
        "unbind": (qkv.unbind(2)[:2], r"on x\[0\], a view that autograd does not let be written"),
        "split": (qkv[0].split(3), r"on x\[0\], a view that autograd does not let be written"),
        "chunk": ((qkv[0] * 1, qkv[0].chunk(2, 2)[0]), r"on x\[1\], a view that autograd does not let be written"),
    }[case]
    tensors = x if isinstance(x, tuple) else (x,)
    before, values = qkv.detach().clone(), [value.detach().clone() for value in tensors]
    versions = leaf._version, qkv._version
    with pytest.raises(ValueError, match="rope: inplace=True " + message):
        cx.rope(x, cos, sin, layout="bthd", inplace=True)
    assert torch.equal(leaf.detach(), before)
    assert torch.equal(qkv.detach(), before)
    assert all(torch.equal(value.detach(), old) for value, old in zip(tensors, values, strict=True))
    assert (leaf._version, qkv._version) == versions
    with torch.no_grad():  # without grad mode there is nothing to protect
        cx.rope(x, cos, sin, layout="bthd", inplace=True)


def test_inplace_on_slices_of_one_projection():
    """q and k by indexing, which share a storage and no element: the gradients of the projection."""
    x, (cos, sin) = torch.randn(2, 4, 3, 2, 8, requires_grad=True), tables(4, 4)

    def scores(inplace):
        qkv = x * 1
        q, k = cx.rope((qkv[:, :, 0], qkv[:, :, 1]), cos, sin, layout="bthd", inplace=inplace)
        return (q * k * qkv[:, :, 2]).sum()

    torch.testing.assert_close(torch.autograd.grad(scores(True), x), torch.autograd.grad(scores(False), x))


def test_errors_of_inplace_before_anything_is_written():
    cos, sin = tables(16, 4)
    packed, longer = torch.randn(10, 2, 8), torch.randn(12, 2, 8)
    memory = torch.randn(64)
    overlapping = memory.as_strided((1, 1, 3, 8), (24, 24, 4, 1))
    x = torch.randn(1, 2, 4, 8)
    cu_seqlens = torch.tensor([0, 10], dtype=torch.int32)
    for message, tensors, written, options in (
        (
            r"x\[1\] must have as many tokens as x\[0\], 10, with cu_seqlens, got shape \(12, 2, 8\)",
            (packed, longer),
            packed,
            {"cu_seqlens": cu_seqlens},
        ),
        (r"x\[0\] and x\[1\] do, which", (x, x[:]), x, {}),
        (r"x\[0\] and x\[1\] do, which", (x[:, :, :3], x[:, :, 1:]), x, {}),
        (
            r"elements of x that do not share memory, got shape \(1, 1, 3, 8\) and strides \(24, 24, 4, 1\)",
            overlapping,
            memory,
            {},
        ),
    ):
        before = written.clone()
        with pytest.raises(ValueError, match="rope: .*" + message):
            cx.rope(tensors, cos, sin, **options, inplace=True)
        assert torch.equal(written, before)
    with torch.inference_mode():
        frozen = torch.randn(1, 2, 4, 8)
    before = frozen.clone()
    with pytest.raises(ValueError, match="rope: inplace=True on x, an inference tensor, outside inference mode"):
        cx.rope(frozen, cos, sin, inplace=True)
    assert torch.equal(frozen, before)


@given(st.data())
def test_shared_memory_is_found_exactly(data):
    """Against the addresses themselves, of any two views of a small buffer."""
    buffer = torch.zeros(2000, device="cpu")

    def view():
        dims = data.draw(st.integers(1, 4))
        shape = [data.draw(st.integers(0 if dims == 1 else 1, 4)) for _ in range(dims)]
        stride = [data.draw(st.integers(0, 12)) for _ in range(dims)]
        return buffer.as_strided(shape, stride, data.draw(st.integers(0, 60)))

    def addresses(x):
        return torch.arange(2000, device="cpu").as_strided(x.shape, x.stride(), x.storage_offset()).flatten().tolist()

    a, b = view(), view()
    assert has_internal_overlap(a) == (len(set(addresses(a))) < a.numel())
    assert share_memory(a, b) == bool(set(addresses(a)) & set(addresses(b)))
    assert not share_memory(a, buffer.clone())


def test_inplace_on_a_lazily_negated_view():
    z, (cos, sin) = torch.randn(1, 1, 4, 8, dtype=torch.complex64), tables(4, 4)
    x = z.conj().imag
    assert x.is_neg()
    expected, before = cx.rope(x.clone(), cos, sin), x._version
    assert cx.rope(x, cos, sin, inplace=True) is x
    torch.testing.assert_close(x.clone(), expected)
    torch.testing.assert_close(z.imag, -expected)
    assert x._version > before


# ---- public variants ----


def bdh_frequencies(n, theta=2**16):
    """get_freqs of takzen/vision-bdh, models/bdh.py at 71cb8ab, step by step in float32: neighbours share one."""
    index = torch.arange(0, n, 1, dtype=torch.float32)
    exponent = torch.floor(index / 2) * 2 / n
    return 1.0 / (theta**exponent) / (2 * math.pi)


def bdh_angles(n, length):
    """Attention.forward and phases_cos_sin of the same file: turns, of which the whole ones are dropped."""
    turns = torch.arange(0, length, dtype=torch.float32).view(1, 1, -1, 1) * bdh_frequencies(n)
    phases = (turns % 1) * (2 * math.pi)
    return torch.cos(phases), torch.sin(phases)


def bdh_turn(v, cos, sin):
    """rope of BidirectionalAttentionV2, models/vision_bdh_v2.py and vision_bdh_v3.py at 71cb8ab."""
    partners = torch.stack((-v[..., 1::2], v[..., ::2]), dim=-1).flatten(-2)
    return v * cos + partners * sin


@ON_CPU
@pytest.mark.parametrize(("n", "length"), [(1024, 64), (1024, 1024), (192, 65), (62, 77), (2, 1000)])
def test_public_vision_bdh_v2_v3(n, length):
    """takzen/vision-bdh models/vision_bdh_v2.py, vision_bdh_v3.py and bdh.py at 71cb8ab (jinotter3/vision-bdh
    models/vision_bdh_v2_cls_optimized.py at 8ea7ddf caches the same tables): the same bits."""
    cos, sin = bdh_angles(n, length)
    ours = cx.rope_tables(n, length, theta=2**16, units="turns")
    for table, theirs in zip(ours, (cos, sin), strict=True):
        assert torch.equal(table, theirs[0, 0, :, ::2])
        assert torch.equal(table, theirs[0, 0, :, 1::2])
    q = heads((1, 2, length, n))
    assert torch.equal(cx.rope(q, *ours, interleaved=True), bdh_turn(q, cos, sin))


@ON_CPU
def test_public_train_bdh_unet():
    """takzen/vision-bdh train_bdh_unet.py and fine_tune_bdh_unet.py at 71cb8ab: the tables are two halves side by side,
    the pairs are neighbours, so that the two elements of a pair are rotated by different angles."""
    n, length = 32, 20
    growing = (2**16) ** (torch.arange(0, n // 2, dtype=torch.float32) / (n // 2))
    phases = (torch.arange(0, length, dtype=torch.float32)[:, None] * growing % 1) * (2 * math.pi)
    phases = phases + torch.linspace(0, 1, n // 2)  # the public ones are whole turns at whole positions
    cos, sin = (torch.cat([table, table], dim=-1) for table in (phases.cos(), phases.sin()))
    q = heads((2, 3, length, n), torch.float32)
    assert torch.equal(cx.rope(q, cos, sin, interleaved=True), bdh_turn(q, cos, sin))


def test_public_bdh_unet():
    """BDHBlock of takzen/vision-bdh, models/bdh_unet.py at 71cb8ab: cosines and sines of a table of cosines, one angle
    an element; neighbours are pairs, and the result has all first elements before all second ones."""
    dim, length = 16, 25
    frequencies = 1.0 / 10000 ** (torch.arange(0, dim, 2).float() / dim)
    angles = torch.outer(torch.arange(length).float(), frequencies)
    table = torch.cat([angles, angles], dim=-1).cos()
    cos, sin = table.cos(), table.sin()
    qk = heads((2, length, 3, dim))
    first, second = qk[..., ::2], qk[..., 1::2]
    c, s = cos[:, None], sin[:, None]
    expected = torch.cat(
        [first * c[..., ::2] - second * s[..., ::2], first * s[..., 1::2] + second * c[..., 1::2]], dim=-1
    )
    y = cx.rope(qk, cos, sin, interleaved=True, layout="bthd")
    torch.testing.assert_close(torch.cat([y[..., ::2], y[..., 1::2]], dim=-1), expected)


def test_public_gpt_neox():
    """Half-split pairs of a quarter of the head: apply_rotary_pos_emb of EleutherAI/gpt-neox,
    megatron/model/positional_embeddings.py at 007003a, on (T, B, H, D)."""
    length, batch, count, dim, rotary_dim = 12, 2, 3, 64, 16
    q, k = (random_image((length, batch, count, dim), seed=seed) for seed in (0, 1))
    frequencies = 1.0 / 10000 ** (torch.arange(0, rotary_dim, 2).float() / rotary_dim)
    angles = torch.outer(torch.arange(length).float(), frequencies)
    angles = torch.cat((angles, angles), dim=-1)[:, None, None, :]

    def rotated(x):
        turning, passing = x[..., :rotary_dim], x[..., rotary_dim:]
        half = rotary_dim // 2
        partners = torch.cat((-turning[..., half:], turning[..., :half]), dim=-1)
        return torch.cat((turning * angles.cos() + partners * angles.sin(), passing), dim=-1)

    ours = cx.rope(
        (q.transpose(0, 1), k.transpose(0, 1)),
        *cx.rope_tables(rotary_dim, length),
        layout="bthd",
        rotary_dim=rotary_dim,
    )
    for mine, x in zip(ours, (q, k), strict=True):
        torch.testing.assert_close(mine.transpose(0, 1), rotated(x))
        assert mine.transpose(0, 1).is_contiguous()


def test_public_gpt_j():
    """Neighbours are pairs, the first 64 of 256 elements are rotated, positions are given: GPTJAttention of
    huggingface/transformers, src/transformers/models/gptj/modeling_gptj.py at cb6cd7e, on (B, T, H, D)."""
    batch, length, count, dim, rotary_dim = 2, 7, 3, 256, 64
    key = random_image((batch, length, count, dim))
    positions = torch.tensor([[3, 4, 5, 6, 7, 8, 9], [0, 0, 0, 0, 1, 2, 3]])
    frequencies = 1.0 / (10000 ** (torch.arange(0, rotary_dim, 2) / rotary_dim))
    angles = torch.outer(torch.arange(2048).float(), frequencies)
    sin, cos = (t[positions].repeat_interleave(2, dim=-1)[:, :, None] for t in (angles.sin(), angles.cos()))
    turning = key[..., :rotary_dim]
    partners = torch.stack((-turning[..., 1::2], turning[..., ::2]), dim=-1).flatten(-2)
    expected = torch.cat((turning * cos + partners * sin, key[..., rotary_dim:]), dim=-1)
    ours = cx.rope(
        key,
        *cx.rope_tables(rotary_dim, 2048),
        interleaved=True,
        layout="bthd",
        rotary_dim=rotary_dim,
        positions=positions,
    )
    torch.testing.assert_close(ours, expected)


# ---- tables ----


def test_tables_are_exact_at_large_positions():
    dim, length = 64, 200_000
    cos, sin = cx.rope_tables(dim, length, theta=500.0)
    rows = np.array([0, 1, 77, 65_535, 65_537, 199_999])
    frequencies = np.longdouble(500) ** (-np.arange(0, dim, 2, dtype=np.longdouble) / dim)
    angles = rows[:, None] * frequencies
    for ours, truth in ((cos, np.cos(angles)), (sin, np.sin(angles))):
        assert ours.dtype == torch.float32
        assert ours.shape == (length, dim // 2)
        assert np.abs(ours[rows].cpu().numpy() - truth).max() <= 2.0**-25 + 1e-10


@pytest.mark.parametrize("units", ["radians", "turns"])
def test_tables_scaling(units):
    plain = cx.rope_tables(8, 20, units=units)
    scaled = cx.rope_tables(8, 40, units=units, scaling={"rope_type": "linear", "factor": 2.0})
    for a, b in zip(plain, scaled, strict=True):
        assert torch.equal(a, b[::2])


def test_tables_units_agree():
    for a, b in zip(cx.rope_tables(32, 50), cx.rope_tables(32, 50, units="turns"), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
    assert cx.rope_tables(0, 3)[0].shape == (3, 0)
    assert cx.rope_tables(6, 0)[1].shape == (0, 3)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"dim": 5}, ValueError, "dim must be even, got 5"),
        ({"dim": -2}, ValueError, "dim must be >= 0, got -2"),
        ({"dim": 4.0}, TypeError, "dim must be an int, got 4.0"),
        ({"length": -1}, ValueError, "length must be >= 0, got -1"),
        ({"length": True}, TypeError, "length must be an int, got True"),
        ({"theta": 0}, ValueError, "theta must be > 0 and finite, got 0"),
        ({"theta": "1e4"}, TypeError, "theta must be a number, got '1e4'"),
        ({"units": "degrees"}, ValueError, "units must be one of 'radians', 'turns', got 'degrees'"),
        ({"scaling": 2.0}, TypeError, "scaling must be None or a dict, got 2.0"),
        ({"scaling": {"rope_type": "yarn", "factor": 2.0}}, ValueError, "scaling must be None or .*, got .*yarn"),
        ({"scaling": {"rope_type": "linear"}}, ValueError, "scaling must be None or"),
        ({"scaling": {"rope_type": "linear", "factor": 0.0}}, ValueError, r"scaling\['factor'\] must be > 0"),
    ],
)
def test_errors_of_tables(arguments, error, message):
    with pytest.raises(error, match="rope_tables: " + message):
        cx.rope_tables(**{"dim": 4, "length": 4, **arguments})


# ---- errors ----


@ON_CPU
@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        ([1, 2], TypeError, r"x\[0\] must be a torch.Tensor, got int"),
        ((), ValueError, r"x must be a tensor or a tuple of at least one, got \(\)"),
        (torch.zeros(3, 4, 4), ValueError, r"x must have 4 dimensions, got shape \(3, 4, 4\)"),
        (torch.zeros(1, 1, 4, 4, dtype=torch.int64), TypeError, "x must have dtype .*, got int64"),
        (torch.zeros(1, 1, 4, 5), ValueError, "x has an odd last dimension, 5: rotary_dim must say"),
        (
            (torch.zeros(1, 1, 4, 4), torch.zeros(1, 1, 4, 4).bfloat16()),
            TypeError,
            r"x\[1\] must have the dtype of x\[0\], float32, got bfloat16",
        ),
        (torch.zeros(1, 1, 5, 4), ValueError, r"cos and sin have 4 rows, fewer than the 5 positions of x, shape"),
        (torch.zeros(1, 1, 4, 12), ValueError, r"cos must have shape \(length, 6\) or \(length, 12\), .*\(4, 2\)"),
    ],
)
def test_errors_of_x(x, error, message):
    with pytest.raises(error, match="rope: " + message):
        cx.rope(x, *tables(4, 2))


@ON_CPU
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"interleaved": 1}, TypeError, "interleaved must be a bool, got 1"),
        ({"inplace": None}, TypeError, "inplace must be a bool, got None"),
        ({"layout": "tbhd"}, ValueError, "layout must be one of 'bhtd', 'bthd', got 'tbhd'"),
        ({"rotary_dim": 3}, ValueError, "rotary_dim must be even, from 0 to the last dimension of x, 4, got 3"),
        ({"rotary_dim": 6}, ValueError, "rotary_dim must be even, .*, got 6"),
        ({"rotary_dim": -2}, ValueError, "rotary_dim must be even, .*, got -2"),
        ({"rotary_dim": 2.0}, TypeError, "rotary_dim must be an int or None, got 2.0"),
        ({"cos": [1.0]}, TypeError, "cos must be a torch.Tensor, got list"),
        ({"cos": torch.zeros(4)}, ValueError, r"cos must have shape \(length, 2\) or \(length, 4\), .*, got \(4,\)"),
        ({"sin": torch.zeros(4, 4)}, ValueError, r"cos and sin must have the same shape, got \(4, 2\) and \(4, 4\)"),
        ({"sin": torch.zeros(4, 2).double()}, TypeError, "sin must have dtype float32 beside this x, got float64"),
        ({"sin": torch.zeros(4, 2, device="meta")}, ValueError, "sin must be on the device of x, cpu, got meta"),
        ({"positions": torch.zeros(4)}, TypeError, "positions must have dtype int64, got float32"),
        (
            {"positions": torch.zeros(5, dtype=torch.int64)},
            ValueError,
            r"positions must have shape \(4,\) or \(2, 4\) for x of shape \(2, 1, 4, 4\) in layout 'bhtd', got \(5,\)",
        ),
        ({"cu_seqlens": torch.zeros(2, dtype=torch.int32)}, ValueError, r"x must have 3 dimensions \(total, H, D\)"),
        (
            {"positions": torch.zeros(4, dtype=torch.int64), "cu_seqlens": torch.zeros(2, dtype=torch.int32)},
            ValueError,
            "give positions or cu_seqlens, not both",
        ),
    ],
)
def test_errors(arguments, error, message):
    cos, sin = tables(4, 2)
    given = {"cos": cos, "sin": sin, **arguments}
    with pytest.raises(error, match="rope: " + message):
        cx.rope(torch.zeros(2, 1, 4, 4), **given)


def test_errors_of_cu_seqlens():
    x, (cos, sin) = torch.zeros(4, 1, 4), (torch.zeros(4, 2), torch.zeros(4, 2))
    with pytest.raises(TypeError, match="rope: cu_seqlens must have dtype int32, got int64"):
        cx.rope(x, cos, sin, cu_seqlens=torch.tensor([0, 4]))
    for cu_seqlens in (torch.zeros(0, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32)):
        with pytest.raises(ValueError, match=r"rope: cu_seqlens must have shape \(S\+1,\), got"):
            cx.rope(x, cos, sin, cu_seqlens=cu_seqlens)


@ON_CPU
@pytest.mark.parametrize("inplace", [False, True])
def test_errors_of_values(inplace):
    """Named with their value, before anything is written."""
    x, (cos, sin) = torch.ones(2, 1, 4, 4), tables(4, 2)
    for bad in (-1, 4, 2**40):
        for positions in (torch.tensor([0, 1, 2, bad]), torch.tensor([[0, 1, 2, 3], [0, 1, 2, bad]])):
            message = f"rope: positions must be >= 0 and < 4, the rows of cos and sin, got {bad} at token 3"
            with pytest.raises(ValueError, match=message):
                cx.rope(x, cos, sin, positions=positions, inplace=inplace)
    packed = torch.ones(6, 1, 4)
    for cu_seqlens, message in (
        ([1, 6], r"cu_seqlens\[0\] must be 0, got 1"),
        ([0, 4, 3, 6], "cu_seqlens must not fall, got 3 after 4 at index 2"),
        ([0, 5, 6], "cu_seqlens: sequence 0 has 5 tokens, cos and sin have 4 rows"),
        ([0, 3, 5], "cu_seqlens must end with the 6 tokens of x, got 5"),
        ([0, 3, 7], "cu_seqlens must end with the 6 tokens of x, got 7"),
    ):
        with pytest.raises(ValueError, match="rope: " + message):
            cx.rope(packed, cos, sin, cu_seqlens=torch.tensor(cu_seqlens, dtype=torch.int32), inplace=inplace)
    assert torch.equal(x, torch.ones(2, 1, 4, 4))
    assert torch.equal(packed, torch.ones(6, 1, 4))


@ON_CPU
def test_errors_from_c():
    op = torch.ops.camox_ops
    x, (cos, sin) = torch.zeros(2, 1, 4, 4), (torch.zeros(4, 2), torch.zeros(4, 2))

    def call(x=x, cos=cos, sin=sin, positions=None, cu_seqlens=None, layout=0, rotary_dim=None):
        return op.rope(x, cos, sin, positions, cu_seqlens, False, layout, rotary_dim, False)

    wide = torch.zeros(4, 3)
    for message, arguments in (
        ("unknown layout code 2", {"layout": 2}),
        ("x must have 4 dimensions, got 3", {"x": x[0]}),
        (r"x must have 3 dimensions \(total, H, D\)", {"cu_seqlens": torch.zeros(2, dtype=torch.int32)}),
        ("dtype must be float32, bfloat16, float16 or float64", {"x": x.int()}),
        ("rotary_dim must be even, from 0 to x's last dimension 4, got 3", {"rotary_dim": 3}),
        ("cos must have dtype float32 beside this x", {"cos": cos.double()}),
        ("sin must be contiguous with 2 dimensions", {"sin": sin.t().contiguous().t()}),
        ("cos and sin must have rotary_dim/2 = 2 or rotary_dim = 4 columns, got 3", {"cos": wide, "sin": wide}),
        ("cos and sin must have the same shape", {"sin": wide}),
        ("cos and sin have 4 rows, fewer than the 5 positions", {"x": torch.zeros(2, 1, 5, 4)}),
        ("positions must have dtype int64", {"positions": torch.zeros(4)}),
        (r"positions must have shape \(T,\) or \(B, T\)", {"positions": torch.zeros(3, 4, dtype=torch.int64)}),
        ("cu_seqlens must have dtype int32", {"x": x[0], "cu_seqlens": torch.zeros(2)}),
        ("cu_seqlens must be contiguous", {"x": x[0], "cu_seqlens": torch.zeros(0, dtype=torch.int32)}),
    ):
        with pytest.raises(REFUSAL, match="rope: " + message):
            call(**arguments)
    with pytest.raises(REFUSAL, match="rope_backward: grad must have the shape of x"):
        backward(torch.zeros(2, 1, 3, 4), x, cos, sin)
    with pytest.raises(REFUSAL, match="rope_backward: grad must have the dtype of x"):
        backward(x.bfloat16(), x, cos, sin)


@pytest.mark.big
@pytest.mark.slow
def test_inplace_offsets_past_32_bits():
    """Tokens that lie further apart than 2^31 elements, in memory that is never touched elsewhere."""
    apart = 2**31 + 6
    storage = torch.empty(2 * apart + 64, dtype=torch.bfloat16)
    x = storage.as_strided((1, 1, 3, 8), (1, 1, apart, 1))
    x.copy_(heads((1, 1, 3, 8), torch.bfloat16))
    expected = cx.rope(x.contiguous(), *tables(3, 4))
    cx.rope(x, *tables(3, 4), inplace=True)
    assert torch.equal(x, expected)


# ---- RotaryEmbedding ----


def test_module_matches_rope():
    x = heads((2, 3, 9, 16))
    module = cx.nn.RotaryEmbedding(8, theta=100.0, interleaved=True)
    expected = cx.rope(x, *cx.rope_tables(8, 9, theta=100.0), interleaved=True, rotary_dim=8)
    assert torch.equal(module(x), expected)
    q, k = module((x, x[:, :1]))
    assert torch.equal(q, expected)
    assert torch.equal(k, expected[:, :1])
    assert torch.equal(
        cx.nn.RotaryEmbedding(16, layout="bthd")(x.transpose(1, 2)).transpose(1, 2), cx.nn.RotaryEmbedding(16)(x)
    )
    cu_seqlens = torch.tensor([0, 4, 9], dtype=torch.int32)
    packed = x[0].transpose(0, 1)
    expected = torch.cat([module(part.transpose(0, 1)[None])[0].transpose(0, 1) for part in packed.split((4, 5))])
    assert torch.equal(module(packed, cu_seqlens=cu_seqlens), expected)


def test_module_tables_grow():
    module, x = cx.nn.RotaryEmbedding(8, max_length=16), heads((1, 1, 3, 8))
    module(x)
    first = module.tables(1, x.device)
    assert first[0].shape == (16, 4)
    module(heads((1, 1, 12, 8)))
    assert module.tables(1, x.device) is first  # long enough: the same tensors
    module(heads((1, 1, 17, 8)))
    assert module.tables(1, x.device)[0].shape == (32, 4)
    assert torch.equal(module.tables(1, x.device)[0][:16], first[0])
    positions = torch.full((1,), 99, dtype=torch.int64)
    expected = cx.rope(heads((1, 1, 1, 8)), *cx.rope_tables(8, 100), positions=positions)
    assert torch.equal(module(heads((1, 1, 1, 8)), positions=positions, length=100), expected)


def test_module_stays_out_of_the_state_dict():
    module = cx.nn.RotaryEmbedding(8)
    x = heads((1, 2, 5, 8))
    expected = module(x)
    assert not module.state_dict()
    assert not list(module.parameters())
    assert not list(module.buffers())
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(x), expected)
        assert module.tables(1, x.device)[0] is not twin.tables(1, x.device)[0]


def test_module_follows_dtype_and_device():
    module = cx.nn.RotaryEmbedding(8)
    x = heads((1, 2, 5, 8))
    expected = module(x)
    module.to(torch.bfloat16)
    assert module.tables(1, x.device)[0].dtype == torch.float32
    assert torch.equal(module(x), expected)
    assert_one_rounding(module(x.bfloat16()), module(x.bfloat16().float()))
    assert module(x.to("meta")).device.type == "meta"
    assert torch.equal(module(x), expected)


def test_module_tables_of_inference_mode_serve_training():
    module, x = cx.nn.RotaryEmbedding(8), heads((1, 2, 5, 8))
    with torch.inference_mode():
        module(x)
    x.requires_grad_()
    module(x).square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * x)


def test_module_does_not_keep_fake_tables():
    module, x = cx.nn.RotaryEmbedding(8), heads((1, 2, 5, 8))
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert module(torch.empty(1, 2, 5, 8, device=DEVICE)).shape == (1, 2, 5, 8)
    assert torch.equal(module(x), cx.rope(x, *cx.rope_tables(8, 5)))


@each_backend
@pytest.mark.parametrize("warm", [False, True])
def test_module_compiles(warm, backend):
    module, x = cx.nn.RotaryEmbedding(8, units="turns", theta=2**16), heads((1, 2, 5, 8))
    expected = copy.deepcopy(module)(x)
    if warm:
        module(x)
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(x), expected)
    torch.testing.assert_close(compiled(x, inplace=True), expected)


def test_errors_of_module():
    with pytest.raises(ValueError, match="rope_tables: dim must be even, got 7"):
        cx.nn.RotaryEmbedding(7)
    with pytest.raises(ValueError, match="layout must be one of 'bhtd', 'bthd', got 'tbhd'"):
        cx.nn.RotaryEmbedding(8, layout="tbhd")
