"""cx.nn.TokenMoE beside a loop over experts: index_select, two or three products, index_add for each.

Equal weights, a router that sends about as many rows to every expert. The loop's experts have matrices of their own, as an
nn.ModuleList has; ``tuned`` is the same loop under cx.train.tune_cpu, whose products are those of TokenMoE: the best
form of PyTorch here. torch.compile is left out: the loop's sizes depend on data.
"""

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.common import Case, camox_attr, on_gpu, random_tensor

SHAPES = {"swiglu": ((8192, 512),), "gelu": ((8192, 512),)}
HIDDEN, EXPERTS, TOP_K = 2048, 16, 2


class Loop(nn.Module):
    """The mixture as it is written in plain PyTorch."""

    def __init__(self, dim, activation):
        super().__init__()
        wide = 2 if activation == "swiglu" else 1
        self.activation = activation
        self.router = nn.Linear(dim, EXPERTS, bias=False)
        self.first = nn.ModuleList(nn.Linear(dim, wide * HIDDEN, bias=False) for _ in range(EXPERTS))
        self.second = nn.ModuleList(nn.Linear(HIDDEN, dim, bias=False) for _ in range(EXPERTS))

    def forward(self, x):
        chosen, experts = self.router(x).topk(TOP_K)
        weights = chosen.softmax(1)
        out = torch.zeros_like(x)
        for expert in range(EXPERTS):
            rows, choice = torch.where(experts == expert)
            h = self.first[expert](x.index_select(0, rows))
            if self.activation == "gelu":
                h = F.gelu(h)
            else:
                gate, value = h.chunk(2, -1)
                h = F.silu(gate) * value
            out.index_add_(0, rows, self.second[expert](h) * weights[rows, choice, None])
        return out


class Output(nn.Module):
    """The first result of a layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


@torch.no_grad()
def layers(shape, activation):
    """The candidates, equal in weights."""
    made = camox_attr("nn.TokenMoE")
    torch.manual_seed(0)
    ours = made(shape[1], HIDDEN, EXPERTS, TOP_K, activation=activation, aux_loss=None)
    loop = Loop(shape[1], activation)
    loop.router.weight.copy_(ours.router.weight)
    for expert in range(EXPERTS):
        loop.first[expert].weight.copy_(ours.w_in[expert].t())
        loop.second[expert].weight.copy_(ours.w_out[expert].t())
    return {"camox": Output(ours), "eager": loop}


def case_of(shape, activation) -> Case:
    factors = 3 if activation == "swiglu" else 2
    return Case(
        group=f"token_moe_{activation}",
        shape=shape,
        make_inputs=lambda: (random_tensor(shape, seed=1),),
        candidates=lambda: {**layers(shape, activation), "compile": None},
        direction="forward_backward",
        floor_flops=3 * 2 * factors * shape[0] * TOP_K * shape[1] * HIDDEN,
        quick=False,
    )


@on_gpu(
    shapes=((8192, 512),),
    rehearsal=(64, 32),
    size="layer",
    directions=("forward_backward",),
    dtypes=(torch.float32,),
)
def make_case(shape, direction, dtype, layout) -> Case:
    return case_of(shape, "swiglu")


def cases() -> list[Case]:
    return [case_of(shape, activation) for activation, shapes in SHAPES.items() for shape in shapes]
