"""short_attention in the emulator: calls the launchers of short_attention_cuda.cu on guarded tensors."""

from __future__ import annotations

import ctypes
import math

import emulator
import torch
from helpers import random_image

SOURCE = emulator.CSRC / "short_attention" / "short_attention_cuda.cu"
MEMORY = ("contiguous", "packed", "strided", "expanded")
# (S, T, H, D): EmberFormer's; one of everything; whole accesses and none; more tokens than a block's threads have; more
# columns than a chunk; more shared memory than 48 KB; too much for shared memory.
SHAPES = [(5, 6, 8, 12), (1, 1, 1, 1), (3, 3, 2, 4), (2, 2, 3, 7), (1, 17, 2, 20), (1, 40, 1, 36), (1, 64, 1, 70)]
SHAPES += [(1, 9, 1, 2200)]
# Of tensor cores: two warps and four, the last one's tokens in part and all; rows of some pieces and of all.
MMA_SHAPES = [(2, 21, 2, 24), (1, 64, 2, 32), (1, 33, 2, 40), (1, 48, 1, 64)]


def _view(structs, tensor):
    view = structs["camox_view4"](data=tensor.data_ptr())
    view.stride[:] = tensor.stride()
    return view


def _params(memory, tensors, padding, seed, causal, scale, p):
    """Everything that is read, in guarded memory, and the struct types."""
    structs, constants = emulator.header("common/types.h", "short_attention/short_attention.h")
    params = structs["camox_short_attention_params"]()
    x = tensors["q"]
    params.dtype = {torch.float32: constants["CAMOX_F32"], torch.bfloat16: constants["CAMOX_BF16"]}.get(
        x.dtype, constants["CAMOX_F16"]
    )
    params.sequences, params.length, params.heads, params.dim = x.shape
    params.causal, params.scale, params.p = causal, scale, p
    for name, tensor in tensors.items():
        setattr(params, name, _view(structs, memory.copy(tensor, name)))
    if padding is not None:
        params.padding = memory.copy(padding.to(torch.uint8), "padding").data_ptr()
        params.padding_stride[:] = padding.stride()
    if seed is not None:
        params.seed = memory.copy(seed.reshape(1), "seed").data_ptr()
    return params, structs


def _outputs(memory, params, structs, x, names):
    dense = torch.empty(x.shape).stride()
    outputs = {name: memory.empty_strided(x.shape, dense, x.dtype, name) for name in names}
    for name, tensor in outputs.items():
        setattr(params, name, _view(structs, tensor))
    return outputs.values()


def forward(q, k, v, *options, flush="end", **how):
    """options: padding, seed, causal, scale, p -> out."""
    with emulator.guarded(flush) as memory:
        params, structs = _params(memory, {"q": q, "k": k, "v": v}, *options)
        (out,) = _outputs(memory, params, structs, q, ("out",))
        _call("camox_short_attention_cuda", params, q, "forward", **how)
        return out.clone()


def backward(grad, q, k, v, *options, flush="end", **how):
    """The gradients of q, k and v."""
    with emulator.guarded(flush) as memory:
        params, structs = _params(memory, {"q": q, "k": k, "v": v, "grad": grad}, *options)
        grads = _outputs(memory, params, structs, q, ("grad_q", "grad_k", "grad_v"))
        _call("camox_short_attention_backward_cuda", params, q, "backward", **how)
        return [tensor.clone() for tensor in grads]


def _call(name, params, x, direction, arch=900, define="", **how):
    function = getattr(emulator.load(SOURCE, arch, define), name)
    layout = "contiguous" if x.is_contiguous() else "strided"
    dtype = str(x.dtype).removeprefix("torch.")
    emulator.call(function, ctypes.byref(params), None, dtype=dtype, layout=layout, direction=direction, **how)


def every_kernel(arch) -> None:
    """Runs each kernel at its smallest: every dtype, access width and place that rows are read from."""
    for dtype in emulator.DTYPES.values():
        for shape in ((1, 2, 1, 4), (1, 2, 1, 3), (1, 2, 1, 9700), (1, 17, 1, 8), (1, 17, 1, 40)):
            x = torch.ones(shape).to(dtype)
            forward(x, x, x, None, None, False, 1.0, 0.0, arch=arch)
            backward(x, x, x, x, None, None, False, 1.0, 0.0, arch=arch)


def with_barriers(**how):
    for dtype, (s, t, h, d) in ((torch.float32, (40, 20, 6, 12)), (torch.bfloat16, (2, 33, 2, 24))):
        grad, *qkv = random_image((s, t, h, 4 * d), dtype).unflatten(3, (4, d)).unbind(3)
        padding = random_image((1, 1, s, t), seed=3)[0, 0] > 0.7
        qkv[1:] = (x.masked_fill(padding[:, :, None, None], math.nan) for x in qkv[1:])
        options = (padding, torch.tensor(7), False, 0.3, 0.2)
        yield [forward(*qkv, *options, **how)]
        yield backward(grad, *qkv, *options, **how)
