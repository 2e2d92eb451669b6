"""Two processes on gloo: DistributedDataParallel and FSDP2 around our modules give the gradients of one process."""

import pytest
import torch
import torch.distributed as dist
from helpers import leave_process_group, run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import camox_ops as cx

WORLD = 2


class Experts(nn.Module):
    """A MoELayer without its statistics; sync="none" gives every expert a gradient on every rank, which FSDP2 needs."""

    def __init__(self, sync: str):
        super().__init__()
        self.layer = cx.nn.MoELayer(16, 7, 2, aux_loss="usage_mse", sync=sync)

    def forward(self, x):
        return self.layer(x)[0]


def model(sync: str) -> nn.Sequential:
    """Without dropout, and in float64: CamoXpert's linear attention divides by sums that can be near 0."""
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        cx.nn.LayerNorm2d(16),
        cx.nn.FrequencyExpert(16),
        Experts(sync),
        cx.nn.SDTAEncoder(16, num_heads=4),
    )
    return layers.double().eval()


def gradients(net: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
    net(x).square().mean().backward()
    found = {}
    for name, parameter in net.named_parameters():
        grad = parameter.grad
        whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        found[name.removeprefix("module.")] = None if whole is None else whole.clone()
    return found


def batch() -> torch.Tensor:
    return torch.randn(4, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD)
    x = batch().chunk(WORLD)[rank]
    parallel = DistributedDataParallel(model("counts"), find_unused_parameters=True)
    sharded = model("none")
    for layer in sharded:
        fully_shard(layer)
    fully_shard(sharded)
    found = {"DDP": gradients(parallel, x), "FSDP2": gradients(sharded, x)}
    if rank == 0:
        torch.save(found, f"{folder}/gradients")
    leave_process_group()


@pytest.fixture(scope="module")
def distributed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distributed")
    run_ranks(worker, (str(folder),), WORLD)
    return torch.load(folder / "gradients")


@pytest.mark.parametrize(("wrapper", "sync"), [("DDP", "counts"), ("FSDP2", "none")])
def test_gradients_are_those_of_one_process(distributed, wrapper, sync):
    expected, got = gradients(model(sync), batch()), distributed[wrapper]
    assert got.keys() == expected.keys()
    assert {name for name in got if got[name] is None} == {name for name in expected if expected[name] is None}
    for name, grad in expected.items():
        if grad is not None:
            assert (got[name] - grad).abs().max() <= 1e-9 * grad.abs().max(), name


def test_experts_that_no_rank_chose_keep_no_gradient(distributed):
    assert any(grad is None for grad in distributed["DDP"].values())
    assert not any(grad is None for grad in distributed["FSDP2"].values())
