"""Memory of one training step, exactly, in MB.

`peak`: the largest sum of live tensors that the step itself allocated, scratch space of the convolutions included, as
the CPU allocator reports to the profiler. Unlike the resident set it does not depend on what malloc keeps.
`saved`: the storages that autograd holds between forward and backward, each counted once, parameters left out.
"""

import copy
import json
import os
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from .losses import AdvancedCODLoss
from .steps import build_optimizer

MB = 1e6
CPU = 0  # the profiler's number for it


def forward(model, criterion, images, masks):
    """The loss of a batch, from the same dropout each time."""
    torch.manual_seed(0)
    logits, aux_loss, deep = model(images, return_deep_supervision=True)
    return criterion(logits, masks, aux_loss, deep)[0]


def step(model, criterion, optimizer, images, masks):
    """One whole training step."""
    forward(model, criterion, images, masks).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


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


def saved_bytes(model, criterion, images, masks):
    """Bytes that autograd keeps for the backward pass of one forward."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = forward(model, criterion, images, masks)
    total = sum(storages.values())
    del loss
    return total


def measure(model, images, masks):
    """{"peak_mb", "saved_mb"} of a training step on a batch; the model is left as it is."""
    model = copy.deepcopy(model).train()
    criterion, optimizer = AdvancedCODLoss(), build_optimizer(model, 1e-4)
    step(model, criterion, optimizer, images, masks)  # the optimizer's state is no part of a step's memory
    peak = peak_bytes(lambda: step(model, criterion, optimizer, images, masks))
    return {"peak_mb": peak / MB, "saved_mb": saved_bytes(model, criterion, images, masks) / MB}
