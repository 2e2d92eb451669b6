"""box in the emulator: calls the launcher of csrc/box/box_cuda.cu on guarded tensors."""

from __future__ import annotations

import ctypes

import emulator
import torch
from helpers import random_image
from images import DTYPE_CODES, _dense, _view, is_channels_last

from camox_ops import reference

SOURCE = emulator.CSRC / "box" / "box_cuda.cu"
# (B, C, H, W): a warp's 32 pixels and one more, more rows and lines than a block has threads for.
SHAPES = [(1, 2, 1, 1), (1, 1, 1, 9), (1, 1, 9, 1), (2, 3, 9, 34), (1, 2, 70, 33), (1, 1, 3, 300), (1, 37, 5, 6)]
# Below, at and beyond a warp, and windows that reach past the image.
WINDOWS = [(1, 1), (3, 3), (31, 5), (1, 33), (5, 65), (99, 1001)]
# Around the windows that one launch serves, of 1 to 30 pixels on each side, and its paths: 3 rows; 3, 5 and 7 columns.
ONE_LAUNCH_WINDOWS = [(1, 25), (3, 3), (5, 7), (7, 5), (9, 9), (11, 19), (61, 61), (61, 63), (63, 61)]
# The same in channels_last, whose windows are of 1 to 15 pixels on each side.
CHANNELS_LAST_WINDOWS = [(1, 25), (3, 3), (5, 5), (7, 7), (9, 9), (31, 31), (31, 33), (33, 31)]
# Channels that are whole vectors and not; rows of several tiles; columns that are whole segments and not.
CHANNELS_LAST_SHAPES = [(2, 20, 40, 24), (1, 6, 13, 43), (1, 9, 6, 700), (3, 4, 33, 88)]
# Planes beside each other, with a vector's columns and not; rows of several tiles in float32, and in halves too; what
# takes most shared memory, with halves and the largest windows.
ONE_LAUNCH_SHAPES = [(3, 3, 13, 88), (1, 2, 70, 43), (1, 1, 7, 1100), (1, 1, 5, 2200), (1, 1, 64, 248)]
KINDS = ("MEAN", "COUNTED", "COUNTED_ADJOINT", "STRUCTURE_WEIGHT")


def is_one_launch(x, window) -> bool:
    """camox_box_is_one_launch: without buffers, which the emulator would miss."""
    radius_y, radius_x = (min(length // 2, side - 1) for length, side in zip(window, x.shape[2:], strict=True))
    largest = 15 if is_channels_last(x) else 30
    return radius_y <= largest and 0 < radius_x <= largest


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
        if not is_one_launch(x, window):
            sums = memory.empty_strided(y.shape, y.stride(), torch.float32, "row_sums")
            running = (
                y if x.dtype == torch.float32 else memory.empty_strided(y.shape, y.stride(), torch.float32, "running")
            )
            p.row_sums, p.running_sums = sums.data_ptr(), running.data_ptr()
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


def with_barriers(**how):
    """Rows of several warps and steps, with neighbours' columns and with sums of segments."""
    for dtype in (torch.float32, torch.bfloat16):
        x = random_image((1, 2, 24, 300), dtype)
        last = random_image((1, 8, 24, 40), dtype, "channels_last")
        yield [run(y, "MEAN", window, **how) for y in (x, last) for window in ((5, 5), (5, 31))]


def every_kernel(arch) -> None:
    """Runs each kernel at its smallest: every dtype and layout, and of contiguous images windows of each path."""
    for dtype in emulator.DTYPES.values():
        for window in ((3, 1), (3, 3), (5, 3)):
            run(torch.ones(1, 3, 6, 2).to(dtype, memory_format=torch.channels_last), "MEAN", window, arch=arch)
        run(torch.ones(1, 1, 3, 4).to(dtype), "MEAN", (3, 1), arch=arch)
        for rows in (3, 5):
            for columns in (3, 5, 7, 17):
                run(torch.ones(1, 1, 6, 16).to(dtype), "MEAN", (rows, columns), arch=arch)
