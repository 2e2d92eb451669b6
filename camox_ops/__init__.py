"""Fused CPU and CUDA ops for PyTorch training code: `import camox_ops as cx`."""

import torch  # noqa: F401  torch's libraries must be loaded before _C

from . import _C, nn, reference, train
from ._info import build_info, isa, supported_isas
from .ops.edge import EdgeMaps, edge_maps

__version__ = _C.build_info()["version"]

__all__ = [
    "EdgeMaps",
    "build_info",
    "edge_maps",
    "isa",
    "nn",
    "reference",
    "supported_isas",
    "train",
]
