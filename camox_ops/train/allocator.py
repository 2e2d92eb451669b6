"""CPU allocator settings that keep freed tensors with the process."""

from __future__ import annotations

from typing import NamedTuple

from .. import _C


class AllocatorReport(NamedTuple):
    """What tune_cpu_allocator did: whether the allocator takes such settings, what was set (mallopt names and values),
    and one line to print."""

    supported: bool
    settings: dict[str, int]
    text: str

    def __str__(self) -> str:
        listed = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        return f"{self.text}{f' ({listed})' if listed else ''}"


def tune_cpu_allocator() -> AllocatorReport:
    """Tells glibc to keep freed memory instead of handing it back to the kernel.

    Every large CPU tensor is otherwise mapped afresh, zeroed page by page at its first touch and unmapped when it is
    freed, which can take longer than computing it. Call once, before the first tensors; it holds for the whole process
    and changes no numbers. Peak resident memory can grow, since freed blocks stay. Elsewhere than on glibc (musl,
    macOS, Windows) nothing is changed and `supported` is False; a malloc that is preloaded ignores the settings."""
    return AllocatorReport(*_C.tune_cpu_allocator())
