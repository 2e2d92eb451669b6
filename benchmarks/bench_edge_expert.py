"""cx.nn.EdgeExpert, whole module, beside the stock module; and the ways to compute its four 1x1 branches.

``expert_branches`` has four 1x1 convolutions over the four channel ranges of the stacked maps: camox is what the module
does (one batched product), eager is four convolutions, the peer ``grouped`` one grouped convolution.
"""

import torch
from torch import nn

from benchmarks.common import Case, camox_attr, random_tensor

SHAPES = ((4, 48, 56, 56), (4, 160, 14, 14))


def expert_case(name: str, shape) -> Case:
    """Forward and backward of ``camox_ops.nn.<name>`` and the stock module of the CamoXpert example, equal weights."""

    def candidates():
        module = camox_attr(f"nn.{name}")
        from examples.camoxpert import experts

        torch.manual_seed(0)
        stock = getattr(experts, name)(shape[1])
        ours = module(shape[1])
        ours.load_state_dict(stock.state_dict())
        return {"camox": ours, "eager": stock}

    return Case(
        group=name,
        shape=shape,
        make_inputs=lambda: (random_tensor(shape, seed=1),),
        candidates=candidates,
        direction="forward_backward",
        quick=shape == SHAPES[1],
    )


class Branches(nn.Module):
    """Four 1x1 convolutions, computed on the stacked maps by ``compute(maps, convolutions)``."""

    def __init__(self, channels, compute):
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(channels, channels // 4, 1) for _ in range(4))
        self.compute = compute

    def forward(self, maps):
        return self.compute(maps, list(self.convolutions))


def four_convolutions(maps, convolutions):
    return torch.cat([conv(part) for conv, part in zip(convolutions, maps.chunk(4, 1), strict=True)], 1)


def grouped(maps, convolutions):
    weight = torch.cat([conv.weight for conv in convolutions])
    return nn.functional.conv2d(maps, weight, torch.cat([conv.bias for conv in convolutions]), groups=4)


def branches_case(shape) -> Case:
    batch, channels, height, width = shape

    def candidates():
        ways = {"camox": camox_attr("nn._branches.stacked_branches"), "eager": four_convolutions, "grouped": grouped}
        modules = {name: Branches(channels, compute) for name, compute in ways.items()}
        for module in modules.values():
            module.load_state_dict(modules["eager"].state_dict())
        return modules

    return Case(
        group="expert_branches",
        shape=shape,
        make_inputs=lambda: (random_tensor((batch, 4 * channels, height, width), seed=1),),
        candidates=candidates,
        direction="forward_backward",
        default_allocator=False,
    )


def cases() -> list[Case]:
    return [expert_case("EdgeExpert", shape) for shape in SHAPES] + [branches_case(shape) for shape in SHAPES]
