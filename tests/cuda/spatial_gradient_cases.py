"""spatial_gradient in the emulator."""

from __future__ import annotations

from images import BORDERS, ImageOp

from camox_ops import reference

WEIGHTS = {"sobel": (1.0, 2.0), "scharr": (3.0, 10.0)}


def _fields(operator, border, normalized):
    side, middle = WEIGHTS[operator]
    total = 4 * side + 2 * middle if normalized else 1.0
    return {"side": side / total, "middle": middle / total, "border": border}


OP = ImageOp(
    name="spatial_gradient",
    maps="gradient",
    outputs=("gx", "gy"),
    grads=2,
    options=[
        {"operator": ("sobel", "scharr")[i % 2], "border": border, "normalized": i == 2}
        for i, border in enumerate(BORDERS)
    ],
    reference=reference.spatial_gradient,
    reference_backward=lambda x, grads, **options: reference.spatial_gradient_backward(*grads, **options),
    fields=_fields,
)
every_kernel = OP.every_kernel
