"""edge_maps in the rig."""

from __future__ import annotations

from pictures import BORDERS, PictureOp

from camox_ops import reference

OP = PictureOp(
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
