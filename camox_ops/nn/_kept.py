"""When tensors that a module made once may serve again."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode


def has_values(*tensors: torch.Tensor) -> bool:
    """Whether Python may read the tensors' values now and act on them: nothing records or imitates what is computed
    (torch.compile, export, make_fx, fake tensors, torch.jit.trace), and none of them is on meta, a subclass or inside
    a torch.func transform."""
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode() or torch.jit.is_tracing():
        return False
    for tensor in tensors:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return False
        if tensor.is_meta or is_functorch_wrapped_tensor(tensor):
            return False
    return True


def made_beside(x: torch.Tensor) -> AbstractContextManager:
    """Where factory functions make tensors that go together with x: fake ones for a fake x."""
    return x.fake_mode if isinstance(x, FakeTensor) and not torch.compiler.is_compiling() else nullcontext()
