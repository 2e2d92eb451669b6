"""dropout, sparse_gate and dropout_add_layer_norm in the emulator: launchers of csrc/dropout/dropout_cuda.cu."""

from __future__ import annotations

import ctypes

import emulator
import torch
from helpers import random_image

SOURCE = emulator.CSRC / "dropout" / "dropout_cuda.cu"
# Around an access of 4 or 8 elements, a block of 256 threads and the tail of one; any dimensions.
SHAPES = [(1,), (7,), (8,), (2 * 256 * 8 + 3,), (3, 5), (16, 24), (5, 3, 16), (2, 8, 3, 12), (2, 1, 3, 2, 5)]
# Teams of lanes, a warp a row with and without whole accesses; a block a row; a block a row without room in shared
# memory, forward and backward; the last widths of each that have room and the first that have none.
NORM_SHAPES = [(1, 1), (5, 7), (70, 8), (33, 17), (9, 96), (3, 1000), (2, 1551), (2, 4100), (1, 12304)]
NORM_SHAPES += [
    (9, 512),
    (1, 513),
    (1, 1536),
    (1, 1537),
    (7, 63),
    (3, 65),
    (3, 127),
    (3, 129),
    (67, 40),
    (65, 88),
    (17, 256),
    (9, 264),
    (5, 520),
    (3, 1024),
    (2, 1032),
]
NORM_SHAPES += [(1, 4088), (1, 4093), (1, 4094), (1, 4096), (1, 12280), (1, 12281), (1, 12288)]


def _params(name, x, seed, p):
    structs, constants = emulator.header("common/types.h", "dropout/dropout.h")
    params = structs[name]()
    params.dtype = {torch.float32: constants["CAMOX_F32"], torch.bfloat16: constants["CAMOX_BF16"]}.get(
        x.dtype, constants["CAMOX_F16"]
    )
    params.p = p
    if seed is not None:
        params.seed = seed.data_ptr()
    return params, constants


def elementwise(name, inputs, seed, p, outputs, flush="end", **how):
    """Runs dropout (x), sparse_gate (x, y) or its backward (x, y, grad) -> what the kernel writes."""
    x = inputs[0]
    with emulator.guarded(flush) as memory:
        seed = None if seed is None else memory.copy(seed.reshape(1), "seed")
        params, constants = _params("camox_dropout_params", x, seed, p)
        params.dims = x.dim()
        params.size[: x.dim()] = x.shape
        outs = [memory.empty_strided(x.shape, torch.empty_like(t).stride(), x.dtype, "out") for t in inputs[:outputs]]
        copies = [memory.copy(tensor, f"input {i}") for i, tensor in enumerate(inputs)]
        names = ("X", "Y", "GRAD")[: len(copies)] + ("OUT", "OUT_Y")[:outputs]
        for which, tensor in zip(names, (*copies, *outs), strict=True):
            view = params.view[constants[f"CAMOX_DROPOUT_{which}"]]
            view.data = tensor.data_ptr()
            view.stride[: tensor.dim()] = tensor.stride()
        _call(f"camox_{name}_cuda", params, x, name, **how)
        return [out.clone() for out in outs]


def dropout(x, seed, p, **how):
    return elementwise("dropout", (x,), seed, p, 1, **how)[0]


def sparse_gate(x, y, seed, p, **how):
    return elementwise("sparse_gate", (x, y), seed, p, 1, **how)[0]


def sparse_gate_backward(grad, x, y, seed, p, **how):
    return elementwise("sparse_gate_backward", (x, y, grad), seed, p, 2, **how)


def norm(x, residual, weight, bias, grad, seed, p, eps=1e-5, flush="end", **how):
    """(y, grad_x, grad_residual, grad_weight, grad_bias) of contiguous tensors; grad_x is None without a seed."""
    rows, width = x.shape
    with emulator.guarded(flush) as memory:
        seed = None if seed is None else memory.copy(seed.reshape(1), "seed")
        params, _ = _params("camox_dropout_norm_params", x, seed, p)
        params.eps, params.rows, params.width = eps, rows, width

        def new(name, *shape, dtype=torch.float32):
            strides = torch.empty(shape, device="meta").stride()
            return memory.empty_strided(shape, strides, dtype, name)

        inputs = {"x": x, "residual": residual, "grad": grad}
        buffers = {name: memory.copy(tensor, name) for name, tensor in inputs.items()}
        buffers |= {"stats": new("stats", 2, rows), "partial": new("partial", rows, 2, width)}
        buffers |= {name: new(name, rows, width, dtype=x.dtype) for name in ("y", "grad_x", "grad_residual")}
        buffers |= {name: new(name, width, dtype=weight.dtype) for name in ("grad_weight", "grad_bias")}
        for name, tensor in buffers.items():
            if name != "grad_x" or seed is not None:
                setattr(params, name, tensor.data_ptr())
        affine = {name: memory.copy(tensor, name) for name, tensor in (("weight", weight), ("bias", bias))}
        for name, tensor in affine.items():
            field = getattr(params, name)
            field.data, field.length, field.stride = tensor.data_ptr(), width, 1
        params.half_weights = weight.dtype in emulator.HALVES
        _call("camox_dropout_norm_cuda", params, x, "norm", **how)
        _call("camox_dropout_norm_backward_cuda", params, x, "norm backward", **how)
        names = ("y", "grad_x", "grad_residual", "grad_weight", "grad_bias")
        return [None if name == "grad_x" and seed is None else buffers[name].clone() for name in names]


def _call(name, params, x, direction, arch=900, define="", **how):
    layout = "contiguous" if x.is_contiguous() else "strided"
    dtype = str(x.dtype).removeprefix("torch.")
    function = getattr(emulator.load(SOURCE, arch, define), name)
    emulator.call(function, ctypes.byref(params), None, dtype=dtype, layout=layout, direction=direction, **how)


def every_kernel(arch) -> None:
    """Runs each kernel at its smallest: every dtype, access width and size of a row's team."""
    seed = torch.tensor(1)
    for dtype in emulator.DTYPES.values():
        for x in (torch.ones(8).to(dtype), torch.ones(2, 16).to(dtype)[:, :8], torch.ones(6).to(dtype)[::2]):
            dropout(x, seed, 0.5, arch=arch)
            sparse_gate(x, x, seed, 0.5, arch=arch)
            sparse_gate_backward(x, x, x, seed, 0.5, arch=arch)
        for width in (8, 264, 1032, 7, 129, 1544, 1543):
            x, weight = torch.ones(1, width).to(dtype), torch.ones(width)
            norm(x, x, weight, weight, x, seed, 0.5, arch=arch)


SEED = torch.tensor(0x0123456789ABCDEF)


def with_barriers(**how):
    for rows, width, cap in ((9, 1544, 1), (300, 40, 8), (11, 520, 1)):  # as many partial rows as blocks run at once
        x, residual, grad = (random_image((1, 1, rows, width), seed=i)[0, 0] for i in range(3))
        weight, bias = random_image((1, 1, 2, width), seed=4)[0, 0]
        yield norm(x, residual, weight, bias, grad, SEED, 0.3, **{**how, "grid_cap": cap})
