"""Seeds of the ops that drop."""

from __future__ import annotations

import torch

from .. import _C
from .._torch_private import READS_BY_DLPACK
from . import _check


def draw_plain_seed(x) -> torch.Tensor | None:
    """As draw_seed, from torch's own generator, in eager mode for a plain CPU tensor that nobody has checked yet; None,
    and nothing drawn, where x is something else."""
    if torch.compiler.is_dynamo_compiling() or not READS_BY_DLPACK or type(x) is not torch.Tensor or not _C.look_at(x):
        return None
    return torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu")


def draw_seed(
    op: str, x: torch.Tensor, p: float, training: bool, generator: torch.Generator | None, name: str = "x"
) -> torch.Tensor | None:
    """One number from the generator, or None where nothing is dropped."""
    _check.flag(op, "training", training)
    if generator is not None:
        if not isinstance(generator, torch.Generator):
            raise TypeError(f"{op}: generator must be a torch.Generator, got {type(generator).__name__}")
        if generator.device.type != x.device.type:
            raise ValueError(f"{op}: generator must be of the device of {name}, {x.device}, got {generator.device}")
    if p == 0 or not training:
        return None
    return torch.randint(2**63 - 1, (), dtype=torch.int64, device=x.device, generator=generator)
