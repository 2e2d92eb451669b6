"""When tensors that a module made once may serve again."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from .._torch_private import in_dispatch_mode, is_wrapped


def has_values(*tensors: torch.Tensor) -> bool:
    """Whether Python may read the tensors' values now and act on them: nothing records or imitates what is computed
    (torch.compile, export, make_fx, fake tensors, torch.jit.trace), and none of them is on meta, a subclass or inside
    a torch.func transform."""
    if torch.compiler.is_compiling() or in_dispatch_mode() or torch.jit.is_tracing():
        return False
    for tensor in tensors:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return False
        if tensor.is_meta or is_wrapped(tensor):
            return False
    return True


def made_beside(x: torch.Tensor) -> AbstractContextManager:
    """Where factory functions make tensors that go together with x: fake ones for a fake x."""
    mode = None if torch.compiler.is_compiling() else getattr(x, "fake_mode", None)
    return nullcontext() if mode is None else mode
