"""layer_norm2d with GELU: LayerNorm over the channels of an image, then the exact GELU.

The eager side is LayerNorm2d as CamoXpert writes it (mahi-chan/camoXpert models/backbone.py, 47e858c) followed by GELU.
The peer ``permuted`` is torch's own layer_norm on a channels-last view, the usual faster spelling.

Ideal bytes in elements of x: forward reads 1, writes 1; backward reads x and the gradient, writes 1.
"""

import math

import torch.nn.functional as F

from benchmarks.common import Case, camox_attr, random_tensor
from benchmarks.shapes import image_cases

EPS = 1e-6


def eager(x, weight, bias):
    mean = x.mean(1, keepdim=True)
    var = (x - mean).pow(2).mean(1, keepdim=True)
    normed = (x - mean) / (var + EPS).sqrt()
    return F.gelu(weight[None, :, None, None] * normed + bias[None, :, None, None])


def permuted(x, weight, bias):
    normed = F.layer_norm(x.permute(0, 2, 3, 1), weight.shape, weight, bias, EPS)
    return F.gelu(normed.permute(0, 3, 1, 2))


def make_case(shape, direction, dtype, layout) -> Case:
    def inputs():
        channels = shape[1]
        return (
            random_tensor(shape, dtype=dtype, layout=layout, seed=1),
            random_tensor((channels,), dtype=dtype, seed=2, scale=0.1) + 1,
            random_tensor((channels,), dtype=dtype, seed=3, scale=0.1),
        )

    def candidates():
        norm = camox_attr("layer_norm2d")
        return {
            "camox": lambda x, weight, bias: norm(x, weight, bias, eps=EPS, activation="gelu"),
            "eager": eager,
            "permuted": permuted,
        }

    elements = 5 if direction == "forward_backward" else 2
    return Case(
        group="layer_norm2d_gelu",
        shape=shape,
        make_inputs=inputs,
        candidates=candidates,
        direction=direction,
        dtype=dtype,
        layout=layout,
        floor_bytes=elements * math.prod(shape) * dtype.itemsize,
    )


def cases() -> list[Case]:
    return image_cases(make_case)
