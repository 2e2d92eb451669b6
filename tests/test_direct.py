"""Calls past torch's dispatcher: csrc/common/direct.h. What they compute is tested by test_contract.py."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import camox_ops as cx
from camox_ops import _C, _torch_private
from camox_ops.ops.edge import _edge_maps
from camox_ops.ops.norm2d import _layer_norm2d

LIST = Path(__file__).parents[1] / "csrc" / "direct_list.h"
NONE_GELU = (None, 1e-6, 1, 1)  # residual, eps, groups, activation


class Marked(torch.Tensor):
    """A subclass, which may mean something else by its memory."""


class Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def norm_inputs(dtype=torch.float32):
    torch.manual_seed(0)
    return torch.randn(2, 6, 4, 5).to(dtype), torch.randn(6).to(dtype), torch.randn(6).to(dtype)


def norm_outputs(dtype=torch.float32):
    """Filled with a number that no result is."""
    return torch.full((2, 6, 4, 5), 77.0, dtype=dtype), torch.full((2, 2, 1, 4, 5), 77.0)


def is_untouched(outputs) -> bool:
    return all(bool((y == 77).all()) for y in outputs)


def test_the_list_of_functions_is_what_the_package_has():
    listed = re.findall(r"^DIRECT\((\w+)\)$", LIST.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(name for name in dir(_C) if name.endswith("_into"))
    assert all(hasattr(torch.ops.camox_ops, name.removesuffix("_into")) for name in listed)


def test_who_may_go_past_the_dispatcher():
    inputs = norm_inputs()
    grad = [value.clone().requires_grad_() for value in inputs]
    parameters = [inputs[0], *map(torch.nn.Parameter, inputs[1:])]
    for chosen in (inputs, grad, parameters):
        assert _layer_norm2d.attempt(*chosen, *NONE_GELU) is not None
        with torch.no_grad():
            assert _layer_norm2d.attempt(*chosen, *NONE_GELU) is not None
    assert len(_edge_maps.attempt(inputs[0], 1e-6, 0)) == 3


def test_what_the_operator_has_to_look_at():
    x, weight, bias = norm_inputs()
    others = (
        x.to("meta"),
        x.to_sparse(),
        x.int(),
        x.to(torch.complex64),
        x.to(torch.float8_e5m2),
        x.as_subclass(Marked),
        torch._neg_view(x),
        torch._efficientzerotensor(x.shape),
        x[0],
        x[:, :4],
        x.double(),
        x.tolist(),
        None,
        3.0,
    )
    for other in others:
        assert _layer_norm2d.attempt(other, weight, bias, *NONE_GELU) is None, other
    for wrong in (weight[:3], weight.double(), weight.to("meta"), weight[None], torch._neg_view(weight), None):
        assert _layer_norm2d.attempt(x, wrong, bias, *NONE_GELU) is None, wrong
        assert _layer_norm2d.attempt(x, weight, wrong, *NONE_GELU) is None, wrong
    options = ((x[:1], 1e-6, 1, 1), (None, 0.0, 1, 1), (None, 1, 1, 1), (None, 1e-6, 4, 1), (None, 1e-6, True, 1))
    for wrong in (*options, (None, 1e-6, 1, 9), (None, 1e-6, 1, None), (None, 1e-6, 1 << 70, 1), (1.0, 1e-6, 1, 1)):
        assert _layer_norm2d.attempt(x, weight, bias, *wrong) is None, wrong
    expected = cx.layer_norm2d(-x, weight, bias)
    assert torch.equal(cx.layer_norm2d(torch._neg_view(x), weight, bias), expected)


def test_whoever_follows_operators_sees_them():
    inputs = norm_inputs()
    expected = cx.layer_norm2d(*inputs)

    def is_past_the_dispatcher() -> bool:
        assert torch.equal(cx.layer_norm2d(*inputs), expected)
        return _layer_norm2d.attempt(*inputs, *NONE_GELU) is not None

    assert is_past_the_dispatcher()
    for watcher in (Functions(), Operators(), torch.profiler.profile(), cx.explain(), torch.device("cpu")):
        with watcher:
            assert not is_past_the_dispatcher(), watcher
    with torch.profiler.profile() as profile:
        cx.layer_norm2d(*inputs)
    assert any("layer_norm2d" in event.key for event in profile.key_averages())
    with forward_ad.dual_level():
        assert not is_past_the_dispatcher()
    seen = []

    def function(x):
        seen.append(_layer_norm2d.attempt(x, *inputs[1:], *NONE_GELU) is not None)
        return cx.layer_norm2d(x, *inputs[1:])

    traced = torch.jit.trace(function, inputs[0], check_trace=False)
    assert seen == [False]
    assert torch.equal(traced(2 * inputs[0]), cx.layer_norm2d(2 * inputs[0], *inputs[1:]))
    torch.func.vmap(lambda x: seen.append(is_past_the_dispatcher()) or x)(torch.ones(2))
    assert seen == [False, False]
    assert is_past_the_dispatcher()


def test_a_tensor_of_a_transform_that_is_over():
    kept = []
    torch.func.grad(lambda x: kept.append(x) or x.sum())(norm_inputs()[0])
    assert type(kept[0]) is torch.Tensor and _C.look_at(kept[0]) == 0
    x, weight, bias = norm_inputs()
    assert torch.equal(cx.layer_norm2d(kept[0], weight, bias), cx.layer_norm2d(x, weight, bias))


def test_look_at():
    x = torch.ones(3)
    assert [_C.look_at(*arguments) for arguments in ((), (x, None, 1, 2.0, True), (torch.arange(3),))] == [1, 1, 1]
    assert _C.look_at(1, x, x.clone().requires_grad_(), x) == 2
    assert _C.look_at(torch.nn.Parameter(x)) == 2
    for other in (x.as_subclass(Marked), torch._neg_view(x), x.to("meta"), x.to_sparse(), "text", [x], object()):
        assert _C.look_at(x, other) == _C.look_at(other, x) == 0, other


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_outputs_are_checked_before_they_are_written(dtype):
    inputs = norm_inputs(dtype)
    y, stats = norm_outputs(dtype)
    stats = stats.double() if dtype == torch.float64 else stats
    arguments = (*inputs, *NONE_GELU, True)
    wrong = (
        (y[:1], stats),
        (y[:, :5], stats),
        (y.to(torch.float16), stats),
        (y, stats[:1]),
        (y, stats.to(torch.float16)),
        (y, stats.mT.contiguous().mT),
        (y, None),
        (y,),
        (y, stats, y),
    )
    for outputs in wrong:
        assert _C.layer_norm2d_into(*arguments, *outputs) is False
    assert is_untouched((y, stats))
    assert _C.layer_norm2d_into(*arguments, y, stats) is True
    assert torch.equal(y, torch.ops.camox_ops.layer_norm2d(*arguments)[0])


def test_gradients_are_checked_before_they_are_written():
    x, weight, bias = norm_inputs()
    arguments = (torch.ones_like(x), x, weight, bias, torch.zeros(2, 2, 1, 4, 5), 1e-6, 1, 1)
    outputs = [torch.full_like(value, 77.0) for value in (x, weight, bias)]
    for i in range(3):
        for other in (outputs[i][:1], outputs[i].double(), torch.full((*outputs[i].shape, 2), 77.0)[..., 0][None]):
            given = [other if k == i else value for k, value in enumerate(outputs)]
            assert _C.layer_norm2d_backward_into(*arguments, *given) is False
    strided = torch.full((12,), 77.0)[::2]
    assert _C.layer_norm2d_backward_into(*arguments, outputs[0], strided, outputs[2]) is False
    assert is_untouched((*outputs, strided))
    assert _C.layer_norm2d_backward_into(*arguments, *outputs) is True
    for mine, theirs in zip(outputs, torch.ops.camox_ops.layer_norm2d_backward(*arguments), strict=True):
        assert torch.equal(mine, theirs)


def test_several_threads_of_python():
    x = torch.randn(2, 8, 64, 64, requires_grad=True)
    weight, bias = (torch.randn(8, requires_grad=True) for _ in range(2))

    def one_thread(_) -> list[torch.Tensor]:
        found = []
        for _ in range(20):
            y = cx.layer_norm2d(x, weight, bias, activation="gelu")
            found += [y.detach(), *torch.autograd.grad(sum(map(torch.sum, cx.edge_maps(y))), (x, weight, bias))]
        return found

    expected = one_thread(0)[:4] * 20
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(one_thread, range(4)):
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


def test_use_dlpack_refuses_what_is_no_table():
    table, types = torch.Tensor.__dlpack_c_exchange_api__, (torch.Tensor, torch.nn.Parameter)
    assert _torch_private.READS_BY_DLPACK and _C.use_dlpack(table, *types) is True
    with pytest.raises(ValueError, match="PyCapsule_GetPointer"):
        _C.use_dlpack(object(), *types)
    with pytest.raises(TypeError):
        _C.use_dlpack(table, torch.Tensor, None)
