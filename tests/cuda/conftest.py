"""What the tests of CUDA kernels on the CPU share: where they can run, orders of threads, architectures, dtypes."""

import pytest
import rig
from helpers import DEVICE

unavailable = rig.why_unavailable() if DEVICE.type == "cpu" else "the rig runs on the CPU"


@pytest.fixture(autouse=True)
def available():
    if unavailable:
        pytest.skip(unavailable)


@pytest.fixture(params=rig.ORDERS)
def order(request):
    return request.param


@pytest.fixture(params=rig.ARCHS)
def arch(request):
    return request.param


@pytest.fixture(params=rig.DTYPES)
def dtype(request):
    return rig.DTYPES[request.param]
