"""A step of cx.nn.TokenMoE, forward and backward, beside a loop over experts: index_select, products, index_add.

Equal weights; the router sends about as many rows to every expert. The loop's experts have matrices of their own, as
in an nn.ModuleList. ``tuned`` is the same loop with PyTorch's products replaced as by cx.train.tune_cpu: the best form
of PyTorch here, whose products are those of TokenMoE. torch.compile is left out: the loop's sizes depend on data.
"""

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.bench_tune_cpu import Replaced, same_numbers
from benchmarks.common import Case, camox_attr, random_tensor

SHAPES = ((8192, 512), (1024, 256))
HIDDEN, EXPERTS, TOP_K, ROUNDS = 2048, 16, 2, 7


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
    return [grads[0].t(), grads[EXPERTS - 1].t(), grads[EXPERTS].t(), grads[-1].t()]


def ends(grads):
    return [grads[0][0], grads[0][-1], grads[1][0], grads[1][-1]]


def step_of_loop(loop):
    return step_of(loop, [*loop.first.parameters(), *loop.second.parameters()], ends_of_loop)


@torch.no_grad()
def layers(shape, activation):
    """(TokenMoE, the loop), equal in weights."""
    made = camox_attr("nn.TokenMoE")
    torch.manual_seed(0)
    ours = made(shape[1], HIDDEN, EXPERTS, TOP_K, activation=activation, aux_loss=None)
    loop = Loop(shape[1], activation)
    loop.router.weight.copy_(ours.router.weight)
    for expert in range(EXPERTS):
        loop.first[expert].weight.copy_(ours.w_in[expert].t())
        loop.second[expert].weight.copy_(ours.w_out[expert].t())
    return ours, loop


def case_of(shape, activation) -> Case:
    factors = 3 if activation == "swiglu" else 2

    def expected(x, upstream):
        loop = layers(shape, activation)[1].to(x.dtype)
        return step_of_loop(loop)(x, upstream)

    def candidates():
        ours, loop = layers(shape, activation)
        plain = step_of_loop(loop)
        return {
            "camox": Replaced(step_of(ours, [ours.w_in, ours.w_out], ends), "mm"),
            "eager": plain,
            "tuned": Replaced(plain, "mm"),
            "compile": None,
        }

    return Case(
        group=f"token_moe_{activation}",
        shape=shape,
        make_inputs=lambda: (random_tensor(shape, seed=1), random_tensor(shape, seed=2)),
        candidates=candidates,
        direction="step",
        grad_inputs=(),
        default_allocator=False,
        floor_flops=3 * 2 * factors * shape[0] * TOP_K * shape[1] * HIDDEN,
        verify=same_numbers(expected),
        rounds=ROUNDS,
        quick=shape == SHAPES[1],
    )


def cases() -> list[Case]:
    return [case_of(shape, activation) for activation in ("gelu", "swiglu") for shape in SHAPES]
