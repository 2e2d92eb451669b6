"""Calls leave no memory behind."""

import ctypes
import gc

import pytest
import torch

from camox_ops import _selftest

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
