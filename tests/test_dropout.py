"""dropout, sparse_gate and dropout_add_layer_norm: the generator, its statistics, the ops."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from dropout_inputs import LAYOUTS, affine, normal
from helpers import (
    DEVICE,
    FLOATS,
    REFUSAL,
    assert_close_to_reference,
    assert_one_rounding,
    assert_reads_half_weights,
    each_backend,
)
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

import camox_ops as cx
from camox_ops import reference
from camox_ops.reference.dropout import dropout_scale, dropout_threshold

HALVES = (torch.bfloat16, torch.float16)
# Around 8 elements of a call, 16 to 64 of a block, 256 of a tile of a strided row, 16384 of a work item; any
# dimensions.
SHAPES = [(), (1,), (7,), (65,), (16384 + 65,), (3, 5), (2, 3, 257), (5, 300, 2), (2, 3, 13, 35), (2, 5, 16, 20)]
# Around a vector, a chunk of 4096 and its 64 rows; rows that start anywhere in a block of masks.
NORM_SHAPES = [
    (1,),
    (5, 1),
    (3, 7),
    (70, 16),
    (2, 3, 17),
    (259, 33),
    (2, 40, 96),
    (3, 1000),
    (2, 4096),
    (3, 4099),
    (2, 9001),
]
VECTORS = [
    (7, (0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    (7, (2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (
        7,
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
    ),
    (10, (0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (10, (2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        10,
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
op = torch.ops.camox_ops


def seed_of(value: int = 0x0123456789ABCDEF) -> torch.Tensor:
    return torch.tensor(value, device=DEVICE)


def doubles(tensors):
    return [tensor.double() for tensor in tensors]


# ---- the generator ----


@pytest.mark.parametrize(("rounds", "counter", "key", "words"), VECTORS)
def test_known_values_of_philox(rounds, counter, key, words):
    """Random123's known-answer vectors; tests/c/test_dropout.c holds the C functions to the same."""
    assert tuple(reference.philox4x32(counter, key, rounds)) == words
    tensors = reference.philox4x32(map(torch.tensor, counter), map(torch.tensor, key), rounds)
    assert tuple(word.item() for word in tensors) == words


def test_known_values():
    # The words of the first vector, low half first, against 0.25 * 65536.
    bits = [0xB709, 0x5F6F, 0x3F64, 0x0D89, 0x1F81, 0x4F12, 0x0A48, 0x4F73]
    kept = torch.tensor([b >= 0x4000 for b in bits], device=DEVICE)
    x = torch.arange(1.0, 9.0, device=DEVICE)
    torch.testing.assert_close(op.dropout(x, seed_of(0), 0.25), x * kept * (4 / 3))
    gate = cx.sparse_gate(torch.tensor([-1.0, 2, 3], device=DEVICE), torch.tensor([5.0, -1, 7], device=DEVICE))
    torch.testing.assert_close(gate, torch.tensor([0.0, 0, 21], device=DEVICE))
    one, zero = torch.ones(4, device=DEVICE), torch.zeros(4, device=DEVICE)
    y = cx.dropout_add_layer_norm(x[:4], x[:4], one, zero, eps=1e-12)
    torch.testing.assert_close(y, torch.tensor([-3.0, -1, 1, 3], device=DEVICE) / 5**0.5)


@pytest.mark.parametrize("p", [1e-9, 1e-3, 0.1, 0.5, 0.999, 1 - 1e-9])
def test_p_is_rounded(p):
    threshold = dropout_threshold(p)
    assert abs(threshold / 65536 - p) <= 0.5 / 65536 or threshold == 65535
    widest = torch.float64 if DEVICE.type == "cpu" else torch.float32
    x = torch.ones(100_000, dtype=widest, device=DEVICE)
    y = op.dropout(x, seed_of(), p)
    mask = reference.dropout_mask(x.shape, seed_of(), p)
    assert torch.equal(y, mask * torch.tensor(65536.0, dtype=x.dtype, device=DEVICE) / (65536 - threshold))


# ---- statistics: fixed seeds, bounds of 4.5 standard deviations or of one in ten thousand ----


def kept(seed, shape=(1 << 18,), p=0.5):
    return (op.dropout(torch.ones(shape, device=DEVICE), seed_of(seed), p) != 0).cpu()


def correlation(a, b) -> float:
    """In standard deviations of what independent masks have."""
    a, b = (m.double() - m.double().mean() for m in (a, b))
    return ((a * b).mean() / (a.std() * b.std())).item() * a.numel() ** 0.5


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.9])
def test_statistics_of_mean_and_variance(p):
    n, q = 1 << 22, 1 - dropout_threshold(p) / 65536
    for seed in (0, 1, 2**62):
        y = op.dropout(torch.ones(n, device=DEVICE), seed_of(seed), p).double()
        deviation = ((1 - q) / q / n) ** 0.5
        assert abs(y.mean().item() - 1) < 4.5 * deviation
        share = (y != 0).double().mean().item()
        assert abs(share - q) < 4.5 * (q * (1 - q) / n) ** 0.5
        torch.testing.assert_close(y.max().item(), 1 / q, rtol=1e-6, atol=0)


def test_statistics_of_bits():
    """16 equal bins of the bits of elements, and the 256 patterns of a call's eight: chi-square."""
    n = 1 << 20
    above = torch.stack([kept(11, (n,), p=k / 16) if k else torch.ones(n, dtype=torch.bool) for k in range(16)])
    counts = above.sum(0).bincount(minlength=17)[1:].double()
    assert ((counts - n / 16) ** 2 / (n / 16)).sum() < 44.3  # 15 degrees of freedom
    patterns = (kept(12, (n, 8)).long() << torch.arange(8)).sum(1).bincount(minlength=256).double()
    assert ((patterns - n / 256) ** 2 / (n / 256)).sum() < 347  # 255 degrees of freedom


def test_statistics_of_elements():
    mask = kept(3)
    for lag in (*range(1, 17), 31, 32, 63, 64, 256, 1024, 4096, 16384):
        assert abs(correlation(mask[lag:], mask[:-lag])) < 4.5


def test_statistics_of_calls():
    """Neighbouring seeds, seeds one bit apart, and shifted against each other: as independent as any."""
    masks = {seed: kept(seed) for seed in (*range(6), *(1 << bit for bit in range(3, 63, 4)))}
    for a, b in itertools.combinations(masks.values(), 2):
        assert abs(correlation(a, b)) < 4.5
    for lag in (1, 8, 64):
        assert abs(correlation(masks[0][lag:], masks[1][:-lag])) < 4.5


def test_statistics_of_layers_and_ranks():
    """Calls that follow each other draw other masks, and so do processes with seeds of their own."""
    x, masks = torch.ones(1 << 16, device=DEVICE), []
    for rank in range(3):
        torch.manual_seed(1234 + rank)
        masks += [(cx.dropout(x, 0.5) != 0).cpu() for _ in range(4)]
    for a, b in itertools.combinations(masks, 2):
        assert not torch.equal(a, b)
        assert abs(correlation(a, b)) < 4.5


# ---- values ----


def test_nothing_to_drop_costs_nothing():
    x = torch.rand(4, device=DEVICE)
    state = torch.get_rng_state()
    assert cx.dropout(x, 0.0) is x
    assert cx.dropout(x, 0.5, training=False) is x
    weight, bias = affine(4)
    assert torch.equal(cx.sparse_gate(x, x), F.relu(x) * F.relu(x))
    assert torch.equal(cx.sparse_gate(x, x, p=0.5), cx.sparse_gate(x, x, p=0.0, training=True))
    plain = cx.dropout_add_layer_norm(x, x, weight, bias)
    assert torch.equal(cx.dropout_add_layer_norm(x, x, weight, bias, p=0.5), plain)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_matches_reference(dtype, layout, p):
    for shape in SHAPES:
        x, y = normal(shape, dtype, layout), normal(shape, dtype, seed=1)
        ours, seed = op.dropout(x, seed_of(), p), seed_of()
        assert_close_to_reference(ours, reference.dropout(x, seed, p), reference.dropout(x.double(), seed, p))
        gate, truth = op.sparse_gate(x, y, seed, p), reference.sparse_gate(x.double(), y.double(), seed, p)
        assert_close_to_reference(gate, reference.sparse_gate(x, y, seed, p), truth)
        if dtype in HALVES:
            assert_one_rounding(ours, op.dropout(x.float(), seed, p))
            assert_one_rounding(gate, op.sparse_gate(x.float(), y.float(), seed, p))


@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_grad_matches_reference(dtype, layout, p):
    seed = seed_of() if p else None
    for shape in SHAPES:
        inputs = [normal(shape, dtype, layout, seed=1), normal(shape, dtype, layout), normal(shape, dtype, seed=2)]
        ours = op.sparse_gate_backward(*inputs, seed, p)
        same = reference.sparse_gate_backward(*inputs, seed, p)
        assert_close_to_reference(ours, same, reference.sparse_gate_backward(*doubles(inputs), seed, p))
        if dtype in HALVES:
            assert_one_rounding(ours, op.sparse_gate_backward(*(t.float() for t in inputs), seed, p))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_outputs_have_the_same_bits(dtype):
    """On the CPU outputs go past the caches from 32 MiB on, gradients from 8; the first rows alone are below that."""
    x = normal(((33 << 20) // dtype.itemsize // 1000, 1000), dtype)
    y, grad, first = x.flip(0), x.flip(1), slice(x.shape[0] // 5)
    for seed in (None, seed_of()):
        if seed is not None:
            assert torch.equal(op.dropout(x, seed, 0.3)[first], op.dropout(x[first], seed, 0.3))
        assert torch.equal(op.sparse_gate(x, y, seed, 0.3)[first], op.sparse_gate(x[first], y[first], seed, 0.3))
        whole = op.sparse_gate_backward(grad, x, y, seed, 0.3)
        part = op.sparse_gate_backward(grad[first], x[first], y[first], seed, 0.3)
        assert all(torch.equal(all_rows[first], some) for all_rows, some in zip(whole, part, strict=True))


@pytest.mark.parametrize("kind", ["normal", "offset"])
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("dtype", FLOATS)
def test_matches_reference_norm(dtype, p, kind):
    seed = seed_of() if p else None
    for shape, layout in zip(NORM_SHAPES, itertools.cycle(LAYOUTS), strict=False):
        inputs = [normal(shape, dtype, layout), normal(shape, dtype, kind=kind, seed=1), *affine(shape[-1], dtype)]
        ours = op.dropout_add_layer_norm(*inputs, seed, p, 1e-5)[0]
        same = reference.dropout_add_layer_norm(*inputs, seed, p)
        truth = reference.dropout_add_layer_norm(*doubles(inputs), seed, p)
        assert_close_to_reference(ours, same, truth, scale64=1e4 if kind == "offset" else 10.0)
        if dtype in HALVES:
            floats = op.dropout_add_layer_norm(*(t.float() for t in inputs), seed, p, 1e-5)[0]
            assert_one_rounding(ours, floats)


@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("dtype", FLOATS)
def test_grad_matches_reference_norm(dtype, p):
    seed = seed_of() if p else None
    for shape, layout in zip(NORM_SHAPES, itertools.cycle(LAYOUTS), strict=False):
        leaves = [normal(shape, dtype, layout), normal(shape, dtype, seed=1), *affine(shape[-1], dtype)]
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        grad = normal(shape, dtype, layout, seed=2)
        ours = torch.autograd.grad(op.dropout_add_layer_norm(*leaves, seed, p, 1e-5)[0], leaves, grad)
        plain = [leaf.detach() for leaf in leaves[:3]]
        same = reference.dropout_add_layer_norm_backward(grad, *plain, seed, p)
        truth = reference.dropout_add_layer_norm_backward(*doubles([grad, *plain]), seed, p)
        # A row of one element has no gradient but what rounding leaves of terms of the size of 1 / sqrt(eps).
        assert_close_to_reference(ours, same, truth, scale64=300.0, terms=300.0)


@pytest.mark.parametrize("dtype", HALVES)
def test_half_weights_of_norm_are_read_as_they_are(dtype):
    for width, seed in ((17, None), (64, seed_of()), (520, None), (4100, seed_of())):
        inputs, grad = [normal((5, width), dtype, seed=seed) for seed in (0, 1)], normal((5, width), dtype, seed=2)
        weights = [weight.to(dtype) for weight in affine(width)]

        def norm(*tensors, seed=seed):
            return op.dropout_add_layer_norm(*tensors, seed, 0.1, 1e-5)[0]

        assert_reads_half_weights(norm, inputs, weights, grad)
    assert_reads_half_weights(cx.dropout_add_layer_norm, inputs, weights, grad)


def test_norm_weight_and_bias_of_two_dtypes():
    """The half-precision one is converted, and so is its gradient."""
    x, weight, bias = normal((5, 24), torch.bfloat16), *affine(24)
    leaves = [x, weight.bfloat16().requires_grad_(), bias.requires_grad_()]
    y = cx.dropout_add_layer_norm(x, *leaves)
    assert torch.equal(y, cx.dropout_add_layer_norm(x, x, leaves[1].float(), bias))
    assert [grad.dtype for grad in torch.autograd.grad(y.sum(), leaves[1:])] == [torch.bfloat16, torch.float32]
    with pytest.raises(REFUSAL, match="bias must have the dtype of weight"):
        op.dropout_add_layer_norm(x, *leaves, None, 0.0, 1e-5)


def test_grad_norm_keeps_digits_under_a_large_mean():
    x, residual = normal((300, 96)), normal((300, 96), kind="offset", seed=1)
    leaves = [t.requires_grad_() for t in (x, residual, *affine(96))]
    grad = normal((300, 96), seed=2)
    ours = torch.autograd.grad(op.dropout_add_layer_norm(*leaves, seed_of(), 0.1, 1e-5)[0], leaves, grad)
    s = (residual + op.dropout(x, seed_of(), 0.1)).detach().double()  # what float32 has of the sum
    plain = [torch.zeros_like(s), s, leaves[2].detach().double()]
    truth = reference.dropout_add_layer_norm_backward(grad.double(), *plain)
    for mine, true in zip(ours[1:], truth[1:], strict=True):
        error, size = (mine.double() - true).abs().max().item(), true.abs().max().item()
        assert error <= 4e-6 * size, f"error {error:.3e} of {size:.3e}"


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_grad(p):
    seed, weight, bias = seed_of() if p else None, *affine(5, torch.float64)
    if DEVICE.type != "cpu":
        pytest.skip("float64 runs on the CPU only")
    for layout in ("contiguous", "permuted"):
        x = normal((3, 4, 5), torch.float64, layout).requires_grad_()
        y = normal((3, 4, 5), torch.float64, seed=1).requires_grad_()
        gate = (lambda x, y: op.sparse_gate(x, y, seed, p), (x, y))
        assert gradcheck(*gate)
        assert gradgradcheck(*gate, fast_mode=True)
        inputs = (x, y, weight.requires_grad_(), bias.requires_grad_())
        assert gradcheck(lambda *tensors: op.dropout_add_layer_norm(*tensors, seed, p, 1e-5)[0], inputs)
        if p:
            plain = (lambda x: op.dropout(x, seed, p), (x,))
            assert gradcheck(*plain)
            assert gradgradcheck(*plain, fast_mode=True)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_dropped_elements_depend_on_nothing(value):
    mask = reference.dropout_mask((1000,), seed_of(), 0.5)
    x = torch.full((1000,), value, device=DEVICE)
    y = op.dropout(x, seed_of(), 0.5)
    assert torch.equal(y == 0, ~mask)
    assert torch.equal(y[mask].isfinite(), torch.zeros_like(y[mask], dtype=torch.bool))
    grads = op.sparse_gate_backward(torch.ones_like(x), x, x.abs(), seed_of(), 0.5)
    for grad in (op.sparse_gate(x, torch.ones_like(x), seed_of(), 0.5), *grads):
        assert torch.equal(grad[~mask], torch.zeros_like(grad[~mask]))


def test_nan_opens_the_gate_as_in_torch():
    x, y = torch.tensor([float("nan"), 1.0, -1.0, 0.0]), torch.tensor([2.0, float("nan"), 3.0, 4.0])
    x, y = x.to(DEVICE).requires_grad_(), y.to(DEVICE).requires_grad_()
    ours, theirs = cx.sparse_gate(x, y), F.relu(x) * F.relu(y)
    torch.testing.assert_close(ours, theirs, equal_nan=True)
    one = torch.ones_like(x)
    for mine, other in zip(
        torch.autograd.grad(ours, (x, y), one), torch.autograd.grad(theirs, (x, y), one), strict=True
    ):
        torch.testing.assert_close(mine, other, equal_nan=True)


# ---- one seed, one mask ----


@pytest.mark.parametrize("dtype", FLOATS)
def test_noncontiguous_rows_side_by_side(dtype):
    """Long rows that lie apart in their own way in every tensor, as projections of all heads leave them."""
    for length in (256, 300, 1024):
        x = normal((2, 5, 3, length), dtype).transpose(1, 2)
        y, grad = normal((3, 2, 5, length), dtype, seed=1).transpose(0, 1), normal((2, 3, 5, length), dtype, seed=2)
        out = op.sparse_gate(x, y, seed_of(), 0.3)
        assert out.stride() == x.stride()
        assert torch.equal(out, op.sparse_gate(x.contiguous(), y.contiguous(), seed_of(), 0.3))
        grads = op.sparse_gate_backward(grad, x, y, seed_of(), 0.3)
        packed = op.sparse_gate_backward(grad, x.contiguous(), y.contiguous(), seed_of(), 0.3)
        assert all(torch.equal(a, b) for a, b in zip(grads, packed, strict=True))


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
def test_mask_of_the_gpu_is_that_of_the_cpu():
    for shape in ((100_003,), (3, 5, 333)):
        for layout in LAYOUTS:
            x = normal(shape, layout=layout)
            assert torch.equal(op.dropout(x, seed_of(), 0.3).cpu(), op.dropout(x.cpu(), seed_of().cpu(), 0.3))


def test_seed_is_drawn_from_the_generator():
    x = torch.ones(1000, device=DEVICE)
    torch.manual_seed(7)
    first, second = cx.dropout(x, 0.5), cx.dropout(x, 0.5)
    torch.manual_seed(7)
    assert torch.equal(cx.dropout(x, 0.5), first)
    assert not torch.equal(first, second)
    own = torch.Generator(DEVICE).manual_seed(7)
    assert torch.equal(cx.dropout(x, 0.5, generator=own), first)
    assert torch.equal(cx.dropout(x, 0.5), second)


# ---- shapes ----


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.sampled_from(LAYOUTS),
    st.sampled_from(FLOATS),
    st.floats(0, 0.99),
)
def test_shapes(shape, layout, dtype, p):
    x, y, seed = normal(shape, dtype, layout), normal(shape, dtype, seed=1), seed_of(7)
    ours = [op.dropout(x, seed, p), op.sparse_gate(x, y, seed, p)]
    same = [reference.dropout(x, seed, p), reference.sparse_gate(x, y, seed, p)]
    truth = [reference.dropout(x.double(), seed, p), reference.sparse_gate(x.double(), y.double(), seed, p)]
    assert_close_to_reference(ours, same, truth)
    inputs = [x, y, *affine(shape[-1], dtype)]
    norm = op.dropout_add_layer_norm(*inputs, seed, p, 1e-3)[0]
    same_norm = reference.dropout_add_layer_norm(*inputs, seed, p, 1e-3)
    truth_norm = reference.dropout_add_layer_norm(*doubles(inputs), seed, p, 1e-3)
    assert_close_to_reference(norm, same_norm, truth_norm, scale64=100.0)


# ---- PyTorch around it ----


def test_compile_makes_one_dynamic_graph():
    weight, bias = affine(16)
    functions = {
        "dropout": lambda x: cx.dropout(x, 0.2),
        "sparse_gate": lambda x: cx.sparse_gate(x, x, p=0.2, training=True),
        "dropout_add_layer_norm": lambda x: cx.dropout_add_layer_norm(x, x, weight, bias, p=0.2, training=True),
    }
    for name, function in functions.items():
        graphs = []

        def backend(graph, _, graphs=graphs):
            graphs.append(graph)
            return graph.forward

        compiled = torch.compile(function, dynamic=True, fullgraph=True, backend=backend)
        for rows in range(2, 9):
            assert compiled(normal((rows, 3, 16))).shape == (rows, 3, 16)
        assert len(graphs) == 1, name
        torch._dynamo.reset()


@each_backend
def test_compile_draws_its_own_seeds(backend):
    compiled = torch.compile(lambda x: cx.dropout(x, 0.5), fullgraph=True, backend=backend)
    x = torch.ones(4000, device=DEVICE, requires_grad=True)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        y = compiled(x)
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], y.detach())  # the same mask in the backward
        results.append(y)
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
def test_cuda_graph_draws_a_new_seed_each_time():
    x = torch.ones(4096, device=DEVICE)
    cx.dropout(x, 0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = cx.dropout(x, 0.5)
    graph.replay()
    first = y.clone()
    graph.replay()
    assert 0.4 < (first == 0).float().mean() < 0.6
    assert not torch.equal(y, first)


def test_vmap_follows_its_randomness():
    xs = torch.ones(6, 400, device=DEVICE)
    different = torch.vmap(lambda x: cx.dropout(x, 0.5), randomness="different")(xs)
    assert len({tuple(row.tolist()) for row in different}) == 6
    same = torch.vmap(lambda x: cx.dropout(x, 0.5), randomness="same")(xs)
    assert torch.equal(same, same[:1].expand_as(same))
    assert 0.3 < (same == 0).float().mean() < 0.7
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(lambda x: cx.dropout(x, 0.5))(xs)
    assert torch.equal(torch.vmap(lambda x: cx.sparse_gate(x, x))(xs), xs)
    grads = torch.vmap(torch.func.grad(lambda x: cx.dropout(x, 0.5).sum()), randomness="different")(xs)
    assert set(grads.unique().tolist()) == {0.0, 2.0}


# ---- errors ----


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([1.0], 0.5), TypeError, "x must be a torch.Tensor, got list"),
        ((torch.zeros(3, dtype=torch.int64), 0.5), TypeError, "x must have dtype .*, got int64"),
        ((torch.zeros(3).to_sparse(), 0.5), TypeError, "x must be a dense tensor"),
        ((torch.zeros([1] * 17), 0.5), ValueError, "x must have at most 16 dimensions, got 17"),
        ((torch.zeros(3), 1.0), ValueError, r"p must be in \[0, 1\), got 1.0"),
        ((torch.zeros(3), -0.1), ValueError, r"p must be in \[0, 1\), got -0.1"),
        ((torch.zeros(3), float("nan")), ValueError, r"p must be in \[0, 1\), got nan"),
        ((torch.zeros(3), "0.5"), TypeError, "p must be a number, got '0.5'"),
        ((torch.zeros(3), True), TypeError, "p must be a number, got True"),
    ],
)
def test_errors(arguments, error, message):
    with pytest.raises(error, match="dropout: " + message):
        cx.dropout(*arguments)


def test_errors_of_keywords():
    x = torch.zeros(3)
    with pytest.raises(TypeError, match="dropout: training must be a bool, got 1"):
        cx.dropout(x, 0.5, training=1)
    with pytest.raises(TypeError, match=r"dropout: generator must be a torch\.Generator, got int"):
        cx.dropout(x, 0.5, generator=3)
    with pytest.raises(ValueError, match="dropout: generator must be of the device of x, meta, got cpu"):
        cx.dropout(x.to("meta"), 0.5, generator=torch.Generator())


def test_errors_of_sparse_gate():
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"sparse_gate: y must have the shape of x, \(2, 3\), got \(3, 2\)"):
        cx.sparse_gate(x, x.t())
    with pytest.raises(TypeError, match="sparse_gate: y must have dtype float32, got bfloat16"):
        cx.sparse_gate(x, x.bfloat16())
    with pytest.raises(ValueError, match="sparse_gate: y must be on the device of x, cpu, got meta"):
        cx.sparse_gate(x, x.to("meta"))
    with pytest.raises(ValueError, match=r"sparse_gate: p must be in \[0, 1\), got 2"):
        cx.sparse_gate(x, x, p=2)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.zeros(())}, ValueError, r"x must have at least 1 dimension, got shape \(\)"),
        ({"residual": torch.zeros(3, 4)}, ValueError, r"residual must have the shape of x, \(2, 4\), got \(3, 4\)"),
        ({"residual": torch.zeros(2, 4).half()}, TypeError, "residual must have dtype float32, got float16"),
        (
            {"weight": torch.zeros(3)},
            ValueError,
            r"weight must have shape \(4,\), one element per column of x, got \(3,\)",
        ),
        ({"bias": torch.zeros(4).double()}, TypeError, "bias must have dtype float32, got float64"),
        ({"bias": torch.zeros(4, device="meta")}, ValueError, "bias must be on the device of x, cpu, got meta"),
        ({"eps": 0}, ValueError, "eps must be > 0 and finite, got 0"),
        ({"eps": 1e-50}, ValueError, "eps must be > 0 and finite in float32, got 1e-50"),
        ({"p": 1}, ValueError, r"p must be in \[0, 1\), got 1"),
    ],
)
def test_errors_of_norm(change, error, message):
    arguments = {"x": torch.zeros(2, 4), "residual": torch.zeros(2, 4), "weight": torch.ones(4), "bias": torch.zeros(4)}
    with pytest.raises(error, match="dropout_add_layer_norm: " + message):
        cx.dropout_add_layer_norm(**{**arguments, **change})


def test_errors_from_c():
    x, seed, weight = torch.zeros(2, 4, device=DEVICE), seed_of(), torch.ones(4, device=DEVICE)
    with pytest.raises(REFUSAL, match=r"dropout: p must be in \[0, 1\), got 1"):
        op.dropout(x, seed, 1.0)
    with pytest.raises(REFUSAL, match="dropout: seed must be one int64 number, got 2 elements"):
        op.dropout(x, seed.repeat(2), 0.5)
    with pytest.raises(REFUSAL, match="dropout: x must have at most 16 dimensions, got 17"):
        op.dropout(torch.zeros([1] * 17, device=DEVICE), seed, 0.5)
    with pytest.raises(REFUSAL, match="dropout: dtype must be float32, bfloat16"):
        op.dropout(x.int(), seed, 0.5)
    with pytest.raises(REFUSAL, match="sparse_gate: y must have the shape of x"):
        op.sparse_gate(x, x[:1], None, 0.0)
    with pytest.raises(REFUSAL, match="sparse_gate_backward: grad must have the dtype of x"):
        op.sparse_gate_backward(x.half(), x, x, None, 0.0)
    with pytest.raises(REFUSAL, match="weight must have one element per column of x, 4, got 3"):
        op.dropout_add_layer_norm(x, x, weight[:3], weight, None, 0.0, 1e-5)
    with pytest.raises(REFUSAL, match="bias must be contiguous, got stride 2"):
        op.dropout_add_layer_norm(x, x, weight, torch.ones(8, device=DEVICE)[::2], None, 0.0, 1e-5)
    with pytest.raises(REFUSAL, match="eps must be > 0 and finite, got 0"):
        op.dropout_add_layer_norm(x, x, weight, weight, None, 0.0, 0.0)
    with pytest.raises(REFUSAL, match="eps must be > 0 and finite, got 1e-50"):
        op.dropout_add_layer_norm(x, x, weight, weight, None, 0.0, 1e-50)
    with pytest.raises(REFUSAL, match="weight must have dtype float32 beside this x"):
        op.dropout_add_layer_norm(x, x, weight.half(), weight, None, 0.0, 1e-5)
    with pytest.raises(REFUSAL, match=r"stats must have shape \(2, 2\), got \(2, 3\)"):
        op.dropout_add_layer_norm_backward(x, x, x, weight, torch.ones(2, 3, device=DEVICE), None, 0.0)


def test_scale_of_the_rounded_p():
    assert dropout_scale(0.5) == 2
    assert dropout_scale(0.0) == 1
    assert dropout_threshold(0.1) == 6554
