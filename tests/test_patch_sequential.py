"""patch on nn.Sequential: a norm with its activation, Linear with GELU and Dropout."""

import copy
import pickle

import pytest
import torch
from patch_models import CHANNELS, Gains, Manual, Permuting
from torch import nn
from torch.utils.checkpoint import checkpoint

import camox_ops as cx
from camox_ops._patch import sequential

ACTIVATIONS = {
    "gelu": nn.GELU,
    "gelu tanh": lambda: nn.GELU(approximate="tanh"),
    "relu": nn.ReLU,
    "relu in place": lambda: nn.ReLU(inplace=True),
    "silu": nn.SiLU,
}


class Counted:
    """Counts the groups that run in one op."""

    def __init__(self, monkeypatch):
        self.kinds = []
        real = sequential._fused

        def counting(x, first, *others):
            self.kinds.append(type(first).__name__)
            return real(x, first, *others)

        monkeypatch.setattr(sequential, "_fused", counting)

    def patch(self, model):
        """cx.patch, without what its proofs ran."""
        report = cx.patch(model)
        self.kinds.clear()
        return report


@pytest.fixture
def counted(monkeypatch):
    return Counted(monkeypatch)


def numbers(module, x, call=None):
    x = x.clone().requires_grad_()
    y = (call or module)(x)
    grad = torch.linspace(-1, 1, y.numel()).view(y.shape)
    return [y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], grad)]


def close(ours, theirs):
    for mine, original in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, original, rtol=3e-5, atol=3e-5)
        assert mine.dtype == original.dtype and mine.stride() == original.stride()


@pytest.mark.parametrize("norm", [Manual, Gains, Permuting])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_norm_and_activation(activation, norm, counted):
    model = nn.Sequential(nn.Conv2d(3, CHANNELS, 1), norm(), ACTIVATIONS[activation](), nn.Conv2d(CHANNELS, 3, 1))
    x = torch.randn(2, 3, 17, 15)
    expected = numbers(model, x)
    report = counted.patch(model)
    assert [entry.name for entry in report.patched] == ["", "1"]
    for _ in range(2):
        close(numbers(model, x), expected)
    assert counted.kinds == [norm.__name__] * 2


def test_checkpointing_repeats_the_first_call_as_it_was():
    model = nn.Sequential(nn.Conv2d(3, CHANNELS, 1), Manual(), nn.GELU())
    x = torch.randn(2, 3, 17, 15)
    expected = numbers(model, x)
    cx.patch(model)
    close(numbers(model, x, lambda x: checkpoint(model, x, use_reentrant=False)), expected)


def test_a_norm_that_differs_on_its_first_input_is_given_back(counted):
    class Scaled(Manual):
        factor = 1.0

        def forward(self, x):
            return super().forward(x) * self.factor

    model = nn.Sequential(Scaled(), nn.ReLU())
    report = counted.patch(model)
    Scaled.factor = 2.0
    x = torch.randn(2, CHANNELS, 16, 16)
    torch.testing.assert_close(model(x), Manual()(x).relu() * 2)
    assert [entry.name for entry in report.patched] == [""] and type(model[0]) is Scaled


@pytest.mark.parametrize("activation", [nn.Tanh, nn.Sigmoid, lambda: nn.LeakyReLU(0.1), nn.ReLU6])
def test_other_activations_are_called(activation):
    report = cx.patch(nn.Sequential(Manual(), activation()))
    assert [entry.name for entry in report.patched] == ["0"]


@pytest.mark.parametrize("p", [None, 0.0, 0.3])
def test_linear_gelu_dropout(p, counted):
    parts = [nn.Linear(24, 96), nn.GELU(), *([] if p is None else [nn.Dropout(p)]), nn.Linear(96, 24)]
    model = nn.Sequential(*parts)
    x = torch.randn(8, 30, 24)
    expected = numbers(copy.deepcopy(model).eval(), x)
    report = counted.patch(model)
    assert report.patched[0].name == "" and report.patched[0].error < 1e-9
    close(numbers(model.eval(), x), expected)
    assert counted.kinds == ["Linear"]
    model.train()
    if p:
        torch.manual_seed(4)
        hidden = cx.dropout(nn.functional.gelu(parts[0](x)), p)
        torch.manual_seed(4)
        torch.testing.assert_close(model(x), parts[-1](hidden))


def test_autocast(counted):
    norms = nn.Sequential(nn.Conv2d(3, CHANNELS, 1), Manual(), nn.GELU())
    rows = nn.Sequential(nn.Linear(24, 96), nn.GELU(), nn.Dropout(0.1), nn.Linear(96, 24)).eval()
    for model, x in ((norms, torch.randn(2, 3, 17, 15)), (rows, torch.randn(8, 30, 24))):
        with torch.autocast("cpu", torch.bfloat16):
            expected = model(x)
            counted.patch(model)
            found = [model(x) for _ in range(2)]
        for y in found:
            assert y.dtype == expected.dtype
            assert (y.double() - expected.double()).abs().max() < 0.02 * expected.double().abs().max()
        assert counted.kinds == ["Manual" if model is norms else "Linear"] * 2


def test_hooks_that_come_later_are_called(counted):
    model = nn.Sequential(Manual(), nn.GELU(), nn.Linear(16, 16), nn.GELU())
    counted.patch(model)
    x = torch.randn(2, CHANNELS, 16, 16)
    model(x)
    assert counted.kinds == ["Manual", "Linear"]
    seen = []
    handles = [part.register_forward_hook(lambda *_: seen.append(1)) for part in model]
    model(x)
    assert len(seen) == 4 and len(counted.kinds) == 2
    for handle in handles:
        handle.remove()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: seen.append(1))
    try:
        model(x)
    finally:
        handle.remove()
    assert len(seen) == 9 and len(counted.kinds) == 2


def test_modules_exchanged_later(counted):
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU())
    counted.patch(model)
    x = torch.randn(80, 64)
    model[1] = nn.Tanh()
    torch.testing.assert_close(model(x), torch.tanh(model[0](x)))
    model[0] = nn.Linear(64, 64, bias=False)
    model[1] = nn.GELU()
    torch.testing.assert_close(model(x), nn.functional.gelu(model[0](x)))
    model.append(nn.Identity())
    assert not counted.kinds
    assert len(model) == 3 and isinstance(model[:2], nn.Sequential)
    torch.testing.assert_close(model[:2](x), model(x))
    assert type(pickle.loads(pickle.dumps(model[:2]))) is nn.Sequential


def test_subclasses_without_a_forward_of_their_own():
    class Block(nn.Sequential):
        pass

    class Other(nn.Sequential):
        def forward(self, x):
            return super().forward(x) + x

    model = nn.ModuleList([kind(nn.Linear(64, 64), nn.GELU()) for kind in (Block, Other)])
    assert [entry.name for entry in cx.patch(model).patched] == ["0"]


def test_only_norms():
    model = nn.Sequential(Manual(), nn.GELU())
    assert [entry.name for entry in cx.patch(model, only="layer_norm2d").patched] == ["0"]
    assert [entry.name for entry in cx.patch(model, only="sequential").patched] == [""]


def test_compile():
    model = nn.Sequential(Manual(), nn.GELU(), nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.0))
    x = torch.randn(2, CHANNELS, 16, 16)
    expected = model(x).detach()
    cx.patch(model)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x).detach(), expected, rtol=3e-5, atol=3e-5)
    model(x)
    torch.testing.assert_close(compiled(x).detach(), expected, rtol=3e-5, atol=3e-5)
