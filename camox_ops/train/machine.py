"""What this process may use of the machine: CPUs and memory."""

from __future__ import annotations

import os
from pathlib import Path

import torch

GIB = 1 << 30
CGROUPS = Path("/sys/fs/cgroup")


def gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def _cgroup(controller: str = "") -> Path:
    """This process's folder of cgroup v2, or of a controller of v1; their root where only that is shown."""
    root = CGROUPS / controller
    for line in (_read(Path("/proc/self/cgroup")) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            folder = root / path.lstrip("/")
            return folder if folder.is_dir() else root
    return root


def _quota() -> float | None:
    """CPUs' time that a container has, None without a limit: of cgroup v2, or of v1, where -1 is none."""
    files = [_read(_cgroup("cpu") / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
    values = (_read(_cgroup() / "cpu.max") or " ".join(filter(None, files))).split()
    if len(values) != 2 or values[0] in ("max", "-1"):
        return None
    return int(values[0]) / int(values[1])


def usable_cpus() -> int:
    """CPUs that this process may run on: its affinity, and a container's quota where that is less."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota()
    return cpus if quota is None else min(cpus, max(1, int(quota)))


def _host_memory() -> int | None:
    for line in (_read(Path("/proc/meminfo")) or "").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
            break
    else:
        return None
    limit, used = (_read(_cgroup() / name) for name in ("memory.max", "memory.current"))
    if limit and used and limit.strip() != "max":
        free = min(free, int(limit) - int(used) + _cached_files())
    return max(0, free)


def _cached_files() -> int:
    """What a container's memory.current counts though the kernel gives it back when memory is asked for."""
    rows = (line.split() for line in (_read(_cgroup() / "memory.stat") or "").splitlines())
    return sum(int(row[1]) for row in rows if row[0] in ("active_file", "inactive_file"))


def free_memory(device: torch.device) -> int | None:
    """Bytes that a CUDA device, or the host within its container's limit, still has; None where nobody says.

    Memory that PyTorch's CUDA allocator keeps but does not use counts as free."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return _host_memory() if device.type == "cpu" else None
