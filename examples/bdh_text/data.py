"""Text as bytes: the sources of Python's own library, which are wherever Python is."""

import sysconfig
from pathlib import Path

import torch

from ..common.text import windows

__all__ = ["library_sources", "windows"]

HELD_OUT_EVERY = 10


def library_sources(folder=None, limit=None):
    """(training text, held-out text), uint8, of the .py files directly in a folder; None: Python's standard library.

    limit: of how many files at most.
    """
    folder = Path(sysconfig.get_path("stdlib") if folder is None else folder)
    paths = sorted(folder.glob("*.py"))[:limit]
    if len(paths) < 2:
        raise ValueError(f"folder must have at least 2 .py files, got {len(paths)} in {folder}")
    parts = {False: bytearray(), True: bytearray()}
    for number, path in enumerate(paths):
        parts[number % HELD_OUT_EVERY == 0] += path.read_bytes()
    return tuple(torch.frombuffer(parts[held_out], dtype=torch.uint8) for held_out in (False, True))
