"""A sparse mixture of feed-forward experts over tokens: every row through its top_k experts, as grouped products."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import nn

from .._torch_private import in_eager_transform
from ..ops import _check
from ..ops._codes import AUX_LOSSES, EXPERT_ACTIVATIONS, SCORES
from ..ops._register import last_derivative, no_samples, one_by_one
from ..ops.moe import (
    MOST_EXPERTS,
    Routing,
    check_capacity_factor,
    combine_unchecked,
    dispatch_unchecked,
    moe_aux_loss,
    moe_route,
)
from ._plain import FusedModule, not_plain
from .projections import project

NAME = "TokenMoE"
_cuda_product = getattr(F, "grouped_mm", None)


class TokenMoE(FusedModule):
    """Each row of x (..., dim) goes through top_k of num_experts feed-forward networks, weighted by its router.

        logits = x @ router.weight.T                  float32, also under autocast (float64 for float64)
        expert(x) = act(x @ w_in[e]) @ w_out[e]       "swiglu": silu(first half) * second half; "gelu": erf
        output = sum of weight * expert(x) over the row's experts, plus the shared expert of all rows

    Rows are sorted by expert once (moe_route, moe_dispatch); each expert is then one product over its rows for either
    of its matrices: on the CPU by the project's own kernels for float32 and by torch.mm for other dtypes; on CUDA by
    torch.nn.functional.grouped_mm, which does not wait for the device, for bfloat16 whose sizes are multiples of 8,
    else by torch.mm after the host has read the counts.

    Saved for backward of the experts: x itself, the product before the activation (rows*top_k, hidden; twice as wide
    for "swiglu"), the parameters, the routing's indices and weights. Copies of rows and activations are computed again;
    the experts' outputs are not needed, as the weights' gradients are taken of the hidden activations. First
    derivatives; a second one raises NotImplementedError.

    Args:
        dim: size of a row, D.
        hidden: H, of each expert.
        num_experts: E, 1 to 1024.
        top_k: experts of a row, 1 to E.
        activation: "swiglu" (w_in (E, D, 2H): first H columns gate, the others value) or "gelu" (w_in (E, D, H)).
        score: how weights come from logits, as for camox_ops.moe_route.
        capacity_factor: an expert takes at most ceil(capacity_factor * rows * top_k / E) rows; later ones lose that
            expert's share. None: no limit, nothing is dropped.
        shared_hidden: H of an expert that all rows go through, with weight 1; None: none.
        aux_loss: the second result: a kind of camox_ops.moe_aux_loss, or {kind: factor} for the sum of several, or None
            for 0.
        router_bias: loss-free balancing (arXiv 2408.15664): a bias of the experts that is added to their scores (the
            sigmoids for "sigmoid_topk", else the softmax) where experts are chosen, never to the weights. It has no
            gradient; call update_router_bias() after each optimizer step. Usually with aux_loss=None.
        jitter: in training the router sees x times numbers drawn from [1 - jitter, 1 + jitter]; 0 to below 1.
        device, dtype: of the parameters.

    state_dict: router.weight (E, D), w_in (E, D, H or 2H), w_out (E, H, D); with a shared expert shared_in and
    shared_out, of the same shapes without E; with router_bias the buffer router_bias (E,) float32.

    The router's weight is read; a router with hooks or an adapter, or another module in its place, is called instead,
    with rows and for logits in the parameters' dtype: see camox_ops.nn.why_not_fused. router_bias stays float32 where
    the module is moved to another dtype.

        >>> layer = camox_ops.nn.TokenMoE(512, 1024, num_experts=16, top_k=2, shared_hidden=512)
        >>> output, aux_loss, info = layer(torch.randn(4, 128, 512))
        >>> (output.square().mean() + 0.01 * aux_loss).backward()

    Raises:
        TypeError, ValueError: an argument of another type or out of its range, by name."""

    def __init__(
        self,
        dim: int,
        hidden: int,
        num_experts: int = 8,
        top_k: int = 2,
        *,
        activation: str = "swiglu",
        score: str = "topk_softmax",
        capacity_factor: float | None = None,
        shared_hidden: int | None = None,
        aux_loss: str | Mapping[str, float] | None = "switch",
        router_bias: bool = False,
        jitter: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        sizes = {"dim": dim, "hidden": hidden, "num_experts": num_experts, "top_k": top_k}
        if shared_hidden is not None:
            sizes["shared_hidden"] = shared_hidden
        for name, value in sizes.items():
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{NAME}: {name} must be an int, got {value!r}")
            if value < 1:
                raise ValueError(f"{NAME}: {name} must be >= 1, got {value}")
        if num_experts > MOST_EXPERTS:
            raise ValueError(f"{NAME}: num_experts must be at most {MOST_EXPERTS}, got {num_experts}")
        if top_k > num_experts:
            raise ValueError(f"{NAME}: top_k must be at most num_experts={num_experts}, got {top_k}")
        _check.choice(NAME, "activation", activation, EXPERT_ACTIVATIONS)
        _check.choice(NAME, "score", score, SCORES)
        if capacity_factor is not None:
            check_capacity_factor(NAME, capacity_factor)
        _check.flag(NAME, "router_bias", router_bias)
        self.aux_losses = _factors(aux_loss)
        if isinstance(jitter, bool) or not isinstance(jitter, (int, float)):
            raise TypeError(f"{NAME}: jitter must be a number, got {jitter!r}")
        if not 0 <= jitter < 1:
            raise ValueError(f"{NAME}: jitter must be at least 0 and below 1, got {jitter}")
        self.dim, self.hidden, self.num_experts, self.top_k = dim, hidden, num_experts, top_k
        self.activation, self.score, self.capacity_factor = activation, score, capacity_factor
        self.shared_hidden, self.jitter = shared_hidden, float(jitter)
        factory = {"device": device, "dtype": dtype}
        wide = 2 if activation == "swiglu" else 1
        self.router = nn.Linear(dim, num_experts, bias=False, **factory)
        self.w_in = nn.Parameter(torch.empty(num_experts, dim, wide * hidden, **factory))
        self.w_out = nn.Parameter(torch.empty(num_experts, hidden, dim, **factory))
        if shared_hidden is None:
            self.register_parameter("shared_in", None)
            self.register_parameter("shared_out", None)
        else:
            self.shared_in = nn.Parameter(torch.empty(dim, wide * shared_hidden, **factory))
            self.shared_out = nn.Parameter(torch.empty(shared_hidden, dim, **factory))
        bias = torch.zeros(num_experts, device=device) if router_bias else None
        self.register_buffer("router_bias", bias)
        # What each expert got in training since the last update_router_bias().
        self.register_buffer("expert_load", None if bias is None else bias.clone(), persistent=False)
        self.exchange = None  # set by expert_parallel
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform within 1/sqrt(inputs), as nn.Linear."""
        self.router.reset_parameters()
        for weight in (self.w_in, self.w_out, self.shared_in, self.shared_out):
            if weight is not None:
                bound = weight.shape[-2] ** -0.5
                nn.init.uniform_(weight, -bound, bound)
        if self.router_bias is not None:
            nn.init.zeros_(self.router_bias)
            nn.init.zeros_(self.expert_load)

    def _apply(self, fn, recurse=True):
        """Counts of rows, and steps of a bias, are more than a half type can add up."""
        before = {name: self._buffers[name] for name in ("router_bias", "expert_load")}
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            moved = self._buffers[name]
            if buffer is not None and moved.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(moved.device)
        return self

    def why_not_fused(self) -> list[str]:
        reason = not_plain(self.router, nn.Linear)
        return [] if reason is None else [f"router {reason}"]

    def extra_repr(self) -> str:
        return (
            f"dim={self.dim}, hidden={self.hidden}, num_experts={self.num_experts}, top_k={self.top_k}, "
            f"activation={self.activation!r}, score={self.score!r}, capacity_factor={self.capacity_factor}, "
            f"shared_hidden={self.shared_hidden}, aux_loss={self.aux_losses}, "
            f"router_bias={self.router_bias is not None}, jitter={self.jitter}"
        )

    def forward(
        self, x: torch.Tensor, *, valid: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """x (..., dim) -> (output like x, aux_loss (), routing_info).

        valid: x.shape[:-1] bool, False for rows (padding) that no expert gets and no loss counts; their output is that
        of the shared expert, or 0. routing_info, detached: `top_k_indices` (rows, top_k) int64, best first;
        `top_k_weights` (rows, top_k), 0 without a copy; `expert_usage` (E,) float32, rows that each expert took.

        NaN among the logits of a valid row: as moe_route, ValueError on the CPU."""
        if self.exchange is not None:
            return self.exchange.run(self, x, valid)
        rows, kept = self.checked(x, valid)
        routing, logits = self.route(rows, kept)
        self.count(routing)
        output = run_experts(rows, routing, self.w_in, self.w_out, self.activation)
        shared = self.shared(rows)
        if shared is not None:
            output = output + shared
        aux_loss = logits.new_zeros(())
        for kind, factor in self.aux_losses.items():
            aux_loss = aux_loss + factor * moe_aux_loss(routing, logits, kind, kept)
        return output.view(x.shape), aux_loss, self.info(routing)

    def checked(self, x, valid) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(rows, dim) and (rows,) of the arguments of forward."""
        _check.tensor(NAME, "x", x)
        if x.dim() < 1 or x.shape[-1] != self.dim:
            raise ValueError(f"{NAME}: x must have shape (..., {self.dim}), got {tuple(x.shape)}")
        autocast = x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)
        alike = (x.dtype == torch.float64) == (self.w_in.dtype == torch.float64)  # float64 is none that autocast casts
        if x.dtype != self.w_in.dtype and not (autocast and alike):
            names = _check.dtype_names(self.w_in.dtype), _check.dtype_names(x.dtype)
            raise TypeError(f"{NAME}: x must have the parameters' dtype, {names[0]}, got {names[1]}")
        if valid is not None:
            _check.tensor(NAME, "valid", valid, dtypes=(torch.bool,))
            if valid.shape != x.shape[:-1]:
                raise ValueError(f"{NAME}: valid must have shape {tuple(x.shape[:-1])}, got {tuple(valid.shape)}")
            _check.same_device(NAME, "valid", valid, x)
            valid = valid.reshape(-1)
        return x.reshape(-1, self.dim), valid

    def route(self, rows: torch.Tensor, valid: torch.Tensor | None, *, capacity: bool = True):
        """The Routing of rows (rows, dim), and their logits. capacity: whether capacity_factor holds."""
        real = _check.computed_in(rows)
        with _no_autocast(rows):
            seen = rows.to(real)
            if valid is not None:  # those of padding may be NaN, which 0 times them leaves in the router's gradient
                seen = seen.masked_fill(~valid.unsqueeze(1), 0)
            if self.training and self.jitter:
                seen = seen * torch.empty_like(seen).uniform_(1 - self.jitter, 1 + self.jitter)
            if self.why_not_fused():
                logits = self.router(seen.to(self.w_in.dtype)).to(real)
            else:
                logits = F.linear(seen, self.router.weight.to(real))
            factor = self.capacity_factor if capacity else None
            options = {"capacity_factor": factor, "valid": valid}
            if self.router_bias is None:
                return moe_route(logits, self.top_k, score=self.score, **options), logits
            scores = logits.sigmoid() if self.score == "sigmoid_topk" else logits.softmax(1)
            routing = moe_route(scores.detach() + self.router_bias, self.top_k, **options)
            if self.score in ("topk_softmax", "softmax_topk_renorm"):
                weights = logits.gather(1, routing.experts).softmax(1)
            else:
                weights = scores.gather(1, routing.experts)
            dropped = (routing.position < 0).view(weights.shape)
            return routing._replace(weights=weights.masked_fill(dropped, 0)), logits

    def count(self, routing: Routing) -> None:
        """What each expert got, for update_router_bias."""
        if self.expert_load is None or not self.training:
            return
        try:
            self.expert_load += routing.counts
        except RuntimeError as error:
            if in_eager_transform(routing.counts):
                raise ValueError(
                    f"{NAME}: in training router_bias=True adds to the buffer expert_load, which torch.func must be "
                    "given as an argument, and vmap for each sample: functional_call with the buffers too, or eval()"
                ) from error
            raise

    def shared(self, rows: torch.Tensor) -> torch.Tensor | None:
        if self.shared_in is None:
            return None
        return project(_activate(project(rows, self.shared_in), self.activation), self.shared_out)

    def info(self, routing: Routing) -> dict[str, torch.Tensor]:
        return {
            "top_k_indices": routing.experts,
            "top_k_weights": routing.weights.detach(),
            "expert_usage": routing.counts.float(),
        }

    @torch.no_grad()
    def update_router_bias(self, rate: float = 1e-3, group=None) -> None:
        """Adds rate to the bias of experts that got less than the mean since the last call, subtracts it from those of
        others that got more. Call it after each optimizer step of a module with router_bias=True. (Forwards that
        checkpointing runs again count again, for all experts alike.)

        group: a ProcessGroup over which the loads are summed first; without one that of expert_parallel, if any."""
        if self.router_bias is None:
            raise ValueError(f"{NAME}: update_router_bias needs a module with router_bias=True")
        rate = _check.positive(NAME, "rate", rate)
        if group is None and self.exchange is not None:
            group = self.exchange.group
        if group is not None:
            torch.distributed.all_reduce(self.expert_load, group=group)
        self.router_bias += rate * torch.sign(self.expert_load.mean() - self.expert_load)
        self.expert_load.zero_()


def _factors(aux_loss) -> dict[str, float]:
    """{kind: factor} of the argument aux_loss."""
    if aux_loss is None:
        return {}
    if not isinstance(aux_loss, (str, Mapping)):
        raise TypeError(f"{NAME}: aux_loss must be a str, a mapping or None, got {aux_loss!r}")
    found = dict(aux_loss) if isinstance(aux_loss, Mapping) else {aux_loss: 1.0}
    for kind, factor in found.items():
        _check.choice(NAME, "aux_loss", kind, AUX_LOSSES)
        if isinstance(factor, bool) or not isinstance(factor, (int, float)):
            raise TypeError(f"{NAME}: aux_loss must have numbers as factors, got {factor!r} for {kind!r}")
    return found


def _no_autocast(x: torch.Tensor):
    return contextlib.nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


# ---- the experts ----
def run_experts(
    x: torch.Tensor, routing: Routing, w_in: torch.Tensor, w_out: torch.Tensor, activation: str
) -> torch.Tensor:
    """x (rows, D) through the experts of its routing -> (rows, D), weighted sums; autocast casts x, w_in and w_out."""
    x, w_in, w_out = _check.autocast(x, w_in, w_out)
    tensors = routing.experts, routing.counts, routing.offsets, routing.order, routing.position
    weights = routing.weights.to(_check.computed_in(x))
    if in_eager_transform(x, w_in, w_out, weights):
        return _TransformedExperts.apply(x, w_in, w_out, weights, *tensors, activation)[0]
    return _Experts.apply(x, w_in, w_out, weights, *tensors, activation)


def _forward(x, w_in, w_out, weights, experts, counts, offsets, order, position, activation):
    """The weighted sums, and the first products."""
    routing = _routing(weights, experts, counts, offsets, order, position)
    h = _products(dispatch_unchecked(x, routing), w_in, offsets)
    y = _products(_activated(h, activation), w_out, offsets)
    return combine_unchecked(y, routing, weights), h


class _Experts(torch.autograd.Function):
    """Copies of the rows -> products, activation, products -> weighted sums; only the first products are kept."""

    @staticmethod
    def forward(ctx, *args):
        output, h = _forward(*args)
        *tensors, ctx.activation = args
        ctx.save_for_backward(*tensors, h)
        return output

    @staticmethod
    @last_derivative(NAME)
    def backward(ctx, grad):
        x, w_in, w_out, weights, *indices, h = ctx.saved_tensors
        needs_x, needs_in, needs_out, needs_weights = ctx.needs_input_grad[:4]
        routing = _routing(weights, *indices)
        offsets, order, position = routing.offsets, routing.order, routing.position
        grads = dispatch_unchecked(grad, routing)
        # A place without a copy has weight 0 here, whatever the products left there.
        scale = weights.flatten()[order.clamp(min=0)].masked_fill(order < 0, 0)
        grad_a = _products(grads, w_out.mT, offsets)
        a, grad_h, dots = _activation_backward(h, grad_a, scale, ctx.activation)
        grad_weights = grad_out = grad_in = grad_x = None
        if needs_weights:
            grad_weights = dots[position.clamp(min=0)].masked_fill(position < 0, 0).view(weights.shape)
        if needs_out:
            grad_out = _gradient_like(w_out, a, grads, offsets)
        if needs_in:
            grad_in = _gradient_like(w_in, dispatch_unchecked(x, routing), grad_h, offsets)
        if needs_x:
            grad_x = combine_unchecked(_products(grad_h, w_in.mT, offsets), routing, torch.ones_like(weights))
        return grad_x, grad_in, grad_out, grad_weights, *(None,) * 6


class _TransformedExperts(torch.autograd.Function):
    """_Experts as torch.func needs it, which looks at what a Function saves: the first products are an output."""

    generate_vmap_rule = True
    forward = staticmethod(_forward)

    @staticmethod
    def setup_context(ctx, inputs, outputs):
        *tensors, ctx.activation = inputs
        ctx.mark_non_differentiable(outputs[1])
        ctx.save_for_backward(*tensors, outputs[1])

    @staticmethod
    def backward(ctx, grad, _):
        return _Experts.backward(ctx, grad)


def _routing(weights, experts, counts, offsets, order, position) -> Routing:
    return Routing(weights, experts, counts, offsets, order, position, counts.shape[0], experts.shape[1], None)


def _activate(h: torch.Tensor, activation: str) -> torch.Tensor:
    if activation == "gelu":
        return F.gelu(h)
    gate, value = h.chunk(2, -1)
    return F.silu(gate) * value


def _activated(h: torch.Tensor, activation: str) -> torch.Tensor:
    """_activate without derivatives, in one pass on the CPU."""
    if h.is_cuda:
        return _activate(h, activation)
    return torch.ops.camox_ops.moe_activation(h, EXPERT_ACTIVATIONS[activation])


def _activation_backward(h, grad_a, scale, activation):
    """(scale * a, the gradient of h for the gradient scale * grad_a of a, the sums of grad_a * a in a row)."""
    if h.is_cuda:
        return _plain_activation_backward(h, grad_a, scale, activation)
    return torch.ops.camox_ops.moe_activation_backward(h, grad_a, scale, EXPERT_ACTIVATIONS[activation])


def _plain_activation_backward(h, grad_a, scale, activation):
    """The same in torch's operators."""
    real = _check.computed_in(h)
    scale = scale.to(h.dtype)[:, None]
    if activation == "gelu":
        a = F.gelu(h)
        dots = (grad_a * a).sum(-1, dtype=real)
        return a * scale, torch.ops.aten.gelu_backward(grad_a * scale, h), dots
    gate, value = h.chunk(2, -1)
    silu = F.silu(gate)
    a = silu * value
    dots = (grad_a * a).sum(-1, dtype=real)
    grad_a = grad_a * scale
    grad_h = torch.cat((torch.ops.aten.silu_backward(grad_a * value, gate), grad_a * silu), -1)
    return a * scale, grad_h, dots


def _products(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """a (N, K) sorted by expert, b (E, K, M) -> (N, M); past the last expert's rows anything."""
    if not a.is_cuda:
        return torch.ops.camox_ops.moe_experts_mm(a, b, offsets)
    if _is_grouped(a, b):
        return _cuda_product(a, b, offs=offsets[1:].int())
    out = a.new_zeros((a.shape[0], b.shape[2]))
    for expert, (begin, end) in enumerate(_ranges(offsets)):
        torch.mm(a[begin:end], b[expert], out=out[begin:end])
    return out


def _transposed_products(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """a (N, K), b (N, M) -> (E, K, M), each expert's a^T b."""
    if not a.is_cuda:
        return torch.ops.camox_ops.moe_experts_mm_tn(a, b, offsets)
    if _is_grouped(a, b):
        return _cuda_product(a.t(), b, offs=offsets[1:].int())
    return torch.stack([torch.mm(a[begin:end].t(), b[begin:end]) for begin, end in _ranges(offsets)])


def _gradient_like(w: torch.Tensor, a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """_transposed_products, in memory as w is: autograd copies the gradient of a parameter that has other strides."""
    if w.stride(1) < w.stride(2):
        return _transposed_products(b, a, offsets).mT
    return _transposed_products(a, b, offsets)


def _is_grouped(a: torch.Tensor, b: torch.Tensor) -> bool:
    return grouped_product_serves(a.dtype, (a.shape[1], *b.shape[1:]))


def grouped_product_serves(dtype: torch.dtype, sizes: Iterable[int]) -> bool:
    """Whether torch's grouped product serves without waiting for the counts: addresses in steps of 16 bytes."""
    return _cuda_product is not None and dtype == torch.bfloat16 and all(size % 8 == 0 for size in sizes)


def _ranges(offsets: torch.Tensor) -> list[tuple[int, int]]:
    return list(itertools.pairwise(offsets.tolist()))


def _hidden(h, activation: int):
    return h.shape[1] // 2 if activation == EXPERT_ACTIVATIONS["swiglu"] else h.shape[1]


torch.library.register_fake("camox_ops::moe_experts_mm", lambda a, b, offsets: a.new_empty((a.shape[0], b.shape[2])))
torch.library.register_fake(
    "camox_ops::moe_experts_mm_tn",
    lambda a, b, offsets: a.new_empty((offsets.shape[0] - 1, a.shape[1], b.shape[1])),
)
torch.library.register_fake(
    "camox_ops::moe_activation",
    lambda h, activation: h.new_empty((h.shape[0], _hidden(h, activation))),
)
torch.library.register_fake(
    "camox_ops::moe_activation_backward",
    lambda h, grad, scale, activation: (
        h.new_empty((h.shape[0], _hidden(h, activation))),
        h.new_empty(h.shape),
        h.new_empty((h.shape[0],), dtype=_check.computed_in(h)),
    ),
)


def _vmap_of(name: str):
    overload = getattr(torch.ops.camox_ops, name).default

    def rule(info, in_dims, *args):
        return one_by_one(overload, info, in_dims, args) if info.batch_size else no_samples(overload, in_dims, args)

    return rule


for _name in ("moe_experts_mm", "moe_experts_mm_tn", "moe_activation", "moe_activation_backward"):
    torch.library.register_vmap(f"camox_ops::{_name}", _vmap_of(_name))
