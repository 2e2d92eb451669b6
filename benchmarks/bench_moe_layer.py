"""cx.nn.MoELayer, 7 experts of which every picture takes 3, beside the users' loop over pictures and choices.

Equal weights, gates spread so that the pictures go to all experts, dropout off. ``eager`` is the CamoXpert example's
layer on stock modules; it reads the chosen experts once, the users' own code waits for each. The peer ``grouped`` is
our layer around those stock modules: what one call per expert gives alone. torch.compile is left out: the loop breaks
its graph.
"""

import torch
from torch import nn

from benchmarks.common import Case, camox_attr, random_tensor

SHAPES = ((8, 48, 56, 56), (8, 96, 28, 28), (8, 160, 14, 14), (8, 304, 7, 7))
EXPERTS, TOP_K = 7, 3


class Output(nn.Module):
    """The first result of a layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer.eval()

    def forward(self, x):
        return self.layer(x)[0]


@torch.no_grad()
def spread_gate(layer, x):
    """Every expert's logit has mean 0 and deviation 1 over x."""
    convolution = layer.gate[1]
    logits = layer.gate(x).flatten(1)
    mean, deviation = logits.mean(0), logits.std(0)
    convolution.weight.div_(deviation.view(-1, 1, 1, 1))
    convolution.bias.sub_(mean).div_(deviation)


def make_case(shape) -> Case:
    def inputs():
        return (random_tensor(shape, seed=1),)

    def candidates():
        made = camox_attr("nn.MoELayer")
        from examples.camoxpert import experts, moe

        torch.manual_seed(0)
        sizes = (shape[1], EXPERTS, TOP_K)
        stock = moe.MoELayer(*sizes)
        spread_gate(stock, *inputs())
        ours = made(*sizes, aux_loss="usage_mse")
        ours.load_state_dict(stock.state_dict())
        grouped = made(*sizes, aux_loss="usage_mse", experts=(made_of(shape[1]) for made_of in experts.CLASSES))
        grouped.load_state_dict(stock.state_dict())
        return {"camox": Output(ours), "eager": Output(stock), "grouped": Output(grouped), "compile": None}

    return Case(
        group="moe_layer",
        shape=shape,
        make_inputs=inputs,
        candidates=candidates,
        direction="forward_backward",
        quick=shape == SHAPES[2],
    )


def cases() -> list[Case]:
    return [make_case(shape) for shape in SHAPES]
