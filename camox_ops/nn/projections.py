"""Products with weights, for models whose time goes there: BDH's projections to and from all heads.

On the CPU, float32 products go to oneDNN, which PyTorch carries and whose kernels use AVX-512 on every processor that
has it; torch.mm asks MKL, which takes AVX2 on AMD's. bfloat16 products, on CPUs with AVX512-BF16, are
our own (csrc/gemm), which copy no operand. Everything else is torch.mm and torch.bmm.
"""

from __future__ import annotations

from functools import partial

import torch

from .. import _C
from .._torch_private import linear_pointwise
from ..ops import _check

_MULTIPLIES_BFLOAT16 = _C.has_avx512_bf16()
_FEWEST = 32  # rows, columns and summed elements of a product of our own


def project(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x (..., K) times weight (K, N) -> (..., N). Any strides; autocast casts both; derivatives of any order."""
    x, weight = _operands("project", x, weight)
    if x.dim() < 1 or weight.dim() != 2 or x.shape[-1] != weight.shape[0]:
        raise ValueError(
            f"project: x (..., K) and weight (K, N) must share K, got shapes {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    if x.dim() == 1:
        return _Project.apply(x[None], weight)[0]
    return _Project.apply(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])


def project_heads(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x (M, H, K), each head times its own weight (H, K, N) -> (M, H, N), contiguous: no copy of weight, none of x.

    Any strides; autocast casts both. First derivatives."""
    x, weight = _operands("project_heads", x, weight)
    if x.dim() != 3 or weight.dim() != 3 or x.shape[1:] != weight.shape[:2]:
        raise ValueError(
            "project_heads: x (M, H, K) and weight (H, K, N) must share H and K, "
            f"got shapes {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    return _ProjectHeads.apply(x, weight)


def _operands(op: str, x, weight) -> tuple[torch.Tensor, torch.Tensor]:
    """Both, in autocast's dtype where it is on."""
    for name, value in (("x", x), ("weight", weight)):
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{op}: {name} must be a torch.Tensor, got {type(value).__name__}")
    x, weight = _check.autocast(x, weight)
    if x.dtype != weight.dtype:
        names = _check.dtype_names(x.dtype), _check.dtype_names(weight.dtype)
        raise TypeError(f"{op}: weight must have the dtype of x, {names[0]}, got {names[1]}")
    return x, weight


def _by_onednn(x: torch.Tensor) -> bool:
    mkldnn = torch.backends.mkldnn
    if linear_pointwise is None:
        return False
    return x.device.type == "cpu" and x.dtype == torch.float32 and mkldnn.is_available() and mkldnn.enabled


def _by_pairs(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether _product multiplies a (..., M, K) with b (..., K, N)."""
    if not _MULTIPLIES_BFLOAT16 or a.device.type != "cpu" or a.dtype != torch.bfloat16:
        return False
    return min(*a.shape[-2:], b.shape[-1]) >= _FEWEST and all(1 in t.stride()[-2:] for t in (a, b))


def _product(a: torch.Tensor, b: torch.Tensor, by_row: bool) -> torch.Tensor:
    """a (H, M, K) times b (H, K, N) -> (H, M, N), in memory (M, H, N) where by_row."""
    return torch.ops.camox_ops.gemm(a, b, by_row)


def _mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a (M, K) times b (K, N), as a b or as (b^T a^T)^T: whichever copies less of its operands."""
    if _by_pairs(a, b):
        return _product(a[None], b[None], False)[0]
    if not _by_onednn(a):
        return torch.mm(a, b)
    if _copied(a, b) <= _copied(b.t(), a):
        return _linear(a, b.t())
    return _linear(b.t(), a).t()


def _dense(matrix: torch.Tensor) -> bool:
    return matrix.is_contiguous() or matrix.t().is_contiguous()


def _copied(first: torch.Tensor, second: torch.Tensor) -> int:
    return (0 if first.is_contiguous() else first.numel()) + (0 if _dense(second) else second.numel())


def _linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x (M, K) times the transpose of weight (N, K). For a weight that is not dense oneDNN has only a slow loop."""
    return linear_pointwise(x, weight if _dense(weight) else weight.contiguous(), None, "none", [], "")


def _mm_into(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """out = a b, whatever the strides of out."""
    if _by_onednn(a) or torch.compiler.is_compiling():  # torch.compile takes no strided `out`
        out.copy_(_mm(a, b))
    else:
        torch.mm(a, b, out=out)


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(x, weight):
        return _mm(x, weight)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad
        return (
            _Project.apply(grad, weight.t()) if needs_x else None,
            _Project.apply(x.t(), grad) if needs_weight else None,
        )


class _ProjectHeads(torch.autograd.Function):
    @staticmethod
    def forward(x, weight):
        return _heads(x, weight)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad
        by_head, grad_by_head = x.permute(1, 2, 0), grad.transpose(0, 1)
        pairs = _by_pairs(by_head, grad_by_head)
        if pairs or grad.device.type != "cpu":
            of_weight = partial(_product, by_row=False) if pairs else torch.bmm
            return (
                _heads(grad, weight.mT) if needs_x else None,
                of_weight(by_head, grad_by_head) if needs_weight else None,
            )
        grad_x = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_x else None
        grad_weight = torch.empty_like(weight, memory_format=torch.contiguous_format) if needs_weight else None
        for head in range(x.shape[1]):
            of_head = grad[:, head]
            if _by_onednn(grad):
                of_head = of_head.contiguous()  # once for both products
            if needs_x:
                _mm_into(grad_x[:, head], of_head, weight[head].t())
            if needs_weight:
                _mm_into(grad_weight[head], x[:, head].t(), of_head)
        return grad_x, grad_weight


def _heads(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """(M, H, K), (H, K, N) -> (M, H, N). float32's oneDNN product alone does not write through strides."""
    if _by_pairs(x.transpose(0, 1), weight):
        return _product(x.transpose(0, 1), weight, True).transpose(0, 1)
    out = x.new_empty((*x.shape[:2], weight.shape[-1]))
    if x.device.type != "cpu":
        torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))
        return out
    for head in range(x.shape[1]):
        _mm_into(out[:, head], x[:, head], weight[head])
    return out
