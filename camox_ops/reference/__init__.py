"""Every op in plain PyTorch, at any precision: the truth that the kernels are tested against, and what second
derivatives differentiate. Slow and memory-hungry on purpose."""

from .bands import frequency_bands, frequency_bands_backward
from .edge import edge_maps, edge_maps_backward
from .norm2d import layer_norm2d, layer_norm2d_backward
from .rope import rope, rope_backward
from .spatial_gradient import spatial_gradient, spatial_gradient_backward

__all__ = [
    "edge_maps",
    "edge_maps_backward",
    "frequency_bands",
    "frequency_bands_backward",
    "layer_norm2d",
    "layer_norm2d_backward",
    "rope",
    "rope_backward",
    "spatial_gradient",
    "spatial_gradient_backward",
]
