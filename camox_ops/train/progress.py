"""A progress bar with loss, speed and, where there is a GPU, its utilisation."""

from __future__ import annotations

import ctypes
import numbers
import os
import sys
import time
from functools import cache
from typing import TextIO

import torch

WIDTH = 20


class _Rates(ctypes.Structure):
    """nvmlUtilization_t."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


@cache
def _nvml() -> ctypes.CDLL | None:
    """The driver's own library, for machines without Python bindings of it."""
    for name in ("libnvidia-ml.so.1", "nvml.dll"):
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        return library if library.nvmlInit_v2() == 0 else None
    return None


def _asked_of_driver() -> int | None:
    library = _nvml()
    if library is None:
        return None
    name = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    name = name if name.startswith(("GPU-", "MIG-")) else f"GPU-{name}"
    handle, rates = ctypes.c_void_p(), _Rates()
    if library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)):
        return None
    return None if library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(rates)) else rates.gpu


def gpu_utilisation() -> int | None:
    """Percent of the last moment in which the current GPU was busy; None where nobody says."""
    if not torch.cuda.is_available():
        return None
    try:
        return torch.cuda.utilization()
    except (ImportError, RuntimeError):  # no bindings of the driver's library, or another one than the driver's
        return _asked_of_driver()


class ProgressBar:
    """How far a loop is: `title 5/10  loss=1.2500  31.4 images/s  gpu=87%`.

        with cx.train.ProgressBar(len(loader), "epoch 1/30") as bar:
            for step, (images, masks) in enumerate(loader, 1):
                ...
                if step % 20 == 0:
                    bar.update(step, step * len(images), loss=meter.mean())

    On a terminal one line with a bar is rewritten, at most every `interval` seconds, and cut at the terminal's width;
    elsewhere, also where TERM is dumb, each update is a line of its own, so that log files stay readable. The GPU's
    utilisation is asked of its driver at each line shown.

    Args:
        total: steps of the loop, >= 0.
        title: what stands before the numbers.
        unit: what `count` of update counts.
        interval: seconds between two drawings on a terminal.
        stream: where to write; None: sys.stderr, or nowhere in a process without one."""

    def __init__(
        self,
        total: int,
        title: str = "",
        *,
        unit: str = "images",
        interval: float = 0.1,
        stream: TextIO | None = None,
    ):
        if isinstance(total, bool) or not isinstance(total, numbers.Integral):
            raise TypeError(f"ProgressBar: total must be an int, got {total!r}")
        if total < 0:
            raise ValueError(f"ProgressBar: total must be >= 0, got {total}")
        self.total, self.title, self.unit, self.interval = total, title, unit, interval
        self.stream = sys.stderr if stream is None else stream
        is_terminal = self.stream is not None and self.stream.isatty()
        self._terminal = is_terminal and os.environ.get("TERM") != "dumb"
        self._start = time.perf_counter()
        self._drawn = -float("inf")

    def update(self, step: int, count: float | None = None, **values: float) -> None:
        """Shows `step` of total, the mean speed when `count` (units since the start) is given, and each value by its
        name. A tensor among the values is read, which waits for its device: give what a LossMeter has read."""
        now = time.perf_counter()
        if self.stream is None:
            return
        if self._terminal and step < self.total and now - self._drawn < self.interval:
            return
        self._drawn = now
        shown = [f"{self.title} {self._bar(step)}{step}/{self.total}".lstrip()]
        shown += [f"{name}={float(value):.4f}" for name, value in values.items()]
        if count is not None:
            shown.append(f"{count / max(now - self._start, 1e-9):.1f} {self.unit}/s")
        busy = gpu_utilisation()
        if busy is not None:
            shown.append(f"gpu={busy}%")
        line = "  ".join(shown)
        self.stream.write(f"\r\033[K{line[: self._columns()]}" if self._terminal else f"{line}\n")
        self.stream.flush()

    def _bar(self, step: int) -> str:
        if not self._terminal:
            return ""
        filled = WIDTH * min(step, self.total) // max(1, self.total)
        return f"[{'#' * filled}{'.' * (WIDTH - filled)}] "

    def _columns(self) -> int | None:
        """Of a terminal, less the one after the cursor: a longer line would be continued in the next row, and left."""
        try:
            columns = os.get_terminal_size(self.stream.fileno()).columns
        except (OSError, ValueError, AttributeError):  # one of another kind, such as an IDE's
            return None
        return columns - 1 if columns > 1 else None  # 0: it does not say

    def close(self) -> None:
        """Ends the line on a terminal."""
        if self._terminal and self._drawn > -float("inf"):
            self.stream.write("\n")
            self.stream.flush()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_) -> None:
        self.close()
