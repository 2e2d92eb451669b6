"""Whether recomputing activations is worth its time."""

from __future__ import annotations

import math
import numbers
from typing import NamedTuple

import torch
from torch import nn

from .machine import free_memory, gib

USABLE = 0.8


class CheckpointingPolicy(NamedTuple):
    """Whether to checkpoint (also its truth value), why, and the bytes that were estimated and found (or None)."""

    enabled: bool
    reason: str
    needed_bytes: int | None = None
    available_bytes: int | None = None

    def __bool__(self) -> bool:
        return self.enabled

    def __str__(self) -> str:
        return f"gradient checkpointing {'on' if self.enabled else 'off'}: {self.reason}"


def gradient_checkpointing_policy(
    batch_size: int,
    model: nn.Module | None = None,
    sample: torch.Tensor | tuple | None = None,
    *,
    min_batch: int = 8,
    optimizer_states: int = 2,
    available_bytes: int | None = None,
) -> CheckpointingPolicy:
    """Off when the batch is at least min_batch and the step fits into memory, else on; with the reason.

    Checkpointing runs the forward pass twice to store less. A batch of 8 or more that fits gains nothing from it; a
    smaller one usually is small because memory was short, and the reason says how many images would fit without.

    Memory is estimated, not guessed from names: one training forward of `sample` counts the bytes that autograd keeps
    for the backward pass (every storage once; parameters and buffers left out), times batch_size / the sample's batch;
    plus autocast's copies of parameters and buffers, the gradients that the trainable parameters do not have yet, and
    optimizer_states times their size (2 for Adam). That must be at most 80% of what is free now; the rest is left to
    scratch space and fragmentation. Weights, random state and buffers (running statistics) are as before afterwards.
    Run it under the autocast that training will use.

    Args:
        batch_size: images per forward pass.
        model, sample: the model on its device, and its positional arguments for a small batch (a tensor, or a tuple
            whose first is batched). Both or none; without, memory is taken to suffice, and the reason says so.
        min_batch, optimizer_states: see above.
        available_bytes: instead of what the device (or the host, within its container's limit) says is free."""
    _check_number("batch_size", batch_size, numbers.Integral, 1)
    _check_number("min_batch", min_batch, numbers.Integral, 0)
    _check_number("optimizer_states", optimizer_states, numbers.Real, 0)
    if available_bytes is not None:
        _check_number("available_bytes", available_bytes, numbers.Real, 0)
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"gradient_checkpointing_policy: model must be an nn.Module, got {type(model).__name__}")
    if (model is None) != (sample is None):
        raise ValueError("gradient_checkpointing_policy: give model and sample together, or neither")
    if model is None:
        known = "; memory was not estimated, which takes model and sample"
        if batch_size < min_batch:
            return CheckpointingPolicy(True, f"batch {batch_size} is below {min_batch}: a larger one may fit{known}")
        return CheckpointingPolicy(False, f"batch {batch_size} is at least {min_batch}{known}")

    inputs = sample if isinstance(sample, tuple) else (sample,)
    if not inputs or not isinstance(inputs[0], torch.Tensor) or inputs[0].dim() == 0:
        raise TypeError(
            "gradient_checkpointing_policy: sample must be a tensor with a batch dimension, or a tuple whose first is "
            f"one, got {type(sample).__name__}"
        )
    images = inputs[0].shape[0]
    if not images:
        raise ValueError(f"gradient_checkpointing_policy: sample must hold an image, got {tuple(inputs[0].shape)}")
    kept, casts = _kept_bytes(model, inputs)
    each = kept / images
    fixed = casts + _fixed_bytes(model, optimizer_states)
    needed = round(fixed + batch_size * each)
    free = free_memory(inputs[0].device) if available_bytes is None else available_bytes
    if free is None:
        return CheckpointingPolicy(
            batch_size < min_batch, f"batch {batch_size}; {gib(needed)} needed, free memory unknown", needed
        )
    fits = max(0, int((USABLE * free - fixed) / each)) if each else batch_size
    share = f"about {gib(needed)} needed of {gib(free)} free, of which {USABLE:.0%} count"
    if needed > USABLE * free:
        reason = f"batch {batch_size} does not fit without: {share}; {fits} would"
    elif batch_size < min_batch:
        reason = f"batch {batch_size} is below {min_batch}; {fits} would fit without checkpointing: {share}"
    else:
        return CheckpointingPolicy(False, f"batch {batch_size} fits: {share}", needed, free)
    return CheckpointingPolicy(True, reason, needed, free)


def _check_number(name: str, value, kind: type, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, kind):
        what = "an int" if kind is numbers.Integral else "a number"
        raise TypeError(f"gradient_checkpointing_policy: {name} must be {what}, got {value!r}")
    if not (math.isfinite(value) and value >= least):
        finite = "" if kind is numbers.Integral else " and finite"
        raise ValueError(f"gradient_checkpointing_policy: {name} must be >= {least}{finite}, got {value}")


def _fixed_bytes(model: nn.Module, optimizer_states: int) -> int:
    """Gradients still to come and optimizer state, in bytes."""
    trained = [p for p in model.parameters() if p.requires_grad]
    missing = sum(p.nbytes for p in trained if p.grad is None)
    return missing + optimizer_states * sum(p.nbytes for p in trained)


def _kept_bytes(model: nn.Module, inputs: tuple) -> tuple[int, int]:
    """Bytes that autograd keeps between a training forward of inputs and its backward: those of activations, and those
    of copies of parameters and buffers in another dtype, which are as many for any batch."""
    owned = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
    own = {tensor.untyped_storage().data_ptr() for tensor in owned}
    by_size: dict[int, list[torch.Tensor]] = {}
    for tensor in owned:
        by_size.setdefault(tensor.numel(), []).append(tensor)
    kept, casts = {}, {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        if place not in own and place not in kept and place not in casts:
            alike = by_size.get(storage.nbytes() // tensor.element_size(), ())
            found = casts if any(_is_cast(tensor, original) for original in alike) else kept
            found[place] = storage.nbytes()
        return tensor.detach()  # an output that its own node keeps would never be freed

    device = inputs[0].device
    # by module and name: forward may write into a buffer or assign another tensor
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    training = [module for module in model.modules() if module.training]
    model.train()
    try:
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        ):
            # autograd saves no tensor that was made in inference mode
            inputs = [t.clone() if isinstance(t, torch.Tensor) and t.is_inference() else t for t in inputs]
            output = model(*inputs)
            total = sum(kept.values()), sum(casts.values())
            del output
    finally:
        model.eval()
        for module in training:
            module.training = True
        with torch.no_grad():
            for module, name, buffer, before in buffers:
                module._buffers[name] = buffer
                if buffer is not None:
                    buffer.copy_(before)
    return total


def _is_cast(tensor: torch.Tensor, original: torch.Tensor) -> bool:
    """Whether tensor lies in the memory of a copy of the original in another dtype, as autocast makes them."""
    if tensor.dtype == original.dtype or tensor.device != original.device or tensor.is_meta:
        return False
    first, second = (torch.empty(0, dtype=tensor.dtype, device=tensor.device) for _ in range(2))
    first.set_(tensor.untyped_storage())
    second.set_(original.to(tensor.dtype).untyped_storage())
    return torch.equal(first, second)
