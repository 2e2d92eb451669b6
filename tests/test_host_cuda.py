"""CUDA kernels on the CPU: the rig finds planted bugs; every kernel of the library runs in it against the reference."""

import ctypes
import json
import sys
from pathlib import Path

import pytest
import torch
from helpers import DEVICE, assert_close_to_reference, assert_one_rounding, picture

from camox_ops import reference

sys.path.insert(0, str(Path(__file__).parent / "cuda"))
import edge_cases
import rig
import rope_cases

OPS = sorted(rig.CSRC.glob("*/*_cuda.cu"))
PLANTED = sorted((Path(__file__).parent / "cuda").glob("*.cu"))

EVERY_KERNEL = {"edge_cuda": edge_cases.every_kernel, "rope_cuda": rope_cases.every_kernel}

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


# ---- edge_maps ----
HALVES = (torch.bfloat16, torch.float16)


@pytest.fixture(params=rig.DTYPES)
def dtype(request):
    return rig.DTYPES[request.param]


def edge_inputs(shapes=edge_cases.SHAPES):
    """(shape, border, order of blocks and threads), every order used in turn."""
    cases = [
        (shape, border) for shape in shapes for border in edge_cases.BORDERS if edge_cases.reachable(shape, border)
    ]
    return [(*case, list(rig.ORDERS)[i % len(rig.ORDERS)]) for i, case in enumerate(cases)]


@pytest.mark.parametrize("layout", edge_cases.LAYOUTS)
def test_edge_forward(dtype, layout, arch):
    for shape, border, order in edge_inputs():
        for kind in ("normal", "offset"):
            x = picture(shape, dtype, layout, kind)
            ours = edge_cases.forward(x, 1e-8, border, arch=arch, order=order)
            same_dtype = reference.edge_maps(x, 1e-8, border)
            assert_close_to_reference(ours, same_dtype, reference.edge_maps(x.double(), 1e-8, border))
            if dtype in HALVES:
                assert_one_rounding(ours, edge_cases.forward(x.float(), 1e-8, border, arch=arch))


@pytest.mark.parametrize("layout", edge_cases.LAYOUTS)
def test_edge_backward(dtype, layout, arch):
    for shape, border, order in edge_inputs():
        x = picture(shape, dtype, layout)
        grads = [picture(shape, dtype, "strided" if i == 2 and shape[3] < 20 else layout, seed=i + 1) for i in range(4)]
        ours = edge_cases.backward(x, grads, 1e-2, border, arch=arch, order=order)
        same_dtype = reference.edge_maps_backward(x, *grads, 1e-2, border)
        truth = reference.edge_maps_backward(x.double(), *(g.double() for g in grads), 1e-2, border)
        assert_close_to_reference(ours, same_dtype, truth)
        if dtype in HALVES:
            floats = edge_cases.backward(x.float(), [g.float() for g in grads], 1e-2, border, arch=arch)
            assert_one_rounding(ours, floats)


@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
@pytest.mark.parametrize("shape", [(2, 8, 5, 16), (2, 3, 5, 7)])
def test_edge_stacked(shape, layout, dtype, order):
    x = picture(shape, dtype, layout)
    ours = edge_cases.forward(x, border="reflect", stacked=True, order=order)
    assert torch.equal(ours, torch.cat([*edge_cases.forward(x, border="reflect"), x], dim=1))


@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
def test_edge_backward_of_some_maps(layout, order):
    x = picture((2, 8, 6, 12), layout=layout)
    for chosen in range(4):
        grads = [picture(x.shape, layout=layout, seed=9) if i == chosen else None for i in range(4)]
        truth = reference.edge_maps_backward(x.double(), *(g if g is None else g.double() for g in grads), 1e-2)
        ours = edge_cases.backward(x, grads, 1e-2, order=order)
        assert_close_to_reference(ours, reference.edge_maps_backward(x, *grads, 1e-2), truth)


@pytest.mark.parametrize("layout", edge_cases.LAYOUTS)
def test_edge_stays_inside_at_both_ends(layout, dtype, order):
    """Flush against a guard page at the end in the tests above, at the start here; the bits are the same."""
    for shape in ((1, 3, 4, 16), (2, 16, 5, 7)):
        x = picture(shape, dtype, layout)
        grads = [picture(shape, dtype, layout, seed=i + 1) for i in range(4)]
        for ours, ends in zip(
            [
                *edge_cases.forward(x, flush="start", order=order),
                edge_cases.backward(x, grads, flush="start", order=order),
            ],
            [*edge_cases.forward(x), edge_cases.backward(x, grads)],
            strict=True,
        ):
            assert torch.equal(ours, ends)


@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
def test_edge_small_grid_strides_over_the_rest(layout, dtype, order):
    """A grid of two blocks does the work of many: what a grid at its limit of 2^31-1 does on a GPU."""
    x = picture((3, 24, 18, 32), dtype, layout)
    grads = [picture(x.shape, dtype, layout, seed=i + 1) for i in range(4)]
    for ours, whole in zip(
        [*edge_cases.forward(x, grid_cap=2, order=order), edge_cases.backward(x, grads, grid_cap=2, order=order)],
        [*edge_cases.forward(x), edge_cases.backward(x, grads)],
        strict=True,
    ):
        assert torch.equal(ours, whole)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("layout", ("contiguous", "channels_last"))
def test_edge_nan_and_inf_as_in_a_convolution(value, layout):
    for place in range(4):
        x = picture((1, 8, 4, 8), layout=layout)
        x[:, :, place, place] = value
        for ours, truth in zip(edge_cases.forward(x), reference.edge_maps(x), strict=True):
            torch.testing.assert_close(ours, truth, equal_nan=True)


def test_edge_empty():
    for shape in ((0, 3, 4, 5), (2, 0, 4, 5), (2, 3, 0, 5), (2, 3, 4, 0)):
        x = torch.empty(shape)
        assert [m.shape for m in edge_cases.forward(x)] == [x.shape] * 3
        assert edge_cases.backward(x, [x] * 4).shape == x.shape


@pytest.mark.slow
def test_edge_broken_build_is_noticed():
    x = picture((1, 2, 4, 8))
    for layout in ("contiguous", "channels_last"):
        x = picture((1, 4, 4, 8), layout=layout)
        right, wrong = edge_cases.forward(x)[0], edge_cases.forward(x, define="CAMOX_BREAK_EDGE")[0]
        torch.testing.assert_close(wrong - right, torch.full_like(right, 1e-3), atol=1e-5, rtol=0)
        assert not torch.equal(
            edge_cases.backward(x, [x] * 4), edge_cases.backward(x, [x] * 4, define="CAMOX_BREAK_EDGE")
        )


@pytest.mark.slow
def test_edge_without_its_barrier_is_noticed(tmp_path, order):
    """The one barrier of the channels_last backward, taken out of a copy of the source."""
    text = edge_cases.SOURCE.read_text()
    assert text.count("__syncthreads();") == 1
    folder = tmp_path / "edge"
    folder.mkdir()
    for header in edge_cases.SOURCE.parent.glob("*.h"):
        (folder / header.name).write_text(header.read_text())
    (tmp_path / "common").symlink_to(rig.CSRC / "common")
    source = folder / "edge_without_barrier.cu"
    source.write_text(text.replace("__syncthreads();", ""))
    x = picture((1, 8, 6, 40), layout="channels_last")
    grads = [picture(x.shape, layout="channels_last", seed=i + 1) for i in range(4)]
    right, wrong = edge_cases.backward(x, grads), edge_cases.backward(x, grads, source=source, order=order)
    assert not torch.allclose(right, wrong)


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
