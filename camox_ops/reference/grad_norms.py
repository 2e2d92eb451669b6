"""grad_group_norms and scale_grads_ from their formulas (see camox_ops.grad_group_norms)."""

from __future__ import annotations

import torch


def grad_group_norms(grads, groups, num_groups: int, reduce: str = "sum_of_norms") -> torch.Tensor:
    """Gradients of any shapes, None among them -> (num_groups,), in the dtype computed in."""
    real = torch.float64 if any(g is not None and g.dtype == torch.float64 for g in grads) else torch.float32
    device = next((grad.device for grad in grads if grad is not None), None)
    norms = torch.zeros(num_groups, dtype=real, device=device)
    for grad, group in zip(grads, groups, strict=True):
        if grad is not None:
            norm = torch.linalg.vector_norm(grad.to(real))
            norms[group] += norm.square() if reduce == "l2" else norm
    return norms.sqrt() if reduce == "l2" else norms


def scale_grads_(grads, groups, scales: torch.Tensor) -> None:
    """Each gradient of the list times the product of its scales, in place."""
    factors = {}
    for grad, group in zip(grads, groups, strict=True):
        if grad is not None:
            factors[id(grad)] = (grad, factors.get(id(grad), (grad, 1))[1] * scales[group])
    for grad, factor in factors.values():
        grad.copy_(grad.to(torch.promote_types(grad.dtype, factor.dtype)) * factor)
