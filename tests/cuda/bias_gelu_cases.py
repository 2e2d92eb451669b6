"""bias_gelu in the emulator: calls the launchers of csrc/bias_gelu/bias_gelu_cuda.cu on guarded tensors."""

from __future__ import annotations

import ctypes

import emulator
import torch
from helpers import random_image

SOURCE = emulator.CSRC / "bias_gelu" / "bias_gelu_cuda.cu"
# (rows, columns): whole accesses and none, more rows than a band, more columns than a block of the reduction.
SHAPES = [(1, 1), (5, 7), (70, 16), (33, 40), (9, 96), (3, 520)]


def run(x, bias, grad, seed, p, flush="end", **how):
    """(y, grad_x, grad_bias) of contiguous tensors."""
    structs, constants = emulator.header("common/types.h", "bias_gelu/bias_gelu.h")
    params = structs["camox_bias_gelu_params"]()
    params.dtype = {torch.float32: constants["CAMOX_F32"], torch.bfloat16: constants["CAMOX_BF16"]}.get(
        x.dtype, constants["CAMOX_F16"]
    )
    rows, columns = params.rows, params.columns = x.shape
    params.p = p
    with emulator.guarded(flush) as memory:

        def new(name, *shape, dtype=torch.float32):
            return memory.empty_strided(shape, torch.empty(shape, device="meta").stride(), dtype, name)

        buffers = {name: memory.copy(t, name) for name, t in (("x", x), ("bias", bias), ("grad", grad))}
        buffers |= {name: new(name, rows, columns, dtype=x.dtype) for name in ("y", "grad_x")}
        buffers |= {"partial": new("partial", rows, columns), "grad_bias": new("grad_bias", columns, dtype=bias.dtype)}
        if seed is not None:
            buffers["seed"] = memory.copy(seed.reshape(1), "seed")
        for name, tensor in buffers.items():
            setattr(params, name, tensor.data_ptr())
        params.bias_length, params.bias_stride, params.half_bias = columns, 1, bias.dtype in emulator.HALVES
        _call("camox_bias_gelu_cuda", params, x, "forward", **how)
        _call("camox_bias_gelu_backward_cuda", params, x, "backward", **how)
        return [buffers[name].clone() for name in ("y", "grad_x", "grad_bias")]


def _call(name, params, x, direction, arch=900, define="", **how):
    function = getattr(emulator.load(SOURCE, arch, define), name)
    dtype = str(x.dtype).removeprefix("torch.")
    emulator.call(function, ctypes.byref(params), None, dtype=dtype, layout="contiguous", direction=direction, **how)


def every_kernel(arch) -> None:
    """Runs each kernel at its smallest: every dtype and access width."""
    for dtype in emulator.DTYPES.values():
        for columns in (8, 7):
            x = torch.ones(2, columns).to(dtype)
            run(x, torch.ones(columns), x, torch.tensor(1), 0.5, arch=arch)


def with_barriers(**how):
    """Blocks of fewer columns than a row has, and partial rows for more than one warp of the kernel that adds them."""
    for rows, columns, cap in ((90, 640, 1), (300, 40, 4)):  # as many partial rows as blocks run at once
        x, grad = (random_image((1, 1, rows, columns), seed=k)[0, 0] for k in (0, 1))
        yield run(
            x,
            random_image((1, 1, 1, columns), seed=2).flatten(),
            grad,
            torch.tensor(5),
            0.3,
            **{**how, "grid_cap": cap},
        )
