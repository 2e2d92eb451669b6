"""box in the emulator: calls the launcher of csrc/box/box_cuda.cu on guarded tensors."""

from __future__ import annotations

import ctypes

import emulator
import torch
from images import DTYPE_CODES, _dense, _view, is_channels_last

from camox_ops import reference

SOURCE = emulator.CSRC / "box" / "box_cuda.cu"
# (B, C, H, W): a warp's 32 pixels and one more, more rows and lines than a block has threads for.
SHAPES = [(1, 2, 1, 1), (1, 1, 1, 9), (1, 1, 9, 1), (2, 3, 9, 34), (1, 2, 70, 33), (1, 1, 3, 300), (1, 37, 5, 6)]
# Below, at and beyond a warp, and windows that reach past the image.
WINDOWS = [(1, 1), (3, 3), (31, 5), (1, 33), (5, 65), (99, 1001)]
KINDS = ("MEAN", "COUNTED", "COUNTED_ADJOINT", "STRUCTURE_WEIGHT")


def run(x, kind, window, flush="end", arch=900, define="", **how):
    """y, in x's memory format."""
    structs, constants = emulator.header("common/types.h", "box/box.h")
    last = is_channels_last(x)
    p = structs["camox_box_params"]()
    p.dtype, p.kind, p.channels_last = constants[DTYPE_CODES[x.dtype]], constants[f"CAMOX_BOX_{kind}"], last
    p.batch, p.channels, p.height, p.width = x.shape
    p.window_height, p.window_width = window
    p.gain = 5
    with emulator.guarded(flush) as memory:
        p.x = _view(structs, memory.copy(x, "x"))
        y = _dense(memory, x, last, x.shape[1], "y")
        p.y = _view(structs, y)
        sums = memory.empty_strided(y.shape, y.stride(), torch.float32, "row_sums")
        p.row_sums = sums.data_ptr()
        running = y if x.dtype == torch.float32 else memory.empty_strided(y.shape, y.stride(), torch.float32, "running")
        p.running_sums = running.data_ptr()
        layout = "channels_last" if last else "contiguous" if x.is_contiguous() else "strided"
        dtype = str(x.dtype).removeprefix("torch.")
        function = emulator.load(SOURCE, arch, define).camox_box_cuda
        emulator.call(function, ctypes.byref(p), None, dtype=dtype, layout=layout, direction=kind.lower(), **how)
        return y.clone()


def plain(x, kind, window):
    if kind == "COUNTED_ADJOINT":
        return reference.box_mean_backward(x, window, False)
    if kind == "STRUCTURE_WEIGHT":
        return reference.structure_weight(x, window)
    return reference.box_mean(x, window, kind == "MEAN")


def every_kernel(arch) -> None:
    """Runs each kernel at its smallest: every dtype and layout."""
    for dtype in emulator.DTYPES.values():
        for x in (torch.ones(1, 1, 3, 4), torch.ones(1, 3, 3, 2).to(memory_format=torch.channels_last)):
            run(x.to(dtype), "MEAN", (3, 3), arch=arch)
