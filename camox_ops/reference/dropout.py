"""dropout, sparse_gate and dropout_add_layer_norm from their formulas, masks included (see camox_ops.dropout)."""

from __future__ import annotations

import torch

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF
ELEMENTS = 8  # whose 16 bits come from one call


def philox4x32(counter, key, rounds: int = 7) -> list:
    """Four words from a counter of four and a key of two, as int64 tensors (or ints) below 2**32, elementwise.

    A product wraps around in int64, and all of its 64 bits are right."""
    counter, key = list(counter), list(key)
    for _ in range(rounds):
        a, b = (multiplier * word for multiplier, word in zip(MULTIPLIERS, (counter[0], counter[2]), strict=True))
        counter = [(b >> 32 & WORD) ^ counter[1] ^ key[0], b & WORD, (a >> 32 & WORD) ^ counter[3] ^ key[1], a & WORD]
        key = [word + weyl & WORD for word, weyl in zip(key, WEYL, strict=True)]
    return counter


def dropout_threshold(p: float) -> int:
    """Elements whose 16 bits are below it are dropped: p rounded to a multiple of 1/65536, and less than 1."""
    return min(int(65536.0 * p + 0.5), 65535)


def dropout_scale(p: float) -> float:
    return 65536.0 / (65536 - dropout_threshold(p))


def dropout_mask(shape, seed: torch.Tensor, p: float) -> torch.Tensor:
    """True where an element of this shape is kept; seed: one int64 number."""
    seed = seed.reshape(())
    elements = torch.Size(shape).numel()
    group = torch.arange((elements + ELEMENTS - 1) // ELEMENTS, device=seed.device)
    counter = (group & WORD, group >> 32, torch.zeros_like(group), torch.zeros_like(group))
    words = torch.stack(philox4x32(counter, (seed & WORD, seed >> 32 & WORD)), dim=-1)
    bits = torch.stack((words & 0xFFFF, words >> 16), dim=-1)
    return bits.flatten()[:elements].reshape(shape) >= dropout_threshold(p)


def dropout(x: torch.Tensor, seed: torch.Tensor | None, p: float) -> torch.Tensor:
    """x of any shape; without a seed nothing is dropped."""
    if seed is None:
        return x
    return torch.where(dropout_mask(x.shape, seed, p), x * dropout_scale(p), torch.zeros((), dtype=x.dtype))


def sparse_gate(x: torch.Tensor, y: torch.Tensor, seed: torch.Tensor | None = None, p: float = 0.0) -> torch.Tensor:
    """x, y of one shape -> dropout(relu(x) * relu(y))."""
    return dropout(torch.relu(x) * torch.relu(y), seed, p)


def sparse_gate_backward(
    grad: torch.Tensor, x: torch.Tensor, y: torch.Tensor, seed: torch.Tensor | None = None, p: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients with respect to x and y; differentiable in all three tensors."""
    _, pullback = torch.func.vjp(lambda x, y: sparse_gate(x, y, seed, p), x, y)
    return pullback(grad)


def dropout_add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    seed: torch.Tensor | None = None,
    p: float = 0.0,
    eps: float = 1e-5,
) -> torch.Tensor:
    """x, residual (..., D), weight, bias (D,) -> (..., D) in x's dtype."""
    s = residual + dropout(x, seed, p)
    difference = s - s.mean(dim=-1, keepdim=True)
    variance = (difference * difference).mean(dim=-1, keepdim=True)
    return (difference / torch.sqrt(variance + eps) * weight + bias).to(x.dtype)


def dropout_add_layer_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    seed: torch.Tensor | None = None,
    p: float = 0.0,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients with respect to x, residual, weight and bias."""

    def forward(x, residual, weight, bias):
        return dropout_add_layer_norm(x, residual, weight, bias, seed, p, eps)

    _, pullback = torch.func.vjp(forward, x, residual, weight, torch.zeros_like(weight))
    return pullback(grad)
