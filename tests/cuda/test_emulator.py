"""The CUDA emulator finds seeded bugs and passes the same kernels without them; every op has cases in it."""

import ctypes
from pathlib import Path

import emulator
import pytest
import torch
from images import ImageOp

HERE = Path(__file__).parent
SEEDED_BUGS = sorted((HERE / "seeded_bugs").glob("*.cu"))


def at(tensor):
    return ctypes.c_void_p(tensor.data_ptr())


def launcher(name, arch):
    (source,) = [path for path in SEEDED_BUGS if path.stem == name]
    return getattr(emulator.load(source, arch), f"camox_{name}")


def missing_barrier(bug, order, arch):
    with emulator.guarded() as memory:
        x = memory.copy(torch.randn(5, 64))
        y = memory.empty_like(x)
        emulator.call(launcher("missing_barrier", arch), bug, at(x), at(y), 5, order=order)
        return y.clone(), x.flip(1)


def missing_cp_async_wait(bug, order, arch):
    with emulator.guarded() as memory:
        x = memory.copy(torch.randn(5, 128))
        y = memory.empty_like(x)
        emulator.call(launcher("missing_cp_async_wait", arch), bug, at(x), at(y), 5, order=order)
        return y.clone(), x.clone()


def index_past_end(bug, order, arch, flush="end"):
    with emulator.guarded(flush) as memory:
        x = memory.copy(torch.arange(100.0), "x")
        y = memory.empty_like(x, name="y")
        emulator.call(launcher("index_past_end", arch), bug, at(x), at(y), 100, order=order)
        return y.clone(), x + torch.cat([x[1:], torch.zeros(1)])


def uninitialised_shared(bug, order, arch):
    with emulator.guarded() as memory:
        x = memory.copy(torch.randint(-9, 9, (5, 64)).float())
        y = memory.empty_strided((5,), (1,), torch.float32)
        emulator.call(launcher("uninitialised_shared", arch), bug, at(x), at(y), 5, order=order)
        return y.clone(), x.sum(1)


def shared_past_limit(bug, order, arch):
    with emulator.guarded() as memory:
        x = memory.copy(torch.randint(-9, 9, (5, 64)).float())
        y = memory.empty_strided((5,), (1,), torch.float32)
        emulator.call(launcher("shared_past_limit", arch), bug, at(x), at(y), 5, order=order)
        return y.clone(), x.sum(1)


def divergent_shuffle(bug, order, arch, timeout=60.0):
    with emulator.guarded() as memory:
        x = memory.copy(torch.randint(-9, 9, (32,)).float())
        y = memory.empty_strided((1,), (1,), torch.float32)
        emulator.call(launcher("divergent_shuffle", arch), bug, at(x), at(y), order=order, timeout=timeout)
        return y.clone(), x.sum().reshape(1)


def wrong_mma_fragment(bug, order, arch, dtype=torch.float16):
    with emulator.guarded() as memory:
        a, b = memory.copy(torch.randn(16, 16).to(dtype)), memory.copy(torch.randn(16, 8).to(dtype))
        d = memory.empty_strided((16, 8), (8, 1), torch.float32)
        bfloat16 = int(dtype == torch.bfloat16)
        emulator.call(launcher("wrong_mma_fragment", arch), bug, bfloat16, at(a), at(b), at(d), order=order)
        return d.clone(), (a.double() @ b.double()).float()


def wrong_ldmatrix_row(bug, order, arch, transposed=False):
    with emulator.guarded() as memory:
        x = memory.copy(torch.randint(-999, 999, (4, 8, 8), dtype=torch.int16))
        y = memory.empty_strided((4, 32, 2), (64, 2, 1), torch.int16)
        emulator.call(launcher("wrong_ldmatrix_row", arch), bug, int(transposed), at(x), at(y), order=order)
        return y.float(), (x.mT if transposed else x).reshape(4, 32, 2).float()


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
    wrong_ldmatrix_row,
)


@pytest.mark.parametrize("kernel", CORRECT, ids=lambda kernel: kernel.__name__)
def test_kernels_without_a_bug_pass(kernel, order, arch):
    assert same(kernel(0, order, arch))


def test_ldmatrix(order, arch):
    assert same(wrong_ldmatrix_row(0, order, arch, transposed=True))
    with pytest.raises(
        emulator.KernelError, match=r"thread \(9,0,0\).*ldmatrix: a row must begin at a multiple of 16 bytes"
    ):
        wrong_ldmatrix_row(1, order, arch)
    with pytest.raises(emulator.KernelError, match="ldmatrix reads what is not shared memory"):
        wrong_ldmatrix_row(2, order, arch)


def test_bfloat16_mma(order):
    assert same(wrong_mma_fragment(0, order, 900, torch.bfloat16))
    with pytest.raises(emulator.KernelError, match="sm_75 has no bfloat16 mma"):
        wrong_mma_fragment(0, order, 750, torch.bfloat16)


def test_missing_barrier_differs(order, arch):
    result, truth = missing_barrier(1, order, arch)
    assert not same((result, truth))
    assert result.isnan().any()  # the other half of the block has not written yet


def test_missing_cp_async_wait_reads_nan(order):
    result, _ = missing_cp_async_wait(1, order, 900)
    assert result.isnan().any()
    with pytest.raises(emulator.KernelError, match=r"cp\.async at line \d+ is never waited for"):
        missing_cp_async_wait(2, order, 900)
    assert same(missing_cp_async_wait(2, order, 750))  # no cp.async on sm_75: the copy is made at once


OUT = r"out of bounds at 0x\w+: "  # "read", "write", or "access" where the processor does not say


@pytest.mark.parametrize(
    ("bug", "flush", "message"),
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
def test_index_out_of_bounds_is_named(bug, flush, message, order, arch):
    with pytest.raises(emulator.KernelError, match=message):
        index_past_end(bug, order, arch, flush)


def test_uninitialised_shared_is_nan(order, arch):
    assert uninitialised_shared(1, order, arch)[0].isnan().all()


@pytest.mark.parametrize("bug", [1, 2])
def test_static_and_dynamic_shared_memory_count_together(bug, order, arch):
    message = rf"shared_past_limit_kernel<{'false' if bug == 1 else 'true'}>.*: 49152 bytes of dynamic and 16 of static"
    with pytest.raises(emulator.KernelError, match=message):
        shared_past_limit(bug, order, arch)


def test_more_threads_than_launch_bounds_allow_are_refused(monkeypatch, arch):
    assert emulator.most_threads()["camox_row_sums_kernel<8, dropout>"] == 1024
    monkeypatch.setattr(emulator, "most_threads", lambda: {"uninitialised_shared_kernel<false>": 32})
    with pytest.raises(emulator.KernelError, match="a block of 64 threads is more than its launch bounds allow"):
        uninitialised_shared(0, "forward", arch)


def test_a_kernel_of_unknown_static_memory_is_not_launched(tmp_path):
    (source,) = [path for path in SEEDED_BUGS if path.stem == "uninitialised_shared"]
    copy = tmp_path / "copy.so"  # to the runtime another object, whose static memory it does not know
    copy.write_bytes(emulator.object_path(source, 900).read_bytes())
    with emulator.guarded() as memory:
        x, y = memory.copy(torch.ones(5, 64)), memory.empty_strided((5,), (1,), torch.float32)
        with pytest.raises(emulator.KernelError, match="its static shared memory is not known"):
            emulator.call(ctypes.CDLL(str(copy)).camox_uninitialised_shared, 0, at(x), at(y), 5)


def test_the_runtime_is_not_for_the_rest_of_the_process(arch):
    """torch looks for CUDA's functions by name where it was built with CUDA, and must not find the emulator's."""
    launcher("missing_barrier", arch)
    everywhere = ctypes.CDLL(None)
    for name in ("camox_emulator_launch", *([] if torch.version.cuda else ["cudaGetDevice", "cudaGetLastError"])):
        assert not hasattr(everywhere, name)


@pytest.mark.parametrize(
    ("bug", "message"),
    [
        (
            1,
            r"waits at __shfl_xor_sync\(\) .* mask 0xffffffff\) for lane \d+, but thread .* has left the kernel",
        ),
        (2, r"shuffle reads lane \d+, which takes no part in it"),
        (3, r"waits at __syncthreads\(\) .* with 16 of 32 threads, but thread \(16,0,0\) has left the kernel"),
    ],
)
def test_divergence_is_named(bug, message, order, arch):
    with pytest.raises(emulator.KernelError, match=message):
        divergent_shuffle(bug, order, arch)


def test_endless_loop_is_named(arch):
    with pytest.raises(emulator.KernelError, match=r"divergent_shuffle_kernel<4>.*still running after 0.2 s"):
        divergent_shuffle(4, "forward", arch, timeout=0.2)


def test_wrong_mma_fragment_differs(order, arch):
    assert not same(wrong_mma_fragment(1, order, arch))


def test_a_kernel_that_was_never_run_is_named():
    path = emulator.object_path(SEEDED_BUGS[0].with_name("uninitialised_shared.cu"), 900)
    ours = {key: count for key, count in emulator.runs.items() if key[0] == path.name}
    try:
        for key in ours:
            del emulator.runs[key]
        uninitialised_shared(0, "forward", 900)
        (name,) = emulator.never_run(path)
        assert name == "void uninitialised_shared_kernel<true>(float const*, float*)"
        assert len(emulator.kernels(path)) == 2
    finally:
        emulator.runs.update(ours)


def test_every_op_has_cases_and_tests():
    """Without its cases no kernel would be run here, without tests no value compared."""
    for source in emulator.sources():
        op = source.parent.name
        cases = emulator.all_cases().get(op)
        assert cases, f"tests/cuda/{op}_cases.py is missing"
        assert callable(cases.every_kernel)
        of_images = isinstance(getattr(cases, "OP", None), ImageOp)
        own = HERE / f"test_{op}_cuda.py"
        assert of_images or own.exists(), f"{op}_cases.OP is not an ImageOp, and tests/cuda/{own.name} is missing"
        assert of_images or "assert_close_to_reference" in own.read_text() or "assert_right" in own.read_text()


def test_a_compilers_message_is_shown_once(tmp_path):
    source = tmp_path / "wrong_cuda.cu"
    source.write_text("int wrong() { return unknown; }\n")
    try:
        with pytest.raises(RuntimeError, match=r"wrong_cuda\.cu:1:.*error: .unknown. was not declared"):
            emulator.object_path(source, 900)
        for arch in emulator.ARCHS:
            with pytest.raises(pytest.skip.Exception, match=r"wrong_cuda\.cu does not compile"):
                emulator.object_path(source, arch)
    finally:
        emulator.refused.clear()
