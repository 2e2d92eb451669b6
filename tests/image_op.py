"""The tests of every op of one image and one image of its shape (camox_ops._ops.IMAGE_OPS) against its formula.

An op's own file has a class Test<Op>(ImageOpTests) with the op's name, and values that are computed by hand."""

from __future__ import annotations

import inspect
import itertools

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    FLOATS,
    LAYOUTS,
    assert_close_around,
    assert_close_to_reference,
    assert_one_rounding,
    every_pair,
    float64_on_cpu,
    outputs_and_gradients,
    random_image,
    reference,
)
from torch.autograd import gradcheck, gradgradcheck

import camox_ops as cx

BORDERS = ("zeros", "replicate", "reflect")
# Below, at and above vector and tile widths: 16 lanes, 512 columns, 1536 elements of a row of a tile, 128 channels.
SHAPES = (
    *((2, 3, 5, 7), (1, 2, 1, 1), (1, 1, 1, 9), (1, 1, 9, 1), (2, 2, 2, 2), (1, 3, 4, 15), (1, 3, 4, 17)),
    *((1, 2, 231, 33), (1, 1, 20, 512), (1, 1, 3, 513), (1, 1, 2, 1600)),
    *((1, 31, 3, 17), (1, 33, 66, 16), (2, 131, 3, 4), (1, 3, 5, 700)),
)

every_border = pytest.mark.parametrize("border", BORDERS)
every_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=str)


def number_of(op: str) -> dict[str, float]:
    """The op's own number by its name, such as {"eps": 0.01}: what the reference takes beside x and border. It is large
    enough to keep gradients off the kink of a root at 0."""
    names = [name for name in inspect.signature(getattr(reference, op)).parameters if name not in ("x", "border")]
    assert len(names) <= 1, f"{op}: camox_image_params has one number, the reference takes {names}"
    return dict.fromkeys(names, 0.01)


def reachable(shape, border):
    return not (border == "reflect" and 1 in shape[2:])


class ImageOpTests:
    """op: the operator's name. factor: what an output may be off beyond twice torch's own error, in eps of the largest
    pixel around or of itself."""

    op: str
    factor = 8.0

    def ours(self, x, border):
        return getattr(cx, self.op)(x, border=border, **number_of(self.op))

    def formula(self, x, border):
        return getattr(reference, self.op)(x, border=border, **number_of(self.op))

    def cases(self, dtype, layout, border, kinds):
        for shape, kind in zip(SHAPES, itertools.cycle(kinds)):
            if reachable(shape, border):
                yield random_image(shape, dtype, layout, kind), random_image(shape, dtype, "contiguous", seed=1)

    @every_pair(dtype=FLOATS, layout=LAYOUTS, border=BORDERS)
    def test_matches_reference(self, dtype, layout, border):
        for x, _ in self.cases(dtype, layout, border, ("normal", "offset", "constant")):
            ours, truth = self.ours(x, border), self.formula(x.double(), border)
            assert_close_to_reference(ours, self.formula(x, border), truth, scale64=16 * x.abs().max().item())
            if dtype in (torch.bfloat16, torch.float16):
                assert_one_rounding(ours, self.ours(x.float(), border))

    @every_pair(dtype=FLOATS, layout=LAYOUTS, border=BORDERS)
    def test_grad_matches_reference(self, dtype, layout, border):
        for x, grad in self.cases(dtype, layout, border, ("normal",)):
            (_, ours), (_, same), (_, truth) = (
                outputs_and_gradients(lambda x, f=f: f(x, border), [like], [given])
                for f, like, given in (
                    (self.ours, x, grad),
                    (self.formula, x, grad),
                    (self.formula, x.double(), grad.double()),
                )
            )
            assert_close_to_reference(ours, same, truth, scale64=16 * grad.abs().max().item())

    @every_border
    @pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
    @every_dtype
    def test_matches_reference_in_each_neighbourhood(self, dtype, layout, border):
        """A bright object costs no accuracy beside it: errors are those of the pixels around, or of the output."""
        x = 1e-3 * random_image((2, 3, 40, 44), torch.float64)
        x[..., 10:30, 11:33] += 200
        x = x.to(dtype)
        x = x.to(memory_format=torch.channels_last) if layout == "channels_last" else x
        ours, same, truth = self.ours(x, border), self.formula(x, border), self.formula(x.double(), border)
        terms = torch.maximum(F.max_pool2d(x.double().abs(), 3, stride=1, padding=1), truth.abs())
        assert_close_around(ours, same, truth, lambda values: values, [terms], factor=self.factor)

    @float64_on_cpu
    @every_border
    @pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
    def test_grad(self, layout, border):
        x = random_image((2, 3, 5, 4), torch.float64, layout).requires_grad_()
        assert gradcheck(lambda x: self.ours(x, border), (x,))
        assert gradgradcheck(lambda x: self.ours(x, border), (x,), fast_mode=True)

    def test_errors(self):
        for x, border, error, message in (
            ([1, 2], "zeros", TypeError, "x must be a torch.Tensor, got list"),
            (torch.zeros(3, 4, 4), "zeros", ValueError, "x must have 4 dimensions"),
            (torch.zeros(1, 1, 4, 4).long(), "zeros", TypeError, "x must have dtype .*, got int64"),
            (torch.zeros(1, 1, 4, 4), "wrap", ValueError, "border must be one of .*, got 'wrap'"),
            (torch.zeros(1, 1, 1, 4), "reflect", ValueError, "border 'reflect' needs sides of at least 2"),
        ):
            with pytest.raises(error, match=f"{self.op}: {message}"):
                self.ours(x, border)

    def test_errors_from_c(self):
        x, number = torch.zeros(1, 2, 1, 4), sum(number_of(self.op).values())
        forward, backward = (getattr(torch.ops.camox_ops, name) for name in (self.op, f"{self.op}_backward"))
        for call, message in (
            (lambda: forward(x, number, -1), "unknown border code -1"),
            (lambda: forward(x, number, 2), "'reflect' needs sides of at least 2, got x with H=1, W=4"),
            (lambda: forward(x[0], number, 0), "x must have 4 dimensions"),
            (lambda: forward(x.int(), number, 0), "dtype must be float32, bfloat16, float16 or float64"),
            (lambda: backward(x, torch.zeros(1, 2, 1, 5), number, 0), "grad has size 5 in dimension 3, expected 4"),
            (lambda: backward(x, x.double(), number, 0), "grad must have the dtype of x"),
        ):
            with pytest.raises(ValueError, match=f"{self.op}: .*{message}"):
                call()
