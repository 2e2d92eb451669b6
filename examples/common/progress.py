"""A progress line with loss, speed and, where there is a GPU, its utilisation."""

import sys
import time

import torch


def gpu_utilisation():
    """Percent of time the current GPU was busy, or None where there is none or the driver does not say."""
    if not torch.cuda.is_available():
        return None
    try:
        return torch.cuda.utilization()
    except (ImportError, RuntimeError):  # the nvml bindings or the driver's query are missing
        return None


class ProgressLine:
    """Rewrites one line on a terminal, prints one line per update elsewhere."""

    def __init__(self, title, steps, stream=None, unit="images"):
        self.title, self.steps, self.unit = title, steps, unit
        self.stream = stream or sys.stderr
        self.start = time.perf_counter()

    def update(self, step, seen, **values):
        """Show step of steps and the mean speed; seen counts the units since the start."""
        elapsed = max(time.perf_counter() - self.start, 1e-9)
        shown = [f"{self.title} {step}/{self.steps}", *(f"{name}={value:.4f}" for name, value in values.items())]
        shown.append(f"{seen / elapsed:.1f} {self.unit}/s")
        busy = gpu_utilisation()
        if busy is not None:
            shown.append(f"gpu={busy}%")
        terminal = self.stream.isatty()
        self.stream.write(("\r\033[K" if terminal else "") + "  ".join(shown) + ("" if terminal else "\n"))
        self.stream.flush()

    def close(self):
        """End the line on a terminal."""
        if self.stream.isatty():
            self.stream.write("\n")
