"""moe_route, moe_dispatch, moe_combine and moe_aux_loss in the emulator: launchers of csrc/moe/moe_cuda.cu."""

from __future__ import annotations

import ctypes
import itertools

import emulator
import torch
from helpers import random_image

from camox_ops import reference

SOURCE = emulator.CSRC / "moe" / "moe_cuda.cu"
SCORES = {
    "topk_softmax": "TOPK_SOFTMAX",
    "softmax_topk": "SOFTMAX_TOPK",
    "softmax_topk_renorm": "TOPK_SOFTMAX",
    "sigmoid_topk": "SIGMOID_TOPK",
}
# rows, E, K: 1, 8 and 32 lanes a row with 8 logits each, 32 lanes with 32; within one block of 128 rows and beyond it;
# more choices than lanes.
ROUTES = [
    (1, 1, 1),
    (5, 7, 3),
    (40, 64, 8),
    (9, 65, 4),
    (3, 300, 5),
    (128, 3, 3),
    (131, 9, 2),
    (300, 5, 1),
    (130, 8, 8),
    (6, 40, 20),
    (3, 72, 40),
    (2, 304, 35),
]
# Elements of a row: accesses of 16, 4 and 2 bytes; a warp and a block a row; a chunk and several of them.
ROWS = [(8,), (6,), (5,), (3, 4, 5), (512,), (520,), (513,), (4, 33, 31), (8, 1025)]


def _structs():
    return emulator.header("common/types.h", "moe/moe.h")


def _dtype(constants, x):
    return {torch.float32: constants["CAMOX_F32"], torch.bfloat16: constants["CAMOX_BF16"]}.get(
        x.dtype, constants["CAMOX_F16"]
    )


def _empty(memory, size, dtype, name):
    return memory.empty_strided(size, torch.empty(size).stride(), dtype, name)


def _error_word(memory):
    word = memory.empty_strided((1,), (1,), torch.int32, "error_word")
    word.zero_()
    return word


def _blocks(rows):
    """camox_moe_cuda_blocks of csrc/moe/moe_plan.h."""
    block_rows = max(128, -(-rows // 264))
    return max(1, -(-rows // block_rows))


def _route_params(memory, logits, top_k, valid=None):
    structs, constants = _structs()
    p = structs["camox_moe_route_params"]()
    p.dtype, p.capacity, p.top_k = _dtype(constants, logits), -1, top_k
    p.rows, p.num_experts = logits.shape
    guarded = memory.copy(logits, "logits")
    p.logits = guarded.data_ptr()
    p.logits_stride[:] = guarded.stride()
    if valid is not None:
        mask = memory.copy(valid, "valid")
        p.valid, p.valid_stride = mask.data_ptr(), mask.stride(0)
    return p, constants


def route(logits, top_k, *, score="topk_softmax", capacity=None, valid=None, flush="end", with_errors=False, **how):
    """(weights, experts, counts, offsets, order, position), with_errors: and the device's error bits."""
    with emulator.guarded(flush) as memory:
        p, constants = _route_params(memory, logits, top_k, valid)
        p.score = constants[f"CAMOX_MOE_{SCORES[score]}"]
        p.capacity = -1 if capacity is None else capacity
        rows, experts = logits.shape
        outputs = [_empty(memory, (rows, top_k), torch.float32, "weights")]
        for name, size in (
            ("experts", (rows, top_k)),
            ("counts", (experts,)),
            ("offsets", (experts + 1,)),
            ("order", (rows * top_k,)),
            ("position", (rows * top_k,)),
        ):
            outputs.append(_empty(memory, size, torch.int64, name))
            setattr(p, name, outputs[-1].data_ptr())
        p.weights = outputs[0].data_ptr()
        p.block_totals = _empty(memory, (_blocks(rows), experts), torch.int32, "block_totals").data_ptr()
        word = _error_word(memory)
        p.error_word = word.data_ptr()
        _call("camox_moe_route_cuda", p, logits, "route", **how)
        outputs = [output.clone() for output in outputs]
        return (outputs, word.item()) if with_errors else outputs


def place(experts, num_experts, *, capacity=None, valid=None, flush="end", with_errors=False, **how):
    """(counts, offsets, order, position), with_errors: and the device's error bits."""
    with emulator.guarded(flush) as memory:
        rows, top_k = experts.shape
        p, _ = _route_params(memory, torch.empty(rows, num_experts), top_k, valid)
        p.capacity = -1 if capacity is None else capacity
        p.logits, p.experts = None, memory.copy(experts.contiguous(), "experts").data_ptr()
        outputs = []
        for name, size in (
            ("counts", num_experts),
            ("offsets", num_experts + 1),
            ("order", rows * top_k),
            ("position", rows * top_k),
        ):
            outputs.append(_empty(memory, (size,), torch.int64, name))
            setattr(p, name, outputs[-1].data_ptr())
        p.block_totals = _empty(memory, (_blocks(rows), num_experts), torch.int32, "block_totals").data_ptr()
        word = _error_word(memory)
        p.error_word = word.data_ptr()
        _call("camox_moe_place_cuda", p, torch.empty(0), "place", **how)
        outputs = [output.clone() for output in outputs]
        return (outputs, word.item()) if with_errors else outputs


def route_backward(grad, logits, experts, position, *, score="topk_softmax", flush="end", with_errors=False, **how):
    with emulator.guarded(flush) as memory:
        p, constants = _route_params(memory, logits, experts.shape[1])
        p.score = constants[f"CAMOX_MOE_{SCORES[score]}"]
        p.experts, p.position = (
            memory.copy(experts.contiguous(), "experts").data_ptr(),
            memory.copy(position, "position").data_ptr(),
        )
        p.grad = memory.copy(grad, "grad").data_ptr()
        grad_logits = _empty(memory, logits.shape, logits.dtype, "grad_logits")
        word = _error_word(memory)
        p.grad_logits, p.error_word = grad_logits.data_ptr(), word.data_ptr()
        _call("camox_moe_route_backward_cuda", p, logits, "route_backward", **how)
        return (grad_logits.clone(), word.item()) if with_errors else grad_logits.clone()


def aux_loss(logits, counts, top_k, *, kind="switch", valid=None, flush="end", **how):
    """(loss, slope)"""
    with emulator.guarded(flush) as memory:
        p, constants = _route_params(memory, logits, top_k, valid)
        rows, experts = logits.shape
        p.aux = constants[f"CAMOX_MOE_{kind.upper()}"]
        p.counts = memory.copy(counts, "counts").data_ptr()
        p.partial = _empty(memory, (_blocks(rows), experts + 2), torch.float32, "partial").data_ptr()
        loss, slope = (_empty(memory, size, torch.float32, "loss, slope") for size in ((1,), (experts,)))
        p.loss, p.slope = loss.data_ptr(), slope.data_ptr()
        _call("camox_moe_aux_cuda", p, logits, "aux_loss", **how)
        return loss[0].clone(), slope.clone()


def aux_loss_backward(grad, logits, slope, *, kind="switch", valid=None, flush="end", **how):
    with emulator.guarded(flush) as memory:
        p, constants = _route_params(memory, logits, 1, valid)
        p.aux = constants[f"CAMOX_MOE_{kind.upper()}"]
        p.grad, p.slope = memory.copy(grad.reshape(1), "grad").data_ptr(), memory.copy(slope, "slope").data_ptr()
        grad_logits = _empty(memory, logits.shape, logits.dtype, "grad_logits")
        p.grad_logits = grad_logits.data_ptr()
        _call("camox_moe_aux_backward_cuda", p, logits, "aux_loss_backward", **how)
        return grad_logits.clone()


def _rows_params(memory, x, row_size, experts, offsets, position, capacity):
    structs, constants = _structs()
    p = structs["camox_moe_rows_params"]()
    p.dtype, p.row_size = _dtype(constants, x), row_size
    p.rows, p.top_k = experts.shape
    p.num_experts, p.capacity = offsets.shape[0] - 1, -1 if capacity is None else capacity
    for name, value in (("experts", experts), ("offsets", offsets), ("position", position)):
        setattr(p, name, memory.copy(value.contiguous(), name).data_ptr())
    word = _error_word(memory)
    p.error_word = word.data_ptr()
    return p, word


def _outer(experts, offsets, capacity):
    return (experts.numel(),) if capacity is None else (offsets.shape[0] - 1, capacity)


def dispatch(x, experts, offsets, position, *, capacity=None, flush="end", with_errors=False, **how):
    """x (rows, ...) with dense rows, any distance apart."""
    with emulator.guarded(flush) as memory:
        row_size = torch.Size(x.shape[1:]).numel()
        p, word = _rows_params(memory, x, row_size, experts, offsets, position, capacity)
        y = _empty(memory, (*_outer(experts, offsets, capacity), *x.shape[1:]), x.dtype, "y")
        p.row, p.row_stride = memory.copy(x, "x").data_ptr(), x.stride(0)
        p.place, p.place_stride = y.data_ptr(), row_size
        _call("camox_moe_dispatch_cuda", p, x, "dispatch", **how)
        return (y.clone(), word.item()) if with_errors else y.clone()


def combine(y, weights, experts, offsets, position, *, capacity=None, flush="end", with_errors=False, **how):
    """weights None: the backward of dispatch."""
    with emulator.guarded(flush) as memory:
        inner = y.shape[1 if capacity is None else 2 :]
        row_size = torch.Size(inner).numel()
        p, word = _rows_params(memory, y, row_size, experts, offsets, position, capacity)
        x = _empty(memory, (experts.shape[0], *inner), y.dtype, "x")
        p.row, p.row_stride = x.data_ptr(), row_size
        p.place, p.place_stride = memory.copy(y, "y").data_ptr(), y.stride(0 if capacity is None else 1)
        if weights is not None:
            p.weights = memory.copy(weights, "weights").data_ptr()
        _call("camox_moe_combine_cuda", p, y, "combine", **how)
        return (x.clone(), word.item()) if with_errors else x.clone()


def combine_backward(
    grad, y, weights, experts, offsets, position, *, capacity=None, flush="end", with_errors=False, **how
):
    """(grad_y, grad_weights)"""
    with emulator.guarded(flush) as memory:
        row_size = torch.Size(grad.shape[1:]).numel()
        p, word = _rows_params(memory, y, row_size, experts, offsets, position, capacity)
        grad_y = _empty(memory, y.shape, y.dtype, "grad_y")
        grad_weights = _empty(memory, experts.shape, torch.float32, "grad_weights")
        chunks = -(-row_size // 4096)
        partial = _empty(memory, (p.rows if chunks > 1 else 0, chunks, p.top_k), torch.float32, "partial")
        p.row, p.row_stride = memory.copy(grad, "grad").data_ptr(), grad.stride(0)
        p.place, p.place_stride = memory.copy(y, "y").data_ptr(), y.stride(0 if capacity is None else 1)
        p.weights, p.partial = memory.copy(weights, "weights").data_ptr(), partial.data_ptr()
        p.grad_place, p.grad_weights = grad_y.data_ptr(), grad_weights.data_ptr()
        _call("camox_moe_combine_backward_cuda", p, y, "combine_backward", **how)
        found = grad_y.clone(), grad_weights.clone()
        return (*found, word.item()) if with_errors else found


def _call(name, p, x, direction, arch=900, define="", **how):
    function = getattr(emulator.load(SOURCE, arch, define), name)
    layout = "contiguous" if x.is_contiguous() else "strided"
    dtype = str(x.dtype).removeprefix("torch.")
    emulator.call(function, ctypes.byref(p), None, dtype=dtype, layout=layout, direction=direction, **how)


def every_kernel(arch) -> None:
    """Runs each kernel at its smallest: every dtype, number of lanes, access width and direction."""
    how = {"arch": arch}
    for dtype in emulator.DTYPES.values():
        for rows, num_experts in itertools.product((2, 129), (3, 9, 65, 257)):
            logits = torch.zeros(rows, num_experts, dtype=dtype)
            weights, experts, counts, _, _, position = route(logits, 1, **how)
            place(experts, num_experts, **how)
            route_backward(weights, logits, experts, position, **how)
        _, slope = aux_loss(logits, counts, 1, **how)
        aux_loss_backward(torch.ones(()), logits, slope, **how)
        routed = (torch.zeros(1, 1, dtype=torch.int64), torch.tensor([0, 1]), torch.zeros(1, dtype=torch.int64))
        for row_size in (8, 2, 1, 520, 514, 513, 4098):
            x = torch.ones(1, row_size, dtype=dtype)
            dispatch(x, *routed, **how)
            combine(x, None, *routed, **how)
            combine_backward(x, x, torch.ones(1, 1), *routed, **how)


def moe_logits(rows, num_experts, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(rows, num_experts, generator=generator, dtype=torch.float64)).to(dtype)
    return logits.round() / 2 if seed % 2 else logits  # ties


def with_barriers(**how):
    for rows, num_experts in ((300, 5), (40, 70)):
        logits = moe_logits(rows, num_experts)
        routed = route(logits, 2, capacity=90, **how)
        weights, experts, counts, _, _, position = routed
        loss, slope = aux_loss(logits, counts, 2, **how)
        placed = place(experts, num_experts, capacity=90, **how)
        yield [*routed, *placed, loss, slope, route_backward(weights, logits, experts, position, **how)]
    x, y = random_image((1, 1, 5, 4098), seed=1)[0, 0], random_image((1, 1, 10, 4098), seed=2)[0, 0]
    weights, experts, _, offsets, _, position = reference.moe_route(moe_logits(5, 4), 2)
    yield combine_backward(x, y, weights, experts, offsets, position, **how)
