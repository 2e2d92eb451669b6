"""short_attention over EmberFormer's sequences, six steps and heads of twelve, against F.scaled_dot_product_attention.

q, k and v are slices of one projection, as nn.MultiheadAttention has them; the mask leaves out keys of some sequences.
Beside it, on GPUs, longer sequences in causal order, without a mask.
The peer ``plain`` is the formula in tensor operations. Ideal bytes in elements of q: forward reads 3, writes 1;
backward reads the gradient, q, k and v, writes 3.
"""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F

from benchmarks.common import Case, camox_attr, on_gpu, random_tensor
from benchmarks.shapes import DIRECTIONS

SHAPES = ((6400, 6, 8, 12), (512, 16, 8, 32), (64, 64, 8, 64))
CAUSAL_SHAPES = ((32, 64, 96, 32), (64, 64, 8, 64))  # the first: 32 texts of K-1, the four heads of 24 nodes


def sdpa(q, k, v, mask):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=~mask[:, None, None, :]).transpose(1, 2)


def causal_sdpa(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def plain(q, k, v, mask):
    scores = torch.einsum("sihd,sjhd->shij", q, k) * q.shape[3] ** -0.5
    weights = scores.masked_fill(mask[:, None, None, :], -math.inf).softmax(-1)
    return torch.einsum("shij,sjhd->sihd", weights, v)


@on_gpu(shapes=SHAPES[:1], rehearsal=(3, 4, 2, 6))
def make_case(shape, direction, dtype, layout="contiguous") -> Case:
    sequences, length = shape[:2]

    def inputs():
        mask = torch.zeros(sequences, length, dtype=torch.bool)
        mask[::3, : length // 3] = True
        return (*projection_of(shape, dtype), mask)

    def candidates():
        op = camox_attr("short_attention")
        ours = {"camox": lambda q, k, v, mask: op(q, k, v, key_padding_mask=mask), "eager": sdpa}
        return ours | {"plain": plain} if dtype is torch.float32 else ours

    return case_of("short_attention", shape, direction, dtype, layout, make_inputs=inputs, candidates=candidates)


@on_gpu(shapes=CAUSAL_SHAPES, rehearsal=(2, 17, 2, 8))
def make_case_causal(shape, direction, dtype, layout="contiguous") -> Case:
    def candidates():
        op = camox_attr("short_attention")
        return {"camox": lambda q, k, v: op(q, k, v, causal=True), "eager": causal_sdpa}

    def inputs():
        return projection_of(shape, dtype)

    return case_of("short_attention_causal", shape, direction, dtype, layout, make_inputs=inputs, candidates=candidates)


def projection_of(shape, dtype):
    """q, k and v of one projection."""
    sequences, length, heads, dim = shape
    return random_tensor((sequences, length, 3, heads, dim), dtype=dtype, seed=1).unbind(2)


def case_of(group, shape, direction, dtype, layout, **functions) -> Case:
    elements = 11 if direction == "forward_backward" else 4
    return Case(
        group=group,
        shape=shape,
        direction=direction,
        dtype=dtype,
        layout=layout,
        floor_bytes=elements * math.prod(shape) * dtype.itemsize,
        grad_inputs=(0, 1, 2),
        **functions,
    )


def cases() -> list[Case]:
    found = []
    for direction in DIRECTIONS:
        for shape in SHAPES:
            case = make_case(shape, direction, torch.float32)
            found.append(replace(case, quick=shape == SHAPES[0]))
        half = make_case(SHAPES[0], direction, torch.bfloat16)
        plain = make_case(SHAPES[0], direction, torch.float32)
        found.append(replace(half, compare_with={"float32": plain}, default_allocator=False))
    return found
