"""CPU allocator settings that keep freed tensors with the process."""

from __future__ import annotations

import mmap
import os
from typing import NamedTuple

import torch

from .. import _C

# PyTorch reads it at its first CPU tensor: those of 2 MiB and more then begin on a page, and are advised as huge pages.
ON_PAGES = "THP_MEM_ALLOC_ENABLE"


class AllocatorReport(NamedTuple):
    """What tune_cpu_allocator did: whether the allocator takes such settings, what was set (mallopt names, one variable
    of PyTorch's, values), and one line to print."""

    supported: bool
    settings: dict[str, int]
    text: str

    def __str__(self) -> str:
        listed = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        return f"{self.text}{f' ({listed})' if listed else ''}"


def tune_cpu_allocator() -> AllocatorReport:
    """Tells glibc to keep freed memory instead of handing it back to the kernel, and PyTorch to begin large tensors on
    pages of their own.

    Every large CPU tensor is otherwise mapped afresh, zeroed page by page at its first touch and unmapped when it is
    freed, which can take longer than computing it. On pages because glibc (seen with 2.36) keeps the few bytes that it
    cuts off to align a block apart from it, so that a freed block is too small for the next tensor of its size, which
    then lies elsewhere, outside the caches.

    Call once, before the first tensors: only then does PyTorch ask for THP_MEM_ALLOC_ENABLE, which is set in os.environ
    unless it is there; the report says when that was too late. It holds for the whole process and changes no numbers.
    Peak resident memory can grow, since freed blocks stay. Elsewhere than on glibc (musl, macOS, Windows) nothing is
    changed and `supported` is False; a malloc that is preloaded ignores the settings."""
    supported, settings, text = _C.tune_cpu_allocator()
    if not supported:
        return AllocatorReport(supported, settings, text)
    before = os.environ.setdefault(ON_PAGES, "1")
    two = [torch.empty(4 << 20, dtype=torch.uint8, device="cpu") for _ in range(2)]
    if all(tensor.data_ptr() % mmap.PAGESIZE == 0 for tensor in two):
        return AllocatorReport(supported, {**settings, ON_PAGES: 1}, f"{text}, large tensors begin on pages")
    why = "tensors were made before" if before == "1" else f"{ON_PAGES} was {before!r}"
    return AllocatorReport(supported, settings, f"{text}; large tensors do not begin on pages, {why}")
