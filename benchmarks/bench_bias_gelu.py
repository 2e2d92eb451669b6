"""bias_gelu between the products of EmberFormer's feed-forward blocks, with and without dropout after it.

With dropout the results are random: kept elements and their share are checked. Ideal bytes in elements of x: forward
reads 1, writes 1; backward reads the gradient and x, writes 1.
"""

import math
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.bench_dropout import P, wrong_share
from benchmarks.common import Case, camox_attr, random_tensor
from benchmarks.shapes import DIRECTIONS

SHAPES = ((1600, 6, 384), (4096, 512))


def wrong_dropout(numbers, inputs) -> str | None:
    before = F.gelu((inputs[0] + inputs[1]).detach().float())
    after = numbers["output0"].float()
    # in half precision eager rounds x + bias, which moves the small values of GELU's left tail by more than a rounding
    rtol, atol = (1e-4, 1e-5) if numbers["output0"].dtype == torch.float32 else (2e-2, 1e-2)
    if not torch.allclose(after, torch.where(after == 0, 0.0, before / (1 - P)), rtol=rtol, atol=atol):
        return "a kept element is not gelu(x + bias) / (1 - p)"
    if "grad input0" in numbers and bool((numbers["grad input0"][(after == 0) & (before.abs() > 1e-3)] != 0).any()):
        return "a gradient is not 0 where the output was dropped"
    return wrong_share(after == 0, before.abs() > 1e-3)


def case_of(group, shape, direction, dtype, layout="contiguous") -> Case:
    dropped = group == "bias_gelu_dropout"

    def candidates():
        op = camox_attr("bias_gelu")
        return {
            "camox": lambda x, bias: op(x, bias, p=P, training=dropped),
            "eager": lambda x, bias: F.dropout(F.gelu(x + bias), P, dropped),
        }

    elements = 5 if direction == "forward_backward" else 2
    return Case(
        group=group,
        shape=shape,
        make_inputs=lambda: (
            random_tensor(shape, dtype=dtype, seed=1),
            random_tensor(shape[-1:], dtype=dtype, seed=2, scale=0.1),
        ),
        candidates=candidates,
        direction=direction,
        dtype=dtype,
        layout=layout,
        floor_bytes=elements * math.prod(shape) * dtype.itemsize,
        verify=wrong_dropout if dropped else None,
    )


make_case_bias_gelu = partial(case_of, "bias_gelu")
make_case_bias_gelu_dropout = partial(case_of, "bias_gelu_dropout")


def cases() -> list[Case]:
    found = []
    for group in ("bias_gelu", "bias_gelu_dropout"):
        for direction in DIRECTIONS:
            for shape in SHAPES:
                found.append(replace(case_of(group, shape, direction, torch.float32), quick=shape == SHAPES[0]))
            half = case_of(group, SHAPES[0], direction, torch.bfloat16)
            plain = case_of(group, SHAPES[0], direction, torch.float32)
            found.append(replace(half, compare_with={"float32": plain}, default_allocator=False))
    return found
