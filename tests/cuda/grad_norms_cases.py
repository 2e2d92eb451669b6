"""grad_group_norms and scale_grads_ in the emulator: the launchers of csrc/grad_norms on guarded memory."""

from __future__ import annotations

import ctypes

import emulator
import torch
from images import DTYPE_CODES

SOURCE = emulator.CSRC / "grad_norms" / "grad_norms_cuda.cu"
BATCH, BLOCKS, LISTINGS = 40, 48, 60  # of a launch: CAMOX_GRAD_BATCH, ... of grad_norms_plan.h in the emulator
# Around accesses, blocks and pieces of 8192 elements.
SIZES = (1, 7, 8, 33, 4096, 8191, 8192, 8195, 0, 20000)
GROUPS = 5


def gradients(dtype, sizes=SIZES, scale=1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [(scale * torch.randn(n, generator=generator, dtype=torch.float64)).to(dtype) for n in sizes]


def groups_of(grads) -> list[int]:
    return [(3 * i) % (GROUPS - 1) for i in range(len(grads))]  # the last has none


def _params(memory, grads, groups, repeats):
    structs, constants = emulator.header("common/types.h", "grad_norms/grad_norms.h")
    p = structs["camox_grad_norms_params"]()
    entries = (structs["camox_grad"] * len(grads))()
    for i, (entry, grad) in enumerate(zip(entries, grads, strict=True)):
        entry.data, entry.elements, entry.dtype = grad.data_ptr(), grad.numel(), constants[DTYPE_CODES[grad.dtype]]
        entry.group, entry.repeats = groups[i] if groups else 0, repeats
    p.count, p.groups = len(grads), GROUPS
    p.grads = ctypes.addressof(entries)
    size = 64 * BATCH + 8 * BLOCKS + 8 + 16 + 4 * BATCH  # camox_grad_norms_table_bytes
    table = memory.empty_strided((-(-size // 16), 2), (2, 1), torch.int64, "table")
    p.table = table.data_ptr()
    return p, (entries, table), structs, constants


def norms(grads, groups, reduce="sum_of_norms", repeats=1.0, flush="end", **how) -> torch.Tensor:
    order = sorted(range(len(grads)), key=groups.__getitem__)
    grads, groups = [grads[i] for i in order], [groups[i] for i in order]
    with emulator.guarded(flush) as memory:
        held = [memory.copy(grad, f"grads[{i}]") for i, grad in enumerate(grads)]
        p, _kept, _, constants = _params(memory, held, groups, repeats)
        p.reduce, p.norms_dtype = constants[f"CAMOX_GROUP_{reduce.upper()}"], constants["CAMOX_F32"]
        found = memory.empty_strided((GROUPS,), (1,), torch.float32, "norms")
        p.norms = found.data_ptr()
        _call("camox_grad_norms_cuda", p, grads, "forward", **how)
        return found.clone()


def scale(grads, listings, scales, flush="end", **how) -> list[torch.Tensor]:
    """listings: (gradient, group) in the order of the gradients."""
    with emulator.guarded(flush) as memory:
        held = [memory.copy(grad, f"grads[{i}]") for i, grad in enumerate(grads)]
        p, _kept, structs, _ = _params(memory, held, None, 1.0)
        pairs = (structs["camox_grad_listing"] * len(listings))(*listings)
        p.listings, p.listing = len(listings), ctypes.addressof(pairs)
        p.scales = memory.copy(scales, "scales").data_ptr()
        _call("camox_scale_grads_cuda", p, grads, "scale", **how)
        return [grad.clone() for grad in held]


def _call(name, p, grads, direction, arch=900, define="", stream=None, **how):
    function = getattr(emulator.load(SOURCE, arch, define), name)
    dtype = str(grads[0].dtype).removeprefix("torch.") if grads else "float32"
    stream = ctypes.c_void_p(stream)
    emulator.call(function, ctypes.byref(p), stream, dtype=dtype, layout="contiguous", direction=direction, **how)


def with_barriers(**how):
    """Gradients of several blocks, more of a group than a warp has lanes, and squares that are added twice."""
    grads = gradients(torch.float32, (20000, 9, *[3 + i for i in range(40)]))
    yield [norms(grads, [0, *[1] * 41], **how)]
    yield [norms(gradients(torch.float32, (9000,), 1e-25), [0], **how)]


def every_kernel(arch) -> None:
    for dtype in emulator.DTYPES.values():
        grads = gradients(dtype, (8, 7))
        norms(grads, [0, 1], arch=arch)
        scale(grads, [(0, 0)] + [(1, 1)] * (LISTINGS + 1), torch.rand(GROUPS), arch=arch)
