"""Memory of one training step, measured in a process of its own: python -m camoxpert.memory OPS SIZE BATCH.

Two numbers in MB. `peak`: the growth of the resident set during a step, from the kernel's own high-water mark (VmHWM),
with one thread, in a process whose allocator gives every freed tensor back at once - so that it counts live tensors and
not what the allocator keeps; the smallest of several steps. `saved`: the storages that autograd holds between forward
and backward, each counted once, parameters left out.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from .losses import AdvancedCODLoss
from .steps import build_optimizer
from .twins import build_twins

MB = 1e6
STEPS = 5
# freed tensors go back to the kernel at once, else the high-water mark also holds what malloc keeps
GIVING_BACK = {"MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_TOP_PAD_": "0"}


def process_memory(field):
    """A field of /proc/self/status in bytes: VmRSS, or VmHWM, its maximum since reset_peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def reset_peak():
    Path("/proc/self/clear_refs").write_text("5")


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
        logits, aux_loss, deep = model(images, return_deep_supervision=True)
        loss, _ = criterion(logits, masks, aux_loss, deep)
    total = sum(storages.values())
    del loss, logits, deep
    return total


def step(model, criterion, optimizer, images, masks):
    torch.manual_seed(0)
    logits, aux_loss, deep = model(images, return_deep_supervision=True)
    criterion(logits, masks, aux_loss, deep)[0].backward()
    del logits, deep
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def measure_here(ops, size, batch):
    """{"peak_mb", "saved_mb"} of this process; peak is the smallest of several steps after a warm-up."""
    torch.manual_seed(0)
    images, masks = torch.randn(batch, 3, size, size), (torch.rand(batch, 1, size, size) > 0.8).float()
    model = build_twins(images)[ops].train()
    criterion, optimizer = AdvancedCODLoss(), build_optimizer(model, 1e-4)
    step(model, criterion, optimizer, images, masks)
    peaks = []
    for _ in range(STEPS):
        before = process_memory("VmRSS")
        reset_peak()
        step(model, criterion, optimizer, images, masks)
        peaks.append(process_memory("VmHWM") - before)
    saved = saved_bytes(model, criterion, images, masks)
    return {"peak_mb": min(peaks) / MB, "saved_mb": saved / MB}


def measure(ops, size, batch):
    """measure_here in a fresh process; RuntimeError with its stderr when it fails."""
    here = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join([here, *filter(None, sys.path)])
    command = [sys.executable, "-m", "camoxpert.memory", ops, str(size), str(batch)]
    done = subprocess.run(
        command,
        env={**os.environ, **GIVING_BACK, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"measuring the memory of ops={ops!r} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    print(json.dumps(measure_here(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
