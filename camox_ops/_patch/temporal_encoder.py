"""EmberFormer's temporal encoder, in whatever class, computed as camox_ops.nn.TemporalEncoder does.

    tokens (B, N, T, D) --> nn.TransformerEncoder over T, for B*N sequences --> the step valid.sum(1) - 1 of each

After the attention of the last layer only that step is computed."""

from __future__ import annotations

import inspect

import torch
import torch.nn.functional as F
from torch import nn

from ..nn import temporal
from . import _call, _proof
from ._recogniser import Planned, Recogniser
from .transformer import LONGEST, differentiated, why_not_plain

# Of the last layer: what they drop is dropped of one step here and of all steps there, by other masks.
_LAST_DROPOUTS = ("dropout", "dropout1", "dropout2")


class TemporalEncoder(Recogniser):
    """Has an nn.TransformerEncoder of post-norm layers with GELU, and nothing else. The settings are its name."""

    name = "temporal_encoder"

    def is_candidate(self, module: nn.Module, planned: Planned) -> bool:
        parts = [part for part in module._modules.values() if part is not None]
        if module._parameters or module._buffers or len(parts) != 1:
            return False
        if _call.kind_of(parts[0]) is not nn.TransformerEncoder or not _fits(parts[0]):
            return False
        names = list(inspect.signature(type(module).forward).parameters.values())[1:]
        return len(names) == 2 and all(name.kind is name.POSITIONAL_OR_KEYWORD for name in names)

    def inner(self, module: nn.Module) -> list[tuple[str, nn.Module]]:
        ((name, stack),) = ((name, part) for name, part in module._modules.items() if part is not None)
        found = [(name, stack), (f"{name}.layers", stack.layers)]
        for number, layer in enumerate(stack.layers):
            found.append((f"{name}.layers.{number}", layer))
            found += [(f"{name}.layers.{number}.{key}", layer._modules[key]) for key in temporal.KINDS]
        return found

    def recognise(self, module: nn.Module, thorough: bool, planned: Planned) -> tuple[str, float]:
        (name,) = (name for name, part in module._modules.items() if part is not None)
        base = self.prepared(_proof.copied(module))

        def fast(copy_of_module, *args):
            return self.compute(copy_of_module, name, *args)

        def cases():
            width = module._modules[name].layers[0].self_attn.embed_dim
            x = _proof.values((4, 3, 5, width))
            steps = torch.arange(5)
            first = steps < torch.tensor([[5], [3], [1], [0]])
            last = steps >= torch.tensor([[0], [2], [4], [3]])
            yield (x, first), {}
            yield (x, last), {}

        try:
            error = _proof.compare64(base, type(module).forward, fast, cases, ("own",), modes=(True,))
        except _proof.NotAlike:  # a stack of such layers may serve anything
            raise _proof.OtherKind from None
        return name, error

    def prepared(self, copy_of_module: nn.Module) -> nn.Module:
        for stack in copy_of_module.children():
            for key in _LAST_DROPOUTS:
                stack.layers[-1]._modules[key].p = 0.0
        return copy_of_module

    def serves(self, module: nn.Module, settings: str, args: tuple, kwargs: dict) -> bool:
        if len(args) != 2 or kwargs:
            return False
        x, valid = args
        if not _call.is_served(x) or x.dim() != 4 or not 0 < x.shape[2] <= LONGEST or not x.numel():
            return False
        if not isinstance(valid, torch.Tensor) or valid.dtype is not torch.bool or valid.device != x.device:
            return False
        stack = module._modules[settings]
        if valid.shape != (x.shape[0], x.shape[2]) or not _fits(stack) or x.shape[3] != _width(stack):
            return False
        if x.dtype is not stack.layers[0].self_attn.in_proj_weight.dtype or _call.autocast_dtype(x) is not None:
            return False
        modules, kinds = [stack, stack.layers], [nn.TransformerEncoder, nn.ModuleList]
        for layer in stack.layers:
            modules += [layer, *(layer._modules[key] for key in temporal.KINDS)]
            kinds += [nn.TransformerEncoderLayer, *temporal.KINDS.values()]
        if not _call.are_bypassed(modules, kinds) or any(part.training is not module.training for part in modules):
            return False
        return module.training or differentiated(module, x)

    def compute(self, module: nn.Module, settings: str, tokens: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        return temporal.last_steps(module._modules[settings].layers, tokens, valid, lambda layer: True)


def _width(stack: nn.TransformerEncoder) -> int:
    return stack.layers[0].self_attn.embed_dim


def _fits(stack: nn.TransformerEncoder) -> bool:
    layers = getattr(stack, "layers", None)
    if stack.norm is not None or not isinstance(layers, nn.ModuleList) or not len(layers):
        return False
    for layer in layers:
        if _call.kind_of(layer) is not nn.TransformerEncoderLayer or why_not_plain(layer) is not None:
            return False
        if layer.norm_first or not layer.self_attn.batch_first:
            return False
        gelu = layer.activation
        if gelu is not F.gelu and (_call.why_not_bypassed(gelu, nn.GELU) is not None or gelu.approximate != "none"):
            return False
    return True
