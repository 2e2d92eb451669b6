"""The shapes that the issues' speed targets are stated over, and the cases that most ops of (B,C,H,W) share."""

from dataclasses import replace

import torch

from benchmarks.common import Case

FIVE = ((4, 80, 72, 72), (4, 160, 36, 36), (4, 288, 18, 18), (4, 584, 9, 9), (2, 256, 32, 32))
QUICK = (FIVE[0], FIVE[3])
FEW_CHANNELS = (4, 3, 224, 224)
DIRECTIONS = ("forward", "forward_backward")


def image_cases(make_case) -> list[Case]:
    """The five shapes in both directions: float32 contiguous, channels_last beside contiguous, bfloat16 beside float32.

    make_case(shape, direction, dtype, layout) -> Case. The channels_last and bfloat16 cases time the float32 contiguous
    camox in the same rounds (as "camox_contiguous" and "camox_float32"), without the default allocator's column.
    """
    found = []
    for direction in DIRECTIONS:
        for shape in FIVE:
            plain = make_case(shape, direction, torch.float32, "contiguous")
            beside = make_case(shape, direction, torch.float32, "channels_last")
            half = make_case(shape, direction, torch.bfloat16, "contiguous")
            found += [
                replace(plain, quick=shape in QUICK),
                replace(beside, compare_with={"contiguous": plain}, default_allocator=False),
                replace(half, compare_with={"float32": plain}, default_allocator=False),
            ]
    return found


def few_channels_cases(make_case) -> list[Case]:
    """A batch of photographs in channels_last, beside the same contiguous: no target is stated over it."""
    found = []
    for direction in DIRECTIONS:
        plain = make_case(FEW_CHANNELS, direction, torch.float32, "contiguous")
        last = make_case(FEW_CHANNELS, direction, torch.float32, "channels_last")
        found.append(replace(last, compare_with={"contiguous": plain}, default_allocator=False))
    return found
