"""edge_maps in the emulator."""

from __future__ import annotations

from images import BORDERS, ImageOp

from camox_ops import reference

OP = ImageOp(
    name="edge",
    maps="maps",
    outputs=("sobel", "laplacian", "gradient"),
    grads=4,
    options=[{"eps": 1e-8, "border": border} for border in BORDERS],
    # at smaller ones the derivative of a square root magnifies the rounding of filters near 0
    backward_options={"eps": 1e-2},
    reference=reference.edge_maps,
    reference_backward=lambda x, grads, **options: reference.edge_maps_backward(x, *grads, **options),
    backward_reads_x=True,
)
every_kernel = OP.every_kernel
