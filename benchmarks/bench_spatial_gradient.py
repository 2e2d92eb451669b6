"""spatial_gradient: derivatives of every channel along x and y by a 3x3 filter.

The eager side is two grouped convolutions with zero padding, their kernels made once. Ideal bytes in elements of x:
forward reads 1, writes 2; backward reads 2 gradients, writes 1.
"""

import math

import torch
import torch.nn.functional as F

from benchmarks.common import Case, camox_attr, random_tensor
from benchmarks.shapes import few_channels_cases, image_cases

SOBEL = torch.tensor([[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]]).view(1, 1, 3, 3)


def make_case(shape, direction, dtype, layout) -> Case:
    channels = shape[1]
    kernels = [kernel.to(dtype).repeat(channels, 1, 1, 1) for kernel in (SOBEL, SOBEL.mT)]

    def eager(x):
        return tuple(F.conv2d(x, kernel.to(x.dtype), padding=1, groups=channels) for kernel in kernels)

    elements = 6 if direction == "forward_backward" else 3
    return Case(
        group="spatial_gradient",
        shape=shape,
        make_inputs=lambda: (random_tensor(shape, dtype=dtype, layout=layout, seed=1),),
        candidates=lambda: {"camox": camox_attr("spatial_gradient"), "eager": eager},
        direction=direction,
        dtype=dtype,
        layout=layout,
        floor_bytes=elements * math.prod(shape) * dtype.itemsize,
    )


def cases() -> list[Case]:
    return image_cases(make_case) + few_channels_cases(make_case)
