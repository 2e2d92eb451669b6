"""A step of cx.nn.TokenMoE, forward and backward, beside a loop over experts: index_select, products, index_add.

Equal weights; the router sends about as many rows to every expert. The loop's experts have matrices of their own, as
in an nn.ModuleList. ``tuned`` is the same loop with PyTorch's products replaced as by cx.train.tune_cpu: the best form
of PyTorch here, whose products are those of TokenMoE. torch.compile is left out: the loop's sizes depend on data.

On a GPU ``scattermoe``, where it is installed, is the MLP of shawntan/scattermoe behind the same router. Its README
names no size: rows and experts here are those of a large layer, 4 of 32 experts for each row.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.bench_tune_cpu import Replaced, same_numbers
from benchmarks.common import Case, camox_attr, if_installed, on_gpu, random_tensor

SHAPES = ((8192, 512), (1024, 256))
ON_GPU = (30 * 2048, 4096)
ROUNDS = 7


class Mixture(NamedTuple):
    """Hidden size of an expert, number of experts, experts of a row, activation."""

    hidden: int = 2048
    experts: int = 16
    top_k: int = 2
    activation: str = "gelu"


class Loop(nn.Module):
    """The mixture as it is written in plain PyTorch."""

    def __init__(self, dim, mixture):
        super().__init__()
        hidden, experts, self.top_k, self.activation = mixture
        wide = 2 if self.activation == "swiglu" else 1
        self.router = nn.Linear(dim, experts, bias=False)
        self.first = nn.ModuleList(nn.Linear(dim, wide * hidden, bias=False) for _ in range(experts))
        self.second = nn.ModuleList(nn.Linear(hidden, dim, bias=False) for _ in range(experts))

    def forward(self, x):
        chosen, experts = self.router(x).topk(self.top_k)
        weights = chosen.softmax(1)
        out = torch.zeros_like(x)
        for expert in range(len(self.first)):
            rows, choice = torch.where(experts == expert)
            h = self.first[expert](x.index_select(0, rows))
            if self.activation == "gelu":
                h = F.gelu(h)
            else:
                gate, value = h.chunk(2, -1)
                h = F.silu(gate) * value
            out.index_add_(0, rows, self.second[expert](h) * weights[rows, choice, None])
        return out


class Scattered(nn.Module):
    """The same mixture with the experts of scattermoe, whose matrices are (experts, out, in)."""

    def __init__(self, dim, mixture):
        from scattermoe.mlp import MLP

        super().__init__()
        self.router = nn.Linear(dim, mixture.experts, bias=False)
        self.mlp = MLP(dim, mixture.hidden, mixture.experts, mixture.top_k, activation=nn.GELU())

    def forward(self, x):
        chosen, experts = self.router(x).topk(self.mlp.top_k)
        return self.mlp(x, chosen.softmax(1), experts)

    def matrices(self):
        return [self.mlp.experts.weight, self.mlp.output_experts.weight]


def step_of(module, experts, picked):
    """(x, upstream) -> output, gradients of x and of the router, and what `picked` takes of those of the experts."""
    leaves = [module.router.weight, *experts]

    def step(x, upstream):
        leaf = x.detach().requires_grad_()
        output = module(leaf)
        output = output if isinstance(output, torch.Tensor) else output[0]
        grad_x, router, *grads = torch.autograd.grad(output, [leaf, *leaves], upstream)
        return (output.detach(), grad_x, router, *picked(grads))

    return step


def ends_of_loop(grads):
    """The gradients of the first and of the last expert, as TokenMoE has them."""
    experts = len(grads) // 2
    return [grads[0].t(), grads[experts - 1].t(), grads[experts].t(), grads[-1].t()]


def ends(grads):
    return [grads[0][0], grads[0][-1], grads[1][0], grads[1][-1]]


def step_of_loop(loop):
    return step_of(loop, [*loop.first.parameters(), *loop.second.parameters()], ends_of_loop)


def ends_of_scattered(grads):
    return [gradient.t() for gradient in ends(grads)]


@torch.no_grad()
def layers(shape, mixture):
    """(TokenMoE, the loop), equal in weights."""
    made = camox_attr("nn.TokenMoE")
    torch.manual_seed(0)
    hidden, experts, top_k, activation = mixture
    ours = made(shape[1], hidden, experts, top_k, activation=activation, aux_loss=None)
    loop = Loop(shape[1], mixture)
    loop.router.weight.copy_(ours.router.weight)
    for expert in range(experts):
        loop.first[expert].weight.copy_(ours.w_in[expert].t())
        loop.second[expert].weight.copy_(ours.w_out[expert].t())
    return ours, loop


@torch.no_grad()
def step_of_scattered(ours, mixture):
    """With the weights of a TokenMoE."""
    module = Scattered(ours.dim, mixture).to(ours.w_in.dtype)
    module.router.weight.copy_(ours.router.weight)
    for theirs, mine in zip(module.matrices(), (ours.w_in, ours.w_out), strict=True):
        theirs.copy_(mine.mT)
    return step_of(module, module.matrices(), ends_of_scattered)


def case_of(shape, mixture, candidates, dtype=torch.float32, rounds=ROUNDS) -> Case:
    """candidates: of a TokenMoE and the loop with its weights."""
    factors = 3 if mixture.activation == "swiglu" else 2

    def expected(x, upstream):
        with x.device:
            loop = layers(shape, mixture)[1].to(x.dtype)
        return step_of_loop(loop)(x, upstream)

    return Case(
        group=f"token_moe_{mixture.activation}",
        shape=shape,
        make_inputs=lambda: tuple(random_tensor(shape, dtype=dtype, seed=seed) for seed in (1, 2)),
        candidates=lambda: {**candidates(*layers(shape, mixture)), "compile": None},
        direction="step",
        dtype=dtype,
        grad_inputs=(),
        default_allocator=False,
        floor_flops=3 * 2 * factors * shape[0] * mixture.top_k * shape[1] * mixture.hidden,
        verify=same_numbers(expected),
        rounds=rounds,
        quick=shape == SHAPES[1],
    )


def on_cpu(ours, loop):
    plain = step_of_loop(loop)
    return {
        "camox": Replaced(step_of(ours, [ours.w_in, ours.w_out], ends), "mm"),
        "eager": plain,
        "tuned": Replaced(plain, "mm"),
    }


@on_gpu(shapes=(ON_GPU,), rehearsal=(64, 32), size="layer", directions=("step",), dtypes=(torch.bfloat16,), full=True)
def make_case(shape, direction, dtype, layout) -> Case:
    mixture = Mixture(experts=32, top_k=4) if shape == ON_GPU else Mixture(hidden=32, experts=4)

    def candidates(*of_layers):
        ours, loop = (module.to(dtype) for module in of_layers)
        return {
            "camox": step_of(ours, [ours.w_in, ours.w_out], ends),
            "eager": step_of_loop(loop),
            "scattermoe": if_installed("scattermoe", lambda: step_of_scattered(ours, mixture)),
        }

    return case_of(shape, mixture, candidates, dtype, rounds=None)


def cases() -> list[Case]:
    mixtures = (Mixture(), Mixture(activation="swiglu"))
    return [case_of(shape, mixture, on_cpu) for mixture in mixtures for shape in SHAPES]
