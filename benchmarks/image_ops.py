"""The cases of an op of one image and one image of its shape (camox_ops._ops.IMAGE_OPS).

Ideal bytes in elements of x: forward reads 1, writes 1; backward reads x and the gradient, writes 1.
"""

import math
from collections.abc import Callable

from benchmarks.common import Case, camox_attr, random_tensor


def case_maker(op: str, eager: Callable | None = None) -> Callable:
    """make_case(shape, direction, dtype, layout). eager(x): what a user would write without the op, with the zero
    border; None: the formula in camox_ops.reference. torch.compile gets the same."""

    def make_case(shape, direction, dtype, layout) -> Case:
        elements = 5 if direction == "forward_backward" else 2
        return Case(
            group=op,
            shape=shape,
            make_inputs=lambda: (random_tensor(shape, dtype=dtype, layout=layout, seed=1),),
            candidates=lambda: {"camox": camox_attr(op), "eager": eager or camox_attr(f"reference.{op}")},
            direction=direction,
            dtype=dtype,
            layout=layout,
            floor_bytes=elements * math.prod(shape) * dtype.itemsize,
        )

    return make_case
