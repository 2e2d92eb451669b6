"""Calls leave no memory behind, need little stack, and say what they lack."""

import ctypes
import gc
import subprocess
import sys

import pytest
import torch

from camox_ops import _selftest
from camox_ops.ops._register import register

CALLS = 500
LIBC = ctypes.CDLL(None)
FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class MallocInfo(ctypes.Structure):
    """struct mallinfo2 of glibc's malloc.h."""

    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS]


def bytes_in_use() -> int:
    gc.collect()
    LIBC.mallinfo2.restype = MallocInfo
    info = LIBC.mallinfo2()
    return info.uordblks + info.hblkhd


@pytest.mark.skipif(not hasattr(LIBC, "mallinfo2"), reason="malloc is asked by a function of glibc from 2.33 on")
@pytest.mark.parametrize("op", _selftest.OPS, ids=lambda op: op.name)
def test_calls_leave_no_memory_behind(op):
    inputs = op.inputs((1, 2, 4, 6), torch.float32)

    def calls(count):
        for _ in range(count):
            _selftest.run(op.ours, inputs, None)

    calls(100)
    before = bytes_in_use()
    calls(CALLS)
    # A string that is forgotten takes 48 bytes of the heap.
    assert (bytes_in_use() - before) / CALLS < 16


SMALL_STACK = """
import threading
import torch
from camox_ops import _selftest
from camox_ops.ops._register import register

OTHERS = ("edge_maps", "frequency_bands", "spatial_gradient")  # of 3x3 and 5x5 filters

def run(op, inputs):
    outputs = op.ours(*[x.detach().requires_grad_() for x in inputs])
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else outputs
    sum(y.double().sum() for y in outputs).backward()

def work():
    for op in _selftest.OPS:
        for dtype in _selftest.DTYPES:
            inputs = op.inputs((2, 16, 33, 47), dtype)
            if not op.name.startswith(OTHERS):
                run(op, inputs)
            if op.name.startswith("layer_norm2d"):
                run(op, [x.to(memory_format=torch.channels_last) if x.dim() == 4 else x for x in inputs])

torch.set_num_threads(1)
threading.stack_size(256 << 10)
thread = threading.Thread(target=work)
thread.start(), thread.join()
print("done")
"""


def test_ops_run_on_small_stacks():
    """On a thread of 256 KiB: of the ops' scratch only little may lie on the stack."""
    result = subprocess.run([sys.executable, "-c", SMALL_STACK], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "done\n"), result.stderr


NO_MEMORY = """
import resource
import torch
import camox_ops as cx

x = torch.zeros(64, 16, 256, 256)
ops = {
    "torch": lambda: x + 1,
    "layer_norm2d": lambda: cx.layer_norm2d(x, torch.ones(16), torch.zeros(16)),
    "dropout": lambda: cx.dropout(x, 0.5),
}
cx.layer_norm2d(x[:1], torch.ones(16), torch.zeros(16)), cx.dropout(x[:1], 0.5)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (100 << 20),) * 2)
for name, op in ops.items():
    try:
        op()
    except RuntimeError as error:
        print(name, error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
def test_out_of_memory_says_how_much_was_asked_for():
    """With torch's own words, by which programs that look for a batch size recognise it."""
    result = subprocess.run([sys.executable, "-c", NO_MEMORY], capture_output=True, text=True)
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["torch", "layer_norm2d", "dropout"], result.stderr
    for line in lines:
        assert "DefaultCPUAllocator: can't allocate memory" in line
        assert str(64 * 16 * 256 * 256 * 4) in line


def test_out_of_memory_on_cuda_is_an_out_of_memory_error():
    """torch's C interface gives its text alone: an operator that fails with it stands in for one on a GPU."""

    def kernel(x):
        raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    library = torch.library.Library("camox_ops", "FRAGMENT")
    library.define("out_of_memory(Tensor x) -> Tensor")
    library.impl("out_of_memory", kernel, "CPU")
    op = register(
        "out_of_memory", fake=torch.empty_like, setup_context=lambda *_: None, backward=lambda _, grad: (grad,)
    )
    for x in (torch.ones(2), torch.ones(2, requires_grad=True)):
        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 20\.00 GiB"):
            op(x)
