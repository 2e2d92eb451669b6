"""Every op in plain PyTorch, at any precision: the truth that the kernels are tested against, and what second
derivatives differentiate. Slow and memory-hungry on purpose."""

from .edge import edge_maps, edge_maps_backward

__all__ = ["edge_maps", "edge_maps_backward"]
