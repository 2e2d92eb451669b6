"""The device under scripts/gpu_check.py: CUDA, or the CPU imitating its streams and graphs, so that the checks can be
tried where there is no GPU. A run on the CPU is a rehearsal: its record says so and nothing in it counts."""

import time
from collections.abc import Callable

import torch

FLUSH_BYTES = 256 << 20
CYCLES_PER_US = 2000  # of the fastest clocks there are; on slower ones a head start is longer


class Cuda:
    """The first CUDA device, on torch's current stream."""

    kind = "cuda"

    def __init__(self):
        self.torch_device = torch.device("cuda", 0)
        torch.cuda.set_device(self.torch_device)
        self.properties = torch.cuda.get_device_properties(0)
        self._flush = None

    @property
    def name(self) -> str:
        return self.properties.name

    @property
    def l2_bytes(self) -> int:
        return getattr(self.properties, "L2_cache_size", 0)

    def flush(self, head_start_us: float = 0.0) -> None:
        """Fills the L2 cache with other data, then keeps the device busy while the host queues what follows: its
        launches cost no device time."""
        if self._flush is None:
            size = max(FLUSH_BYTES, 4 * self.l2_bytes)
            self._flush = torch.empty(size // 4, dtype=torch.int32, device=self.torch_device)
        self._flush.zero_()
        torch.cuda._sleep(int(head_start_us * CYCLES_PER_US))

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

    def capture(self, make_step: Callable) -> tuple[Callable, object]:
        """make_step() -> step, both run on the stream that is captured -> (replay, what the captured step returned)."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step = make_step()
            for _ in range(3):
                step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            returned = step()
        return graph.replay, returned

    def release(self) -> None:
        torch.cuda.empty_cache()


class Rehearsal:
    """The CPU in the place of a CUDA device: a graph is the step run again, an event the time of day."""

    kind = "cpu"
    name = "rehearsal on the CPU"
    l2_bytes = 0

    def __init__(self):
        self.torch_device = torch.device("cpu")

    def flush(self, head_start_us: float = 0.0) -> None:
        pass

    def mark(self) -> float:
        return time.perf_counter()

    def microseconds(self, begin, end) -> float:
        return 1e6 * (end - begin)

    def synchronize(self) -> None:
        pass

    def empty_kernel(self) -> None:
        pass

    def capture(self, make_step: Callable) -> tuple[Callable, object]:
        step = make_step()
        returned = step()

        def replay():
            again = tensors(step())
            with torch.no_grad():
                for old, new in zip(tensors(returned), again, strict=True):
                    old.copy_(new)

        return replay, returned

    def release(self) -> None:
        pass


def tensors(value) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else list(value or ())


def open_device(kind: str):
    return Cuda() if kind == "cuda" else Rehearsal()
