"""rope: rotary position embedding from ready tables, pairs of neighbours (BDH) and of halves (GPT-NeoX, Llama).

The eager sides are the formulas of takzen/vision-bdh, models/vision_bdh_v3.py at 71cb8ab (but with its tables ready,
which it computes again on every call), and of EleutherAI/gpt-neox, megatron/model/positional_embeddings.py at 007003a:
they read tables with one column an element, ours tables with one a pair. The peer ``complex`` multiplies complex
numbers, as the first Llama did.

Ideal bytes in elements of x: forward reads 1, writes 1; backward reads the gradient, writes 1.
"""

import math
from dataclasses import replace

import torch

from benchmarks.common import Case, camox_attr, random_tensor
from benchmarks.shapes import DIRECTIONS


def rotated(x, wide_cos, wide_sin, partners_of):
    rotary_dim = wide_cos.shape[-1]
    turning = x if x.shape[-1] == rotary_dim else x[..., :rotary_dim]
    y = ((turning * wide_cos) + (partners_of(turning) * wide_sin)).to(x.dtype)
    return y if turning is x else torch.cat((y, x[..., rotary_dim:]), dim=-1)


def neighbours(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).view(x.shape)


def halves(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def complex_product(x, cos, sin, *_):
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.complex(cos, sin)).flatten(-2)


def rope_case(shape, direction, dtype, layout, interleaved) -> Case:
    """shape (B, H, T, D); of an odd D the last element passes."""
    rotary_dim = shape[3] // 2 * 2

    def inputs():
        frequencies = 1e4 ** -torch.linspace(0, 1, rotary_dim // 2)
        angles = torch.outer(torch.arange(shape[2], dtype=torch.float32), frequencies)
        narrow = (angles.cos(), angles.sin())
        wide = (t.repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1) for t in narrow)
        return (random_tensor(shape, dtype=dtype, layout=layout, seed=1), *narrow, *wide)

    def candidates():
        rope, partners_of = camox_attr("rope"), neighbours if interleaved else halves
        found = {
            "camox": lambda x, cos, sin, *_: rope(x, cos, sin, interleaved=interleaved, rotary_dim=rotary_dim),
            "eager": lambda x, cos, sin, *wide: rotated(x, *wide, partners_of),
        }
        if interleaved and dtype is torch.float32 and rotary_dim == shape[3] and layout == "contiguous":
            found["complex"] = complex_product
        return found

    elements = 4 if direction == "forward_backward" else 2
    return Case(
        group="rope_interleaved" if interleaved else "rope_half_split",
        shape=shape,
        make_inputs=inputs,
        candidates=candidates,
        direction=direction,
        dtype=dtype,
        layout=layout,
        floor_bytes=elements * math.prod(shape) * dtype.itemsize,
        grad_inputs=(0,),
        quick=dtype is torch.float32,
    )


def make_case_interleaved(shape, direction, dtype, layout) -> Case:
    return rope_case(shape, direction, dtype, layout, interleaved=True)


def make_case_half_split(shape, direction, dtype, layout) -> Case:
    return rope_case(shape, direction, dtype, layout, interleaved=False)


SHAPES = {make_case_interleaved: (32, 6, 64, 1024), make_case_half_split: (8, 16, 512, 64)}


def cases() -> list[Case]:
    found = []
    for make_case, shape in SHAPES.items():
        for direction in DIRECTIONS:
            plain = make_case(shape, direction, torch.float32, "contiguous")
            half = make_case(shape, direction, torch.bfloat16, "contiguous")
            found += [plain, replace(half, compare_with={"float32": plain}, default_allocator=False)]
    return found
