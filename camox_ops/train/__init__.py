"""Helpers for training loops."""

from .allocator import AllocatorReport, tune_cpu_allocator
from .checkpointing import CheckpointingPolicy, gradient_checkpointing_policy
from .loader import LoaderOptions, loader_options
from .meter import LossMeter
from .progress import ProgressBar
from .tune import KernelReport, TuneReport, restore_cpu, tune_cpu

__all__ = [
    "AllocatorReport",
    "CheckpointingPolicy",
    "KernelReport",
    "LoaderOptions",
    "LossMeter",
    "ProgressBar",
    "TuneReport",
    "gradient_checkpointing_policy",
    "loader_options",
    "restore_cpu",
    "tune_cpu",
    "tune_cpu_allocator",
]
