"""layer_norm2d in the emulator: calls the launchers of csrc/norm2d/norm2d_cuda.cu on guarded tensors."""

from __future__ import annotations

import ctypes

import emulator
import torch
from helpers import random_image
from norm2d_truth import parameters

SOURCE = emulator.CSRC / "norm2d" / "norm2d_cuda.cu"
LAYOUTS = ("contiguous", "channels_last", "strided", "expanded")
# Around accesses of 16 and 8 bytes, the rows of a thread (4, 8), a warp of vectors, along pixels and along channels,
# and the most channels that a team of lanes holds, 1024 of float32 and 1280 of halves.
SHAPES = [
    (1, 1, 1, 1),
    (3, 33, 1, 1),
    (2, 1, 3, 5),
    (1, 3, 1, 9),
    (2, 4, 4, 4),
    (1, 5, 2, 6),
    (1, 9, 8, 9),
    (2, 16, 3, 11),
    (1, 80, 6, 12),
    (1, 24, 12, 24),
    (1, 400, 1, 3),
    (1, 1100, 2, 4),
    (1, 1024, 1, 5),
    (1, 1280, 1, 3),
]
# More channels than a block holds in registers: at most 3072, see docs/norm2d.md.
MANY_CHANNELS = [(1, 3073, 1, 2), (1, 3200, 2, 4)]
# More than 256 tiles in planes (47 x 47 element by element, 92 x 92 by vectors) and in lines, the last ones by chunks.
MANY_PLANE_TILES = [(1, 3, 47, 47), (1, 3, 92, 92), (1, 257, 17, 121)]
MANY_LINE_TILES = [(1, 256, 30, 40), (1, 1025, 17, 31)]


def _view(structs, tensor):
    view = structs["camox_view4"](data=tensor.data_ptr())
    view.stride[:] = tensor.stride()
    return view


def _affine(structs, memory, value, name):
    copy = memory.copy(value, name)
    return structs["camox_norm2d_affine"](data=copy.data_ptr(), length=copy.shape[0], stride=copy.stride(0))


def is_channels_last(x) -> bool:
    return x.stride(1) == 1 and x.shape[1] > 1 and not x.is_contiguous()


def _dense(memory, x, name):
    b, c, h, w = x.shape
    strides = (c * h * w, 1, w * c, c) if is_channels_last(x) else (c * h * w, h * w, w, 1)
    return memory.empty_strided((b, c, h, w), strides, x.dtype, name)


def _params(memory, x, weight, bias, eps, activation, groups):
    structs, constants = emulator.header("common/types.h", "norm2d/norm2d.h")
    p = structs["camox_norm2d_params"]()
    p.dtype = {torch.float32: constants["CAMOX_F32"], torch.bfloat16: constants["CAMOX_BF16"]}.get(
        x.dtype, constants["CAMOX_F16"]
    )
    p.activation = constants[f"CAMOX_ACT_{activation.upper()}"]
    p.eps, p.groups = eps, groups
    p.batch, p.channels, p.height, p.width = x.shape
    p.x = _view(structs, memory.copy(x, "x"))
    p.weight = _affine(structs, memory, weight, "weight")
    p.bias = _affine(structs, memory, bias, "bias")
    p.half_weights = weight.dtype in emulator.HALVES
    return p, structs


def _row(memory, shape, name, dtype=torch.float32):
    """A contiguous tensor of NaN."""
    strides = torch.empty(shape, device="meta").stride()
    return memory.empty_strided(shape, strides, dtype, name)


def forward(x, weight, bias, eps=1e-6, activation="none", residual=None, groups=1, flush="end", save=True, **how):
    """(y, stats) written by the kernels; without `save` stats stay NaN."""
    with emulator.guarded(flush) as memory:
        p, structs = _params(memory, x, weight, bias, eps, activation, groups)
        if residual is not None:
            p.residual = _view(structs, memory.copy(residual, "residual"))
        y = _dense(memory, x, "y")
        stats = _row(memory, (2, x.shape[0], groups, *x.shape[2:]), "stats")
        p.y, p.stats = _view(structs, y), stats.data_ptr() if save else None
        _call("camox_norm2d_cuda", p, x, "forward", **how)
        return y.clone(), stats.clone()


def backward(grad, x, weight, bias, stats, eps=1e-6, activation="none", groups=1, flush="end", **how):
    """[grad_x, grad_weight, grad_bias] written by the kernels."""
    with emulator.guarded(flush) as memory:
        p, structs = _params(memory, x, weight, bias, eps, activation, groups)
        p.grad = _view(structs, memory.copy(grad, "grad"))
        p.stats = memory.copy(stats, "stats").data_ptr()
        outs = [
            _dense(memory, x, "grad_x"),
            *(_row(memory, (x.shape[1],), f"grad_{name}", weight.dtype) for name in ("weight", "bias")),
        ]
        p.grad_x = _view(structs, outs[0])
        p.grad_weight, p.grad_bias = (out.data_ptr() for out in outs[1:])
        p.partial = _row(memory, (_units(p, **how), 2, x.shape[1]), "partial").data_ptr()
        _call("camox_norm2d_backward_cuda", p, x, "backward", **how)
        return [out.clone() for out in outs]


def forward_and_gradients(x, weight, bias, grad, eps=1e-6, residual=None, **how):
    """[y, grad_x, grad_weight, grad_bias]"""
    y, stats = forward(x, weight, bias, eps, residual=residual, **how)
    return [y, *backward(grad, x, weight, bias, stats, eps, **how)]


def _units(p, arch=900, define="", **_):
    function = emulator.load(SOURCE, arch, define).camox_norm2d_cuda_items
    function.restype = ctypes.c_int64
    return function(ctypes.byref(p))


def _call(name, p, x, direction, arch=900, define="", **how):
    layout = "channels_last" if is_channels_last(x) else "contiguous" if x.is_contiguous() else "strided"
    dtype = str(x.dtype).removeprefix("torch.")
    function = getattr(emulator.load(SOURCE, arch, define), name)
    emulator.call(function, ctypes.byref(p), None, dtype=dtype, layout=layout, direction=direction, **how)


def every_kernel(arch) -> None:
    """Runs each kernel at its smallest: every dtype, access width, layout and direction, and more channels than a block
    holds with the widest accesses."""
    for dtype in emulator.DTYPES.values():
        for inner, channels in ((3, 3), (4, 3), (8, 3), (8, 2056)):
            planes, lines = torch.ones(1, channels, 1, inner), torch.ones(1, inner if channels == 3 else channels, 3, 1)
            for x in (planes.to(dtype), lines.to(dtype).to(memory_format=torch.channels_last)):
                weight = torch.ones(x.shape[1])
                forward_and_gradients(x, weight, weight, x, arch=arch)


def norm2d_inputs(shape, dtype=torch.float32, layout="contiguous", kind="normal"):
    """x, weight, bias and an incoming gradient."""
    return random_image(shape, dtype, layout, kind), *parameters(shape[1]), random_image(shape, dtype, layout, seed=1)


def with_barriers(**how):
    for layout in ("contiguous", "channels_last"):
        yield forward_and_gradients(*norm2d_inputs((1, 256, 30, 40), layout=layout), **how)
    # more blocks at once: several warps add up their shares of grad_weight and grad_bias
    yield forward_and_gradients(*norm2d_inputs((1, 64, 16, 16)), **{**how, "grid_cap": 4})
