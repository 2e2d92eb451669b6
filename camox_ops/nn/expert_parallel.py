"""Experts divided among the ranks of a process group: rows travel to the rank of their expert and back."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from .moe import MoELayer
from .token_moe import TokenMoE

if TYPE_CHECKING:
    from ._exchange import Exchange

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
        RuntimeError: in forward, where another rank has failed before the exchange, or torch's own timeout has come;
            where a wrapper that was not told to leave the experts alone has made those of several ranks the same."""
    from ._exchange import Exchange, failures  # imported here: it brings in the tracer, a second of start

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
    with failures(NAME, "comparing the layers"):
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
        layer.exchange = exchange = Exchange(layer, group, mesh)
        (_shard_tokens if isinstance(layer, TokenMoE) else _shard_images)(layer, exchange)
        exchange.remember(layer)
        layer.register_load_state_dict_post_hook(_remember)
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


def _shard_tokens(layer: TokenMoE, exchange: Exchange) -> None:
    for name in SHARDED:
        whole = getattr(layer, name)
        own = whole.detach()[exchange.first : exchange.last].clone()
        setattr(layer, name, nn.Parameter(own, requires_grad=whole.requires_grad))
    layer.register_state_dict_post_hook(_save)
    layer.register_load_state_dict_pre_hook(_load)


def _shard_images(layer: MoELayer, exchange: Exchange) -> None:
    for number in range(layer.num_experts):
        if not exchange.first <= number < exchange.last:
            layer.experts[number] = _Elsewhere()
    layer.register_load_state_dict_pre_hook(_load)


def _remember(layer: nn.Module, incompatible_keys) -> None:
    layer.exchange.remember(layer)


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
