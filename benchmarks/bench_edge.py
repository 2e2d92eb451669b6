"""edge_maps: Sobel, Laplacian and gradient magnitude of every channel.

The eager side is the formula as CamoXpert's EdgeExpert computes it (mahi-chan/camoXpert models/experts.py, 47e858c):
three grouped 3x3 convolutions with zero padding, their kernels repeated for every channel on every call. The peer
``compile_slices`` is the same formula rewritten so that torch.compile can fuse all of it (it keeps convolutions as
calls). Kornia's sobel is no peer: its border is replicated and its kernels normalised, so its numbers differ.

Ideal bytes in elements of x: forward reads 1, writes 3 (stacked: 4); backward reads x and as many gradients, writes 1.
"""

import math

import torch
import torch.nn.functional as F

from benchmarks.common import Case, camox_attr, random_tensor
from benchmarks.shapes import DIRECTIONS, FIVE, few_channels_cases, image_cases

EPS = 1e-8
SOBEL = torch.tensor([[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]]).view(1, 1, 3, 3)
LAPLACIAN = torch.tensor([[0.0, 1.0, 0.0], [1.0, -4.0, 1.0], [0.0, 1.0, 0.0]]).view(1, 1, 3, 3)


def magnitudes(gx, gy, lap):
    sobel = torch.sqrt(gx**2 + gy**2 + EPS)
    laplacian = torch.abs(lap)
    return sobel, laplacian, torch.sqrt(sobel**2 + laplacian**2 + EPS)


def eager(x):
    channels = x.shape[1]
    kernels = [k.to(x.dtype).repeat(channels, 1, 1, 1) for k in (SOBEL, SOBEL.mT, LAPLACIAN)]
    return magnitudes(*(F.conv2d(x, k, padding=1, groups=channels) for k in kernels))


def eager_stacked(x):
    return torch.cat([*eager(x), x], dim=1)


def slices(x):
    """The formula in shifted slices, which torch.compile fuses into one loop; in eager mode it is slow."""
    height, width = x.shape[-2:]
    padded = F.pad(x, (1, 1, 1, 1))
    at = {(i, j): padded[..., i : i + height, j : j + width] for i in range(3) for j in range(3)}
    gx = at[0, 2] - at[0, 0] + 2 * (at[1, 2] - at[1, 0]) + at[2, 2] - at[2, 0]
    gy = at[2, 0] - at[0, 0] + 2 * (at[2, 1] - at[0, 1]) + at[2, 2] - at[0, 2]
    return magnitudes(gx, gy, at[0, 1] + at[1, 0] + at[1, 2] + at[2, 1] - 4 * at[1, 1])


def make_case(shape, direction, dtype, layout, stacked=False) -> Case:
    def inputs():
        # multiples of 1/1024 make the Laplacian exact, so that no candidate sees another sign of a tiny one
        x = torch.round(random_tensor(shape, seed=1) * 1024) / 1024
        return (x.to(dtype, memory_format=getattr(torch, memory_format)),)

    def candidates():
        edge_maps = camox_attr("edge_maps")
        if stacked:
            return {"camox": lambda x: edge_maps(x, eps=EPS, stacked=True), "eager": eager_stacked}
        peers = {"compile_slices": slices} if dtype is torch.float32 and layout == "contiguous" else {}
        return {"camox": lambda x: edge_maps(x, eps=EPS), "eager": eager, **peers}

    memory_format = "channels_last" if layout == "channels_last" else "contiguous_format"
    maps = 4 if stacked else 3
    elements = 1 + maps + (2 + maps if direction == "forward_backward" else 0)
    return Case(
        group="edge_maps_stacked" if stacked else "edge_maps",
        shape=shape,
        make_inputs=inputs,
        candidates=candidates,
        direction=direction,
        dtype=dtype,
        layout=layout,
        floor_bytes=elements * math.prod(shape) * dtype.itemsize,
        default_allocator=not stacked,
    )


def cases() -> list[Case]:
    stacked = [make_case(shape, d, torch.float32, "contiguous", stacked=True) for d in DIRECTIONS for shape in FIVE]
    return image_cases(make_case) + few_channels_cases(make_case) + stacked
