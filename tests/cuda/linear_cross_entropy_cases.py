"""linear_cross_entropy in the emulator: the launcher of csrc/linear_cross_entropy/linear_cross_entropy_cuda.cu in the
loop over blocks of rows that calls it on a GPU, whose products PyTorch makes on the CPU."""

from __future__ import annotations

import ctypes
from functools import partial

import emulator
import torch
from helpers import random_image
from images import DTYPE_CODES

from camox_ops import reference
from camox_ops.ops import _linear_cross_entropy_cuda as loop
from camox_ops.ops._codes import LOSS_REDUCTIONS

SOURCE = emulator.CSRC / "linear_cross_entropy" / "linear_cross_entropy_cuda.cu"
# (rows, D, classes): less than an access of 4 classes, whole accesses and none, several iterations over the classes.
# A block takes one row, so that more rows run nothing else.
# The last: three iterations of a block over a row, the third of them of single elements too.
SHAPES = [(1, 1, 1), (5, 7, 9), (10, 64, 64), (11, 40, 130), (9, 24, 9003)]
# How near gradients that are multiplied by the loss' own come to those of a backward that knows it.
NEAR = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-6},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
}
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


def run(x, weight, target, bias, grad, label_smoothing, reduction, biased, with_errors=False, **how):
    """(loss, top, log, grad_x, grad_weight, grad_bias) of the forward and then the backward; with_errors: and the
    device's error bits. A forward of one number makes the gradients as well: they must be those of the backward."""
    code, errors = LOSS_REDUCTIONS[reduction], []
    inputs, options = (x, weight, target, bias if biased else None), (-100, label_smoothing, code)
    rows_ = partial(emulated_rows, errors=errors, **how)
    loss, top, log, *_ = loop.forward(*inputs, *options, False, False, False, rows_=rows_)
    upstream = grad if reduction == "none" else grad[0]
    gradients = loop.backward(upstream, *inputs, top, log, *options, True, True, True, rows_=rows_)
    if reduction != "none":
        again, _, _, *made = loop.forward(*inputs, *options, True, True, True, rows_=rows_)
        torch.testing.assert_close(again, loss, rtol=0, atol=0, equal_nan=True)
        for mine, right in zip(made, gradients, strict=True):
            torch.testing.assert_close((mine * upstream).to(right.dtype), right, equal_nan=True, **NEAR[x.dtype])
    outputs = [loss, top, log, *gradients]
    bits = 0
    for word in errors:
        bits |= word
    return (outputs, bits) if with_errors else outputs


def emulated_rows(*tensors_and_options, errors, truncation=0.0, flush="end", **how):
    """linear_cross_entropy_rows_, as its binding calls the launcher, on guarded copies. truncation: how far products of
    half types are from sums in float32, relatively, as those of tensor cores are."""
    logits, x, weight, target, bias, top, log, loss, grad, _, ignore_index, label_smoothing = tensors_and_options
    if x.element_size() == 2:
        logits *= 1 - truncation
    structs, constants = emulator.header("common/types.h", "linear_cross_entropy/linear_cross_entropy.h")
    p = structs["camox_linear_cross_entropy_rows_params"]()
    p.dtype = constants[DTYPE_CODES[x.dtype]]
    (p.rows, p.depth), p.classes, p.pitch = x.shape, len(weight), logits.stride(0)
    p.ignore_index, p.smoothing = ignore_index, label_smoothing
    with emulator.guarded(flush) as memory:
        padded = logits.as_strided((p.rows, p.pitch), (p.pitch, 1))
        padded[:, p.classes :] = torch.nan  # spoils what reads it, and must stay
        written = {"logits": padded, "top": top, "log": log, "loss": loss}
        read = {"x": x, "weight": weight, "target": target, "bias": bias, "grad": grad}
        held = {name: memory.copy(tensor, name) for name, tensor in (written | read).items() if tensor is not None}
        held["error_word"] = memory.empty_strided((1,), (1,), torch.int32, "error_word").zero_()
        for name, tensor in held.items():
            setattr(p, name, tensor.data_ptr())
        p.x_stride[:], p.weight_stride[:] = held["x"].stride(), held["weight"].stride()
        p.grad_stride = 0 if grad is None else grad.dim()
        _call(p, str(x.dtype).removeprefix("torch."), **how)
        for name, tensor in written.items():
            tensor.copy_(held[name])
        assert padded[:, p.classes :].isnan().all()
        errors.append(held["error_word"].item())


def _call(p, dtype, arch=900, define="", **how):
    function = emulator.load(SOURCE, arch, define).camox_linear_cross_entropy_rows_cuda
    direction = "backward" if p.grad else "forward"
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
    """Runs each kernel at its smallest: every dtype, whole accesses and none."""
    for dtype in emulator.DTYPES.values():
        for classes in (8, 5):
            run(*inputs_of((3, 7, classes), dtype), **OPTIONS[1], arch=arch)


def with_barriers(**how):
    """Several rows for a block, several iterations over their classes, and logits that are summed again."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        yield run(*inputs_of((5, 3, 2100), dtype), **OPTIONS[2], truncation=0.1, **how)
