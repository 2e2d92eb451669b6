"""linear_cross_entropy in the emulator: launchers of csrc/linear_cross_entropy/linear_cross_entropy_cuda.cu."""

from __future__ import annotations

import ctypes

import emulator
import torch
from helpers import random_image
from images import DTYPE_CODES

from camox_ops import reference

SOURCE = emulator.CSRC / "linear_cross_entropy" / "linear_cross_entropy_cuda.cu"
# (rows, D, classes): less than a tile of 64, whole accesses and none, several tiles of all, more than a span of 512.
SHAPES = [(1, 1, 1), (5, 7, 9), (64, 64, 64), (70, 40, 130), (9, 72, 600)]
OPTIONS = [
    {"label_smoothing": smoothing, "reduction": reduction, "biased": biased}
    for reduction, smoothing, biased in (("mean", 0.0, False), ("sum", 0.25, True), ("none", 0.1, True))
]


def inputs_of(shape, dtype):
    """x, weight, target of which every third row is ignored, bias, and the gradient of each row's loss."""
    rows, depth, classes = shape
    x, weight = (
        random_image((1, 1, n, depth), torch.float32, seed=i).view(n, depth).to(dtype)
        for i, n in enumerate((rows, classes))
    )
    target = torch.arange(rows) * 7 % max(classes, 1)
    target[2::3] = -100
    bias, grad = (random_image((1, 1, 1, n), seed=i + 2).view(n) for i, n in enumerate((classes, rows)))
    return x, weight, target, bias, grad


def run(x, weight, target, bias, grad, label_smoothing, reduction, biased, flush="end", with_errors=False, **how):
    """(loss, top, log, grad_x, grad_weight, grad_bias), with_errors: and the device's error bits."""
    structs, constants = emulator.header("common/types.h", "linear_cross_entropy/linear_cross_entropy.h")
    p = structs["camox_linear_cross_entropy_params"]()
    p.dtype, p.reduction = constants[DTYPE_CODES[x.dtype]], constants[f"CAMOX_LOSS_{reduction.upper()}"]
    (p.rows, p.depth), p.classes = x.shape, weight.shape[0]
    p.ignore_index, p.smoothing = -100, label_smoothing
    with emulator.guarded(flush) as memory:

        def new(name, *shape, dtype=torch.float32):
            return memory.empty_strided(shape, torch.empty(shape, device="meta").stride(), dtype, name)

        given = {"x": x, "weight": weight, "target": target, "grad": grad if reduction == "none" else grad[0]}
        held = {name: memory.copy(tensor, name) for name, tensor in given.items()}
        if biased:
            held["bias"] = memory.copy(bias, "bias")
        p.x_stride[:], p.weight_stride[:] = held["x"].stride(), held["weight"].stride()
        held |= {
            "top": new("top", p.rows),
            "log": new("log", p.rows),
            "loss": new("loss", *([p.rows] if reduction == "none" else [])),
        }
        word = memory.empty_strided((1,), (1,), torch.int32, "error_word")
        held["error_word"] = word.zero_()
        for name, tensor in held.items():
            setattr(p, name, tensor.data_ptr())
        _call("camox_linear_cross_entropy_cuda", memory, p, x, "forward", **how)
        p.backward = 1
        gradients = {
            "grad_x": new("grad_x", *x.shape, dtype=x.dtype),
            "grad_weight": new("grad_weight", *weight.shape, dtype=x.dtype),
            "grad_bias": new("grad_bias", p.classes),
        }
        for name, tensor in gradients.items():
            setattr(p, name, tensor.data_ptr())
        _call("camox_linear_cross_entropy_backward_cuda", memory, p, x, "backward", **how)
        outputs = [tensor.clone() for tensor in (held["loss"], held["top"], held["log"], *gradients.values())]
        return (outputs, word.item()) if with_errors else outputs


def _call(name, memory, p, x, direction, arch=900, define="", **how):
    library = emulator.load(SOURCE, arch, define)
    size = library.camox_linear_cross_entropy_cuda_shared
    size.restype = ctypes.c_int64
    floats = max(size(ctypes.byref(p)) // 4, 1)
    p.shared = memory.empty_strided((floats,), (1,), torch.float32, f"shared {direction}").data_ptr()
    dtype = str(x.dtype).removeprefix("torch.")
    function = getattr(library, name)
    emulator.call(function, ctypes.byref(p), None, dtype=dtype, layout="contiguous", direction=direction, **how)


def plain(x, weight, target, bias, grad, label_smoothing, reduction, biased):
    """The same from camox_ops.reference; a bias that is not there is one of zeros."""
    bias = bias if biased else torch.zeros_like(bias)
    x, weight, bias = (tensor.detach().requires_grad_() for tensor in (x, weight, bias))
    loss = reference.linear_cross_entropy(x, weight, target, bias, label_smoothing=label_smoothing, reduction=reduction)
    logits = x.to(loss.dtype) @ weight.to(loss.dtype).T + bias.to(loss.dtype)
    top = logits.amax(1) if logits.numel() else logits.new_zeros(len(logits))
    log = logits.logsumexp(1) - top
    upstream = (grad if reduction == "none" else grad[0]).to(loss.dtype)
    return [loss.detach(), top.detach(), log.detach(), *torch.autograd.grad(loss, (x, weight, bias), upstream)]


def every_kernel(arch) -> None:
    """Runs each kernel at its smallest: every dtype and access width."""
    for dtype in emulator.DTYPES.values():
        for depth in (8, 7):
            run(*inputs_of((3, depth, 5), dtype), **OPTIONS[1], arch=arch)


def with_barriers(**how):
    """Four blocks of classes, and more rows than a warp, whose gradients differ; of a mean, whose rows are counted."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        yield run(*inputs_of((70, 72, 600), dtype), **OPTIONS[2], **how)
    yield run(*inputs_of((70, 8, 9), torch.float16), **OPTIONS[0], **how)
