"""rope: rotary position embedding from ready tables, pairs of neighbours (BDH) and of halves (GPT-NeoX, Llama).

The eager sides are the formulas of takzen/vision-bdh, models/vision_bdh_v3.py at 71cb8ab (but with its tables ready,
which it computes anew on every call), and of EleutherAI/gpt-neox, megatron/model/positional_embeddings.py at 007003a:
they read tables with one column an element, ours tables with one a pair. The peer ``complex`` multiplies complex
numbers, as the first Llama did.

Ideal bytes in elements of x: forward reads 1, writes 1; backward reads the gradient, writes 1.
"""

import math
from dataclasses import replace

import torch

from benchmarks.common import Case, camox_attr, random_tensor
from benchmarks.shapes import DIRECTIONS

SHAPES = {"rope_interleaved": (32, 6, 64, 1024), "rope_half_split": (8, 16, 512, 64)}


def interleaved_eager(x, cos, sin, wide_cos, wide_sin):
    partners = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).view(*x.size())
    return ((x * wide_cos) + (partners * wide_sin)).to(x.dtype)


def half_split_eager(x, cos, sin, wide_cos, wide_sin):
    first, second = x.chunk(2, dim=-1)
    partners = torch.cat((-second, first), dim=-1)
    return ((x * wide_cos) + (partners * wide_sin)).to(x.dtype)


def complex_product(x, cos, sin, wide_cos, wide_sin):
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.complex(cos, sin)
    return torch.view_as_real(turned).flatten(-2)


def make_case(group, direction, dtype) -> Case:
    shape = SHAPES[group]
    interleaved = group == "rope_interleaved"

    def inputs():
        frequencies = 1e4 ** -torch.linspace(0, 1, shape[3] // 2)
        angles = torch.outer(torch.arange(shape[2], dtype=torch.float32), frequencies)
        narrow = (angles.cos(), angles.sin())
        wide = (t.repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1) for t in narrow)
        return (random_tensor(shape, dtype=dtype, seed=1), *narrow, *wide)

    def candidates():
        rope = camox_attr("rope")
        found = {
            "camox": lambda x, cos, sin, *_: rope(x, cos, sin, interleaved=interleaved),
            "eager": interleaved_eager if interleaved else half_split_eager,
        }
        if interleaved and dtype is torch.float32:
            found["complex"] = complex_product
        return found

    elements = 4 if direction == "forward_backward" else 2
    return Case(
        group=group,
        shape=shape,
        make_inputs=inputs,
        candidates=candidates,
        direction=direction,
        dtype=dtype,
        floor_bytes=elements * math.prod(shape) * dtype.itemsize,
        grad_inputs=(0,),
        quick=dtype is torch.float32,
    )


def cases() -> list[Case]:
    found = []
    for group in SHAPES:
        for direction in DIRECTIONS:
            plain = make_case(group, direction, torch.float32)
            half = make_case(group, direction, torch.bfloat16)
            found += [plain, replace(half, companions={"float32": plain}, default_allocator=False)]
    return found
