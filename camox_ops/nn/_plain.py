"""When a module may read the parameters of an inner module instead of calling it.

A fused path reads the weights of several inner modules and calls none of them. That gives what calling them gives only
where a call would do nothing but apply the class's own forward to the module's parameters. An adapter or a quantised
layer in its place, a hook (pruning and the old weight_norm and spectral_norm are forward pre-hooks), a parametrization
(which changes the class) and a replaced `forward` all need the call. Every module with a fused path asks the functions
below on each call, and calls its inner modules one by one where one of them objects. They read attributes only, those
of plain modules in one loop, and keep nothing from one call to the next; a compiled graph holds none of it.

Each returns the reason to call as text for why_not_fused, or None where the modules are plain."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from .._torch_private import any_global_hook
from .norm2d import LayerNorm2d


class FusedModule(nn.Module):
    """A module whose forward has a fused path and one that calls its inner modules."""

    def why_not_fused(self) -> list[str]:
        """Why forward calls inner modules one by one; empty where it takes its fused paths."""
        raise NotImplementedError


def why_not_fused(model: nn.Module) -> dict[str, list[str]]:
    """Modules of camox_ops in `model`, itself included, that call inner modules one by one: {name: reasons}.

    The modules of camox_ops.nn keep the layers of the modules that they replace, and several of them compute a number
    of those layers at once. They do so only where the layers are what the constructor made: of exactly that class,
    without hooks, and with settings that agree. Otherwise the layers are called, so that LoRA adapters, quantised
    layers, pruning, weight_norm, spectral_norm and hooks work as they do in the replaced module, at its speed. This
    function lists which modules do that now, and why. A module is named as in model.named_modules().

    Raises:
        TypeError: model is not an nn.Module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"why_not_fused: model must be an nn.Module, got {type(model).__name__}")
    found = {name: module.why_not_fused() for name, module in model.named_modules() if isinstance(module, FusedModule)}
    return {name: reasons for name, reasons in found.items() if reasons}


def global_hooks() -> str | None:
    """Hooks that were registered for all modules of the process see each call of an inner module."""
    return "hooks on all modules are registered" if any_global_hook() else None


def not_plain(module: nn.Module, kind: type) -> str | None:
    if type(module) is not kind:
        return f"is a {type(module).__module__}.{type(module).__qualname__}, not a {kind.__name__}"
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return "has hooks"
    if "forward" in module.__dict__:
        return "has a forward of its own"
    return None


def all_plain(modules: Sequence[nn.Module], kinds: Sequence[type]) -> bool:
    """What not_plain tests, in one loop; modules of which one is not plain are asked again by not_plain."""
    if list(map(type, modules)) != kinds:
        return False
    for module in modules:
        own = module.__dict__  # quicker to ask than the module
        if (
            own["_forward_hooks"]
            or own["_forward_pre_hooks"]
            or own["_backward_hooks"]
            or own["_backward_pre_hooks"]
            or "forward" in own
        ):
            return False
    return True


def plain_layers(sequentials: Sequence[nn.Module], kinds: Sequence[type]) -> list[nn.Module] | None:
    """Each of the Sequentials and then its layers, all in one list, where all are plain and of these classes."""
    modules = []
    for layers in sequentials:
        if type(layers) is not nn.Sequential:
            return None
        modules.append(layers)
        modules += layers.__dict__["_modules"].values()
    return modules if all_plain(modules, [nn.Sequential, *kinds] * len(sequentials)) else None


def not_plain_layers(name: str, layers: nn.Module, kinds: Sequence[type | None]) -> str | None:
    """layers: a Sequential of these classes; None: any module, one that is called."""
    reason = not_plain(layers, nn.Sequential)
    if reason is None and len(layers) != len(kinds):
        reason = f"has {len(layers)} modules, not {len(kinds)}"
    if reason is not None:
        return f"{name} {reason}"
    for (key, module), kind in zip(layers._modules.items(), kinds, strict=True):
        reason = None if kind is None else not_plain(module, kind)
        if reason is not None:
            return f"{name}.{key} {reason}"
    return None


def not_pointwise(name: str, convolution: nn.Conv2d) -> str | None:
    """convolution: a plain one."""
    own = convolution.__dict__
    if own["kernel_size"] != (1, 1) or own["stride"] != (1, 1) or own["padding"] != (0, 0):
        return f"{name} is not a 1x1 convolution"
    if own["groups"] != 1:
        return f"{name} has groups={own['groups']}"
    parameters = own["_parameters"]
    if parameters.get("bias") is None or parameters.get("weight") is None:
        return f"{name} has no bias or weight"
    return None


def not_alike(
    names: Sequence[str], branches: Sequence[nn.Module], kinds: Sequence[type], one_norm: bool = False
) -> str | None:
    """branches: Sequentials of these classes, which begin with a 1x1 convolution and of which the last but one is a
    LayerNorm2d; all convolutions of one shape. one_norm: the norms are to be computed as one of that many groups."""
    reason = global_hooks()
    if reason is not None:
        return reason
    modules = plain_layers(branches, kinds)
    if modules is None:
        for name, layers in zip(names, branches, strict=True):
            reason = reason or not_plain_layers(name, layers, kinds)
        return reason
    step = len(kinds) + 1
    shape = None
    for name, convolution in zip(names, modules[1::step], strict=True):
        reason = not_pointwise(name, convolution)
        if reason is not None:
            return reason
        own = convolution.__dict__["_parameters"]["weight"].shape
        if shape is None:
            shape = own
        elif own != shape:
            return f"{name}.0.weight does not have the shape of {names[0]}.0.weight"
    return _not_one_norm(names, modules[step - 2 :: step], step - 3) if one_norm else None


def _not_one_norm(names: Sequence[str], norms: Sequence[LayerNorm2d], place: int) -> str | None:
    """norms: plain ones, the modules `place` of Sequentials of these names."""
    first = norms[0].__dict__
    for name, norm in zip(names, norms, strict=True):
        own = norm.__dict__
        if own["groups"] != 1:
            return f"{name}.{place} has groups={own['groups']}"
        if own["eps"] != first["eps"] or own["activation"] != first["activation"]:
            return f"{name}.{place} does not have the eps and activation of {names[0]}.{place}"
    return None
