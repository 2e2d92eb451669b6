"""rope in the emulator: calls the launchers of csrc/rope/rope_cuda.cu on guarded tensors."""

from __future__ import annotations

import ctypes

import emulator
import torch
from helpers import random_image

SOURCE = emulator.CSRC / "rope" / "rope_cuda.cu"
MEMORY = ("contiguous", "swapped", "strided", "expanded")
# (B, H, T, D) and rotary_dim: one pair; accesses of 8 and of 16 bytes; more heads than a thread serves; what
# passes, also where it forces narrow accesses.
SHAPES = [
    ((1, 1, 1, 2), 2),
    ((2, 3, 3, 6), 6),
    ((2, 2, 5, 7), 6),
    ((1, 2, 3, 12), 12),
    ((1, 9, 4, 12), 8),
    ((2, 5, 3, 32), 32),
    ((1, 6, 4, 48), 16),
    ((1, 2, 3, 20), 16),
]


def _views(structs, tensor, layout, packed):
    strides = tensor.stride()
    if packed:
        strides = (0, strides[1], strides[0], strides[2])
    elif layout == "bthd":
        strides = (strides[0], strides[2], strides[1], strides[3])
    view = structs["camox_view4"](data=tensor.data_ptr())
    view.stride[:] = strides
    return view


def _params(memory, x, cos, sin, options):
    """The params of x as the forward reads it, and the struct types; everything but x and y is in guarded memory."""
    structs, constants = emulator.header("common/types.h", "rope/rope.h")
    p = structs["camox_rope_params"]()
    p.dtype = {torch.float32: constants["CAMOX_F32"], torch.bfloat16: constants["CAMOX_BF16"]}.get(
        x.dtype, constants["CAMOX_F16"]
    )
    layout, cu_seqlens = options.get("layout", "bhtd"), options.get("cu_seqlens")
    sizes = list(x.shape)
    if cu_seqlens is not None:
        sizes = [1, sizes[1], sizes[0], sizes[2]]
    elif layout == "bthd":
        sizes = [sizes[0], sizes[2], sizes[1], sizes[3]]
    p.batch, p.heads, p.length, p.dim = sizes
    p.rotary_dim = p.dim if options.get("rotary_dim") is None else options["rotary_dim"]
    p.interleaved, p.transposed = options.get("interleaved", False), options.get("transposed", False)
    p.table_length, p.table_columns = cos.shape
    p.cos, p.sin = memory.copy(cos, "cos").data_ptr(), memory.copy(sin, "sin").data_ptr()
    positions = options.get("positions")
    if positions is not None:
        p.positions = memory.copy(positions, "positions").data_ptr()
        p.position_stride[:] = (positions.stride(0) if positions.dim() == 2 else 0, positions.stride(-1))
    if cu_seqlens is not None:
        p.cu_seqlens, p.sequences = memory.copy(cu_seqlens, "cu_seqlens").data_ptr(), cu_seqlens.shape[0] - 1
    return p, structs, layout, cu_seqlens is not None


def _error_word(memory):
    word = memory.empty_strided((1,), (1,), torch.int32, "error_word")
    word.zero_()
    return word


def forward(x, cos, sin, *, inplace=False, flush="end", with_errors=False, how=None, **options):
    """y as the kernels write it; with_errors: (y, the device's error bits). how: keyword arguments of the emulator."""
    with emulator.guarded(flush) as memory:
        p, structs, layout, packed = _params(memory, x, cos, sin, options)
        guarded_x = memory.copy(x, "x")
        dense = torch.empty_like(x, memory_format=torch.contiguous_format)
        y = guarded_x if inplace else memory.empty_strided(x.shape, dense.stride(), x.dtype, "y")
        word = _error_word(memory)
        p.x, p.y = _views(structs, guarded_x, layout, packed), _views(structs, y, layout, packed)
        p.error_word = word.data_ptr()
        _call("camox_rope_cuda", p, x, "forward", **(how or {}))
        return (y.clone(), word.item()) if with_errors else y.clone()


def backward(grad, x, cos, sin, *, flush="end", how=None, **options):
    """(grad_x, grad_cos, grad_sin) of a forward with these options."""
    with emulator.guarded(flush) as memory:
        options["transposed"] = not options.get("transposed", False)
        p, structs, layout, packed = _params(memory, grad, cos, sin, options)
        grad_x = memory.empty_strided(x.shape, torch.empty(x.shape).stride(), x.dtype, "grad_x")
        grads = [memory.empty_like(cos.contiguous(), name=name) for name in ("grad_cos", "grad_sin")]
        size = (2, p.batch * p.length, p.table_columns)
        partial = memory.empty_strided(size, torch.empty(size).stride(), torch.float32, "partial")
        p.x = _views(structs, memory.copy(grad, "grad"), layout, packed)
        p.input, p.y = _views(structs, memory.copy(x, "x"), layout, packed), _views(structs, grad_x, layout, packed)
        p.grad_cos, p.grad_sin, p.partial = grads[0].data_ptr(), grads[1].data_ptr(), partial.data_ptr()
        _call("camox_rope_backward_cuda", p, x, "backward", **(how or {}))
        return grad_x.clone(), *(g.clone() for g in grads)


def _call(name, p, x, direction, arch=900, define="", **how):
    function = getattr(emulator.load(SOURCE, arch, define), name)
    layout = "contiguous" if x.is_contiguous() else "strided"
    dtype = str(x.dtype).removeprefix("torch.")
    emulator.call(function, ctypes.byref(p), None, dtype=dtype, layout=layout, direction=direction, **how)


def every_kernel(arch) -> None:
    """Runs each kernel at its smallest: every dtype, access width, pairing and direction."""
    for dtype in emulator.DTYPES.values():
        for dim in (16, 8, 4, 2):
            x = torch.ones(1, 1, 2, dim).to(dtype)
            for columns in (dim // 2, dim):
                for interleaved in (False, True):
                    table = torch.ones(2, columns)
                    forward(x, table, table, interleaved=interleaved, how={"arch": arch})
                    backward(x, x, table, table, interleaved=interleaved, how={"arch": arch})
        wide = torch.ones(1, 1, 2, 8).to(dtype)[..., ::2]
        forward(wide, torch.ones(2, 2), torch.ones(2, 2), how={"arch": arch})
        backward(wide, wide, torch.ones(2, 2), torch.ones(2, 2), how={"arch": arch})


def rope_input(shape, dtype, memory="contiguous", seed=0):
    """ "swapped": (B, T, H, D) in memory."""
    if memory == "swapped":
        return random_image((shape[0], shape[2], shape[1], shape[3]), dtype, seed=seed).transpose(1, 2)
    return random_image(shape, dtype, memory, seed=seed)


def rope_tables(length, columns):
    generator = torch.Generator().manual_seed(7)
    return torch.randn(2, length, columns, generator=generator).unbind()


def with_barriers(**how):
    grad, x = random_image((2, 1, 150, 2 * 16)).unflatten(3, (2, 16)).unbind(3)
    positions = torch.randint(9, (2, 150), generator=torch.Generator().manual_seed(0))
    yield backward(grad, x, *rope_tables(9, 8), rotary_dim=16, positions=positions, how=how)
