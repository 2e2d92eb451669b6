"""frequency_bands: low, middle and high band of every channel by box filters of 3 and 5.

The eager side is the formula as CamoXpert's FrequencyExpert computes it (mahi-chan/camoXpert models/experts.py,
47e858c), which pools by 3 twice. The peer ``pool_once`` does not.

Ideal bytes in elements of x: forward reads 1, writes 3; backward reads the 3 gradients, writes 1.
"""

import math

import torch.nn.functional as F

from benchmarks.common import Case, camox_attr, random_tensor
from benchmarks.shapes import image_cases


def box(x, size):
    return F.avg_pool2d(x, size, stride=1, padding=size // 2)


def eager(x):
    low = box(x, 3)
    return low, box(x, 3) - box(x, 5), x - low


def pool_once(x):
    low = box(x, 3)
    return low, low - box(x, 5), x - low


def make_case(shape, direction, dtype, layout) -> Case:
    elements = 8 if direction == "forward_backward" else 4
    return Case(
        group="frequency_bands",
        shape=shape,
        make_inputs=lambda: (random_tensor(shape, dtype=dtype, layout=layout, seed=1),),
        candidates=lambda: {"camox": camox_attr("frequency_bands"), "eager": eager, "pool_once": pool_once},
        direction=direction,
        dtype=dtype,
        layout=layout,
        floor_bytes=elements * math.prod(shape) * dtype.itemsize,
    )


def cases() -> list[Case]:
    return image_cases(make_case)
