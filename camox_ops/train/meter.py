"""A running mean of losses that waits for the device only when it is read."""

from __future__ import annotations

import math
import numbers

import torch


class LossMeter:
    """The mean of the losses given to `update`, summed where they lie.

        meter = cx.train.LossMeter()
        for images, masks in loader:
            loss = ...
            meter.update(loss)
        print(meter.take())

    `float(loss)` or `loss.item()` in every step makes the host wait for the GPU and leaves the GPU without work until
    the host has caught up; `update` waits for nothing, `mean` and `take` once, however many losses there were. The sum
    is one float64 tensor on the losses' device (float32 where the device has no float64), added to in place, so an
    update can be captured in a CUDA graph. Losses are detached: no graph is kept."""

    def __init__(self):
        self._sum: torch.Tensor | None = None
        self._host_sum = 0.0
        self.weight = 0.0

    @torch.no_grad()
    def update(self, loss: torch.Tensor | float, weight: float = 1.0) -> None:
        """Adds loss, a tensor of one element or a number, counted `weight` times (the images of its batch, say).

        weight is a number, not a tensor: reading one would wait for its device."""
        if not isinstance(weight, numbers.Real):
            raise TypeError(f"LossMeter: weight must be a number, got {type(weight).__name__}")
        weight = float(weight)
        if not math.isfinite(weight) or weight < 0:
            raise ValueError(f"LossMeter: weight must be >= 0 and finite, got {weight}")
        if isinstance(loss, torch.Tensor):
            self._add(loss, weight)
        else:
            self._host_sum += float(loss) * weight
        self.weight += weight

    def _add(self, loss: torch.Tensor, weight: float) -> None:
        if loss.numel() != 1:
            raise ValueError(f"LossMeter: loss must have one element, got shape {tuple(loss.shape)}")
        if self._sum is None:
            dtype = torch.float32 if loss.device.type == "mps" else torch.float64
            with torch.inference_mode(False):  # one made in inference mode could not be added to outside of it
                self._sum = torch.zeros((), dtype=dtype, device=loss.device)
        elif self._sum.device != loss.device:
            raise ValueError(f"LossMeter: loss must be on {self._sum.device} as before, got {loss.device}")
        self._sum.add_(loss.detach().reshape(()), alpha=weight)

    def mean(self) -> float:
        """The weighted mean so far; NaN when nothing was added. Waits for the device."""
        if not self.weight:
            return math.nan
        return (self._host_sum + (0.0 if self._sum is None else self._sum.item())) / self.weight

    def take(self) -> float:
        """mean(), then reset()."""
        mean = self.mean()
        self.reset()
        return mean

    def reset(self) -> None:
        """Forgets all losses; the tensor of the sum stays the same one."""
        if self._sum is not None:
            self._sum.zero_()
        self._host_sum, self.weight = 0.0, 0.0
