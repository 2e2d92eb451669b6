"""structure_loss in the emulator: its launchers in csrc/structure_loss/structure_loss_cuda.cu on guarded tensors."""

from __future__ import annotations

import ctypes

import emulator
import torch
from helpers import random_image
from images import DTYPE_CODES

from camox_ops import reference

SOURCE = emulator.CSRC / "structure_loss" / "structure_loss_cuda.cu"
# (images, pixels): whole accesses and none, more than eight work items of 2048 pixels, more images than threads, and so
# many that each has a warp.
SHAPES = [(1, 1), (3, 7), (2, 64), (1, 18433), (260, 8), (517, 9)]
OPTIONS = [
    {"bce": bce, "probabilities": probabilities, "reduction": reduction}
    for bce in ("weighted", "mean")
    for probabilities in (False, True)
    for reduction in ("mean", "sum", "none")
]


def inputs_of(shape, dtype, probabilities=False, of_mask=torch.float32):
    """Logits or probabilities, mask and weight as (images, 1, 1, pixels), and the gradient of each image's loss."""
    full = (shape[0], 1, 1, shape[1])
    logits = random_image(full, torch.float32)
    logits = (logits.sigmoid() if probabilities else 2 * logits).to(dtype)
    mask, weight = random_image(full, seed=1).sigmoid(), 1 + 5 * random_image(full, seed=2).sigmoid()
    return logits, mask.to(of_mask), weight.to(of_mask), random_image((shape[0], 1, 1, 1), seed=3).view(shape[0], 1)


def run(logits, mask, weight, grad, bce, probabilities, reduction, flush="end", stream=None, **how):
    """(loss, grad_logits). Partial sums lie at a multiple of 16 bytes."""
    structs, constants = emulator.header("common/types.h", "structure_loss/structure_loss.h")
    p = structs["camox_structure_loss_params"]()
    p.dtype, p.bce = constants[DTYPE_CODES[logits.dtype]], constants[f"CAMOX_BCE_{bce.upper()}"]
    p.reduction, p.probabilities, p.smooth = constants[f"CAMOX_REDUCE_{reduction.upper()}"], probabilities, 0.5
    p.images, p.pixels, p.half_mask = logits.shape[0], logits.shape[3], mask.dtype in emulator.HALVES
    items = p.images * -(-p.pixels // 2048)
    with emulator.guarded(flush) as memory:

        def new(name, *shape, dtype=torch.float32):
            return memory.empty_strided(shape, torch.empty(shape, device="meta").stride(), dtype, name)

        given = {"logits": logits, "mask": mask, "weight": weight, "grad": grad if reduction == "none" else grad[0, 0]}
        held = {name: memory.copy(t, name) for name, t in given.items()}
        held |= {"partial": new("partial", -(-items * 6 // 4), 4), "sums": new("sums", p.images, 4)}
        held["loss"] = new("loss", *([p.images, 1] if reduction == "none" else []))
        held["grad_logits"] = new("grad_logits", *logits.shape, dtype=logits.dtype)
        for name, tensor in held.items():
            setattr(p, name, tensor.data_ptr())
        _call("camox_structure_loss_cuda", p, logits, "forward", stream, **how)
        _call("camox_structure_loss_backward_cuda", p, logits, "backward", stream, **how)
        return [held[name].clone() for name in ("loss", "grad_logits")]


def _call(name, p, logits, direction, stream, arch=900, define="", **how):
    function = getattr(emulator.load(SOURCE, arch, define), name)
    dtype = str(logits.dtype).removeprefix("torch.")
    stream = ctypes.c_void_p(stream)
    emulator.call(function, ctypes.byref(p), stream, dtype=dtype, layout="contiguous", direction=direction, **how)


def with_barriers(**how):
    yield run(*inputs_of((3, 9000), torch.float32), **OPTIONS[0], **how)


def plain(logits, mask, weight, grad, bce, probabilities, reduction):
    """The same from camox_ops.reference."""
    logits = logits.detach().requires_grad_()
    loss = reference.structure_loss(
        logits, mask, weight, bce=bce, smooth=0.5, probabilities=probabilities, reduction=reduction
    )
    grad = (grad if reduction == "none" else grad[0, 0]).to(loss.dtype)
    return [loss.detach(), *torch.autograd.grad(loss, logits, grad)]


def every_kernel(arch) -> None:
    """Runs each kernel at its smallest: every dtype of logits and mask, access width and division of work."""
    for dtype in emulator.DTYPES.values():
        for of_mask in {torch.float32, dtype}:
            for shape in ((2, 8), (2, 7), (512, 4), (512, 1)):
                run(*inputs_of(shape, dtype, of_mask=of_mask), **OPTIONS[0], arch=arch)
