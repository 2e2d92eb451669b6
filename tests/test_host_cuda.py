"""CUDA kernels on the CPU: the rig finds planted bugs; every kernel of the library runs in it against the reference."""

import ctypes
import functools
import itertools
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from dropout_inputs import LAYOUTS as DENSE_AND_STRIDED
from dropout_inputs import affine, normal
from helpers import DEVICE, LAYOUTS, assert_close_to_reference, assert_one_rounding, picture
from norm2d_truth import assert_right, forward_and_gradients, parameters
from torch.overrides import TorchFunctionMode

from camox_ops import reference
from camox_ops.reference.norm2d import ACTIVATIONS

sys.path.insert(0, str(Path(__file__).parent / "cuda"))
import bands_cases
import bdh_cases
import bias_gelu_cases
import dropout_cases
import edge_cases
import linear_attention_cases
import moe_cases
import norm2d_cases
import rig
import rope_cases
import short_attention_cases
import spatial_gradient_cases

OPS = sorted(rig.CSRC.glob("*/*_cuda.cu"))
PLANTED = sorted((Path(__file__).parent / "cuda").glob("*.cu"))

EVERY_KERNEL = {
    "bands_cuda": bands_cases.every_kernel,
    "bdh_cuda": bdh_cases.every_kernel,
    "bias_gelu_cuda": bias_gelu_cases.every_kernel,
    "dropout_cuda": dropout_cases.every_kernel,
    "edge_cuda": edge_cases.every_kernel,
    "moe_cuda": moe_cases.every_kernel,
    "linear_attention_cuda": linear_attention_cases.every_kernel,
    "norm2d_cuda": norm2d_cases.every_kernel,
    "rope_cuda": rope_cases.every_kernel,
    "short_attention_cuda": short_attention_cases.every_kernel,
    "spatial_gradient_cuda": spatial_gradient_cases.every_kernel,
}
RESERVED_SHARED = 1024  # of every block, the driver's; cuobjdump counts it from sm_90 on
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


def shared_past_limit(planted, order, arch):
    with rig.guarded() as memory:
        x = memory.copy(torch.randint(-9, 9, (5, 64)).float())
        y = memory.empty_strided((5,), (1,), torch.float32)
        rig.call(launcher("shared_past_limit", arch), planted, at(x), at(y), 5, order=order)
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
    shared_past_limit,
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


@pytest.mark.parametrize("planted", [1, 2])
def test_static_and_dynamic_shared_memory_count_together(planted, order, arch):
    message = (
        rf"shared_past_limit_kernel<{'false' if planted == 1 else 'true'}>.*: 49152 bytes of dynamic and 16 of static"
    )
    with pytest.raises(rig.KernelError, match=message):
        shared_past_limit(planted, order, arch)


def test_more_threads_than_launch_bounds_allow_are_refused(monkeypatch, arch):
    assert rig.most_threads()["dropout_norm_reduce_kernel"] == 256
    monkeypatch.setattr(rig, "most_threads", lambda: {"uninitialised_shared_kernel<false>": 32})
    with pytest.raises(rig.KernelError, match="a block of 64 threads is more than its launch bounds allow"):
        uninitialised_shared(0, "forward", arch)


def test_a_kernel_of_unknown_static_memory_is_not_launched(tmp_path):
    (source,) = [path for path in PLANTED if path.stem == "uninitialised_shared"]
    copy = tmp_path / "copy.so"  # to the runtime another object, of which nobody has told
    copy.write_bytes(rig.object_path(source, 900).read_bytes())
    with rig.guarded() as memory:
        x, y = memory.copy(torch.ones(5, 64)), memory.empty_strided((5,), (1,), torch.float32)
        with pytest.raises(rig.KernelError, match="nobody has told how much static shared memory it has"):
            rig.call(ctypes.CDLL(str(copy)).camox_uninitialised_shared, 0, at(x), at(y), 5)


def test_the_runtime_is_not_for_the_rest_of_the_process(arch):
    """torch looks for CUDA's functions by name where it was built with CUDA, and must not find those of the rig."""
    launcher("missing_barrier", arch)
    everywhere = ctypes.CDLL(None)
    for name in ("camox_host_launch", *([] if torch.version.cuda else ["cudaGetDevice", "cudaGetLastError"])):
        assert not hasattr(everywhere, name)


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
    """The one barrier of the channels_last backward, taken out of a copy of the source; the other ops' in the rig."""
    op = edge_cases.OP
    assert op.source.read_text().count("__syncthreads();") == 1
    (tmp_path / "edge").mkdir()
    for header in op.source.parent.glob("*.h"):
        (tmp_path / "edge" / header.name).write_text(header.read_text())
    (tmp_path / "common").symlink_to(rig.CSRC / "common")
    source = tmp_path / "edge" / "edge_cuda_without_barrier.cu"
    source.write_text(op.source.read_text().replace("__syncthreads();", ""))
    x = picture((1, 8, 6, 40), layout="channels_last")
    grads = [picture(x.shape, layout="channels_last", seed=i + 1) for i in range(4)]
    right, wrong = op.backward(x, grads), op.backward(x, grads, source=source, order=order)
    assert not torch.allclose(right, wrong)


# ---- layer_norm2d ----


def norm2d_inputs(shape, dtype=torch.float32, layout="contiguous", kind="normal"):
    """x, weight, bias and an incoming gradient."""
    return picture(shape, dtype, layout, kind), *parameters(shape[1]), picture(shape, dtype, layout, seed=1)


def norm2d_options(turn, shape, dtype=torch.float32, layout="contiguous"):
    """Every activation, number of groups and residual in turn."""
    return {
        "activation": list(ACTIVATIONS)[turn % len(ACTIVATIONS)],
        "groups": next(n for n in ((2, 5, 4, 1) if turn % 2 else (1,)) if shape[1] % n == 0),
        "residual": picture(shape, dtype, layout, seed=2) if turn % 3 else None,
    }


@pytest.mark.parametrize("layout", norm2d_cases.LAYOUTS)
def test_norm2d_matches_reference(dtype, layout, arch):
    for turn, shape in enumerate(norm2d_cases.SHAPES, start=arch // 100):
        tensors, options = norm2d_inputs(shape, dtype, layout), norm2d_options(turn, shape, dtype, layout)
        order = list(rig.ORDERS)[turn % len(rig.ORDERS)]
        ours = norm2d_cases.forward_and_gradients(*tensors, arch=arch, order=order, **options)
        assert_right(ours, *tensors, **options)
        if dtype in HALVES:
            residual = options.pop("residual")
            residual = residual if residual is None else residual.float()
            floats = [tensor.float() for tensor in tensors]
            full = norm2d_cases.forward_and_gradients(*floats, residual=residual, arch=arch, **options)
            assert_one_rounding(ours[:2], full[:2])


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
def test_norm2d_activations(activation, layout, dtype):
    tensors = norm2d_inputs((2, 16, 4, 6), dtype, layout)
    ours = norm2d_cases.forward_and_gradients(*tensors, activation=activation)
    assert_right(ours, *tensors, activation=activation)


@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
def test_norm2d_activation_of_zero_and_tails(layout):
    """Channels of one value make z 0, so u is the bias."""
    u = torch.tensor([0.0, -0.0, 1e-30, -1e-6, 3.0, -3.0, -5.0, 8.0, -20.0, 100.0, -100.0, 0.5])
    x = torch.full((1, len(u), 2, 2), 3.25).to(
        memory_format=torch.channels_last if layout == "channels_last" else torch.contiguous_format
    )
    for activation, act in ACTIVATIONS.items():
        y = norm2d_cases.forward(x, torch.ones_like(u), u, activation=activation)[0][0, :, 1, 1]
        torch.testing.assert_close(y.double(), act(u.double()), rtol=1e-5, atol=4e-9)
        assert torch.equal(y[:2], torch.zeros(2))
        assert (
            norm2d_cases.backward(
                torch.ones_like(x), x, torch.ones_like(u), u, torch.ones(2, 1, 1, 2, 2), activation=activation
            )[2]
            .isfinite()
            .all()
        )


@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
def test_norm2d_more_channels_than_registers(layout, dtype):
    """Walked in chunks."""
    for shape, order in zip(norm2d_cases.MANY_CHANNELS, ("random", "reverse"), strict=True):
        tensors = norm2d_inputs(shape, dtype, layout)
        ours = norm2d_cases.forward_and_gradients(*tensors, activation="silu", order=order)
        assert_right(ours, *tensors, activation="silu")


@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
@pytest.mark.parametrize("kind", ("offset", "constant", "outlier"))
def test_norm2d_far_from_zero(kind, layout):
    """Mean 1e4, or the first channels there and the rest at 0."""
    for shape in ((2, 80, 3, 8), (1, 20, 3, 3)):
        x, *others = norm2d_inputs(shape, layout=layout, kind=kind)
        if kind == "outlier":
            x[:, :9] += 1e4
        ours = norm2d_cases.forward_and_gradients(x, *others, activation="gelu")
        assert_right(ours, x, *others, activation="gelu")
        if kind == "offset":
            truth = forward_and_gradients(
                lambda *t: reference.layer_norm2d(*t, activation="gelu"), *(t.double() for t in (x, *others))
            )
            for mine, true in zip(ours, truth, strict=True):
                assert (mine.double() - true).abs().max() <= 2e-6 * true.abs().max()


@pytest.mark.parametrize("layout", norm2d_cases.LAYOUTS)
def test_norm2d_stays_inside_at_both_ends(layout, dtype):
    """Every order, and flush against a guard page at the start instead of the end: the bits are the same."""
    for shape in ((1, 12, 4, 8), (2, 16, 5, 7)):
        tensors = norm2d_inputs(shape, dtype, layout)
        ends = norm2d_cases.forward_and_gradients(*tensors, activation="gelu_tanh")
        for order in rig.ORDERS:
            starts = norm2d_cases.forward_and_gradients(*tensors, activation="gelu_tanh", flush="start", order=order)
            assert all(map(torch.equal, starts, ends))


@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
def test_norm2d_small_grid_strides_over_the_rest(layout, dtype, order):
    """A grid of two blocks does the work of many, groups among it."""
    tensors = norm2d_inputs((3, 24, 12, 16), dtype, layout)
    how = {"activation": "relu", "groups": 3}
    few = norm2d_cases.forward_and_gradients(*tensors, grid_cap=2, order=order, **how)
    assert all(map(torch.equal, few, norm2d_cases.forward_and_gradients(*tensors, **how)))


@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
def test_norm2d_blocks_of_several_tiles(layout):
    """More tiles than shares of grad_weight and grad_bias: each block walks over several, in chunks too, and adds."""
    for shape in norm2d_cases.MANY_TILES:
        tensors = norm2d_inputs(shape, layout=layout)
        ours = norm2d_cases.forward_and_gradients(*tensors, activation="silu")
        assert_right(ours, *tensors, activation="silu")


@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
def test_norm2d_mixed_layouts(layout, dtype):
    """x in one layout, the gradient and the residual in the other: element by element."""
    x, weight, bias, _ = norm2d_inputs((2, 8, 4, 6), dtype, layout)
    other = "contiguous" if layout == "channels_last" else "channels_last"
    grad, residual = (picture(x.shape, dtype, other, seed=seed) for seed in (1, 2))
    ours = norm2d_cases.forward_and_gradients(x, weight, bias, grad, residual=residual)
    assert_right(ours, x, weight, bias, grad, residual=residual)


def test_norm2d_slices(dtype):
    """Rows of planes, channels of lines, columns of lines, and planes and lines off their alignment."""
    whole = picture((2, 24, 8, 12), dtype)
    last = whole.to(memory_format=torch.channels_last)
    for x in (whole[:, :, 2:6], last[:, 8:16], last[..., 1:9], whole[:, 1:, :, 1:], last[:, 1:], last[:, 2:3]):
        _, *others = norm2d_inputs(x.shape, dtype)
        ours = norm2d_cases.forward_and_gradients(x, *others, activation="gelu")
        assert_right(ours, x, *others, activation="gelu")
        ours = norm2d_cases.forward_and_gradients(x, *others[:2], x, activation="silu", residual=x)
        assert_right(ours, x, *others[:2], x, activation="silu", residual=x)


def test_norm2d_nan_and_inf_stay_in_their_pixel():
    for layout in ("contiguous", "channels_last"):
        for value in (float("nan"), float("inf")):
            x, weight, bias, grad = norm2d_inputs((1, 8, 4, 4), layout=layout)
            right = norm2d_cases.forward_and_gradients(x, weight, bias, grad, groups=2)
            x[0, 5, 1, 2] = value
            y, grad_x, *_ = norm2d_cases.forward_and_gradients(x, weight, bias, grad, groups=2)
            for ours, sound in zip((y, grad_x), right, strict=False):
                assert ours[0, 4:, 1, 2].isnan().all()
                ours[0, 4:, 1, 2] = sound[0, 4:, 1, 2]
                assert torch.equal(ours, sound)


@pytest.mark.parametrize("layout", norm2d_cases.LAYOUTS)
def test_norm2d_without_statistics(layout):
    x, weight, bias, _ = norm2d_inputs((2, 24, 5, 12), layout=layout)
    y, stats = norm2d_cases.forward(x, weight, bias, activation="gelu", groups=2, save=False)
    assert stats.isnan().all()
    assert torch.equal(y, norm2d_cases.forward(x, weight, bias, activation="gelu", groups=2)[0])


def test_norm2d_empty():
    for shape in ((0, 3, 4, 5), (2, 0, 4, 5), (2, 3, 0, 5), (2, 3, 4, 0)):
        x, weight = torch.empty(shape), torch.ones(shape[1])
        y, grad_x, *affine = norm2d_cases.forward_and_gradients(x, weight, weight, x)
        assert y.shape == grad_x.shape == x.shape
        assert all(torch.equal(grad, torch.zeros(shape[1])) for grad in affine)


@pytest.mark.slow
def test_norm2d_broken_build_is_noticed():
    for layout in ("contiguous", "channels_last"):
        tensors = norm2d_inputs((1, 8, 4, 8), layout=layout)
        right = norm2d_cases.forward_and_gradients(*tensors)
        wrong = norm2d_cases.forward_and_gradients(*tensors, define="CAMOX_BREAK_NORM2D")
        for index in range(2):
            assert (wrong[index] - right[index]).max() == pytest.approx(1e-3, abs=1e-5)


# ---- dropout, sparse_gate, dropout_add_layer_norm ----
SEED = torch.tensor(0x0123456789ABCDEF)


def gate_inputs(shape, dtype, layout):
    """x in a layout, y in another, an incoming gradient."""
    other = "contiguous" if layout == "sliced" else layout
    return normal(shape, dtype, layout), normal(shape, dtype, other, seed=1), normal(shape, dtype, seed=2)


@pytest.mark.parametrize("layout", DENSE_AND_STRIDED)
def test_dropout_has_the_bits_of_the_cpu(dtype, layout, arch):
    ops = torch.ops.camox_ops
    for turn, shape in enumerate(dropout_cases.SHAPES):
        x, y, grad = gate_inputs(shape, dtype, layout)
        how = {"arch": arch, "order": list(rig.ORDERS)[turn % len(rig.ORDERS)]}
        assert torch.equal(dropout_cases.dropout(x, SEED, 0.3, **how), ops.dropout(x, SEED, 0.3))
        for seed in (SEED, None):
            assert torch.equal(dropout_cases.sparse_gate(x, y, seed, 0.3, **how), ops.sparse_gate(x, y, seed, 0.3))
            ours = dropout_cases.sparse_gate_backward(grad, x, y, seed, 0.3, **how)
            for mine, cpu in zip(ours, ops.sparse_gate_backward(grad, x, y, seed, 0.3), strict=True):
                assert torch.equal(mine, cpu)


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_dropout_add_layer_norm(dtype, p, arch):
    seed = SEED if p else None
    for turn, shape in enumerate(dropout_cases.NORM_SHAPES):
        kind = "offset" if turn % 3 == 2 else "normal"
        inputs = [
            normal(shape, dtype),
            normal(shape, dtype, kind=kind, seed=1),
            *affine(shape[-1]),
            normal(shape, dtype),
        ]
        how = {"arch": arch, "order": list(rig.ORDERS)[turn % len(rig.ORDERS)]}
        ours = dropout_cases.norm(*inputs, seed, p, **how)

        def everything(x, residual, weight, bias, grad):
            y = reference.dropout_add_layer_norm(x, residual, weight, bias, seed, p)
            return [y, *reference.dropout_add_layer_norm_backward(grad, x, residual, weight, seed, p)]

        same, truth = everything(*inputs), everything(*(tensor.double() for tensor in inputs))
        given = [i for i in range(5) if ours[i] is not None]
        assert_close_to_reference(*([results[i] for i in given] for results in (ours, same, truth)))
        if p:
            assert torch.equal(ours[1] == 0, ~reference.dropout_mask(shape, seed, p) | (ours[2] == 0))


def test_dropout_stays_inside_at_both_ends(dtype, order):
    """Flush against a guard page at the end in the tests above, at the start here; unaligned too. The same bits."""
    x, y, grad = gate_inputs((1029,), dtype, "contiguous")
    for begin in (0, 1):
        tensors = [tensor[begin:] for tensor in (grad, x, y)]
        expected = torch.ops.camox_ops.sparse_gate_backward(*tensors, SEED, 0.3)
        for flush in ("start", "end"):
            ours = dropout_cases.sparse_gate_backward(*tensors, SEED, 0.3, flush=flush, order=order)
            assert all(torch.equal(mine, cpu) for mine, cpu in zip(ours, expected, strict=True))
    inputs = [normal((5, 24), dtype), normal((5, 24), dtype), *affine(24), normal((5, 24), dtype)]
    for ours, other in zip(*(dropout_cases.norm(*inputs, SEED, 0.3, flush=f) for f in ("start", "end")), strict=True):
        assert torch.equal(ours, other)


def test_dropout_small_grid_strides_over_the_rest(dtype, order):
    x, y, grad = gate_inputs((3, 24, 111), dtype, "contiguous")
    ours = dropout_cases.sparse_gate_backward(grad, x, y, SEED, 0.3, grid_cap=2, order=order)
    expected = torch.ops.camox_ops.sparse_gate_backward(grad, x, y, SEED, 0.3)
    assert all(torch.equal(mine, cpu) for mine, cpu in zip(ours, expected, strict=True))
    for width in (40, 1544):
        inputs = [normal((67, width), dtype), normal((67, width), dtype), *affine(width), normal((67, width), dtype)]
        inputs = [tensor[:20] if width > 40 and tensor.dim() == 2 else tensor for tensor in inputs]
        for capped, whole in zip(
            dropout_cases.norm(*inputs, SEED, 0.3, grid_cap=2, order=order),
            dropout_cases.norm(*inputs, SEED, 0.3),
            strict=True,
        ):
            assert torch.equal(capped, whole)


def test_dropout_empty():
    for shape in ((0,), (3, 0), (0, 3)):
        x = torch.empty(shape)
        assert dropout_cases.dropout(x, SEED, 0.3).shape == shape
    inputs = [torch.empty(0, 3), torch.empty(0, 3), *affine(3), torch.empty(0, 3)]
    assert torch.equal(dropout_cases.norm(*inputs, SEED, 0.3)[3], torch.zeros(3))


@pytest.mark.slow
def test_dropout_broken_build_is_noticed():
    x = normal((64,))
    right, wrong = (dropout_cases.dropout(x, SEED, 0.3, define=define) for define in ("", "CAMOX_BREAK_DROPOUT"))
    torch.testing.assert_close((wrong - right)[::4], torch.full((16,), 1e-3), atol=1e-6, rtol=0)
    inputs = [normal((4, 8)), normal((4, 8)), *affine(8), normal((4, 8))]
    for right, wrong in zip(
        dropout_cases.norm(*inputs, SEED, 0.3)[:3],
        dropout_cases.norm(*inputs, SEED, 0.3, define="CAMOX_BREAK_DROPOUT")[:3],
        strict=True,
    ):
        assert not torch.equal(right, wrong)


# ---- rope ----
def rope_input(shape, dtype, memory="contiguous", seed=0):
    """ "swapped": (B, T, H, D) in memory."""
    if memory == "swapped":
        return picture((shape[0], shape[2], shape[1], shape[3]), dtype, seed=seed).transpose(1, 2)
    return picture(shape, dtype, memory, seed=seed)


def rope_tables(length, columns):
    generator = torch.Generator().manual_seed(7)
    return torch.randn(2, length, columns, generator=generator).unbind()


def rope_inputs(dtype, memory):
    """(grad, x, cos, sin, options, order): pairings, tables, positions and orders in turn."""
    cases, orders = [], list(rig.ORDERS)
    for i, (shape, rotary_dim) in enumerate(rope_cases.SHAPES):
        for interleaved in (False, True):
            for kind in range(3):
                rows = (None, torch.arange(shape[2]).flip(0) * 2, torch.arange(shape[0] * shape[2]) % 3)[kind]
                rows = rows.view(shape[0], shape[2]) if kind == 2 else rows
                columns = rotary_dim if (kind + i) % 2 else rotary_dim // 2
                options = {"interleaved": interleaved, "rotary_dim": rotary_dim, "positions": rows}
                options["transposed"] = kind == 1
                x, grad = (rope_input(shape, dtype, memory, seed) for seed in (0, 1))
                order = orders[len(cases) % len(orders)]
                cases.append((grad, x, *rope_tables(2 * shape[2], columns), options, order))
    return cases


def doubled(*tensors):
    return (tensor.double() for tensor in tensors)


@pytest.mark.parametrize("memory", rope_cases.MEMORY)
def test_rope_forward(dtype, memory, arch):
    for _, x, cos, sin, options, order in rope_inputs(dtype, memory):
        how = {"arch": arch, "order": order}
        ours = rope_cases.forward(x, cos, sin, **options, how=how)
        truth = reference.rope(*doubled(x, cos, sin), **options)
        assert_close_to_reference(ours, reference.rope(x, cos, sin, **options), truth)
        if dtype in HALVES:
            assert_one_rounding(ours, rope_cases.forward(x.float(), cos, sin, **options, how={"arch": arch}))
        if memory != "expanded":
            assert torch.equal(rope_cases.forward(x, cos, sin, **options, inplace=True, how=how), ours)


@pytest.mark.parametrize("memory", rope_cases.MEMORY)
def test_rope_backward(dtype, memory, arch):
    for grad, x, cos, sin, options, order in rope_inputs(dtype, memory):
        ours = rope_cases.backward(grad, x, cos, sin, **options, how={"arch": arch, "order": order})
        truth = reference.rope_backward(*doubled(grad, x, cos, sin), **options)
        assert_close_to_reference(ours, reference.rope_backward(grad, x, cos, sin, **options), truth)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_layouts_and_packed_sequences(interleaved, dtype, order):
    x, (cos, sin) = picture((2, 5, 6, 16), dtype), rope_tables(5, 8)
    how = {"order": order}
    expected = rope_cases.forward(x.transpose(1, 2).contiguous(), cos, sin, interleaved=interleaved, how=how)
    ours = rope_cases.forward(x, cos, sin, interleaved=interleaved, layout="bthd", how=how)
    assert torch.equal(ours, expected.transpose(1, 2))
    cu_seqlens = torch.tensor([0, 0, 4, 9, 10], dtype=torch.int32)
    packed, grad = x.flatten(0, 1), picture((2, 5, 6, 16), dtype, seed=1).flatten(0, 1)
    options = {"interleaved": interleaved, "cu_seqlens": cu_seqlens}
    inputs = (packed, cos, sin)
    truth = reference.rope(*doubled(*inputs), **options)
    assert_close_to_reference(rope_cases.forward(*inputs, **options), reference.rope(*inputs, **options), truth)
    inputs = (grad, *inputs)
    truth = reference.rope_backward(*doubled(*inputs), **options)
    assert_close_to_reference(
        rope_cases.backward(*inputs, **options), reference.rope_backward(*inputs, **options), truth
    )


@pytest.mark.parametrize("inplace", [False, True])
def test_rope_bad_values_become_nan_and_are_told(dtype, order, inplace):
    how = {"order": order}
    x, (cos, sin) = picture((2, 5, 4, 20), dtype), rope_tables(6, 8)
    good = rope_cases.forward(x, cos, sin, rotary_dim=16, with_errors=True, inplace=inplace, how=how)
    assert good[1] == 0
    positions = torch.tensor([[0, -1, 2, 3], [0, 1, 6, 2**40]])
    for rotary_dim in (16, 8):
        options = {"rotary_dim": rotary_dim, "inplace": inplace, "positions": positions, "with_errors": True}
        narrow = (table[:, : rotary_dim // 2].clone() for table in (cos, sin))
        y, errors = rope_cases.forward(x, *narrow, **options, how=how)
        bad = (positions < 0) | (positions >= 6)
        assert errors == 1
        assert torch.equal(y.isnan().all(-1).all(1), bad)
        assert torch.equal(y.isnan().any(-1).any(1), bad)
    for cu_seqlens, bad in (
        ([1, 4], [True, False, False, False]),
        ([0, 2], [False, False, True, True]),
        ([0, 3, 1], [False, False, False, True]),
        ([0], [True] * 4),
    ):
        cu_seqlens = torch.tensor(cu_seqlens, dtype=torch.int32)
        packed = x[0].transpose(0, 1).contiguous()
        y, errors = rope_cases.forward(
            packed, cos, sin, rotary_dim=16, cu_seqlens=cu_seqlens, inplace=inplace, with_errors=True, how=how
        )
        assert errors == 1
        assert y.isnan().all(-1).all(-1).tolist() == bad
        assert y.isnan().any(-1).any(-1).tolist() == bad


def test_rope_strides_over_a_small_grid(dtype):
    x, grad, (cos, sin) = picture((3, 6, 5, 34), dtype), picture((3, 6, 5, 34), dtype, seed=1), rope_tables(5, 17)
    positions = torch.tensor([4, 4, 0, 1, 4])
    capped = {"grid_cap": 2, "order": "random"}
    assert torch.equal(rope_cases.forward(x, cos, sin, how=capped), rope_cases.forward(x, cos, sin))
    for options in ({}, {"positions": positions}):
        ours = rope_cases.backward(grad, x, cos, sin, **options, how=capped)
        for mine, theirs in zip(ours, rope_cases.backward(grad, x, cos, sin, **options), strict=True):
            assert torch.equal(mine, theirs)


def test_rope_many_heads_and_columns(order):
    """More heads than a thread serves at once, more columns than a block sums, more tokens than it scans at once."""
    if order == "forward":
        x, (cos, sin) = picture((1, 5, 8200, 32)), rope_tables(8200, 16)
        ours = rope_cases.forward(x, cos, sin)
        assert_close_to_reference(ours, reference.rope(x, cos, sin), reference.rope(*doubled(x, cos, sin)))
    x, grad, (cos, sin) = picture((2, 2, 150, 268)), picture((2, 2, 150, 268), seed=1), rope_tables(3, 134)
    positions = torch.arange(300).view(2, 150) % 3
    ours = rope_cases.backward(grad, x, cos, sin, positions=positions, how={"order": order})
    truth = reference.rope_backward(*doubled(grad, x, cos, sin), positions=positions)
    assert_close_to_reference(ours, reference.rope_backward(grad, x, cos, sin, positions=positions), truth)


def test_rope_empty():
    for shape in ((0, 3, 4, 6), (2, 0, 4, 6), (2, 3, 0, 6), (2, 3, 4, 0)):
        x, (cos, sin) = torch.empty(shape), rope_tables(4, shape[3] // 2)
        assert rope_cases.forward(x, cos, sin).shape == shape
        assert torch.equal(rope_cases.backward(x, x, cos, sin)[1], torch.zeros_like(cos))


@pytest.mark.slow
def test_rope_broken_build_is_noticed():
    x, (cos, sin) = picture((1, 2, 3, 8)), rope_tables(3, 4)
    broken = {"define": "CAMOX_BREAK_ROPE"}
    for interleaved in (False, True):
        wrong = rope_cases.forward(x, cos, sin, interleaved=interleaved, how=broken)
        assert not torch.allclose(wrong, rope_cases.forward(x, cos, sin, interleaved=interleaved), atol=1e-4)
    wrong = rope_cases.backward(x, x, cos, sin, how=broken)[0]
    assert not torch.allclose(wrong, rope_cases.backward(x, x, cos, sin)[0], atol=1e-4)


# ---- moe ----
def moe_logits(rows, num_experts, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(rows, num_experts, generator=generator, dtype=torch.float64)).to(dtype)
    return logits.round() / 2 if seed % 2 else logits  # ties


def moe_valid(rows, i):
    return torch.rand(rows, generator=torch.Generator().manual_seed(3)) < 0.7 if i % 2 else None


@pytest.mark.parametrize("score", moe_cases.SCORES)
def test_moe_route(dtype, score, arch):
    orders = list(rig.ORDERS)
    for i, (rows, num_experts, top_k) in enumerate(moe_cases.ROUTES):
        logits, valid = moe_logits(rows, num_experts, dtype, i), moe_valid(rows, i)
        capacity = None if i % 3 == 0 else -(-7 * rows * top_k // (10 * num_experts))
        options = {"score": score, "capacity": capacity, "valid": valid}
        how = {"arch": arch, "order": orders[i % len(orders)]}
        ours = moe_cases.route(logits, top_k, **options, **how)
        same = reference.moe_route(logits.float(), top_k, **options)
        truth = reference.moe_route(logits.double(), top_k, **options)
        for mine, theirs in zip(ours[1:], truth[1:], strict=True):
            assert torch.equal(mine, theirs)
        assert_close_to_reference(ours[0], same[0], truth[0])
        grad = torch.rand(rows, top_k, generator=torch.Generator().manual_seed(5))
        found = []
        for real in (torch.float32, torch.float64):
            leaf = logits.to(real).requires_grad_()
            weights = reference.moe_route(leaf, top_k, **options)[0]
            found += torch.autograd.grad(weights, leaf, grad.to(real))
        mine = moe_cases.route_backward(grad, logits, ours[1], ours[5], score=score, **how)
        assert_close_to_reference(mine, found[0].to(dtype), found[1])


@pytest.mark.parametrize("kind", ["switch", "importance_cv2", "z", "usage_mse"])
def test_moe_aux_loss(dtype, kind, arch):
    orders = list(rig.ORDERS)
    for i, (rows, num_experts, top_k) in enumerate(moe_cases.ROUTES):
        logits, valid = moe_logits(rows, num_experts, dtype, 2 * i), moe_valid(rows, i)
        counts = reference.moe_route(logits.double(), top_k, valid=valid)[2]
        options, how = {"kind": kind, "valid": valid}, {"arch": arch, "order": orders[i % len(orders)]}
        loss, slope = moe_cases.aux_loss(logits, counts, top_k, **options, **how)
        found, grads = [], []
        for real in (torch.float32, torch.float64):
            leaf = logits.to(real).requires_grad_()
            found.append(reference.moe_aux_loss(leaf, counts, top_k, **options))
            if kind != "usage_mse":
                grads += torch.autograd.grad(3 * found[-1], leaf)
        assert_close_to_reference(loss, *found)
        if kind != "usage_mse":
            mine = moe_cases.aux_loss_backward(torch.tensor(3.0), logits, slope, **options, **how)
            assert_close_to_reference(mine, grads[0].to(dtype), grads[1])


def moe_rows(dtype):
    """(x, routing, capacity, order) of every kind of row; x lies with gaps every other time."""
    orders = list(rig.ORDERS)
    for i, shape in enumerate(moe_cases.ROWS):
        rows, capacity = 5, None if i % 2 else 2
        weights, experts, _, offsets, _, position = reference.moe_route(
            moe_logits(rows, 4), 3, capacity=2 if i % 4 < 2 or capacity else None, valid=moe_valid(rows, i // 2)
        )
        x = picture((rows, 2, shape[0], max(torch.Size(shape[1:]).numel(), 1)), dtype, seed=i)[:, i % 3 // 2]
        yield (
            x.reshape(rows, *shape) if i % 3 else x.contiguous().view(rows, *shape),
            weights,
            (
                experts,
                offsets,
                position,
            ),
            capacity,
            orders[i % len(orders)],
        )


def test_moe_rows(dtype, arch):
    for x, weights, routed, capacity, order in moe_rows(dtype):
        how = {"capacity": capacity, "arch": arch, "order": order}
        y = moe_cases.dispatch(x, *routed, **how)
        assert torch.equal(y, reference.moe_dispatch(x, *routed, capacity=capacity))
        y = y.roll(1, 0) * 3
        for given in (weights, None):
            scale = torch.ones_like(weights) if given is None else given
            same, truth = (
                reference.moe_combine(y.to(real), scale.to(real), *routed, capacity=capacity)
                for real in (torch.float32, torch.float64)
            )
            ours = moe_cases.combine(y, given, *routed, **how)
            assert_close_to_reference(ours, same.to(dtype), truth)
        found = []
        for real in (torch.float32, torch.float64):
            leaves = y.to(real).requires_grad_(), weights.to(real).requires_grad_()
            combined = reference.moe_combine(*leaves, *routed, capacity=capacity)
            found.append(torch.autograd.grad(combined, leaves, x.to(real)))
        ours = moe_cases.combine_backward(x, y, weights, *routed, **how)
        same, truth = found
        assert_close_to_reference(ours, (same[0].to(dtype), same[1]), truth)


def test_moe_strides_over_a_small_grid(dtype):
    logits, capped = moe_logits(300, 5, dtype), {"grid_cap": 2, "order": "random"}
    expected = moe_cases.route(logits, 2, capacity=90)
    for mine, theirs in zip(moe_cases.route(logits, 2, capacity=90, **capped), expected, strict=True):
        assert torch.equal(mine, theirs)
    weights, experts, counts, _, _, position = expected
    assert torch.equal(
        moe_cases.route_backward(weights, logits, experts, position, **capped),
        moe_cases.route_backward(weights, logits, experts, position),
    )
    loss, slope = moe_cases.aux_loss(logits, counts, 2)
    assert torch.equal(moe_cases.aux_loss(logits, counts, 2, **capped)[0], loss)
    assert torch.equal(
        moe_cases.aux_loss_backward(loss, logits, slope, **capped), moe_cases.aux_loss_backward(loss, logits, slope)
    )
    for x, weights, routed, capacity, _ in moe_rows(dtype):
        y = moe_cases.dispatch(x, *routed, capacity=capacity)
        assert torch.equal(moe_cases.dispatch(x, *routed, capacity=capacity, **capped), y)
        for name, arguments in (("combine", (y, weights)), ("combine_backward", (x, y, weights))):
            op = getattr(moe_cases, name)
            ours, theirs = (op(*arguments, *routed, capacity=capacity, **how) for how in (capped, {}))
            for mine, other in zip(ours, theirs, strict=True):
                assert torch.equal(mine, other)


def test_moe_bad_values_become_nan_and_are_told(dtype, order):
    logits = moe_logits(6, 4, dtype)
    logits[2, 1] = logits[4, 0] = float("nan")
    valid = torch.tensor([True, True, True, True, False, True])
    (weights, experts, *_), errors = moe_cases.route(logits, 2, valid=valid, with_errors=True, order=order)
    assert errors == 2
    assert weights.isnan().all(1).tolist() == [False, False, True, False, False, False]
    assert torch.all(weights[4] == 0)
    assert torch.all((experts >= 0) & (experts < 4))
    good, errors = moe_cases.route(moe_logits(6, 4, dtype), 2, capacity=3, with_errors=True, order=order)
    weights, experts, _, offsets, _, position = good
    assert errors == 0
    x, y = picture((6, 3, 2, 2), dtype), picture((12, 3, 2, 2), dtype)
    for bad in (-2, 12, 2**40):
        wrong = position.clone()
        wrong[5] = bad  # of row 2
        for capacity in (None, 3):
            copies = y if capacity is None else y.view(4, 3, 3, 2, 2)
            how = {"capacity": capacity, "with_errors": True, "order": order}
            assert moe_cases.dispatch(x, experts, offsets, wrong, **how)[1] == 4
            combined, errors = moe_cases.combine(copies, weights, experts, offsets, wrong, **how)
            assert errors == 4
            assert combined.isnan().flatten(1).any(1).tolist() == [False, False, True, False, False, False]
            _, grad, errors = moe_cases.combine_backward(x, copies, weights, experts, offsets, wrong, **how)
            assert errors == 4
            assert grad.isnan().nonzero().tolist() == [[2, 1]]
    wrong = experts.clone()
    wrong[1, 0] = 4
    grad, errors = moe_cases.route_backward(weights, logits, wrong, position, with_errors=True, order=order)
    assert errors == 4
    assert torch.all(grad[1].isnan().sum() >= 1)


def test_moe_empty():
    weights, experts, counts, offsets, _, position = moe_cases.route(torch.empty(0, 4), 2)
    assert counts.tolist() == [0] * 4
    assert offsets.tolist() == [0] * 5
    assert moe_cases.aux_loss(torch.empty(0, 4), counts, 2)[0] == 0
    assert moe_cases.aux_loss_backward(torch.ones(()), torch.empty(0, 4), torch.ones(4)).shape == (0, 4)
    assert moe_cases.route_backward(weights, torch.empty(0, 4), experts, position).shape == (0, 4)
    x = torch.empty(0, 8)
    assert moe_cases.dispatch(x, experts, offsets, position).shape == (0, 8)
    padded = moe_cases.dispatch(x, experts, offsets, position, capacity=2)
    assert torch.equal(padded, torch.zeros(4, 2, 8))
    assert moe_cases.combine(padded, weights, experts, offsets, position, capacity=2).shape == (0, 8)
    grad, _ = moe_cases.combine_backward(x, padded, weights, experts, offsets, position, capacity=2)
    assert torch.equal(grad, torch.zeros(4, 2, 8))
    weights, experts, _, offsets, _, position = moe_cases.route(torch.rand(3, 4), 2)
    x = torch.empty(3, 0)
    y = moe_cases.dispatch(x, experts, offsets, position)
    assert y.shape == (6, 0)
    assert torch.equal(moe_cases.combine_backward(x, y, weights, experts, offsets, position)[1], torch.zeros(3, 2))


@pytest.mark.slow
def test_moe_broken_build_is_noticed():
    weights, experts, _, offsets, _, position = moe_cases.route(moe_logits(3, 4), 2)
    x, y = picture((3, 4, 2, 2)), picture((6, 4, 2, 2))
    for name, arguments in (("combine", (y, weights)), ("combine_backward", (x, y, weights))):
        op = getattr(moe_cases, name)
        wrong, right = (op(*arguments, experts, offsets, position, define=d) for d in ("CAMOX_BREAK_MOE", ""))
        assert not torch.allclose(wrong[0], right[0], atol=1e-4)


# ---- linear_attention ----
def attention_inputs(shape, dtype, memory="dense", normalize="sum", masked=False, state=False):
    """(q, k, v), options of both directions, (S_0, z_0) or (), gradients of the forward's results."""
    batch, heads, length, n, d = shape
    *qkv, grad = linear_attention_cases.heads(shape, dtype, memory)
    generator = torch.Generator().manual_seed(5)
    sizes = [(batch, heads, n, d), (batch, heads, n)][: 2 if normalize == "sum" else 1]
    initial = [torch.rand(size, generator=generator) for size in sizes]
    grads = [grad, *(torch.randn(size, generator=generator) for size in sizes)]
    mask = torch.rand(batch, length, generator=generator) < 0.3 if masked else None
    options = {"normalize": normalize, "key_mask": mask}
    return qkv, options, initial if state else [], grads if state else grads[:1]


def attention_truth(dtype, qkv, initial, grads, options):
    """Results of the reference and gradients of its inputs, computed in a dtype."""
    inputs = [tensor.to(dtype) for tensor in (*qkv, *initial)]
    results, pullback = torch.func.vjp(lambda *inputs: reference.linear_attention(*inputs, **options), *inputs)
    flowing = [*grads, *map(torch.zeros_like, results[len(grads) :])]
    return [*results, *pullback(tuple(grad.to(y.dtype) for grad, y in zip(flowing, results, strict=True)))]


def assert_attention_right(inputs, feature_map="elu1", arch=900, order="forward", **how):
    qkv, options, initial, grads = inputs
    options = {**options, "feature_map": feature_map}
    truth = attention_truth(torch.float64, qkv, initial, grads, options)
    same = attention_truth(qkv[0].dtype, qkv, initial, grads, options)
    results = linear_attention_cases.forward(*qkv, *initial, **options, how={"arch": arch, "order": order}, **how)
    state = [tensor.float() for tensor in truth[1 : len(results)]]
    gradients = linear_attention_cases.backward(
        grads, *qkv, state, **options, how={"arch": arch, "order": order}, **how
    )
    ours = [*results, *gradients[: 3 + len(initial)]]
    assert_close_to_reference(ours, [x.to(y.dtype) for x, y in zip(same, ours, strict=True)], truth)
    return ours


@pytest.mark.parametrize("memory", linear_attention_cases.MEMORY)
def test_linear_attention_matches_reference(dtype, memory, arch):
    """Every shape by one of both architectures, in turn with modes, masks, states and orders."""
    first = (arch > 800) + linear_attention_cases.MEMORY.index(memory)
    for turn, shape in enumerate(linear_attention_cases.SHAPES):
        if (turn + first) % 2:
            continue
        normalize = linear_attention_cases.NORMALIZATIONS[(turn + first // 2) % 3]
        inputs = attention_inputs(shape, dtype, memory, normalize, turn % 3 == 1, turn % 4 < 2)
        assert_attention_right(inputs, "relu" if turn % 5 == 2 else "elu1", arch, list(rig.ORDERS)[turn % 4])


@pytest.mark.parametrize("normalize", linear_attention_cases.NORMALIZATIONS)
@pytest.mark.parametrize("feature_map", linear_attention_cases.FEATURE_MAPS)
def test_linear_attention_modes(feature_map, normalize, arch):
    dtypes = list(rig.DTYPES.values())
    for turn in range(4):
        dtype = dtypes[turn % len(dtypes)]
        n = (16, 32, 10, 1 if normalize == "none" else 3)[turn]  # of one feature no division leaves a gradient
        qkv, *rest = attention_inputs((1, 2, 20, n, 16), dtype, "dense", normalize, turn & 1, turn & 2)
        if feature_map == "identity":  # sums that stay off 0
            qkv[:2] = (tensor.abs() for tensor in qkv[:2])
        assert_attention_right((qkv, *rest), feature_map, arch, list(rig.ORDERS)[turn])


@pytest.mark.parametrize("memory", ["picture", "dense", "strided"])
def test_linear_attention_stays_inside_at_both_ends(dtype, memory, order):
    """Flush against a guard page at the end in the tests above, at the start here; the bits are the same."""
    for shape in ((1, 2, 21, 16, 16), (1, 2, 40, 32, 32), (1, 1, 19, 10, 6)):
        inputs = attention_inputs(shape, dtype, memory, masked=True, state=True)
        for ours, other in zip(*attention_runs(inputs, {"flush": "start", "how": {"order": order}}, {}), strict=True):
            assert torch.equal(ours, other)


def attention_runs(inputs, *ways):
    """The results of both directions for each of these keyword arguments; the state is the first one's."""
    qkv, options, initial, grads = inputs
    found = []
    for way in ways:
        results = linear_attention_cases.forward(*qkv, *initial, **options, **way)
        state = found[0][1:3] if found else results[1:]
        found.append([*results, *linear_attention_cases.backward(grads, *qkv, state, **options, **way)])
    return found


def test_linear_attention_small_grid_strides_over_the_rest(dtype):
    for dim in (16, 12, 70):
        inputs = attention_inputs((1, 2, 136, dim, dim), dtype, "picture")
        capped = {"how": {"grid_cap": 2, "order": "random"}}
        for ours, other in zip(*attention_runs(inputs, capped, {}), strict=True):
            assert torch.equal(ours, other)


@pytest.mark.parametrize("normalize", ["sum", "feature"])
def test_linear_attention_chunks(dtype, normalize, order):
    """One chunk, several, and one that ends with the last position."""
    for chunk in (64, 128, 192):
        inputs = attention_inputs((1, 1, 192, 16, 16), dtype, "picture", normalize)
        assert_attention_right(inputs, order=order, chunk=chunk)


@pytest.mark.parametrize("normalize", linear_attention_cases.NORMALIZATIONS)
@pytest.mark.parametrize("dim", [16, 7, 66])
def test_linear_attention_ignored_keys_may_hold_anything(dtype, normalize, dim):
    inputs = attention_inputs((2, 1, 20, dim, dim), dtype, "dense", normalize, masked=True)
    qkv, options, *rest = inputs
    spoilt = [tensor.clone() for tensor in qkv]
    for tensor in spoilt[1:]:
        tensor[options["key_mask"][:, None]] = float("nan")
    (right,), (ours,) = attention_runs(inputs, {}), attention_runs((spoilt, options, *rest), {})
    for mine, expected in zip(ours, right, strict=True):
        assert torch.equal(mine, expected)
    for grad in ours[-4:-2] if normalize == "sum" else ours[-3:-1]:
        assert (grad[options["key_mask"][:, None]] == 0).all()


def test_linear_attention_rows_whose_sum_is_zero(dtype):
    for dim in (16, 6):
        qkv, options, *rest = attention_inputs((1, 1, 20, dim, dim), dtype, "dense", "feature")
        for tensor in qkv[:2]:
            tensor[:, :, 3:5] = -1
        options["feature_map"] = "relu"
        (ours,) = attention_runs((qkv, options, *rest), {})
        assert all(tensor.isfinite().all() for tensor in ours)
        assert all((ours[i][:, :, 3:5] == 0).all() for i in (0, 2, 3, 4))


def test_linear_attention_empty():
    for shape in ((0, 2, 4, 3, 5), (2, 0, 4, 3, 5), (2, 2, 0, 3, 5)):
        inputs = attention_inputs(shape, torch.float32, state=True)
        (ours,) = attention_runs(inputs, {})
        assert torch.equal(ours[1], inputs[2][0])
        assert torch.equal(ours[2], inputs[2][1])
        assert torch.equal(ours[-2], inputs[3][1])
        assert torch.equal(ours[-1], inputs[3][2])


@pytest.mark.parametrize("dim", [16, 32, 64])
@pytest.mark.parametrize("memory", ["picture", "dense"])
def test_linear_attention_rounds_once(dim, memory):
    """On tensor cores as without, up to the 16 bits of a sum of two bfloat16."""
    for dtype, normalize in zip(HALVES, ("sum", "feature"), strict=True):
        qkv, options, *_ = attention_inputs((1, 2, 72, dim, dim), dtype, memory, normalize)
        low, high = (
            linear_attention_cases.forward(*(x.to(kind) for x in qkv), **options)[0] for kind in (dtype, torch.float32)
        )
        torch.testing.assert_close(low.float(), high, rtol=torch.finfo(dtype).eps / 2, atol=2**-16)


@pytest.mark.slow
def test_linear_attention_long():
    assert_attention_right(attention_inputs((1, 1, 100_000, 16, 16), torch.bfloat16, "picture"), chunk=4096)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [16, 12, 72])
def test_linear_attention_broken_build_is_noticed(dtype, dim):
    inputs = attention_inputs((1, 1, 20, dim, dim), dtype)
    right, wrong = attention_runs(inputs, {}, {"how": {"define": "CAMOX_BREAK_LINEAR_ATTENTION"}})
    for index in (0, 3):
        assert not torch.allclose(right[index], wrong[index], atol=1e-4)


# ---- bdh ----
BDH_OPTIONS = [
    {"causal": causal, "softmax": softmax, "relu": relu}
    for causal, softmax, relu in ((0, 0, 1), (1, 0, 1), (0, 1, 1), (1, 1, 0), (0, 0, 0))
]


def bdh_inputs(shape, value_dim, dtype, memory="contiguous", shared=True, each=False):
    """(grad, q, v, cos, sin); v shared by the heads or not, tables of an angle a pair or one an element."""
    batch, heads, length, n = shape
    grad = rope_input((batch, heads, length, value_dim), dtype, memory, seed=1)
    v = rope_input((batch, 1 if shared else heads, length, value_dim), dtype, memory, seed=2)
    angles = torch.randn(length + 1, n if each else n // 2, generator=torch.Generator().manual_seed(3)) * 3
    return grad, rope_input(shape, dtype, memory), v, angles.cos(), angles.sin()


def bdh_reference(grad, q, v, cos, sin, **options):
    options = {name: bool(value) if name != "scale" else value for name, value in options.items()}
    grads = reference.bdh_attention_backward(grad, q, v, cos, sin, **options)
    return reference.bdh_attention(q, v, cos, sin, **options).to(q.dtype), *grads[:2]


def bdh_kernels(grad, q, v, cos, sin, flush="end", save=None, how=None, **options):
    grads = bdh_cases.backward(grad, q, v, cos, sin, flush=flush, save=save, how=how, **options)
    return bdh_cases.forward(q, v, cos, sin, flush=flush, save=save, how=how, **options)[0], *grads


@pytest.mark.parametrize("memory", bdh_cases.MEMORY)
def test_bdh_attention(dtype, memory, arch):
    turn = bdh_cases.MEMORY.index(memory)
    for shape, value_dim in bdh_cases.SHAPES:
        for options in BDH_OPTIONS[turn % 2 :: 2]:
            inputs = bdh_inputs(shape, value_dim, dtype, memory, shared=turn % 2 == 0, each=turn % 3 == 0)
            save = ("logsumexp", None, "scores")[turn % 3]
            order = list(rig.ORDERS)[turn % 4]
            ours = bdh_kernels(*inputs, save=save, how={"arch": arch, "order": order}, **options)
            truth = bdh_reference(*doubled(*inputs), **options)
            assert_close_to_reference(ours, bdh_reference(*inputs, **options), truth)
            turn += 1


@pytest.mark.parametrize("options", BDH_OPTIONS[:4], ids=str)
def test_bdh_strips_and_small_grids(options, dtype):
    """The scores of one head at a time, or of a strip of its rows."""
    inputs = bdh_inputs((1, 2, 130, 4), 3, dtype)
    truth, same = bdh_reference(*doubled(*inputs), **options), bdh_reference(*inputs, **options)
    for save in ("logsumexp", "scores"):
        whole = bdh_kernels(*inputs, save=save, **options)
        assert_close_to_reference(whole, same, truth)
        for cap in (2, 7):
            capped = bdh_kernels(*inputs, save=save, how={"grid_cap": cap, "order": "random"}, **options)
            assert_close_to_reference(capped, same, truth)
            assert torch.equal(capped[0], whole[0])


@pytest.mark.parametrize("memory", bdh_cases.MEMORY)
def test_bdh_state_form(dtype, memory, arch):
    """r^T v and r^T g instead of scores, of all heads at once and of one at a time."""
    turn = bdh_cases.MEMORY.index(memory)
    for (shape, value_dim), relu in zip(bdh_cases.SHAPES, (True, True, False, True, False), strict=True):
        inputs = bdh_inputs(shape, value_dim, dtype, memory, shared=turn % 2 == 0, each=turn % 3 == 0)
        options = {"relu": relu, "scale": 0.5}
        how = {"arch": arch, "order": list(rig.ORDERS)[turn % 4]}
        ours = bdh_kernels(*inputs, save="nothing", form=2, how=how, **options)
        truth = bdh_reference(*doubled(*inputs), **options)
        assert_close_to_reference(ours, bdh_reference(*inputs, **options), truth)
        capped = bdh_kernels(*inputs, save="nothing", form=2, how={**how, "grid_cap": 1}, **options)
        assert all(map(torch.equal, capped, ours))
        turn += 1


# (B, H, T, N), D: one chunk of 64 tokens that is not full, three, the last of them short; states of several tiles, rows
# that no access of 16 bytes takes; chunks of two tiles.
BDH_CHUNKS = [
    ((1, 2, 5, 32), 8),
    ((2, 2, 130, 4), 4),
    ((1, 1, 192, 6), 70),
    ((1, 2, 139, 66), 7),
    ((1, 1, 300, 130), 140),
]


@pytest.mark.parametrize("memory", bdh_cases.MEMORY)
def test_bdh_causal_state_form(dtype, memory, arch):
    """States of the chunks before and behind; of all heads at once, of one, and of a chunk at a time."""
    turn = bdh_cases.MEMORY.index(memory)
    for shape, value_dim in BDH_CHUNKS[turn % 2 :: 2]:
        inputs = bdh_inputs(shape, value_dim, dtype, memory, shared=turn % 3 != 1, each=turn % 3 == 0)
        options = {"causal": True, "relu": turn % 2 == 0, "scale": 0.5}
        given = {**options, "save": "nothing", "form": 2}
        how = {"arch": arch, "order": list(rig.ORDERS)[turn % 4]}
        same, truth = bdh_reference(*inputs, **options), bdh_reference(*doubled(*inputs), **options)
        ours = bdh_kernels(*inputs, **given, how=how)
        assert_close_to_reference(ours, same, truth)
        if shape[2] < 150:
            assert all(map(torch.equal, bdh_kernels(*inputs, **given, how={**how, "grid_cap": 1}), ours))
            assert_close_to_reference(bdh_kernels(*inputs, **given, how={**how, "grid_cap": 2}), same, truth)
        turn += 1


@pytest.mark.parametrize("causal", [0, 1])
def test_bdh_scratch_does_not_grow_with_the_sequence(causal):
    """Of the state form, but for one state a segment of chunks: less and less beside r of a head, which is nowhere."""
    for length, share in ((100_000, 3), (1_000_000, 15)):
        for heads in ((1, 1), (2, 6)):
            size = bdh_cases.scratch((*heads, length, 1024), 192, "backward", causal=causal)
            assert 0 < size < 4 * length * 1024 / share
    assert bdh_cases.scratch((2, 6, 500, 1024), 192, "forward", causal=causal) == 12 * 500 * 500 * 4


def as_tf32(x):
    """Rounded to ten bits of mantissa, ties away from 0."""
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


class InTF32(TorchFunctionMode):
    """Products of float32 matrices as a GPU's tensor cores make them."""

    def __torch_function__(self, function, types, arguments=(), named=None):
        if function in (torch.Tensor.__matmul__, torch.Tensor.matmul, torch.matmul, torch.einsum):
            arguments = [as_tf32(x) if isinstance(x, torch.Tensor) else x for x in arguments]
        return function(*arguments, **(named or {}))


@pytest.mark.parametrize("options", [*BDH_OPTIONS[:4], {"form": 2}, {"form": 2, "causal": 1}], ids=str)
def test_bdh_tf32(options):
    """Where it is allowed as plain PyTorch multiplies in TF32; in float32 elsewhere, and on sm_75, which has none."""
    inputs = bdh_inputs((1, 2, 140, 36), 24, torch.float32)
    plain = {name: value for name, value in options.items() if name != "form"}
    truth = bdh_reference(*doubled(*inputs), **plain)
    with InTF32():
        same = bdh_reference(*inputs, **plain)
    exact = bdh_reference(*inputs, **plain)
    for arch in rig.ARCHS:
        given = {"save": "logsumexp", **options}
        full, ours = (bdh_kernels(*inputs, **given, tf32=tf32, how={"arch": arch}) for tf32 in (False, True))
        assert_close_to_reference(full, exact, truth)
        if arch < 800:
            assert all(map(torch.equal, ours, full))
            continue
        assert_close_to_reference(ours, same, truth)
        with pytest.raises(AssertionError):
            assert_close_to_reference(ours, exact, truth)
        again = bdh_kernels(*inputs, **given, tf32=True, how={"arch": arch, "order": "random"})
        assert all(map(torch.equal, again, ours))


def test_tf32_rounding():
    """Operands have ten bits of mantissa, ties away from 0: q, and the one score."""
    values = torch.tensor([1.0, 1 + 2**-10, 1 + 2**-11, 1 + 2**-12])
    assert as_tf32(values).tolist() == [1.0, 1 + 2**-10, 1 + 2**-10, 1.0]
    q = values.view(1, 1, 1, 4)
    v, table = torch.ones(1, 1, 1, 1), [torch.ones(1, 2), torch.zeros(1, 2)]
    out = bdh_cases.forward(q, v, *table, tf32=True)[0]
    assert out.item() == as_tf32(as_tf32(q).double().square().sum().float().view(1)).item()


@pytest.mark.parametrize("softmax_at", ["one score", "some scores"])
def test_bdh_softmax_of_wide_queries(softmax_at):
    """Scores of about 16, of which one is nearly all of a softmax: gradients that are 0 but for tiny terms."""
    for value_dim, save in ((64, None), (8, "logsumexp")):
        inputs = bdh_inputs((1, 1, 64, 1024), value_dim, torch.float32, each=True)
        options = {"softmax": True, "relu": softmax_at == "some scores"}
        truth = bdh_reference(*doubled(*inputs), **options)
        assert_close_to_reference(bdh_kernels(*inputs, save=save, **options), bdh_reference(*inputs, **options), truth)


@pytest.mark.parametrize("form", [0, 2])
def test_bdh_form_by_cost(form, order):
    """By cost the form with fewer products; scores that were saved are used in any form."""
    inputs = bdh_inputs((1, 2, 80, 8), 4, torch.float32)
    for causal in (False, True):
        options = {"save": "nothing", "causal": causal}
        state = bdh_kernels(*inputs, form=form, how={"order": order}, **options)
        assert all(map(torch.equal, state, bdh_kernels(*inputs, form=2, **options)))
        assert not torch.equal(state[0], bdh_kernels(*inputs, form=1, **options)[0])
        ours = bdh_kernels(*inputs, form=form, save="scores", causal=causal)
        assert all(map(torch.equal, ours, bdh_kernels(*inputs, form=1, save="scores", causal=causal)))


@pytest.mark.parametrize("memory", ("contiguous", "strided"))
def test_bdh_stays_inside_at_both_ends(dtype, memory, order):
    for (shape, value_dim), options in zip((((1, 2, 7, 34), 5), ((1, 1, 8, 16), 8)), BDH_OPTIONS[1:3], strict=True):
        inputs = bdh_inputs(shape, value_dim, dtype, memory, each=True)
        for more in (options, {"save": "nothing", "form": 2}, {"save": "nothing", "form": 2, "causal": True}):
            starts = bdh_kernels(*inputs, flush="start", how={"order": order}, **more)
            assert all(map(torch.equal, starts, bdh_kernels(*inputs, **more)))


def test_bdh_scores_that_are_saved(dtype, arch):
    """w as the header has it: what does not count is 0, rows of a softmax add up to 1, but for a causal one's first."""
    _, q, v, cos, sin = bdh_inputs((2, 2, 70, 8), 3, dtype)
    for causal in (False, True):
        scores = bdh_cases.forward(q, v, cos, sin, save="scores", causal=causal, how={"arch": arch})[1]
        masked = torch.ones(70, 70).triu().bool() if causal else torch.zeros(70, 70).bool()
        assert torch.equal(scores[..., masked], torch.zeros_like(scores[..., masked]))
        if not causal:
            assert torch.equal(scores, scores.mT)
        options = {"causal": causal, "softmax": True, "how": {"arch": arch}}
        w = bdh_cases.forward(q, v, cos, sin, save="scores", **options)[1]
        logsumexp = bdh_cases.forward(q, v, cos, sin, save="logsumexp", **options)[2]
        assert torch.equal(w[..., masked], torch.zeros_like(w[..., masked]))
        sums = torch.ones(2, 2, 70)
        sums[..., 0] -= float(causal)
        torch.testing.assert_close(w.sum(-1), sums)
        expected = (scores * 8**-0.5).masked_fill(masked, -torch.inf).logsumexp(-1)
        torch.testing.assert_close(logsumexp, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("softmax", [False, True])
def test_bdh_unturned_gradient(softmax, dtype, arch):
    grad, q, v, cos, sin = bdh_inputs((1, 2, 9, 36), 5, dtype, each=True)
    options = {"softmax": softmax, "scale": 0.25}
    ours = bdh_cases.backward(grad, q, v, cos, sin, unturned=True, how={"arch": arch}, **options)[0]

    def of_turned(grad, q, v, cos, sin):
        turned = reference.rope(q.relu(), cos, sin, interleaved=True)
        straight, crooked = torch.ones_like(cos), torch.zeros_like(sin)
        return reference.bdh_attention_backward(grad, turned, v, straight, crooked, relu=False, **options)[0]

    inputs = (grad, q, v, cos, sin)
    assert_close_to_reference(ours, of_turned(*inputs), of_turned(*doubled(*inputs)))


def test_bdh_step(dtype, arch, order):
    """Shares of rows and columns; a state with strides, or none yet."""
    for shape, value_dim, shared in (((1, 1, 2), 1, True), ((2, 3, 34), 33, True), ((1, 2, 518), 5, False)):
        _, q, v, cos, sin = bdh_inputs((*shape[:2], 1, shape[2]), value_dim, dtype, "strided", shared, each=shared)
        inputs = (q[:, :, 0], v[:, :, 0], cos[0], sin[0])
        for state in (None, rope_input((*shape, value_dim), torch.float32, "strided", seed=4)):
            options = {"relu": shared, "scale": None if shared else 0.5}
            ours = bdh_cases.step(*inputs, state, **options, how={"arch": arch, "order": order})
            truth = reference.bdh_attention_step(
                *doubled(*inputs), None if state is None else state.double(), **options
            )
            assert_close_to_reference(ours, reference.bdh_attention_step(*inputs, state, **options), truth)
            for how in ({"grid_cap": 1}, {"order": "reverse"}):
                again = bdh_cases.step(*inputs, state, **options, flush="start", how={"arch": arch, **how})
                assert all(map(torch.equal, again, ours))


def test_bdh_steps_are_the_causal_attention(arch):
    _, q, v, cos, sin = bdh_inputs((1, 2, 6, 8), 3, torch.float32)
    state, rows = None, []
    for t in range(6):
        row, state = bdh_cases.step(q[:, :, t], v[:, :, t], cos[t], sin[t], state, how={"arch": arch})
        rows.append(row)
    ours = bdh_cases.forward(q, v, cos, sin, causal=True, how={"arch": arch})[0]
    torch.testing.assert_close(torch.stack(rows, 2), ours)


def test_bdh_empty():
    for shape, value_dim in (((0, 2, 3, 4), 5), ((1, 0, 3, 4), 5), ((1, 2, 0, 4), 5), ((1, 2, 3, 4), 0)):
        inputs = bdh_inputs(shape, value_dim, torch.float32, shared=False)
        for softmax in (False, True):
            out, grad_q, grad_v = bdh_kernels(*inputs, softmax=softmax)
            assert out.shape == grad_v.shape == (*shape[:3], value_dim)
            assert torch.equal(grad_q, torch.zeros(shape))
        out, state = bdh_cases.step(inputs[1].sum(2), inputs[2].sum(2), *(table[0] for table in inputs[3:]), None)
        assert out.numel() == state.numel() == 0 or value_dim
    inputs = bdh_inputs((2, 0, 3, 4), 5, torch.float32)
    assert torch.equal(bdh_kernels(*inputs)[2], torch.zeros(2, 1, 3, 5))


@pytest.mark.slow
def test_bdh_broken_build_is_noticed():
    inputs = bdh_inputs((1, 2, 5, 8), 3, torch.float32)
    right, wrong = (bdh_kernels(*inputs, how={"define": define}) for define in ("", "CAMOX_BREAK_BDH"))
    assert not any(torch.allclose(*pair, atol=1e-4, rtol=0) for pair in zip(right[:2], wrong[:2], strict=True))


# ---- short_attention ----
def short_attention_inputs(dtype, memory):
    """(grad, q, k, v, options, order): padding, dropout and causal in turn."""
    cases, orders = [], list(rig.ORDERS)
    for i, shape in enumerate(short_attention_cases.SHAPES):
        s, t, h, d = shape
        x = picture((s, t, 3 * h, d), dtype).view(s, t, 3, h, d).unbind(2)
        if memory == "strided":
            x = torch.stack([torch.stack(x, 2), torch.full((s, t, 3, h, d), math.nan, dtype=dtype)], -1)
            x = x[..., 0].unbind(2)
        elif memory == "expanded":
            x = [part[:1].expand(shape) for part in x]
        elif memory == "contiguous":
            x = [part.contiguous() for part in x]
        padding = picture((1, 1, s, t), seed=3)[0, 0] > 0.7
        padding[0] = True
        for which in (i % 2, 2 + i % 2, 7):
            seed = torch.tensor(0x0123456789ABCDEF) if which & 2 else None
            options = (padding if which & 1 else None, seed, bool(which & 4), d**-0.5, 0.3)
            cases.append((picture(shape, dtype, seed=1), *x, options, orders[len(cases) % len(orders)]))
    return cases


@pytest.mark.parametrize("memory", short_attention_cases.MEMORY)
def test_short_attention(dtype, memory, arch):
    for grad, *qkv, options, order in short_attention_inputs(dtype, memory):
        ours = short_attention_cases.forward(*qkv, *options, arch=arch, order=order)
        same, truth = (reference.short_attention(*x, *options) for x in (qkv, doubled(*qkv)))
        assert_close_to_reference(ours, same, truth)
        ours = short_attention_cases.backward(grad, *qkv, *options, arch=arch, order=order)
        same = reference.short_attention_backward(grad, *qkv, *options)
        # A lone key's gradients are 0 but for rounding.
        truth = reference.short_attention_backward(*doubled(grad, *qkv), *options)
        truth = [t if t.any() else t + 8 * torch.finfo(torch.float32).eps for t in truth]
        assert_close_to_reference(ours, same, truth)


def test_short_attention_strides_over_a_small_grid(dtype, order):
    q, k, v, grad = picture((4, 50, 6, 4 * 12), dtype).unflatten(3, (4, 12)).transpose(1, 2)[:, :, :20].unbind(3)
    options = (None, torch.tensor(7), False, 0.3, 0.2)
    capped = {"grid_cap": 2, "order": order}
    out = short_attention_cases.forward(q, k, v, *options)
    assert torch.equal(short_attention_cases.forward(q, k, v, *options, **capped), out)
    grads = short_attention_cases.backward(grad, q, k, v, *options)
    for mine, theirs in zip(short_attention_cases.backward(grad, q, k, v, *options, **capped), grads, strict=True):
        assert torch.equal(mine, theirs)


def test_short_attention_masks_are_those_of_the_cpu():
    q, k = picture((3, 6, 4, 2 * 6)).unflatten(3, (2, 6)).unbind(3)
    options = (None, torch.tensor(-5), False, 1.0, 0.4)
    eye = torch.eye(6).view(1, 6, 1, 6).expand(3, 6, 4, 6)
    cpu = torch.ops.camox_ops.short_attention(q, k, eye, *options)
    assert torch.equal(short_attention_cases.forward(q, k, eye, *options) == 0, cpu == 0)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_short_attention_padded_keys_and_values_may_hold_anything(dtype):
    """Staged in shared memory, by vectors and by elements, and read where they lie."""
    for shape, causal in itertools.product(((5, 6, 2, 12), (5, 5, 2, 7), (2, 40, 1, 100)), (False, True)):
        grad, q, k, v = (normal(shape, dtype, seed=seed) for seed in range(4))
        padding = normal(shape[:2], seed=5) > 0.3
        options = (padding, None, causal, 0.3, 0.0)
        filled = [x.masked_fill(padding[:, :, None, None], math.nan) for x in (k, v)]
        zeros = [x.masked_fill(padding[:, :, None, None], 0) for x in (k, v)]
        out = short_attention_cases.forward(q, *filled, *options)
        assert torch.equal(out, short_attention_cases.forward(q, *zeros, *options))
        grads = short_attention_cases.backward(grad, q, *filled, *options)
        expected = short_attention_cases.backward(grad, q, *zeros, *options)
        for ours, theirs in zip(grads, expected, strict=True):
            assert torch.equal(ours, theirs)


def test_short_attention_empty():
    for shape in ((0, 3, 4, 4), (2, 0, 4, 4), (2, 3, 0, 4), (2, 3, 4, 0)):
        x = torch.empty(shape)
        assert short_attention_cases.forward(x, x, x, None, None, False, 1.0, 0.0).shape == shape
        assert short_attention_cases.backward(x, x, x, x, None, None, False, 1.0, 0.0)[0].shape == shape


@pytest.mark.slow
def test_short_attention_broken_build_is_noticed():
    x = picture((2, 3, 2, 4))
    options = (None, None, False, 0.5, 0.0)
    wrong = short_attention_cases.forward(x, x, x, *options, define="CAMOX_BREAK_SHORT_ATTENTION")
    assert not torch.allclose(wrong, short_attention_cases.forward(x, x, x, *options), atol=1e-4)
    wrong = short_attention_cases.backward(x, x, x, x, *options, define="CAMOX_BREAK_SHORT_ATTENTION")[0]
    assert not torch.allclose(wrong, short_attention_cases.backward(x, x, x, x, *options)[0], atol=1e-4)


# ---- bias_gelu ----
@pytest.mark.parametrize("dropped", [False, True])
def test_bias_gelu(dtype, dropped, arch):
    seed, orders = torch.tensor(99) if dropped else None, list(rig.ORDERS)
    for i, shape in enumerate(bias_gelu_cases.SHAPES):
        x, grad = (picture((1, 1, *shape), dtype, seed=k)[0, 0] for k in (0, 1))
        bias = picture((1, 1, 1, shape[1]), seed=2).flatten()
        ours = bias_gelu_cases.run(x, bias, grad, seed, 0.3, arch=arch, order=orders[i % len(orders)])
        inputs, doubles = (x, bias), list(doubled(x, bias))
        same = [reference.bias_gelu(*inputs, seed, 0.3)]
        truth = [reference.bias_gelu(*doubles, seed, 0.3)]
        same += reference.bias_gelu_backward(grad, *inputs, seed, 0.3)
        truth += reference.bias_gelu_backward(grad.double(), *doubles, seed, 0.3)
        assert_close_to_reference(ours, same, truth)


def test_bias_gelu_strides_over_a_small_grid(dtype, order):
    x, grad = (picture((1, 1, 90, 640), dtype, seed=k)[0, 0] for k in (0, 1))
    bias = picture((1, 1, 1, 640), seed=2).flatten()
    expected = bias_gelu_cases.run(x, bias, grad, torch.tensor(5), 0.3)
    ours = bias_gelu_cases.run(x, bias, grad, torch.tensor(5), 0.3, grid_cap=2, order=order)
    for mine, theirs in zip(ours, expected, strict=True):
        assert torch.equal(mine, theirs)


def test_bias_gelu_empty():
    assert bias_gelu_cases.run(torch.empty(0, 3), torch.ones(3), torch.empty(0, 3), None, 0.0)[2].eq(0).all()
    assert bias_gelu_cases.run(torch.empty(3, 0), torch.ones(0), torch.empty(3, 0), None, 0.0)[0].shape == (3, 0)


@pytest.mark.slow
def test_bias_gelu_broken_build_is_noticed():
    x, bias = picture((1, 1, 2, 8))[0, 0], torch.ones(8)
    wrong, right = (bias_gelu_cases.run(x, bias, x, None, 0.0, define=d) for d in ("CAMOX_BREAK_BIAS_GELU", ""))
    for mine, theirs in zip(wrong, right, strict=True):
        assert not torch.allclose(mine, theirs, atol=1e-4)


# ---- barriers ----
def norm2d_with_barriers(**how):
    for layout in ("contiguous", "channels_last"):
        yield norm2d_cases.forward_and_gradients(*norm2d_inputs((1, 256, 30, 40), layout=layout), **how)


def dropout_with_barriers(**how):
    for rows, width in ((9, 1544), (300, 40)):
        x, residual, grad = (picture((1, 1, rows, width), seed=i)[0, 0] for i in range(3))
        weight, bias = picture((1, 1, 2, width), seed=4)[0, 0]
        yield dropout_cases.norm(x, residual, weight, bias, grad, SEED, 0.3, **how)


def rope_with_barriers(**how):
    grad, x = picture((2, 1, 150, 2 * 16)).unflatten(3, (2, 16)).unbind(3)
    positions = torch.randint(9, (2, 150), generator=torch.Generator().manual_seed(0))
    yield rope_cases.backward(grad, x, *rope_tables(9, 8), rotary_dim=16, positions=positions, how=how)


def moe_with_barriers(**how):
    for rows, num_experts in ((300, 5), (40, 70)):
        logits = moe_logits(rows, num_experts)
        routed = moe_cases.route(logits, 2, capacity=90, **how)
        weights, experts, counts, _, _, position = routed
        loss, slope = moe_cases.aux_loss(logits, counts, 2, **how)
        yield [*routed, loss, slope, moe_cases.route_backward(weights, logits, experts, position, **how)]
    x, y = picture((1, 1, 5, 4098), seed=1)[0, 0], picture((1, 1, 10, 4098), seed=2)[0, 0]
    weights, experts, _, offsets, _, position = reference.moe_route(moe_logits(5, 4), 2)
    yield moe_cases.combine_backward(x, y, weights, experts, offsets, position, **how)


def linear_attention_with_barriers(**how):
    for dim, dtype in itertools.product((16, 12, 70), (torch.float32, torch.bfloat16)):
        for normalize in ("sum", "feature"):
            shape = (1, 2, 136, dim, dim + 4 * (dim == 12))
            inputs = attention_inputs(shape, dtype, "picture", normalize, state=normalize == "sum")
            yield attention_runs(inputs, {"how": how})[0]


def bdh_with_barriers(**how):
    for dtype, (causal, softmax) in itertools.product((torch.bfloat16, torch.float32), ((1, 0), (0, 1), (1, 1))):
        inputs = bdh_inputs((1, 2, 70, 70), 66, dtype)
        yield bdh_kernels(*inputs, causal=causal, softmax=softmax, save="logsumexp" if softmax else "nothing", how=how)
    _, q, v, cos, sin = bdh_inputs((1, 2, 1, 518), 40, torch.float32)
    yield bdh_cases.step(q[:, :, 0], v[:, :, 0], cos[0], sin[0], None, how=how)


def short_attention_with_barriers(**how):
    grad, *qkv = picture((40, 20, 6, 4 * 12)).unflatten(3, (4, 12)).unbind(3)
    padding = picture((1, 1, 40, 20), seed=3)[0, 0] > 0.7
    qkv[1:] = (x.masked_fill(padding[:, :, None, None], math.nan) for x in qkv[1:])
    options = (padding, torch.tensor(7), False, 0.3, 0.2)
    yield [short_attention_cases.forward(*qkv, *options, **how)]
    yield short_attention_cases.backward(grad, *qkv, *options, **how)


def bias_gelu_with_barriers(**how):
    x, grad = (picture((1, 1, 90, 640), seed=k)[0, 0] for k in (0, 1))
    yield bias_gelu_cases.run(x, picture((1, 1, 1, 640), seed=2).flatten(), grad, torch.tensor(5), 0.3, **how)


WITH_BARRIERS = {
    "bdh": bdh_with_barriers,
    "bias_gelu": bias_gelu_with_barriers,
    "dropout": dropout_with_barriers,
    "linear_attention": linear_attention_with_barriers,
    "moe": moe_with_barriers,
    "norm2d": norm2d_with_barriers,
    "rope": rope_with_barriers,
    "short_attention": short_attention_with_barriers,
}


@functools.cache
def results_with_barriers(op):
    return [*map(list, WITH_BARRIERS[op](grid_cap=1))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "path", "line"),
    [
        *((op, *at) for op in WITH_BARRIERS for at in rig.barriers(*sorted((rig.CSRC / op).glob("*.cu*")))),
        *(("dropout", *at) for at in rig.barriers(rig.CSRC / "common" / "cuda_util.cuh")),  # of camox_block_sum
    ],
    ids=lambda part: part.name if isinstance(part, Path) else str(part),
)
def test_a_barrier_that_is_missing_is_noticed(op, path, line):
    """By some order of threads, where one block does all the work; NaN and an access off its bounds count too."""
    right = results_with_barriers(op)

    def noticed(order):
        try:
            for results, wrong in zip(right, WITH_BARRIERS[op](grid_cap=1, order=order), strict=True):
                if not all(map(torch.equal, results, wrong)):
                    return True
        except rig.KernelError:
            return True
        return False

    with rig.without_barrier(path, line):
        assert any(map(noticed, rig.ORDERS))


def test_only_ops_without_barriers_are_left_out():
    ops = {path.parent.name for path in OPS if rig.barriers(*path.parent.glob("*.cu*"))}
    assert ops - {"edge"} == WITH_BARRIERS.keys()


# ---- every kernel ----


@pytest.mark.parametrize("source", OPS, ids=lambda source: source.stem)
def test_every_kernel_was_run(source, capsys):
    """Each __global__ function in the objects has run; `every_kernel` of the op's cases runs what no other test did.
    The rig counts for each at least the static shared memory that nvcc gave it."""
    budget = json.loads((rig.CSRC / "cuda_budget.json").read_text())
    for arch in rig.ARCHS:
        path = rig.object_path(source, arch)
        if rig.never_run(path):
            EVERY_KERNEL[source.stem](arch)
        assert rig.kernels(path) and {rig.short_name(name) for name in rig.kernels(path)} <= budget.keys()
        names, compiled = rig.kernel_addresses(path), f"sm_{arch // 10}"
        for address, size in rig.static_shared(path).items():
            name = rig.short_name(names[address])
            assert size >= budget[name]["archs"][compiled]["shared"] - (RESERVED_SHARED if arch >= 900 else 0), name
        assert not rig.never_run(path), f"compiled but never run in the rig: {sorted(rig.never_run(path))}"
    with capsys.disabled():
        print(f"\n{rig.report(source.stem)}")
