"""expert_parallel on gloo: ranks that share the experts give the outputs, losses and gradients of one process."""

import contextlib
import datetime
import os
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers import leave_process_group, run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import camox_ops as cx

D, E, K, ROWS = 8, 4, 2, 24
# Of two ranks: rows of each. Of four: the same, cut in two.
VARIANTS = {
    "swiglu": ({"shared_hidden": 6, "aux_loss": {"switch": 1.0, "z": 0.1}}, (17, 7)),
    "no rows": ({"aux_loss": {"importance_cv2": 1.0, "usage_mse": 1.0}}, (ROWS, 0)),
    "capacity": ({"activation": "gelu", "capacity_factor": 0.6, "score": "softmax_topk"}, (12, 12)),
    "biased": ({"router_bias": True, "score": "sigmoid_topk"}, (10, 14)),
    "biased, capacity": ({"router_bias": True, "capacity_factor": 0.6}, (10, 14)),
    "valid": ({"shared_hidden": 6, "capacity_factor": 0.8}, (9, 15)),
}
BIASED = ("biased", "biased, capacity")
IMAGES = {"images": None, "images, capacity": 0.6}


def tokens(name: str) -> cx.nn.TokenMoE:
    torch.manual_seed(0)
    layer = cx.nn.TokenMoE(D, 12, E, K, dtype=torch.float64, **VARIANTS[name][0])
    if layer.router_bias is not None:
        layer.router_bias += torch.linspace(-0.2, 0.2, E)
    return layer


def images(name: str, windows: tuple[int, int] = (1, 3)) -> cx.nn.MoELayer:
    torch.manual_seed(0)
    sizes = [windows[i % 2] for i in range(E)]
    experts = [nn.Sequential(nn.Conv2d(D, D, size, padding=size // 2), nn.Tanh()) for size in sizes]
    layer = cx.nn.MoELayer(D, E, K, experts=experts, aux_loss="switch", capacity_factor=IMAGES[name])
    with torch.no_grad():
        layer.gate[1].weight *= 20
    return layer.double()


def model_of(name: str) -> nn.Module:
    return tokens(name) if name in VARIANTS else images(name)


def numbers(*shape, seed: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def batch(name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """All rows, the gradient of their outputs, and which are valid."""
    shape = (ROWS, D) if name in VARIANTS else (ROWS, D, 3, 2)
    valid = torch.arange(ROWS) % 5 != 2 if name == "valid" else None
    return numbers(*shape, seed=1), numbers(*shape, seed=2), valid


def split_of(name: str, world: int) -> list[int]:
    sizes = VARIANTS[name][1] if name in VARIANTS else (16, 8)
    return [part for n in sizes for part in ((n,) if world == 2 else (n // 2, n - n // 2))]


def run(layer, x, upstream, valid, ranks: int = 1) -> dict[str, torch.Tensor]:
    """Results and gradients; a rank's loss is `ranks` times its part of the sum that one process takes."""
    x = x.clone().requires_grad_()
    output, aux, info = layer(x) if valid is None else layer(x, valid=valid)
    (ranks * (output * upstream).sum() + 3 * aux).backward()
    grads = {f"grad {name}": p.grad for name, p in layer.named_parameters()}
    return {"output": output, "aux": aux, "usage": info["expert_usage"], "grad x": x.grad / ranks, **grads}


def rows_of_rank(name: str, rank: int, world: int):
    return [None if t is None else t.split(split_of(name, world))[rank] for t in batch(name)]


def caught(function, *args) -> str:
    try:
        function(*args)
    except (ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def errors_of(rank: int) -> dict[str, str]:
    layer = cx.nn.expert_parallel(cx.nn.TokenMoE(D, 12, E, K), dist.group.WORLD)
    x = torch.ones(3, D)
    found = {
        "shape": caught(layer, x[:, 1:] if rank else x),
        "type": caught(layer, x.double() if rank else x),
        "nan": caught(layer, x * torch.nan if rank else x),
    }
    with torch.no_grad() if rank else contextlib.nullcontext():
        found["gradients"] = caught(layer, x)
    with torch.autocast("cpu", torch.bfloat16, enabled=bool(rank)):
        found["dtype"] = caught(layer, x)
    divide = cx.nn.expert_parallel
    found["experts"] = caught(divide, cx.nn.TokenMoE(D, 12, 3, K), dist.group.WORLD)
    found["layers"] = caught(divide, cx.nn.TokenMoE(D, 12 + rank, E, K), dist.group.WORLD)
    found["again"] = caught(divide, layer, dist.group.WORLD)
    found["no layer"] = caught(divide, nn.Linear(2, 2), dist.group.WORLD)
    found["no group"] = caught(divide, cx.nn.TokenMoE(D, 12, E, K), "world")
    mesh = dist.init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("data", "experts"))
    found["mesh"] = caught(divide, cx.nn.TokenMoE(D, 12, E, K), mesh)
    layer = divide(cx.nn.TokenMoE(D, 12, E, K), mesh["experts"])
    found["works"] = str(layer(x)[0].shape)
    found["pickle"] = caught(pickle.dumps, nn.Sequential(layer))
    return found


def balanced(name: str) -> torch.Tensor:
    layer = cx.nn.expert_parallel(tokens(name), dist.group.WORLD)
    layer(rows_of_rank(name, dist.get_rank(), dist.get_world_size())[0])
    layer.update_router_bias(0.5)
    return layer.router_bias


class Net(nn.Module):
    """A layer before the experts, and their two results."""

    def __init__(self, aux_loss):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(D, D, dtype=torch.float64)
        self.moe = cx.nn.TokenMoE(D, 12, E, K, dtype=torch.float64, shared_hidden=6, aux_loss=aux_loss)

    def forward(self, x):
        return self.moe(self.first(x))[:2]


def wrapped(how: str, rank: int, world: int) -> dict[str, float]:
    """How far gradients are from those of one process, in the wrapper that averages all but the experts'."""
    model, whole = Net(None if how == "grid" else "switch"), Net(None if how == "grid" else "switch")
    x, upstream, _ = batch("swiglu")
    output, aux = whole(x)
    ((output * upstream).sum() + 3 * aux).backward()
    mesh = dist.init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "experts"))
    net = cx.nn.expert_parallel(model, mesh["experts"] if how == "grid" else dist.group.WORLD)
    experts = {model.moe.w_in, model.moe.w_out}
    if how == "FSDP2":
        fully_shard(net, ignored_params=experts)
    else:
        net = DistributedDataParallel(net)
    mine, upstream, _ = rows_of_rank("swiglu", rank, world)
    output, aux = net(mine)
    (world * (output * upstream).sum() + 3 * aux).backward()
    if how == "grid":  # the same experts on the ranks of the other dimension
        for parameter in experts:
            dist.all_reduce(parameter.grad, group=mesh["data"].get_group())
            parameter.grad /= world // 2
    errors = {}
    for (name, parameter), other in zip(model.named_parameters(), whole.parameters(), strict=True):
        grad, expected = parameter.grad, other.grad
        if name in ("moe.w_in", "moe.w_out"):
            part = mesh["experts"].get_local_rank() if how == "grid" else rank
            expected = expected.split(len(grad))[part]
        elif how == "FSDP2":
            grad = grad.full_tensor()
        errors[name] = ((grad - expected).abs().max() / expected.abs().max()).item()
    return errors


def merged(how: str, name: str, rank: int, world: int) -> str:
    """What a forward says in a wrapper that takes all ranks' experts for the same ones."""
    # Of parameters whose shapes differ between ranks, as those of two windows do, DDP says so itself.
    layer = tokens(name) if name in VARIANTS else images(name, windows=(3, 3))
    net = nn.Sequential(cx.nn.expert_parallel(layer.float(), dist.group.WORLD))
    net = fully_shard(net) if how == "FSDP2" else DistributedDataParallel(net)
    x = rows_of_rank(name, rank, world)[0].float()
    with torch.no_grad():
        net(x)  # not looked at, as only training goes wrong by it
    return caught(net, x)


def of_losses(kind: str) -> tuple[nn.Module, torch.Tensor]:
    """A MoELayer, and more images than bfloat16 can count."""
    layer = images("images").float()
    layer.aux_loss = kind
    return layer, numbers(301, D, 1, 1, seed=3).float()


def half_precision_loss(kind: str) -> torch.Tensor:
    layer, x = of_losses(kind)
    layer = cx.nn.expert_parallel(layer, dist.group.WORLD)
    return layer(x.tensor_split(dist.get_world_size())[dist.get_rank()])[1]


def resumed(rank: int, folder: str) -> bool:
    """Whether the optimizer's state survives a checkpoint, saved as docs/token_moe.md says."""
    key, states = f"optimizer of rank {rank}", []
    for saves in (True, False):
        model = cx.nn.expert_parallel(tokens("swiglu"), dist.group.WORLD)
        optimizer = torch.optim.AdamW(model.parameters())
        if saves:
            output, aux, _ = model(rows_of_rank("swiglu", rank, dist.get_world_size())[0])
            (output.square().sum() + aux).backward()
            optimizer.step()
        state = {"model": model.state_dict(), key: get_optimizer_state_dict(model, optimizer)}
        (dcp.save if saves else dcp.load)(state, checkpoint_id=f"{folder}/resumed")
        set_optimizer_state_dict(model, optimizer, state[key])
        states.append([optimizer.state[parameter]["exp_avg"] for parameter in model.parameters()])
    return all(map(torch.equal, *states))


def upcycled(rank: int, world: int) -> list[str]:
    """The experts of all ranks are the same, as they were given."""
    found = []
    for when in ("before", "after"):
        layer, same = tokens("swiglu"), tokens("swiglu")
        with torch.no_grad():
            for whole in (same.w_in, same.w_out):
                whole.copy_(whole[:1].expand_as(whole))
        if when == "before":
            layer = same
        layer = cx.nn.expert_parallel(layer, dist.group.WORLD)
        layer.load_state_dict(same.state_dict() if when == "after" else layer.state_dict())
        found.append(caught(layer, rows_of_rank("swiglu", rank, world)[0]))
    return found


def worker(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world)
    found = {}
    for name in (*VARIANTS, *IMAGES):
        layer = cx.nn.expert_parallel(model_of(name), dist.group.WORLD)
        found[name] = run(layer, *rows_of_rank(name, rank, world), ranks=world)
    layer = cx.nn.expert_parallel(tokens("swiglu"), dist.group.WORLD)
    dcp.save({"model": layer.state_dict()}, checkpoint_id=f"{folder}/checkpoint")
    layer.load_state_dict({key: torch.zeros_like(value) for key, value in tokens("swiglu").state_dict().items()})
    state = {"model": layer.state_dict()}
    zeros = [float(p.abs().max()) for p in layer.parameters()]
    dcp.load(state, checkpoint_id=f"{folder}/checkpoint")
    layer.load_state_dict(state["model"])
    x = rows_of_rank("swiglu", rank, world)[0]
    found["loaded"] = {"zeros": zeros, "output": layer(x)[0]}
    average = torch.optim.swa_utils.AveragedModel(layer)
    average.update_parameters(layer)
    found["average"] = average(x)[0]
    average.module.load_state_dict(tokens("swiglu").state_dict())
    found["loaded average"] = average(x)[0]
    part = cx.nn.expert_parallel(images("images"), dist.group.WORLD)
    part.load_state_dict(images("images").state_dict())
    with torch.autocast("cpu", torch.bfloat16):
        half = layer.float()(x.float())[0]
        found["autocast losses"] = [half_precision_loss(kind) for kind in ("switch", "z", "usage_mse")]
    found["autocast"] = half
    found["errors"], found["bias"] = errors_of(rank), {name: balanced(name) for name in BIASED}
    for how in ("DDP", "FSDP2", "grid"):
        found[how] = wrapped(how, rank, world)
    found["merged"] = [merged(how, name, rank, world) for how in ("DDP", "FSDP2") for name in ("swiglu", "images")]
    found["resumed"] = resumed(rank, folder)
    found["upcycled"] = upcycled(rank, world)
    slow = dist.new_group(timeout=datetime.timedelta(seconds=2))
    layer = cx.nn.expert_parallel(cx.nn.TokenMoE(D, 12, E, K), slow)
    if rank == 0:
        found["late"] = caught(layer, torch.ones(3, D))
    torch.save(found, f"{folder}/rank{rank}")
    leave_process_group()


def results_of(world: int, folder) -> list[dict]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    run_ranks(worker, (world, str(folder)), world)
    return [torch.load(folder / f"rank{rank}", weights_only=False) for rank in range(world)]


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def ranks(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(f"experts{request.param}")
    return results_of(request.param, folder), folder


def close(found, expected, scale: float = 1.0) -> bool:
    return torch.allclose(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", [*VARIANTS, *IMAGES])
def test_outputs_and_gradients_are_those_of_one_process(ranks, name):
    found = [rank[name] for rank in ranks[0]]
    expected = run(model_of(name), *batch(name))
    assert close(torch.cat([rank["output"] for rank in found]), expected["output"])
    assert close(torch.cat([rank["grad x"] for rank in found]), expected["grad x"])
    assert torch.equal(sum(rank["usage"] for rank in found), expected["usage"])
    for rank in found:
        assert close(rank["aux"], expected["aux"])
    if "capacity" in name:
        assert expected["usage"].sum() < ROWS * K
    for key in [key for key in expected if key.startswith("grad ") and key != "grad x"]:
        truth = expected[key]
        if key in ("grad w_in", "grad w_out"):
            assert close(torch.cat([rank[key] for rank in found]), truth), key
        elif "experts." in key:
            mine = [rank[key] for rank in found if key in rank]
            assert len(mine) == 1
            assert close(mine[0], truth), key
        else:
            assert close(sum(rank[key] for rank in found) / len(found), truth), key


@pytest.mark.parametrize("how", ["DDP", "FSDP2", "grid"])
def test_data_parallel_averages_all_but_the_experts(ranks, how):
    """grid: experts over pairs of ranks, data over all."""
    for rank in ranks[0]:
        assert set(rank[how]) > {"moe.w_in", "moe.router.weight", "first.weight"}
        assert max(rank[how].values()) < 1e-9


def test_checkpoint_loads_at_another_number_of_ranks(ranks):
    found, folder = ranks
    truth = tokens("swiglu")
    other = tokens("swiglu")
    other.load_state_dict({key: torch.zeros_like(value) for key, value in other.state_dict().items()})
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=folder / "checkpoint", no_dist=True)
    for key, value in truth.state_dict().items():
        assert torch.equal(state["model"][key], value), key
    output = truth(batch("swiglu")[0])[0]
    assert close(torch.cat([rank["loaded"]["output"] for rank in found]), output)
    assert all(max(rank["loaded"]["zeros"]) == 0 for rank in found)
    half = torch.cat([rank["autocast"] for rank in found])
    assert half.dtype == torch.bfloat16
    assert (half - output).abs().max() < 0.05 * output.abs().max()


def test_optimizer_goes_on_from_a_checkpoint(ranks):
    assert all(rank["resumed"] for rank in ranks[0])


def test_copies_are_divided_like_the_layer(ranks):
    expected = run(model_of("swiglu"), *batch("swiglu"))["output"]
    for name in ("average", "loaded average"):
        assert close(torch.cat([rank[name] for rank in ranks[0]]), expected)


@pytest.mark.parametrize("kind", ["switch", "z", "usage_mse"])
def test_losses_of_images_under_autocast_are_those_of_one_process(ranks, kind):
    layer, x = of_losses(kind)
    with torch.autocast("cpu", torch.bfloat16):
        truth = layer(x)[1]
    for rank in ranks[0]:
        found = rank["autocast losses"][("switch", "z", "usage_mse").index(kind)]
        assert found.dtype == truth.dtype == torch.float32
        assert torch.allclose(found, truth, rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", BIASED)
def test_loads_are_summed_over_the_ranks(ranks, name):
    layer = tokens(name)
    layer(batch(name)[0])
    layer.update_router_bias(0.5)
    for rank in ranks[0]:
        assert torch.equal(rank["bias"][name], layer.router_bias)


MESSAGES = {
    "shape": (
        "RuntimeError: TokenMoE (expert_parallel): rank 1 has failed before",
        "ValueError: TokenMoE: x must have",
    ),
    "type": ("RuntimeError: TokenMoE (expert_parallel): rank 1 has failed before", "TypeError: TokenMoE: x must have"),
    "nan": (
        "RuntimeError: TokenMoE (expert_parallel): rank 1 has failed before",
        "ValueError: moe_route: logits hold NaN",
    ),
    "gradients": (
        "ValueError: TokenMoE (expert_parallel): ranks must agree on the rows, got (8) float32 with gradients",
    )
    * 2,
    "dtype": ("ValueError: TokenMoE (expert_parallel): ranks must agree on the rows, got (8) float32",) * 2,
    "experts": ("ValueError: expert_parallel: the number of ranks must divide the experts of the module, 3, got",) * 2,
    "layers": ("ValueError: expert_parallel: ranks must have the same layers, got the module: TokenMoE(dim=8",) * 2,
    "again": ("ValueError: expert_parallel: the module is divided among ranks already",) * 2,
    "no layer": ("TypeError: expert_parallel: module must contain a TokenMoE or a MoELayer, got Linear",) * 2,
    "no group": ("TypeError: expert_parallel: mesh_or_group must be a ProcessGroup or a DeviceMesh, got str",) * 2,
    "mesh": ("ValueError: expert_parallel: mesh_or_group must have one dimension, got a mesh of shape (1, ",) * 2,
    "works": ("torch.Size([3, 8])",) * 2,
    "pickle": ("TypeError: TokenMoE (expert_parallel): a module whose experts are divided cannot be pickled",) * 2,
}


def test_errors_on_every_rank(ranks):
    for number, rank in enumerate(ranks[0]):
        for name, expected in MESSAGES.items():
            assert rank["errors"][name].startswith(expected[min(number, 1)]), (number, name, rank["errors"][name])


def test_a_wrapper_that_makes_the_experts_of_all_ranks_the_same_is_refused(ranks):
    for rank in ranks[0]:
        for message, layer in zip(rank["merged"], ("TokenMoE", "MoELayer") * 2, strict=True):
            assert message.startswith(f"RuntimeError: {layer} (expert_parallel): ranks 0 and 1 had different experts")


def test_the_same_experts_on_all_ranks_are_right_where_they_were_given_so(ranks):
    for rank in ranks[0]:
        assert rank["upcycled"] == ["nothing was raised"] * 2


def test_a_late_rank_ends_in_a_timeout_that_names_the_layer(ranks):
    message = ranks[0][0]["late"]
    assert message.startswith("RuntimeError: TokenMoE (expert_parallel): the exchange of counts with the other ranks")
