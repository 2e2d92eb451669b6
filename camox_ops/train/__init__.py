"""Helpers for training loops."""

from .allocator import AllocatorReport, tune_cpu_allocator

__all__ = ["AllocatorReport", "tune_cpu_allocator"]
