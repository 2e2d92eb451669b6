"""frequency_bands in the emulator."""

from __future__ import annotations

import torch
from helpers import random_image
from images import SHAPES, ImageOp

from camox_ops import reference

OP = ImageOp(
    name="bands",
    maps="bands",
    outputs=("low", "mid", "high"),
    grads=4,
    options=[{}],
    reference=reference.frequency_bands,
    reference_backward=lambda x, grads: reference.frequency_bands_backward(*grads),
    # around the reach of a filter of 5, and a row band of 16
    shapes=[*SHAPES, (1, 2, 3, 4), (1, 2, 5, 8), (1, 8, 15, 3), (1, 1, 16, 2), (2, 1, 17, 8), (1, 1, 35, 4)],
)
every_kernel = OP.every_kernel


def with_barriers(**how):
    """The backward of channels_last, with blocks of some columns and of some channels; and of contiguous images, where
    two warps share a row, and where a thread has more than one row band: of bfloat16, whose rows are staged."""
    layouts = {"channels_last": ((1, 8, 6, 80), (1, 272, 3, 5)), "contiguous": ((2, 3, 19, 48), (4, 16, 6, 40))}
    for layout, shapes in layouts.items():
        dtype = torch.bfloat16 if layout == "contiguous" else torch.float32
        for shape in shapes:
            x = random_image(shape, dtype, layout)
            yield [OP.backward(x, [random_image(shape, dtype, layout, seed=i) for i in range(4)], **how)]
