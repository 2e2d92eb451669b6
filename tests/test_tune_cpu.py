"""tune_cpu: PyTorch's own kernels and their replacements give the same, and PyTorch's come back."""

import functools
import importlib.util
import math
import os
import subprocess
import sys
import threading
import types
import unittest

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close_to_reference, each_backend, run_python_with_torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import camox_ops as cx
from camox_ops.reference.dropout import philox4x32
from camox_ops.train import tune

KERNEL = {kernel.name: kernel for kernel in tune.KERNELS}


def why_not(name: str) -> str:
    try:
        with tune.replaced(name):
            return ""
    except RuntimeError as error:
        return str(error)


needs = {name: pytest.mark.skipif(why_not(name) != "", reason=why_not(name) or "-") for name in KERNEL}


@pytest.fixture(autouse=True)
def stock_kernels_before_and_after():
    cx.train.restore_cpu()
    yield
    cx.train.restore_cpu()


@pytest.fixture
def any_size():
    """Products of all sizes are replaced."""
    tune._library.open()
    domain = tune._library._library.camox_tune_set_least
    domain(1, 1, 1)
    yield
    domain(8, 32 * 32 * 32, 48 * 48 * 48)


def counted(name: str, function):
    """(function(), how often the replacement served) with one kernel replaced."""
    with tune.replaced(name):
        before = tune._library.calls(KERNEL[name])
        result = function()
        return result, tune._library.calls(KERNEL[name]) - before


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


LAYOUTS = ("nn", "nt", "tn", "tt")


def operands(m, n, k, layout, batch=()):
    x = normal(*batch, k, m, seed=1).mT if layout[0] == "t" else normal(*batch, m, k, seed=1)
    y = normal(*batch, n, k, seed=2).mT if layout[1] == "t" else normal(*batch, k, n, seed=2)
    return x, y


def assert_same_product(name, product, *inputs):
    """Our product and PyTorch's under the tolerance rule; ours served, and the strides are PyTorch's."""
    stock = product(*inputs)
    ours, calls = counted(name, lambda: product(*inputs))
    assert calls >= 1
    assert ours.stride() == stock.stride()
    assert_close_to_reference(ours, stock, product(*(x.double() for x in inputs)))


SIZES = [
    (1, 1, 1),
    (3, 5, 2),
    (13, 31, 7),
    (14, 32, 16),
    (15, 33, 17),
    (29, 65, 33),
    (64, 48, 384),
    (17, 95, 385),
    (200, 70, 1000),
    (400, 40, 50),
    (33, 700, 769),
]


@needs["mm"]
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_matches_reference_mm(any_size, size, layout):
    if size[0] == 1:
        x, y = operands(2, 2, 1, layout)
    else:
        x, y = operands(*size, layout)
    assert_same_product("mm", torch.mm, x, y)


@needs["mm"]
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (0, 1), (0.5, -2), (2, 1)])
def test_matches_reference_addmm(any_size, layout, beta, alpha):
    x, y = operands(31, 50, 400, layout)
    for bias in (normal(50, seed=3), normal(31, 50, seed=3), normal(31, 1, seed=3)):
        assert_same_product("mm", lambda b, x, y: torch.addmm(b, x, y, beta=beta, alpha=alpha), bias, x, y)


@needs["mm"]
def test_beta_0_reads_no_output():
    x, y, out = normal(64, 64), normal(64, 64), torch.full((64, 64), math.nan)
    result, calls = counted("mm", lambda: torch.addmm(out, x, y, beta=0, out=out))
    assert calls == 1
    torch.testing.assert_close(result, torch.mm(x, y))


@needs["mm"]
def test_nan_and_infinity_spread_as_in_pytorch():
    x, y = normal(64, 64), normal(64, 64)
    x[3, 5], x[9, 0], y[7, 20] = math.nan, math.inf, -math.inf
    ours, calls = counted("mm", lambda: x @ y)
    assert calls == 1
    torch.testing.assert_close(ours, x @ y, equal_nan=True)


@needs["bmm"]
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [(2, 9, 40, 30), (3, 256, 64, 40), (2, 70, 33, 400), (40, 16, 16, 9)], ids=str)
def test_matches_reference_bmm(any_size, size, layout):
    batch, m, n, k = size
    x, y = operands(m, n, k, layout, (batch,))
    assert_same_product("bmm", torch.bmm, x, y)
    bias = normal(batch, m, n, seed=3)
    assert_same_product("bmm", lambda b, x, y: torch.baddbmm(b, x, y, beta=0.5, alpha=2), bias, x, y)


def views():
    """Pairs of matrices whose elements do not lie without gaps: slices, steps, zeros of stride, offsets."""
    larger = normal(300, 300)
    yield larger[1:101, 3:77], larger[5:79, 7:60]
    yield larger[::2, ::3], larger[::3, 1:90]
    yield larger[:1].expand(80, 300), larger
    yield larger[:, :1].expand(300, 90), larger[:90]
    yield larger.flip(0)[:64, :64], larger.t()[64:128, 10:50]


@needs["mm"]
@pytest.mark.parametrize("which", range(5))
def test_matches_reference_of_views(any_size, which):
    x, y = list(views())[which]
    assert_same_product("mm", torch.mm, x, y)


@needs["mm"]
def test_matches_reference_in_out(any_size):
    x, y = operands(40, 50, 60, "nt")
    outs = [torch.empty(40, 50), torch.empty(50, 40).t(), torch.empty(80, 100)[::2, ::2], torch.empty(40, 70)[:, 3:53]]
    for out in outs:
        strides = out.stride()
        _, calls = counted("mm", lambda out=out: torch.mm(x, y, out=out))
        assert calls == 1
        assert out.stride() == strides
        torch.testing.assert_close(out, x @ y)


@needs["mm"]
def test_outside_the_domain_pytorch_runs():
    cases = [
        lambda: normal(64, 64, dtype=torch.float64) @ normal(64, 64, dtype=torch.float64),
        lambda: normal(64, 64, dtype=torch.bfloat16) @ normal(64, 64, dtype=torch.bfloat16),
        lambda: torch.complex(normal(64, 64), normal(64, 64)) @ torch.complex(normal(64, 64), normal(64, 64)),
        lambda: normal(64, 64).long() @ normal(64, 64).long(),
        lambda: normal(8, 8) @ normal(8, 8),
        lambda: normal(7, 20000) @ normal(20000, 64),
        lambda: normal(200, 300) @ normal(300),
        lambda: normal(0, 8) @ normal(8, 5),
        lambda: normal(5, 0) @ normal(0, 8),
        lambda: torch.addmm(normal(64), normal(64, 64), normal(64, 64), alpha=0),
    ]
    for case in cases:
        ours, calls = counted("mm", case)
        assert calls == 0
        assert torch.equal(ours, case())


@needs["mm"]
@pytest.mark.parametrize("bias", [True, False])
def test_grad_of_linear(bias):
    x, weight, grad = normal(100, 6, 64), normal(80, 64, seed=1), normal(100, 6, 80, seed=2)

    def numbers(dtype):
        leaves = [t.to(dtype).requires_grad_() for t in (x, weight, *([normal(80, seed=3)] if bias else []))]
        y = F.linear(*leaves)
        return [y.detach(), *torch.autograd.grad(y, leaves, grad.to(dtype))]

    ours, calls = counted("mm", lambda: numbers(torch.float32))
    assert calls == 3
    assert_close_to_reference(ours, numbers(torch.float32), numbers(torch.float64))


@needs["mm"]
@needs["bmm"]
def test_same_bits_for_any_number_of_threads():
    x, y, many = normal(300, 500), normal(500, 400), normal(5, 130, 140)

    def products(threads):
        torch.set_num_threads(threads)
        return x @ y, many @ many.mT, many.mT @ many

    with tune.replaced("mm", "bmm"):
        first = products(1)
        for threads in (2, 3, 8):
            for one, other in zip(first, products(threads), strict=True):
                assert torch.equal(one, other)


# Products and pools of small integers, whose sums are exact; numbers of ones and their places for one and two threads.
SAME_EVERYWHERE = """
import torch
import torch.nn.functional as F
from camox_ops.train import tune
x = torch.arange(150 * 800).remainder(9).sub(4).float().view(150, 800)
y = torch.arange(800 * 130).remainder(7).sub(3).float().view(800, 130)

def exact():
    products = [a @ b for a, b in ((x, y), (y.t(), x.t()), (x.t().contiguous().t(), y), (x, y.t().contiguous().t()))]
    pools = [F.avg_pool2d(x.view(2, 3, 125, 160), *pool) for pool in ((7, 1, 3), (31, 1, 15, False, False), (5, 1, 0))]
    images = x.view(2, 3, 125, 160)[:, :, :40, :50]
    pools += [p for pool in ((2,), (3, 2, 1), (5, 1, 2)) for p in F.max_pool2d(images, *pool, return_indices=True)]
    larger = [F.interpolate(images, scale_factor=s, mode="bilinear") for s in (2, 4)]
    for s in ((2, 2), (3, 4), (1, 5)):
        copies = F.interpolate(leaf := images.clone().requires_grad_(), scale_factor=s)
        larger += [copies, *torch.autograd.grad(copies, leaf, copies.detach())]
    window, planes = y[:7, :7].expand(3, 1, 7, 7).contiguous(), x.view(2, 3, 125, 160)[:, :, :40].contiguous()
    one = planes.new_ones(()).requires_grad_()
    convolved = F.conv2d(planes, one * window, padding=3, groups=3)
    depthwise = [convolved, *torch.autograd.grad(convolved, one, planes)]
    images, matrix = x.view(3, 20, 50, 40)[:, :, :, :39].contiguous(), x[:20, :20].reshape(20, 20, 1, 1)
    convolved = F.conv2d(images, one * matrix, matrix[0].flatten())
    return products + pools + larger + depthwise + [convolved, *torch.autograd.grad(convolved, one, convolved.detach())]

wanted = exact()
kernels = {kernel.name: kernel for kernel in tune.KERNELS}
found = {}
counts = {"mm": 4, "avg_pool2d": 3, "max_pool2d": 3, "convolution": 2, "pointwise": 2}
counts |= {"upsample_bilinear2d": 2, "upsample_nearest2d": 6}
for name, count in counts.items():
    names = (name,)
    try:
        with tune.replaced(name):
            before = tune._library.calls(kernels[names[0]])
            ours = exact()
            assert tune._library.calls(kernels[names[0]]) == before + count
    except RuntimeError as error:
        found[names] = str(error)
    else:
        found[names] = all(torch.equal(a, b) for a, b in zip(ours, wanted, strict=True))
try:
    with tune.replaced("bernoulli_"):
        for threads in (1, 2):
            torch.set_num_threads(threads)
            torch.manual_seed(7)
            ones = torch.empty(300_001).bernoulli_(0.3).nonzero().flatten()
            found[threads] = len(ones), int((ones * torch.arange(len(ones))).sum())
except RuntimeError as error:
    found[1] = found[2] = str(error)
"""


ISAS = cx.supported_isas()


@pytest.mark.parametrize("isa", [ISAS[0], *(pytest.param(isa, marks=pytest.mark.slow) for isa in ISAS[1:])])
def test_every_instruction_set_gives_the_same(isa):
    here = {}
    exec(SAME_EVERYWHERE, here)
    assert here["found"][1] == here["found"][2]
    for name in here["counts"]:
        assert here["found"][(name,)] == (why_not(name) or True)
    if isa != cx._C.isa():  # what this process runs on
        elsewhere = run_python_with_torch(SAME_EVERYWHERE + "print(found)", CAMOX_FORCE_ISA=isa)
        assert elsewhere.strip() == str(here["found"])


OPERATORS = (
    *("mm", "addmm", "bmm", "baddbmm", "matmul", "nn.functional.linear", "einsum", "addbmm", "__rmatmul__"),
    *("nn.functional.avg_pool1d", "nn.functional.avg_pool2d", "bernoulli"),
    *("nn.functional.max_pool1d", "nn.functional.max_pool2d"),
    *("nn.functional.interpolate", "nn.functional.upsample_bilinear", "nn.functional.upsample_nearest"),
    *("nn.functional.conv1d", "nn.functional.conv2d", "nn.functional.conv_transpose2d"),
    *("nn.functional.batch_norm", "nn.functional.instance_norm"),
    *("softmax", "log_softmax", "nn.functional.cross_entropy"),
)
RANDOM_OPERATORS = ("nn.functional.dropout", "nn.functional.dropout2d", "nn.functional.dropout3d")


@pytest.fixture(scope="session")
def operator_infos():
    """PyTorch's descriptions of its operators. Its test helpers want expecttest for a base class alone."""
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("expecttest") is None:
            stand_in = types.ModuleType("expecttest")
            stand_in.TestCase = unittest.TestCase
            patch.setitem(sys.modules, "expecttest", stand_in)
        from torch.testing._internal.common_methods_invocations import op_db
    # That import freezes the flags of torch.backends, which the tests after these set.
    torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
    assert not torch.backends.flags_frozen()
    return op_db


def samples(operator_infos, operator, dtype):
    """(description, sample) of PyTorch's for an operator."""
    found = [
        (info, sample)
        for info in operator_infos
        if info.name == operator and dtype in info.supported_dtypes("cpu")
        for sample in info.sample_inputs("cpu", dtype, requires_grad=False)
    ]
    assert found
    return found


OF_DTYPES = [
    torch.float32,
    *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.bfloat16, torch.float16, torch.float64)),
]


@pytest.mark.parametrize("dtype", OF_DTYPES)
@pytest.mark.parametrize("operator", OPERATORS)
def test_samples_of_pytorch(any_size, operator_infos, operator, dtype):
    """PyTorch's own samples of an operator, with and without."""

    def results(info, sample, dtype):
        def to(value):
            return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

        torch.manual_seed(3)
        leaf, args = to(sample.input), tuple(map(to, sample.args))
        kwargs = {name: to(value) for name, value in sample.kwargs.items()}
        if not isinstance(leaf, torch.Tensor):
            return [info.op(type(leaf)(map(to, leaf)), *args, **kwargs).detach()]
        leaf = leaf.detach().requires_grad_()
        result = info.op(leaf, *args, **kwargs)
        y, *indices = result if isinstance(result, tuple) else (result,)
        (grad,) = torch.autograd.grad(y.sum(), leaf, allow_unused=True)
        return [y.detach(), *indices] + ([] if grad is None else [grad])

    for info, sample in samples(operator_infos, operator, dtype):
        stock = results(info, sample, dtype)
        with all_replaced():
            ours = results(info, sample, dtype)
        assert [t.stride() for t in ours] == [t.stride() for t in stock]
        if dtype == torch.float64 or operator == "bernoulli" or "max_pool" in operator:  # PyTorch's kernels, or exact
            assert all(torch.equal(a, b) for a, b in zip(ours, stock, strict=True))
        else:
            assert_close_to_reference(ours, stock, results(info, sample, torch.float64))


@needs["bernoulli_"]
@pytest.mark.parametrize("dtype", OF_DTYPES)
@pytest.mark.parametrize("operator", RANDOM_OPERATORS)
def test_random_samples_of_pytorch(operator_infos, operator, dtype):
    for info, sample in samples(operator_infos, operator, dtype):
        p, training = sample.kwargs.get("p", 0.5), sample.kwargs.get("training", True)
        stock = info.op(sample.input, *sample.args, **sample.kwargs)
        with tune.replaced("bernoulli_"):
            torch.manual_seed(3)
            ours = info.op(sample.input, *sample.args, **sample.kwargs)
            torch.manual_seed(3)
            again = info.op(sample.input, *sample.args, **sample.kwargs)
        assert ours.stride() == stock.stride() and ours.dtype == stock.dtype
        assert torch.equal(ours, again)
        if not training or p == 0:
            assert torch.equal(ours, sample.input)
        elif p == 1:
            assert not ours.any()
        else:
            torch.testing.assert_close(ours, torch.where(ours == 0, 0, sample.input * (1 / (1 - p))))


def bits(seed: int, group: int, place: int, lower: int) -> int:
    words = philox4x32([torch.tensor(word) for word in (group, 0, lower, 0)], [seed & 0xFFFFFFFF, seed >> 32])
    return int(words[place // 2]) >> (16 * (place % 2)) & 0xFFFF


@needs["bernoulli_"]
@pytest.mark.parametrize("p", [0.1, 0.5, 1 / 3, 0.9, 1 - 2**-17, 2**-17])
def test_known_values_of_bernoulli(p):
    torch.manual_seed(5)
    seed = int(torch.empty(1, dtype=torch.int64).random_())
    torch.manual_seed(5)
    mask, calls = counted("bernoulli_", lambda: torch.empty(200).bernoulli_(p))
    assert calls == 1
    for i in range(200):
        u = bits(seed, i // 8, i % 8, 0) << 16 | bits(seed, i // 8, i % 8, 1)
        assert mask[i] == float(u < round(p * 2**32))


@needs["bernoulli_"]
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("p", [0.0, 1e-5, 0.1, 0.5, 0.9, 65535.5 / 65536, 1.0])
def test_distribution_of_bernoulli(p, dtype):
    n = 3_000_007
    with tune.replaced("bernoulli_"):
        mask = torch.empty(n, dtype=dtype).bernoulli_(p).double()
    assert bool(((mask == 0) | (mask == 1)).all())
    assert abs(mask.sum().item() - n * p) <= 6 * math.sqrt(n * p * (1 - p))
    if 0 < p < 1:  # of neighbours, and of elements that share a call of Philox
        for distance in (1, 2, 8, 64, 32768):
            both = (mask[distance:] * mask[:-distance]).mean().item()
            assert abs(both - p * p) <= 8 * math.sqrt(p * p * (1 - p * p) / n) + 1e-9


@needs["bernoulli_"]
def test_bernoulli_follows_manual_seed():
    def draw(size=1000):
        return torch.empty(size).bernoulli_(0.3)

    with tune.replaced("bernoulli_"):
        torch.manual_seed(1)
        first, second = draw(), draw()
        state = torch.get_rng_state()
        third = draw()
        torch.manual_seed(1)
        assert torch.equal(draw(), first)
        assert torch.equal(draw(), second)
        torch.set_rng_state(state)
        assert torch.equal(draw(), third)
    assert not torch.equal(first, second)


@needs["bernoulli_"]
def test_bernoulli_outside_the_domain_is_pytorchs():
    cases = [
        lambda: torch.empty(1000).bernoulli_(0.3, generator=torch.Generator().manual_seed(3)),
        lambda: torch.empty(1000, dtype=torch.int64).bernoulli_(0.3),
        lambda: torch.empty(1000, dtype=torch.bool).bernoulli_(0.3),
        lambda: torch.empty(1000, 2)[:, 0].bernoulli_(0.3),
        lambda: torch.empty(1000).bernoulli_(torch.full((1000,), 0.3)),
        lambda: torch.bernoulli(torch.full((1000,), 0.3)),
    ]
    for case in cases:
        torch.manual_seed(4)
        stock = case()
        torch.manual_seed(4)
        ours, calls = counted("bernoulli_", case)
        assert calls == 0
        assert torch.equal(ours, stock)


@needs["bernoulli_"]
def test_bernoulli_of_layouts():
    with tune.replaced("bernoulli_"):
        larger = torch.full((70, 90), 7.0)
        larger[3:60].bernoulli_(0.5)
        assert bool((larger[:3] == 7).all()) and bool((larger[60:] == 7).all())
        assert set(larger[3:60].unique().tolist()) == {0, 1}
        for x in (torch.empty(4, 8, 9, 7).to(memory_format=torch.channels_last), torch.empty(30, 40).t()):
            before = tune._library.calls(KERNEL["bernoulli_"])
            assert abs(x.bernoulli_(0.5).mean().item() - 0.5) < 0.1
            assert tune._library.calls(KERNEL["bernoulli_"]) == before + 1
        assert torch.empty(0, 3).bernoulli_(0.5).shape == (0, 3)
        assert torch.empty(()).bernoulli_(1.0) == 1


@needs["bernoulli_"]
@pytest.mark.parametrize("p", [-0.1, 1.5, math.nan])
def test_errors_of_bernoulli(p):
    with pytest.raises(RuntimeError) as stock:
        torch.empty(3).bernoulli_(p)
    with tune.replaced("bernoulli_"), pytest.raises(RuntimeError) as ours:
        torch.empty(3).bernoulli_(p)
    assert str(stock.value).splitlines()[0] in str(ours.value)


@needs["bernoulli_"]
def test_dropout():
    x = normal(400, 500).requires_grad_()
    with tune.replaced("bernoulli_"):
        torch.manual_seed(3)
        y = F.dropout(x, 0.2)
        (grad,) = torch.autograd.grad(y.sum(), x)
        torch.manual_seed(3)
        assert torch.equal(F.dropout(x, 0.2), y)
        assert torch.equal(F.dropout(x, 0.2, training=False), x)
    kept = grad != 0
    assert abs(kept.float().mean().item() - 0.8) < 0.01
    torch.testing.assert_close(y, torch.where(kept, x / 0.8, 0.0))


def pooled(x, *arguments):
    """The pool of x and a gradient of it."""
    leaf = x.detach().requires_grad_()
    y = F.avg_pool2d(leaf, *arguments)
    grad = normal(*y.shape, seed=5, dtype=x.dtype).to(memory_format=torch.preserve_format)
    return [y.detach(), *torch.autograd.grad(y, leaf, grad)]


POOLED = {
    "contiguous": lambda: normal(2, 3, 37, 29),
    "channels_last": lambda: normal(2, 19, 37, 29).contiguous(memory_format=torch.channels_last),
    "gaps": lambda: normal(2, 3, 37, 58)[..., ::2],
    "transposed": lambda: normal(2, 3, 29, 37).mT,
    "expanded": lambda: normal(1, 1, 37, 29).expand(2, 4, 37, 29),
    "one image": lambda: normal(3, 37, 29),
    "one channel": lambda: normal(2, 1, 37, 29),
    "one row": lambda: normal(2, 3, 1, 50),
}
# window, padding
POOLS = [(3, 1), (5, 2), (5, 1), (7, 0), (31, 15), ((1, 9), (0, 4)), ((9, 3), (2, 1)), ((3, 21), (0, 10)), (57, 28)]


@needs["avg_pool2d"]
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", POOLED)
def test_matches_pytorch_avg_pool2d(layout, dtype):
    x = POOLED[layout]().to(dtype)
    served = 0
    for window, padding in POOLS:
        for count_include_pad in (True, False):
            arguments = (window, 1, padding, False, count_include_pad)
            try:
                stock = pooled(x, *arguments)
            except RuntimeError:  # the image is smaller than the window
                with tune.replaced("avg_pool2d"), pytest.raises(RuntimeError, match="Output size is too small"):
                    pooled(x, *arguments)
                continue
            ours, calls = counted("avg_pool2d", lambda arguments=arguments: pooled(x, *arguments))
            assert [t.stride() for t in ours] == [t.stride() for t in stock]
            assert_close_to_reference(ours, stock, pooled(x.double(), *arguments))
            assert calls in (0, 2)
            served += calls
    assert served >= (8 if layout == "one row" else 24)


@needs["avg_pool2d"]
@pytest.mark.parametrize("size", [31, 255])
def test_pools_do_not_drift(size):
    x = 1e4 + normal(1, 1, 260, 40)
    expected = cx.reference.box_mean(x.double(), size, True)
    ours, calls = counted("avg_pool2d", lambda: F.avg_pool2d(x, size, 1, size // 2))
    assert calls == 1
    assert (ours.double() - expected).abs().max() <= 4 * torch.finfo(torch.float32).eps * 1e4
    leaf = torch.zeros(x.shape).requires_grad_()
    with tune.replaced("avg_pool2d"):
        (grad,) = torch.autograd.grad(F.avg_pool2d(leaf, size, 1, size // 2), leaf, x)
    assert (grad.double() - expected).abs().max() <= 4 * torch.finfo(torch.float32).eps * 1e4


@needs["avg_pool2d"]
def test_pools_keep_nan_and_infinity_in_their_windows():
    x = normal(1, 1, 40, 40)
    x[0, 0, 10, 12], x[0, 0, 30, 30], x[0, 0, 31, 30] = math.nan, math.inf, -math.inf
    ours, calls = counted("avg_pool2d", lambda: F.avg_pool2d(x, 5, 1, 1))
    assert calls == 1
    torch.testing.assert_close(ours, F.avg_pool2d(x, 5, 1, 1), equal_nan=True)


@needs["avg_pool2d"]
def test_avg_pool1d_and_modules():
    x = normal(2, 5, 60)
    for pool in (nn.AvgPool1d(9, 1, 4), nn.AvgPool1d(11, 1, 2, count_include_pad=False), nn.AvgPool2d(7, 1, 3)):
        stock = pool(x)
        ours, calls = counted("avg_pool2d", lambda pool=pool: pool(x))
        assert calls == 1
        torch.testing.assert_close(ours, stock)


@needs["avg_pool2d"]
@pytest.mark.parametrize("count_include_pad", [True, False])
def test_second_gradients_of_pools(count_include_pad):
    x, grad, direction = normal(2, 3, 20, 20), normal(2, 3, 18, 18, seed=1), normal(2, 3, 20, 20, seed=2)

    def numbers(dtype):
        leaf, flows = x.to(dtype).requires_grad_(), grad.to(dtype).requires_grad_()
        y = F.avg_pool2d(leaf, 7, 1, 2, False, count_include_pad)
        (first,) = torch.autograd.grad(y, leaf, flows, create_graph=True)
        return [first.detach(), *torch.autograd.grad(first, flows, direction.to(dtype))]

    ours, calls = counted("avg_pool2d", lambda: numbers(torch.float32))
    assert calls == 3
    assert_close_to_reference(ours, numbers(torch.float32), numbers(torch.float64))


@needs["avg_pool2d"]
def test_pools_outside_the_domain_are_pytorchs():
    x = normal(2, 3, 20, 20)
    cases = [
        lambda: F.avg_pool2d(x, 2),
        lambda: F.avg_pool2d(x, 3, 2, 1),
        lambda: F.avg_pool2d(x, 4, 1, 2),
        lambda: F.avg_pool2d(x, 5, 1, 2, ceil_mode=True),
        lambda: F.avg_pool2d(x, 5, 1, 2, divisor_override=7),
        lambda: F.avg_pool2d(x, 19, 1, 0),
        lambda: F.avg_pool2d(x, 1, 1, 0),
        lambda: F.avg_pool2d(x.double(), 5, 1, 2),
        lambda: F.avg_pool2d((9 * x).long(), 5, 1, 2),
        lambda: F.avg_pool2d(x[:0], 5, 1, 2),
        lambda: F.avg_pool2d(x.contiguous(memory_format=torch.channels_last), 4, 1, 1),
        lambda: F.avg_pool3d(x, 3, 1, 1),
        lambda: F.adaptive_avg_pool2d(x, 5),
        lambda: torch._C._nn.avg_pool2d(x, [5], [1], [2], out=torch.empty(0)),
        lambda: torch.autograd.grad(F.avg_pool2d(leaf := x.clone().requires_grad_(), 4, 2, 1).sum(), leaf)[0],
    ]
    for case in cases:
        ours, calls = counted("avg_pool2d", case)
        stock = case()
        assert calls == 0
        assert torch.equal(ours, stock) and ours.stride() == stock.stride()


@needs["avg_pool2d"]
def test_errors_of_pools():
    x, pool = normal(2, 3, 8, 8), torch.ops.aten.avg_pool2d
    cases = [
        lambda: F.avg_pool2d(x, 3, 1, 2),
        lambda: F.avg_pool2d(x, 11, 1, 1),
        lambda: F.avg_pool2d(x, 3, 1, -1),
        lambda: F.avg_pool2d(x, 3, 0, 1),
        lambda: F.avg_pool2d(x, 0, 1, 0),
        lambda: F.avg_pool2d(x[0, 0], 3, 1, 1),  # an IndexError
        lambda: F.avg_pool2d(x, 3, 1, 1, divisor_override=0),
        lambda: F.avg_pool2d(x.bool(), 3, 1, 1),
        lambda: pool(x, [3, 3, 3], [1, 1], [1, 1]),
        lambda: torch.ops.aten.avg_pool2d_backward(x[..., 1:], x, [3, 3], [1, 1], [1, 1], False, True, None),
    ]
    for case in cases:
        with pytest.raises((RuntimeError, IndexError)) as stock:
            case()
        with tune.replaced("avg_pool2d"), pytest.raises(RuntimeError) as ours:
            case()
        assert str(stock.value).splitlines()[0] in str(ours.value)


@needs["avg_pool2d"]
def test_pools_of_any_number_of_threads_are_the_same():
    x = normal(2, 3, 130, 70)

    def pools(threads):
        torch.set_num_threads(threads)
        return pooled(x, 31, 1, 15) + pooled(x, 5, 1, 1)

    with tune.replaced("avg_pool2d"):
        first = pools(1)
        for threads in (2, 3, 8):
            assert all(torch.equal(a, b) for a, b in zip(first, pools(threads), strict=True))


def max_pooled(x, *arguments):
    """The largest pixels, where they lie, and a gradient of x."""
    leaf = x.detach().requires_grad_()
    y, indices = F.max_pool2d(leaf, *arguments, return_indices=True)
    return [y.detach(), indices, *torch.autograd.grad(y, leaf, normal(*y.shape, seed=5, dtype=x.dtype))]


def assert_same_pools(x, *arguments, seldom=False) -> int:
    """PyTorch's pool of x and ours are the same bits. How often ours served: once, unless `seldom`."""
    stock = max_pooled(x, *arguments)
    ours, calls = counted("max_pool2d", lambda: max_pooled(x, *arguments))
    assert calls == 1 or (seldom and calls == 0)
    assert [t.stride() for t in ours] == [t.stride() for t in stock]
    assert torch.equal(ours[1], stock[1])
    for one, other in zip(ours, stock, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(one.signbit(), other.signbit())
    return calls


MAX_POOLED = {
    "contiguous": lambda: normal(2, 3, 37, 29),
    "cropped": lambda: normal(2, 3, 40, 50)[..., 2:39, 5:34],
    "rows apart": lambda: normal(2, 37, 3, 29).transpose(1, 2),
    "expanded": lambda: normal(1, 1, 37, 29).expand(2, 4, 37, 29),
    "one image": lambda: normal(3, 37, 29),
    "one channel": lambda: normal(2, 1, 37, 70),
    "few pixels": lambda: normal(2, 19, 8, 9),
    "one row": lambda: normal(2, 3, 1, 50),
}
# window, stride, padding
MAX_POOLS = [
    (2, None, 0),
    (3, 2, 1),
    (3, 1, 1),
    (3, None, 1),
    (5, 1, 2),
    (7, 3, 3),
    (13, 1, 6),
    (13, 2, 5),
    ((2, 3), None, 0),
    ((2, 3), (3, 1), (1, 0)),
    ((1, 4), (2, 5), (0, 2)),
    (1, 2, 0),
]


@needs["max_pool2d"]
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", MAX_POOLED)
def test_matches_reference_max_pool2d(layout, dtype):
    x = MAX_POOLED[layout]().to(dtype)
    served = 0
    for pool in MAX_POOLS:
        for ceil_mode in (False, True):
            try:
                served += assert_same_pools(x, *pool, 1, ceil_mode, seldom=x.shape[-1] < 20)
            except RuntimeError as error:  # the image is smaller than the window
                assert "Output size is too small" in str(error)
                with tune.replaced("max_pool2d"), pytest.raises(RuntimeError, match="Output size is too small"):
                    max_pooled(x, *pool, 1, ceil_mode)
    assert served >= 16


@needs["max_pool2d"]
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_max_pools_of_ties_nan_and_infinity(dtype):
    """The first of equal pixels, -0 and 0 among them, the last NaN, and a pixel inside where all are -inf."""
    share = torch.rand(2, 3, 21, 45, generator=torch.Generator().manual_seed(3))
    few = torch.randint(-2, 3, share.shape, generator=torch.Generator().manual_seed(4)).to(dtype)
    few[(few == 0) & (share < 0.5)] *= -1
    special = few.clone()
    special[share < 0.3], special[share > 0.6], special[share > 0.8] = -math.inf, math.inf, math.nan
    for x in (few, special, torch.full_like(few, -math.inf), torch.full_like(few, math.nan)):
        for pool in MAX_POOLS:
            assert_same_pools(x, *pool, 1, True)


@needs["max_pool2d"]
def test_max_pools_of_all_small_sizes():
    served = 0
    for height in range(1, 7):
        for width in range(1, 36):
            x = normal(2, 2, height, width, seed=width)
            for pool in ((1, 1, 0), (2, 2, 1), (3, 2, 1), (5, 1, 2), ((1, 3), (1, 3), (0, 1))):
                served += assert_same_pools(x, *pool, seldom=True)
    assert served > 600


@needs["max_pool2d"]
def test_max_pool1d_and_modules():
    x = normal(2, 5, 60)
    for pool in (nn.MaxPool1d(4), nn.MaxPool1d(3, 2, 1, return_indices=True), nn.MaxPool2d(3, 1, 1, ceil_mode=True)):

        def numbers(pool=pool):
            y = pool(x.requires_grad_())
            return y if isinstance(y, tuple) else (y,)

        stock = numbers()
        ours, calls = counted("max_pool2d", numbers)
        assert calls == 1
        assert all(torch.equal(one, other) for one, other in zip(ours, stock, strict=True))


@needs["max_pool2d"]
def test_second_gradients_of_max_pools():
    x, grad, direction = normal(2, 3, 20, 20), normal(2, 3, 10, 10, seed=1), normal(2, 3, 20, 20, seed=2)

    def numbers():
        leaf, flows = x.clone().requires_grad_(), grad.clone().requires_grad_()
        y = F.max_pool2d(leaf, 3, 2, 1)
        (first,) = torch.autograd.grad(y, leaf, flows, create_graph=True)
        return [first.detach(), *torch.autograd.grad(first, flows, direction)]

    ours, calls = counted("max_pool2d", numbers)
    assert calls == 1
    assert all(torch.equal(one, other) for one, other in zip(ours, numbers(), strict=True))


@needs["max_pool2d"]
def test_max_pools_outside_the_domain_are_pytorchs():
    x = normal(2, 3, 20, 20)
    cases = [
        lambda: F.max_pool2d(x, 2, 2, 0, 2),
        lambda: F.max_pool2d(x.double(), 2),
        lambda: F.max_pool2d((9 * x).long(), 2),
        lambda: F.max_pool2d(x[:0], 2),
        lambda: F.max_pool2d(x[..., ::2], 2),
        lambda: F.max_pool2d(x.mT, 2),
        lambda: F.max_pool2d(x.contiguous(memory_format=torch.channels_last), 2),
        lambda: F.max_pool2d(x, 6),  # 3 columns
        lambda: F.max_pool2d(normal(2, 3, 84, 84), 14),  # 6 columns of 196 pixels
        lambda: F.max_pool2d(x[..., :2], 3, 2, ceil_mode=True, padding=(1, 0)),
        lambda: F.max_pool1d(x[0], 3),  # without gradients, and adaptive pools: kernels of their own
        lambda: F.max_pool3d(x, 3, 1, 1),
        lambda: F.adaptive_max_pool2d(x, 5),
        lambda: torch.ops.aten.max_pool2d_with_indices.out(
            x, [2, 2], out=torch.empty(0), indices=x.new_empty(0).long()
        )[0],
    ]
    for case in cases:
        ours, calls = counted("max_pool2d", case)
        stock = case()
        assert calls == 0
        assert torch.equal(ours, stock) and ours.stride() == stock.stride()


@needs["max_pool2d"]
def test_errors_of_max_pools():
    x, pool = normal(2, 3, 8, 8), torch.ops.aten.max_pool2d_with_indices
    cases = [
        lambda: F.max_pool2d(x, 3, 1, 2),
        lambda: F.max_pool2d(x, 11, 1, 1),
        lambda: F.max_pool2d(x, 3, 1, -1),
        lambda: F.max_pool2d(x, 3, 0, 1),
        lambda: F.max_pool2d(x, 0, 1, 0),
        lambda: F.max_pool2d(x, 2, 2, 0, 0),
        lambda: F.max_pool2d(x, 1 << 40, 1, 1 << 39),
        lambda: F.max_pool2d(x[0, 0], 3, 1, 1),
        lambda: F.max_pool2d(x.bool(), 3, 1, 1),
        lambda: pool(x, [3, 3, 3], [1, 1], [1, 1]),
        lambda: pool(x, [3, 3], [1, 1, 1], [1, 1]),
    ]
    for case in cases:
        with pytest.raises((RuntimeError, IndexError)) as stock:
            case()
        with tune.replaced("max_pool2d"), pytest.raises(RuntimeError) as ours:
            case()
        assert str(stock.value).splitlines()[0] in str(ours.value)


@needs["max_pool2d"]
def test_max_pools_under_vmap_and_of_any_number_of_threads():
    x = normal(4, 2, 1, 130, 70)

    def pools(threads):
        torch.set_num_threads(threads)
        windows = ((5, 1, 2), (3, 2, 1), (40, 1, 20))
        return [
            torch.func.vmap(functools.partial(F.max_pool2d, kernel_size=w, stride=s, padding=p))(x[:n])
            for w, s, p in windows
            for n in (1, 4)
        ]

    stock = pools(2)
    with tune.replaced("max_pool2d"):
        for threads in (1, 2, 3, 8):
            assert all(torch.equal(one, other) for one, other in zip(pools(threads), stock, strict=True))


def convolved(x, window, bias, padding, wanted=(True, True, True)):
    """A depthwise convolution and the wanted gradients of x, the window and the bias."""
    given = zip((x, window, bias), wanted, strict=True)
    leaves = [None if t is None else t.detach().requires_grad_(want) for t, want in given]
    y = F.conv2d(*leaves, padding=padding, groups=x.shape[1])
    grad = normal(*y.shape, seed=5, dtype=x.dtype)
    asked = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    return [y.detach(), *torch.autograd.grad(y, asked, grad)]


CONVOLVED = [
    ((2, 3, 5, 7), 3, 1),
    ((1, 4, 9, 33), 5, 2),
    ((3, 5, 37, 50), 7, 3),
    ((2, 3, 7, 7), 9, 4),
    ((1, 2, 20, 70), 11, 0),
    ((1, 3, 17, 31), 7, 6),
    ((2, 8, 64, 64), 5, (1, 2)),
    ((2, 300, 3, 2), 3, 1),
]


@needs["convolution"]
@pytest.mark.parametrize(("shape", "size", "padding"), CONVOLVED, ids=str)
def test_matches_reference_convolution(shape, size, padding):
    inputs = normal(*shape), normal(shape[1], 1, size, size, seed=1), normal(shape[1], seed=2)
    stock = convolved(*inputs, padding)
    ours, calls = counted("convolution", lambda: convolved(*inputs, padding))
    assert calls == 2
    assert [t.stride() for t in ours] == [t.stride() for t in stock]
    assert_close_to_reference(ours, stock, convolved(*(t.double() for t in inputs), padding))


@needs["convolution"]
@pytest.mark.parametrize(
    "wanted", [(True, False, False), (False, True, False), (False, False, True), (False, True, True)]
)
def test_grad_of_convolution_where_wanted(wanted):
    x, window, bias = normal(2, 4, 12, 20), normal(4, 1, 5, 5, seed=1), normal(4, seed=2)
    y, *every = convolved(x, window, bias, 2)
    ours, calls = counted("convolution", lambda: convolved(x, window, bias, 2, wanted))
    assert calls == 2
    torch.testing.assert_close(ours, [y, *(grad for grad, want in zip(every, wanted, strict=True) if want)])
    without = convolved(x, window, None, 2)
    ours, calls = counted("convolution", lambda: convolved(x, window, None, 2))
    assert calls == 2
    torch.testing.assert_close(ours, without)


@needs["convolution"]
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_convolution_keeps_nan_and_infinity_where_pytorch_does(value):
    """Beside the border too, where the lanes behind a row's end lie."""
    window, bias = normal(3, 1, 5, 5, seed=1), normal(3, seed=2)
    for place in ((0, 0, 7, 9), (1, 2, 0, 20), (1, 1, 11, 0)):
        x = normal(2, 3, 12, 21)
        x[place] = value
        stock, ours = (
            convolved(x, window, bias, 2),
            counted("convolution", lambda x=x: convolved(x, window, bias, 2))[0],
        )
        torch.testing.assert_close(ours, stock, equal_nan=True)


@needs["convolution"]
def test_second_gradients_of_convolution():
    def second(dtype=torch.float32):
        inputs = normal(2, 3, 10, 12), normal(3, 1, 3, 3, seed=1), normal(3, seed=2)
        leaves = [t.to(dtype).requires_grad_() for t in inputs]
        y = F.conv2d(*leaves, padding=1, groups=3)
        grads = torch.autograd.grad(y.square().mean(), leaves, create_graph=True)
        return torch.autograd.grad(sum(grad.square().mean() for grad in grads), leaves)

    ours, calls = counted("convolution", second)
    assert calls >= 2
    assert_close_to_reference(ours, second(), second(torch.float64))


@needs["convolution"]
def test_convolutions_outside_the_domain_are_pytorchs():
    x, window, dense = normal(2, 4, 12, 12), normal(4, 1, 3, 3, seed=1), normal(4, 4, 3, 3, seed=1)
    last = torch.channels_last
    cases = [
        lambda x: F.conv2d(x, dense, padding=1),
        lambda x: F.conv2d(x, normal(4, 2, 3, 3), padding=1, groups=2),
        lambda x: F.conv2d(x, normal(8, 1, 3, 3), padding=1, groups=4),
        lambda x: F.conv2d(x, window, stride=2, padding=1, groups=4),
        lambda x: F.conv2d(x, window, dilation=2, padding=2, groups=4),
        lambda x: F.conv2d(x, window, padding=3, groups=4),
        lambda x: F.conv2d(x, normal(4, 1, 4, 4), padding=1, groups=4),
        lambda x: F.conv2d(x, normal(4, 1, 1, 5), padding=(0, 2), groups=4),
        lambda x: F.conv2d(x, normal(4, 1, 1, 1), groups=4),
        lambda x: F.conv2d(x.double(), window.double(), padding=1, groups=4),
        lambda x: F.conv2d(x.bfloat16(), window.bfloat16(), padding=1, groups=4),
        lambda x: F.conv2d(x.contiguous(memory_format=last), window, padding=1, groups=4),
        lambda x: F.conv2d(x[:0], window, padding=1, groups=4),
        lambda x: F.conv1d(x[:, :, 0], window[..., 0], padding=1, groups=4),
        lambda x: F.conv3d(x, normal(2, 1, 3, 3, 3), padding=1, groups=2) if x.shape[0] == 2 else x,
        lambda x: F.conv_transpose2d(x, window, padding=1, groups=4),
    ]
    for case in cases:

        def both(case=case):
            leaf = x.clone().requires_grad_()
            y = case(leaf)
            return [y.detach(), *torch.autograd.grad(y, leaf, normal(*y.shape, seed=5, dtype=y.dtype))]

        ours, calls = counted("convolution", both)
        stock = both()
        assert calls == 0
        assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(ours, stock, strict=True))


@needs["convolution"]
def test_errors_of_convolution():
    x, window = normal(2, 3, 8, 8), normal(3, 1, 3, 3)
    cases = [
        lambda: F.conv2d(x, window, groups=2),
        lambda: F.conv2d(x, window, padding=-1, groups=3),
        lambda: F.conv2d(x, window, stride=0, groups=3),
        lambda: F.conv2d(x, normal(3, 1, 11, 11), groups=3),
        lambda: F.conv2d(x, window.double(), groups=3),
        lambda: F.conv2d(x, window, normal(2), groups=3),
    ]
    for case in cases:
        with pytest.raises(RuntimeError) as stock:
            case()
        with tune.replaced("convolution"), pytest.raises(RuntimeError) as ours:
            case()
        assert str(stock.value).splitlines()[0] in str(ours.value)


@needs["convolution"]
def test_convolutions_of_any_number_of_threads_are_the_same():
    inputs = normal(3, 7, 40, 33), normal(7, 1, 7, 7, seed=1), normal(7, seed=2)

    def results(threads):
        torch.set_num_threads(threads)
        return convolved(*inputs, 3)

    with tune.replaced("convolution"):
        first = results(1)
        for threads in (2, 3, 8):
            assert all(torch.equal(a, b) for a, b in zip(first, results(threads), strict=True))


def mixed(x, weight, bias, wanted=(True, True, True)):
    """A convolution with a window of one pixel and the wanted gradients of x, the weight and the bias."""
    given = zip((x, weight, bias), wanted, strict=True)
    leaves = [None if t is None else t.detach().requires_grad_(want) for t, want in given]
    y = (F.conv1d, F.conv2d, F.conv3d)[x.dim() - 3](*leaves)
    asked = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    return [y.detach(), *torch.autograd.grad(y, asked, normal(*y.shape, seed=5, dtype=x.dtype))]


def mixing(outputs, *image):
    """An image, a weight of one pixel, a bias."""
    ones = (1,) * (len(image) - 2)
    return normal(*image), normal(outputs, image[1], *ones, seed=1), normal(outputs, seed=2)


# outputs, the image: one chunk of positions, several, parts, a weight too large for parts, odd sizes, one position.
MIXED = [
    (16, 2, 8, 16, 16),
    (9, 1, 33, 37, 71),
    (40, 3, 24, 50, 50),
    (200, 3, 190, 5, 7),
    (33, 11, 17, 4, 5),
    (24, 2, 31, 2100),
    (24, 2, 31, 3, 6, 7),
    (70, 5, 99, 1, 1),
    (50, 30, 40, 1),
]


@needs["pointwise"]
@pytest.mark.parametrize("shape", MIXED, ids=str)
def test_matches_reference_pointwise(shape):
    inputs = mixing(*shape)
    stock = mixed(*inputs)
    ours, calls = counted("pointwise", lambda: mixed(*inputs))
    assert calls == 2
    assert [t.stride() for t in ours] == [t.stride() for t in stock]
    assert_close_to_reference(ours, stock, mixed(*(t.double() for t in inputs)))


@needs["pointwise"]
@pytest.mark.parametrize("shape", [(40, 3, 24, 50, 50), (200, 3, 190, 5, 7)], ids=str)
@pytest.mark.parametrize(
    "wanted", [(True, False, False), (False, True, False), (False, False, True), (False, True, True)]
)
def test_grad_of_pointwise_where_wanted(shape, wanted):
    x, weight, bias = mixing(*shape)
    y, *every = mixed(x, weight, bias)
    ours, calls = counted("pointwise", lambda: mixed(x, weight, bias, wanted))
    assert calls == 2
    expected = [y, *(grad for grad, want in zip(every, wanted, strict=True) if want)]
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    without = mixed(x, weight, None)
    ours, calls = counted("pointwise", lambda: mixed(x, weight, None))
    assert calls == 2
    torch.testing.assert_close(ours, without, rtol=1e-4, atol=1e-4)


@needs["pointwise"]
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_pointwise_keeps_nan_and_infinity_where_pytorch_does(value):
    x, weight, bias = mixing(16, 2, 12, 9, 13)
    x[1, 3, 4, 5] = value
    stock = mixed(x, weight, bias)
    ours, calls = counted("pointwise", lambda: mixed(x, weight, bias))
    assert calls == 2
    torch.testing.assert_close(ours, stock, equal_nan=True, rtol=1e-5, atol=1e-4)


@needs["pointwise"]
def test_second_gradients_of_pointwise():
    def second(dtype=torch.float32):
        leaves = [t.to(dtype).requires_grad_() for t in mixing(12, 2, 16, 20, 12)]
        grads = torch.autograd.grad(F.conv2d(*leaves).square().mean(), leaves, create_graph=True)
        return torch.autograd.grad(sum(grad.square().mean() for grad in grads), leaves)

    ours, calls = counted("pointwise", second)
    assert calls >= 2
    assert_close_to_reference(ours, second(), second(torch.float64))


@needs["pointwise"]
def test_pointwise_outside_the_domain_is_pytorchs():
    x, weight, _ = mixing(16, 2, 16, 12, 12)
    last = torch.channels_last
    cases = [
        lambda x: F.conv2d(x, normal(16, 16, 3, 3)),
        lambda x: F.conv2d(x, weight, stride=2),
        lambda x: F.conv2d(x, weight, padding=1),
        lambda x: F.conv2d(x, weight[:, :8], groups=2),
        lambda x: F.conv2d(x, weight, dilation=2),
        lambda x: F.conv2d(x[:, :7], weight[:, :7]),
        lambda x: F.conv2d(x, weight[:7]),
        lambda x: F.conv2d(x[:, :, :3, :5], weight),
        lambda x: F.conv2d(x[:, :, ::2], weight),
        lambda x: F.conv2d(x.double(), weight.double()),
        lambda x: F.conv2d(x.bfloat16(), weight.bfloat16()),
        lambda x: F.conv2d(x.contiguous(memory_format=last), weight),
        lambda x: F.conv2d(x, torch.empty_like(weight, memory_format=last).copy_(weight)),
        lambda x: F.conv2d(x[:0], weight),
        lambda x: F.conv1d(x[:, :, 0], weight[..., 0]),
        lambda x: F.conv_transpose2d(x, weight),
        lambda x: F.conv2d(x, normal(16, 1, 3, 3), groups=16),
    ]
    for case in cases:

        def both(case=case):
            leaf = x.clone().requires_grad_()
            y = case(leaf)
            return [y.detach(), *torch.autograd.grad(y, leaf, normal(*y.shape, seed=5, dtype=y.dtype))]

        ours, calls = counted("pointwise", both)
        stock = both()
        assert calls == 0
        assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(ours, stock, strict=True))


@needs["pointwise"]
def test_errors_of_pointwise():
    x, weight, bias = mixing(16, 2, 16, 12, 12)
    cases = [
        lambda: F.conv2d(x, weight[:, :8]),
        lambda: F.conv2d(x, weight, padding=-1),
        lambda: F.conv2d(x, weight.double()),
        lambda: F.conv2d(x, weight, bias[:8]),
    ]
    for case in cases:
        with pytest.raises(RuntimeError) as stock:
            case()
        with tune.replaced("pointwise"), pytest.raises(RuntimeError) as ours:
            case()
        assert str(stock.value).splitlines()[0] in str(ours.value)


@needs["pointwise"]
def test_pointwise_of_any_number_of_threads_is_the_same():
    inputs = [mixing(40, 3, 24, 50, 50), mixing(200, 3, 190, 15, 17)]

    def results(threads):
        torch.set_num_threads(threads)
        return [t for given in inputs for t in mixed(*given)]

    with tune.replaced("pointwise"):
        first = results(1)
        for threads in (2, 3, 8):
            assert all(torch.equal(a, b) for a, b in zip(first, results(threads), strict=True))


@needs["pointwise"]
@needs["convolution"]
def test_convolutions_are_replaced_each_by_itself():
    """They share an operator: one stays when the other is taken out."""
    x, weight, _ = mixing(16, 2, 16, 12, 12)
    calls = lambda name: tune._library.calls(KERNEL[name])  # noqa: E731

    def both():
        F.conv2d(x, weight)
        F.conv2d(x, normal(16, 1, 3, 3), groups=16)
        return calls("convolution"), calls("pointwise")

    depthwise, pointwise = both()
    with tune.replaced("convolution"):
        with tune.replaced("pointwise"):
            assert both() == (depthwise + 1, pointwise + 1)
        assert both() == (depthwise + 2, pointwise + 1)
    assert both() == (depthwise + 2, pointwise + 1)


def upsampled(x, **arguments):
    """The larger image and a gradient of the smaller one."""
    leaf = x.detach().requires_grad_()
    y = F.interpolate(leaf, mode="bilinear", **arguments)
    grad = normal(*y.shape, seed=5, dtype=x.dtype)
    return [y.detach(), *torch.autograd.grad(y, leaf, grad)]


# shape, what F.interpolate is asked for
UPSAMPLED = [
    ((2, 3, 5, 7), {"scale_factor": 2}),
    ((1, 1, 40, 35), {"scale_factor": 4}),
    ((1, 20, 33, 16), {"scale_factor": (8, 2)}),
    ((3, 5, 1, 9), {"scale_factor": 3}),
    ((2, 2, 17, 1), {"scale_factor": 2}),
    ((2, 3, 9, 11), {"scale_factor": (1.5, 2.3)}),
    ((2, 3, 9, 11), {"scale_factor": (1.5, 2.3), "recompute_scale_factor": True}),
    ((1, 2, 13, 17), {"size": (50, 18)}),
]


@needs["upsample_bilinear2d"]
@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_matches_pytorch_upsample(dtype, align_corners):
    for shape, asked in UPSAMPLED:
        batch, channels, height, width = shape
        dense, apart = normal(*shape), normal(batch, height, channels + 1, width).transpose(1, 2)[:, 1:]
        for x in (dense.to(dtype), apart.to(dtype), dense[:1].to(dtype).expand(shape)):
            arguments = {**asked, "align_corners": align_corners}
            stock = upsampled(x, **arguments)
            ours, calls = counted("upsample_bilinear2d", lambda x=x, arguments=arguments: upsampled(x, **arguments))
            assert calls == 2
            assert [t.stride() for t in ours] == [t.stride() for t in stock]
            assert_close_to_reference(ours, stock, upsampled(x.double(), **arguments))


@needs["upsample_bilinear2d"]
def test_upsample_keeps_nan_and_infinity_where_pytorch_does():
    x, grad = normal(1, 1, 12, 20), normal(1, 1, 36, 40)
    x[0, 0, 3, 4], x[0, 0, 8, 9], grad[0, 0, 7, 8], grad[0, 0, 30, 39] = math.nan, math.inf, math.nan, math.inf

    def numbers():
        leaf = x.detach().requires_grad_()
        y = F.interpolate(leaf, scale_factor=(3, 2), mode="bilinear")
        return [y.detach(), *torch.autograd.grad(y, leaf, grad)]

    ours, calls = counted("upsample_bilinear2d", numbers)
    assert calls == 2
    torch.testing.assert_close(ours, numbers(), equal_nan=True)


@needs["upsample_bilinear2d"]
def test_second_gradients_of_upsample():
    x, grad, direction = normal(2, 3, 8, 9), normal(2, 3, 16, 18, seed=1), normal(2, 3, 8, 9, seed=2)

    def numbers(dtype):
        leaf, flows = x.to(dtype).requires_grad_(), grad.to(dtype).requires_grad_()
        y = F.interpolate(leaf, scale_factor=2, mode="bilinear", align_corners=True)
        (first,) = torch.autograd.grad(y, leaf, flows, create_graph=True)
        return [first.detach(), *torch.autograd.grad(first, flows, direction.to(dtype))]

    ours, calls = counted("upsample_bilinear2d", lambda: numbers(torch.float32))
    assert calls == 3
    assert_close_to_reference(ours, numbers(torch.float32), numbers(torch.float64))


@needs["upsample_bilinear2d"]
def test_upsample_outside_the_domain_is_pytorchs():
    x = normal(2, 3, 20, 20)
    last = x.contiguous(memory_format=torch.channels_last)
    cases = [
        lambda: F.interpolate(last, scale_factor=2, mode="bilinear"),
        lambda: F.interpolate(x.double(), scale_factor=2, mode="bilinear", align_corners=True),
        lambda: F.interpolate(x, scale_factor=0.5, mode="bilinear"),
        lambda: F.interpolate(x, size=(40, 20), mode="bilinear"),
        lambda: F.interpolate(x[..., ::2], scale_factor=2, mode="bilinear"),
        lambda: F.interpolate(x[:0], scale_factor=2, mode="bilinear"),
        lambda: F.interpolate(x, scale_factor=2, mode="bilinear", antialias=True),
        lambda: F.interpolate(x, scale_factor=2, mode="bicubic"),
        lambda: torch.ops.aten.upsample_bilinear2d(x, [30, 30], False, 0.5, 0.5),
        lambda: torch.ops.aten.upsample_bilinear2d.out(x, [40, 40], False, 2.0, 2.0, out=torch.empty(0)),
        lambda: torch.autograd.grad(
            F.interpolate(leaf := last.clone().requires_grad_(), scale_factor=2, mode="bilinear").sum(), leaf
        )[0],
    ]
    for case in cases:
        ours, calls = counted("upsample_bilinear2d", case)
        stock = case()
        assert calls == 0
        assert torch.equal(ours, stock) and ours.stride() == stock.stride()


@needs["upsample_bilinear2d"]
def test_errors_of_upsample():
    x, aten = normal(2, 3, 8, 8), torch.ops.aten
    cases = [
        lambda: aten.upsample_bilinear2d(x, [0, 16], False),
        lambda: aten.upsample_bilinear2d(x, [16], False),
        lambda: aten.upsample_bilinear2d(x[0], [16, 16], False),
        lambda: aten.upsample_bilinear2d(x.long(), [16, 16], False),
        lambda: aten.upsample_bilinear2d_backward(x, [16, 16], [2, 3, 4, 4], False),
        lambda: aten.upsample_bilinear2d_backward(x, [8, 8], [2, 3, 4], False),
    ]
    for case in cases:
        with pytest.raises(RuntimeError) as stock:
            case()
        with tune.replaced("upsample_bilinear2d"), pytest.raises(RuntimeError) as ours:
            case()
        assert str(stock.value).splitlines()[0] in str(ours.value)


@needs["upsample_bilinear2d"]
def test_upsample_under_vmap_and_of_any_number_of_threads():
    x = normal(4, 2, 3, 30, 21)

    def larger(threads):
        torch.set_num_threads(threads)
        return torch.func.vmap(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"))(x)

    stock = larger(2)
    with tune.replaced("upsample_bilinear2d"):
        first = larger(1)
        assert all(torch.equal(first, larger(threads)) for threads in (2, 3, 8))
    torch.testing.assert_close(first, stock)


def normalized(x, weight, bias, mean, var, momentum=0.1, eps=1e-5):
    """y, what is saved for backward and the running statistics after it."""
    running = [None if t is None else t.clone() for t in (mean, var)]
    results = torch.native_batch_norm(x, weight, bias, *running, True, momentum, eps)
    return [*results, *(t for t in running if t is not None)]


def of_channels(channels, dtype=torch.float32):
    """weight, bias, running mean and variance"""
    weight, bias, mean, var = (normal(channels, seed=seed, dtype=dtype) for seed in range(4))
    return weight, bias, mean, var.square()


IMAGES = [(2, 3, 4, 4), (5, 7, 3, 17), (3, 20, 5, 6, 7), (1, 4, 100), (6, 1, 33), (4, 2, 130, 131)]


@needs["batch_norm"]
@pytest.mark.parametrize("shape", IMAGES, ids=str)
def test_matches_reference_batch_norm(shape):
    for mean, scale, eps in ((0.0, 1.0, 1e-5), (1e4, 1.0, 0.0), (-3.0, 1e-4, 1e-3)):
        x, (weight, bias, *running) = scale * normal(*shape) + mean, of_channels(shape[1])
        for arguments in ((weight, bias, *running), (None, None, *running), (weight, None, None, None)):
            stock = normalized(x, *arguments, 0.3, eps)
            ours, calls = counted("batch_norm", lambda a=arguments, x=x, eps=eps: normalized(x, *a, 0.3, eps))
            assert calls == 1
            assert [t.stride() for t in ours] == [t.stride() for t in stock]
            doubles = (None if t is None else t.double() for t in arguments)
            assert_close_to_reference(ours, stock, normalized(x.double(), *doubles, 0.3, eps))


@needs["batch_norm"]
@pytest.mark.parametrize("outlier", [1e4, -3e9])
def test_matches_reference_batch_norm_of_large_means(outlier):
    """More digits than PyTorch's y has, also where the first value, which is taken off all others, is far from them."""
    x = normal(2, 3, 60, 70) + 1e4
    x[0, 1, 0, 0] = outlier
    ours, calls = counted("batch_norm", lambda: F.batch_norm(x, None, None, training=True))
    assert calls == 1
    exact = F.batch_norm(x.double(), None, None, training=True)
    torch.testing.assert_close(ours.double(), exact, rtol=3e-7, atol=3e-7)


@needs["batch_norm"]
@pytest.mark.parametrize("value", [0.0, 3.7, -1e30])
def test_known_values_of_batch_norm(value):
    x, (weight, bias, *running) = torch.full((3, 4, 5, 5), value), of_channels(4)
    for eps, invstd in ((0.0, 0.0), (0.25, 2.0)):
        (y, *saved, mean, var), calls = counted(
            "batch_norm", lambda eps=eps: normalized(x, weight, bias, *running, 0.5, eps)
        )
        assert calls == 1
        assert torch.equal(y, bias.view(1, 4, 1, 1).expand_as(x))
        assert torch.equal(saved[0], x[0, :, 0, 0]) and torch.equal(saved[1], torch.full((4,), invstd))
        torch.testing.assert_close(mean, running[0] / 2 + value / 2)
        torch.testing.assert_close(var, running[1] / 2)
    signs = torch.tensor([4.0, 2.0]).repeat(3, 4, 8)
    (y, *saved), _ = counted("batch_norm", lambda: normalized(signs, weight, None, None, None, 0.5, 0.0))
    torch.testing.assert_close(y, (signs - 3) * weight.view(4, 1), rtol=1e-6, atol=0)
    assert saved[0].tolist() == [3] * 4 and saved[1].tolist() == [1] * 4


@needs["batch_norm"]
def test_grad_matches_reference_batch_norm():
    """PyTorch's backward reads what our forward saved."""
    x, (weight, bias, *_) = normal(4, 6, 9, 11) + 2, of_channels(6)
    grad, direction = normal(4, 6, 9, 11, seed=5), normal(4, 6, 9, 11, seed=6)

    def numbers(dtype):
        leaves = [t.to(dtype).requires_grad_() for t in (x, weight, bias)]
        y = F.batch_norm(leaves[0], None, None, *leaves[1:], training=True)
        first = torch.autograd.grad(y, leaves, grad.to(dtype), create_graph=True)
        second = torch.autograd.grad(first[0], leaves[:2], direction.to(dtype))
        return [y.detach(), *(t.detach() for t in first), *second]

    ours, calls = counted("batch_norm", lambda: numbers(torch.float32))
    assert calls == 1
    assert_close_to_reference(ours, numbers(torch.float32), numbers(torch.float64))


@needs["batch_norm"]
def test_batch_norm_keeps_nan_and_infinity_where_pytorch_does():
    x, (weight, bias, *running) = normal(2, 6, 5, 5), of_channels(6)
    x[0, 0, 0, 0], x[1, 1, 2, 3], x[0, 2, 0, 0], x[1, 3, 4, 4] = math.nan, math.nan, math.inf, -math.inf
    x[0, 4, 0, 0], x[0, 4, 4, 0] = math.inf, -math.inf
    ours, calls = counted("batch_norm", lambda: normalized(x, weight, bias, *running))
    assert calls == 1
    torch.testing.assert_close(ours, normalized(x, weight, bias, *running), equal_nan=True)


@needs["batch_norm"]
@pytest.mark.parametrize("momentum", [0.1, None, 1.0])
def test_modules_of_batch_norm(momentum):
    def numbers():
        found = []
        for dimensions, module in enumerate((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), 1):
            layer = module(7, momentum=momentum)
            for seed in range(3):
                found.append(layer(normal(3, 7, *([6] * (dimensions - 1)), 20, seed=seed) + seed).detach())
            found += [layer.running_mean, layer.running_var, layer.num_batches_tracked]
            found.append(layer.eval()(normal(3, 7, *([6] * dimensions))).detach())
        return found

    stock = numbers()
    ours, calls = counted("batch_norm", numbers)
    assert calls == 9
    torch.testing.assert_close(ours, stock)


@needs["batch_norm"]
def test_instance_norm():
    x, (weight, bias, *running) = normal(3, 5, 8, 9), of_channels(5)

    def numbers():
        mean, var = (t.clone() for t in running)
        leaf = x.clone().requires_grad_()
        y = F.instance_norm(leaf, mean, var, weight, bias, momentum=0.2)
        return [y.detach(), mean, var, F.instance_norm(x), *torch.autograd.grad(y, leaf, x)]

    stock = numbers()
    ours, calls = counted("batch_norm", numbers)
    assert calls == 2
    torch.testing.assert_close(ours, stock)


@needs["batch_norm"]
def test_batch_norm_counts_versions_as_pytorch_does():
    """Of the running statistics, whose change autograd does not see in PyTorch either."""

    def versions():
        running = of_channels(3)[2:]
        F.batch_norm(normal(2, 3, 6, 7).requires_grad_(), *running, training=True)
        return [t._version for t in running]

    stock = versions()
    ours, calls = counted("batch_norm", versions)
    assert calls == 1 and ours == stock


@needs["batch_norm"]
def test_batch_norm_outside_the_domain_is_pytorchs():
    x, (weight, bias, *running) = normal(2, 6, 8, 9), of_channels(6)
    apart = normal(6, 2)[:, 0]
    half = x.bfloat16()
    cases = [
        lambda: normalized(x.contiguous(memory_format=torch.channels_last), weight, bias, *running),
        lambda: normalized(x.mT, weight, bias, *running),
        lambda: normalized(x[:, :, ::2], weight, bias, *running),
        lambda: normalized(x.double(), *(t.double() for t in (weight, bias, *running))),
        lambda: normalized(half, weight, bias, *running),
        lambda: normalized(half, *(t.bfloat16() for t in (weight, bias, *running))),
        lambda: normalized(x, apart, bias, *running),
        lambda: torch.native_batch_norm(x, weight, bias, apart, running[1], True, 0.0, 1e-5),
        lambda: normalized(x[..., :1, :].contiguous(), weight, bias, *running),
        lambda: normalized(x[..., 0, 0].contiguous(), weight, bias, *running),
        lambda: normalized(x[:1, :, :1, :1].contiguous(), None, None, *running),  # a variance of 0 / 0
        lambda: torch.native_batch_norm(x, weight, bias, *running, False, 0.1, 1e-5),
        lambda: torch.native_batch_norm(x, None, None, *running, False, 0.1, 1e-5),
    ]
    for case in cases:
        ours, calls = counted("batch_norm", case)
        assert calls == 0
        for a, b in zip(ours, case(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
            assert a.stride() == b.stride()


@needs["batch_norm"]
def test_errors_of_batch_norm():
    x, (weight, bias, *running) = normal(2, 6, 8, 9), of_channels(6)
    cases = [
        lambda: F.batch_norm(x, *running, weight[:5], training=True),
        lambda: F.batch_norm(x, running[0][:5], running[1], training=True),
        lambda: torch.native_batch_norm(x[:0], weight, bias, *running, True, 0.1, 1e-5),
        lambda: torch.native_batch_norm(x.long(), weight, bias, *running, True, 0.1, 1e-5),
        lambda: torch.native_batch_norm(x, weight.double(), bias, *running, True, 0.1, 1e-5),
    ]
    for case in cases:
        with pytest.raises(RuntimeError) as stock:
            case()
        with tune.replaced("batch_norm"), pytest.raises(RuntimeError) as ours:
            case()
        assert str(stock.value).splitlines()[0] in str(ours.value)


# Bits, as text, of y and the statistics of images with few channels and many, and ends that fill no vector.
BATCH_NORM_BITS = """
import hashlib, torch
from camox_ops.train import tune
bits = hashlib.sha256()
for shape in ((2, 3, 230, 231), (9, 40, 7, 7), (4, 64, 33), (1, 2, 300, 100)):
    x = torch.arange(1, 1 + torch.Size(shape).numel()).double().sqrt().mul(1e3).frac().add(2).float().view(shape)
    weight = x.flatten()[: shape[1]].clone()
    with tune.replaced("batch_norm"):
        running = weight.clone()
        for t in (*torch.native_batch_norm(x, weight, weight, running, None, True, 0.1, 1e-5), running):
            bits.update(t.numpy().tobytes())
found = bits.hexdigest()
"""


@needs["batch_norm"]
@pytest.mark.parametrize("isa", [ISAS[0], *(pytest.param(isa, marks=pytest.mark.slow) for isa in ISAS[1:])])
def test_batch_norm_gives_the_same_bits_everywhere(isa):
    found = set()
    for threads in (1, 2, 3, 8):
        torch.set_num_threads(threads)
        exec(BATCH_NORM_BITS, here := {})
        found.add(here["found"])
    assert len(found) == 1
    if isa != cx._C.isa():
        elsewhere = run_python_with_torch(BATCH_NORM_BITS + "print(found)", CAMOX_FORCE_ISA=isa)
        assert {elsewhere.strip()} == found


@needs["batch_norm"]
def test_batch_norm_under_vmap():
    x, (weight, bias, *_) = normal(3, 4, 5, 6, 7), of_channels(5)

    def of_each():
        return torch.func.vmap(lambda x: F.batch_norm(x, None, None, weight, bias, True))(x)

    stock = of_each()
    with tune.replaced("batch_norm"):
        torch.testing.assert_close(of_each(), stock)


def softened(x, dim, function=torch.softmax, grad=None):
    """softmax or log_softmax and the gradient of x."""
    leaf = x.detach().requires_grad_()
    y = function(leaf, dim)
    grad = normal(*y.shape, seed=5, dtype=x.dtype) if grad is None else grad
    return [y.detach(), *torch.autograd.grad(y, leaf, grad)]


# shape, dim, how many of forward and backward are replaced with AVX-512 and with less
SOFTENED = [
    *(((rows, n), -1, 2, 2) for n in (1, 2, 3, 4, 5, 7) for rows in (1, 17, 200)),
    *(((rows, n), 1, 2, 1) for n in (8, 9, 12, 15) for rows in (5, 64, 131)),
    *(((2, n, inner), 1, 1, 1) for n in (1, 2, 21, 64) for inner in (16, 63, 130)),
    ((5, 3, 40), 0, 1, 1),
    ((2, 10, 1, 1), 1, 2, 1),
    ((7,), 0, 2, 2),
]


@needs["softmax"]
@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_matches_reference_softmax(dtype, function):
    for shape, dim, with_avx512, with_less in SOFTENED:
        dense, backwards = 4 * normal(*shape, dtype=dtype), 4 * normal(*shape[::-1], dtype=dtype)
        for x in (dense, backwards.permute(*reversed(range(dense.dim()))), dense[:1].expand(shape)):
            stock = softened(x, dim, function)
            ours, calls = counted("softmax", lambda x=x, dim=dim: softened(x, dim, function))
            assert calls == (with_avx512 if cx._C.isa() == "avx512" else with_less)
            assert [t.stride() for t in ours] == [t.stride() for t in stock]
            assert_close_to_reference(ours, stock, softened(x.double(), dim, function))


@needs["softmax"]
@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax])
def test_softmax_keeps_nan_and_infinity_where_pytorch_does(function):
    rows = 3 * normal(40, 6)
    rows[3, 2], rows[7, 0], rows[9, 5], rows[11] = math.nan, math.inf, -math.inf, -math.inf
    rows[13, 1:], rows[20], rows[21, 3], rows[22, 0] = -math.inf, 3e38, -3e38, -200.0
    for x, dim in ((rows, 1), (rows.t().contiguous(), 0)):
        ours, calls = counted("softmax", lambda x=x, dim=dim: softened(x, dim, function))
        assert calls >= 1
        torch.testing.assert_close(ours, softened(x, dim, function), equal_nan=True)


@needs["softmax"]
@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax])
def test_matches_reference_softmax_of_long_rows(function):
    """The last one is written past the caches, its rows beginning anywhere in a vector."""
    for shape, with_gradient in (((9, 128), False), ((33, 131), False), ((3, 5, 1023), False), ((65, 130_001), True)):
        dense = 4 * normal(*shape)
        for x in (dense, 4 * normal(*shape[::-1]).permute(*reversed(range(len(shape)))))[: 1 if with_gradient else 2]:
            stock = softened(x, -1, function)
            ours, calls = counted("softmax", lambda x=x: softened(x, -1, function))
            assert calls == (2 if with_gradient and function is torch.log_softmax else 1)
            assert [t.stride() for t in ours] == [t.stride() for t in stock]
            assert_close_to_reference(ours, stock, softened(x.double(), -1, function))


@needs["softmax"]
@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax])
def test_long_softmax_keeps_nan_and_infinity_where_pytorch_does(function):
    rows = 3 * normal(40, 333)
    rows[3, 200], rows[7, 0], rows[8, 332], rows[9, 5], rows[11] = math.nan, math.inf, math.nan, -math.inf, -math.inf
    rows[13, 1:], rows[14, :-1], rows[20], rows[21, 3], rows[22, 0] = -math.inf, -math.inf, 3e38, -3e38, -200.0
    rows[23], rows[24, 150:], rows[25, 300] = torch.finfo(rows.dtype).min, -1e30, 1e5
    ours, calls = counted("softmax", lambda: function(rows, 1))
    assert calls == 1
    torch.testing.assert_close(ours, function(rows, 1), equal_nan=True)


@needs["softmax"]
def test_gradients_of_softmax_of_any_layout():
    """Of sums, whose gradient has strides of 0, of a transpose, and second ones."""
    x = normal(30, 6)
    cases = [
        lambda x: softened(x, 1, grad=x.new_ones(()).expand(30, 6)),
        lambda x: softened(x, 1, grad=normal(6, 30, seed=5).to(x.dtype).t()),
        lambda x: [torch.autograd.functional.hessian(lambda x: torch.softmax(x, 1).square().sum(), x[:4])],
        lambda x: [torch.func.vmap(torch.func.grad(lambda x: torch.log_softmax(x, 0)[2]))(x)],
    ]
    for case in cases:
        ours, calls = counted("softmax", lambda case=case: case(x))
        assert calls >= 2
        assert_close_to_reference(ours, case(x), case(x.double()))


@needs["softmax"]
def test_softmax_in_losses_and_attention():
    logits, classes = normal(70, 10), torch.arange(70) % 10
    maps, pixels = normal(2, 5, 9, 11), torch.arange(2 * 9 * 11).view(2, 9, 11) % 5
    q = normal(8, 4, 6, 12)

    def attention(q):
        with sdpa_kernel(SDPBackend.MATH):  # which PyTorch takes where there is dropout
            return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    cases = [
        lambda to: [F.cross_entropy(to(logits), classes, label_smoothing=0.1)],
        lambda to: [F.cross_entropy(to(maps), pixels)],
        lambda to: [attention(to(q))],
        lambda to: [F.softmin(to(logits), dim=1)],
    ]
    for case in cases:
        ours, calls = counted("softmax", lambda case=case: case(lambda x: x.clone().requires_grad_()))
        assert calls == 1
        stock, truth = case(lambda x: x), case(lambda x: x.double())
        assert_close_to_reference([t.detach() for t in ours], stock, truth)


@needs["softmax"]
def test_softmax_outside_the_domain_is_pytorchs():
    rows, columns = normal(20, 6), normal(2, 65, 40)
    cases = [
        lambda: torch.softmax(rows.double(), 1),
        lambda: torch.softmax(normal(20, 16), 1),
        lambda: torch.softmax(normal(20, 127), 1),
        lambda: torch.softmax(normal(20, 200, dtype=torch.bfloat16), 1),
        lambda: torch.ops.aten._log_softmax_backward_data(normal(20, 200), normal(20, 200), 1, torch.float32),
        lambda: torch.ops.aten._softmax_backward_data(*2 * [normal(65, 130_001)], 1, torch.float32),
        lambda: torch.log_softmax(columns, 1),
        lambda: torch.softmax(columns[:, :, :15].contiguous(), 1),
        lambda: torch.softmax(rows[:0], 1),
        lambda: torch.softmax(rows[0, 0], 0),
        lambda: torch.softmax(rows.bfloat16(), 1, dtype=torch.float64),
        lambda: torch.ops.aten._softmax.out(rows, 1, False, out=torch.empty(20, 6)),
        lambda: torch.ops.aten._softmax_backward_data(columns, columns, 1, torch.float32),
        lambda: torch.ops.aten._log_softmax_backward_data(rows.double(), rows.double(), 1, torch.float64),
    ]
    for case in cases:
        ours, calls = counted("softmax", case)
        stock = case()
        assert calls == 0
        assert torch.equal(ours, stock) and ours.stride() == stock.stride()


@needs["softmax"]
def test_errors_of_softmax():
    rows, aten = normal(20, 6), torch.ops.aten
    cases = [
        lambda: torch.softmax(rows, 2),
        lambda: torch.log_softmax(rows, -3),
        lambda: torch.softmax(rows.long(), 1),
        lambda: aten._softmax(rows.half(), 1, True),
        lambda: aten._softmax_backward_data(rows, rows[:4], 1, torch.float32),
        lambda: aten._log_softmax_backward_data(rows, rows.double(), 1, torch.float64),
    ]
    for case in cases:
        with pytest.raises((RuntimeError, IndexError)) as stock:
            case()
        with tune.replaced("softmax"), pytest.raises((RuntimeError, IndexError)) as ours:
            case()
        assert str(stock.value).splitlines()[0] in str(ours.value)


@needs["softmax"]
def test_softmax_of_any_number_of_threads_is_the_same():
    def numbers(threads):
        torch.set_num_threads(threads)
        inputs = normal(30_000, 6), normal(3, 20, 40, 60), normal(65, 130_001)
        return [part for x in inputs for part in softened(x, 1, torch.log_softmax)]

    with tune.replaced("softmax"):
        first = numbers(1)
        for threads in (2, 3, 8):
            assert all(torch.equal(a, b) for a, b in zip(numbers(threads), first, strict=True))


def copied(x, factors):
    """x with every pixel factors[0] times in its column and factors[1] times in its row."""
    return x.repeat_interleave(factors[0], 2).repeat_interleave(factors[1], 3)


def summed(grad, factors):
    """The adjoint of copied."""
    batch, channels, height, width = grad.shape
    rows, columns = factors
    return grad.view(batch, channels, height // rows, rows, width // columns, columns).sum((3, 5))


def same_bits(a, b):
    integers = {4: torch.int32, 2: torch.int16}[a.element_size()]
    return torch.equal(a.contiguous().view(integers), b.contiguous().view(integers))


# shape, factors: whole vectors and parts of one, one row or column, few planes, of which bands are computed
NEAREST = [
    ((2, 3, 5, 7), (2, 2)),
    ((1, 1, 40, 35), (4, 4)),
    ((1, 2, 33, 16), (3, 3)),
    ((2, 3, 9, 64), (2, 3)),
    ((3, 5, 1, 9), (1, 2)),
    ((2, 2, 17, 1), (5, 8)),
    ((1, 20, 6, 33), (8, 6)),
    ((2, 3, 4, 4), (2, 2)),
    ((1, 3, 8, 130), (1, 7)),
    ((2, 3, 8, 9), (1, 1)),
    ((1, 2, 1, 1), (2, 4)),
]


@needs["upsample_nearest2d"]
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_matches_reference_upsample_nearest(dtype, mode):
    def larger(x, asked):
        leaf = x.detach().requires_grad_()
        y = F.interpolate(leaf, mode=mode, **asked)
        return [y.detach(), *torch.autograd.grad(y, leaf, normal(*y.shape, seed=5, dtype=dtype))]

    for shape, factors in NEAREST:
        batch, channels, height, width = shape
        apart = normal(batch, height + 2, channels + 1, width).transpose(1, 2)[:, 1:, 1:-1]
        dense, repeated = normal(*shape), normal(*shape[1:]).expand(shape)
        for x in (dense.to(dtype), apart.to(dtype), repeated.to(dtype), dense.to(dtype)[:, :, :1].expand(shape)):
            size = [side * factor for side, factor in zip(shape[2:], factors, strict=True)]
            for asked in ({"scale_factor": tuple(map(float, factors))}, {"size": size}):
                stock = larger(x, asked)
                ours, calls = counted("upsample_nearest2d", lambda x=x, asked=asked: larger(x, asked))
                assert calls == 2
                assert [t.stride() for t in ours] == [t.stride() for t in stock]
                assert same_bits(ours[0], stock[0]) and same_bits(ours[0], copied(x, factors))
                grad = normal(*stock[0].shape, seed=5, dtype=dtype)
                assert_close_to_reference(ours[1], stock[1], summed(grad.double(), factors))


@needs["upsample_nearest2d"]
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_known_values_of_upsample_nearest(dtype):
    """Every bit pattern of a half type, NaN with its payload among them, and outputs that exceed the caches."""
    integers = torch.int32 if dtype == torch.float32 else torch.int16
    patterns = (torch.arange(1 << 16, dtype=torch.int32) - (1 << 15)).mul(1 if dtype != torch.float32 else 65537)
    x = patterns.to(integers).view(dtype).view(1, 1, 256, 256)
    large = normal(1, 2 if dtype == torch.float32 else 4, 1024, 1024).to(dtype)
    for image in (x, large):
        ours, calls = counted("upsample_nearest2d", lambda image=image: F.interpolate(image, scale_factor=2))
        assert calls == 1 and same_bits(ours, copied(image, (2, 2)))
    y, size = ours, list(large.shape)  # sums of four equal numbers are exact
    backward = torch.ops.aten.upsample_nearest2d_backward
    grad, calls = counted("upsample_nearest2d", lambda: backward(y, list(y.shape[2:]), size, None, None))
    assert calls == 1 and torch.equal(grad, 4 * large)


@needs["upsample_nearest2d"]
def test_upsample_nearest_takes_the_pixels_that_pytorch_takes():
    """Of rows of all lengths: PyTorch computes their indices in floating point."""
    calls = 0
    for factor in range(1, 9):
        for length in (*range(1, 100), 1023, 4097, 65535, (1 << 20) // factor):
            x = torch.arange(length, dtype=torch.float32).view(1, 1, 1, length)
            for scale in (None, float(factor)):
                for operator in (torch.ops.aten.upsample_nearest2d, torch.ops.aten._upsample_nearest_exact2d):
                    arguments = x, [1, length * factor], None, scale
                    ours, served = counted("upsample_nearest2d", lambda f=operator, a=arguments: f(*a))
                    calls += served
                    assert torch.equal(ours, operator(*arguments))
    assert calls == 8 * 103 * 4


@needs["upsample_nearest2d"]
def test_upsample_nearest_keeps_nan_and_infinity_where_pytorch_does():
    x, grad = normal(1, 1, 12, 20), normal(1, 1, 36, 40)
    x[0, 0, 3, 4], x[0, 0, 8, 9], grad[0, 0, 7, 8], grad[0, 0, 30, 39] = math.nan, math.inf, math.nan, math.inf

    def numbers():
        leaf = x.detach().requires_grad_()
        y = F.interpolate(leaf, scale_factor=(3, 2))
        return [y.detach(), *torch.autograd.grad(y, leaf, grad)]

    ours, calls = counted("upsample_nearest2d", numbers)
    assert calls == 2
    torch.testing.assert_close(ours, numbers(), equal_nan=True)


@needs["upsample_nearest2d"]
@pytest.mark.parametrize("factors", [(2, 2), (4, 4), (3, 2), (2, 6), (1, 5), (8, 8)], ids=str)
def test_grad_of_upsample_nearest(factors):
    """First and second gradients."""
    x, direction = normal(2, 3, 8, 9), normal(2, 3, 8, 9, seed=2)
    grad = normal(2, 3, 8 * factors[0], 9 * factors[1], seed=1)

    def numbers(dtype):
        leaf, flows = x.to(dtype).requires_grad_(), grad.to(dtype).requires_grad_()
        y = F.interpolate(leaf, scale_factor=factors)
        (first,) = torch.autograd.grad(y, leaf, flows, create_graph=True)
        return [first.detach(), *torch.autograd.grad(first, flows, direction.to(dtype))]

    ours, calls = counted("upsample_nearest2d", lambda: numbers(torch.float32))
    assert calls == 3
    assert_close_to_reference(ours, numbers(torch.float32), numbers(torch.float64))


@needs["upsample_nearest2d"]
def test_upsample_nearest_outside_the_domain_is_pytorchs():
    x, aten = normal(2, 3, 20, 20), torch.ops.aten
    last = x.contiguous(memory_format=torch.channels_last)
    cases = [
        lambda: F.interpolate(last, scale_factor=2),
        lambda: F.interpolate(last, scale_factor=2, mode="nearest-exact"),
        lambda: F.interpolate(x.double(), scale_factor=2),
        lambda: F.interpolate(x.mul(50).byte(), scale_factor=2),
        lambda: F.interpolate(x, scale_factor=0.5),
        lambda: F.interpolate(x, scale_factor=1.5),
        lambda: F.interpolate(x, scale_factor=9),
        lambda: F.interpolate(x, size=(40, 50)),
        lambda: F.interpolate(x[:, :, :3, :3], scale_factor=2.4),  # 7 pixels
        lambda: F.interpolate(x[:, :, :3, :3], scale_factor=2.2),  # 6, by another scale
        lambda: F.interpolate(x.mT, scale_factor=2),
        lambda: F.interpolate(x[..., ::2], scale_factor=2),
        lambda: F.interpolate(x[:0], scale_factor=2),
        lambda: F.interpolate(x[0], scale_factor=2),
        lambda: F.interpolate(x[None], scale_factor=2),
        lambda: aten.upsample_nearest2d(x, [40, 40], 3.0, 2.0),
        lambda: aten._upsample_nearest_exact2d(x, [40, 40], 2.0, 1.9),
        lambda: aten.upsample_nearest2d.out(x, [40, 40], 2.0, 2.0, out=torch.empty(0)),
        lambda: aten.upsample_nearest2d_backward(x, [20, 20], [2, 3, 8, 8], None, None),
        lambda: aten.upsample_nearest2d_backward(last, [20, 20], [2, 3, 10, 10], None, None),
        lambda: aten._upsample_nearest_exact2d_backward(x.mT, [20, 20], [2, 3, 10, 10], None, None),
    ]
    for case in cases:
        ours, calls = counted("upsample_nearest2d", case)
        stock = case()
        assert calls == 0
        assert torch.equal(ours, stock) and ours.stride() == stock.stride()


@needs["upsample_nearest2d"]
def test_errors_of_upsample_nearest():
    x, aten = normal(2, 3, 8, 8), torch.ops.aten
    cases = [
        lambda: aten.upsample_nearest2d(x, [0, 16]),
        lambda: aten.upsample_nearest2d(x, [16]),
        lambda: aten.upsample_nearest2d(x[0], [16, 16]),
        lambda: aten.upsample_nearest2d(x.long(), [16, 16]),
        lambda: aten._upsample_nearest_exact2d(x, [-8, 16]),
        lambda: aten.upsample_nearest2d_backward(x, [16, 16], [2, 3, 4, 4]),
        lambda: aten.upsample_nearest2d_backward(x, [8, 8], [2, 3, 4]),
        lambda: aten._upsample_nearest_exact2d_backward(x, [8, 8], [2, 4, 4, 4]),
    ]
    for case in cases:
        with pytest.raises(RuntimeError) as stock:
            case()
        with tune.replaced("upsample_nearest2d"), pytest.raises(RuntimeError) as ours:
            case()
        assert str(stock.value).splitlines()[0] in str(ours.value)


@needs["upsample_nearest2d"]
def test_upsample_nearest_under_vmap_and_of_any_number_of_threads():
    x = normal(4, 2, 3, 30, 21)

    def results(threads):
        torch.set_num_threads(threads)
        leaf = x.flatten(0, 1).requires_grad_()
        y = F.interpolate(leaf, scale_factor=3)
        (grad,) = torch.autograd.grad(y, leaf, normal(*y.shape, seed=1))
        return torch.func.vmap(lambda x: F.interpolate(x, scale_factor=2))(x), y.detach(), grad

    stock = results(2)
    with tune.replaced("upsample_nearest2d"):
        first = results(1)
        for threads in (2, 3, 8):
            assert all(torch.equal(a, b) for a, b in zip(first, results(threads), strict=True))
    torch.testing.assert_close(first, stock)


class Block(nn.Module):
    def __init__(self, p=0.1):
        super().__init__()
        self.first, self.second, self.p = nn.Linear(64, 128), nn.Linear(128, 64), p
        self.convolution = nn.Conv2d(40, 40, 3, padding=1, groups=40)

    def forward(self, x):
        x = x + self.convolution(x.view(-1, 40, 8, 8)).view(x.shape) / 8
        y = self.second(F.dropout(F.gelu(self.first(x)), self.p, self.training))
        return x + y @ y.mT @ F.avg_pool1d(x, 9, 1, 4) / 64


@pytest.fixture
def block():
    torch.manual_seed(0)
    return Block(p=0.0)


INPUT = (4, 40, 64)


def step(model, x):
    model.zero_grad(set_to_none=True)
    loss = model(x).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def all_replaced():
    return tune.replaced(*(name for name in KERNEL if not why_not(name)))


def test_training_step_and_its_return(block):
    x = normal(*INPUT)
    stock = step(block, x)
    with all_replaced():
        ours = step(block, x)
    torch.testing.assert_close(ours, stock)
    for before, after in zip(stock, step(block, x), strict=True):
        assert torch.equal(before, after)


def test_inference_mode(block):
    x = normal(*INPUT)
    with torch.inference_mode():
        stock = block.eval()(x)
        with all_replaced():
            ours = block(x)
            assert ours.is_inference()
            block.train().p = 0.5
            assert not torch.equal(block(x), block(x))
    torch.testing.assert_close(ours, stock)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(block, dtype):
    x = normal(*INPUT)
    with torch.autocast("cpu", dtype=dtype):
        stock = step(block, x)
        with all_replaced():
            ours = step(block, x)
    assert [t.dtype for t in ours] == [t.dtype for t in stock]
    torch.testing.assert_close(ours, stock, rtol=2e-2, atol=1e-3)


def test_torch_func(block):
    x = normal(*INPUT)
    parameters = dict(block.named_parameters())

    def loss(parameters, x):
        return torch.func.functional_call(block, parameters, (x,)).square().mean()

    def numbers():
        grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
        value, tangent = torch.func.jvp(lambda x: loss(parameters, x), (x,), (torch.ones_like(x),))
        return [*grads.values(), value, tangent]

    stock = numbers()
    with all_replaced():
        torch.testing.assert_close(numbers(), stock)


@needs["bernoulli_"]
@pytest.mark.parametrize("randomness", ["different", "same"])
def test_vmap_of_dropout(randomness):
    def masks(x):
        return torch.func.vmap(lambda x: F.dropout(x, 0.5), randomness=randomness)(x)

    with tune.replaced("bernoulli_"):
        one, other = masks(torch.ones(2, 1000))
    assert torch.equal(one, other) == (randomness == "same")


@needs["bernoulli_"]
def test_checkpointing():
    model = Block(p=0.3)
    x = normal(*INPUT).requires_grad_()
    with all_replaced():
        torch.manual_seed(2)
        plain = torch.autograd.grad(model(x).square().sum(), x)
        torch.manual_seed(2)
        y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
        assert torch.equal(torch.autograd.grad(y.square().sum(), x)[0], plain[0])


class Tagged(torch.Tensor):
    pass


def test_tensor_subclasses_and_dispatch_modes(block):
    from torch.utils._python_dispatch import TorchDispatchMode

    names = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.append(str(function))
            return function(*args, **(kwargs or {}))

    x = normal(*INPUT)
    stock = block(x)
    block.train().p = 0.5
    with all_replaced():
        assert type(x.as_subclass(Tagged) @ x[0].mT) is Tagged
        with Recorder():
            block(x)
        block.p = 0.0
        torch.testing.assert_close(block(x.as_subclass(Tagged)).as_subclass(torch.Tensor), stock)
    assert {"aten.addmm.default", "aten.bernoulli_.float", "aten.avg_pool2d.default"} <= set(names)
    assert not [name for name in names if "stock" in name]


def test_meta_and_fake_tensors(block):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with all_replaced():
        assert (torch.empty(64, 64, device="meta") @ torch.empty(64, 64, device="meta")).shape == (64, 64)
        assert torch.empty(64, device="meta").bernoulli_(0.5).device.type == "meta"
        with FakeTensorMode():
            assert F.dropout(torch.empty(64, 64) @ torch.empty(64, 64), 0.5).shape == (64, 64)
            assert F.avg_pool2d(torch.empty(1, 64, 64), 7, 1, 2).shape == (1, 62, 62)
            assert F.max_pool2d(torch.empty(1, 64, 64), 3, 2, 1).shape == (1, 32, 32)
            for mode in ("bilinear", "nearest", "nearest-exact"):
                assert F.interpolate(torch.empty(1, 1, 8, 9), scale_factor=2, mode=mode).shape == (1, 1, 16, 18)


def test_profiler_sees_pytorchs_operators():
    x = normal(200, 200)

    def operators():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            F.dropout(x @ x, 0.5)
        return [event.key for event in seen.key_averages() if event.key.startswith("aten::")]

    stock = operators()
    with all_replaced():
        assert {"aten::mm", "aten::bernoulli_"} <= set(operators())
    assert operators() == stock


@each_backend
def test_compile(block, backend):
    x = normal(*INPUT)
    stock = step(block, x)
    compiled = torch.compile(block, backend=backend, fullgraph=True)
    with all_replaced():
        torch.testing.assert_close(step(compiled, x), stock)
        before = tune._library.calls(KERNEL["mm"])
        step(compiled, x)
        if not why_not("mm"):  # inductor calls the .out variants, which the replacement serves as well
            assert tune._library.calls(KERNEL["mm"]) > before
    torch.testing.assert_close(step(compiled, x), stock)


def test_two_threads(block):
    x = normal(*INPUT)
    stock = block(x).detach()
    outputs, errors = [], []

    def work():
        try:
            torch.set_num_threads(2)
            for _ in range(20):
                outputs.append(block(x).detach())
                F.dropout(x, 0.5)
        except Exception as error:
            errors.append(error)

    with all_replaced():
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors
    assert len(outputs) == 40
    for output in outputs:
        torch.testing.assert_close(output, stock)


class Products(torch.utils.data.Dataset):
    """Item i: a product, how often it was ours, and whether dropout drops about half."""

    def __len__(self):
        return 4

    def __getitem__(self, i):
        x = torch.full((64, 64), float(i))
        before = tune._library.calls(KERNEL["mm"])
        product = (x @ x)[0, 0]
        return product, tune._library.calls(KERNEL["mm"]) - before, F.dropout(torch.ones(10000), 0.5).mean()


def test_data_loader_workers():
    with all_replaced():
        found = list(torch.utils.data.DataLoader(Products(), num_workers=2, multiprocessing_context="fork"))
        assert Products()[3][0] == 64.0 * 9  # here, after the fork
    products, calls, means = ([float(item[part]) for item in found] for part in range(3))
    assert products == [64.0 * i * i for i in range(4)]
    assert why_not("mm") or calls == [1.0] * 4
    assert all(abs(mean - 1) < 0.1 for mean in means)
    assert len(set(means)) > 1


def test_tune_and_restore(block):
    x = normal(*INPUT)
    stock = step(block, x)
    generator = torch.get_rng_state()
    report = cx.train.tune_cpu(allocator=False)
    assert torch.equal(torch.get_rng_state(), generator)
    assert report.allocator is None
    assert [kernel.name for kernel in report.kernels] == list(KERNEL)
    for kernel in report.kernels:
        assert kernel.replaced == (kernel.reason == "")
        assert (kernel.gain is None or kernel.gain > 0) and kernel.domain and kernel.operators
        assert kernel.name in str(report)
        assert not kernel.replaced or kernel.gain >= tune.LEAST_GAIN
    replaced = sum(kernel.replaced for kernel in report.kernels)
    assert report.text.startswith(f"tune_cpu: {replaced} of" if replaced else "tune_cpu: no replacement helps")
    assert cx.train.tune_cpu(allocator=False) == report
    torch.testing.assert_close(step(block, x), stock)
    for _ in range(2):
        cx.train.restore_cpu()
        for before, after in zip(stock, step(block, x), strict=True):
            assert torch.equal(before, after)


def test_restored_kernels_are_pytorchs():
    x = normal(300, 300)

    def numbers():
        torch.manual_seed(1)
        images = F.avg_pool2d(x[None], 5, 1, 2), F.interpolate(x[None, None], size=(400, 500), mode="bilinear")
        copies = (F.interpolate(x[None, None], scale_factor=2, mode=mode) for mode in ("nearest", "nearest-exact"))
        pools = F.max_pool2d(x[None], 3, 2, 1, return_indices=True)
        return x @ x, torch.bmm(x[None], x[None]), torch.empty(1000).bernoulli_(0.4), *images, *copies, *pools

    stock = numbers()
    before = [tune._library.calls(kernel) for kernel in tune.KERNELS]
    with all_replaced():
        pass
    restored = numbers()
    assert all(torch.equal(a, b) for a, b in zip(stock, restored, strict=True))
    assert [tune._library.calls(kernel) for kernel in tune.KERNELS] == before


@pytest.mark.parametrize(
    ("others", "cpus", "said"),
    [
        (0.3, 1 << 20, "other processes used"),
        (0.2, 1 << 20, ""),
        (0.0, 1, "this process may use 1 CPU: try OMP_NUM_THREADS=1"),
    ],
)
def test_threads_without_a_cpu_each_are_not_measured(monkeypatch, others, cpus, said):
    threads, measured_on = torch.get_num_threads(), set()
    monkeypatch.setattr(tune, "_cores_of_others", lambda: others * threads)
    monkeypatch.setattr(tune, "usable_cpus", lambda: cpus)
    monkeypatch.setattr(tune, "_seconds", lambda probe: measured_on.add(torch.get_num_threads()) or 1.0)
    report = cx.train.tune_cpu(allocator=False)
    assert torch.get_num_threads() == threads
    if threads > 1 and any(kernel.gain for kernel in report.kernels):
        assert measured_on == ({1} if said else {threads})
        assert ("; measured on one, as " in report.text) is bool(said) and said in report.text
    assert cx.train.tune_cpu(allocator=False).text == report.text


def test_cores_of_others(monkeypatch, tmp_path):
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        used = tune._cores_of_others(0.3)
        busy.kill()
    assert tune.STAT.exists() and used > 0.2
    monkeypatch.setattr(tune, "STAT", tmp_path / "nothing")
    assert tune._cores_of_others() == 0
    (tmp_path / "nothing").write_text("cpu of another system\n")
    assert tune._cores_of_others() == 0


def test_report_where_nothing_helps(monkeypatch):
    monkeypatch.setattr(tune, "LEAST_GAIN", math.inf)
    report = cx.train.tune_cpu(allocator=False)
    assert report.text.startswith("tune_cpu: no replacement helps on this machine")
    assert not any(kernel.replaced for kernel in report.kernels)
    assert "left alone: " in str(report)


@pytest.mark.parametrize("kernel", tune.KERNELS, ids=lambda kernel: kernel.name)
def test_report_of_a_right_replacement(kernel):
    """It may be left alone because it is slower here, never because its probes are not exact."""
    if reason := why_not(kernel.name):
        pytest.skip(reason)
    with torch.no_grad():
        gain, _ = tune._measure(kernel)
    assert gain is not None


def test_report_of_a_wrong_replacement(monkeypatch):
    monkeypatch.setattr(torch, "equal", lambda a, b: False)
    reasons = {k.name: k.reason for k in cx.train.tune_cpu(allocator=False).kernels if not why_not(k.name)}
    assert all(reasons[name] == "the replacement gave another result" for name in {"mm", "bmm"} & reasons.keys())


def test_report_without_the_library(monkeypatch):
    monkeypatch.setattr(tune, "LIBRARY", tune.LIBRARY.with_name("nothing.so"))
    monkeypatch.setattr(tune, "_library", tune._Library())
    report = cx.train.tune_cpu(allocator=False)
    assert all(kernel.reason.startswith("nothing.so cannot be opened") for kernel in report.kernels)
    cx.train.restore_cpu()


def test_kernels_are_left_alone_where_not_asked_for():
    report = cx.train.tune_cpu(allocator=False, kernels=False)
    assert report.kernels == () and report.allocator is None
    assert report.text.startswith("tune_cpu: PyTorch's kernels were not asked for")


def test_environment_refuses(monkeypatch):
    monkeypatch.setenv("CAMOX_TUNE_CPU", "0")
    report = cx.train.tune_cpu()
    assert report.text == "tune_cpu: refused by CAMOX_TUNE_CPU=0 in the environment, nothing was changed"
    assert report.allocator is None and not any(kernel.replaced for kernel in report.kernels)


@pytest.mark.parametrize("arguments", [{"allocator": 1}, {"kernels": None}, {"kernels": "mm"}])
def test_errors(arguments):
    ((name, value),) = arguments.items()
    with pytest.raises(TypeError, match=f"tune_cpu: {name} must be a bool, got {value!r}"):
        cx.train.tune_cpu(**arguments)


@pytest.mark.parametrize(
    ("options", "before"),
    [
        pytest.param(["-W", "error"], "torch.ones(3)", id="late"),
        pytest.param([], "", id="early", marks=pytest.mark.slow),
    ],
)
def test_a_process(options, before):
    """Importing opens nothing, nothing goes to stderr, and the report says what came too late."""
    code = f"""
import torch, camox_ops as cx
{before}
with open('/proc/self/maps') as maps:
    print('libcamox_ops_tune' in maps.read())
print(cx.train.tune_cpu())
x = torch.randn(64, 64)
torch.nn.functional.dropout(x @ x, 0.5)
torch.nn.functional.avg_pool2d(x[None], 5, 1, 2)
torch.nn.functional.max_pool2d(x[None], 3, 2, 1)
torch.nn.functional.interpolate(x[None, None], scale_factor=2, mode="bilinear")
cx.train.restore_cpu()
cx.train.tune_cpu()
"""
    inherited = {k: v for k, v in os.environ.items() if k != "THP_MEM_ALLOC_ENABLE"}
    run = subprocess.run(
        [sys.executable, *options, "-c", code], capture_output=True, text=True, env=inherited, check=True
    )
    assert run.stderr == ""
    assert run.stdout.startswith("False\ntune_cpu: ")
    said = "tensors were made before" if before else "large tensors begin on pages"
    assert said in run.stdout or "not glibc" in run.stdout


@pytest.mark.parametrize(
    ("ours", "reason"),
    [
        ((0.5, 0.5), ""),
        ((0.98, 0.98), "ours is not 1.05x as fast in the mean on this machine (1.02x, 1.02x)"),
        ((0.5, 1.02), ""),
        ((0.25, 2.0), "ours is slower in a probe on this machine (4.00x, 0.50x)"),
    ],
)
def test_reason_for_a_kernel_left_alone(monkeypatch, ours, reason):
    class Library:
        in_place = False

        def put(self, kernel):
            self.in_place = True
            return ""

        def take(self, kernel):
            self.in_place = False

    class Kernel:
        exact = True

        @staticmethod
        def probes():
            return [lambda at=at: torch.tensor(at) for at in range(len(ours))]

    library = Library()
    monkeypatch.setattr(tune, "_library", library)
    monkeypatch.setattr(tune, "_seconds", lambda probe: ours[int(probe())] if library.in_place else 1.0)
    assert tune._measure(Kernel())[1] == reason
