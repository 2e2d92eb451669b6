"""The forward of experts that are divided among ranks: what expert_parallel gives to a layer."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ..ops import _check
from ..ops.moe import Routing, moe_combine, moe_dispatch, moe_route, moe_routing
from .moe import MoELayer
from .token_moe import TokenMoE, run_experts


@contextlib.contextmanager
def failures(name: str, what: str):
    """Errors of torch.distributed, its timeouts among them, say which layer they belong to."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(f"{name}: {what} with the other ranks of its experts failed: {error}") from error


UNKNOWN = 0
# Of a rank, before its counts: failed, rows with gradient, rows; what must be alike; the experts' two fingerprints.
ALIKE, FACTS = 8, 10


def fingerprint(layer: nn.Module) -> int:
    """A number that tells different experts apart; UNKNOWN where they have no values yet, or are divided once more."""
    total = UNKNOWN
    for parameter in (layer.w_in, layer.w_out) if isinstance(layer, TokenMoE) else layer.experts.parameters():
        if parameter.is_meta or hasattr(parameter, "to_local"):
            return UNKNOWN
        bits = parameter.detach().contiguous().view(-1).view(torch.uint8)
        integer = torch.int64 if len(bits) % 8 == 0 else torch.int16 if len(bits) % 2 == 0 else torch.uint8
        total += int(bits.view(integer).sum(dtype=torch.int64))
    return (total + 2**63) % 2**64 - 2**63


class _Plan(NamedTuple):
    """What all ranks know of one forward."""

    kept: torch.Tensor
    """(ranks, E) int64 on the CPU: copies of each rank's rows to each expert, after capacity."""
    rows: int
    """of all ranks"""
    any_gradient: bool


class Exchange:
    """A layer's part in its process group."""

    def __init__(self, layer: nn.Module, group, mesh):
        self.name = f"{type(layer).__name__} (expert_parallel)"
        self.group, self.mesh = group, mesh
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.num_experts = layer.num_experts
        self.first = self.rank * layer.num_experts // self.ranks
        self.last = (self.rank + 1) * layer.num_experts // self.ranks
        self.given = UNKNOWN  # fingerprint of their values as they were divided or loaded, until they are checked
        self.checked = False

    def __deepcopy__(self, memo) -> Exchange:
        """Of a copy of the layer, such as an average of its weights: in the same group, which cannot be copied."""
        duplicate = Exchange.__new__(Exchange)
        duplicate.__dict__.update(self.__dict__)
        memo[id(self)] = duplicate
        return duplicate

    def __reduce_ex__(self, protocol):
        raise TypeError(
            f"{self.name}: a module whose experts are divided cannot be pickled, as its process group cannot: "
            "save its state_dict()"
        )

    def remember(self, layer: nn.Module) -> None:
        """The experts have been given the values that they have now."""
        self.given = fingerprint(layer)

    # ---- a forward ----
    @torch.compiler.disable
    def run(self, layer: TokenMoE, x: torch.Tensor, valid: torch.Tensor | None):
        """TokenMoE.forward"""

        def route():
            rows, kept = layer.checked(x, valid)
            return _check.autocast(rows)[0], kept, *layer.route(rows, kept, capacity=False)

        (rows, kept, routing, logits), plan = self.agree(layer, route, layer.router.weight.device)
        routing = self.limited(routing, plan)
        layer.count(routing)
        received, landed = self.start(moe_dispatch(rows, routing), plan)
        shared = layer.shared(rows)
        landed()
        one_each = self.received_routing(plan, received)
        mixed = run_experts(received, one_each, layer.w_in, layer.w_out, layer.activation)
        output = self.finish(mixed, plan, rows.shape[0] * layer.top_k, routing)
        if shared is not None:
            output = output + shared
        aux_loss = self.aux_loss(layer.aux_losses, logits, kept, plan, layer.top_k)
        return output.view(x.shape), aux_loss, layer.info(routing)

    @torch.compiler.disable
    def run_images(self, layer: MoELayer, x: torch.Tensor):
        """MoELayer.forward"""

        def route():
            logits = layer.logits_of(x)
            return x, None, moe_route(logits, layer.top_k, score=layer.score), logits

        device = layer.gate[1].weight.device
        (rows, _, routing, logits), plan = self.agree(layer, route, device)
        routing = self.limited(routing, plan)
        received, landed = self.start(moe_dispatch(rows, routing), plan)
        landed()
        one_each = self.received_routing(plan, received)
        parts = [received[:0]] * layer.num_experts
        sizes = plan.kept[:, self.first : self.last].sum(0).tolist()
        parts[self.first : self.last] = torch.unsafe_split_with_sizes(moe_dispatch(received, one_each), sizes)
        results = layer.run_parts(parts, x.dtype)
        mixed = moe_combine(torch.cat(results) if results else received, one_each, padded=False).to(x.dtype)
        output = self.finish(mixed, plan, x.shape[0] * layer.top_k, routing)
        aux_loss = layer.reported(self.aux_loss({layer.aux_loss: 1.0}, logits, None, plan, layer.top_k))
        return output.to(x.dtype), aux_loss, layer.info(routing, logits)

    def agree(self, layer: nn.Module, route: Callable, device: torch.device):
        """(what route() returns, plan). An error of one rank becomes one of every rank."""
        error = None
        facts, counts = [1, *[0] * (FACTS - 1)], torch.zeros(self.num_experts, dtype=torch.int64, device=device)
        try:
            routed = route()
            rows, counts = routed[0], routed[2].counts
            shape = [*rows.shape[1:], 0, 0, 0][:3]
            gradient = torch.is_grad_enabled()
            unchecked = gradient and not self.checked
            facts = [
                0,
                gradient and rows.requires_grad,
                rows.shape[0],
                gradient,
                _check.DTYPES.index(rows.dtype),
                *shape,
                self.given if unchecked else UNKNOWN,
                fingerprint(layer) if unchecked else UNKNOWN,
            ]
            top_k = routed[2].top_k
        except Exception as own:  # whatever it is, the others must hear of it before they wait for rows
            error = own
        mine = torch.cat((torch.tensor(facts, device=device), counts))
        every = [torch.empty_like(mine) for _ in range(self.ranks)]
        with failures(self.name, "the exchange of counts"):
            dist.all_gather(every, mine, group=self.group)
        table = torch.stack(every).cpu()
        if error is not None:
            raise error
        for rank, (failed, _, _, *alike) in enumerate(table[:, :ALIKE].tolist()):
            if failed:
                raise RuntimeError(f"{self.name}: rank {rank} has failed before the exchange; its own error says why")
            if alike != table[0, 3:ALIKE].tolist():
                raise ValueError(
                    f"{self.name}: ranks must agree on the rows, got {_described(table[0])} on rank 0 and "
                    f"{_described(table[rank])} on rank {rank}"
                )
        self.refuse_merged(table[:, ALIKE:FACTS].tolist())
        self.checked = self.checked or gradient
        counts, rows = table[:, FACTS:], int(table[:, 2].sum())
        if layer.capacity_factor is not None:
            capacity = math.ceil(layer.capacity_factor * rows * top_k / self.num_experts)
            counts = counts.cumsum(0).clamp(max=capacity).diff(dim=0, prepend=counts.new_zeros(1, self.num_experts))
        return routed, _Plan(counts, rows, bool(table[:, 1].any()))

    def refuse_merged(self, fingerprints: list[list[int]]) -> None:
        """A wrapper that takes the experts for copies of one model gives all ranks the same, and would say nothing."""
        first = {}
        for rank, (given, now) in enumerate(fingerprints):
            other = first.setdefault(now, rank)
            if now != UNKNOWN and UNKNOWN not in (given, fingerprints[other][0]) and given != fingerprints[other][0]:
                raise RuntimeError(
                    f"{self.name}: ranks {other} and {rank} had different experts when they were divided or loaded and "
                    "have the same now: DistributedDataParallel or fully_shard has taken them for one model's. Give "
                    "their parameters as fully_shard's ignored_params, or DistributedDataParallel what expert_parallel "
                    "returned"
                )

    def limited(self, routing: Routing, plan: _Plan) -> Routing:
        """routing without the copies that the capacity has dropped: the last ones of an expert."""
        kept = plan.kept[self.rank].to(routing.counts.device)
        experts = routing.experts.flatten()
        rank = routing.position - routing.offsets[experts]
        stays = (routing.position >= 0) & (rank < kept[experts])
        offsets = F.pad(kept.cumsum(0), (1, 0))
        position = torch.where(stays, offsets[experts] + rank, -1)
        order = torch.full_like(routing.order, -1)
        order[position[stays]] = stays.nonzero().flatten()
        weights = routing.weights.masked_fill(~stays.view(routing.weights.shape), 0)
        return routing._replace(weights=weights, counts=kept, offsets=offsets, order=order, position=position)

    def sizes(self, plan: _Plan) -> tuple[list[int], list[int]]:
        """Copies that this rank sends to each rank, and that it gets from each."""
        send = plan.kept[self.rank].view(self.ranks, -1).sum(1).tolist()
        return send, plan.kept[:, self.first : self.last].sum(1).tolist()

    def start(self, copies: torch.Tensor, plan: _Plan):
        """(what arrives, once the second is called); the copies are on their way until then."""
        send, receive = self.sizes(plan)
        copies = copies[: sum(send)]
        if plan.any_gradient and not copies.requires_grad:
            copies = copies.detach().requires_grad_()  # each rank takes part in the backward exchange
        works = []
        received = _Travel.apply(copies, self, send, receive, works)
        return _scale_gradient(received, float(self.ranks)), works.pop()

    def finish(self, mixed: torch.Tensor, plan: _Plan, slots: int, routing: Routing) -> torch.Tensor:
        """The experts' results on their way back, and added up."""
        send, receive = self.sizes(plan)
        works = []
        back = _Travel.apply(_scale_gradient(mixed, 1 / self.ranks), self, receive, send, works)
        works.pop()()
        unused = back.new_zeros((slots - back.shape[0], *back.shape[1:]))
        return moe_combine(torch.cat((back, unused)) if len(unused) else back, routing, padded=False)

    def received_routing(self, plan: _Plan, received: torch.Tensor) -> Routing:
        """Sorts by expert what has come sorted by rank first."""
        own = plan.kept[:, self.first : self.last]
        numbers = torch.arange(own.shape[1]).repeat(self.ranks).repeat_interleave(own.flatten())
        ones = torch.ones((len(numbers), 1), dtype=_check.computed_in(received), device=received.device)
        return moe_routing(ones, numbers[:, None].to(received.device), own.shape[1])

    def all_to_all(self, rows: torch.Tensor, send: list[int], receive: list[int]):
        """(what arrives, the function that waits for it)"""
        flat = rows.reshape(rows.shape[0], math.prod(rows.shape[1:])).contiguous()
        out = flat.new_empty((sum(receive), flat.shape[1]))
        given, taken = flat.view(torch.uint8), out.view(torch.uint8)  # gloo does not know every dtype
        with failures(self.name, "the exchange of rows"):
            work = dist.all_to_all_single(taken, given, receive, send, group=self.group, async_op=True)

        def wait(kept=given):
            with failures(self.name, "the exchange of rows"):
                work.wait()

        return out.view(-1, *rows.shape[1:]) if out.numel() else rows.new_empty((sum(receive), *rows.shape[1:])), wait

    # ---- losses ----
    def aux_loss(self, factors, logits, valid, plan: _Plan, top_k: int) -> torch.Tensor:
        """The losses of camox_ops.moe_aux_loss over the rows of all ranks: one sum over the ranks for all of them."""
        logits = logits.to(_check.computed_in(logits))  # a half type could not even count the rows
        total = logits.new_zeros(())
        if not factors:
            return total
        number = logits.new_full((1,), logits.shape[0])
        if valid is not None:
            logits, number = logits.masked_fill(~valid[:, None], 0), valid.sum()[None].to(logits.dtype)
        shares, squares = logits.softmax(1), logits.logsumexp(1).square()
        if valid is not None:
            shares, squares = shares * valid[:, None], squares * valid
        sums = _SumOverRanks.apply(torch.cat((shares.sum(0), squares.sum()[None], number)), self)
        importance, squares, number = sums[:-2], sums[-2], sums[-1].detach().clamp(min=1)
        counts = plan.kept.sum(0).to(sums)
        for kind, factor in factors.items():
            if kind == "switch":
                loss = self.num_experts * (counts / (number * top_k) * importance / number).sum()
            elif kind == "importance_cv2":
                loss = importance.var(correction=0) / (importance.mean() ** 2 + 1e-10)
            elif kind == "z":
                loss = squares / number
            else:
                loss = 0.01 * (counts / (plan.rows * top_k + 1e-8) - 1 / self.num_experts).square().mean()
            total = total + factor * loss
        return total


def _described(facts: torch.Tensor) -> str:
    gradient, dtype, *shape = facts[3:8].tolist()
    shape = ", ".join(str(size) for size in shape if size)
    return f"({shape}) {_check.dtype_names(_check.DTYPES[dtype])} {'with' if gradient else 'without'} gradients"


class _Travel(torch.autograd.Function):
    """Rows to other ranks; in the backward, their gradients the same way back."""

    @staticmethod
    def forward(ctx, rows, exchange, send, receive, works):
        ctx.exchange, ctx.send, ctx.receive = exchange, send, receive
        received, wait = exchange.all_to_all(rows, send, receive)
        works.append(wait)
        return received

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        returned, wait = ctx.exchange.all_to_all(grad, ctx.receive, ctx.send)
        wait()
        return returned, None, None, None, None


class _SumOverRanks(torch.autograd.Function):
    """Every rank's loss has the sum, with the same gradient: each rank gets theirs from all."""

    @staticmethod
    def forward(ctx, x, exchange):
        ctx.ranks = exchange.ranks
        total = x.clone()
        with failures(exchange.name, "the sum of the losses"):
            dist.all_reduce(total, group=exchange.group)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return grad * ctx.ranks, None


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


def _scale_gradient(x: torch.Tensor, factor: float) -> torch.Tensor:
    """x, whose gradient is multiplied by factor. Between two of them, of n and 1/n, parameters get 1/n of theirs."""
    return x if factor == 1 else _ScaledGradient.apply(x, factor)
