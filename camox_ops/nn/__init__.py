"""Modules with the constructors, parameters and buffers of the modules they replace."""

from .edge import EdgeExpert

__all__ = ["EdgeExpert"]
