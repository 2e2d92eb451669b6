"""Modules with the constructors, parameters and buffers of the modules they replace."""

from . import projections
from .bands import FrequencyExpert
from .bdh import BidirectionalBDHAttention
from .edge import EdgeExpert
from .norm2d import LayerNorm2d
from .rope import RotaryEmbedding

__all__ = [
    "BidirectionalBDHAttention",
    "EdgeExpert",
    "FrequencyExpert",
    "LayerNorm2d",
    "RotaryEmbedding",
    "projections",
]
