"""linear_cross_entropy's CUDA kernels on the CPU."""

import emulator
import linear_cross_entropy_cases as cases
import pytest
import torch
from emulator import doubled

from camox_ops import reference


def assert_right(inputs, options, **how):
    """By the tolerance rule, and an eps more: dz, of which gradients are sums, is rounded to the element type."""
    x, weight, target, bias, grad = inputs
    same = cases.plain(*inputs, **options)
    truth = cases.plain(*doubled(x, weight), target, *doubled(bias, grad), **options)
    for mine, theirs, right in zip(cases.run(*inputs, **options, **how), same, truth, strict=True):
        largest, rounding = right.abs().max().item(), torch.finfo(mine.dtype).eps
        allowed = 2 * (theirs.double() - right).abs().max().item() + 4 * rounding * largest
        torch.testing.assert_close(
            mine.double(), right, rtol=0, atol=allowed + torch.finfo(x.dtype).eps * largest * (x.element_size() == 2)
        )


@pytest.mark.parametrize("shape", cases.SHAPES[:4])
def test_linear_cross_entropy(shape, dtype, arch):
    orders = list(emulator.ORDERS)
    for i, options in enumerate(cases.OPTIONS):
        assert_right(cases.inputs_of(shape, dtype), options, arch=arch, order=orders[i % len(orders)])


def test_linear_cross_entropy_of_several_iterations(dtype):
    assert_right(cases.inputs_of(cases.SHAPES[4], dtype), cases.OPTIONS[1])


def test_linear_cross_entropy_of_several_blocks_of_rows(dtype, monkeypatch):
    """Three, and two; the last one shorter."""
    monkeypatch.setattr(cases.loop, "FEWEST_ROWS", 1)
    monkeypatch.setattr(cases.loop, "MOST_ROWS", 64)
    assert len(cases.loop.row_blocks(130, 8, 70)) == 3
    for rows, options in zip((66, 130, 66), cases.OPTIONS, strict=True):
        assert_right(cases.inputs_of((rows, 8, 70), dtype), options)


def test_linear_cross_entropy_strides_over_a_small_grid(dtype, order):
    inputs = cases.inputs_of((9, 72, 130), dtype)
    expected = cases.run(*inputs, **cases.OPTIONS[1])
    ours = cases.run(*inputs, **cases.OPTIONS[1], grid_cap=2, order=order)
    for mine, theirs in zip(ours, expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("flush", ["start", "end"])
def test_linear_cross_entropy_stays_within_its_tensors(dtype, flush):
    for shape in ((5, 8, 9), (3, 13, 70)):
        assert_right(cases.inputs_of(shape, dtype), cases.OPTIONS[2], flush=flush)


def test_linear_cross_entropy_of_small_gradients(dtype):
    """float16 has no numbers for the gradient of a mean over many rows and classes; the products scale it."""
    x, weight, target, bias, grad = cases.inputs_of((64, 16, 130), dtype)
    assert_right((x, weight, target, bias, grad * 1e-6), cases.OPTIONS[2])


@pytest.mark.parametrize("half", emulator.HALVES)
def test_linear_cross_entropy_of_truncated_logits(half):
    """Tensor cores truncate long sums: products that are off by 4e-6 make no loss of hundreds wrong by as much."""
    x, weight, target, bias, grad = cases.inputs_of((4, 513, 37), half)
    weight[:3] = x[:3]
    target[:3], target[3] = torch.tensor([0, 7, 2]), -100
    for smoothing in (0.0, 0.1):
        options = {"label_smoothing": smoothing, "reduction": "none"}
        loss, *_ = cases.run(x, weight, target, bias, grad, **options, biased=True, truncation=4e-6)
        truth = reference.linear_cross_entropy(x.double(), weight.double(), target, bias.double(), **options)
        assert truth.max() > 100
        torch.testing.assert_close(loss.double(), truth, rtol=1e-6, atol=1e-4)


def test_linear_cross_entropy_of_a_wrong_target():
    x, weight, target, bias, grad = cases.inputs_of((6, 8, 9), torch.float32)
    for wrong in (9, -1):
        target[3] = wrong
        (loss, top, _, grad_x, *_), word = cases.run(
            x, weight, target, bias, grad, **cases.OPTIONS[2], with_errors=True
        )
        assert word == 8
        for rows in (loss, top, grad_x.sum(1)):
            assert rows.isnan().tolist() == [False, False, False, True, False, False]


def test_linear_cross_entropy_empty():
    for shape in ((0, 4, 5), (4, 0, 5), (4, 3, 0)):
        x, weight, target, bias, grad = cases.inputs_of(shape, torch.float32)
        target = target if shape[2] else torch.full_like(target, -100)
        grad = grad if shape[0] else torch.zeros(1)
        loss, _, _, grad_x, grad_weight, _ = cases.run(
            x, weight, target, bias, grad, label_smoothing=0.0, reduction="sum", biased=False
        )
        assert loss.isfinite()
        assert (grad_x == 0).all()
        assert (grad_weight == 0).all()


@pytest.mark.slow
def test_linear_cross_entropy_broken_build_is_noticed():
    inputs = cases.inputs_of((5, 8, 9), torch.float32)
    define = "CAMOX_BREAK_LINEAR_CROSS_ENTROPY"
    wrong, right = (cases.run(*inputs, **cases.OPTIONS[1], define=d) for d in (define, ""))
    for k in (0, 3, 4, 5):
        assert not torch.allclose(wrong[k], right[k], atol=1e-4)


def test_linear_cross_entropy_copies_strides_beyond_those_of_cublas(monkeypatch):
    strides = []

    def multiply(a, b, *how, **more):
        strides.extend((*a.stride(), *b.stride()))
        return product(a, b, *how, **more)

    product = cases.loop._multiply
    monkeypatch.setattr(cases.loop, "_multiply", multiply)
    monkeypatch.setattr(cases.loop, "MOST_STRIDE", 20)
    x, *others = cases.inputs_of((5, 8, 9), torch.float32)
    distant = torch.empty(5, 40).as_strided(x.shape, (40, 1)).copy_(x)
    assert_right((distant, *others), cases.OPTIONS[1])
    assert max(strides) <= 20
