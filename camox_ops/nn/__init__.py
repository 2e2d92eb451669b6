"""Modules with the constructors, parameters and buffers of the modules they replace."""

from .bands import FrequencyExpert
from .edge import EdgeExpert

__all__ = ["EdgeExpert", "FrequencyExpert"]
