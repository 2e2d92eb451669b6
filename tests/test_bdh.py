"""bdh_attention and bdh_attention_step."""

import types

import pytest
import torch
from helpers import (
    DEVICE,
    FLOATS,
    assert_close_to_reference,
    assert_one_rounding,
    every_second,
    on_device,
    random_image,
)
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import camox_ops as cx
from camox_ops import _cuda, reference
from camox_ops.ops.bdh import BY_COST, QUADRATIC, STATE, _tf32

HALVES = (torch.bfloat16, torch.float16)
ON_CPU = pytest.mark.skipif(DEVICE.type != "cpu", reason="float64, bits, threads and memory: on the CPU")
# T around vectors, tiles of 128 tokens and their halves; N and D around vectors of 4, 8 and 16 lanes.
SIZES = ((1, 32, 7), (5, 34, 16), (64, 256, 48), (65, 64, 33), (63, 544, 9), (130, 130, 17))
LARGE_SIZES = ((1024, 64, 16), (1024, 1024, 192), (64, 8192, 512), (130, 4096, 512), (5, 8192, 64), (1024, 32, 512))
# (causal, softmax); neighbours differ in one.
FLAGS = [(False, False), (False, True), (True, True), (True, False)]
op = torch.ops.camox_ops


def real_of(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def inputs(length, n, d, dtype=torch.float32, batch=2, heads=3, value_heads=1, memory="swapped", each=False):
    """q whose scores are of the size of 1, v, cos, sin; "swapped": (B, T, H, N) in memory, as a product with all
    heads' encoders leaves it."""
    if memory == "swapped":
        q = random_image((batch, length, heads, n), torch.float64, seed=1).transpose(1, 2)
    else:
        q = random_image((batch, heads, length, n), torch.float64, memory, seed=1)
    q = (q * n**-0.25).to(dtype) if memory == "swapped" else q.to(dtype).mul_(n**-0.25)
    v = random_image((batch, value_heads, length, d), dtype, "strided" if memory == "strided" else "contiguous", seed=2)
    size, generator = (length + 2, n if each else n // 2), torch.Generator().manual_seed(3)
    angles = torch.rand(size, generator=generator, device="cpu") * 6
    cos, sin = (table.to(DEVICE, real_of(dtype)) for table in (angles.cos(), angles.sin()))
    return q, v, cos, sin


def upstream(q, v):
    return random_image((*q.shape[:3], v.shape[-1]), q.dtype, seed=4)


def doubled(tensors):
    return tuple(t.double() for t in tensors)


def run(grad, tensors, relu=True, causal=False, softmax=False, scale=None, form=BY_COST, save=True):
    """[out, grad_q, grad_v] of the operators."""
    scale = scale or (tensors[0].shape[-1] ** -0.5 if softmax else 1.0)
    flags = (relu, causal, softmax, scale)
    out, *saved = op.bdh_attention(*tensors, *flags, save, form)
    kept = out if softmax else None
    return [out, *op.bdh_attention_backward(grad, *tensors, kept, *saved, *flags, form, False)]


def expected(grad, tensors, **options):
    return [
        reference.bdh_attention(*tensors, **options),
        *reference.bdh_attention_backward(grad, *tensors, **options)[:2],
    ]


def assert_matches(ours, grad, tensors, **options):
    """float64 is compared with float64 that adds in another order: up to the size of what is added up."""
    truth = expected(*(doubled((grad,))), doubled(tensors), **options)
    same = expected(grad, tensors, **options)
    q, v = tensors[:2]
    length, n = q.shape[2:]
    score = n * q.abs().max().item() ** 2 * (options.get("scale") or 1)
    spread = length * max(v.shape[-1], 1) * grad.abs().max().item() * v.abs().max().item()
    scale64 = (1 + score) * (1 + spread)
    assert_close_to_reference(ours, same, truth, scale64=scale64)


def check(size, dtype, causal, softmax, forms=(BY_COST,), **how):
    options = {"causal": causal, "softmax": softmax, "relu": how.pop("relu", True), "scale": how.pop("scale", None)}
    tensors = inputs(*size, dtype, **how)
    grad = upstream(*tensors[:2])
    for form in forms:
        ours = run(grad, tensors, form=form, **options)
        assert_matches(ours, grad, tensors, **options)
        if dtype in HALVES and DEVICE.type == "cpu":  # tensor cores round what they multiply
            single = [t.float() for t in tensors]
            assert_one_rounding(ours[0], run(grad.float(), single, form=form, **options)[0])


def test_known_values():
    one, zero = torch.ones(3, 1), torch.zeros(3, 1)
    q = torch.tensor([[1.0, 2], [-5, 3], [4, 0]]).view(1, 1, 3, 2)
    v = torch.tensor([[1.0], [10], [100]]).view(1, 1, 3, 1)

    def rows(*arguments, **options):
        return cx.bdh_attention(q, v, *arguments, **options).flatten().tolist()

    # the scores of relu(q): [[5, 6, 4], [6, 9, 0], [4, 0, 16]]
    assert rows(one, zero) == [5 + 60 + 400, 6 + 90, 4 + 1600]
    assert rows(one, zero, causal=True) == [0, 6, 4]
    assert rows(one, zero, scale=0.5) == [232.5, 48, 802]
    assert rows(one, zero, relu=False, causal=True) == [0, 1, 4 - 200]
    assert rows(zero, one, causal=True) == [0, 6, 4]  # all rotated alike
    quarter = torch.tensor([[1.0], [0], [1]]), torch.tensor([[0.0], [1], [0]])
    assert rows(*quarter, causal=True) == [0, -3, 4 - 120]  # (0, 3) becomes (-3, 0)
    assert rows(one, zero, causal=True, softmax=True)[:2] == [0, 1]


@every_second(dtype=FLOATS, flags=FLAGS)
def test_matches_reference(dtype, flags):
    causal, softmax = flags
    for size in SIZES:
        forms = (QUADRATIC,) if softmax else (QUADRATIC, STATE)
        check(size, dtype, causal, softmax, forms)
        check(
            size, dtype, causal, softmax, heads=2, value_heads=2, memory="contiguous", each=True, relu=False, scale=0.3
        )


@pytest.mark.slow
@pytest.mark.parametrize("causal,softmax", FLAGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matches_reference_large(dtype, causal, softmax):
    for size in LARGE_SIZES:
        check(size, dtype, causal, softmax, (QUADRATIC,) if softmax else (QUADRATIC, STATE), batch=1, heads=2)


@pytest.mark.parametrize("causal,softmax", FLAGS)
def test_matches_reference_of_long_sequences(causal, softmax):
    """Past 1024 tokens, where not all scores of a head are held at once."""
    check((1090, 34, 9), torch.float32, causal, softmax, (QUADRATIC,), batch=1, heads=1)


def test_shapes_of_what_is_saved():
    """The scores where they are at most a quarter of q, the rows' sums of a softmax, nothing in the state form."""

    def saved(length, n, d, softmax=False, save=True, form=BY_COST):
        q, v, cos, sin = inputs(length, n, d)
        _, scores, logsumexp = op.bdh_attention(q, v, cos, sin, True, False, softmax, 1.0, save, form)
        return tuple(scores.shape), tuple(logsumexp.shape)

    assert saved(16, 64, 32) == ((2, 3, 16, 16), (0,))
    assert saved(17, 64, 32) == ((0,), (0,))
    assert saved(16, 64, 32, form=STATE) == saved(16, 64, 2) == ((0,), (0,))
    assert saved(16, 64, 2, softmax=True) == ((2, 3, 16, 16), (0,))
    assert saved(17, 64, 32, softmax=True) == ((0,), (2, 3, 17))
    assert saved(16, 64, 32, save=False) == ((0,), (0,))


@pytest.mark.parametrize("softmax", [False, True])
def test_unsaved_scores_are_computed_again(softmax):
    tensors = inputs(20, 128, 24)
    grad = upstream(*tensors[:2])
    saving, again = (run(grad, tensors, causal=True, save=save) for save in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(saving, again, strict=True))


def test_causal_softmax_without_keys():
    tensors = [t.requires_grad_() for t in inputs(4, 8, 3)[:2]]
    out = cx.bdh_attention(*tensors, *inputs(4, 8, 3)[2:], causal=True, softmax=True)
    assert not out[:, :, 0].any()
    grads = torch.autograd.grad(out[:, :, 0].sum(), tensors)
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in grads)


def test_noncontiguous_projections_are_not_copied():
    """x @ encoder of all heads in one product, read through strides, and its gradient in the same memory order."""
    batch, heads, length, d, n = 2, 3, 10, 8, 32
    x, encoder = torch.randn(batch * length, d), torch.randn(d, heads * n, requires_grad=True)
    latent = x @ encoder
    q = latent.view(batch, length, heads, n).transpose(1, 2)
    out = cx.bdh_attention(q, x.view(batch, 1, length, d), *cx.rope_tables(n, length))
    (grad,) = torch.autograd.grad(out.square().sum(), latent)
    assert out.transpose(1, 2).is_contiguous()
    assert grad.is_contiguous()


@given(
    st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40)),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
    st.sampled_from(["contiguous", "strided", "swapped"]),
    st.sampled_from(FLOATS),
    st.booleans(),
)
def test_shapes(size, flags, memory, dtype, each):
    length, pairs, d = size
    relu, causal, softmax = flags
    check((length, 2 * pairs, d), dtype, causal, softmax, relu=relu, memory=memory, each=each, heads=2)


@ON_CPU
def test_grad_check():
    for causal, softmax in FLAGS:
        tensors = [t.requires_grad_() for t in inputs(3, 6, 2, torch.float64, batch=1, heads=2)]
        assert gradcheck(
            lambda *t, c=causal, s=softmax: cx.bdh_attention(*t, causal=c, softmax=s, relu=False), tensors, atol=1e-4
        )


@pytest.mark.parametrize("dtype", FLOATS)
def test_grad_of_tables(dtype):
    for each in (False, True):
        tensors = inputs(9, 16, 5, dtype, each=each)
        grad = upstream(*tensors[:2])
        ours = torch.autograd.grad(cx.bdh_attention(*(t.requires_grad_() for t in tensors)), tensors, grad)
        detached = [t.detach() for t in tensors]
        same = reference.bdh_attention_backward(grad, *detached)
        truth = reference.bdh_attention_backward(*doubled((grad, *detached)))
        assert_close_to_reference(ours, same, truth, scale64=1e4)


@ON_CPU
@pytest.mark.parametrize("dtype", HALVES)
def test_grad_of_float32_tables_is_not_rounded_to_halves(dtype):
    """Without softmax, whose backward reads an output of the half type."""
    for each in (False, True):
        q, v, cos, sin = inputs(16, 64, 17, dtype, each=each)
        grad = upstream(q, v)
        results = []
        for cast in (dtype, torch.float32, torch.float64):
            real = real_of(cast)
            tensors = [t.to(to).requires_grad_() for t, to in ((q, cast), (v, cast), (cos, real), (sin, real))]
            out = cx.bdh_attention(*tensors)
            results.append(torch.autograd.grad(out, tensors, grad.to(cast)))
        ours, float32, truth = results
        assert [x.dtype for x in ours] == [dtype, dtype, torch.float32, torch.float32]
        for mine, theirs, right in zip(ours[2:], float32[2:], truth[2:], strict=True):
            size = right.abs().max()
            assert (mine - right).abs().max() <= 2 * (theirs - right).abs().max() + 1e-6 * size
        assert_one_rounding(ours[:2], float32[:2])


@ON_CPU
@pytest.mark.parametrize("dtype", FLOATS)
def test_large_gradients_have_the_same_bits(dtype):
    """From 8 MiB on grad_q goes past the caches; two halves of the batch are below that."""
    n = (10 << 20) // (64 * 2 * dtype.itemsize)
    tensors = inputs(32, n, 8, dtype, heads=2, memory="contiguous")
    grad = upstream(*tensors[:2])
    whole = run(grad, tensors)
    for i in range(2):
        part = run(grad[i : i + 1], (tensors[0][i : i + 1], tensors[1][i : i + 1], *tensors[2:]))
        assert all(torch.equal(a[i : i + 1], b) for a, b in zip(whole, part, strict=True))


def allocated(function) -> tuple[list[int], int]:
    """Sizes of PyTorch's allocations, in bytes, and the most that was held beyond what is returned."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        result = function()
    del result
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    held, most = 0, 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return [e.nbytes() for e in events], most - held


@ON_CPU
@pytest.mark.parametrize("length,batch", [(64, 4), (256, 2)])
def test_memory_has_no_second_tensor_of_the_size_of_q(length, batch):
    """Nothing of (B, H, T, N) but grad_q, and temporaries of at most a fifth of what plain PyTorch holds."""
    q, v, cos, sin = inputs(length, 1024, 96, batch=batch, heads=6)
    q.requires_grad_(), v.requires_grad_()
    grad = upstream(q.detach(), v)
    most = {}
    for name, attention in (("ours", cx.bdh_attention), ("plain", reference.bdh_attention)):

        def step(attention=attention):
            return torch.autograd.grad(attention(q, v, cos, sin), (q, v), grad)

        step()
        sizes, most[name] = allocated(step)
        large = sum(size >= q.numel() * q.itemsize for size in sizes)
        assert large == 1 if name == "ours" else large > 3
    assert most["ours"] <= most["plain"] / 5
    with torch.no_grad():
        sizes, _ = allocated(lambda: cx.bdh_attention(q, v, cos, sin))
    assert max(sizes) < q.numel() * q.itemsize


@pytest.mark.parametrize("dtype", FLOATS)
def test_step_equals_causal_attention(dtype):
    for each, relu, scale in ((False, True, None), (True, False, 0.25)):
        q, v, cos, sin = inputs(9, 34, 21, dtype, each=each)
        truth = reference.bdh_attention(*doubled((q, v, cos, sin)), relu=relu, causal=True, scale=scale)
        state, rows, plain_state, plain_rows = None, [], None, []
        for t in range(9):
            token = (q[:, :, t], v[:, :, t], cos[t], sin[t])
            row, state = cx.bdh_attention_step(*token, state, relu=relu, scale=scale)
            plain, plain_state = reference.bdh_attention_step(*token, plain_state, relu=relu, scale=scale)
            rows.append(row), plain_rows.append(plain)
        assert state.dtype == real_of(dtype)
        assert_close_to_reference(torch.stack(rows, 2), torch.stack(plain_rows, 2), truth, scale64=1e3)
        whole = cx.bdh_attention(q, v, cos, sin, relu=relu, causal=True, scale=scale)
        assert_close_to_reference(whole, torch.stack(plain_rows, 2), truth, scale64=1e3)


@on_device
def test_step_leaves_its_state_alone():
    q, v, cos, sin = (t[0] if t.dim() == 2 else t[:, :, 0] for t in inputs(1, 8, 3))
    state = torch.randn(2, 3, 8, 3)
    before = state.clone()
    out, after = cx.bdh_attention_step(q, v, cos, sin, state)
    assert torch.equal(state, before)
    swapped = state.transpose(2, 3).contiguous().transpose(2, 3)
    torch.testing.assert_close(cx.bdh_attention_step(q, v, cos, sin, swapped), (out, after), rtol=0, atol=0)
    wide = torch.randn(2, 1, 700)  # values come in blocks
    out, after = cx.bdh_attention_step(q, wide, cos, sin, torch.ones(2, 3, 8, 700))
    torch.testing.assert_close((out, after), reference.bdh_attention_step(q, wide, cos, sin, torch.ones(2, 3, 8, 700)))
    leaf = q.clone().requires_grad_()
    (grad,) = torch.autograd.grad(cx.bdh_attention_step(leaf, v, cos, sin, state)[0].sum(), leaf)
    assert grad.abs().sum() > 0


class LastArgument(TorchDispatchMode):
    """The last argument of each call of bdh_attention's operator."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        if function is op.bdh_attention.default:
            self.found.append(arguments[-1])
        return function(*arguments, **(named or {}))


def test_tf32_is_asked_of_torch_at_the_call(monkeypatch):
    """On CUDA, of float32, an argument of the operator; no GPU is needed to see it."""
    monkeypatch.setattr(_cuda, "unusable", lambda index: "")
    was = torch.get_float32_matmul_precision()
    try:
        with FakeTensorMode(), LastArgument() as last:
            for precision in ("highest", "high"):
                torch.set_float32_matmul_precision(precision)
                for device, dtype in (("cuda", torch.float32), ("cuda", torch.bfloat16), ("cpu", torch.float32)):
                    q, v = (torch.empty(1, h, 4, 8, device=device, dtype=dtype) for h in (2, 1))
                    cx.bdh_attention(q, v, *torch.empty(2, 4, 4, device=device))
        assert last.found == [False, False, False, True, False, False]
        of_cuda = types.SimpleNamespace(is_cuda=True, dtype=torch.float32)
        compiled = torch.compile(lambda x: x + int(_tf32(of_cuda)), backend="eager", fullgraph=True)
        assert compiled(torch.zeros(1)) == 1
        torch.set_float32_matmul_precision("highest")
        assert compiled(torch.zeros(1)) == 0
    finally:
        torch.set_float32_matmul_precision(was)


def test_tables_of_q_dtype_are_read_as_they_are():
    q, v, cos, sin = inputs(3, 8, 2, torch.bfloat16)
    cos, sin = cos.bfloat16(), sin.bfloat16()
    assert torch.equal(cx.bdh_attention(q, v, cos, sin), cx.bdh_attention(q, v, cos.float(), sin.float()))


def test_nan_passes_relu():
    q, v, cos, sin = inputs(3, 8, 2)
    q[0, 0, 1, 2] = torch.nan
    assert cx.bdh_attention(q, v, cos, sin)[0, 0].isnan().all()
    assert not cx.bdh_attention(q, v, cos, sin)[1].isnan().any()


def refused(kind, match, function, *arguments, **options):
    with pytest.raises(kind, match=match):
        function(*arguments, **options)


def test_errors():
    q, v, cos, sin = inputs(4, 8, 3)
    attention = cx.bdh_attention
    for name in ("relu", "causal", "softmax"):
        refused(TypeError, f"{name} must be a bool, got 1", attention, q, v, cos, sin, **{name: 1})
    mask = torch.ones(4, 4, dtype=torch.bool)
    refused(TypeError, "causal must be a bool", attention, q, v, cos, sin, causal=mask)
    refused(TypeError, "q must be a torch.Tensor, got int", attention, 3, v, cos, sin)
    refused(TypeError, "q must have dtype", attention, q.int(), v, cos, sin)
    refused(TypeError, "v must have the dtype of q, float32, got float16", attention, q, v.half(), cos, sin)
    refused(TypeError, "cos must have dtype float32", attention, q, v, cos.half(), sin)
    refused(TypeError, "same dtype", attention, q.bfloat16(), v.bfloat16(), cos, sin.bfloat16())
    refused(TypeError, "scale must be None or a number, got '1'", attention, q, v, cos, sin, scale="1")
    refused(ValueError, "scale must be > 0 and finite, got 0", attention, q, v, cos, sin, scale=0)
    refused(ValueError, r"q must have 4 dimensions \(B, H, T, N\)", attention, q[0], v, cos, sin)
    refused(ValueError, "v must have 4 dimensions", attention, q, v[0], cos, sin)
    refused(ValueError, "q must be even and > 0, got 7", attention, q[..., :7], v, cos, sin)
    refused(ValueError, "q must be even and > 0, got 0", attention, q[..., :0], v, cos, sin)
    refused(ValueError, r"v must have shape .* got \(2, 2, 4, 3\)", attention, q, v.expand(2, 2, 4, 3), cos, sin)
    refused(ValueError, "with B = 2 and H = 3", attention, q, v[:1], cos, sin)
    refused(ValueError, "v must have the 4 positions of q", attention, q, v[:, :, :3], cos, sin)
    refused(ValueError, "a row for each of the 4 positions", attention, q, v, cos[:3], sin[:3])
    refused(ValueError, "a row for each of the 4 positions", attention, q, v, cos[0], sin[0])
    refused(ValueError, "cos must have 4 or 8 columns", attention, q, v, cos[:, :3], sin[:, :3])
    refused(ValueError, "same shape", attention, q, v, cos, sin[:5])
    refused(ValueError, "v must be on the device of q", attention, q.to("meta"), v, cos, sin)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, q)
        refused(NotImplementedError, "forward-mode AD", attention, dual, v, cos, sin)


def test_errors_of_step():
    q, v, cos, sin = (t[0] if t.dim() == 2 else t[:, :, 0] for t in inputs(1, 8, 3))
    step = cx.bdh_attention_step
    refused(
        ValueError,
        r"state must have shape \(2, 3, 8, 3\), got \(2, 3, 8, 4\)",
        step,
        q,
        v,
        cos,
        sin,
        torch.ones(2, 3, 8, 4),
    )
    refused(TypeError, "state must have dtype float32", step, q, v, cos, sin, torch.ones(2, 3, 8, 3).double())
    refused(ValueError, "one row of a table", step, q, v, cos[None], sin[None], None)
    refused(ValueError, r"q must have 3 dimensions \(B, H, N\)", step, q[0], v, cos, sin, None)
    refused(ValueError, "even and > 0", step, q[..., :5], v, cos, sin, None)


@pytest.mark.parametrize("name", ["cos", "v"])
def test_errors_of_the_operator(name):
    """The C check, behind Python's."""
    q, v, cos, sin = inputs(4, 8, 3)
    arguments = {"q": q, "v": v, "cos": cos, "sin": sin}
    arguments[name] = arguments[name][:3] if name == "cos" else v.expand(2, 2, 4, 3)
    with pytest.raises((ValueError, RuntimeError), match="bdh_attention"):
        op.bdh_attention(**arguments, relu=True, causal=False, softmax=False, scale=1.0, save=False, form=0)
    with pytest.raises((ValueError, RuntimeError), match="form must be"):
        op.bdh_attention(q, v, cos, sin, True, False, True, 1.0, False, STATE)
