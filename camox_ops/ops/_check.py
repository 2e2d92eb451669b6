"""Argument checks shared by the ops: a ValueError or TypeError that names the argument and the value."""

from __future__ import annotations

import math
import numbers

import torch
from torch.autograd import forward_ad

from .. import _cuda
from .._torch_private import forward_levels

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def dtype_names(*dtypes: torch.dtype, last: str = " or ") -> str:
    return last.join(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in dtypes))


def tensor(op: str, name: str, value, *, dtypes=DTYPES) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a torch.Tensor, got {type(value).__name__}")
    if value.layout != torch.strided:
        raise TypeError(f"{op}: {name} must be a dense tensor, got layout {value.layout}")
    if value.is_nested:
        raise TypeError(f"{op}: {name} must be a dense tensor, got a nested one of {value.size(0)} tensors")
    if value.dtype not in dtypes:
        raise TypeError(
            f"{op}: {name} must have dtype {dtype_names(*dtypes, last=', ')}, got {dtype_names(value.dtype)}"
        )
    if value.is_cpu:  # cheaper to ask than a device's type
        pass
    elif value.device.type == "cuda":
        reason = "" if torch.compiler.is_compiling() else _cuda.unusable(value.device.index)
        if reason:
            raise RuntimeError(f"{op}: {name} is on {value.device}, but {reason}")
        if value.dtype == torch.float64:
            raise TypeError(f"{op}: {name} is float64 on {value.device}; float64 runs on the CPU only")
    elif value.device.type != "meta":
        raise ValueError(f"{op}: {name} must be on the CPU or a CUDA device, got {value.device}")
    if (
        forward_levels._current_level >= 0 and forward_ad.unpack_dual(value).tangent is not None
    ):  # else dropped silently
        raise NotImplementedError(f"{op}: forward-mode AD is not implemented, and {name} carries a tangent")


def image(op: str, name: str, value, *, dtypes=DTYPES) -> None:
    right = isinstance(value, torch.Tensor) and value.is_cpu and value.dim() == 4 and value.dtype in dtypes
    if (
        right and value.layout is torch.strided and not value.is_nested and forward_levels._current_level < 0
    ):  # at once: a call costs more
        return
    tensor(op, name, value, dtypes=dtypes)
    if value.dim() != 4:
        raise ValueError(f"{op}: {name} must have 4 dimensions (B, C, H, W), got shape {tuple(value.shape)}")


def positive(op: str, name: str, value) -> float:
    if type(value) is float and 0 < value < math.inf:  # at once: an abstract class takes long to ask
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{op}: {name} must be a number, got {value!r}")
    if not 0 < value < math.inf:
        raise ValueError(f"{op}: {name} must be > 0 and finite, got {value!r}")
    return float(value)


def eps(op: str, value, x: torch.Tensor) -> float:
    """A positive number that is not 0 in what x is computed in: float32 has nothing between 0 and 2**-149."""
    value = positive(op, "eps", value)
    if value <= 2.0**-150 and x.dtype != torch.float64:
        raise ValueError(f"{op}: eps must be > 0 and finite in float32, got {value!r}")
    return value


def probability(op: str, name: str, value) -> float:
    if type(value) is float and 0 <= value < 1:  # at once: an abstract class takes long to ask
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{op}: {name} must be a number, got {value!r}")
    if not 0 <= value < 1:
        raise ValueError(f"{op}: {name} must be in [0, 1), got {value!r}")
    return float(value)


def same_device(op: str, name: str, value: torch.Tensor, x: torch.Tensor, of: str = "x") -> None:
    if not (value.is_cpu and x.is_cpu) and value.device != x.device:
        raise ValueError(f"{op}: {name} must be on the device of {of}, {x.device}, got {value.device}")


def like(op: str, name: str, value, x: torch.Tensor, of: str = "x") -> None:
    """A tensor of x's shape, dtype and device; messages call x by the name `of`."""
    tensor(op, name, value)
    if value.shape != x.shape:
        raise ValueError(f"{op}: {name} must have the shape of {of}, {tuple(x.shape)}, got {tuple(value.shape)}")
    if value.dtype != x.dtype:
        raise TypeError(f"{op}: {name} must have dtype {dtype_names(x.dtype)}, got {dtype_names(value.dtype)}")
    same_device(op, name, value, x, of)


def affine(op: str, name: str, value, x: torch.Tensor, dim: int, unit: str) -> None:
    """weight or bias: an element per `unit`, which x counts in dimension `dim`, in x's dtype or the one computed in."""
    tensor(op, name, value)
    if value.shape != (x.shape[dim],):
        raise ValueError(
            f"{op}: {name} must have shape ({x.shape[dim]},), one element per {unit} of x, got {tuple(value.shape)}"
        )
    if value.dtype != x.dtype and value.dtype != computed_in(x):
        names = dtype_names(x.dtype, computed_in(x))
        raise TypeError(f"{op}: {name} must have dtype {names}, got {dtype_names(value.dtype)}")
    same_device(op, name, value, x)


def computed_in(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def autocast(*tensors):
    """Tensors in the dtype that autocast gives them on their device, as it does before a matrix product: all but
    float64 ones; the same ones where it is off."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    wanted = (torch.float32, torch.bfloat16, torch.float16)
    return tuple(t.to(dtype) if isinstance(t, torch.Tensor) and t.dtype in wanted else t for t in tensors)


def flag(op: str, name: str, value) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{op}: {name} must be a bool, got {value!r}")


def choice(op: str, name: str, value, choices) -> None:
    choices = tuple(choices)
    if isinstance(value, torch.Tensor):
        listed = ", ".join(repr(choice) for choice in choices)
        raise TypeError(f"{op}: {name} must be one of {listed}, got a torch.Tensor")
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{op}: {name} must be one of {listed}, got {value!r}")
