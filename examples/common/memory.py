"""Memory of one training step, exactly, in MB.

`peak`: the largest sum of live tensors that the step itself allocated, scratch space of the convolutions included, as
the CPU allocator reports to the profiler. Unlike the resident set it does not depend on what malloc keeps.
`saved`: the storages that autograd holds between forward and backward, each counted once, parameters left out.
"""

import json
import os
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

MB = 1e6
CPU = 0  # the profiler's number for it


def peak_bytes(function):
    """Highest total of the CPU allocations that function made and had not yet freed."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own lines on stderr
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = sorted((event for event in events if event.get("name") == "[memory]"), key=lambda event: event["ts"])
    changes = [event["args"] for event in changes if event["args"]["Device Type"] == CPU]
    # The total is the process's: what stood before the function's first allocation is not its own.
    before = changes[0]["Total Allocated"] - changes[0]["Bytes"]
    return max(change["Total Allocated"] for change in changes) - before


def saved_bytes(model, forward):
    """Bytes that autograd keeps for the backward pass of forward(), which returns the loss of model."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # an output that its own node keeps would never be freed

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = forward()
    total = sum(storages.values())
    del loss
    return total


def measure(model, forward, step):
    """{"peak_mb", "saved_mb"} of a training step(), after one that makes the optimizer's state, and of forward()."""
    step()
    return {"peak_mb": peak_bytes(step) / MB, "saved_mb": saved_bytes(model, forward) / MB}
