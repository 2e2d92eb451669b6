"""What a call costs by itself: the smallest of the other benchmarks' cases, where arithmetic and memory take no time.

Cold, this is the time to bring the code and the objects of a call back into the caches; small images cost little more.
"""

from dataclasses import replace

import torch

from benchmarks import bench_bands, bench_bias_gelu, bench_edge, bench_norm2d, bench_rope, bench_spatial_gradient
from benchmarks.common import Case
from benchmarks.shapes import DIRECTIONS

IMAGE = (1, 2, 8, 8)
CALLS = (
    (bench_edge.make_case, IMAGE),
    (bench_spatial_gradient.make_case, IMAGE),
    (bench_bands.make_case, IMAGE),
    (bench_norm2d.make_case, IMAGE),
    (bench_bias_gelu.make_case_bias_gelu, (8, 16)),
    (bench_rope.make_case_half_split, (1, 1, 8, 16)),
)


def cases() -> list[Case]:
    found = []
    for make_case, shape in CALLS:
        for direction in DIRECTIONS:
            case = make_case(shape, direction, torch.float32, "contiguous")
            quick = make_case is bench_edge.make_case
            found.append(replace(case, group=f"call_{case.group}", floor_bytes=0, default_allocator=False, quick=quick))
    return found
