"""A barrier that is taken out of a kernel is noticed: the tests of values would see a race."""

import functools
import os
from pathlib import Path

import edge_cases
import emulator
import pytest
import torch
from helpers import random_image

# Ops whose cases run the kernels that have barriers, by with_barriers(**how) -> results.
WITH_BARRIERS = {
    op: cases.with_barriers for op, cases in emulator.all_cases().items() if hasattr(cases, "with_barriers")
}


@functools.cache
def results_with_barriers(op):
    return [*map(list, WITH_BARRIERS[op](grid_cap=1))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "path", "line"),
    [
        *((op, *at) for op in WITH_BARRIERS for at in emulator.barriers(*sorted((emulator.CSRC / op).glob("*.cu*")))),
        # camox_block_sum's
        *(("dropout", *at) for at in emulator.barriers(emulator.CSRC / "common" / "cuda_util.cuh")),
        # those of products of tiles
        *(
            ("bdh", *at)
            for header in ("tile_product.cuh", "large_product.cuh")
            for at in emulator.barriers(emulator.CSRC / "common" / header)
        ),
        # those of warps whose rows are staged
        *(("bands", *at) for at in emulator.barriers(emulator.CSRC / "common" / "stencil.cuh", call="__syncwarp();")),
        # the last step of gradients of weights and biases
        *(
            (op, *at)
            for op in ("bias_gelu", "dropout", "norm2d")
            for at in emulator.barriers(emulator.CSRC / "common" / "row_sums.cuh")
        ),
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
        except emulator.KernelError:
            return True
        return False

    with emulator.without_barrier(path, line):
        assert any(map(noticed, emulator.ORDERS))


def test_only_ops_without_barriers_are_left_out():
    ops = {source.parent.name for source in emulator.sources() if emulator.barriers(*source.parent.glob("*.cu*"))}
    assert ops - {"edge"} == WITH_BARRIERS.keys()  # edge's only one is below


@pytest.mark.slow
def test_edge_without_its_barrier_is_noticed(order):
    """The one barrier of the channels_last backward, taken out of a copy of the source, not by the emulator."""
    op = edge_cases.OP
    assert op.source.read_text().count("__syncthreads();") == 1
    folder = (
        emulator.BUILD / f"without_barrier_{os.getpid()}"
    )  # in the repository, where the emulator looks for kernels
    (folder / "edge").mkdir(parents=True, exist_ok=True)
    for header in op.source.parent.glob("*.h"):
        (folder / "edge" / header.name).write_text(header.read_text())
    if not (folder / "common").exists():
        (folder / "common").symlink_to(emulator.CSRC / "common")
    source = folder / "edge" / "edge_cuda_without_barrier.cu"
    source.write_text(op.source.read_text().replace("__syncthreads();", ""))
    x = random_image((1, 8, 6, 40), layout="channels_last")
    grads = [random_image(x.shape, layout="channels_last", seed=i + 1) for i in range(4)]
    right, wrong = op.backward(x, grads), op.backward(x, grads, source=source, order=order)
    assert not torch.allclose(right, wrong)
