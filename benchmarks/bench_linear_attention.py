"""linear_attention on heads that are views of the output of a qkv convolution, (B, 3C, H, W), to a (B, C, H, W).

The eager side of "feature" is SDTAEncoder.linear_attention of mahi-chan/camoXpert, models/backbone.py at 47e858c, with
the rearrangement to (B, C, H, W) that follows it; that of "sum" is the same with the denominator of the formula. In
``standard_attention`` the baseline is F.scaled_dot_product_attention on the same heads: other numbers, the same task.

Ideal bytes in elements of q: forward reads q, k, v, writes out; backward reads q, k, v and the gradient, writes three.
"""

import math
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.common import Case, camox_attr, on_gpu, random_tensor
from benchmarks.shapes import DIRECTIONS

SHAPES = ((2, 8, 2304, 32), (4, 8, 5184, 10), (4, 8, 1296, 20))
STANDARD = (1, 8, 2304, 32)


def heads_of(shape, dtype, layout):
    """q, k, v as (B, H, T, D) views of a convolution's output."""
    batch, heads, length, dim = shape
    side = math.isqrt(length)
    qkv = random_tensor((batch, 3 * heads * dim, side, side), dtype=dtype, layout=layout, seed=1)
    return tuple(part.unflatten(1, (heads, dim)).flatten(3).transpose(2, 3) for part in qkv.chunk(3, dim=1))


def as_image(out):
    batch, heads, length, dim = out.shape
    side = math.isqrt(length)
    return out.transpose(2, 3).reshape(batch, heads * dim, side, side)


def eager_feature(q, k, v):
    q, k = F.elu(q) + 1, F.elu(k) + 1
    q, k = q / q.sum(dim=-1, keepdim=True), k / k.sum(dim=-1, keepdim=True)
    return as_image(q @ (k.transpose(-2, -1) @ v))


def eager_sum(q, k, v):
    q, k = F.elu(q) + 1, F.elu(k) + 1
    return as_image(q @ (k.transpose(-2, -1) @ v) / (q @ k.sum(dim=-2).unsqueeze(-1) + 1e-6))


def standard(q, k, v):
    return as_image(F.scaled_dot_product_attention(q, k, v))


def attention_case(normalize, eager, shape, direction, dtype=torch.float32, layout="contiguous") -> Case:
    def candidates():
        attention = camox_attr("linear_attention")
        return {"camox": lambda q, k, v: as_image(attention(q, k, v, normalize=normalize)), "eager": eager}

    elements = 11 if direction == "forward_backward" else 4
    return Case(
        group=f"linear_attention_{normalize}",
        shape=shape,
        make_inputs=lambda: heads_of(shape, dtype, layout),
        candidates=candidates,
        direction=direction,
        dtype=dtype,
        layout=layout,
        floor_bytes=elements * math.prod(shape) * dtype.itemsize,
    )


GPU = on_gpu(shapes=((16, 8, 7744, 32),), rehearsal=(1, 2, 9, 4))
make_case_feature = GPU(partial(attention_case, "feature", eager_feature))
make_case_sum = GPU(partial(attention_case, "sum", eager_sum))


def numbers_of_either(numbers, inputs):
    """The output is that of one of the two formulas."""
    q, k, v = (x.detach() for x in inputs)
    misses = [(numbers["output0"] - formula(q, k, v)).abs().max().item() for formula in (eager_feature, standard)]
    return None if min(misses) < 1e-4 else f"neither linear nor standard attention, off by {misses}"


def standard_case(direction) -> Case:
    case = attention_case("feature", standard, STANDARD, direction)

    def candidates():
        return {**case.candidates(), "compile": None}

    return replace(case, group="standard_attention", candidates=candidates, verify=numbers_of_either)


def cases() -> list[Case]:
    found = []
    for direction in DIRECTIONS:
        for normalize, eager in (("feature", eager_feature), ("sum", eager_sum)):
            for shape in SHAPES:
                plain = attention_case(normalize, eager, shape, direction)
                found.append(replace(plain, quick=normalize == "feature"))
        plain = attention_case("feature", eager_feature, SHAPES[0], direction)
        for dtype, layout, name in (
            (torch.float32, "channels_last", "contiguous"),
            (torch.bfloat16, "contiguous", "float32"),
        ):
            beside = attention_case("feature", eager_feature, SHAPES[0], direction, dtype, layout)
            found.append(replace(beside, compare_with={name: plain}, default_allocator=False))
        found.append(standard_case(direction))
    return found
