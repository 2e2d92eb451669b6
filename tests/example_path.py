"""Where the tests of the examples find them, and what they share."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
FOLDER = EXAMPLES / "camoxpert"


def load(name, example="camoxpert"):
    """The module <name> of an example, of "common", what they share, or, with None, one that is an example itself."""
    if str(EXAMPLES.parent) not in sys.path:
        sys.path.append(str(EXAMPLES.parent))
    return importlib.import_module(".".join(part for part in ("examples", example, name) if part))


@pytest.fixture(autouse=True)
def one_thread(same_ground_for_every_test):
    """A fixture for a test file to take over by name: on the example's small tensors a second thread only costs."""
    torch.set_num_threads(1)


class Reads(TorchDispatchMode):
    """Counts the operators that make the host wait for a value, or (lift_fresh) for the copy of one to the device."""

    NAMES = ("_local_scalar_dense", "nonzero", "item", "equal", "is_nonzero", "masked_select", "lift_fresh")

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.overloadpacket.__name__ in self.NAMES
        return function(*args, **(kwargs or {}))


class CalledWithKeptTensors:
    """Imitates a GraphedStep on the CPU: each call writes its inputs into the tensors of the first one."""

    def __init__(self, step, pool):
        self.step, self.kept = step, None

    def __call__(self, *inputs):
        if self.kept is None:
            self.kept = tuple(tensor.clone() for tensor in inputs)
        for kept, new in zip(self.kept, inputs, strict=True):
            assert kept.shape == new.shape and kept.dtype == new.dtype
            kept.copy_(new)
        return tuple(output.clone() for output in self.step(*self.kept))


@pytest.fixture
def imitated_graphs(monkeypatch):
    """GraphedSteps on the CPU, and the option of every trainer that asks for them."""
    graph = load("graph", "common")
    monkeypatch.setattr(graph, "GraphedStep", CalledWithKeptTensors)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    for example in ("emberformer", "vision_bdh"):
        monkeypatch.setattr(load("training", example), "check_graph", lambda ops, device: None)
