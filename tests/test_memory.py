"""What an op says when memory is short: as torch says it."""

import sys

import pytest
import torch
from helpers import run_python_with_torch

from camox_ops import _torch_private
from camox_ops.ops._register import register

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
    lines = run_python_with_torch(NO_MEMORY).splitlines()
    assert [line.split()[0] for line in lines] == ["torch", "layer_norm2d", "dropout"]
    for line in lines:
        assert "DefaultCPUAllocator: can't allocate memory" in line
        # torch 2.10 gives no words of its own to pass on.
        assert str(64 * 16 * 256 * 256 * 4) in line or line.endswith(f"tensor of {64 * 16 * 256 * 256} elements")


def test_out_of_memory_on_cuda_is_an_out_of_memory_error(monkeypatch):
    """torch's C interface gives its text alone: an operator that fails with it stands in for one on a GPU."""
    # what explain observes, without this operator, which is gone after the test
    monkeypatch.setattr(_torch_private, "_observe", dict(_torch_private._observe))

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
