"""box_mean: means over windows of 3, 11 and 31 pixels, beside avg_pool2d and beside two one-dimensional pools.

avg_pool2d reads a window's pixels for each of them, the peer ``two_pools`` a row and a column of them. Ideal bytes in
elements of x: forward reads 1, writes 1; backward reads the gradient, writes 1.
"""

import math
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.common import Case, camox_attr, random_tensor
from benchmarks.shapes import DIRECTIONS

FEATURES = (4, 80, 72, 72)
MASKS = (8, 1, 352, 352)
SERIES = (32, 64, 336)
SLOW_ROUNDS = 7


def pool(size, x):
    return F.avg_pool2d(x, size, 1, size // 2)


def two_pools(size, x):
    return F.avg_pool2d(F.avg_pool2d(x, (1, size), 1, (0, size // 2)), (size, 1), 1, (size // 2, 0))


def case_of(size, shape, direction, dtype, layout) -> Case:
    def candidates():
        op = camox_attr("box_mean")
        if len(shape) == 3:
            return {"camox": lambda x: op(x, size), "eager": lambda x: F.avg_pool1d(x, size, 1, size // 2)}
        return {"camox": lambda x: op(x, size), "eager": partial(pool, size), "two_pools": partial(two_pools, size)}

    elements = 4 if direction == "forward_backward" else 2
    return Case(
        group=f"box_mean_{size}",
        shape=shape,
        make_inputs=lambda: (random_tensor(shape, dtype=dtype, layout=layout, seed=1),),
        candidates=candidates,
        direction=direction,
        dtype=dtype,
        layout=layout,
        floor_bytes=elements * math.prod(shape) * dtype.itemsize,
        rounds=SLOW_ROUNDS if size == 31 else None,
    )


make_case_box_mean_3 = partial(case_of, 3)
make_case_box_mean_31 = partial(case_of, 31)


def cases() -> list[Case]:
    found = []
    for direction in DIRECTIONS:
        for size in (3, 11, 31):
            plain = case_of(size, FEATURES, direction, torch.float32, "contiguous")
            last = case_of(size, FEATURES, direction, torch.float32, "channels_last")
            half = case_of(size, FEATURES, direction, torch.bfloat16, "contiguous")
            found += [
                replace(plain, quick=size == 3),
                replace(last, compare_with={"contiguous": plain}, default_allocator=False),
                replace(half, compare_with={"float32": plain}, default_allocator=False),
            ]
        found.append(case_of(31, MASKS, direction, torch.float32, "contiguous"))
        found.append(case_of(25, SERIES, direction, torch.float32, "contiguous"))
    return found
