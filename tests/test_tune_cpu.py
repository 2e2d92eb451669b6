"""tune_cpu: PyTorch's own kernels and their replacements give the same, and PyTorch's come back."""

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
from helpers import assert_close_to_reference, run_python
from torch import nn

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


@needs["mm"]
@pytest.mark.parametrize("isa", cx.supported_isas())
def test_products_of_every_instruction_set(isa):
    code = """
import torch
from camox_ops.train import tune
x = torch.arange(150 * 800).remainder(9).sub(4).float().view(150, 800)
y = torch.arange(800 * 130).remainder(7).sub(3).float().view(800, 130)
wanted = [a @ b for a, b in ((x, y), (y.t(), x.t()), (x.t().contiguous().t(), y), (x, y.t().contiguous().t()))]
with tune.replaced("mm"):
    ours = [a @ b for a, b in ((x, y), (y.t(), x.t()), (x.t().contiguous().t(), y), (x, y.t().contiguous().t()))]
    assert tune._library.calls(tune.KERNELS[0]) == 4
assert all(torch.equal(a, b) for a, b in zip(ours, wanted, strict=True))
print("same")
"""
    assert run_python(code, CAMOX_FORCE_ISA=isa).strip() == "same"


OPERATORS = ("mm", "addmm", "bmm", "baddbmm", "matmul", "nn.functional.linear", "einsum", "addbmm", "__rmatmul__")


@pytest.fixture(scope="session")
def operator_infos():
    """PyTorch's descriptions of its operators. Its test helpers want expecttest for a base class alone."""
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("expecttest") is None:
            stand_in = types.ModuleType("expecttest")
            stand_in.TestCase = unittest.TestCase
            patch.setitem(sys.modules, "expecttest", stand_in)
        from torch.testing._internal.common_methods_invocations import op_db
    return op_db


@needs["mm"]
@needs["bmm"]
@pytest.mark.parametrize("operator", OPERATORS)
def test_samples_of_pytorch(any_size, operator_infos, operator):
    """PyTorch's own samples of an operator, with and without."""
    infos = [info for info in operator_infos if info.name == operator]
    assert infos

    def results(info, sample, dtype):
        def to(value):
            return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

        leaf, args, kwargs = to(sample.input), tuple(map(to, sample.args)), sample.kwargs
        if not isinstance(leaf, torch.Tensor):
            return [info.op(type(leaf)(map(to, leaf)), *args, **kwargs).detach()]
        leaf = leaf.detach().requires_grad_()
        y = info.op(leaf, *args, **kwargs)
        (grad,) = torch.autograd.grad(y.sum(), leaf, allow_unused=True)
        return [y.detach()] + ([] if grad is None else [grad])

    seen = 0
    for info in infos:
        for sample in info.sample_inputs("cpu", torch.float32, requires_grad=False):
            stock = results(info, sample, torch.float32)
            with tune.replaced("mm", "bmm"):
                ours = results(info, sample, torch.float32)
            assert [t.stride() for t in ours] == [t.stride() for t in stock]
            assert_close_to_reference(ours, stock, results(info, sample, torch.float64))
            seen += 1
    assert seen


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


MASKS = """
import torch
from camox_ops.train import tune
found = []
with tune.replaced("bernoulli_"):
    for threads in (1, 2):
        torch.set_num_threads(threads)
        torch.manual_seed(7)
        ones = torch.empty(300_001).bernoulli_(0.3).nonzero().flatten()
        found.append((len(ones), int((ones * torch.arange(len(ones))).sum())))
"""


@needs["bernoulli_"]
@pytest.mark.parametrize("isa", cx.supported_isas())
def test_bernoulli_is_the_same_for_every_instruction_set(isa):
    here = {}
    exec(MASKS, here)
    assert here["found"][0] == here["found"][1]
    assert run_python(MASKS + "print(found)", CAMOX_FORCE_ISA=isa).strip() == str(here["found"])


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


class Block(nn.Module):
    def __init__(self, p=0.1):
        super().__init__()
        self.first, self.second, self.p = nn.Linear(64, 128), nn.Linear(128, 64), p

    def forward(self, x):
        y = self.second(F.dropout(F.gelu(self.first(x)), self.p, self.training))
        return x + y @ y.mT @ x / 64


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
    assert {"aten.addmm.default", "aten.bernoulli_.float"} <= set(names)
    assert not [name for name in names if "stock" in name]


def test_meta_and_fake_tensors(block):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with all_replaced():
        assert (torch.empty(64, 64, device="meta") @ torch.empty(64, 64, device="meta")).shape == (64, 64)
        assert torch.empty(64, device="meta").bernoulli_(0.5).device.type == "meta"
        with FakeTensorMode():
            assert F.dropout(torch.empty(64, 64) @ torch.empty(64, 64), 0.5).shape == (64, 64)


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


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
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
    """Item i: a product, and whether dropout drops about half."""

    def __len__(self):
        return 4

    def __getitem__(self, i):
        x = torch.full((64, 64), float(i))
        return (x @ x)[0, 0], F.dropout(torch.ones(10000), 0.5).mean()


def test_data_loader_workers():
    with all_replaced():
        found = list(torch.utils.data.DataLoader(Products(), num_workers=2, multiprocessing_context="fork"))
    assert [float(product) for product, _ in found] == [64.0 * i * i for i in range(4)]
    assert all(abs(float(mean) - 1) < 0.1 for _, mean in found)
    assert len({float(mean) for _, mean in found}) > 1


def test_fork():
    code = """
import os
import torch
from camox_ops.train import tune
torch.set_num_threads(1)
x = torch.arange(64 * 64).remainder(5).float().view(64, 64)
expected = x @ x
with tune.replaced("mm"):
    child = os.fork()
    if child == 0:
        served = tune._library.calls(tune.KERNELS[0])
        right = torch.equal(x @ x, expected) and tune._library.calls(tune.KERNELS[0]) == served + 1
        os._exit(0 if right else 1)
    _, status = os.waitpid(child, 0)
    assert torch.equal(x @ x, expected)
print(status)
"""
    if why_not("mm"):
        pytest.skip(why_not("mm"))
    assert run_python(code).strip() == "0"


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
    torch.manual_seed(1)
    stock = x @ x, torch.bmm(x[None], x[None]), torch.empty(1000).bernoulli_(0.4)
    before = [tune._library.calls(kernel) for kernel in tune.KERNELS]
    with all_replaced():
        pass
    torch.manual_seed(1)
    restored = x @ x, torch.bmm(x[None], x[None]), torch.empty(1000).bernoulli_(0.4)
    assert all(torch.equal(a, b) for a, b in zip(stock, restored, strict=True))
    assert [tune._library.calls(kernel) for kernel in tune.KERNELS] == before


def test_report_where_nothing_helps(monkeypatch):
    monkeypatch.setattr(tune, "LEAST_GAIN", math.inf)
    report = cx.train.tune_cpu(allocator=False)
    assert report.text.startswith("tune_cpu: no replacement helps on this machine")
    assert not any(kernel.replaced for kernel in report.kernels)
    assert "left alone: " in str(report)


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


@pytest.mark.parametrize("options", [[], ["-W", "error"]])
def test_nothing_on_stderr(options):
    code = """
import torch, camox_ops as cx
print(cx.train.tune_cpu())
x = torch.randn(64, 64)
torch.nn.functional.dropout(x @ x, 0.5)
cx.train.restore_cpu()
cx.train.tune_cpu()
"""
    inherited = {k: v for k, v in os.environ.items() if k != "THP_MEM_ALLOC_ENABLE"}
    run = subprocess.run(
        [sys.executable, *options, "-c", code], capture_output=True, text=True, env=inherited, check=True
    )
    assert run.stderr == ""
    assert run.stdout.startswith("tune_cpu: ")


def test_says_what_came_too_late():
    late = run_python("import torch; torch.ones(3); import camox_ops as cx; print(cx.train.tune_cpu())")
    assert "tensors were made before" in late or "not glibc" in late
    early = run_python("import camox_ops as cx; print(cx.train.tune_cpu())")
    assert "large tensors begin on pages" in early or "not glibc" in early


def test_importing_opens_nothing():
    code = "import camox_ops; print('libcamox_ops_tune' in open('/proc/self/maps').read())"
    assert run_python(code).strip() == "False"
