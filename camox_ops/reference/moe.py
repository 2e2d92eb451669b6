"""Routing of a sparse mixture of experts from its formulas (see camox_ops.moe_route)."""

from __future__ import annotations

import torch


def moe_route(
    logits: torch.Tensor,
    top_k: int,
    *,
    score: str = "topk_softmax",
    capacity: int | None = None,
    valid: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """logits (rows, E) -> weights, experts, counts, offsets, order, position."""
    num_experts = logits.shape[1]
    comparable = logits.detach().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    experts = comparable.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    chosen = logits.gather(1, experts)
    if score == "topk_softmax":
        weights = chosen.softmax(dim=1)
    elif score == "sigmoid_topk":
        weights = chosen.sigmoid()
    else:
        weights = logits.softmax(dim=1).gather(1, experts)
        if score == "softmax_topk_renorm":
            weights = weights / weights.sum(dim=1, keepdim=True)

    return moe_routing(weights, experts, num_experts, capacity=capacity, valid=valid)


def moe_routing(
    weights: torch.Tensor,
    experts: torch.Tensor,
    num_experts: int,
    *,
    capacity: int | None = None,
    valid: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """weights, experts (rows, K) -> weights, experts, counts, offsets, order, position."""
    rows, top_k = experts.shape
    slots = experts.flatten()
    kept = torch.ones_like(slots, dtype=torch.bool) if valid is None else valid.repeat_interleave(top_k)
    one_hot = torch.nn.functional.one_hot(slots, num_experts) * kept[:, None]
    rank = (one_hot.cumsum(0) - 1).gather(1, slots[:, None])[:, 0]
    if capacity is not None:
        kept = kept & (rank < capacity)
    counts = (one_hot * kept[:, None]).sum(0)
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    position = torch.where(kept, offsets[slots] + rank, -1)
    weights = torch.where(kept.view(rows, top_k), weights, 0)
    return weights, experts, counts, offsets, _slot_of(position, rows * top_k), position


def moe_dispatch(
    x: torch.Tensor,
    experts: torch.Tensor,
    offsets: torch.Tensor,
    position: torch.Tensor,
    *,
    capacity: int | None = None,
) -> torch.Tensor:
    """(rows, ...) -> (rows*K, ...); with a capacity (E, capacity, ...). Zeros where no slot has its place."""
    top_k, num_experts = experts.shape[1], offsets.shape[0] - 1
    places = position.shape[0] if capacity is None else num_experts * capacity
    slot = _slot_of(_places(experts, offsets, position, capacity), places)
    copied = x[slot.clamp(min=0) // top_k]
    copied = torch.where((slot < 0).view(-1, *[1] * (x.dim() - 1)), 0, copied)
    return copied if capacity is None else copied.unflatten(0, (num_experts, capacity))


def moe_combine(
    y: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    offsets: torch.Tensor,
    position: torch.Tensor,
    *,
    capacity: int | None = None,
) -> torch.Tensor:
    """(rows*K, ...), or (E, capacity, ...) with a capacity -> (rows, ...), the weighted sum over each row's slots."""
    place = _places(experts, offsets, position, capacity)
    taken = (y if capacity is None else y.flatten(0, 1))[place.clamp(min=0)]
    ones = [1] * (taken.dim() - 1)
    products = torch.where((place < 0).view(-1, *ones), 0, taken * weights.reshape(-1, *ones))
    return products.unflatten(0, tuple(experts.shape)).sum(1)


def moe_aux_loss(
    logits: torch.Tensor,
    counts: torch.Tensor,
    top_k: int,
    *,
    kind: str = "switch",
    valid: torch.Tensor | None = None,
) -> torch.Tensor:
    """A scalar; no valid row gives 0 but for "usage_mse"."""
    rows, num_experts = logits.shape
    if kind == "usage_mse":
        usage = counts.to(logits.dtype) / (rows * top_k + 1e-8)
        return 0.01 * ((usage - 1 / num_experts) ** 2).mean()
    if valid is not None:
        logits = logits[valid]
    number = max(logits.shape[0], 1)
    if kind == "z":
        return (logits.logsumexp(dim=1) ** 2).sum() / number
    importance = logits.softmax(dim=1).sum(0)
    if kind == "importance_cv2":
        return importance.var(correction=0) / (importance.mean() ** 2 + 1e-10)
    share = counts.to(logits.dtype) / (number * top_k)
    return num_experts * (share * importance / number).sum()


def _places(experts, offsets, position, capacity: int | None) -> torch.Tensor:
    """Where each slot's copy lies, -1 for none."""
    if capacity is None:
        return position
    slots = experts.flatten()
    return torch.where(position < 0, -1, slots * capacity + position - offsets[slots])


def _slot_of(place: torch.Tensor, places: int) -> torch.Tensor:
    """The inverse of place: the slot of each of `places` places, -1 where there is none."""
    slots = torch.arange(place.shape[0], device=place.device)
    return place.new_full((places + 1,), -1).scatter(0, torch.where(place < 0, places, place), slots)[:places]
