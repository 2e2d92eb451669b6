"""cx.nn.MoELayer, 7 experts of which every image takes 3, beside the users' loop over images and choices.

Equal weights, gates spread so that the images go to all experts, dropout off. ``eager`` is the CamoXpert example's
layer on stock modules; it reads the chosen experts once, the users' own code waits for each. The peer ``grouped`` is
our layer around those stock modules: what one call per expert gives alone. torch.compile is left out: the loop breaks
its graph.
"""

import itertools
import math

import torch
from torch import nn

from benchmarks.common import Candidate, Case, camox_attr, float64_numbers, on_gpu, random_tensor, upstream_like

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


def layers(shape, x):
    """The three candidates, equal in weights."""
    made = camox_attr("nn.MoELayer")
    from examples.camoxpert import experts, moe

    torch.manual_seed(0)
    sizes = (shape[1], EXPERTS, TOP_K)
    with torch.device(x.device):
        stock = moe.MoELayer(*sizes)
        spread_gate(stock, x)
        ours = made(*sizes, aux_loss="usage_mse")
        grouped = made(*sizes, aux_loss="usage_mse", experts=(made_of(shape[1]) for made_of in experts.CLASSES))
    for layer in (ours, grouped):
        layer.load_state_dict(stock.state_dict())
    return {"camox": Output(ours), "eager": Output(stock), "grouped": Output(grouped)}


def limits(case, functions, inputs, upstream):
    """{name: (float64 value, what a float32 run may be away from it)}.

    A gradient of a layer is one long chain and a float32 run of it one sample of its rounding, in which a value near 0
    may also fall on the other side of a ReLU; PyTorch's own error is the largest over stock modules in both groupings,
    both memory formats and the batch in three orders. All errors together, as a norm, may be three times that, each
    alone ten times."""
    truth = float64_numbers(case, functions["eager"], inputs, upstream)
    own, together = dict.fromkeys(truth, 0.0), 0.0
    formats = torch.contiguous_format, torch.channels_last
    for name, layout, shift in itertools.product(("eager", "grouped"), formats, range(3)):
        rolled = [[t.detach().roll(shift, 0).contiguous(memory_format=layout) for t in ts] for ts in (inputs, upstream)]
        numbers = Candidate(case, functions[name], *rolled).numbers()
        for key in ("output0", "grad input0"):
            numbers[key] = numbers[key].roll(-shift, 0)
        own = {key: max(own[key], (value.double() - truth[key]).abs().max().item()) for key, value in numbers.items()}
        together = max(together, norm_of_error(numbers, truth))
    eps = torch.finfo(case.dtype).eps
    each = {key: (t, 10 * own[key] + 4 * eps * t.abs().max().item()) for key, t in truth.items()}
    return each, 3 * together


def norm_of_error(numbers, truth) -> float:
    return math.sqrt(sum((numbers[key].double() - t).square().sum().item() for key, t in truth.items()))


def case_of(shape) -> Case:
    found = []

    def inputs():
        return (random_tensor(shape, seed=1),)

    def verify(numbers, given):
        if not found:
            functions = layers(shape, *given)
            upstream = [grad.to(given[0].device) for grad in upstream_like(case, functions["eager"], given)]
            found[:] = limits(case, functions, given, upstream)
        each, together = found
        for name, (truth, limit) in each.items():
            error = (numbers[name].double() - truth).abs().max().item()
            if not error <= limit:
                return f"{name} is {error:.3g} from float64, allowed {limit:.3g}"
        error = norm_of_error(numbers, {name: truth for name, (truth, _) in each.items()})
        return None if error <= together else f"all are {error:.3g} from float64, allowed {together:.3g}"

    case = Case(
        group="moe_layer",
        shape=shape,
        make_inputs=inputs,
        candidates=lambda: {**layers(shape, inputs()[0].to(torch.get_default_device())), "compile": None},
        direction="forward_backward",
        verify=verify,
        quick=shape == SHAPES[2],
    )
    return case


@on_gpu(
    shapes=((32, 48, 56, 56),),
    rehearsal=(8, 8, 9, 9),
    size="layer",
    directions=("forward_backward",),
    dtypes=(torch.float32,),
)
def make_case(shape, direction, dtype, layout) -> Case:
    return case_of(shape)


def cases() -> list[Case]:
    return [case_of(shape) for shape in SHAPES]
