"""grad_group_norms and scale_grads_."""

import math

import pytest
import torch
from helpers import DEVICE, FLOATS, assert_close_to_reference, assert_one_rounding

import camox_ops as cx
from camox_ops import reference

REDUCTIONS = ("sum_of_norms", "l2")
every_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: str(dtype).removeprefix("torch."))
every_reduce = pytest.mark.parametrize("reduce", REDUCTIONS)
# Around vectors, steps of 32 elements, pieces of 8192, work items of 65536.
SIZES = (1, 7, 31, 32, 33, 100, 8191, 8192, 8193, 70001, 0, 5)


def gradients(dtype=torch.float32, sizes=SIZES, scale=1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [scale * torch.randn(n, generator=generator, dtype=torch.float64, device="cpu") for n in sizes]
    return [grad.to(DEVICE, dtype) for grad in made]


def groups_of(grads, count=4) -> list[int]:
    return [(3 * i) % count for i in range(len(grads))]


def in_layouts(dtype) -> list[torch.Tensor]:
    """Gradients whose elements do not lie in memory as contiguous ones do, and the same contiguously."""
    image, matrix = (grad.to(dtype) for grad in (torch.randn(3, 8, 5, 6), torch.randn(40, 30)))
    image, matrix = image.to(DEVICE), matrix.to(DEVICE)
    return [
        image.contiguous(memory_format=torch.channels_last),
        matrix.t(),
        matrix[:, ::3],
        matrix[5:20, 3:17],
        matrix[:1].expand(7, 30),
        matrix[:, :1].expand(40, 9),
        matrix[:, ::2][:, None, :3].expand(40, 4, 3),
        image.permute(2, 0, 3, 1),
        torch.tensor(2.5, device=DEVICE).to(dtype).expand(5, 4),
        torch.tensor(-1.5, device=DEVICE).to(dtype),
    ]


# ---- norms ----


def test_known_values():
    """3-4-5 and 5-12-13 triangles."""
    grads = [torch.tensor(values, device=DEVICE) for values in ([3.0, 4.0], [[12.0], [5.0]], [8.0], [-2.0])]
    assert cx.grad_group_norms(grads, [0, 0, 2, 2], 4).tolist() == [18.0, 0.0, 10.0, 0.0]
    expected = [math.sqrt(25.0 + 169.0), 0.0, math.sqrt(68.0), 0.0]
    assert cx.grad_group_norms(grads, [0, 0, 2, 2], 4, reduce="l2").tolist() == pytest.approx(expected, rel=1e-7)


@every_reduce
@every_dtype
def test_matches_reference(dtype, reduce):
    grads = gradients(dtype)
    groups = groups_of(grads)
    ours = cx.grad_group_norms(grads, groups, 5, reduce=reduce)
    assert ours.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    same = reference.grad_group_norms(grads, groups, 5, reduce)
    truth = reference.grad_group_norms([grad.double() for grad in grads], groups, 5, reduce)
    assert_close_to_reference(ours, same, truth, truth.max().item())
    if DEVICE.type == "cpu" and dtype != torch.float64:  # sums in float64, one rounding
        assert torch.equal(ours, truth.float())


@every_dtype
def test_matches_reference_scale(dtype):
    grads, theirs, truth = gradients(dtype), gradients(dtype), [grad.double() for grad in gradients(dtype)]
    groups, scales = groups_of(grads), torch.tensor([0.3, 1.0, 0.0, -7.7], device=DEVICE)
    cx.scale_grads_(grads, groups, scales)
    reference.scale_grads_(theirs, groups, scales)
    reference.scale_grads_(truth, groups, scales.double())
    assert_close_to_reference(grads, theirs, truth)
    if dtype.itemsize == 2:
        single = [grad.float() for grad in gradients(dtype)]
        cx.scale_grads_(single, groups, scales)
        assert_one_rounding(grads, single)
