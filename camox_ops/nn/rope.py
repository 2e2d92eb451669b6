"""Rotary position embedding with cached tables."""

from __future__ import annotations

import torch
from torch import nn

from ..ops import _check
from ..ops.rope import LAYOUTS, rope, rope_tables


class RotaryEmbedding(nn.Module):
    """Turns x, or a tuple (q, k, ...), by tables that it makes once and makes longer when more positions come.

    The tables are float32 whatever dtype the module is moved to, live on the device of the x that came last, and are
    neither parameters nor buffers: nothing of them is in the state_dict, and copies and pickles are made without them.
    Under torch.compile a table that is there and long enough is used; one that is not is computed in the graph.

    Args:
        dim: how many elements turn (rotary_dim of camox_ops.rope), even; the rest of a head passes.
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
        rope_tables(dim, 0, theta=theta, units=units, scaling=scaling)  # refuses what it would refuse later
        self.dim = dim
        self.max_length = max_length
        self.theta = theta
        self.units = units
        self.scaling = scaling
        self.interleaved = interleaved
        self.layout = layout
        self._cached: tuple[torch.Tensor, torch.Tensor] | None = None

    def extra_repr(self) -> str:
        pairs = "interleaved" if self.interleaved else "half-split"
        return f"{self.dim}, theta={self.theta}, units={self.units!r}, scaling={self.scaling}, {pairs}, {self.layout}"

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_cached": None}

    def tables(self, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin) on the device with at least `length` rows."""
        cached = self._cached
        if cached is not None and cached[0].device == device and cached[0].shape[0] >= length:
            return cached
        length = max(length, self.max_length)
        options = {"theta": self.theta, "units": self.units, "scaling": self.scaling, "device": device}
        if torch.compiler.is_compiling():
            return rope_tables(self.dim, length, **options)
        if cached is not None and cached[0].shape[0] < length:
            length = max(length, 2 * cached[0].shape[0])  # so that growing one by one stays cheap
        # Tables made in inference mode could not be saved for a later backward.
        with torch.inference_mode(False), torch.no_grad():
            made = rope_tables(self.dim, length, **options)
        if type(made[0]) is torch.Tensor:  # a fake one would outlive its mode
            self._cached = made
        return made

    def forward(
        self,
        x: torch.Tensor | tuple[torch.Tensor, ...],
        *,
        positions: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        length: int | None = None,
        inplace: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """x as camox_ops.rope takes it -> the same, turned.

        length: positions that the tables must have; None: as many as x has tokens, or max_length if that is more.
        With `positions` beyond both it must be given, for their values are not read here."""
        first = x[0] if isinstance(x, (tuple, list)) else x
        if length is None:
            axis = 0 if cu_seqlens is not None else self.layout.index("t")
            tensors = x if isinstance(x, (tuple, list)) else (x,)
            length = max(value.shape[axis] for value in tensors)
        cos, sin = self.tables(length, first.device)
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
