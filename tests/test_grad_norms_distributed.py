"""grad_group_norms and scale_grads_ of DTensors: two processes on gloo, FSDP2, the numbers of each process's part."""

import pytest
import torch
import torch.distributed as dist
from helpers import leave_process_group, run_ranks
from torch.distributed.fsdp import fully_shard

import camox_ops as cx

WORLD = 2


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.ReLU(), torch.nn.Linear(10, 4))


def backward(net) -> list[torch.Tensor]:
    net(torch.ones(3, 6)).square().mean().backward()
    return [p.grad for p in net.parameters()]


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD)
    grads = backward(fully_shard(network()))
    norms = cx.grad_group_norms(grads, [0, 0, 1, 1], 2, reduce="l2")
    local = [grad.to_local().clone() for grad in grads]
    squares = norms.square()
    dist.all_reduce(squares)
    cx.scale_grads_(grads, [0, 0, 1, 1], torch.tensor([0.5, 3.0]))
    found = {
        "own": norms,
        "of the parts": cx.grad_group_norms(local, [0, 0, 1, 1], 2, reduce="l2"),
        "all": squares.sqrt(),
        "scaled": [grad.full_tensor() for grad in grads],
    }
    torch.save(found, f"{folder}/{rank}")
    leave_process_group()


@pytest.mark.slow
def test_dtensors_give_the_numbers_of_this_process(tmp_path):
    run_ranks(worker, (str(tmp_path),), WORLD)
    grads = backward(network())
    expected = cx.grad_group_norms(grads, [0, 0, 1, 1], 2, reduce="l2")
    for rank in range(WORLD):
        found = torch.load(tmp_path / str(rank))
        assert torch.equal(found["own"], found["of the parts"])
        assert not torch.allclose(found["own"], expected)
        torch.testing.assert_close(found["all"], expected)
        for ours, grad, factor in zip(found["scaled"], grads, (0.5, 0.5, 3.0, 3.0), strict=True):
            torch.testing.assert_close(ours, factor * grad)
