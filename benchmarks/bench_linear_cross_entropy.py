"""linear_cross_entropy at K-1's head and at a larger vocabulary, against F.linear and F.cross_entropy.

Shapes are (rows, D, classes). The ideal on the CPU is compute: a product of 2 rows D classes FLOP for the loss, two
more for the gradients, which ours makes in the forward.
"""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F

from benchmarks.common import Case, camox_attr, on_gpu, random_tensor
from benchmarks.shapes import DIRECTIONS

SHAPES = ((4096, 256, 10000), (4096, 256, 32000))


def eager(x, weight, target):
    """The loss in float32, as ours is beside half types too."""
    return F.cross_entropy(F.linear(x, weight), target).float()


def cpu_case(shape, direction, dtype, layout="contiguous") -> Case:
    rows, depth, classes = shape

    def inputs():
        x = random_tensor((rows, depth), dtype=dtype, seed=1)
        weight = random_tensor((classes, depth), dtype=dtype, seed=2) * depth**-0.5
        return x, weight, torch.randint(classes, (rows,), generator=torch.Generator().manual_seed(3))

    products = 3 if direction == "forward_backward" else 1
    return Case(
        group="linear_cross_entropy",
        shape=shape,
        make_inputs=inputs,
        candidates=lambda: {"camox": camox_attr("linear_cross_entropy"), "eager": eager},
        direction=direction,
        dtype=dtype,
        layout=layout,
        floor_flops=products * 2 * math.prod(shape),
        grad_inputs=(0, 1),
        rounds=5,
    )


@on_gpu(shapes=SHAPES, rehearsal=(9, 8, 70))
def make_case(shape, direction, dtype, layout="contiguous") -> Case:
    """On a GPU the ideal is what must be read and written: x and weight, and backward their gradients too."""
    case, (rows, depth, classes) = cpu_case(shape, direction, dtype, layout), shape
    matrices = {"forward": 1, "backward": 2, "forward_backward": 3}[direction]
    return replace(case, floor_flops=0, floor_bytes=matrices * (rows + classes) * depth * dtype.itemsize)


def cases() -> list[Case]:
    found = [cpu_case(shape, direction, torch.float32) for direction in DIRECTIONS for shape in SHAPES]
    return [replace(case, quick=case.shape == SHAPES[0]) for case in found]
