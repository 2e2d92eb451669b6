"""Experts divided among the ranks of a process group: rows travel to the rank of their expert and back."""

from __future__ import annotations

import contextlib
import itertools
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

NAME = "expert_parallel"
SHARDED = ("w_in", "w_out")  # of TokenMoE, along their experts


def expert_parallel(module: nn.Module, mesh_or_group) -> nn.Module:
    """Divides the experts of every TokenMoE and MoELayer in module among the ranks of a process group, in place.

    Each rank keeps experts [rank*E/ranks, (rank+1)*E/ranks) and routes its own rows. A forward exchanges one vector of
    counts, sends every copy of a row to the rank of its expert (all_to_all), computes TokenMoE's shared expert while
    the rows travel, and sends the results back, where they are weighted and added up. capacity_factor and the auxiliary
    losses count the rows of all ranks, in the order of the ranks: outputs, losses and which rows are dropped are those
    of one process that has all rows. A rank may have no rows. gloo on CPUs, NCCL on GPUs.

    Gradients are those of the mean of the ranks' losses, which is what DistributedDataParallel and FSDP2 give to all
    other parameters: those of a rank's experts come complete out of backward and must not be averaged again; router,
    shared expert and the rest of the model are averaged over the ranks by the wrapper that the model has anyway. The
    auxiliary loss is the same number on every rank; add it to every rank's loss with the same factor. Each rank must
    run the same forwards and backwards.

        >>> mesh = torch.distributed.init_device_mesh("cpu", (world_size,))
        >>> torch.manual_seed(0)                                  # the same weights on every rank
        >>> model = camox_ops.nn.expert_parallel(Model(), mesh)
        >>> model = DistributedDataParallel(model)                # leaves the experts alone

    With FSDP2 pass the experts as `ignored_params`. With data parallelism over further ranks (mesh["data", "experts"])
    the experts' gradients are averaged over "data" by whoever averages the others.

    Args:
        module: a TokenMoE or MoELayer or a module that contains some, with equal weights on all ranks.
        mesh_or_group: a ProcessGroup, or a DeviceMesh of one dimension.

    Returns:
        module. Its state_dict has TokenMoE's w_in and w_out as DTensors that are sharded along the experts, and a
        MoELayer's own experts alone: torch.distributed.checkpoint saves and loads them at any number of ranks.
        load_state_dict also takes whole tensors. DistributedDataParallel(module) ignores the experts' parameters.

    Raises:
        TypeError: module has no such layer, mesh_or_group is of another type.
        ValueError, on every rank: a number of experts that the ranks do not divide, ranks that disagree on the layers,
            a mesh of several dimensions, layers that are divided already. In forward: rows of another shape or dtype,
            or torch.no_grad, on some ranks.
        RuntimeError: in forward, where another rank has failed before the exchange, or torch's own timeout has come."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"{NAME}: module must be a torch.nn.Module, got {type(module).__name__}")
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, (TokenMoE, MoELayer))}
    if not layers:
        raise TypeError(f"{NAME}: module must contain a TokenMoE or a MoELayer, got {type(module).__name__}")
    group, mesh = _group_of(mesh_or_group, next(module.parameters()).device.type)
    facts = [f"{name or 'the module'}: {type(layer).__name__}({layer.extra_repr()})" for name, layer in layers.items()]
    facts += [f"{layer.num_experts} experts" for layer in layers.values()]
    divided = [name or "the module" for name, layer in layers.items() if layer.exchange is not None]
    found = [None] * dist.get_world_size(group)
    with _failures(NAME, "comparing the layers"):
        dist.all_gather_object(found, (facts, divided), group=group)
    for rank, (others, _) in enumerate(found):
        if others != found[0][0]:
            differing = next((a, b) for a, b in itertools.zip_longest(found[0][0], others) if a != b)
            raise ValueError(
                f"{NAME}: ranks must have the same layers, got {differing[0]} on rank 0 and "
                f"{differing[1]} on rank {rank}"
            )
    if any(names for _, names in found):
        names = next(names for _, names in found if names)
        raise ValueError(f"{NAME}: {names[0]} is divided among ranks already")
    for name, layer in layers.items():
        if layer.num_experts % len(found):
            raise ValueError(
                f"{NAME}: the number of ranks must divide the experts of {name or 'the module'}, "
                f"{layer.num_experts}, got {len(found)} ranks"
            )
    # What DistributedDataParallel reads of the module that it is given; a torch without that ignores it.
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    for name, layer in layers.items():
        layer.exchange = exchange = _Exchange(layer, group, mesh)
        (_shard_tokens if isinstance(layer, TokenMoE) else _shard_images)(layer, exchange)
        prefix = f"{name}." if name else ""
        own = (
            SHARDED if isinstance(layer, TokenMoE) else [n for n, _ in layer.named_parameters() if n[:8] == "experts."]
        )
        ignored.update(prefix + parameter for parameter in own)
        if isinstance(layer, MoELayer):
            ignored.update(prefix + n for n, _ in layer.named_buffers() if n[:8] == "experts.")
    module._ddp_params_and_buffers_to_ignore = sorted(ignored)
    return module


def _group_of(given, device: str):
    """(ProcessGroup, DeviceMesh of its ranks)"""
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(given, DeviceMesh):
        if given.ndim != 1:
            raise ValueError(
                f"{NAME}: mesh_or_group must have one dimension, got a mesh of shape {tuple(given.shape)}: take one of "
                "its dimensions, mesh[name]"
            )
        return given.get_group(), given
    if isinstance(given, dist.ProcessGroup):
        return given, DeviceMesh.from_group(given, device)
    raise TypeError(f"{NAME}: mesh_or_group must be a ProcessGroup or a DeviceMesh, got {type(given).__name__}")


class _Elsewhere(nn.Module):
    """In the place of an expert that another rank has, so that the names of the others stay."""

    def forward(self, x):
        raise RuntimeError(f"{NAME}: another rank has this expert")


def _shard_tokens(layer: TokenMoE, exchange: _Exchange) -> None:
    for name in SHARDED:
        whole = getattr(layer, name)
        own = whole.detach()[exchange.first : exchange.last].clone()
        setattr(layer, name, nn.Parameter(own, requires_grad=whole.requires_grad))
    layer.register_state_dict_post_hook(_save)
    layer.register_load_state_dict_pre_hook(_load)


def _shard_images(layer: MoELayer, exchange: _Exchange) -> None:
    for number in range(layer.num_experts):
        if not exchange.first <= number < exchange.last:
            layer.experts[number] = _Elsewhere()
    layer.register_load_state_dict_pre_hook(_load)


def _save(layer: nn.Module, state_dict, prefix, metadata) -> None:
    from torch.distributed.tensor import DTensor, Shard

    for name in SHARDED:
        own = state_dict[prefix + name]
        state_dict[prefix + name] = DTensor.from_local(own, layer.exchange.mesh, [Shard(0)], run_check=False)


def _load(layer: nn.Module, state_dict, prefix, *_) -> None:
    from torch.distributed.tensor import DTensor

    first, last = layer.exchange.first, layer.exchange.last
    for name in SHARDED:
        value = state_dict.get(prefix + name)
        if isinstance(value, DTensor):
            state_dict[prefix + name] = value.to_local()
        elif isinstance(value, torch.Tensor) and value.shape[:1] == (layer.num_experts,):
            state_dict[prefix + name] = value[first:last]
    for key in list(state_dict):
        number = key.removeprefix(f"{prefix}experts.").partition(".")[0]
        if key.startswith(f"{prefix}experts.") and not first <= int(number) < last:
            del state_dict[key]


@contextlib.contextmanager
def _failures(name: str, what: str):
    """Errors of torch.distributed, its timeouts among them, say which layer they belong to."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(f"{name}: {what} with the other ranks of its experts failed: {error}") from error


class _Plan(NamedTuple):
    """What all ranks know of one forward."""

    kept: torch.Tensor
    """(ranks, E) int64 on the CPU: copies of each rank's rows to each expert, after capacity."""
    rows: int
    """of all ranks"""
    any_gradient: bool


class _Exchange:
    """A layer's part in its process group."""

    def __init__(self, layer: nn.Module, group, mesh):
        self.name = f"{type(layer).__name__} ({NAME})"
        self.group, self.mesh = group, mesh
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.num_experts = layer.num_experts
        self.first = self.rank * layer.num_experts // self.ranks
        self.last = (self.rank + 1) * layer.num_experts // self.ranks

    # ---- a forward ----
    @torch.compiler.disable
    def run(self, layer: TokenMoE, x: torch.Tensor, valid: torch.Tensor | None):
        """TokenMoE.forward"""

        def route():
            rows, kept = layer.checked(x, valid)
            return _check.autocast(rows)[0], kept, *layer.route(rows, kept, capacity=False)

        (rows, kept, routing, logits), plan = self.agree(route, layer.router.weight.device, layer.capacity_factor)
        routing = self.limited(routing, plan)
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
        (rows, _, routing, logits), plan = self.agree(route, device, layer.capacity_factor)
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
        aux_loss = self.aux_loss({layer.aux_loss: 1.0}, logits, None, plan, layer.top_k)
        return output.to(x.dtype), aux_loss, layer.info(routing, logits)

    def agree(self, route: Callable, device: torch.device, capacity_factor: float | None):
        """(what route() returns, plan). An error of one rank becomes one of every rank."""
        error = None
        facts, counts = [1, 0, 0, 0, 0, 0, 0, 0], torch.zeros(self.num_experts, dtype=torch.int64, device=device)
        try:
            routed = route()
            rows, counts = routed[0], routed[2].counts
            shape = [*rows.shape[1:], 0, 0, 0][:3]
            gradient = torch.is_grad_enabled()
            facts = [
                0,
                gradient and rows.requires_grad,
                rows.shape[0],
                gradient,
                _check.DTYPES.index(rows.dtype),
                *shape,
            ]
            top_k = routed[2].top_k
        except Exception as own:  # whatever it is, the others must hear of it before they wait for rows
            error = own
        mine = torch.cat((torch.tensor(facts, device=device), counts))
        every = [torch.empty_like(mine) for _ in range(self.ranks)]
        with _failures(self.name, "the exchange of counts"):
            dist.all_gather(every, mine, group=self.group)
        table = torch.stack(every).cpu()
        if error is not None:
            raise error
        for rank, (failed, _, _, *alike) in enumerate(table[:, :8].tolist()):
            if failed:
                raise RuntimeError(f"{self.name}: rank {rank} has failed before the exchange; its own error says why")
            if alike != table[0, 3:8].tolist():
                raise ValueError(
                    f"{self.name}: ranks must agree on the rows, got {_described(table[0])} on rank 0 and "
                    f"{_described(table[rank])} on rank {rank}"
                )
        counts, rows = table[:, 8:], int(table[:, 2].sum())
        if capacity_factor is not None:
            capacity = math.ceil(capacity_factor * rows * top_k / self.num_experts)
            counts = counts.cumsum(0).clamp(max=capacity).diff(dim=0, prepend=counts.new_zeros(1, self.num_experts))
        return routed, _Plan(counts, rows, bool(table[:, 1].any()))

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
        with _failures(self.name, "the exchange of rows"):
            work = dist.all_to_all_single(taken, given, receive, send, group=self.group, async_op=True)

        def wait(kept=given):
            with _failures(self.name, "the exchange of rows"):
                work.wait()

        return out.view(-1, *rows.shape[1:]) if out.numel() else rows.new_empty((sum(receive), *rows.shape[1:])), wait

    # ---- losses ----
    def aux_loss(self, factors, logits, valid, plan: _Plan, top_k: int) -> torch.Tensor:
        """The losses of camox_ops.moe_aux_loss over the rows of all ranks: one sum over the ranks for all of them."""
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
        with _failures(exchange.name, "the sum of the losses"):
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
