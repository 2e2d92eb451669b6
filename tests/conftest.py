"""Settings for every test: two threads, fresh tensors filled with NaN, hypothesis profiles.

torch is imported by what needs it: pytest-xdist's own process reads this file too, and starts the tests' processes
seconds earlier without."""

import gc
import os
from contextlib import nullcontext

# Threads that wait by spinning starve each other when several test processes share the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import hypothesis
import pytest

# Tests and torch are 250,000 objects, which a full collection traverses in 0.2 s: it is rarer, and leaves them out.
gc.set_threshold(20_000)


def pytest_collection_finish():
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def short_collections():
    """Modules that were imported since, torch._dynamo above all, are as many objects again: no later collection, of
    those that tests and benchmarks ask for, traverses them."""
    gc.collect()
    gc.freeze()


hypothesis.settings.register_profile("default", max_examples=25, deadline=None, derandomize=True)
hypothesis.settings.register_profile("nightly", max_examples=1000, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_collection_modifyitems(items):
    """CAMOX_TEST_DEVICE=cuda with a torch that is built for the CPU alone; one that has CUDA and finds no GPU fails."""
    import torch

    if os.environ.get("CAMOX_TEST_DEVICE", "cpu").startswith("cuda") and torch.version.cuda is None:
        no_cuda = pytest.mark.skip(reason=f"CAMOX_TEST_DEVICE=cuda: torch {torch.__version__} is built without CUDA")
        for item in items:
            item.add_marker(no_cuda)


@pytest.fixture
def on_device():
    """Tensors are made on the device that is tested; the CPU needs no mode for that, which would slow every call."""
    from helpers import DEVICE

    with nullcontext() if DEVICE.type == "cpu" else DEVICE:
        yield


@pytest.fixture(autouse=True)
def same_ground_for_every_test():
    import torch
    from helpers import seed

    torch.set_num_threads(2)
    seed(0)
    # Deterministic mode fills uninitialised memory with NaN: an element that a kernel forgets to write shows.
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    torch._dynamo.reset()
