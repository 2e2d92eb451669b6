"""Rotary position embedding with cached tables."""

from __future__ import annotations

import torch
from torch import nn

from .._torch_private import in_dispatch_mode
from ..ops import _check
from ..ops._codes import LAYOUTS
from ..ops.rope import rope, rope_tables
from ._kept import made_beside


class RotaryEmbedding(nn.Module):
    """Turns x, or a tuple (q, k, ...), by tables that it makes once and makes longer when more positions come.

    The tables are float32 whatever dtype the module is moved to, live on the device of the x that came last, and are
    neither parameters nor buffers: nothing of them is in the state_dict, and copies and pickles are made without them.
    dim, theta, units and scaling may be changed later: the next call makes tables of the new ones.
    Under torch.compile a table that is there and long enough is used; one that is not is computed in the graph.

    Args:
        dim: how many elements are rotated (rotary_dim of camox_ops.rope), even; the rest of a head passes.
        max_length: positions that the tables have from the start; they grow beyond when x or `length` asks for it.
        theta, units, scaling: as for camox_ops.rope_tables.
        interleaved, layout: as for camox_ops.rope."""

    def __init__(
        self,
        dim: int,
        max_length: int = 0,
        *,
        theta: float = 10000.0,
        units: str = "radians",
        scaling: dict | None = None,
        interleaved: bool = False,
        layout: str = "bhtd",
    ):
        super().__init__()
        _check.choice("RotaryEmbedding", "layout", layout, LAYOUTS)
        if isinstance(max_length, bool) or not isinstance(max_length, int):
            raise TypeError(f"RotaryEmbedding: max_length must be an int, got {max_length!r}")
        if max_length < 0:
            raise ValueError(f"RotaryEmbedding: max_length must be >= 0, got {max_length}")
        rope_tables(dim, 0, theta=theta, units=units, scaling=scaling)  # refuses what it would refuse later
        self.dim = dim
        self.max_length = max_length
        self.theta = theta
        self.units = units
        self.scaling = scaling
        self.interleaved = interleaved
        self.layout = layout
        self._cached: tuple[tuple, tuple[torch.Tensor, torch.Tensor]] | None = None

    def extra_repr(self) -> str:
        pairs = "interleaved" if self.interleaved else "half-split"
        return f"{self.dim}, theta={self.theta}, units={self.units!r}, scaling={self.scaling}, {pairs}, {self.layout}"

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_cached": None}

    def tables(self, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin) on the device with at least `length` rows, of the present dim, theta, units and scaling."""
        if not torch.compiler.is_compiling() and in_dispatch_mode():  # kept tables are no fake ones
            return self._make(max(length, self.max_length), device)
        made_of = (self.dim, self.theta, self.units, None if self.scaling is None else dict(self.scaling))
        cached = self._cached
        if cached is not None and (cached[0] != made_of or cached[1][0].device != device):
            cached = None
        if cached is not None and cached[1][0].shape[0] >= length:
            return cached[1]
        length = max(length, self.max_length)
        if torch.compiler.is_compiling():
            return self._make(length, device)
        if cached is not None:
            length = max(length, 2 * cached[1][0].shape[0])  # so that growing one by one stays cheap
        # Tables made in inference mode could not be saved for a later backward.
        with torch.inference_mode(False), torch.no_grad():
            made = self._make(length, device)
        self._cached = (made_of, made)
        return made

    def _make(self, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        options = {"theta": self.theta, "units": self.units, "scaling": self.scaling, "device": device}
        return rope_tables(self.dim, length, **options)

    def forward(
        self,
        x: torch.Tensor | tuple[torch.Tensor, ...],
        *,
        positions: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        length: int | None = None,
        inplace: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """x as camox_ops.rope takes it -> the same, rotated.

        length: positions that the tables must have; None: as many as x has tokens, or max_length if that is more.
        With `positions` beyond both it must be given, for their values are not read here."""
        tensors = x if isinstance(x, (tuple, list)) else (x,)
        if not tensors:
            raise ValueError("RotaryEmbedding: x must be a tensor or a tuple of at least one, got ()")
        for value in tensors:
            if not isinstance(value, torch.Tensor):
                raise TypeError(f"RotaryEmbedding: x must be a torch.Tensor, got {type(value).__name__}")
        if length is None:
            axis = 0 if cu_seqlens is not None else self.layout.index("t")
            for value in tensors:
                if value.dim() <= axis:
                    expected = "4 dimensions (3 with cu_seqlens)"
                    raise ValueError(f"RotaryEmbedding: x must have {expected}, got shape {tuple(value.shape)}")
            length = max(value.shape[axis] for value in tensors)
        with made_beside(tensors[0]):
            cos, sin = self.tables(length, tensors[0].device)
        return rope(
            x,
            cos,
            sin,
            interleaved=self.interleaved,
            layout=self.layout,
            rotary_dim=self.dim,
            positions=positions,
            cu_seqlens=cu_seqlens,
            inplace=inplace,
        )
