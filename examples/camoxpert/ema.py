"""Exponential moving average of a model's parameters."""

from contextlib import contextmanager

import torch


class EMA:
    """Keeps shadow = decay * shadow + (1 - decay) * parameter, in one fused pass without leaving the device."""

    def __init__(self, model, decay=0.999):
        if not 0 <= decay < 1:
            raise ValueError(f"decay must be in [0, 1), got {decay}")
        self.model, self.decay = model, decay
        self.shadow = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    @torch.no_grad()
    def update(self):
        parameters = [parameter for _, parameter in self.model.named_parameters()]
        torch._foreach_lerp_(list(self.shadow.values()), parameters, 1 - self.decay)

    @torch.no_grad()
    def swap(self):
        """Exchange the model's parameters with the averages; a second call undoes it."""
        for name, parameter in self.model.named_parameters():
            current = parameter.clone()
            parameter.copy_(self.shadow[name])
            self.shadow[name].copy_(current)

    @contextmanager
    def applied(self):
        """The model computes with the averages inside the block."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    def load(self, shadow):
        """Take the averages of a checkpoint; ValueError when its names differ from the model's."""
        if shadow.keys() != self.shadow.keys():
            different = sorted(shadow.keys() ^ self.shadow.keys())
            raise ValueError(f"ema_state_dict does not fit the model, first differing name: {different[0]!r}")
        for name, value in shadow.items():
            self.shadow[name].copy_(value)
