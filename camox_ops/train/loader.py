"""DataLoader settings that fit the machine."""

from __future__ import annotations

import os

import torch

from .machine import usable_cpus

MOST_WORKERS = 8
PREFETCHED = 2


class LoaderOptions(dict):
    """Keyword arguments for torch.utils.data.DataLoader; `reasons` says why each one is what it is, str() all of it."""

    def __init__(self, chosen: dict[str, tuple]):
        super().__init__({name: value for name, (value, _) in chosen.items()})
        self.reasons = {name: reason for name, (_, reason) in chosen.items()}

    def __str__(self) -> str:
        shown = (f"{name}={value} ({self.reasons.get(name, 'as set')})" for name, value in self.items())
        return "loader: " + "; ".join(shown)


def loader_options(
    num_workers: int | None = None, *, device: torch.device | str | None = None, prefetch_factor: int | None = None
) -> LoaderOptions:
    """Settings of a training DataLoader: `DataLoader(images, 32, **cx.train.loader_options())`.

    Workers live through all epochs (persistent_workers), each keeps a few batches ready (prefetch_factor), and batches
    lie in pinned memory when they go to a GPU, so that `.to(device, non_blocking=True)` runs beside the host.

    num_workers: None chooses by the CPUs that this process may use (affinity, container quota), shared among torchrun's
        local processes. Training on a GPU: all of them but the one of the training loop, at most 8. Training on the
        CPU: one in four, hence none on 2 cores, where a worker would take its time from the training step itself.
        A given number is kept.
    device: where the model trains; None: the GPU if there is one.
    prefetch_factor: batches that each worker keeps ready; None: 2.

    Without workers persistent_workers is False and prefetch_factor left out, as DataLoader wants it."""
    for name, value, least in (("num_workers", num_workers, 0), ("prefetch_factor", prefetch_factor, 1)):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"loader_options: {name} must be an int or None, got {value!r}")
        if value < least:
            raise ValueError(f"loader_options: {name} must be >= {least}, got {value}")
    gpu = torch.cuda.is_available() if device is None else torch.device(device).type == "cuda"
    workers, reason = _workers(gpu) if num_workers is None else (num_workers, "as asked")
    if num_workers is not None and num_workers > usable_cpus():
        reason += f", though only {usable_cpus()} CPUs are there"
    chosen = {"num_workers": (workers, reason)}
    if workers:
        chosen["persistent_workers"] = (True, "no new processes each epoch")
        ready = PREFETCHED if prefetch_factor is None else prefetch_factor
        chosen["prefetch_factor"] = (ready, f"{ready * workers} batches wait at most")
    else:
        chosen["persistent_workers"] = (False, "no workers")
    chosen["pin_memory"] = (gpu, "copies to the GPU run beside the host" if gpu else "no GPU to copy to")
    return LoaderOptions(chosen)


def _workers(gpu: bool) -> tuple[int, str]:
    given = os.environ.get("LOCAL_WORLD_SIZE") or "1"
    if not given.isdecimal():
        raise ValueError(f"loader_options: the environment's LOCAL_WORLD_SIZE must be a number, got {given!r}")
    processes = max(1, int(given))
    cpus = max(1, usable_cpus() // processes)
    where = f"{cpus} CPU{'s' * (cpus > 1)}" + (f" for each of {processes} processes" if processes > 1 else "")
    if gpu:
        return min(MOST_WORKERS, max(1, cpus - 1)), f"{where}, one of them for the training loop"
    return min(MOST_WORKERS, cpus // 4), f"{where}, which the training step on the CPU needs itself"
