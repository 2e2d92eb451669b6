"""patch on norms over channels: every spelling, and what only looks like one."""

import copy
import functools

import pytest
import torch
from helpers import DEVICE, FLOATS, assert_close_to_reference, module_numbers, on_device, random_image
from patch_models import CHANNELS, NORMS, NOT_NORMS, Manual, Permuting, Wrapped
from torch import nn

import camox_ops as cx
from camox_ops._patch import _call

pytestmark = on_device


@pytest.fixture(autouse=True)
def small_calls_too(monkeypatch):
    monkeypatch.setattr(_call, "least_bytes", lambda gpu: 0)
    monkeypatch.setattr(_call, "LEAST_IN_ROWS", 0)


def made(name, table=NORMS):
    torch.manual_seed(0)
    module = table[name]()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module


@functools.cache
def patched(name, dtype=torch.float32):
    """A module that waits for its first input, and its report: tests take copies, which wait as well."""
    module = made(name).to(dtype)
    return module, cx.patch(module, only="layer_norm2d")


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "strided"])
@pytest.mark.parametrize("name", NORMS)
def test_matches_reference(name, layout):
    x = random_image((2, CHANNELS, 17, 15), layout=layout)
    grad = random_image((2, CHANNELS, 17, 15), seed=1)
    plain = made(name)
    theirs = module_numbers(plain, plain, x, grad)
    module, report = patched(name)
    module = copy.deepcopy(module)
    assert [entry.name for entry in report.patched] == [""], report
    truth_of = made(name).double()
    truth = module_numbers(truth_of, truth_of, x.double(), grad.double())
    for _ in range(2):
        ours = module_numbers(module, module, x, grad)
        assert_close_to_reference(ours, theirs, truth)
        assert ours[0].stride() == theirs[0].stride()
    assert report.patched and report.patched[0].first_error is not None, report


# In the quick run each norm meets every other dtype, and each dtype every other norm.
NORMS_AND_DTYPES = [
    pytest.param(name, dtype, marks=pytest.mark.slow if (i + j) % 2 else ())
    for i, name in enumerate(NORMS)
    for j, dtype in enumerate(FLOATS)
]


@pytest.mark.parametrize(("name", "dtype"), NORMS_AND_DTYPES)
def test_dtypes(name, dtype):
    """As the original: all in one dtype, float32 parameters beside half precision, in and out of autocast."""
    for own in {dtype, torch.float32}:
        for autocast in (False, True):
            x = random_image((2, CHANNELS, 17, 15), dtype)
            module, plain = copy.deepcopy(patched(name, own)[0]), made(name).to(own)
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast):
                try:
                    expected = plain(x)
                except RuntimeError:
                    with pytest.raises(RuntimeError):
                        module(x)
                    continue
                found = [module(x) for _ in range(2)]
            for y in found:
                assert y.dtype == expected.dtype
                eps = max(torch.finfo(dtype).eps, torch.finfo(y.dtype).eps)
                assert (y.double() - expected.double()).abs().max() <= 32 * eps * expected.double().abs().max()


@pytest.mark.parametrize("name", NOT_NORMS)
def test_not_taken(name):
    module = made(name, NOT_NORMS)
    kinds = [type(m) for m in module.modules()]
    report = cx.patch(module)
    assert not report.patched, report
    assert [type(m) for m in module.modules()] == kinds


def test_reasons_say_what_differs():
    def reason(name):
        (entry,) = cx.patch(made(name, NOT_NORMS)).skipped
        return entry.reason

    assert "differs by" in reason("without mean (Restormer's BiasFree)")
    assert "differs by" in reason("OneGroup")
    assert "the gradient of input 0 differs" in reason("DetachedMean")
    assert "the gradient of bias differs" in reason("FrozenBias")
    assert "its forward leaves something on the module (last_mean)" in reason("LeavesMean")
    assert "(1, 16, 9, 11)" in reason("LargeImages")


def test_eps_follows_the_attribute():
    module = Manual(eps=1e-5)
    cx.patch(module)
    x = 1e-3 * torch.randn(1, CHANNELS, 24, 24)
    module(x)
    for eps in (1e-5, 1e-2):
        module.eps = eps
        torch.testing.assert_close(module(x), Manual.forward(module, x), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("eps", [1e-3, 1e-6, 1e-8, 1e-12])
def test_small_eps(eps):
    module = Permuting(eps=eps)
    assert cx.patch(module).patched


def test_other_ranks_and_keywords_take_the_original_forward():
    module = Permuting()
    cx.patch(module)
    x = torch.randn(2, CHANNELS, 24, 24)
    torch.testing.assert_close(module(x=x), module(x), rtol=1e-5, atol=1e-5)
    with pytest.raises(RuntimeError):
        module(x[0])
    with pytest.raises(TypeError):
        module(x, 1)


def test_hooks_on_an_inner_module():
    module = Wrapped()
    seen = []
    handle = module.body.register_forward_hook(lambda *_: seen.append(1))
    report = cx.patch(module)
    assert report.skipped[0].reason == "body has hooks"
    handle.remove()
    assert [entry.name for entry in cx.patch(module).patched] == [""]
    x = torch.randn(2, CHANNELS, 24, 24)
    module(x)
    module.body.register_forward_hook(lambda *_: seen.append(1))
    module(x)  # a hook that came later is called as well
    assert seen == [1]


def test_an_inner_module_that_is_exchanged_later():
    module = Wrapped()
    cx.patch(module)
    x = torch.randn(2, CHANNELS, 24, 24)
    module(x)
    module.body = nn.Identity()
    assert torch.equal(module(x), x)


def test_parameters_replaced_later():
    module = Manual()
    cx.patch(module)
    x = torch.randn(2, CHANNELS, 24, 24)
    module(x)
    module.weight = nn.Parameter(torch.full((CHANNELS,), 2.0))
    torch.testing.assert_close(module(x), Manual.forward(module, x), rtol=1e-5, atol=1e-5)
    module.weight = None
    with pytest.raises(TypeError):
        module(x)
