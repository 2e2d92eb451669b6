"""CUDA kernels on the CPU: the rig finds planted bugs; every kernel of the library runs in it against the reference."""

import ctypes
import json
import sys
from pathlib import Path

import pytest
import torch
from helpers import DEVICE, LAYOUTS, assert_close_to_reference, assert_one_rounding, picture

sys.path.insert(0, str(Path(__file__).parent / "cuda"))
import bands_cases
import edge_cases
import rig
import spatial_gradient_cases

OPS = sorted(rig.CSRC.glob("*/*_cuda.cu"))
PLANTED = sorted((Path(__file__).parent / "cuda").glob("*.cu"))

EVERY_KERNEL = {
    "bands_cuda": bands_cases.every_kernel,
    "edge_cuda": edge_cases.every_kernel,
    "spatial_gradient_cuda": spatial_gradient_cases.every_kernel,
}
PICTURE_OPS = [cases.OP for cases in (bands_cases, edge_cases, spatial_gradient_cases)]

unavailable = rig.why_unavailable() if DEVICE.type == "cpu" else "the rig runs on the CPU"
pytestmark = pytest.mark.skipif(unavailable is not None, reason=str(unavailable))


@pytest.fixture(scope="module", autouse=True)
def built():
    if unavailable is None:
        rig.build_all([*OPS, *PLANTED])


def at(tensor):
    return ctypes.c_void_p(tensor.data_ptr())


def launcher(name, arch):
    (source,) = [path for path in PLANTED if path.stem == name]
    return getattr(rig.load(source, arch), f"camox_{name}")


@pytest.fixture(params=rig.ORDERS)
def order(request):
    return request.param


@pytest.fixture(params=rig.ARCHS)
def arch(request):
    return request.param


def missing_barrier(planted, order, arch):
    with rig.guarded() as memory:
        x = memory.copy(torch.randn(5, 64))
        y = memory.empty_like(x)
        rig.call(launcher("missing_barrier", arch), planted, at(x), at(y), 5, order=order)
        return y.clone(), x.flip(1)


def missing_cp_async_wait(planted, order, arch):
    with rig.guarded() as memory:
        x = memory.copy(torch.randn(5, 128))
        y = memory.empty_like(x)
        rig.call(launcher("missing_cp_async_wait", arch), planted, at(x), at(y), 5, order=order)
        return y.clone(), x.clone()


def index_past_end(planted, order, arch, flush="end"):
    with rig.guarded(flush) as memory:
        x = memory.copy(torch.arange(100.0), "x")
        y = memory.empty_like(x, name="y")
        rig.call(launcher("index_past_end", arch), planted, at(x), at(y), 100, order=order)
        return y.clone(), x + torch.cat([x[1:], torch.zeros(1)])


def uninitialised_shared(planted, order, arch):
    with rig.guarded() as memory:
        x = memory.copy(torch.randint(-9, 9, (5, 64)).float())
        y = memory.empty_strided((5,), (1,), torch.float32)
        rig.call(launcher("uninitialised_shared", arch), planted, at(x), at(y), 5, order=order)
        return y.clone(), x.sum(1)


def divergent_shuffle(planted, order, arch, timeout=60.0):
    with rig.guarded() as memory:
        x = memory.copy(torch.randint(-9, 9, (32,)).float())
        y = memory.empty_strided((1,), (1,), torch.float32)
        rig.call(launcher("divergent_shuffle", arch), planted, at(x), at(y), order=order, timeout=timeout)
        return y.clone(), x.sum().reshape(1)


def wrong_mma_fragment(planted, order, arch, dtype=torch.float16):
    with rig.guarded() as memory:
        a, b = memory.copy(torch.randn(16, 16).to(dtype)), memory.copy(torch.randn(16, 8).to(dtype))
        d = memory.empty_strided((16, 8), (8, 1), torch.float32)
        bfloat16 = int(dtype == torch.bfloat16)
        rig.call(launcher("wrong_mma_fragment", arch), planted, bfloat16, at(a), at(b), at(d), order=order)
        return d.clone(), (a.double() @ b.double()).float()


def same(result) -> bool:
    return torch.allclose(*result, rtol=1e-5, atol=1e-5)


CORRECT = (
    missing_barrier,
    missing_cp_async_wait,
    index_past_end,
    uninitialised_shared,
    divergent_shuffle,
    wrong_mma_fragment,
)


@pytest.mark.parametrize("kernel", CORRECT, ids=lambda kernel: kernel.__name__)
def test_correct_twins_pass(kernel, order, arch):
    assert same(kernel(0, order, arch))


def test_bfloat16_mma(order):
    assert same(wrong_mma_fragment(0, order, 900, torch.bfloat16))
    with pytest.raises(rig.KernelError, match="sm_75 has no bfloat16 mma"):
        wrong_mma_fragment(0, order, 750, torch.bfloat16)


def test_missing_barrier_differs(order, arch):
    result, truth = missing_barrier(1, order, arch)
    assert not same((result, truth))
    assert result.isnan().any()  # the other half of the block has not written yet


def test_missing_cp_async_wait_reads_nan(order):
    result, _ = missing_cp_async_wait(1, order, 900)
    assert result.isnan().any()
    with pytest.raises(rig.KernelError, match=r"cp\.async at line \d+ is never waited for"):
        missing_cp_async_wait(2, order, 900)
    assert same(missing_cp_async_wait(2, order, 750))  # no cp.async on sm_75: the copy is made at once


OUT = r"out of bounds at 0x\w+: "  # "read", "write", or "access" where the processor does not tell


@pytest.mark.parametrize(
    ("planted", "flush", "message"),
    [
        (1, "end", rf"block \(3,0,0\), thread \(3,0,0\): (read|access) {OUT}0 bytes past the end of buffer 'x'"),
        (2, "end", rf"block \(3,0,0\), thread \(3,0,0\): (write|access) {OUT}0 bytes past the end of buffer 'y'"),
        (2, "start", r"written beside buffer 'y'"),
        (3, "start", rf"block \(0,0,0\), thread \(0,0,0\): (read|access) {OUT}4 bytes before buffer 'x'"),
        (4, "end", r"index 2 is out of its array's bounds \(index_past_end.cu:\d+\)"),
        (5, "end", rf"thread \(31,0,0\): (write|access) {OUT}dynamic shared memory has 128 bytes, this is byte 128"),
        (6, "end", r"misaligned or null access"),
    ],
)
def test_index_out_of_bounds_is_named(planted, flush, message, order, arch):
    with pytest.raises(rig.KernelError, match=message):
        index_past_end(planted, order, arch, flush)


def test_uninitialised_shared_is_nan(order, arch):
    assert uninitialised_shared(1, order, arch)[0].isnan().all()


@pytest.mark.parametrize(
    ("planted", "message"),
    [
        (
            1,
            r"waits at __shfl_xor_sync\(\) .* mask 0xffffffff\) for lane \d+, but thread .* has left the kernel",
        ),
        (2, r"shuffle reads lane \d+, which takes no part in it"),
        (3, r"waits at __syncthreads\(\) .* with 16 of 32 threads, but thread \(16,0,0\) has left the kernel"),
    ],
)
def test_divergence_is_named(planted, message, order, arch):
    with pytest.raises(rig.KernelError, match=message):
        divergent_shuffle(planted, order, arch)


def test_endless_loop_is_named(arch):
    with pytest.raises(rig.KernelError, match=r"divergent_shuffle_kernel<4>.*still running after 0.2 s"):
        divergent_shuffle(4, "forward", arch, timeout=0.2)


def test_wrong_mma_fragment_differs(order, arch):
    assert not same(wrong_mma_fragment(1, order, arch))


def test_a_kernel_that_was_never_run_is_named():
    path = rig.object_path(PLANTED[0].with_name("uninitialised_shared.cu"), 900)
    ours = {key: count for key, count in rig.runs.items() if key[0] == path.name}
    try:
        for key in ours:
            del rig.runs[key]
        uninitialised_shared(0, "forward", 900)
        (name,) = rig.never_run(path)
        assert name == "void uninitialised_shared_kernel<true>(float const*, float*)"
        assert len(rig.kernels(path)) == 2
    finally:
        rig.runs.update(ours)


# ---- ops on pictures ----
HALVES = (torch.bfloat16, torch.float16)


@pytest.fixture(params=rig.DTYPES)
def dtype(request):
    return rig.DTYPES[request.param]


@pytest.fixture(params=PICTURE_OPS, ids=str)
def op(request):
    return request.param


def gradients(op, x, layout="contiguous"):
    return [picture(x.shape, x.dtype, layout, seed=i + 1) for i in range(op.grads)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_picture_forward(op, dtype, layout, arch):
    for shape, options, order in op.cases():
        for kind in ("normal", "offset"):
            x = picture(shape, dtype, layout, kind)
            ours = op.forward(x, options, arch=arch, order=order)
            assert_close_to_reference(ours, op.reference(x, **options), op.reference(x.double(), **options))
            if dtype in HALVES:
                assert_one_rounding(ours, op.forward(x.float(), options, arch=arch))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_picture_backward(op, dtype, layout, arch):
    for shape, options, order in op.cases(backward=True):
        x = picture(shape, dtype, layout)
        grads = gradients(op, x, layout)
        if shape[3] < 20:
            grads[-2] = picture(shape, dtype, "strided", seed=9)
        ours = op.backward(x, grads, options, arch=arch, order=order)
        truth = op.reference_backward(x.double(), [g.double() for g in grads], **options)
        assert_close_to_reference(ours, op.reference_backward(x, grads, **options), truth)
        if dtype in HALVES:
            floats = op.backward(x.float(), [g.float() for g in grads], options, arch=arch)
            assert_one_rounding(ours, floats)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_picture_large_mean_costs_no_accuracy(op, layout):
    """Inside, where no border is seen, the picture with mean 1e4 is treated as well as torch treats it without."""
    x = picture((1, 8, 21, 32), layout=layout, kind="offset")
    truth, plain = (op.reference(like) for like in (x.double(), x - 1e4))
    for i, ours in enumerate(op.forward(x)):
        if op.outputs[i] != "low":
            assert_close_to_reference(*(y[..., 2:-2, 2:-2] for y in (ours, plain[i], truth[i])))


@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
@pytest.mark.parametrize("shape", [(2, 8, 5, 16), (2, 3, 5, 7)])
@pytest.mark.parametrize("op", [bands_cases.OP, edge_cases.OP], ids=str)
def test_picture_stacked(op, shape, layout, dtype, order):
    x = picture(shape, dtype, layout)
    options = op.options[-1]
    ours = op.forward(x, options, stacked=True, order=order)
    assert torch.equal(ours, torch.cat([*op.forward(x, options), x], dim=1))


@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
def test_picture_backward_of_some_maps(op, layout, order):
    x = picture((2, 8, 6, 12), layout=layout)
    options = op.cases(backward=True)[0][1]
    for chosen in range(op.grads):
        grads = [grad if i == chosen else None for i, grad in enumerate(gradients(op, x, layout))]
        ours = op.backward(x, grads, options, order=order)
        truth = op.reference_backward(x.double(), [g if g is None else g.double() for g in grads], **options)
        assert_close_to_reference(ours, op.reference_backward(x, grads, **options), truth)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_picture_stays_inside_at_both_ends(op, layout, dtype, order):
    """Flush against a guard page at the end in the tests above, at the start here; the bits are the same."""
    for shape in ((1, 3, 4, 16), (2, 16, 5, 7)):
        x = picture(shape, dtype, layout)
        grads = gradients(op, x, layout)
        starts = [*op.forward(x, flush="start", order=order), op.backward(x, grads, flush="start", order=order)]
        for ours, ends in zip(starts, [*op.forward(x), op.backward(x, grads)], strict=True):
            assert torch.equal(ours, ends)


@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
def test_picture_small_grid_strides_over_the_rest(op, layout, dtype, order):
    """A grid of two blocks, whose threads walk down long strips, does the work of many: what a grid at its limit of
    2^31-1 does on a GPU, and what large pictures do."""
    x = picture((3, 24, 18, 32), dtype, layout)
    grads = gradients(op, x, layout)
    few = [*op.forward(x, grid_cap=2, order=order), op.backward(x, grads, grid_cap=2, order=order)]
    for ours, whole in zip(few, [*op.forward(x), op.backward(x, grads)], strict=True):
        assert torch.equal(ours, whole)


def test_picture_bits_do_not_depend_on_the_width_of_accesses(op):
    x = picture((2, 8, 19, 24))
    grads = gradients(op, x)
    for options in op.options:
        widest = [*op.forward(x, options), op.backward(x, grads, options)]
        for layout in ("strided", "channels_last"):
            like = picture(x.shape, layout=layout)
            again = [*op.forward(like, options), op.backward(like, gradients(op, x, layout), options)]
            assert all(map(torch.equal, again, widest))


@pytest.mark.parametrize("beside", [8, 2, 1])
@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
def test_picture_cropped(op, layout, beside, dtype):
    """Rows of a larger buffer, whose pitch and end keep 16-byte alignment, 4-byte or only that of an element."""
    inner = 3 if layout == "contiguous" else 1
    shape = [1, 16, 4, 16]
    shape[inner] += beside
    larger = [picture(shape, dtype, layout, seed=i) for i in range(op.grads + 1)]
    x, *grads = (t.narrow(inner, 0, 16) for t in larger)
    whole, *whole_grads = (t.clone(memory_format=torch.contiguous_format) for t in (x, *grads))
    cropped = [*op.forward(x, order="random"), op.backward(x, grads, order="random")]
    for ours, truth in zip(cropped, [*op.forward(whole), op.backward(whole, whole_grads)], strict=True):
        assert torch.equal(ours, truth)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
def test_picture_nan_and_inf_as_in_the_reference(op, value, layout):
    for place in range(4):
        x = picture((1, 8, 4, 8), layout=layout)
        x[:, :, place, place] = value
        for ours, truth in zip(op.forward(x), op.reference(x), strict=True):
            torch.testing.assert_close(ours, truth, equal_nan=True)


def test_picture_empty(op):
    for shape in ((0, 3, 4, 5), (2, 0, 4, 5), (2, 3, 0, 5), (2, 3, 4, 0)):
        x = torch.empty(shape)
        assert [m.shape for m in op.forward(x)] == [x.shape] * len(op.outputs)
        assert op.backward(x, [x] * op.grads).shape == x.shape


@pytest.mark.slow
def test_picture_broken_build_is_noticed(op):
    define = f"CAMOX_BREAK_{op.name.upper()}"
    for layout in ("contiguous", "channels_last"):
        x = picture((1, 4, 4, 8), layout=layout)
        off = [wrong - right for right, wrong in zip(op.forward(x), op.forward(x, define=define), strict=True)]
        broken = [torch.allclose(d, torch.full_like(d, 1e-3), atol=1e-5, rtol=0) for d in off]
        assert broken.count(True) == 1
        assert not torch.equal(op.backward(x, [x] * op.grads), op.backward(x, [x] * op.grads, define=define))


@pytest.mark.slow
def test_edge_without_its_barrier_is_noticed(tmp_path, order):
    """The one barrier of the channels_last backward, taken out of a copy of the source."""
    op = edge_cases.OP
    text = op.source.read_text()
    assert text.count("__syncthreads();") == 1
    folder = tmp_path / "edge"
    folder.mkdir()
    for header in op.source.parent.glob("*.h"):
        (folder / header.name).write_text(header.read_text())
    (tmp_path / "common").symlink_to(rig.CSRC / "common")
    source = folder / "edge_without_barrier.cu"
    source.write_text(text.replace("__syncthreads();", ""))
    x = picture((1, 8, 6, 40), layout="channels_last")
    grads = [picture(x.shape, layout="channels_last", seed=i + 1) for i in range(4)]
    right, wrong = op.backward(x, grads), op.backward(x, grads, source=source, order=order)
    assert not torch.allclose(right, wrong)


# ---- every kernel ----


@pytest.mark.parametrize("source", OPS, ids=lambda source: source.stem)
def test_every_kernel_was_run(source, capsys):
    """Each __global__ function in the objects has run; `every_kernel` of the op's cases runs what no other test did."""
    budget = json.loads((rig.CSRC / "cuda_budget.json").read_text())
    for arch in rig.ARCHS:
        path = rig.object_path(source, arch)
        if rig.never_run(path):
            EVERY_KERNEL[source.stem](arch)
        assert rig.kernels(path) and {rig.short_name(name) for name in rig.kernels(path)} <= budget.keys()
        assert not rig.never_run(path), f"compiled but never run in the rig: {sorted(rig.never_run(path))}"
    with capsys.disabled():
        print(f"\n{rig.report(source.stem)}")
