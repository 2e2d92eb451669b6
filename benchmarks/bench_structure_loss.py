"""structure_loss of four outputs of one mask, as networks with deep supervision are trained.

The eager side is the function that F3Net (weijun88/F3Net src/train.py at eecace3), PraNet and SINet-V2 call once for
each output, which pools the mask by 31 each time; in ``structure_loss_weighted`` its weight is given to both sides.
Ideal bytes: forward reads logits, mask and weight of each output; backward reads them again, writes a gradient; the
weight is read and written once.
"""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F

from benchmarks.common import Case, camox_attr, random_tensor
from benchmarks.shapes import DIRECTIONS

OUTPUTS = 4
MASKS = (8, 1, 352, 352)
SLOW_ROUNDS = 5


def weight_of(mask):
    return 1 + 5 * torch.abs(F.avg_pool2d(mask, 31, 1, 15) - mask)


def loss_of(pred, mask, weight):
    """What the published function gives: its reduce='none' is a mean over the batch."""
    entropy = F.binary_cross_entropy_with_logits(pred, mask)
    entropy = (weight * entropy).sum(dim=(2, 3)) / weight.sum(dim=(2, 3))
    p = torch.sigmoid(pred)
    inter, union = ((p * mask) * weight).sum(dim=(2, 3)), ((p + mask) * weight).sum(dim=(2, 3))
    return (entropy + 1 - (inter + 1) / (union - inter + 1)).mean()


def published(*inputs):
    *outputs, mask = inputs
    return sum(loss_of(pred, mask, weight_of(mask)) for pred in outputs).float()  # as ours is beside half types too


def published_weighted(*inputs):
    *outputs, mask, weight = inputs
    return sum(loss_of(pred, mask, weight) for pred in outputs).float()


def inputs_of(shape, dtype, layout, weighted):
    outputs = [random_tensor(shape, dtype=dtype, layout=layout, seed=i) for i in range(OUTPUTS)]
    coarse = random_tensor((*shape[:2], -(-shape[2] // 32), -(-shape[3] // 32)), seed=9)
    mask = (F.interpolate(coarse, shape[2:], mode="bilinear") > 0).to(dtype)
    weight = 1 + 4 * random_tensor(shape, dtype=dtype, seed=8).sigmoid() if weighted else None
    return (*outputs, mask, weight) if weighted else (*outputs, mask)


def case_of(group, shape, direction, dtype, layout) -> Case:
    weighted = group == "structure_loss_weighted"

    def candidates():
        loss, weight_op = camox_attr("structure_loss"), camox_attr("structure_weight")

        def ours(*inputs):
            *outputs, mask, weight = inputs if weighted else (*inputs, weight_op(inputs[-1]))
            return sum(loss(pred, mask, weight=weight, bce="mean") for pred in outputs)

        return {"camox": ours, "eager": published_weighted if weighted else published}

    tensors = OUTPUTS * (3 if direction == "forward" else 7) + (0 if weighted else 2)
    return Case(
        group=group,
        shape=shape,
        make_inputs=lambda: inputs_of(shape, dtype, layout, weighted),
        candidates=candidates,
        direction=direction,
        dtype=dtype,
        layout=layout,
        floor_bytes=tensors * math.prod(shape) * dtype.itemsize,
        grad_inputs=tuple(range(OUTPUTS)),
        rounds=None if weighted else SLOW_ROUNDS,
        default_allocator=weighted,
    )


def make_case_structure_loss(shape, direction, dtype, layout) -> Case:
    return case_of("structure_loss", shape, direction, dtype, layout)


def cases() -> list[Case]:
    found = []
    for direction in DIRECTIONS:
        for group in ("structure_loss", "structure_loss_weighted"):
            case = case_of(group, MASKS, direction, torch.float32, "contiguous")
            found.append(replace(case, quick=group == "structure_loss_weighted"))
    return found
