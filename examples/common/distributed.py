"""torchrun: process group, ranks, and what the ranks tell each other."""

import os

import torch
import torch.distributed as dist


def is_first():
    """Whether this is the only process or rank 0 of several, by torchrun's environment."""
    return os.environ.get("RANK", "0") == "0"


def start(device):
    """Join the process group that torchrun describes in the environment, if any; returns (rank, world, device)."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return 0, 1, device
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return dist.get_rank(), world, device


def stop():
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def gather(value):
    """The values of all ranks, in rank order, on every rank."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def on_first_rank(function):
    """Run function on rank 0 and give its result on every rank; when it fails, every rank stops.

    Rank 0 raises the error itself, the others a RuntimeError that points at it.
    """
    if not dist.is_initialized():
        return function()
    outcome = [False, None]
    try:
        if dist.get_rank() == 0:
            outcome = [True, function()]
    finally:
        dist.broadcast_object_list(outcome)
    if not outcome[0]:
        raise RuntimeError("the first process stopped; its message says why")
    return outcome[1]
