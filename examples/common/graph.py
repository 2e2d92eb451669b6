"""A training step as a CUDA graph: the host queues its kernels once, and later steps replay them."""

from contextlib import contextmanager
from functools import cache

import torch

WARM_UP = 3  # steps before the capture, in which the optimizer's state and the libraries' workspaces are made


def check_graph(ops, device):
    """ValueError unless a step of these ops on this device can be captured."""
    if ops != "camox" or not str(device).startswith("cuda"):
        raise ValueError(f"graph needs ops camox on a CUDA device, got ops {ops} on {device}")


@cache
def side_stream(device):
    """Where steps are warmed up and captured: leaves of autograd remember the stream of their first use, and a capture
    may not wait for the default stream."""
    return torch.cuda.Stream(device)


@contextmanager
def workspaces_in_graph():
    """cuBLAS keeps a workspace from product to product, and PyTorch has no public name for giving it back. One from
    before a capture would be written by every replay, also once it is freed and another's, as torch.compile's graphs
    free all of them whenever they are recorded. One that is allocated within the capture lies in the graph's memory."""
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


class GraphedStep:
    """step(*tensors) -> tuple of tensors: WARM_UP calls run it as it is, the next captures it, and that and all further
    ones replay the capture.

    The step must not wait for the device, and a replay reads and writes the very tensors of the capture: weights and
    moments that were moved or replaced since are not seen, nor is another learning rate. Dropout draws new numbers in
    every replay. Arguments keep shape and dtype, ValueError otherwise; what a call returns is the caller's own.
    """

    def __init__(self, step, pool=None):
        self.step, self.calls, self.graph, self.pool = step, 0, None, pool

    def __call__(self, *inputs):
        with torch.cuda.device(inputs[0].device):  # current streams are those of one device
            return self.run_or_replay(inputs)

    def run_or_replay(self, inputs):
        if self.graph is None and self.calls < WARM_UP:
            self.calls += 1
            return self.run_aside(inputs)
        if self.graph is None:
            self.capture(inputs)
        for number, (kept, new) in enumerate(zip(self.inputs, inputs, strict=True)):
            if kept.shape != new.shape or kept.dtype != new.dtype:
                raise ValueError(
                    f"argument {number} of a captured step must stay {kept.dtype} of shape {tuple(kept.shape)}, "
                    f"got {new.dtype} of shape {tuple(new.shape)}"
                )
            kept.copy_(new)
        self.graph.replay()
        return tuple(output.clone() for output in self.outputs)

    def run_aside(self, inputs):
        outer, side = torch.cuda.current_stream(), side_stream(inputs[0].device)
        side.wait_stream(outer)
        with torch.cuda.stream(side):
            found = self.step(*inputs)
        outer.wait_stream(side)
        return found

    def capture(self, inputs):
        self.inputs = tuple(tensor.clone() for tensor in inputs)
        graph = torch.cuda.CUDAGraph()
        with workspaces_in_graph(), torch.cuda.graph(graph, pool=self.pool, stream=side_stream(inputs[0].device)):
            self.outputs = self.step(*self.inputs)
        self.graph = graph


class GraphedSteps:
    """A step whose tensors come in several shapes, or in another number, as in an epoch's last batch: a GraphedStep for
    each set of shapes. One that comes no more than WARM_UP times is never captured.

    The graphs share one pool of memory, as none of them reads what another one left there.
    """

    def __init__(self, step):
        self.step, self.by_shapes, self.pool = step, {}, torch.cuda.graph_pool_handle()

    def __call__(self, *inputs):
        shapes = tuple(tensor.shape for tensor in inputs)
        if shapes not in self.by_shapes:
            self.by_shapes[shapes] = GraphedStep(self.step, self.pool)
        return self.by_shapes[shapes](*inputs)
