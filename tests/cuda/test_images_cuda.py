"""The CUDA kernels of all ops on images on the CPU: those whose cases are a ImageOp."""

import emulator
import pytest
import torch
from emulator import HALVES
from helpers import LAYOUTS, assert_close_to_reference, assert_one_rounding, random_image

IMAGE_OPS = [cases.OP for cases in emulator.all_cases().values() if hasattr(cases, "OP")]


@pytest.fixture(params=IMAGE_OPS, ids=str)
def op(request):
    return request.param


def gradients(op, x, layout="contiguous"):
    return [random_image(x.shape, x.dtype, layout, seed=i + 1) for i in range(op.grads)]


def is_of_others(share, op, dtype, layout, options) -> bool:
    """Of a shape's borders, where it has several: one or two of three, by dtype and layout, so that each border meets
    each of both."""
    borders = [each["border"] for each in op.options if "border" in each]
    if len(borders) < 2:
        return share == 1
    turn = borders.index(options["border"]) + list(emulator.DTYPES).index(str(dtype)[6:]) + LAYOUTS.index(layout)
    return turn % 2 != share


@pytest.mark.parametrize("layout", LAYOUTS)
def test_image_forward(op, dtype, layout, arch, share):
    for turn, (shape, options, order) in enumerate(op.cases()):
        if is_of_others(share, op, dtype, layout, options):
            continue
        for kind in ("normal", "offset")[: 2 - turn % 2]:
            x = random_image(shape, dtype, layout, kind)
            ours = op.forward(x, options, arch=arch, order=order)
            assert_close_to_reference(ours, op.reference(x, **options), op.reference(x.double(), **options))
            if dtype in HALVES:
                assert_one_rounding(ours, op.forward(x.float(), options, arch=arch))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_image_backward(op, dtype, layout, arch, share):
    for shape, options, order in op.cases(backward=True):
        if is_of_others(share, op, dtype, layout, options):
            continue
        x = random_image(shape, dtype, layout)
        grads = gradients(op, x, layout)
        if shape[3] < 20:
            grads[max(op.grads - 2, 0)] = random_image(shape, dtype, "strided", seed=9)
        ours = op.backward(x, grads, options, arch=arch, order=order)
        truth = op.reference_backward(x.double(), [g.double() for g in grads], **options)
        assert_close_to_reference(ours, op.reference_backward(x, grads, **options), truth)
        if dtype in HALVES:
            floats = op.backward(x.float(), [g.float() for g in grads], options, arch=arch)
            assert_one_rounding(ours, floats)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_image_large_mean_costs_no_accuracy(op, layout):
    """Inside, where no border is seen, the image with mean 1e4 is treated as well as torch treats it without."""
    x = random_image((1, 8, 21, 32), layout=layout, kind="offset")
    truth, plain = (op.reference(like) for like in (x.double(), x - 1e4))
    for i, ours in enumerate(op.forward(x)):
        if op.outputs[i] != "low":
            assert_close_to_reference(*(y[..., 2:-2, 2:-2] for y in (ours, plain[i], truth[i])))


@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
@pytest.mark.parametrize("shape", [(2, 8, 5, 16), (2, 3, 5, 7)])
@pytest.mark.parametrize("op", [op for op in IMAGE_OPS if op.grads > len(op.outputs)], ids=str)
def test_image_stacked(op, shape, layout, dtype, order):
    x = random_image(shape, dtype, layout)
    options = op.options[-1]
    ours = op.forward(x, options, stacked=True, order=order)
    assert torch.equal(ours, torch.cat([*op.forward(x, options), x], dim=1))


@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
def test_image_backward_of_some_maps(op, layout, order):
    x = random_image((2, 8, 6, 12), layout=layout)
    options = op.cases(backward=True)[0][1]
    for chosen in range(op.grads):
        grads = [grad if i == chosen else None for i, grad in enumerate(gradients(op, x, layout))]
        ours = op.backward(x, grads, options, order=order)
        truth = op.reference_backward(x.double(), [g if g is None else g.double() for g in grads], **options)
        assert_close_to_reference(ours, op.reference_backward(x, grads, **options), truth)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_image_stays_inside_at_both_ends(op, layout, dtype, order):
    """Flush against a guard page at the end in the tests above, at the start here; the bits are the same."""
    for shape in ((1, 3, 4, 16), (2, 16, 5, 7)):
        x = random_image(shape, dtype, layout)
        grads = gradients(op, x, layout)
        starts = [*op.forward(x, flush="start", order=order), op.backward(x, grads, flush="start", order=order)]
        for ours, ends in zip(starts, [*op.forward(x), op.backward(x, grads)], strict=True):
            assert torch.equal(ours, ends)


@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
def test_image_small_grid_strides_over_the_rest(op, layout, dtype, order):
    """A grid of two blocks, whose threads iterate down long row bands, does the work of many: what a grid at its limit
    of 2^31-1 does on a GPU, and what large images do."""
    x = random_image((3, 24, 18, 32), dtype, layout)
    grads = gradients(op, x, layout)
    few = [*op.forward(x, grid_cap=2, order=order), op.backward(x, grads, grid_cap=2, order=order)]
    for ours, whole in zip(few, [*op.forward(x), op.backward(x, grads)], strict=True):
        assert torch.equal(ours, whole)


def test_image_bits_do_not_depend_on_the_width_of_accesses(op):
    x = random_image((2, 8, 19, 24))
    grads = gradients(op, x)
    for options in op.options:
        widest = [*op.forward(x, options), op.backward(x, grads, options)]
        for layout in ("strided", "channels_last"):
            like = random_image(x.shape, layout=layout)
            again = [*op.forward(like, options), op.backward(like, gradients(op, x, layout), options)]
            assert all(map(torch.equal, again, widest))


@pytest.mark.parametrize("beside", [8, 2, 1])
@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
def test_image_cropped(op, layout, beside, dtype):
    """Rows of a larger buffer, whose pitch and end keep 16-byte alignment, 4-byte or only that of an element."""
    inner = 3 if layout == "contiguous" else 1
    shape = [1, 16, 4, 16]
    shape[inner] += beside
    larger = [random_image(shape, dtype, layout, seed=i) for i in range(op.grads + 1)]
    x, *grads = (t.narrow(inner, 0, 16) for t in larger)
    whole, *whole_grads = (t.clone(memory_format=torch.contiguous_format) for t in (x, *grads))
    cropped = [*op.forward(x, order="random"), op.backward(x, grads, order="random")]
    for ours, truth in zip(cropped, [*op.forward(whole), op.backward(whole, whole_grads)], strict=True):
        assert torch.equal(ours, truth)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
def test_image_nan_and_inf_as_in_the_reference(op, value, layout):
    for place in range(4):
        x = random_image((1, 8, 4, 8), layout=layout)
        x[:, :, place, place] = value
        for ours, truth in zip(op.forward(x), op.reference(x), strict=True):
            torch.testing.assert_close(ours, truth, equal_nan=True)


def test_image_empty(op):
    for shape in ((0, 3, 4, 5), (2, 0, 4, 5), (2, 3, 0, 5), (2, 3, 4, 0)):
        x = torch.empty(shape)
        assert [m.shape for m in op.forward(x)] == [x.shape] * len(op.outputs)
        assert op.backward(x, [x] * op.grads).shape == x.shape


@pytest.mark.slow
def test_image_broken_build_is_noticed(op):
    define = op.define or f"CAMOX_BREAK_{op.name.upper()}"
    for layout in ("contiguous", "channels_last"):
        x = random_image((1, 4, 4, 8), layout=layout)
        off = [wrong - right for right, wrong in zip(op.forward(x), op.forward(x, define=define), strict=True)]
        broken = [torch.allclose(d, torch.full_like(d, 1e-3), atol=1e-5, rtol=0) for d in off]
        assert broken.count(True) == 1
        assert not torch.equal(op.backward(x, [x] * op.grads), op.backward(x, [x] * op.grads, define=define))
