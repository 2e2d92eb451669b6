"""What the tests of CUDA kernels on the CPU share: where they can run, orders of threads, architectures, dtypes."""

import emulator
import pytest
from helpers import DEVICE

unavailable = emulator.why_unavailable() if DEVICE.type == "cpu" else "the emulator runs on the CPU"


@pytest.fixture(autouse=True)
def available():
    if unavailable:
        pytest.skip(unavailable)


@pytest.fixture(params=emulator.ORDERS)
def order(request):
    return request.param


@pytest.fixture(params=[pytest.param(arch, marks=pytest.mark.slow if arch < 800 else ()) for arch in emulator.ARCHS])
def arch(request):
    """Two builds of every source take a quarter of the suite: that for sm_75 is left to the slow tests."""
    return request.param


@pytest.fixture(params=[pytest.param(n, marks=pytest.mark.slow if n == "float16" else ()) for n in emulator.DTYPES])
def dtype(request):
    """float16 runs what bfloat16 runs, but for conversions and one word of a product: it is left to the slow tests."""
    return emulator.DTYPES[request.param]
