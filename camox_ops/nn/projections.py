"""Products with weights, for models whose time goes there: BDH's projections to and from all heads.

On the CPU, products of float32 and, on CPUs with AVX512-BF16, of bfloat16 are our own (csrc/gemm), which copy no
operand and write heads where they belong; MKL, which torch.mm asks, takes AVX2 for float32 on AMD's processors.
Everything else is torch's own: there the products of small models wait for the host, which does as little as it can.
"""

from __future__ import annotations

import torch

from .. import _C
from .._torch_private import in_eager_transform, in_transform
from ..ops import _check
from ..ops._register import last_derivative

_MULTIPLIED = (torch.float32, torch.bfloat16) if _C.has_avx512_bf16() else (torch.float32,)
_FEWEST = 32  # rows, columns and summed elements of a product of our own


def project(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x (..., K) times weight (K, N), plus bias (N) -> (..., N). Any strides; autocast casts all; derivatives of any
    order."""
    x, weight, bias = _operands("project", x, weight, bias)
    if x.dim() < 1 or weight.dim() != 2 or x.shape[-1] != weight.shape[0]:
        raise ValueError(
            f"project: x (..., K) and weight (K, N) must share K, got shapes {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    _check_bias("project", bias, weight.shape[1:], "(N)")
    # vmap has no rule for the Functions below
    if x.device.type != "cpu" or x.dtype not in _MULTIPLIED or in_eager_transform(*_given(x, weight, bias)):
        return _add(x @ weight, bias)
    if x.dim() == 1:
        return _apply(_Project, x[None], weight, bias)[0]
    return _apply(_Project, x.flatten(0, -2), weight, bias).unflatten(0, x.shape[:-1])


def project_heads(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x (M, H, K), each head times its own weight (H, K, N), plus its own bias (H, N) -> (M, H, N), contiguous: no copy
    of weight, none of x.

    Any strides; autocast casts all. First derivatives."""
    x, weight, bias = _operands("project_heads", x, weight, bias)
    if x.dim() != 3 or weight.dim() != 3 or x.shape[1:] != weight.shape[:2]:
        raise ValueError(
            "project_heads: x (M, H, K) and weight (H, K, N) must share H and K, "
            f"got shapes {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    _check_bias("project_heads", bias, (weight.shape[0], weight.shape[2]), "(H, N)")
    if in_eager_transform(*_given(x, weight, bias)):
        return _add(torch.bmm(x.transpose(0, 1), weight).transpose(0, 1).contiguous(), bias)
    return _apply(_ProjectHeads, x, weight, bias)


def _operands(op: str, x, weight, bias) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """All, in autocast's dtype where it is on."""
    named = {"x": x, "weight": weight, **({} if bias is None else {"bias": bias})}
    for name, value in named.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{op}: {name} must be a torch.Tensor, got {type(value).__name__}")
    x, *others = _check.autocast(*named.values())
    for name, value in zip(list(named)[1:], others, strict=True):
        if value.dtype != x.dtype:
            names = _check.dtype_names(x.dtype), _check.dtype_names(value.dtype)
            raise TypeError(f"{op}: {name} must have the dtype of x, {names[0]}, got {names[1]}")
    return x, others[0], None if bias is None else others[1]


def _check_bias(op: str, bias: torch.Tensor | None, shape, letters: str) -> None:
    if bias is not None and bias.shape != shape:
        raise ValueError(f"{op}: bias must have shape {letters} = {tuple(shape)}, got {tuple(bias.shape)}")


def _given(*tensors: torch.Tensor | None) -> list[torch.Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


def _add(product: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return product if bias is None else product + bias


def _is_ours(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether _product multiplies a (..., M, K) with b (..., K, N)."""
    if a.device.type != "cpu" or a.dtype not in _MULTIPLIED:
        return False
    return min(*a.shape[-2:], b.shape[-1]) >= _FEWEST and all(1 in t.stride()[-2:] for t in (a, b))


def _product(a: torch.Tensor, b: torch.Tensor, by_row: bool, bias: torch.Tensor | None = None) -> torch.Tensor:
    """a (H, M, K) times b (H, K, N), plus bias (H, N) -> (H, M, N), in memory (M, H, N) where by_row."""
    if bias is None or a.dtype == torch.float32:
        return torch.ops.camox_ops.gemm(a, b, by_row, None if bias is None else bias.contiguous())
    return torch.ops.camox_ops.gemm(a, b, by_row).add_(bias[:, None])


def multiply(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """a (M, K) times b (K, N), plus bias (N), for what has derivatives of its own."""
    if _is_ours(a, b):
        return _product(a[None], b[None], False, None if bias is None else bias[None])[0]
    return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)


def multiply_and_sum(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """a (M, K) times b (K, N), and the sum of b's rows (N): a weight's and a bias's gradient, for what has derivatives
    of its own."""
    out, total = _bmm_and_sum(a[None], b[None])
    return out[0], total[0]


def _bmm_and_sum(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """a (H, M, K) times b (H, K, N), and the sum of b's rows (H, N); where both are ours, from one reading of b."""
    if a.dtype == torch.float32 and _is_ours(a, b):
        return torch.ops.camox_ops.gemm_sums(a, b)
    return _bmm(a, b), b.sum(1)


def _bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return _product(a, b, False) if _is_ours(a, b) else torch.bmm(a, b)


def _apply(function: type[torch.autograd.Function], x, weight, bias=None) -> torch.Tensor:
    """function.apply, of its eager twin where no transform and no compiler needs setup_context: torch looks up the
    signature of a Function that has one in every call, which takes longer than a small product."""
    if torch.compiler.is_compiling() or in_transform():
        return function.apply(x, weight, bias)
    return _EAGER[function].apply(x, weight, bias)


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(x, weight, bias):
        return multiply(x, weight, bias)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad_x = _apply(_Project, grad, weight.t()) if needs_x else None
        if needs_weight and needs_bias and not torch.is_grad_enabled():  # it is where second derivatives are asked for
            return grad_x, *multiply_and_sum(x.t(), grad)
        return grad_x, _apply(_Project, x.t(), grad) if needs_weight else None, grad.sum(0) if needs_bias else None


class _ProjectHeads(torch.autograd.Function):
    @staticmethod
    def forward(x, weight, bias):
        return _heads(x, weight, bias)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    @last_derivative("project_heads")
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad_x = _heads(grad, weight.mT) if needs_x else None
        by_head = x.permute(1, 2, 0), grad.transpose(0, 1)
        if needs_weight and needs_bias:
            return grad_x, *_bmm_and_sum(*by_head)
        return grad_x, _bmm(*by_head) if needs_weight else None, grad.sum(0) if needs_bias else None


def _eager(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """The same Function without setup_context."""

    def forward(ctx, *args):
        output = function.forward(*args)
        function.setup_context(ctx, args, output)
        return output

    methods = {"forward": staticmethod(forward), "backward": staticmethod(function.backward)}
    return type(function.__name__, (torch.autograd.Function,), methods)


_EAGER = {function: _eager(function) for function in (_Project, _ProjectHeads)}


def _heads(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """(M, H, K), (H, K, N), (H, N) -> (M, H, N)."""
    by_head = x.transpose(0, 1)
    if _is_ours(by_head, weight):
        return _product(by_head, weight, True, bias).transpose(0, 1)
    out = x.new_empty((*x.shape[:2], weight.shape[-1]))
    if torch.compiler.is_compiling():  # takes no strided `out`
        out.copy_(torch.bmm(by_head, weight).transpose(0, 1))
    else:
        torch.bmm(by_head, weight, out=out.transpose(0, 1))
    return out if bias is None else out.add_(bias)
