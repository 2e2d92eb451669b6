"""moe_route, moe_routing, moe_dispatch, moe_combine, moe_aux_loss: sparse mixture of experts without a loop over rows
or a sync."""

from __future__ import annotations

import math
import numbers
from typing import NamedTuple

import torch

from . import _check
from ._codes import AUX_LOSSES, SCORES, code_of
from ._layout import as_read, empty_rows
from ._register import register, register_last_derivative

MOST_EXPERTS = 1024
MOST_CAPACITY_FACTOR = 2**31  # far beyond E, which limits nothing, and times any number of rows an int64


class Routing(NamedTuple):
    """Which experts each row goes to, and where its copies lie once they are sorted by expert; made by moe_route, or by
    moe_routing from weights and experts.

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
    """Chooses the top_k experts of every row and sorts the rows' copies by expert, in one or two launches.

    Args:
        logits: (rows, E), 1 to 1024 experts; float32, bfloat16, float16 or float64; any strides.
        top_k: K, from 1 to E. The K largest logits of a row are its experts, best first, ties to the lower expert.
        score: the weights. "topk_softmax": softmax over the K chosen logits; "softmax_topk": softmax over all E, of the
            chosen; "softmax_topk_renorm": the same divided by their sum, which is topk_softmax; "sigmoid_topk":
            1/(1 + exp(-logit)) of the chosen.
        capacity_factor: > 0, at most 2**31: an expert gets at most ceil(capacity_factor * rows * K / E) copies, and
            later rows lose theirs first. None: no limit.
        valid: (rows,) bool, True where the row takes part; None: all do. Logits of the others are not looked at.

    Returns:
        A Routing. A slot that was dropped or whose row is not valid has position -1 and weight 0 and is not counted;
        its expert is still named. No shape depends on the data and nothing waits for a device. Weights are float32
        (float64 for float64 logits), also for half-precision logits and in autocast.

    Gradients flow from the weights to the logits; of a softmax over the chosen also to the logit of a dropped slot,
    which took part in it. Saved for backward: the logits, experts and positions. First derivatives; a second one raises
    NotImplementedError, and so does forward-mode AD. The same bits on every run and for any number of threads.

    NaN in a valid row: ValueError on the CPU, before anything is returned. On CUDA the row's weights become NaN, its
    experts stay in bounds, and camox_ops.check_errors() raises.

    Raises:
        TypeError: logits is not a dense tensor of one of these dtypes, top_k not an int, capacity_factor not a number,
            valid not a bool tensor.
        ValueError: logits not (rows, E), more than 1024 experts, top_k < 1 or > E, an unknown score, capacity_factor
            not > 0 or beyond 2**31, valid of another shape, tensors on different devices, NaN."""
    op = "moe_route"
    _check_logits(op, logits)
    top_k = _check_top_k(op, top_k, logits.shape[1])
    score_code = code_of(op, "score", score, SCORES)
    _check_valid(op, valid, logits)
    rows, num_experts = logits.shape
    capacity = None
    if capacity_factor is not None:
        capacity = math.ceil(check_capacity_factor(op, capacity_factor) * rows * top_k / num_experts)
    return Routing(*_route(logits, valid, top_k, score_code, capacity), num_experts, top_k, capacity)


def moe_routing(
    weights: torch.Tensor,
    experts: torch.Tensor,
    num_experts: int,
    *,
    capacity_factor: float | None = None,
    valid: torch.Tensor | None = None,
) -> Routing:
    """A Routing from what another router chose, for moe_dispatch, moe_combine and moe_aux_loss.

    Args:
        weights: (rows, K), float32, bfloat16, float16 or float64; any strides, any values.
        experts: (rows, K) int64, from 0 to num_experts - 1. A row may name an expert twice and then has two copies
            there; without a capacity_factor that can be more than moe_dispatch(padded=True) has room for, an error.
        num_experts: E, from 1 to 1024 and at least K.
        capacity_factor, valid: as for moe_route.

    Returns:
        A Routing as moe_route makes it, with dense tensors: the given experts, and the given weights in
        float32 (float64 for float64), and 0 for slots without a copy. Gradients flow back to the given weights.

    Saved for backward: which slots have a copy. Derivatives of any order, but for forward-mode AD. No shape depends on
    the data and nothing waits for a device.

        >>> weights, experts = torch.tensor([[0.7, 0.3], [1.0, 0.0]]), torch.tensor([[2, 0], [2, 1]])
        >>> camox_ops.moe_routing(weights, experts, 3).counts
        tensor([1, 1, 2])

    Raises:
        TypeError: weights is not a dense tensor of one of these dtypes, experts not an int64 tensor, num_experts not an
            int, valid not a bool tensor.
        ValueError: experts of another shape than weights, K below 1 or above num_experts, num_experts out of its range,
            a capacity_factor not > 0 or beyond 2**31, valid of another shape, tensors on different devices; on the CPU
            an expert out of bounds. On CUDA such a slot's row becomes NaN in moe_combine and camox_ops.check_errors()
            raises."""
    op = "moe_routing"
    _check.tensor(op, "weights", weights)
    _check.tensor(op, "experts", experts, dtypes=(torch.int64,))
    if weights.dim() != 2:
        raise ValueError(f"{op}: weights must have shape (rows, K), got {tuple(weights.shape)}")
    if experts.shape != weights.shape:
        raise ValueError(
            f"{op}: experts must have the shape of weights, {tuple(weights.shape)}, got {tuple(experts.shape)}"
        )
    _check.same_device(op, "experts", experts, weights, "weights")
    if isinstance(num_experts, bool) or not isinstance(num_experts, int):
        raise TypeError(f"{op}: num_experts must be an int, got {num_experts!r}")
    if not 1 <= num_experts <= MOST_EXPERTS:
        raise ValueError(f"{op}: num_experts must be from 1 to {MOST_EXPERTS}, got {num_experts}")
    rows, top_k = experts.shape
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"{op}: weights must have 1 to num_experts={num_experts} columns, got {tuple(weights.shape)}")
    _check_valid(op, valid, weights)
    capacity = None
    if capacity_factor is not None:
        capacity = math.ceil(check_capacity_factor(op, capacity_factor) * rows * top_k / num_experts)
    counts, offsets, order, position = _place(experts, valid, num_experts, capacity)
    kept = weights.to(_check.computed_in(weights)).contiguous().masked_fill((position < 0).view(rows, top_k), 0)
    return Routing(kept, experts.contiguous(), counts, offsets, order, position, num_experts, top_k, capacity)


def moe_dispatch(x: torch.Tensor, routing: Routing, *, padded: bool = False) -> torch.Tensor:
    """Copies each row once for each of its experts, the copies sorted by expert and then by row.

    Args:
        x: (rows, ...), rows of any shape: tokens or whole images; float32, bfloat16, float16 or float64; any strides,
            of which those that leave gaps within a row are copied first.
        routing: what moe_route gave for these rows.
        padded: False: (rows*K, ...), zeros past the last copy; the copies of expert e are
            [routing.offsets[e], routing.offsets[e+1]). True: (E, capacity, ...), zeros where an expert has fewer;
            without a capacity_factor capacity is the number of rows.

    Returns:
        A tensor in x's dtype, each row in memory as in x (channels_last stays so). Always memory of its own.

    The backward adds up the copies' gradients of each row in the order of its choices. Saved: the routing's indices.
    First derivatives; a second one raises NotImplementedError, and so does forward-mode AD. The same bits on every run.

    Raises:
        TypeError: x is not a dense tensor of one of these dtypes, routing not a Routing of int64 tensors, padded not a
            bool.
        ValueError: another number of rows than was routed, tensors on different devices; on the CPU indices that lie
            out of bounds, or positions that are not the places 0, 1, ... each once. On CUDA a slot out of bounds has no
            copy and camox_ops.check_errors() raises."""
    op = "moe_dispatch"
    _check_routing(op, routing)
    _check.tensor(op, "x", x)
    _check.flag(op, "padded", padded)
    _check_indices(op, routing, x, "x")
    rows = routing.experts.shape[0]
    if x.dim() < 1 or x.shape[0] != rows:
        raise ValueError(f"{op}: x must have shape ({rows}, ...), as many rows as were routed, got {tuple(x.shape)}")
    capacity = _capacity(op, routing) if padded else None
    return _dispatch(x, routing.experts, routing.offsets, routing.position, capacity)


def moe_combine(y: torch.Tensor, routing: Routing, *, padded: bool | None = None) -> torch.Tensor:
    """Adds up each row's copies, times their weights, in the order of its choices: back from moe_dispatch.

    Args:
        y: (rows*K, ...), or (E, capacity, ...) as moe_dispatch(padded=True) gives; the trailing shape may be another
            than what was dispatched; float32, bfloat16, float16 or float64; any strides, of which those that leave gaps
            within a row are copied first.
        routing: as dispatched; its weights may be others of the same shape (`routing._replace(weights=...)`), in any
            floating dtype.
        padded: whether y is (E, capacity, ...). None: as its shape says; a shape that may be either is a ValueError.
            Under torch.compile say it: reading it from the shape of a first batch can tie the graph to that shape.

    Returns:
        (rows, ...) in y's dtype, each row in memory as in y. Computed in float32 (float64 for float64) and rounded
        once. A row without copies is zeros.

    The backward gives the gradients of y and of the weights in one pass over memory; slots without a copy get 0. Saved:
    y, the weights and the routing's indices. First derivatives; a second one raises NotImplementedError, and so does
    forward-mode AD. The same bits on every run and for any number of threads.

    Raises:
        TypeError: y is not a dense tensor of one of these dtypes, routing not a Routing of int64 tensors and floating
            weights, padded not a bool or None.
        ValueError: another shape than was dispatched, or one that may be either, tensors on different devices; on the
            CPU indices that lie out of bounds, or positions that are not the places 0, 1, ... each once. On CUDA the
            row of a slot out of bounds becomes NaN and camox_ops.check_errors() raises."""
    op = "moe_combine"
    _check_routing(op, routing)
    _check.tensor(op, "y", y)
    _check_indices(op, routing, y, "y")
    weights = routing.weights
    if not isinstance(weights, torch.Tensor) or not weights.is_floating_point():
        found = weights.dtype if isinstance(weights, torch.Tensor) else type(weights).__name__
        raise TypeError(f"{op}: routing.weights must be a tensor of a floating dtype, got {found}")
    _check.same_device(op, "routing.weights", weights, y, "y")
    padded = _check_combined(op, y, routing, padded)
    weights = as_read(weights, _check.computed_in(y))
    capacity = _capacity(op, routing) if padded else None
    return _combine(y, weights, routing.experts, routing.offsets, routing.position, capacity)


def dispatch_unchecked(x: torch.Tensor, routing: Routing) -> torch.Tensor:
    """moe_dispatch without its checks in Python, which torch.compile refuses inside a backward."""
    return _dispatch(x, routing.experts, routing.offsets, routing.position, None)


def combine_unchecked(y: torch.Tensor, routing: Routing, weights: torch.Tensor) -> torch.Tensor:
    """moe_combine of y (rows*K, ...) without its checks in Python, with weights in the dtype that it computes in."""
    return _combine(y, weights, routing.experts, routing.offsets, routing.position, None)


def moe_aux_loss(
    routing: Routing, logits: torch.Tensor, kind: str = "switch", valid: torch.Tensor | None = None
) -> torch.Tensor:
    """A loss that keeps the experts in use, with its gradient to the logits.

    With p = softmax(logits), n the number of valid rows, f = counts/(n*K), and S[e] the sum of p over valid rows:

        switch          E * sum(f * S/n)
        importance_cv2  var(S, biased) / (mean(S)^2 + 1e-10)
        z               mean over valid rows of logsumexp(logits)^2
        usage_mse       0.01 * mean((counts/(rows*K + 1e-8) - 1/E)^2)

    Args:
        routing: what moe_route gave; its counts, which have no gradient, are read.
        logits: (rows, E), those that were routed.
        kind: one of the above. "usage_mse" is CamoXpert's and has no gradient at all: what is returned does not require
            one, so it moves no router.
        valid: (rows,) bool as given to moe_route; None: all rows.

    Returns:
        A scalar, float32 (float64 for float64 logits), in autocast too. 0 without valid rows, but for usage_mse.

    Saved for backward: the logits and one number an expert. First derivatives; a second one raises NotImplementedError,
    and so does forward-mode AD. The same bits on every run and for any number of threads. NaN logits give NaN.

    Raises:
        TypeError: routing is not a Routing, logits not a dense tensor of one of these dtypes, valid not a bool tensor.
        ValueError: logits of another shape than was routed, an unknown kind, valid of another shape, tensors on
            different devices.

    Sources: switch: arXiv 2101.03961, equation 4; importance_cv2: arXiv 1701.06538, equation 7; z: arXiv 2202.08906,
    equation 5; usage_mse: MoELayer of CamoXpert."""
    op = "moe_aux_loss"
    _check_routing(op, routing)
    _check_logits(op, logits)
    for name in ("experts", "counts"):
        _check_index(op, routing, name, logits, "logits")
    _check_top_k(op, routing.top_k, logits.shape[1])
    rows, num_experts = routing.experts.shape[0], routing.counts.shape[0]
    if logits.shape[0] != rows or logits.shape[1] != num_experts:
        raise ValueError(
            f"{op}: logits must have the shape that was routed, ({rows}, {num_experts}), got {tuple(logits.shape)}"
        )
    kind_code = code_of(op, "kind", kind, AUX_LOSSES)
    _check_valid(op, valid, logits)
    if kind == "usage_mse":
        logits = logits.detach()
    return _aux_loss(logits, routing.counts, valid, kind_code, routing.top_k)[0]


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


def _check_index(op: str, routing: Routing, name: str, x: torch.Tensor, of: str) -> None:
    """One of routing's index tensors, which must lie beside x, the argument `of`."""
    value, dimensions = getattr(routing, name), 2 if name == "experts" else 1
    title = f"routing.{name}"
    _check.tensor(op, title, value, dtypes=(torch.int64,))
    if value.dim() != dimensions:
        raise ValueError(f"{op}: {title} must have {dimensions} dimensions, got shape {tuple(value.shape)}")
    _check.same_device(op, title, value, x, of)


def _check_indices(op: str, routing: Routing, x: torch.Tensor, of: str) -> None:
    for name in ("experts", "offsets", "position"):
        _check_index(op, routing, name, x, of)


def check_capacity_factor(op: str, value) -> float:
    if isinstance(value, numbers.Real) and value > MOST_CAPACITY_FACTOR:
        raise ValueError(f"{op}: capacity_factor must be at most {MOST_CAPACITY_FACTOR}, got {value!r}")
    return _check.positive(op, "capacity_factor", value)


def _capacity(op: str, routing: Routing) -> int:
    """Without a limit an expert gets at most one copy of every row."""
    capacity = routing.capacity
    if capacity is None:
        return routing.experts.shape[0]
    if not isinstance(capacity, (int, torch.SymInt)):
        raise TypeError(f"{op}: routing.capacity must be an int or None, got {capacity!r}")
    return capacity


def _check_combined(op: str, y: torch.Tensor, routing: Routing, padded: bool | None) -> bool:
    """Whether y is (E, capacity, ...). A shape that is not asked about is not compared: that would guard a graph."""
    slots, places = routing.position.shape[0], (routing.offsets.shape[0] - 1, _capacity(op, routing))
    if padded is not None:
        _check.flag(op, "padded", padded)
    fits_sorted = padded is not True and y.dim() >= 1 and y.shape[0] == slots
    fits_padded = padded is not False and y.dim() >= 2 and y.shape[0] == places[0] and y.shape[1] == places[1]
    if padded is None:
        if fits_sorted and fits_padded:
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
    if not (fits_padded or fits_sorted):
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


def _fake_place(experts, valid, num_experts, capacity):
    slots = experts.shape[0] * experts.shape[1]
    return tuple(experts.new_empty((size,)) for size in (num_experts, num_experts + 1, slots, slots))


def _save_nothing(ctx, inputs, output):
    ctx.mark_non_differentiable(*output)


def _save_dispatch(ctx, inputs, output):
    _, *routed, ctx.capacity = inputs
    ctx.save_for_backward(*routed)
    ctx.set_materialize_grads(False)


def _dispatch_backward(ctx, grad):
    if grad is None:
        return (None,) * 5
    return _moe_dispatch_backward(grad, *ctx.saved_tensors, ctx.capacity, True), *(None,) * 4


def _fake_dispatch(x, experts, offsets, position, capacity):
    return empty_rows(x, 1, _outer(experts, offsets, capacity))


def _fake_rows(y, experts, offsets, position, capacity, checked=False):
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
    return *_moe_combine_backward(grad, *ctx.saved_tensors, ctx.capacity, True), *(None,) * 4


def _fake_combine_backward(grad, y, weights, experts, offsets, position, capacity, checked=False):
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


def _like_logits(grad, logits, *_):
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


_route = register(
    "moe_route",
    fake=_fake_route,
    setup_context=_save_route,
    backward=_route_backward,
)
_place = register(
    "moe_place",
    fake=_fake_place,
    setup_context=_save_nothing,
    backward=lambda ctx, *grads: (None,) * 4,
)
_dispatch = register(
    "moe_dispatch",
    fake=_fake_dispatch,
    setup_context=_save_dispatch,
    backward=_dispatch_backward,
)
_combine = register(
    "moe_combine",
    fake=lambda y, weights, *routed: _fake_rows(y, *routed),
    setup_context=_save_combine,
    backward=_combine_backward,
)
_aux_loss = register(
    "moe_aux_loss",
    fake=_fake_aux,
    setup_context=_save_aux,
    backward=_aux_backward,
)
_moe_route_backward = register_last_derivative("moe_route", fake=_like_logits)
_moe_dispatch_backward = register_last_derivative("moe_dispatch", fake=_fake_rows)
_moe_combine_backward = register_last_derivative("moe_combine", fake=_fake_combine_backward)
_moe_aux_loss_backward = register_last_derivative("moe_aux_loss", fake=_like_logits)
