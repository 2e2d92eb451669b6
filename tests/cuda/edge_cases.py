"""edge_maps in the rig: calls the launchers of csrc/edge/edge_cuda.cu on guarded tensors."""

from __future__ import annotations

import ctypes

import rig
import torch

SOURCE = rig.CSRC / "edge" / "edge_cuda.cu"
BORDERS = ("zeros", "replicate", "reflect")
LAYOUTS = ("contiguous", "channels_last", "strided", "expanded")
# Below, at and above a 16-byte and a 4-byte access, a warp of the backward (30 vectors), a strip of rows, and in
# channels_last a block's columns and channel vectors.
SHAPES = [
    (1, 2, 1, 1),
    (1, 1, 1, 9),
    (1, 1, 9, 1),
    (2, 2, 2, 2),
    (1, 3, 4, 15),
    (1, 3, 4, 16),
    (1, 3, 3, 17),
    (2, 3, 9, 34),
    (1, 16, 5, 24),
    (2, 24, 3, 130),
    (1, 272, 2, 5),
]


def reachable(shape, border) -> bool:
    return not (border == "reflect" and 1 in shape[2:])


def _params(x, channels_last, eps, border):
    structs, constants = rig.header(rig.CSRC / "common/types.h", rig.CSRC / "edge/edge.h")
    p = structs["camox_edge_params"]()
    p.dtype = {torch.float32: constants["CAMOX_F32"], torch.bfloat16: constants["CAMOX_BF16"]}.get(
        x.dtype, constants["CAMOX_F16"]
    )
    p.border = constants[f"CAMOX_BORDER_{border.upper()}"]
    p.channels_last, p.eps = channels_last, eps
    p.batch, p.channels, p.height, p.width = x.shape
    p.x = _view(structs, x)
    return p, structs


def _view(structs, tensor):
    view = structs["camox_view4"](data=tensor.data_ptr())
    view.stride[:] = tensor.stride()
    return view


def _dense(memory, x, channels_last, channels=None, name="out"):
    b, c, h, w = x.shape
    c = channels or c
    strides = (c * h * w, 1, w * c, c) if channels_last else (c * h * w, h * w, w, 1)
    return memory.empty_strided((b, c, h, w), strides, x.dtype, name)


def is_channels_last(x) -> bool:
    return x.stride(1) == 1 and x.shape[1] > 1 and not x.is_contiguous()


def forward(x, eps=1e-8, border="zeros", stacked=False, flush="end", **how):
    """(sobel, laplacian, gradient), or the stacked tensor, written by the kernels."""
    last = is_channels_last(x)
    with rig.guarded(flush) as memory:
        guarded_x = memory.copy(x, "x")
        p, structs = _params(guarded_x, last, eps, border)
        if stacked:
            outs = [_dense(memory, x, last, 4 * x.shape[1], "stacked")]
            maps = outs[0].chunk(4, dim=1)
        else:
            outs = maps = [_dense(memory, x, last, None, name) for name in ("sobel", "laplacian", "gradient")]
        for i, out in enumerate(maps):
            p.maps[i] = _view(structs, out)
        _call("camox_edge_cuda", p, x, last, "forward", **how)
        return outs[0].clone() if stacked else [out.clone() for out in outs]


def backward(x, grads, eps=1e-8, border="zeros", flush="end", **how):
    """grad_x of the gradients of sobel, laplacian, gradient and x, None where there is none."""
    last = is_channels_last(x)
    with rig.guarded(flush) as memory:
        guarded_x = memory.copy(x, "x")
        p, structs = _params(guarded_x, last, eps, border)
        for i, grad in enumerate(grads):
            if grad is not None:
                p.maps[i] = _view(structs, memory.copy(grad, f"grad {i}"))
        out = _dense(memory, x, last, None, "grad_x")
        p.grad_x = _view(structs, out)
        _call("camox_edge_backward_cuda", p, x, last, "backward", **how)
        return out.clone()


def _call(name, p, x, last, direction, arch=900, source=SOURCE, define="", **how):
    layout = "channels_last" if last else "contiguous" if x.is_contiguous() else "strided"
    dtype = str(x.dtype).removeprefix("torch.")
    function = getattr(rig.load(source, arch, define), name)
    rig.call(function, ctypes.byref(p), None, dtype=dtype, layout=layout, direction=direction, **how)


def every_kernel(arch) -> None:
    """Runs each kernel at its smallest: every dtype, access width, layout and direction."""
    for dtype in rig.DTYPES.values():
        for inner in (3, 2, 16):
            last = torch.ones(1, inner, 3, 2).to(memory_format=torch.channels_last)
            for x in (torch.ones(1, 1, 3, inner).to(dtype), last.to(dtype)):
                forward(x, arch=arch)
                backward(x, [x] * 4, arch=arch)
