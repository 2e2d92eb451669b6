"""moe_route, moe_dispatch, moe_combine, moe_aux_loss: sparse mixture of experts without a loop over rows or a sync."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from . import _check
from ._layout import as_read, empty_rows
from ._register import one_by_one, register

SCORES = ("topk_softmax", "softmax_topk", "softmax_topk_renorm", "sigmoid_topk")
AUX_LOSSES = ("switch", "importance_cv2", "z", "usage_mse")
MOST_EXPERTS = 1024


class Routing(NamedTuple):
    """Which experts each row goes to, and where its copies lie once they are sorted by expert; made by moe_route.

    Slot row*K + k is the row's k-th choice. A slot that was dropped (beyond the capacity) or is not valid has no copy.
    Sorted: by expert, then by row. All indices are int64."""

    weights: torch.Tensor
    """(rows, K), float32 (float64 for float64 logits); 0 for slots without a copy. Differentiable."""
    experts: torch.Tensor
    """(rows, K), best first; also of slots without a copy."""
    counts: torch.Tensor
    """(E,), copies each expert gets."""
    offsets: torch.Tensor
    """(E+1,), where the copies of each expert begin among the sorted ones; last, how many there are."""
    order: torch.Tensor
    """(rows*K,), the slot of each sorted place, -1 past the last copy."""
    position: torch.Tensor
    """(rows*K,), the sorted place of each slot, -1 for none."""
    num_experts: int
    top_k: int
    capacity: int | None
    """The most copies an expert may get; None: no limit."""


def moe_route(
    logits: torch.Tensor,
    top_k: int,
    *,
    score: str = "topk_softmax",
    capacity_factor: float | None = None,
    valid: torch.Tensor | None = None,
) -> Routing:
    """Chooses top_k experts for every row."""
    op = "moe_route"
    _check_logits(op, logits)
    top_k = _check_top_k(op, top_k, logits.shape[1])
    _check.choice(op, "score", score, SCORES)
    _check_valid(op, valid, logits)
    rows, num_experts = logits.shape
    capacity = None
    if capacity_factor is not None:
        capacity = math.ceil(_check.positive(op, "capacity_factor", capacity_factor) * rows * top_k / num_experts)
    return Routing(*_route(logits, valid, top_k, score, capacity), num_experts, top_k, capacity)


def moe_dispatch(x: torch.Tensor, routing: Routing, *, padded: bool = False) -> torch.Tensor:
    """Copies each row to the places of its slots, sorted by expert."""
    op = "moe_dispatch"
    _check_routing(op, routing)
    _check.tensor(op, "x", x)
    _check.flag(op, "padded", padded)
    rows = routing.experts.shape[0]
    if x.dim() < 1 or x.shape[0] != rows:
        raise ValueError(f"{op}: x must have shape ({rows}, ...), as many rows as were routed, got {tuple(x.shape)}")
    _check.same_device(op, "routing", routing.position, x)
    if not padded and _is_sorted(routing):
        return x.view_as(x)
    return _dispatch(x, routing.experts, routing.offsets, routing.position, _capacity(routing) if padded else None)


def moe_combine(y: torch.Tensor, routing: Routing, *, padded: bool | None = None) -> torch.Tensor:
    """Each row's copies, weighted and added up in the order of its choices."""
    op = "moe_combine"
    _check_routing(op, routing)
    _check.tensor(op, "y", y)
    padded = _check_combined(op, y, routing, padded)
    _check.same_device(op, "routing", routing.position, y)
    weights = as_read(routing.weights, _check.computed_in(y))
    capacity = _capacity(routing) if padded else None
    return _combine(y, weights, routing.experts, routing.offsets, routing.position, capacity)


def moe_aux_loss(
    routing: Routing, logits: torch.Tensor, kind: str = "switch", valid: torch.Tensor | None = None
) -> torch.Tensor:
    """A scalar that grows where experts are used unevenly."""
    op = "moe_aux_loss"
    _check_routing(op, routing)
    _check_logits(op, logits)
    rows, num_experts = routing.experts.shape[0], routing.num_experts
    if logits.shape[0] != rows or logits.shape[1] != num_experts:
        raise ValueError(
            f"{op}: logits must have the shape that was routed, ({rows}, {num_experts}), got {tuple(logits.shape)}"
        )
    _check.choice(op, "kind", kind, AUX_LOSSES)
    _check_valid(op, valid, logits)
    _check.same_device(op, "routing", routing.counts, logits)
    if kind == "usage_mse":
        logits = logits.detach()
    return _aux_loss(logits, routing.counts, valid, kind, routing.top_k)[0]


def _check_logits(op: str, logits) -> None:
    _check.tensor(op, "logits", logits)
    if logits.dim() != 2:
        raise ValueError(f"{op}: logits must have shape (rows, experts), got {tuple(logits.shape)}")
    if not 1 <= logits.shape[1] <= MOST_EXPERTS:
        raise ValueError(f"{op}: logits must have 1 to {MOST_EXPERTS} columns, experts, got {tuple(logits.shape)}")


def _check_top_k(op: str, top_k, num_experts: int) -> int:
    if isinstance(top_k, bool) or not isinstance(top_k, int):
        raise TypeError(f"{op}: top_k must be an int, got {top_k!r}")
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"{op}: top_k must be from 1 to the number of experts, {num_experts}, got {top_k}")
    return top_k


def _check_valid(op: str, valid, logits: torch.Tensor) -> None:
    if valid is None:
        return
    _check.tensor(op, "valid", valid, dtypes=(torch.bool,))
    if valid.dim() != 1 or valid.shape[0] != logits.shape[0]:
        raise ValueError(f"{op}: valid must have shape ({logits.shape[0]},), one a row, got {tuple(valid.shape)}")
    _check.same_device(op, "valid", valid, logits)


def _check_routing(op: str, routing) -> None:
    if not isinstance(routing, Routing):
        raise TypeError(f"{op}: routing must be a Routing, what moe_route returns, got {type(routing).__name__}")


def _is_sorted(routing: Routing) -> bool:
    """Whether the copies are the rows as they lie, where that can be told without waiting for a device or a graph."""
    position = routing.position
    if routing.top_k != 1 or type(position) is not torch.Tensor or position.device.type != "cpu":
        return False
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    return torch.equal(position, torch.arange(position.shape[0]))


def _capacity(routing: Routing) -> int:
    """Without a limit an expert gets at most one copy of every row."""
    return routing.experts.shape[0] if routing.capacity is None else routing.capacity


def _check_combined(op: str, y: torch.Tensor, routing: Routing, padded: bool | None) -> bool:
    """Whether y is (E, capacity, ...)."""
    slots, places = routing.position.shape[0], (routing.num_experts, _capacity(routing))
    fits_sorted = y.dim() >= 1 and y.shape[0] == slots
    fits_padded = y.dim() >= 2 and y.shape[0] == places[0] and y.shape[1] == places[1]
    if padded is None:
        if fits_sorted and fits_padded and routing.capacity is not None:
            raise ValueError(
                f"{op}: y of shape {tuple(y.shape)} may be ({slots}, ...) or ({places[0]}, {places[1]}, ...): "
                "say which with padded="
            )
        padded = fits_padded and not fits_sorted
        if not padded and not fits_sorted:
            raise ValueError(
                f"{op}: y must have shape ({slots}, ...) or ({places[0]}, {places[1]}, ...), as moe_dispatch gives, "
                f"got {tuple(y.shape)}"
            )
        return padded
    _check.flag(op, "padded", padded)
    if not (fits_padded if padded else fits_sorted):
        expected = f"({places[0]}, {places[1]}, ...)" if padded else f"({slots}, ...)"
        raise ValueError(f"{op}: y must have shape {expected} with padded={padded}, got {tuple(y.shape)}")
    return padded


def _save_route(ctx, inputs, output):
    logits, _, _, ctx.score, _ = inputs
    _, experts, *_, position = output
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(logits, experts, position)
    ctx.set_materialize_grads(False)


def _route_backward(ctx, grad, *_):
    if grad is None:
        return (None,) * 5
    return _moe_route_backward(grad, *ctx.saved_tensors, ctx.score), *(None,) * 4


def _fake_route(logits, valid, top_k, score, capacity):
    rows, num_experts = logits.shape

    def indices(*shape):
        return logits.new_empty(shape, dtype=torch.int64)

    weights = logits.new_empty((rows, top_k), dtype=_check.computed_in(logits))
    slots = rows * top_k
    experts, counts, offsets = indices(rows, top_k), indices(num_experts), indices(num_experts + 1)
    return weights, experts, counts, offsets, indices(slots), indices(slots)


def _save_dispatch(ctx, inputs, output):
    _, *routed, ctx.capacity = inputs
    ctx.save_for_backward(*routed)
    ctx.set_materialize_grads(False)


def _dispatch_backward(ctx, grad):
    if grad is None:
        return (None,) * 5
    return _moe_dispatch_backward(grad, *ctx.saved_tensors, ctx.capacity), *(None,) * 4


def _fake_dispatch(x, experts, offsets, position, capacity):
    return empty_rows(x, 1, _outer(experts, offsets, capacity))


def _fake_rows(y, experts, offsets, position, capacity):
    return empty_rows(y, 1 if capacity is None else 2, (experts.shape[0],))


def _outer(experts, offsets, capacity: int | None) -> tuple[int, ...]:
    """The leading dimensions of what is dispatched."""
    return (experts.shape[0] * experts.shape[1],) if capacity is None else (offsets.shape[0] - 1, capacity)


def _save_combine(ctx, inputs, output):
    *tensors, ctx.capacity = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _combine_backward(ctx, grad):
    if grad is None:
        return (None,) * 6
    return *_moe_combine_backward(grad, *ctx.saved_tensors, ctx.capacity), *(None,) * 4


def _fake_combine_backward(grad, y, weights, experts, offsets, position, capacity):
    outer = _outer(experts, offsets, capacity)
    return empty_rows(y, len(outer), outer), torch.empty_like(weights, memory_format=torch.contiguous_format)


def _save_aux(ctx, inputs, output):
    logits, _, valid, ctx.kind, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(logits, output[1], valid)
    ctx.set_materialize_grads(False)


def _aux_backward(ctx, grad, _):
    if grad is None:
        return (None,) * 5
    return _moe_aux_loss_backward(grad, *ctx.saved_tensors, ctx.kind), *(None,) * 4


def _fake_aux(logits, counts, valid, kind, top_k):
    real = _check.computed_in(logits)
    return logits.new_empty((), dtype=real), logits.new_empty(logits.shape[1], dtype=real)


def _first_derivative(name: str, fake):
    """The backward of moe_`name`, which has none of its own."""

    def refuse(ctx, *grads):
        raise NotImplementedError(f"moe_{name}: second derivatives are not implemented")

    return register(
        f"moe_{name}_backward",
        fake=fake,
        setup_context=lambda ctx, inputs, output: None,
        backward=refuse,
        vmap=_one_by_one(f"moe_{name}_backward"),
    )


def _one_by_one(name: str):
    """Every sample is routed on its own."""
    return lambda info, in_dims, *args: one_by_one(getattr(torch.ops.camox_ops, name), info, in_dims, args)


def _like_logits(grad, logits, *_):
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


_route = register(
    "moe_route",
    fake=_fake_route,
    setup_context=_save_route,
    backward=_route_backward,
    vmap=_one_by_one("moe_route"),
)
_dispatch = register(
    "moe_dispatch",
    fake=_fake_dispatch,
    setup_context=_save_dispatch,
    backward=_dispatch_backward,
    vmap=_one_by_one("moe_dispatch"),
)
_combine = register(
    "moe_combine",
    fake=lambda y, weights, *routed: _fake_rows(y, *routed),
    setup_context=_save_combine,
    backward=_combine_backward,
    vmap=_one_by_one("moe_combine"),
)
_aux_loss = register(
    "moe_aux_loss",
    fake=_fake_aux,
    setup_context=_save_aux,
    backward=_aux_backward,
    vmap=_one_by_one("moe_aux_loss"),
)
_moe_route_backward = _first_derivative("route", _like_logits)
_moe_dispatch_backward = _first_derivative("dispatch", _fake_rows)
_moe_combine_backward = _first_derivative("combine", _fake_combine_backward)
_moe_aux_loss_backward = _first_derivative("aux_loss", _like_logits)
