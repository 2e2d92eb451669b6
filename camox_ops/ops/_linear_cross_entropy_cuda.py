"""linear_cross_entropy on CUDA: a loop over blocks of rows, whose products are cuBLAS', by torch.mm.

    logits = x[block] @ weight.T             float32, the block's own memory, which the next block uses again
    rows_(logits, ...)                       each row's maximum, log-sum and loss; the logits' gradient in their place
    grad_x[block] = dz @ weight
    grad_weight += dz.T @ x[block]           in float32

A block has all classes of its rows, so that the gradient is known as soon as the logits are: three products for loss
and gradients. Nothing here depends on the device but `rows_`, the kernel of csrc/linear_cross_entropy."""

from __future__ import annotations

import torch

from ._codes import LOSS_REDUCTIONS

OP = "linear_cross_entropy"
# Of a block: 64 MiB of them, and more where a block of twice depth rows has more, as each block reads and writes all of
# grad_weight; 256 MiB at most. A cache does not hold them, which costs less than smaller blocks.
FEW_LOGITS, MOST_LOGITS = 16 << 20, 64 << 20
MOST_ROWS = 8192  # longer sums over the rows would lose digits of grad_weight
FEWEST_ROWS = 128
ADDS_HALVES = torch.torch_version.TorchVersion(torch.__version__) >= (2, 11)  # a product of them to float32, on CUDA
MOST_STRIDE = 2**31 - 1  # of cuBLAS
LARGEST_DZ = 1024.0  # of float16, whose gradients of a mean would be too small for it otherwise


def row_blocks(rows: int, depth: int, classes: int) -> list[slice]:
    """Blocks of rows of about one size."""
    logits = min(MOST_LOGITS, max(FEW_LOGITS, 2 * depth * classes))
    most = max(FEWEST_ROWS, min(MOST_ROWS, logits // max(classes, 1)))
    size = -(-rows // max(1, -(-rows // most)))
    size = max(-(-size // 64) * 64, 1)
    return [slice(first, min(first + size, rows)) for first in range(0, rows, size)]


def forward(
    x, weight, target, bias, ignore_index, label_smoothing, reduction, make_x, make_weight, make_bias, *, rows_=None
):
    """loss, top, log, and the gradients of x, weight and bias that are asked for, of a loss whose own is 1."""
    making = make_x or make_weight or make_bias
    if making and reduction == LOSS_REDUCTIONS["none"]:
        raise ValueError(f"{OP}: the forward makes gradients of a mean or sum, and not in float64")
    loss, top, log = (x.new_empty(x.shape[:1], dtype=torch.float32) for _ in range(3))
    counted = (target != ignore_index).sum(dtype=torch.float32) if reduction == LOSS_REDUCTIONS["mean"] else None
    grad = _row_grad(x.new_ones((), dtype=torch.float32), counted) if making else None
    options = (ignore_index, label_smoothing)
    gradients = _over_blocks(
        (x, weight, target, bias), (top, log, loss), grad, options, (make_x, make_weight, make_bias), rows_
    )
    if reduction != LOSS_REDUCTIONS["none"]:
        loss = loss.sum() if counted is None else loss.sum() / counted
    return loss, top, log, *gradients


def backward(
    grad,
    x,
    weight,
    target,
    bias,
    top,
    log,
    ignore_index,
    label_smoothing,
    reduction,
    needs_x,
    needs_weight,
    needs_bias,
    *,
    rows_=None,
):
    """The gradients of x, weight and bias, of logits and statistics that are computed again: a row's logits are read
    for its gradient anyway."""
    counted = (target != ignore_index).sum(dtype=torch.float32) if reduction == LOSS_REDUCTIONS["mean"] else None
    options, needs = (ignore_index, label_smoothing), (needs_x, needs_weight, needs_bias)
    statistics = tuple(torch.empty_like(top) for _ in range(3))
    grad_x, grad_weight, grad_bias = _over_blocks(
        (x, weight, target, bias), statistics, _row_grad(grad, counted), options, needs, rows_
    )
    return grad_x.to(x.dtype), grad_weight.to(x.dtype), grad_bias


def _row_grad(grad, counted):
    """The gradient of each row's loss, or one for all rows."""
    return grad if counted is None else grad / counted


def _over_blocks(tensors, statistics, grad, options, needs, rows_):
    """Runs all blocks, which fill the statistics: top, log and the rows' losses. Returns the gradients that `needs`
    names in float32, the others empty."""
    *factors, target, bias = tensors
    x, weight = (factor if max(factor.stride()) <= MOST_STRIDE else factor.contiguous() for factor in factors)
    rows_ = rows_ or torch.ops.camox_ops.linear_cross_entropy_rows_
    (rows, depth), classes = x.shape, weight.shape[0]
    needs_x, needs_weight, needs_bias = needs
    grad_x = x.new_empty((rows, depth) if needs_x else (0, 0), dtype=torch.float32)
    grad_weight = x.new_empty((classes, depth) if needs_weight else (0, 0), dtype=torch.float32)
    grad_bias = x.new_zeros((classes if needs_bias else 0,), dtype=torch.float32)
    undo = None
    if grad is not None and x.dtype == torch.float16:
        grad, undo = _scaled(grad)

    blocks = row_blocks(rows, depth, classes)
    if not blocks:
        grad_weight.zero_()
    pitch = -(-max(classes, 1) // 4) * 4  # rows of whole 16 bytes
    memory = x.new_empty((blocks[0].stop if blocks else 0, pitch), dtype=torch.float32)
    for block in blocks:
        count = block.stop - block.start
        logits = memory[:count, :classes]
        dz = None if grad is None else memory.view(x.dtype)[:count, :classes]
        row_grad = grad if grad is None or grad.dim() == 0 else grad[block]
        _multiply(x[block], weight.t(), logits)
        rows_(logits, x[block], weight, target[block], bias, *(s[block] for s in statistics), row_grad, dz, *options)
        if needs_x:
            _multiply(dz, weight, grad_x[block])
        if needs_weight:
            _multiply(dz.t(), x[block], grad_weight, accumulate=block.start > 0)
        if needs_bias:
            grad_bias += dz.sum(0, dtype=torch.float32)

    gradients = (grad_x, grad_weight, grad_bias)
    return gradients if undo is None else tuple(gradient.mul_(undo) for gradient in gradients)


def _scaled(grad):
    """grad times a number that gives its largest element LARGEST_DZ, where there is one; and what undoes that."""
    largest = grad.abs().amax() if grad.numel() else grad.new_zeros(())
    usable = (largest > 1e-30) & (largest < 1e30)
    scale = torch.where(usable, LARGEST_DZ / largest, 1.0)
    return grad * scale, 1 / scale


def _multiply(a, b, out, accumulate=False) -> None:
    """a @ b in out, or added to it, in float32."""
    if a.dtype != out.dtype and not a.is_cuda:
        # PyTorch's CPU, where tests run this, has no product of halves in float32
        a, b = a.to(out.dtype), b.to(out.dtype)
    same = a.dtype == out.dtype
    if accumulate and same:
        torch.addmm(out, a, b, out=out)
    elif accumulate and ADDS_HALVES:
        torch.addmm(out, a, b, out=out, out_dtype=out.dtype)
    elif accumulate:
        out += torch.mm(a, b, out_dtype=out.dtype)
    elif same:
        torch.mm(a, b, out=out)
    else:
        torch.mm(a, b, out=out, out_dtype=out.dtype)
