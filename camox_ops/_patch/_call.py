"""Which calls the fast forward of a patched module serves; every other call goes to the original forward."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.autograd import forward_ad

from .. import _cuda
from .._torch_private import any_global_hook, forward_levels, in_transform, missing
from ..ops._check import DTYPES

# Below so many elements a call of ours costs as much as what it saves.
SMALLEST = 4096
# Of fewer float32 elements in rows torch's layer_norm is the faster one on the CPU, where one pass saves neither a copy
# nor a mask: a call of ours costs the host some 50 us more, forward and backward.
LEAST_IN_ROWS = 1 << 19
# A call of ours takes the host some 150 us, forward and backward, one of PyTorch's a half of that. In the place of few
# operators it is worth it where the GPU takes longer: where it needs this long to read a tensor once. An H200 reads 79
# MB in it; there a step of timm's ConvNeXt, whose largest have 77 MB, took as long with patch as without, and steps of
# smaller tensors up to a third longer.
READ_S = 16e-6
PLAIN = (torch.Tensor, nn.Parameter)
_LEVEL_IS_KNOWN = not any(name.endswith("_current_level") for name in missing)


def is_served(x) -> bool:
    """Whether x is a tensor that the ops take, large enough, and nothing is active that they do not support: tracing,
    export, forward-mode differentiation and the transforms of torch.func see the original modules. (vmap answers no
    question about memory formats, which outputs are to keep.)"""
    if torch.compiler.is_compiling():
        return isinstance(x, torch.Tensor) and x.dtype in DTYPES and not torch.compiler.is_exporting()
    if torch.jit.is_tracing() or (forward_levels._current_level >= 0 and _may_carry_tangents(x)):
        return False
    if isinstance(x, torch.Tensor) and in_transform(x):
        return False
    if type(x) not in PLAIN or x.layout is not torch.strided or x.is_nested or x.dtype not in DTYPES:
        return False
    if x.numel() < SMALLEST:
        return False
    if x.is_cpu:
        return True
    return x.is_cuda and x.dtype is not torch.float64 and not _cuda.unusable(x.device.index)


def outlasts_host(x: torch.Tensor, columns: int | None = None) -> bool:
    """Whether a fast forward in the place of few operators saves time: always on the CPU and in compiled code; on a GPU
    where a tensor like x, with so many columns for x's own, is large enough that the host is not what a step waits for.
    """
    if x.is_cpu or torch.compiler.is_compiling():
        return True
    size = x.numel() * (autocast_dtype(x) or x.dtype).itemsize
    if columns is not None:
        size = size // max(x.shape[-1], 1) * columns
    return size >= least_bytes(x.device.index)


def is_small_in_rows(x: torch.Tensor) -> bool:
    """Whether torch's layer_norm of x, whose rows are contiguous, is faster than ours."""
    return x.is_cpu and x.dtype is torch.float32 and x.numel() < LEAST_IN_ROWS and not torch.compiler.is_compiling()


@functools.cache
def least_bytes(gpu: int) -> int:
    """What this GPU reads in READ_S by its memory's clock (in kHz) and width (in bits), twice in a clock; what a T4
    reads, where torch does not say."""
    found = torch.cuda.get_device_properties(gpu)
    clock, width = getattr(found, "memory_clock_rate", 0), getattr(found, "memory_bus_width", 0)
    return int(READ_S * 2 * 1000 * clock * width / 8) or 5 << 20


def _may_carry_tangents(x) -> bool:
    """Where torch says that forward-mode differentiation is on, parameters may carry them too; where it does not say
    whether it is, only x is asked."""
    return _LEVEL_IS_KNOWN or (isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None)


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """What autocast casts to on x's device; None where it is off."""
    if x.is_meta:  # a device without autocast
        return None
    device = "cpu" if x.is_cpu else x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def kind_of(module: nn.Module) -> type:
    """The class that the module has or had before patch."""
    kind = type(module)
    patch = kind.__dict__.get("_camox_patch")
    return kind if patch is None else patch.original


def original_forward(module: nn.Module):
    """Of the class that was patched, also where fully_shard or a parametrization derived another class from it."""
    patch = getattr(type(module), "_camox_patch", None)
    return type(module).forward if patch is None else patch.original.forward


def form_of(module: nn.Module):
    """What a fast forward takes for granted of an inner module beside its class: one exchanged for another of its class
    may lack a bias or be another GELU."""
    kind = kind_of(module)
    if kind is nn.GELU:
        return module.approximate
    if kind is nn.LayerNorm:
        return module.normalized_shape, module.weight is None, module.bias is None
    if kind is nn.Linear:
        return module.bias is None
    if kind is nn.Conv1d:
        shape = module.weight.shape[2:], module.stride, module.padding
        return module.bias is None, module.kernel_size, module.groups, shape
    return None


def why_not_bypassed(module: nn.Module, kind: type) -> str | None:
    """Why an inner module, one that the fast forward reads instead of calling, has to be called; None: it need not."""
    if module is None or kind_of(module) is not kind:
        return f"is a {type(module).__name__}, not a {kind.__name__}"
    own = module.__dict__
    if own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]:
        return "has hooks"
    if "forward" in own:
        return "has a forward of its own"
    return None


def are_bypassed(modules, kinds) -> bool:
    """Whether none of the inner modules, which had these classes at the proof, has to be called."""
    for module, kind in zip(modules, kinds, strict=True):
        if why_not_bypassed(module, kind) is not None:
            return False
    return not any_global_hook()


def at(module: nn.Module, path: tuple[str, ...]):
    """What the module has under a dotted name, given in parts."""
    for name in path:
        module = getattr(module, name)
    return module
