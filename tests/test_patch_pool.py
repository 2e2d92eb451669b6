"""patch on average pools of stride 1."""

import copy

import pytest
import torch
from torch import nn

import camox_ops as cx


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize(
    ("pool", "shape"),
    [
        (lambda **o: nn.AvgPool2d(7, 1, 3, **o), (2, 4, 30, 33)),
        (lambda **o: nn.AvgPool2d((1, 9), 1, (0, 4), **o), (2, 4, 30, 33)),
        (lambda **o: nn.AvgPool1d(25, 1, 12, **o), (8, 7, 96)),
    ],
)
def test_matches(pool, shape, include):
    module = pool(count_include_pad=include)
    plain = copy.deepcopy(module)
    report = cx.patch(module)
    assert [entry.recogniser for entry in report.patched] == ["average_pool"]
    x = torch.randn(shape, requires_grad=True)
    for _ in range(2):
        results = []
        for m in (module, plain):
            y = m(x)
            results.append([y, *torch.autograd.grad(y.square().mean(), x)])
        for mine, original in zip(*results, strict=True):
            torch.testing.assert_close(mine, original, rtol=1e-4, atol=1e-6)
            assert mine.stride() == original.stride()
    assert report.patched and report.patched[0].first_error is not None, report


@pytest.mark.parametrize(
    "pool",
    [
        lambda: nn.AvgPool2d(7),
        lambda: nn.AvgPool2d(7, 1),
        lambda: nn.AvgPool2d(8, 1, 4),
        lambda: nn.AvgPool2d(3, 1, 1),
        lambda: nn.AvgPool2d(7, 1, 3, divisor_override=5),
        lambda: nn.AvgPool2d(7, 1, 3, ceil_mode=True),
        lambda: nn.AvgPool3d(7, 1, 3),
        lambda: nn.MaxPool2d(7, 1, 3),
    ],
)
def test_not_taken(pool):
    assert not cx.patch(pool()).entries


def test_settings_that_change_are_followed():
    module = nn.AvgPool2d(7, 1, 3)
    cx.patch(module)
    x = torch.randn(2, 4, 30, 33)
    module(x)
    module.kernel_size, module.padding = 9, 4
    torch.testing.assert_close(module(x), nn.functional.avg_pool2d(x, 9, 1, 4), rtol=1e-4, atol=1e-6)
    module.stride = 2
    assert torch.equal(module(x), nn.functional.avg_pool2d(x, 9, 2, 4))
    assert torch.equal(module(x[0]), nn.functional.avg_pool2d(x[0], 9, 2, 4))
