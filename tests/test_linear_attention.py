"""linear_attention."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    DEVICE,
    FLOATS,
    assert_close_to_reference,
    assert_one_rounding,
    every_second,
    on_device,
    on_device_of_test,
    random_image,
)
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck

import camox_ops as cx
from camox_ops import _torch_private, reference
from camox_ops.ops.linear_attention import linear_attention_packed
from camox_ops.reference.linear_attention import feature_map_of, over_sum

MAPS = ("elu1", "relu", "identity")
NORMALIZATIONS = ("sum", "feature", "none")
HALVES = (torch.bfloat16, torch.float16)
# Sums of identity features come near 0, where no two orders of adding agree.
MODES = [(f, n) for f in MAPS for n in NORMALIZATIONS if f != "identity" or n == "none"]
# Positions side by side (a qkv convolution), elements side by side (channels_last, and dense), neither, stride 0.
MEMORY = ("image", "channels_last", "contiguous", "strided", "expanded")
# (B, H, T, N, D): head sizes of the users' models, one tile and a bit, one position, more than a chunk.
# One position alone has gradients that are 0 but for rounding, and so has N = 1 with "feature".
SIZES = (
    (2, 3, 37, 6, 6),
    (2, 2, 130, 10, 12),
    (1, 2, 65, 38, 20),
    (2, 1, 3, 5, 1),
    (1, 2, 300, 36, 73),
    (1, 1, 1, 1, 1),
)
ON_CPU = pytest.mark.skipif(DEVICE.type != "cpu", reason="float64, bits and threads: on the CPU")
pytestmark = on_device


def heads(shape, dtype=torch.float32, memory="contiguous", seed=0):
    """A (B, H, T, D) input; "image" and "channels_last": a third of the channels of a (B, 3C, H, W) image."""
    b, h, t, d = shape
    if memory in ("image", "channels_last"):
        layout = "contiguous" if memory == "image" else memory
        part = random_image((b, 3 * h * d, 1, t), dtype, layout, seed=seed).chunk(3, dim=1)[1]
        return part.unflatten(1, (h, d)).flatten(3).transpose(2, 3)
    return random_image(shape, dtype, memory, seed=seed)


def real_of(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def inputs(size, dtype=torch.float32, memory="contiguous", masked=False, stateful=False, normalize="sum"):
    """((q, k, v), key_mask, initial state)"""
    b, h, t, n, d = size
    tensors = tuple(heads((b, h, t, m), dtype, memory, seed) for seed, m in enumerate((n, n, d)))
    mask = torch.arange(b * t).view(b, t) % 3 == 1 if masked else None
    s, z = (
        random_image((b, h, n, d), real_of(dtype), seed=5),
        random_image((b, h, n, 1), real_of(dtype), seed=6)[..., 0].abs(),
    )
    return tensors, mask, (s, z if normalize == "sum" else None) if stateful else None


def leaves_of(tensors, state):
    return [t.detach().requires_grad_() for t in (*tensors, *(state or ())) if t is not None]


def ours(q, k, v, *state, **options):
    """Every output as a tuple, as the reference has them."""
    initial = (state[0], state[1] if len(state) > 1 else None) if state else None
    out, (s, z) = cx.linear_attention(q, k, v, initial_state=initial, return_state=True, **options)
    return (out, s) if z is None else (out, s, z)


def upstream(outputs):
    return [random_image((1, 1, 1, o.numel()), o.dtype, seed=20 + i).view(o.shape) for i, o in enumerate(outputs)]


def numbers(op, leaves, given, real=None, **options):
    """Outputs and gradients; real: in this dtype, from the same values."""
    leaves = [t.detach().to(real or t.dtype).requires_grad_() for t in leaves]
    outputs = op(*leaves, **options)
    found = torch.autograd.grad(outputs, leaves, [g.to(o.dtype) for g, o in zip(given, outputs, strict=True)])
    return [*(o.detach() for o in outputs), *found]


def terms_of_divided(leaves, given, **options):
    """How large the terms are of which the gradients of q and k are differences where features are divided by their
    sum: of a position with one feature nothing remains of them."""
    leaves = [t.detach().double() for t in leaves]
    features = [feature_map_of(x, options.get("feature_map", "elu1")) for x in leaves[:2]]
    divided = [over_sum(f).requires_grad_() for f in features]
    plain = {**options, "feature_map": "identity", "normalize": "none"}
    outputs = reference.linear_attention(*divided, *leaves[2:], **plain)
    grads = torch.autograd.grad(outputs, divided, [g.double() for g in given])
    sums = [f.sum(-1, keepdim=True) for f in features]
    return [torch.where(total > 0, g.abs() / total, 0).max().item() for g, total in zip(grads, sums, strict=True)]


def assert_right(tensors, mask=None, state=None, **options):
    """Outputs and gradients under the tolerance rule, states and their gradients too."""
    leaves, options = leaves_of(tensors, state), {**options, "key_mask": mask}
    given = upstream(ours(*leaves, **options))
    mine = numbers(ours, leaves, given, **options)
    truth = numbers(reference.linear_attention, leaves, given, torch.float64, **options)
    same = numbers(reference.linear_attention, leaves, given, tensors[0].dtype, **options)
    # Tensor cores, which multiply causal chunks, cut off the digits of a sum that other units round: twice the error.
    roundings = 8.0 if DEVICE.type == "cuda" and options.get("causal") else 4.0
    lost = [0.0] * len(mine)
    if options.get("normalize") == "feature" and tensors[0].numel():
        rounding = torch.finfo(torch.float64 if tensors[0].dtype == torch.float64 else torch.float32).eps
        lost[len(given) : len(given) + 2] = (4 * rounding * term for term in terms_of_divided(leaves, given, **options))
    # Sums of terms of either sign: in float64 the reference is no better than they are, and neither is where nothing
    # remains of terms as large as another result, as of a quotient whose two parts grow together.
    largest = max((true.abs().max().item() for true in truth if true.numel()), default=0.0)
    for one, other, true, intermediate in zip(mine, same, truth, lost, strict=True):
        scale = max(16 * true.abs().max().item(), largest) if true.numel() else 0
        allowed = {"scale64": scale, "roundings": roundings, "intermediate": intermediate}
        assert_close_to_reference(one, other.to(one.dtype), true, **allowed)
    return mine


def assert_within_one_rounding(half, float32, device=DEVICE, terms=None, lost=2**-19):
    """Of our own float32 results, which on CUDA take exp from expf where halves take it from ex2.approx: that is off by
    two units in the last place of float32, and by what the rounding of its argument adds. Beside halves the tensor
    cores take a factor in float32 as the sum of two bfloat16, of 16 bits: 2^-18 of it is lost.

    terms: how large the terms are that each result adds up, where they cancel but for a small part.
    lost: of the largest element; more where products follow one another."""
    if device.type == "cpu":
        return assert_one_rounding(half, float32)
    for low, high, size in zip(half, float32, terms or [0.0] * len(float32), strict=True):
        info, high = torch.finfo(low.dtype), high.double()
        difference = (low.double() - high.clamp(-info.max, info.max)).abs()
        allowed = info.eps * high.abs() + info.smallest_normal * info.eps
        allowed += lost * max(high.abs().max().item(), size) if high.numel() else 0.0
        assert torch.all(difference <= allowed), f"max excess {(difference - allowed).max().item():.3e}"


def test_rounding_allowed_on_cuda():
    """A state in float32 as ex2.approx leaves it, and one whose keys were rounded to half precision. They lie on the
    CPU, where assert_one_rounding allows nothing more."""
    state = random_image((1, 2, 6, 6), seed=1).cpu()
    close, distant = (state * (1 + step * torch.ones_like(state)) for step in (3 * 2**-23, 2**-9))
    assert_within_one_rounding([close], [state], torch.device("cuda"))
    with pytest.raises(AssertionError, match="excess"):
        assert_within_one_rounding([distant], [state], torch.device("cuda"))
    with pytest.raises(AssertionError, match="excess"):
        assert_within_one_rounding([close], [state], torch.device("cpu"))


def test_known_values():
    q, k = (torch.tensor(rows).view(1, 1, 2, 2) for rows in ([[1.0, 3], [2, 0]], [[1.0, 1], [3, 1]]))
    v = torch.tensor([[10.0], [100.0]]).view(1, 1, 2, 1)
    # S = k^T v = (310, 110), z = (4, 2)

    def check(expected, **options):
        out = cx.linear_attention(q, k, v, feature_map="relu", **options)
        torch.testing.assert_close(out.flatten(), torch.tensor(expected))

    check([640.0, 620], normalize="none")
    check([640 / 10.5, 620 / 8.5], eps=0.5)
    # k / sum = (.5, .5), (.75, .25): S = (80, 30); q / sum = (.25, .75), (1, 0)
    check([42.5, 80.0], normalize="feature")
    check([300.0 + 300, 600], normalize="none", key_mask=torch.tensor([[True, False]]))
    out = cx.linear_attention(-q, k, v, normalize="none")  # e^-1, e^-3; k + 1 = (2, 2), (4, 2): S = (420, 220)
    f = (-q).exp()
    f[..., 1, 1] = 1.0
    torch.testing.assert_close(out.flatten(), (f @ torch.tensor([[420.0], [220.0]])).flatten())


@every_second(dtype=FLOATS, memory=MEMORY)
def test_matches_reference_and_grad(dtype, memory):
    """Every mode at every size, masks and states at some; eps as large as half precision can hold."""
    for (i, size), (feature_map, normalize) in itertools.product(enumerate(SIZES), MODES):
        if size[2:4] == (1, 1) and normalize != "none":
            continue
        both = (i + len(feature_map)) % 2 == 1
        tensors, mask, state = inputs(size, dtype, memory, both, both, normalize)
        options = {"feature_map": feature_map, "normalize": normalize, "eps": 1e-2}
        mine = assert_right(tensors, mask, state, **options)
        if dtype in HALVES:
            leaves = leaves_of(tensors, state)
            given = upstream(mine[: 3 if normalize == "sum" else 2])
            high = numbers(ours, leaves, given, torch.float32, key_mask=mask, **options)
            assert_within_one_rounding(mine, high)


@pytest.mark.parametrize("size", [(1, 2, 700, 128, 64), (1, 1, 200, 256, 256), (1, 1, 300, 255, 1), (1, 1, 99, 2, 256)])
def test_matches_reference_of_large_heads(size):
    for memory, (feature_map, normalize) in itertools.product(("image", "contiguous"), MODES[:3]):
        tensors, mask, state = inputs(size, memory=memory, masked=True, normalize=normalize)
        assert_right(tensors, mask, state, feature_map=feature_map, normalize=normalize)


@every_second(dtype=FLOATS, memory=("contiguous", "channels_last"))
def test_matches_reference_and_grad_of_whole_vectors(dtype, memory):
    """Heads whose elements are adjacent and whole vectors: on the CPU they are not transposed."""
    sizes = ((2, 3, 37, 32, 64), (1, 2, 700, 16, 48), (1, 1, 1, 64, 32))
    for size, (feature_map, normalize), stateful in itertools.product(sizes, MODES, (False, True)):
        if size[2] == 1 and normalize != "none":
            continue
        tensors, _, state = inputs(size, dtype, memory, False, stateful, normalize)
        assert_right(tensors, None, state, feature_map=feature_map, normalize=normalize, eps=1e-2)


@pytest.mark.parametrize("length", [96, 1024])
@pytest.mark.parametrize("normalize", ["sum", "none"])
def test_matches_reference_and_grad_of_rows_in_place(normalize, length):
    """v of an image, multiplied with nothing: on the CPU read where it lies, unless its rows share cache sets."""
    tensors, _, _ = inputs((1, 2, length, 6, 5), memory="image")
    assert_right(tensors, None, None, normalize=normalize)


@pytest.mark.parametrize("memory", ["image", "channels_last", "contiguous"])
def test_matches_reference_and_grad_past_the_caches(memory):
    """Gradients of 8 MiB and more, which the CPU writes by non-temporal stores."""
    tensors, _, _ = inputs((1, 4, 2800, 64, 64), memory=memory)
    assert_right(tensors, None, None)


@given(
    st.tuples(*(st.integers(*range_) for range_ in ((1, 3), (1, 3), (3, 200), (2, 40), (1, 40)))),
    st.sampled_from(MODES),
    st.sampled_from(MEMORY),
    st.sampled_from(FLOATS),
    st.booleans(),
)
def test_shapes(size, mode, memory, dtype, both):
    tensors, mask, state = inputs(size, dtype, memory, both, both, mode[1])
    assert_right(tensors, mask, state, feature_map=mode[0], normalize=mode[1], eps=1e-2)


def test_grad_of_features_where_they_bend():
    """elu(x) + 1 has the slope 1 at 0, also where torch's clamp has none there."""
    x, one = torch.zeros(1, 1, 1, 1, requires_grad=True), torch.ones(1, 1, 1, 1)
    for out in (
        cx.linear_attention(x, one, one, normalize="none"),
        reference.linear_attention(x, one, one, normalize="none")[0],
    ):
        assert torch.autograd.grad(out, x)[0].item() == 2  # the feature of the one key


@ON_CPU
@pytest.mark.parametrize("feature_map, normalize", MODES)
def test_grad(feature_map, normalize):
    tensors, mask, state = inputs((2, 2, 4, 2, 3), torch.float64, "contiguous", True, True, normalize)
    leaves = leaves_of(tensors, state)
    assert gradcheck(lambda *t: ours(*t, feature_map=feature_map, normalize=normalize, key_mask=mask), leaves)
    assert gradcheck(lambda *t: ours(*t, feature_map=feature_map, normalize=normalize)[0], leaves[:3])
    # gradients of the state alone, and of one of its two parts
    for part in range(1, 3 if normalize == "sum" else 2):
        assert gradcheck(
            lambda *t, part=part: ours(*t, feature_map=feature_map, normalize=normalize)[part],
            leaves[1:2] * 2 + leaves[2:],
        )


@pytest.mark.parametrize("normalize", NORMALIZATIONS)
def test_state_carries_on(normalize):
    """Two halves, the second beginning with the state of the first, see all keys; the first only its own."""
    (q, k, v), _, _ = inputs((2, 2, 90, 6, 5))
    whole, (s, z) = cx.linear_attention(q, k, v, normalize=normalize, return_state=True)
    first, later = (tuple(t[:, :, part] for t in (q, k, v)) for part in (slice(0, 40), slice(40, 90)))
    _, state = cx.linear_attention(*first, normalize=normalize, return_state=True)
    out, (s2, z2) = cx.linear_attention(*later, normalize=normalize, initial_state=state, return_state=True)
    # Sums of either sign, divided elsewhere: what they differ by is of the size of the largest.
    torch.testing.assert_close(out, whole[:, :, 40:], rtol=0, atol=1e-6 * whole.abs().max().item())
    torch.testing.assert_close(s2, s)
    assert (z2 is None) == (normalize != "sum")
    if z is not None:
        torch.testing.assert_close(z2, z)


@pytest.mark.parametrize("normalize", NORMALIZATIONS)
@pytest.mark.parametrize("memory", ["image", "contiguous", "strided"])
def test_masked_keys_may_hold_anything(normalize, memory):
    (q, k, v), mask, _ = inputs((2, 2, 70, 5, 6), memory=memory, masked=True)
    clean = [t.masked_fill(mask[:, None, :, None], 0) for t in (k, v)]
    rubbish = [heads(t.shape, memory=memory) for t in (k, v)]
    for one, other in zip(rubbish, (k, v), strict=True):
        one.copy_(other.masked_fill(mask[:, None, :, None], float("nan")))
    found = []
    for keys in (clean, rubbish):
        leaves = leaves_of((q, *keys), None)
        given = upstream(ours(*leaves, normalize=normalize))
        found.append(numbers(ours, leaves, given, normalize=normalize, key_mask=mask))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    for gradient in found[0][-2:]:
        assert not gradient[mask[:, None, :, None].expand_as(gradient)].any()
    out = cx.linear_attention(q, k, v, normalize=normalize, key_mask=torch.ones_like(mask))
    assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("normalize", NORMALIZATIONS)
@pytest.mark.parametrize("dims", [(6, 5), (32, 16)])
def test_zero_sums_are_finite(normalize, dtype, dims):
    """Rows of relu features that are all 0, and elu1 features that underflow, in q, in k and in both."""
    for feature_map in ("relu", "elu1"):
        (q, k, v), _, _ = inputs((1, 2, 40, *dims), dtype)
        q, k = q.clone(), k.clone()
        q[:, :, 3:9], k[:, :, 5:11], k[:, 1] = -2000, -2000, -2000
        for tensor in numbers(
            ours, (q, k, v), upstream(ours(q, k, v, normalize=normalize)), normalize=normalize, feature_map=feature_map
        ):
            assert tensor.isfinite().all()
        out = cx.linear_attention(q, k, v, normalize=normalize, feature_map=feature_map)
        assert not out[:, :, 3:9].any()
        assert not out[:, 1].any()
        assert out[:, 0, 10:].any()


@pytest.mark.parametrize("dims, memory", [((6, 5), "image"), ((32, 16), "contiguous")])
def test_next_to_nothing_is_normalized(dims, memory):
    """Rows of elu1 features of 1e-35 have sums whose inverse times v would be infinite."""
    (q, k, v), _, _ = inputs((1, 2, 150, *dims), memory=memory)
    q, k, v = q.clone(), k.clone(), v * 1e6
    q[:, :, 3:9], k[:, :, 5:90] = -80, -80
    given = upstream(ours(q, k, v, normalize="feature"))
    truth = numbers(reference.linear_attention, (q, k, v), given, torch.float64, normalize="feature")
    # in float32 the reference's own gradients are not finite
    for one, true in zip(numbers(ours, (q, k, v), given, normalize="feature"), truth, strict=True):
        assert (one.double() - true).abs().max() <= 1e-5 * true.abs().max()


def sizes_of_terms(q, k, v, state, grad, grad_state):
    """How large the terms are that the gradients of q, k and v add up; state, and the gradients of out and state.

    With values of mean 3 the rows of S are 3 times z, but for one part in hundreds, and that is all that the two terms
    of the gradient of q, (grad S - (grad . out) z) / sum, leave of each other."""
    (q, k), (s, *z) = (F.elu(x) + 1 for x in (q, k)), state
    sum_q, sum_k = (q @ z[0][..., None], 1.0) if z else (q.sum(-1, keepdim=True), k.sum(-1, keepdim=True))
    grad_state = ((q / sum_q).mT @ grad + grad_state).abs()
    terms = grad.abs() @ s.abs().mT / sum_q, v.abs() @ grad_state.mT / sum_k, k / sum_k @ grad_state
    return [size.max().item() for size in terms]


@every_second(normalize=["sum", "feature"], dtype=[torch.float32, torch.bfloat16])
def test_hundred_thousand_positions(normalize, dtype):
    """bfloat16 sums would stop growing at 256; a mean of many values of one sign shows it."""
    shape, options = (1, 1, 100_000, 12), {"normalize": normalize}
    q, k, v = (heads(shape, dtype, "image", seed) for seed in range(3))
    leaves = (q, k, (v.float() + 3).to(dtype))
    given = upstream(ours(*leaves, **options))
    single = numbers(ours, leaves, given, torch.float32, **options)
    if dtype == torch.bfloat16:
        state = single[1:-3]
        sizes = sizes_of_terms(*(x.float() for x in leaves), state, given[0].float(), given[1])
        terms = [0.0, *(0.0 for _ in state), *sizes]
        assert_within_one_rounding(numbers(ours, leaves, given, **options), single, terms=terms)
    truth = numbers(reference.linear_attention, leaves, given, torch.float64, **options)
    same = numbers(reference.linear_attention, leaves, given, torch.float32, **options)
    assert_close_to_reference(single, same, truth)


@pytest.mark.parametrize("normalize", ["sum", "feature"])
def test_heads_of_a_image_are_views(normalize):
    """The result and the gradients of heads of a qkv convolution's output are images without a copy."""
    b, heads_, d, height, width = 2, 3, 5, 6, 7
    for memory_format in (torch.contiguous_format, torch.channels_last):
        qkv = torch.randn(b, 3 * heads_ * d, height, width).to(memory_format=memory_format)
        q, k, v = (t.unflatten(1, (heads_, d)).flatten(3).transpose(2, 3) for t in qkv.chunk(3, dim=1))
        assert q.data_ptr() == qkv.data_ptr()
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        out = cx.linear_attention(*leaves, normalize=normalize)
        dense = cx.linear_attention(*(t.contiguous() for t in (q, k, v)), normalize=normalize)
        torch.testing.assert_close(out, dense)
        for tensor in (out, *torch.autograd.grad(out.square().sum(), leaves)):
            # view, unlike reshape, refuses to copy
            image = tensor.detach().transpose(2, 3)
            image = image.view(b, heads_, d, height, width).view(b, heads_ * d, height, width)
            assert image.is_contiguous(memory_format=memory_format)


def packed(shape, dtype=torch.float32, memory="image"):
    """(B, 3, H, T, N): the heads of a qkv convolution's output, of a qkv layer's output (B, T, 3C), or dense."""
    b, h, t, n = shape
    if memory == "tokens":
        return random_image((b, t, 1, 3 * h * n), dtype).view(b, t, 3, h, n).permute(0, 2, 3, 1, 4)
    if memory == "contiguous":
        return random_image((b, 3 * h, t, n), dtype).view(b, 3, h, t, n)
    layout = "contiguous" if memory == "image" else memory
    image = random_image((b, 3 * h * n, 1, t), dtype, layout)
    return image.unflatten(1, (3, h, n)).flatten(4).squeeze(4).transpose(3, 4)


@pytest.mark.parametrize("memory", ["image", "channels_last", "tokens", "contiguous"])
def test_packed_matches_and_grad(memory):
    """One tensor for q, k and v: the bits of linear_attention, and one gradient, in the order of that tensor."""
    mask = torch.arange(2 * 70).view(2, 70) % 5 == 1
    for normalize, dtype in itertools.product(NORMALIZATIONS, (torch.float32, torch.bfloat16)):
        qkv = packed((2, 3, 70, 10), dtype, memory).detach().requires_grad_()
        options = {"normalize": normalize, "key_mask": mask}
        mine = linear_attention_packed(qkv, **options)
        three = cx.linear_attention(*qkv.unbind(1), **options)
        assert torch.equal(mine, three)
        assert mine.stride() == three.stride()
        given = upstream([three])
        found, expected = (torch.autograd.grad(out, qkv, given)[0] for out in (mine, three))
        assert torch.equal(found, expected)
        assert found.stride() == qkv.stride()


@ON_CPU
def test_packed_func_transforms():
    xs = torch.randn(3, 2, 3, 2, 7, 4, dtype=torch.float64)  # (mapped, B, qkv, H, T, N)
    for normalize in NORMALIZATIONS:

        def loss(qkv, op, normalize=normalize):
            return op(qkv, normalize=normalize).square().sum()

        def three(qkv, normalize):
            return reference.linear_attention(*qkv.unbind(1), normalize=normalize)[0]

        for in_dims, argument in ((0, xs), (1, xs.movedim(0, 1))):
            got, expected = (
                torch.vmap(lambda x, op=op, f=loss: torch.func.grad(f)(x, op), in_dims)(argument)
                for op in (linear_attention_packed, three)
            )
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("normalize", NORMALIZATIONS)
def test_layout(normalize):
    tensors, mask, state = inputs((2, 3, 20, 6, 5), masked=True, stateful=True, normalize=normalize)
    swapped = tuple(t.transpose(1, 2).contiguous() for t in tensors)
    options = {"normalize": normalize, "key_mask": mask, "initial_state": state, "return_state": True}
    out, (s, z) = cx.linear_attention(*tensors, **options)
    other, (s2, z2) = cx.linear_attention(*swapped, **options, layout="bthd")
    assert other.is_contiguous()
    torch.testing.assert_close(other, out.transpose(1, 2), rtol=0, atol=0)
    assert torch.equal(s, s2)
    assert z is None or torch.equal(z, z2)
    assert_right(swapped, mask, state, normalize=normalize, layout="bthd")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_camoxpert_parity(dtype):
    """SDTAEncoder.linear_attention of mahi-chan/camoXpert, models/backbone.py at 47e858c, in our own words."""

    def plain(q, k, v):
        q, k = (F.elu(x) + 1 for x in (q, k))
        q, k = (x / x.sum(dim=-1, keepdim=True) for x in (q, k))
        return torch.einsum("bhtn,bhnd->bhtd", q, torch.einsum("bhtn,bhtd->bhnd", k, v))

    tensors, _, _ = inputs((2, 8, 144, 10, 10), dtype, "image")
    out = cx.linear_attention(*tensors, normalize="feature")
    assert_close_to_reference(out, plain(*tensors), plain(*(t.double() for t in tensors)))


@pytest.mark.parametrize("dtype", FLOATS)
def test_softmax_matches_reference_and_grad(dtype):
    """Masks and states at some; heads of an image come back as one; a row of which every key is masked."""
    for i, (normalize, memory) in enumerate(
        itertools.product(NORMALIZATIONS, ("image", "channels_last", "contiguous"))
    ):
        both = i % 2 == 1
        tensors, mask, state = inputs((2, 3, 37, 6, 5), dtype, memory, both, both, normalize)
        options = {"feature_map": "softmax", "normalize": normalize, "eps": 1e-2}
        mine = assert_right(tensors, mask, state, **options)
        assert mine[0].dtype == dtype
        plain = cx.linear_attention(*tensors, normalize=normalize)
        assert mine[0].stride() == plain.stride()
        if both:
            mask[0] = True
            given = upstream(mine[: 3 if normalize == "sum" else 2])
            assert all(
                y.isfinite().all() for y in numbers(ours, leaves_of(tensors, state), given, key_mask=mask, **options)
            )


def test_softmax_is_the_attention_of_diffusion_models():
    """LinearAttention of lucidrains/denoising-diffusion-pytorch, in our own words."""
    q, k, v = (
        heads((2, 4, 64, 8), torch.float64 if DEVICE.type == "cpu" else torch.float32, "image", i) for i in range(3)
    )
    context = torch.einsum("bhtn,bhtd->bhnd", k.softmax(2), v)
    expected = torch.einsum("bhnd,bhtn->bhtd", context, q.softmax(3))
    out = cx.linear_attention(q, k, v, feature_map="softmax", normalize="none")
    torch.testing.assert_close(out, expected)
    qkv = torch.stack((q, k, v), 1)
    torch.testing.assert_close(linear_attention_packed(qkv, feature_map="softmax", normalize="none"), expected)
    mask = torch.arange(64).expand(2, 64) % 3 == 1
    rubbish = [x.masked_fill(mask[:, None, :, None], float("nan")) for x in (k, v)]
    one, other = (
        cx.linear_attention(q, *keys, feature_map="softmax", key_mask=mask, normalize="none")
        for keys in ((k, v), rubbish)
    )
    assert torch.equal(one, other)


# ---- causal ----
CAUSAL = (True, "strict")


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("dtype", FLOATS)
def test_causal_matches_reference_and_grad(dtype, causal):
    """Every mode: shorter than a chunk, not a multiple of one, several; masks, states and strides at some."""
    for i, ((feature_map, normalize), size) in enumerate(itertools.product(MODES, (*SIZES[:3], (1, 2, 150, 36, 73)))):
        both = i % 2 == 1
        tensors, mask, state = inputs(size, dtype, MEMORY[i % len(MEMORY)], both, both, normalize)
        options = {"feature_map": feature_map, "normalize": normalize, "causal": causal, "eps": 1e-2}
        mine = assert_right(tensors, mask, state, **options)
        if dtype in HALVES:
            leaves = leaves_of(tensors, state)
            given = upstream(mine[: 3 if normalize == "sum" else 2])
            high = numbers(ours, leaves, given, torch.float32, key_mask=mask, **options)
            # C = A B^T, then C V: factors are sums of two bfloat16, and terms of either sign cancel
            assert_within_one_rounding(mine, high, lost=2**-14)


@pytest.mark.parametrize("size", [(1, 1, 70, 256, 130), (1, 1, 99, 2, 256), (1, 2, 16, 1, 1), (1, 1, 128, 64, 64)])
def test_causal_matches_reference_of_large_heads(size):
    tensors, mask, state = inputs(size, masked=True, stateful=True)
    # Of one feature q cancels but for eps, so that a small one leaves its gradient nothing but rounding.
    assert_right(tensors, mask, state, causal=True, eps=1.0 if size[3] == 1 else 1e-2)


@ON_CPU
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("feature_map, normalize", MODES)
def test_causal_grad(feature_map, normalize, causal):
    """By differences; of the state alone too."""
    tensors, mask, state = inputs((1, 2, 5, 3, 4), torch.float64, "contiguous", True, True, normalize)
    options = {"feature_map": feature_map, "normalize": normalize, "causal": causal, "eps": 1e-2}
    leaves = leaves_of(tensors, state)
    assert gradcheck(lambda *t: ours(*t, key_mask=mask, **options), leaves)
    assert gradcheck(lambda *t: ours(*t, **options)[1], leaves[1:2] * 2 + leaves[2:])


@pytest.mark.parametrize("causal", CAUSAL)
def test_causal_sees_nothing_later(causal):
    """Other keys from position 70 on change nothing before it, and the last state is that of all keys."""
    (q, k, v), _, _ = inputs((2, 2, 150, 6, 5))
    out, (s, z) = cx.linear_attention(q, k, v, causal=causal, return_state=True)
    later_k, later_v = k.clone(), v.clone()
    first = 70 + (causal == "strict")
    later_k[:, :, 70:], later_v[:, :, 70:] = 5, -3
    other = cx.linear_attention(q, later_k, later_v, causal=causal)
    assert torch.equal(out[:, :, :first], other[:, :, :first])
    assert not torch.equal(out[:, :, first:], other[:, :, first:])
    _, (all_s, all_z) = cx.linear_attention(q, k, v, return_state=True)
    torch.testing.assert_close(s, all_s)
    torch.testing.assert_close(z, all_z)
    if causal == "strict":
        assert not out[:, :, 0].any()


def bits(one, other):
    return one.isfinite().all() and torch.equal(one, other)


def same(one, other):
    """Bits; of halves on CUDA up to those of a sum of two bfloat16, which terms added one by one do not have."""
    if DEVICE.type == "cpu" or one.dtype not in HALVES:
        return bits(one, other)
    close = {"rtol": torch.finfo(one.dtype).eps, "atol": 2**-14 * other.abs().max().item() if other.numel() else 0.0}
    return one.isfinite().all() and torch.allclose(one, other, **close)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("causal", CAUSAL)
def test_what_is_not_finite_does_not_reach_back(causal, bad):
    """Positions 5 and 75 of one head: outputs before and gradients that do not depend on it; bits of other heads."""
    for (normalize, dtype), at in itertools.product(
        itertools.product(NORMALIZATIONS, (torch.float32, torch.bfloat16)), (5, 75)
    ):
        tensors, _, _ = inputs((2, 2, 100, 6, 20), dtype)
        options = {"normalize": normalize, "causal": causal}
        given = upstream(ours(*tensors, **options))
        clean = numbers(ours, tensors, given, **options)
        for i in range(3):
            changed = [x.clone() for x in tensors]
            changed[i][0, 1, at] = bad
            out, *states, grad_q, grad_k, grad_v = numbers(ours, changed, given, **options)
            true, *_, true_q, true_k, true_v = clean
            # a query is answered by itself alone; strict, a key is seen from the next position on
            first = at + (i > 0 and causal == "strict")
            before, after = slice(0, first), slice(at + 1, None)
            rest = [(out, true, before), (grad_q, true_q, before)]
            if i == 0:
                rest += [(out, true, after), (grad_q, true_q, after), (grad_k, true_k, after), (grad_v, true_v, after)]
            for mine, other, part in rest:
                assert same(mine[0, 1, part], other[0, 1, part])
            for mine, other in zip((out, *states, grad_q, grad_k, grad_v), clean, strict=True):
                assert bits(mine[1], other[1])
                assert bits(mine[0, 0], other[0, 0])
            if i == 2:
                assert not out[0, 1, first:].isfinite().any()


@pytest.mark.parametrize("causal", CAUSAL)
def test_what_is_not_finite_stays_in_its_sequence(causal):
    """Outputs, states and gradients of the sequences beside it keep their bits."""
    for normalize, sequence in itertools.product(NORMALIZATIONS, (0, 2, 3)):
        tensors, _, state, cu_seqlens = sequences(True, normalize)
        leaves, options = (
            leaves_of(tensors, state),
            {"normalize": normalize, "causal": causal, "cu_seqlens": cu_seqlens},
        )
        given = upstream(ours(*leaves, **options))
        clean = numbers(ours, leaves, given, **options)
        begin, end = BOUNDS[sequence : sequence + 2]
        changed = [x.detach().clone() for x in leaves]
        for x in changed[:3]:
            x[:, :, begin:end] = float("nan")
        mine = numbers(ours, changed, given, **options)
        outputs = len(given)
        for i, (one, other) in enumerate(zip(mine, clean, strict=True)):
            if i == 0 or outputs <= i < outputs + 3:
                assert one[:, :, begin:end].isnan().any()
                assert bits(one[:, :, :begin], other[:, :, :begin])
                assert bits(one[:, :, end:], other[:, :, end:])
            else:
                kept = torch.arange(len(BOUNDS) - 1) != sequence
                assert bits(one[kept], other[kept])


@ON_CPU
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("length, dim", [(64, 64), (128, 32), (63, 32), (100, 128)])
def test_recurrence_of_flash_linear_attention(length, dim, normalize):
    """Its naive form in float64, forward, last state and gradients, from a state too; sizes of its own tests."""
    shape = (2, length, 2, dim)
    q, k, v = (random_image(shape, torch.float64, seed=seed) for seed in range(3))
    first = random_image((2, 2, dim, dim), torch.float64, seed=3)
    # with a denominator its q and k are features; it knows no sum of keys before the first
    leaves = leaves_of((q.exp(), k.exp(), v) if normalize else (q, k, v, first), None)
    q, k, v, *state = leaves
    expected = reference.linear_attention_recurrence(*leaves, normalize=normalize)
    mode = {"normalize": "sum", "eps": 1e-10} if normalize else {"normalize": "none", "initial_state": (*state, None)}
    out, (s, _) = cx.linear_attention(
        *(q * dim**-0.5, k, v),
        **mode,
        feature_map="identity",
        causal=True,
        return_state=True,
        layout="bthd",
    )
    given = upstream((out, s))
    pairs = zip((out, s), expected, strict=True)
    found, true = (torch.autograd.grad(outputs, leaves, given) for outputs in ((out, s), expected))
    for mine, other in (*pairs, *zip(found, true, strict=True)):
        torch.testing.assert_close(mine, other, rtol=1e-11, atol=1e-11 * other.abs().max().item())


@ON_CPU
def test_packed_recurrence_of_flash_linear_attention():
    """Lengths of its tests of packed sequences, each from a state of its own."""
    lengths = (63, 1, 64, 100)
    bounds = torch.tensor((0, *lengths)).cumsum(0)
    q, k, v = (random_image((1, sum(lengths), 2, 16), torch.float64, seed=seed) for seed in range(3))
    first = random_image((len(lengths), 2, 16, 16), torch.float64, seed=3)
    out, (s, _) = cx.linear_attention(
        *(q * 0.25, k, v),
        feature_map="identity",
        normalize="none",
        causal=True,
        cu_seqlens=bounds.int(),
        initial_state=(first, None),
        return_state=True,
        layout="bthd",
    )
    for i, (begin, end) in enumerate(itertools.pairwise(bounds.tolist())):
        rows = (x[:, begin:end] for x in (q, k, v))
        expected, last = reference.linear_attention_recurrence(*rows, first[i : i + 1])
        torch.testing.assert_close(out[:, begin:end], expected)
        torch.testing.assert_close(s[i : i + 1], last)


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("normalize", NORMALIZATIONS)
def test_step_is_the_full_run(normalize, causal):
    """Position by position, on a state that is written in place; after a prefix of the full run too."""
    (q, k, v), _, state = inputs((2, 3, 70, 6, 5), stateful=True, normalize=normalize)
    options = {"normalize": normalize, "eps": 1e-2}
    whole, last = cx.linear_attention(q, k, v, causal=causal, initial_state=state, return_state=True, **options)
    _, state = cx.linear_attention(
        *(x[:, :, :3] for x in (q, k, v)), causal=causal, initial_state=state, return_state=True, **options
    )
    memory = state[0].data_ptr()
    for t in range(3, 70):
        rows = (x[:, :, t] for x in (q, k, v))
        out, state = cx.linear_attention_step(*rows, state, strict=causal == "strict", **options)
        torch.testing.assert_close(out, whole[:, :, t], rtol=1e-4, atol=1e-5)
    assert state[0].data_ptr() == memory
    torch.testing.assert_close(state[0], last[0])
    assert (state[1] is None) == (normalize != "sum")


def test_step_on_states_of_other_strides():
    (q, k, v), _, (s, z) = inputs((2, 3, 1, 6, 5), stateful=True)
    rows = [x[:, :, 0] for x in (q, k, v)]
    swapped = s.transpose(0, 1).contiguous().transpose(0, 1)
    out, (found, _) = cx.linear_attention_step(*rows, (s, z.clone()))
    other, (written, _) = cx.linear_attention_step(*rows, (swapped, z.clone()))
    assert written is swapped
    assert torch.equal(out, other)
    assert torch.equal(found, written)


def test_step_with_a_gradient_leaves_the_state():
    (q, k, v), _, (s, z) = inputs((2, 3, 1, 6, 5), stateful=True)
    rows, before = [x[:, :, 0].detach().requires_grad_() for x in (q, k, v)], s.clone()
    out, (next_s, _) = cx.linear_attention_step(*rows, (s, z))
    assert torch.equal(s, before)
    (out.sum() + next_s.sum()).backward()
    assert all(x.grad is not None for x in rows)


def test_step_moves_the_versions_of_its_state():
    """Else a backward that needs the state as it was would take what the step wrote."""
    (q, k, v), _, (s, z) = inputs((2, 3, 1, 6, 5), stateful=True)
    rows = [x[:, :, 0] for x in (q, k, v)]
    for state in ((s.clone(), z.clone()), (s.transpose(0, 1).clone().transpose(0, 1), z.clone())):
        for written in state:
            weight = torch.ones_like(written, requires_grad=True)
            loss = (weight * written).sum()
            cx.linear_attention_step(*rows, state)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


def test_step_refuses_a_state_that_shares_memory():
    """Before S or z is written."""
    (q, k, v), _, (s, z) = inputs((2, 3, 1, 6, 5), stateful=True)
    q, k, v = (x[:, :, 0].contiguous() for x in (q, k, v))
    buffer = torch.arange(400.0)
    overlapping = buffer.as_strided(s.shape, (90, 30, 2, 1))
    for state, message in (
        ((s[:1].expand_as(s), z), "state's S .* must not share memory"),
        ((s, z[:1].expand_as(z)), "state's z .* must not share memory"),
        ((overlapping, z), "state's S .* must not share memory"),
        ((s, s[..., 0]), "state's S and z .* must not share memory"),
        ((s, s.flatten()[:36].view(z.shape)), "state's S .* must not share memory"),
        ((s, k), "state's z is written: it must not share memory with k"),
        ((buffer[:180].view(s.shape), z), "state's S is written: it must not share memory with v"),
    ):
        value = buffer[170:200].view(v.shape) if "with v" in message else v
        before = [x.clone() for x in (*state, buffer)]
        with pytest.raises(ValueError, match=f"linear_attention_step: {message}"):
            cx.linear_attention_step(q, k, value, state)
        assert all(torch.equal(x, y) for x, y in zip((*state, buffer), before, strict=True))


@ON_CPU
@pytest.mark.parametrize("position", range(5))
def test_step_on_lazily_negated_tensors(position):
    """One step, not one of the dispatcher's on copies and then another."""
    (q, k, v), _, (s, z) = inputs((2, 3, 1, 6, 5), stateful=True)
    plain = [x.clone() for x in (*(x[:, :, 0] for x in (q, k, v)), s, z)]
    negated = [torch._neg_view(-x) if i == position else x.clone() for i, x in enumerate(plain)]
    assert negated[position].is_neg()
    expected, _ = cx.linear_attention_step(*plain[:3], tuple(plain[3:]))
    found, _ = cx.linear_attention_step(*negated[:3], tuple(negated[3:]))
    assert torch.equal(found, expected)
    assert all(torch.equal(x, y) for x, y in zip(negated, plain, strict=True))


@ON_CPU
def test_step_compiles_and_obeys_autocast():
    """Both by way of the checks, which plain calls go around: the same output, and the state is written."""
    (q, k, v), _, (s, z) = inputs((2, 3, 1, 6, 5), stateful=True)
    rows = [x[:, :, 0] for x in (q, k, v)]
    compiled = torch.compile(cx.linear_attention_step, backend="aot_eager", fullgraph=True)
    found = []
    for step in (cx.linear_attention_step, compiled):
        state = (s.clone(), z.clone())
        out, written = step(*rows, state)
        if step is not compiled or not _torch_private.missing:  # else torch does not say that this is no transform
            assert written[0].data_ptr() == state[0].data_ptr()
        found.append((out, *written))
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other)
    with torch.autocast("cpu", torch.bfloat16):
        assert cx.linear_attention_step(*rows, (s.clone(), z.clone()))[0].dtype == torch.bfloat16


BOUNDS = (0, 5, 5, 75, 203)


def sequences(stateful, normalize="sum", dtype=torch.float32, memory="contiguous"):
    tensors, mask, _ = inputs((1, 2, BOUNDS[-1], 6, 5), dtype, memory, True)
    _, _, state = inputs((len(BOUNDS) - 1, 2, 1, 6, 5), dtype, stateful=stateful, normalize=normalize)
    return tensors, mask, state, torch.tensor(BOUNDS, dtype=torch.int32)


@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("stateful", [False, True])
def test_cu_seqlens(causal, stateful):
    """Outputs, states and gradients of each sequence, one of them empty; the bits of each sequence alone."""
    for normalize, dtype in itertools.product(NORMALIZATIONS, (torch.float32, torch.bfloat16, torch.float64)):
        if dtype == torch.float64 and DEVICE.type != "cpu":
            continue
        tensors, mask, state, cu_seqlens = sequences(stateful, normalize, dtype)
        options = {"normalize": normalize, "causal": causal, "eps": 1e-2}
        mine = assert_right(tensors, mask, state, cu_seqlens=cu_seqlens, **options)
        for i, (begin, end) in enumerate(itertools.pairwise(BOUNDS)):
            rows, some = (x[:, :, begin:end] for x in tensors), mask[:, begin:end]
            first = None if state is None else tuple(None if x is None else x[i : i + 1] for x in state)
            out = cx.linear_attention(*rows, key_mask=some, initial_state=first, **options)
            assert torch.equal(out, mine[0][:, :, begin:end])
    tensors, mask, state, cu_seqlens = sequences(stateful)
    swapped = tuple(x.transpose(1, 2).contiguous() for x in tensors)
    assert_right(swapped, mask, state, cu_seqlens=cu_seqlens, causal=causal, layout="bthd", eps=1e-2)


@ON_CPU
@pytest.mark.parametrize(
    "bounds, message",
    [
        ((0, 2, 4), "cu_seqlens must end with the 5 positions of q, got 4"),
        ((1, 5), r"cu_seqlens\[0\] must be 0, got 1"),
        ((0, 4, 3, 5), "cu_seqlens must not fall, got 3 after 4 at index 2"),
    ],
)
def test_values_of_cu_seqlens(bounds, message):
    q = Q[:1]
    with pytest.raises((ValueError, RuntimeError), match=message):
        cx.linear_attention(q, q, q, causal=True, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))


@ON_CPU
def test_causal_compiles():
    """With other lengths too, and with packed sequences."""
    tensors, mask, state, cu_seqlens = sequences(True)
    compiled = torch.compile(
        lambda *t, **o: cx.linear_attention(*t, causal=True, return_state=True, **o)[0].square().sum(),
        backend="aot_eager",
        fullgraph=True,
    )
    for options in ({}, {"cu_seqlens": cu_seqlens, "initial_state": state}):
        leaves = leaves_of(tensors, None)
        expected = [x.detach().clone().requires_grad_() for x in leaves]
        compiled(*leaves, key_mask=mask, **options).backward()
        cx.linear_attention(*expected, causal=True, key_mask=mask, **options).square().sum().backward()
        for mine, other in zip(leaves, expected, strict=True):
            assert torch.equal(mine.grad, other.grad)


TOKEN = torch.zeros(2, 3, 4)
TOKEN_STATE = (torch.zeros(2, 3, 4, 4), torch.zeros(2, 3, 4))
CU = torch.tensor([0, 2, 5], dtype=torch.int32)


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"q": None}, TypeError, "q must be a torch.Tensor"),
        ({"q": TOKEN[0]}, ValueError, r"q must have 3 dimensions \(B, H, N\), got shape \(3, 4\)"),
        ({"v": TOKEN[:1]}, ValueError, r"v must have shape \(B, H, D\) beside q of \(2, 3, 4\), got \(1, 3, 4\)"),
        ({"state": None}, TypeError, r"state must be a pair \(S, z\), got NoneType"),
        ({"state": (TOKEN_STATE[0], None)}, ValueError, "the z of state must be a tensor with normalize='sum'"),
        ({"state": (TOKEN_STATE[0][:1], TOKEN_STATE[1])}, ValueError, r"S must have shape \(2, 3, 4, 4\)"),
        ({"state": (TOKEN_STATE[0].double(), TOKEN_STATE[1])}, TypeError, "S must have dtype float32, got float64"),
        ({"state": (TOKEN_STATE[0].to("meta"), TOKEN_STATE[1])}, ValueError, "S must be on the device of q"),
        ({"strict": 1}, TypeError, "strict must be a bool"),
        ({"eps": 0.0}, ValueError, "eps must be > 0"),
        ({"feature_map": "gelu"}, ValueError, "feature_map must be one of"),
        (
            {"feature_map": "softmax"},
            ValueError,
            "feature_map must be one of 'elu1', 'relu', 'identity', got 'softmax'",
        ),
    ],
)
def test_errors_of_the_step(changes, error, message):
    arguments = {"q": TOKEN, "k": TOKEN, "v": TOKEN, "state": TOKEN_STATE, **changes}
    tensors = [arguments.pop(name) for name in ("q", "k", "v", "state")]
    with pytest.raises(error, match=message) as caught:
        cx.linear_attention_step(*tensors, **arguments)
    assert str(caught.value).startswith("linear_attention_step: ")


# ---- errors ----

Q = torch.zeros(2, 3, 5, 4)
STATE = (torch.zeros(2, 3, 4, 4), torch.zeros(2, 3, 4))


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"q": None}, TypeError, "q must be a torch.Tensor, got NoneType"),
        ({"k": Q.to_sparse()}, TypeError, "k must be a dense tensor"),
        ({"v": Q.int()}, TypeError, "v must have dtype .* got int32"),
        ({"k": Q.bfloat16()}, TypeError, "k must have the dtype of q, float32, got bfloat16"),
        ({"v": Q.half()}, TypeError, "v must have the dtype of q"),
        ({"q": Q[0]}, ValueError, r"q must have 4 dimensions \(B, H, T, N\), got shape \(3, 5, 4\)"),
        ({"q": Q[0], "layout": "bthd"}, ValueError, r"\(B, T, H, N\)"),
        ({"k": Q[:, :, :4]}, ValueError, r"k must have the shape of q, \(2, 3, 5, 4\), got \(2, 3, 4, 4\)"),
        ({"k": Q[..., :3]}, ValueError, "k must have the shape of q"),
        (
            {"v": Q[:, :2]},
            ValueError,
            r"v must have shape \(B, H, T, D\) beside q of \(2, 3, 5, 4\), got \(2, 2, 5, 4\)",
        ),
        ({"v": Q[0]}, ValueError, "v must have shape"),
        ({"v": Q[..., :0]}, ValueError, "the head size of v must be from 1 to 256, got 0"),
        ({"q": torch.zeros(2, 3, 5, 257), "k": torch.zeros(2, 3, 5, 257)}, ValueError, "q and k .* got 257"),
        ({"v": Q.to("meta")}, ValueError, "v must be on the device of q"),
        (
            {"feature_map": "gelu"},
            ValueError,
            "feature_map must be one of 'elu1', 'relu', 'identity', 'softmax', got 'gelu'",
        ),
        (
            {"feature_map": "softmax", "causal": True},
            ValueError,
            "feature_map 'softmax' sums over all positions: causal must be False, got True",
        ),
        ({"normalize": "l1"}, ValueError, "normalize must be one of"),
        ({"causal": "yes"}, ValueError, "causal must be one of False, True, 'strict', got 'yes'"),
        ({"layout": "tbhd"}, ValueError, "layout must be one of"),
        ({"cu_seqlens": CU}, ValueError, "cu_seqlens needs causal=True or 'strict', got causal=False"),
        ({"cu_seqlens": CU, "causal": True}, ValueError, "cu_seqlens needs q of one batch element, got 2"),
        ({"cu_seqlens": CU.long(), "causal": True}, TypeError, "cu_seqlens must have dtype int32, got int64"),
        ({"cu_seqlens": CU[:0], "causal": True}, ValueError, r"cu_seqlens must have shape \(S\+1,\), got \(0,\)"),
        ({"return_state": 1}, TypeError, "return_state must be a bool"),
        ({"eps": 0.0}, ValueError, "eps must be > 0 and finite, got 0.0"),
        ({"eps": float("nan")}, ValueError, "eps must be > 0"),
        ({"eps": 1e-50}, ValueError, "eps must be > 0 and finite in float32, got 1e-50"),
        (
            {"causal": torch.ones(5, 5) > 0},
            TypeError,
            "causal must be one of False, True, 'strict', got a torch.Tensor",
        ),
        ({"eps": "1"}, TypeError, "eps must be a number"),
        ({"key_mask": torch.zeros(2, 5)}, TypeError, "key_mask must have dtype bool, got float32"),
        ({"key_mask": torch.zeros(2, 4) > 0}, ValueError, r"key_mask must have shape \(2, 5\), got \(2, 4\)"),
        ({"key_mask": torch.zeros(2, 3, 5) > 0}, ValueError, "key_mask must have shape"),
        ({"initial_state": STATE[0]}, TypeError, "initial_state must be a pair"),
        ({"initial_state": (STATE[0], None)}, ValueError, "z of initial_state must be a tensor with normalize='sum'"),
        (
            {"initial_state": STATE, "normalize": "none"},
            ValueError,
            "z of initial_state must be None with normalize='none'",
        ),
        (
            {"initial_state": (STATE[0][:1], STATE[1])},
            ValueError,
            r"S must have shape \(2, 3, 4, 4\), got \(1, 3, 4, 4\)",
        ),
        (
            {"initial_state": (STATE[0], STATE[1][..., :3])},
            ValueError,
            r"z must have shape \(2, 3, 4\), got \(2, 3, 3\)",
        ),
        ({"initial_state": (STATE[0].bfloat16(), STATE[1])}, TypeError, "S must have dtype float32, got bfloat16"),
    ],
)
def test_errors(changes, error, message):
    arguments = on_device_of_test({"q": Q, "k": Q, "v": Q, **changes})
    tensors = [arguments.pop(name) for name in "qkv"]
    with pytest.raises(error, match=message) as caught:
        cx.linear_attention(*tensors, **arguments)
    assert str(caught.value).startswith("linear_attention: ")


@pytest.mark.parametrize(
    "qkv, options, error, message",
    [
        (Q, {}, ValueError, r"qkv must have shape \(B, 3, H, T, N\), got \(2, 3, 5, 4\)"),
        (torch.zeros(2, 2, 3, 5, 4), {}, ValueError, "qkv must have shape"),
        (torch.zeros(1, 3, 1, 2, 257), {}, ValueError, "the head size must be from 1 to 256, got 257"),
        (torch.zeros(2, 3, 3, 5, 4), {"key_mask": torch.zeros(2, 3) > 0}, ValueError, r"key_mask .* \(2, 5\)"),
        (torch.zeros(2, 3, 3, 5, 4), {"eps": 0.0}, ValueError, "eps must be > 0"),
        (torch.zeros(2, 3, 3, 5, 4, dtype=torch.int32), {}, TypeError, "qkv must have dtype .* got int32"),
    ],
)
def test_errors_packed(qkv, options, error, message):
    options = {name: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for name, v in options.items()}
    with pytest.raises(error, match=message):
        linear_attention_packed(qkv.to(DEVICE), **options)


@ON_CPU
@pytest.mark.parametrize(
    "changes, message",
    [
        ({"q": Q[0]}, "q must have 4 dimensions"),
        ({"k": Q[:1]}, r"k must have shape \(2, 3, 5, 4\)"),
        ({"v": Q[:, :, :2]}, r"v must have shape \(2, 3, 5, 4\)"),
        ({"v": Q.bfloat16()}, "v must have the dtype of x"),
        ({"q": Q.int()}, "dtype must be float32"),
        ({"v": Q[..., :0]}, "the head size of v must be from 1 to 256, got 0"),
        ({"key_mask": torch.zeros(2, 5)}, "key_mask must have dtype bool"),
        ({"key_mask": torch.zeros(5, 2) > 0}, r"key_mask must have shape \(2, 5\)"),
        ({"initial_s": STATE[1]}, "initial_s must have 4 dimensions"),
        ({"initial_s": STATE[0].transpose(0, 1).contiguous().transpose(0, 1)}, "initial_s must be contiguous"),
        ({"initial_z": STATE[1].double()}, "initial_z must have dtype float32"),
        ({"initial_z": STATE[1], "normalize": 2}, "z belongs to the normalization 'sum' only"),
        ({"feature_map": 3}, "unknown feature map code 3"),
        ({"normalize": -1}, "unknown normalization code -1"),
        ({"eps": -1.0}, "eps must be > 0 and finite, got -1"),
    ],
)
def test_errors_of_the_operator(changes, message):
    arguments = {
        **dict.fromkeys("qkv", Q),
        **dict.fromkeys(("key_mask", "initial_s", "initial_z")),
        "feature_map": 0,
        "normalize": 0,
        "eps": 1e-6,
    }
    with pytest.raises((ValueError, RuntimeError), match=message):
        torch.ops.camox_ops.linear_attention(**{**arguments, **changes})


@pytest.mark.parametrize("causal", [False, True])
def test_vmap_of_one_batch_element(causal):
    """Samples of B = 1 fold into views: a state that all samples share has stride 0, one of a later dimension gaps."""
    samples = random_image((3, 1, 2, 6, 4), seed=1)
    k, v = random_image((1, 2, 6, 4), seed=2), random_image((1, 2, 6, 5), seed=3)
    s, z = random_image((1, 2, 4, 5, 3), seed=4), random_image((1, 2, 4, 1), seed=5)[..., 0].abs()

    def loss(q, s, bounds=None):
        state = {"initial_state": (s, z), "return_state": True}
        out, (last_s, last_z) = cx.linear_attention(q, k, v, causal=causal, cu_seqlens=bounds, **state)
        return out.square().sum() + last_s.square().sum() + last_z.sum()

    for bounds in (None, torch.tensor([0, 6], dtype=torch.int32))[: 1 + causal]:
        gradient = torch.func.grad(lambda q, s, bounds=bounds: loss(q, s, bounds), (0, 1))
        for in_dims in ((0, None), (None, 4), (0, 4)):
            given = (samples if in_dims[0] == 0 else samples[0], s if in_dims[1] == 4 else s[..., 0])
            found = torch.vmap(gradient, in_dims)(*given)
            for i in range(3):
                one = (x if d is None else x.select(d, i) for x, d in zip(given, in_dims, strict=True))
                for mapped, wanted in zip(found, gradient(*one), strict=True):
                    torch.testing.assert_close(mapped[i], wanted)
