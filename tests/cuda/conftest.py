"""What the tests of CUDA kernels on the CPU share: where they can run, orders of threads, architectures, dtypes."""

import emulator
import pytest
import torch
from helpers import DEVICE

unavailable = emulator.why_unavailable() if DEVICE.type == "cpu" else "the emulator runs on the CPU"


@pytest.fixture(autouse=True)
def available():
    if unavailable:
        pytest.skip(unavailable)


@pytest.fixture(autouse=True)
def references_on_one_thread(same_ground_for_every_test):
    """Kernels run on the emulator's own threads; for references of small tensors waking a second costs more than it
    computes."""
    torch.set_num_threads(1)


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


@pytest.fixture(params=[0, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "others"])
def share(request):
    """Of the cases of a long test those of even numbers, and in the slow tests the others. They are numbered so that
    the quick run keeps each kernel in each of its dtypes and layouts."""
    return request.param


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items):
    """A test of every dtype and order has every second pair of them, the slow tests have the others: each dtype meets
    two orders and each order a dtype, and whether threads race depends on no dtype's bits."""
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        dtype, order = params.get("dtype"), params.get("order")
        if dtype in [*emulator.DTYPES] and order in [*emulator.ORDERS]:
            pair = [*emulator.DTYPES].index(dtype) + [*emulator.ORDERS].index(order)
            if pair % 2:
                item.add_marker(pytest.mark.slow)
