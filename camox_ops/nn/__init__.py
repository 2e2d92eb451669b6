"""Modules with the constructors, parameters and buffers of the modules they replace."""

from .bands import FrequencyExpert
from .edge import EdgeExpert
from .norm2d import LayerNorm2d
from .rope import RotaryEmbedding
from .temporal import TemporalEncoder

__all__ = ["EdgeExpert", "FrequencyExpert", "LayerNorm2d", "RotaryEmbedding", "TemporalEncoder"]
