"""The device of run.py --device cuda and scripts/gpu_check.py: CUDA, or the CPU imitating its events, streams and
graphs, so that both can be tried where there is no GPU. A run on the CPU is a rehearsal: its record says so and nothing
in it counts."""

import gc
import os
import re
import shutil
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import torch

FLUSH_BYTES = 256 << 20
CYCLES_PER_US = 2000  # of the fastest clocks there are; on slower ones a head start is longer


class ContextLost(Exception):
    """An error after which the process can do nothing more on the device."""


def why_no_compiler() -> str:
    """What torch.compile's kernels on GPUs lack here: Triton compiles C code against Python's headers; or ""."""
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "torch.compile needs a C compiler for GPUs: gcc or clang, or the one that CC names"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return "" if header.exists() else f"torch.compile needs Python's C headers for GPUs: no {header.name} was found"


class Cuda:
    """The first CUDA device, all on one stream, which can be captured: a backward pass waits for the stream on which a
    leaf was first used; where that is the default one, a capture fails, and the allocator frees nothing afterwards."""

    kind = "cuda"

    def __init__(self):
        self.torch_device = torch.device("cuda", 0)
        torch.cuda.set_device(self.torch_device)
        torch.cuda.set_stream(torch.cuda.Stream())
        self.properties = torch.cuda.get_device_properties(0)
        self._flush = None

    @property
    def name(self) -> str:
        return self.properties.name

    @property
    def slug(self) -> str:
        """The name as a part of a file's name."""
        return slug(self.name)

    @property
    def architecture(self) -> str:
        return f"sm_{self.properties.major}{self.properties.minor}"

    @property
    def flush_bytes(self) -> int:
        return max(FLUSH_BYTES, 4 * self.l2_bytes)

    @property
    def l2_bytes(self) -> int:
        return getattr(self.properties, "L2_cache_size", 0)

    def flush(self) -> None:
        """Fills the L2 cache with other data."""
        if self._flush is None:
            self._flush = torch.empty(self.flush_bytes // 4, dtype=torch.int32, device=self.torch_device)
        self._flush.zero_()

    def occupy(self, microseconds: float) -> None:
        """Keeps the device busy while the host queues what follows: its launches cost no device time."""
        torch.cuda._sleep(int(microseconds * CYCLES_PER_US))

    def check_alive(self, message: str = "") -> None:
        """ContextLost with the message of an error where that left the device unusable."""
        try:
            torch.cuda.synchronize()
        except Exception as error:
            raise ContextLost(message or " ".join(str(error).split())[:300]) from None

    def mark(self):
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def microseconds(self, begin, end) -> float:
        return 1e3 * begin.elapsed_time(end)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def empty_kernel(self) -> None:
        torch.cuda._sleep(0)

    def capture(self, make_step: Callable) -> tuple:
        """make_step() -> step -> (Captured, what the captured step returned)."""
        step = make_step()
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            returned = step()
        return Captured(graph, step), returned

    def release(self) -> None:
        """Gives back what nothing refers to any more, what only refers to itself included."""
        gc.collect()
        torch.cuda.empty_cache()


class StepAgain:
    """What stands for a graph on the CPU: a step, and what it returned at first, which a replay fills again."""

    def __init__(self, step: Callable, returned):
        self.step, self.returned = step, returned

    def replay(self) -> None:
        again = tensors(self.step())
        with torch.no_grad():
            for old, new in zip(tensors(self.returned), again, strict=True):
                old.copy_(new)

    def reset(self) -> None:
        self.step = self.returned = None


class Captured:
    """A captured step, to be run again. It keeps the step: what that made before the capture, as a forward pass whose
    backward was captured, is read again by every replay."""

    def __init__(self, graph, step: Callable):
        self.graph, self.step = graph, step

    def replay(self) -> None:
        self.graph.replay()

    def reset(self) -> None:
        """Gives all its memory back."""
        self.graph.reset()
        self.step = None


class Rehearsal:
    """The CPU in the place of a CUDA device: a graph is the step run again, an event the time of day."""

    kind = "cpu"
    name = "rehearsal on the CPU"
    slug = "rehearsal"
    architecture = "none"
    l2_bytes = flush_bytes = 0

    def __init__(self):
        self.torch_device = torch.device("cpu")

    def flush(self) -> None:
        pass

    def occupy(self, microseconds: float) -> None:
        pass

    def check_alive(self, message: str = "") -> None:
        pass

    def mark(self) -> float:
        return time.perf_counter()

    def microseconds(self, begin, end) -> float:
        return 1e6 * (end - begin)

    def synchronize(self) -> None:
        pass

    def empty_kernel(self) -> None:
        pass

    def capture(self, make_step: Callable) -> tuple:
        step = make_step()
        returned = step()
        return Captured(StepAgain(step, returned), step), returned

    def release(self) -> None:
        pass


def tensors(value) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else list(value or ())


def slug(name: str) -> str:
    return "-".join(re.findall(r"[a-z0-9]+", name.lower()))


def open_device(kind: str):
    return Cuda() if kind == "cuda" else Rehearsal()
