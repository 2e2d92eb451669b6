"""Helpers for training loops."""

from .allocator import AllocatorReport, tune_cpu_allocator
from .checkpointing import CheckpointingPolicy, gradient_checkpointing_policy
from .loader import LoaderOptions, loader_options
from .meter import LossMeter
from .progress import ProgressBar

__all__ = [
    "AllocatorReport",
    "CheckpointingPolicy",
    "LoaderOptions",
    "LossMeter",
    "ProgressBar",
    "gradient_checkpointing_policy",
    "loader_options",
    "tune_cpu_allocator",
]
