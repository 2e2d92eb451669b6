"""grad_group_norms and scale_grads_."""

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from helpers import (
    DEVICE,
    FLOATS,
    assert_close_to_reference,
    assert_one_rounding,
    default_device,
    each_backend,
)
from torch.utils._python_dispatch import TorchDispatchMode

import camox_ops as cx
from camox_ops import _C, reference

REDUCTIONS = ("sum_of_norms", "l2")
on_cpu = pytest.mark.skipif(DEVICE.type != "cpu", reason="the CPU's way past the dispatcher")
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


@every_dtype
def test_matches_reference_layouts(dtype):
    grads = in_layouts(dtype)
    groups = list(range(len(grads)))
    ours = cx.grad_group_norms(grads, groups, len(grads))
    truth = reference.grad_group_norms([grad.double() for grad in grads], groups, len(grads))
    torch.testing.assert_close(ours.double(), truth, rtol=1e-6, atol=0)
    expected = [grad.double() * (0.5 + i) for i, grad in enumerate(grads)]
    for i in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9):  # several share the memory of one tensor: one at a time
        again = in_layouts_from(grads[i])
        cx.scale_grads_([again], [i], torch.arange(len(grads), device=DEVICE) + 0.5)
        torch.testing.assert_close(again.double(), expected[i], rtol=torch.finfo(dtype).eps, atol=0)


def in_layouts_from(grad) -> torch.Tensor:
    """A copy in memory of its own, with the strides of grad."""
    if grad.numel() == 0:
        return grad.clone()
    reach = sum((size - 1) * stride for size, stride in zip(grad.shape, grad.stride(), strict=True))
    storage = torch.full((reach + 1,), float("nan"), dtype=grad.dtype, device=grad.device)
    view = storage.as_strided(grad.shape, grad.stride())
    first = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in grad.stride())
    view[first].copy_(grad[first])
    return view


def test_what_lies_between_the_elements_is_left_alone():
    larger = torch.arange(60.0, device=DEVICE).view(6, 10)
    expected = larger.clone()
    expected[1:4, 2:7:2] *= 3
    cx.scale_grads_([larger[1:4, 2:7:2]], [0], torch.tensor([3.0], device=DEVICE))
    assert torch.equal(larger, expected)


def test_mixed_dtypes_in_one_list():
    grads = [grad.to(dtype) for grad, dtype in zip(gradients(sizes=(9, 100, 8200)), FLOATS[:3], strict=True)]
    ours = cx.grad_group_norms(grads, [0, 0, 0], 1, reduce="l2")
    assert ours.dtype == torch.float32
    truth = torch.cat([grad.double() for grad in grads]).norm()
    assert abs(ours.item() - truth.item()) <= 1e-6 * truth.item()


@every_reduce
def test_the_total_norm_of_clip_grad_norm(reduce):
    model = torch.nn.Sequential(torch.nn.Linear(20, 300), torch.nn.ReLU(), torch.nn.Linear(300, 3)).to(DEVICE)
    model(torch.randn(8, 20, device=DEVICE)).square().sum().backward()
    grads = [p.grad for p in model.parameters()]
    norms = cx.grad_group_norms(grads, [0, 0, 1, 1], 2, reduce=reduce)
    total = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf)
    if reduce == "l2":
        torch.testing.assert_close(norms.square().sum().sqrt(), total, rtol=1e-6, atol=0)
        expected = [grad.clone() for grad in grads]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        theirs = [grad.clone() for grad in grads]
        factor = (0.5 / (norms.square().sum().sqrt() + 1e-6)).clamp(max=1)
        cx.scale_grads_(expected, [0, 0, 1, 1], factor.expand(2))
        torch.testing.assert_close(expected, theirs)
    else:
        torch.testing.assert_close(norms.sum(), torch.stack([grad.norm() for grad in grads]).sum())


def test_eight_million_elements_lose_no_digits():
    """Of one sign and far from 1, where a running float32 sum would stop growing."""
    grad = torch.full((8_000_003,), 1e-3, device=DEVICE)
    ours = cx.grad_group_norms([grad], [0], 1).double().item()
    truth = math.sqrt(8_000_003) * torch.tensor(1e-3).double().item()
    assert abs(ours - truth) <= 2**-23 * truth


@pytest.mark.parametrize("size", [1e-30, 1e25])
def test_squares_that_float32_cannot_hold(size):
    grads = gradients(sizes=(10, 9000), scale=size)
    ours = cx.grad_group_norms(grads, [0, 1], 2)
    truth = reference.grad_group_norms([grad.double() for grad in grads], [0, 1], 2)
    torch.testing.assert_close(ours.double(), truth, rtol=1e-6, atol=0)


def test_one_square_in_hundreds_that_float32_cannot_hold():
    grad = gradients(sizes=(9000,))[0]
    grad[::700] = 1e25
    ours = cx.grad_group_norms([grad], [0], 1).double()
    torch.testing.assert_close(ours, grad.double().norm().view(1), rtol=1e-6, atol=0)


@every_reduce
def test_nan_and_inf_are_those_of_their_group(reduce):
    grads = gradients(sizes=(40, 9000, 70000, 33))
    expected = cx.grad_group_norms(grads, [0, 1, 2, 3], 4, reduce=reduce)
    grads[1][8999], grads[2][5] = float("nan"), float("-inf")
    ours = cx.grad_group_norms(grads, [0, 1, 2, 3], 4, reduce=reduce)
    assert ours[1].isnan() and ours[2] == math.inf
    assert torch.equal(ours[[0, 3]], expected[[0, 3]])


# ---- lists ----


def operator_norms(grads, groups, count, reduce=0) -> torch.Tensor:
    return torch.ops.camox_ops.grad_group_norms(grads, groups, count, reduce)


def list_norms(grads, groups, count, reduce=0) -> torch.Tensor | None:
    """What is read off the list itself; None where the operator has to look at it."""
    norms = torch.full((count,), -1.0, device="cpu")
    written = _C.grad_norms_of_list(grads, groups, reduce, norms)
    assert written or torch.equal(norms, torch.full((count,), -1.0))
    return norms if written else None


@on_cpu
@every_reduce
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_list_is_added_up_as_by_the_operator(threads, reduce):
    """Bit by bit; large gradients between small ones, whose sums begin while the list is read."""
    code = REDUCTIONS.index(reduce)
    halves = (torch.bfloat16, torch.float16)
    kinds = [gradients(sizes=SIZES), gradients(sizes=(65536, 65537, 200_000)), *(gradients(half) for half in halves)]
    grads = [kinds[i % 4][i // 4 % len(kinds[i % 4])] for i in range(331)]
    grads[::7] = map(torch.nn.Parameter, grads[::7])
    torch.set_num_threads(threads)
    try:
        for chosen in (grads, tuple(grads), grads[:9], grads[1:40:4]):
            groups = groups_of(chosen, 41)
            ours = list_norms(chosen, groups, 41, code)
            assert torch.equal(ours, operator_norms(chosen, groups, 41, code))
            assert torch.equal(ours, cx.grad_group_norms(chosen, groups, 41, reduce=reduce))
    finally:
        torch.set_num_threads(2)


@on_cpu
@every_dtype
def test_what_a_list_of_pythons_is_read_of(dtype):
    """Contiguous runs of memory, in whatever order their dimensions lie; everything else is the operator's."""
    for grad in [*in_layouts(dtype), torch.empty(0, 3, dtype=dtype), torch.ones(3, dtype=dtype).requires_grad_()]:
        ours, expected = list_norms([grad], [0], 1), cx.grad_group_norms([grad], [0], 1)
        elements = grad[tuple(slice(1 if stride == 0 else None) for stride in grad.stride())] if grad.dim() else grad
        order = sorted(range(grad.dim()), key=grad.stride().__getitem__, reverse=True)
        if dtype != torch.float64 and elements.detach().permute(order).is_contiguous():
            assert torch.equal(ours, expected)
        else:
            assert ours is None


class Marked(torch.Tensor):
    """A subclass, which may mean something else by its memory."""


@on_cpu
def test_what_a_list_of_pythons_is_not_read_of():
    good = torch.ones(4)
    refused = (
        good.double(),
        good.to_sparse(),
        good.to("meta"),
        good.int(),
        good.to(torch.complex64),
        good.as_subclass(Marked),
        torch._efficientzerotensor((3,), device="cpu"),
        torch.ones(4, 4)[:, ::2],
        3.0,
        "gradient",
    )
    for grad in refused:
        assert list_norms([good, grad, good], [0, 0, 0], 1) is None, grad
        assert list_norms([good] * 40 + [grad] + [good] * 40, [0] * 81, 1) is None, grad
    for group in (-1, 2, True, 1.0, 1 << 80, np.int64(1), None, torch.tensor(1)):
        assert list_norms([good, good], [0, group], 2) is None, group
        assert list_norms([good, None], [0, group], 2) is None, group
    assert (
        list_norms([good, good], [0], 1) is None
        and list_norms([], [], 1) is None
        and list_norms([None], [0], 1) is None
    )


class Counted(TorchDispatchMode):
    """Counts operators."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_whoever_follows_operators_sees_the_norms():
    grads, groups = gradients(), groups_of(SIZES)
    expected = cx.grad_group_norms(grads, groups, 4)
    with Counted() as mode:
        ours = [cx.grad_group_norms(grads, groups, 4)]
    assert any("grad_group_norms" in name for name in mode.seen)
    with torch.profiler.profile() as profile:
        ours.append(cx.grad_group_norms(grads, groups, 4))
    assert any("grad_group_norms" in event.key for event in profile.key_averages())
    with cx.explain() as calls:
        ours.append(cx.grad_group_norms(grads, groups, 4))
    assert [call.op for call in calls.calls] == ["grad_group_norms"]
    traced = torch.jit.trace(lambda *grads: cx.grad_group_norms(grads, groups, 4), tuple(grads), check_trace=False)
    ours.append(traced(*(2 * grad for grad in grads)) / 2)
    assert all(torch.equal(norms, expected) for norms in ours)


@on_cpu
def test_a_torch_without_dlpacks_table(monkeypatch):
    expected = cx.grad_group_norms(gradients(), groups_of(SIZES), 4)
    monkeypatch.setattr(cx.ops.grad_norms, "READS_BY_DLPACK", False)
    monkeypatch.setattr(_C, "grad_norms_of_list", None)
    assert torch.equal(cx.grad_group_norms(gradients(), groups_of(SIZES), 4), expected)


@on_cpu
def test_lists_of_several_threads_of_python():
    """Each lets the others run while it reads, and one that changes its list meanwhile reads what it has given."""
    grads = [gradients(sizes=(9000, 70_000, 64))[i % 3] for i in range(100)]
    expected = cx.grad_group_norms(grads, groups_of(grads), 4)

    def one_thread(_) -> list[torch.Tensor]:
        found = []
        for _ in range(30):
            own = [grad.clone() for grad in grads]
            found.append(cx.grad_group_norms(own, groups_of(own), 4))
        return found

    with ThreadPoolExecutor(4) as pool:
        found = [norms for of_thread in pool.map(one_thread, range(4)) for norms in of_thread]
    assert len(found) == 120 and all(torch.equal(norms, expected) for norms in found)


def test_none_is_skipped():
    grads = [None, torch.tensor([3.0, 4.0], device=DEVICE), None]
    assert cx.grad_group_norms(grads, [0, 1, 1], 2).tolist() == [0.0, 5.0]
    assert cx.scale_grads_(grads, [0, 1, 1], torch.tensor([2.0, 0.5], device=DEVICE)) is None
    assert grads[1].tolist() == [1.5, 2.0]
    for nothing in ([], [None, None]):
        assert cx.grad_group_norms(nothing, [0] * len(nothing), 3).tolist() == [0.0, 0.0, 0.0]
        cx.scale_grads_(nothing, [0] * len(nothing), torch.ones(1))


def test_gradients_that_are_negated_lazily():
    """As autograd makes them: the operator read memory that had been freed."""
    real, imaginary = ([torch.nn.Parameter(torch.ones(1, device=DEVICE)) for _ in range(6)] for _ in range(2))
    for i, (a, b) in enumerate(zip(real, imaginary, strict=True)):
        (torch.complex(a, b).conj() * torch.tensor([2 + (i + 1) * 1j], device=DEVICE)).real.sum().backward()
    grads = [parameter.grad for parameter in imaginary]
    assert all(grad.is_neg() for grad in grads)
    before = [grad._version for grad in grads]
    norms = cx.grad_group_norms(grads, range_of(grads), 6)
    assert norms.tolist() == [1, 2, 3, 4, 5, 6]
    factors = -torch.arange(6.0, device=DEVICE)
    cx.scale_grads_([*grads, grads[2]], [*range_of(grads), 3], torch._neg_view(factors))
    assert [grad.item() for grad in grads] == [0, 2, 6 * 3, 12, 20, 30]
    assert all(grad._version > old for grad, old in zip(grads, before, strict=True))


def test_gradients_that_are_lazily_zero():
    grads = [torch._efficientzerotensor((50, 40), device=DEVICE) for _ in range(6)]
    assert cx.grad_group_norms(grads, range_of(grads), 6).tolist() == [0] * 6


def range_of(grads) -> list[int]:
    return list(range(len(grads)))


def test_norms_of_no_gradient_under_other_defaults():
    torch.set_default_dtype(torch.float64)
    try:
        with default_device("meta"):
            for grads in ([], [None]):
                norms = cx.grad_group_norms(grads, [0] * len(grads), 2)
                assert norms.device.type == "cpu" and norms.dtype is torch.float32 and norms.tolist() == [0.0, 0.0]
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_tensor_that_is_listed_several_times():
    grad, other = torch.tensor([3.0, 4.0], device=DEVICE), torch.tensor([2.0], device=DEVICE)
    assert cx.grad_group_norms([grad, other, grad, grad], [0, 1, 1, 1], 2).tolist() == [5.0, 12.0]
    scales = torch.tensor([0.5, 4.0, 3.0], device=DEVICE)
    cx.scale_grads_([grad, other, grad, grad.view(2, 1)], [0, 1, 1, 2], scales)
    assert grad.tolist() == [18.0, 24.0] and other.tolist() == [8.0]
    half = torch.tensor([1.001], dtype=torch.float16, device=DEVICE)  # one rounding, not one for each factor
    expected = half.float() * 3 * 0.7 * 1.1
    cx.scale_grads_([half] * 3, [0, 1, 2], torch.tensor([3.0, 0.7, 1.1], device=DEVICE))
    assert torch.equal(half, expected.half())


def test_views_that_share_memory_are_scaled_by_both():
    whole = torch.ones(20000, device=DEVICE)
    scales = torch.tensor([2.0, 3.0, 5.0], device=DEVICE)
    cx.scale_grads_([whole[:15000], whole[5000:], whole[::2]], [0, 1, 2], scales)
    expected = torch.ones(20000)
    expected[:15000] *= 2
    expected[5000:] *= 3
    expected[::2] *= 5
    assert torch.equal(whole.cpu(), expected)


def test_a_factor_of_1_leaves_every_bit():
    bits = torch.tensor([0x7F800001, -1, 3], dtype=torch.int32)  # a signalling NaN, another one, a subnormal
    grad = bits.view(torch.float32).to(DEVICE)
    cx.scale_grads_([grad], [0], torch.ones(1, device=DEVICE))
    assert torch.equal(grad.cpu().view(torch.int32), bits)


def test_autograd_sees_the_write_and_follows_nothing():
    x = torch.randn(5, device=DEVICE, requires_grad=True)
    y = x.exp()
    norms = cx.grad_group_norms([y, x], [0, 0], 1)
    assert not norms.requires_grad
    cx.scale_grads_([y.detach()], [0], torch.full((1,), 2.0, device=DEVICE))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    with torch.inference_mode():
        z = torch.ones(3, device=DEVICE)
        cx.scale_grads_([z], [0], torch.full((1,), 2.0, device=DEVICE))
    cx.scale_grads_([z, x.detach()], [0, 0], torch.full((1,), 2.0, device=DEVICE))
    assert z.tolist() == [4.0] * 3


def test_amp_after_unscaling():
    """GradScaler divides in place; norms by group say which group overflowed, and the step is left out."""
    parameters = [torch.nn.Parameter(torch.ones(4, device=DEVICE)) for _ in range(3)]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=1024.0)
    scaler.scale(sum((i + 1) * p.sum() for i, p in enumerate(parameters))).backward()
    scaler.unscale_(optimizer)
    norms = cx.grad_group_norms([p.grad for p in parameters], [0, 1, 1], 2)
    assert norms.tolist() == [2.0, 10.0]
    cx.scale_grads_([p.grad for p in parameters], [0, 1, 1], 1 / norms)
    scaler.step(optimizer), scaler.update()
    assert [p[0].item() for p in parameters] == pytest.approx([0.5, 0.8, 0.7])
    parameters[2].grad.fill_(math.inf)
    assert cx.grad_group_norms([p.grad for p in parameters], [0, 1, 1], 2).isfinite().tolist() == [True, False]


@each_backend
def test_compiled_without_a_graph_break(backend):
    def step(grads, scales):
        norms = cx.grad_group_norms(grads, [0, 1, 1], 2)
        cx.scale_grads_(grads, [0, 1, 1], scales / norms)
        return norms

    ours, theirs = ([*gradients(sizes=(5, 9000)), None] for _ in range(2))
    scales = torch.tensor([2.0, 3.0], device=DEVICE)
    found = torch.compile(step, fullgraph=True, backend=backend)(ours, scales)
    torch.testing.assert_close([found, *ours[:2]], [step(theirs, scales), *theirs[:2]])


# ---- errors ----


def one(**options) -> torch.Tensor:
    return torch.ones(3, **{"device": DEVICE, **options})


SCALES = torch.full((2,), 2.0, device=DEVICE)
WRONG_LISTS = [
    ((one(), [0]), TypeError, "grads must be a list or a tuple, got Tensor"),
    (([one()], torch.tensor([0])), TypeError, "groups must be a list or a tuple, got Tensor"),
    (([one(), one()], [0]), ValueError, "grads and groups must have the same length, got 2 and 1"),
    (([one(), one()], [0, 2]), ValueError, r"groups\[1\] must be in \[0, 2\), got 2"),
    (([one(), None], [0, -1]), ValueError, r"groups\[1\] must be in \[0, 2\), got -1"),
    (([one()], [0.5]), TypeError, r"groups\[0\] must be an int, got 0.5"),
    (([one(), one()], [0, True]), TypeError, r"groups\[1\] must be an int, got True"),
    (([one()], [torch.tensor(1.7)]), TypeError, r"groups\[0\] must be an int, got tensor\(1.7000\)"),
    (([one()], [np.float32(1.7)]), TypeError, r"groups\[0\] must be an int, got .*1.7"),
    (([one(), 3.0], [0, 1]), TypeError, r"grads\[1\] must be a torch.Tensor, got float"),
    (([one(), one(dtype=torch.int32)], [0, 1]), TypeError, r"grads\[1\] must have dtype float32.*got int32"),
    (([one(), one(dtype=torch.complex64)], [0, 1]), TypeError, r"grads\[1\] must have dtype float32.*got complex64"),
    (
        ([one(), one(device="meta")], [0, 1]),
        ValueError,
        "each of grads must be on the device of the first of them, .*, got meta",
    ),
    (([None, one().to_sparse()], [0, 1]), TypeError, r"grads\[1\] must be a dense tensor, got layout torch.sparse_coo"),
]


@pytest.mark.parametrize(("lists", "error", "message"), WRONG_LISTS)
def test_errors_of_lists(lists, error, message):
    with pytest.raises(error, match=f"grad_group_norms: {message}"):
        cx.grad_group_norms(*lists, 2)
    with pytest.raises(error, match=f"scale_grads_: {message}"):
        cx.scale_grads_(*lists, SCALES)
    for grad in lists[0]:
        if isinstance(grad, torch.Tensor) and grad.layout == torch.strided and grad.device == DEVICE:
            assert torch.equal(grad, torch.ones_like(grad))  # nothing was written


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (([one()], [0], 1), {"reduce": "max"}, ValueError, "reduce must be one of 'sum_of_norms', 'l2', got 'max'"),
        (([one()], [0], 1.0), {}, TypeError, "num_groups must be an int, got 1.0"),
        (([one()], [0], -1), {}, ValueError, "num_groups must be >= 0, got -1"),
        (([], [], -1), {}, ValueError, "num_groups must be >= 0, got -1"),
    ],
)
def test_errors_of_norms(arguments, options, error, message):
    with pytest.raises(error, match=f"grad_group_norms: {message}"):
        cx.grad_group_norms(*arguments, **options)


@pytest.mark.parametrize(
    ("scales", "error", "message"),
    [
        ([1.0, 2.0], TypeError, "scales must be a torch.Tensor, got list"),
        (torch.ones(2, dtype=torch.int64), TypeError, "scales must have dtype float32, float64, got int64"),
        (torch.ones(2, 1), ValueError, r"scales must have 1 dimension, got shape \(2, 1\)"),
        (torch.ones(1), ValueError, r"groups\[1\] must be in \[0, 1\), got 1"),
        (torch.ones(2, device="meta"), ValueError, "scales must be on the device of the gradients, cpu, got meta"),
    ],
)
def test_errors_of_scales(scales, error, message):
    grads = [torch.ones(3), torch.ones(2)]
    with pytest.raises(error, match=f"scale_grads_: {message}"):
        cx.scale_grads_(grads, [0, 1], scales)
    assert all(torch.equal(grad, torch.ones_like(grad)) for grad in grads)


def test_errors_of_elements_that_share_memory():
    windows, first = torch.ones(9, device=DEVICE).as_strided((3, 4), (2, 1)), one()
    with pytest.raises(ValueError, match=r"scale_grads_: grads\[1\] has elements that share memory"):
        cx.scale_grads_([first, windows], [0, 1], SCALES)
    assert torch.equal(first, one())


def test_matches_reference_where_elements_share_memory():
    windows = torch.ones(9, device=DEVICE).as_strided((3, 4), (2, 1))
    assert cx.grad_group_norms([windows], [0], 1).item() == pytest.approx(math.sqrt(12))


def test_grad_has_no_derivative():
    """Beside an op that has one: the norms add nothing to it, and their values are those of plain tensors."""
    x = torch.tensor([3.0, 4.0], device=DEVICE, requires_grad=True)
    norm = cx.grad_group_norms([x], [0], 1)[0]
    (grad,) = torch.autograd.grad(x.sum() * norm, x)
    assert grad.tolist() == [5.0, 5.0]
