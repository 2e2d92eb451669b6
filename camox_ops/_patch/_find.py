"""Which modules of a model a recogniser may look at, and which it must leave alone whatever they compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from ..nn._plain import FusedModule
from ._call import kind_of, why_not_bypassed
from ._report import PATCHED_ALREADY
from ._swap import patch_of


def modules_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, str | None]]:
    """(name, module, why it and all modules in it are left alone), parents first, each module once. Modules inside one
    that is left alone so are not given."""
    seen: set[int] = set()
    waiting = [("", model)]
    while waiting:
        name, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        reason = why_closed(module)
        yield name, module, reason
        if reason is None and not isinstance(module, FusedModule):
            inner = [(f"{name}.{key}" if name else key, child) for key, child in module._modules.items()]
            waiting += [(path, child) for path, child in reversed(inner) if child is not None]


def why_closed(module: nn.Module) -> str | None:
    """Why nothing in a module may be touched."""
    if isinstance(module, torch.jit.ScriptModule):
        return "it is compiled by torch.jit (script, trace or freeze)"
    if isinstance(module, torch.fx.GraphModule):
        return "it is a torch.fx.GraphModule, whose code is generated"
    if "_orig_mod" in module._modules and type(module).__module__.split(".")[:2] == ["torch", "_dynamo"]:
        return "it is compiled: patch the model before torch.compile"
    if module.__dict__.get("_compiled_call_impl") is not None:
        return "it is compiled: patch the model before its compile()"
    if type(module).__module__.startswith(("torch.ao.nn.", "torch.nn.quantized", "torchao.")):
        return "it is quantised"
    return None


def uses_of(model: nn.Module) -> Counter:
    """How many modules hold each module, by its id."""
    return Counter(id(child) for module in model.modules() for child in module._modules.values() if child is not None)


NO_SIZES = "its parameters have no sizes before its first input"


def has_no_sizes(*modules: nn.Module) -> bool:
    """Whether one has a parameter or buffer of its own that a lazy module makes at its first input."""
    return any(is_lazy(tensor) for part in modules for tensor in (*part._parameters.values(), *part._buffers.values()))


def why_left_alone(module: nn.Module, inner: list[tuple[str, nn.Module]], uses: Counter) -> str | None:
    """Why a candidate keeps its forward. inner: what a fast forward would read instead of calling it."""
    if patch_of(type(module)) is not None:
        return PATCHED_ALREADY
    if uses[id(module)] > 1:
        return f"it is used in {uses[id(module)]} places of the model"
    if "forward" in module.__dict__:
        return "it has a forward of its own"
    for name, part in [("", module), *inner]:
        where = f"{name} " if name else "it "
        if name:
            reason = why_not_bypassed(part, kind_of(part))
            if reason is not None:
                return where + reason
        if parametrize.is_parametrized(part):
            return where + "has parametrizations"
        for key, tensor in [*part._parameters.items(), *part._buffers.items()]:
            reason = None if tensor is None else _why_not_plain(tensor)
            if reason is not None:
                return f"{where}has {key} {reason}"
    return None


def _why_not_plain(tensor: torch.Tensor) -> str | None:
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        return f"of type {type(tensor).__name__}"
    return "on the meta device" if tensor.is_meta else None


# What every module has; hooks are asked for module by module.
_OF_ALL = set(vars(nn.Module()))


def fingerprint(module: nn.Module) -> tuple:
    """Equal for two modules that differ in the values of parameters and buffers alone. What is not a plain value, as
    the config that transformers gives all its modules, has to be one object in both."""
    found = []
    for name, part in module.named_modules():
        own = []
        for key, value in sorted(vars(part).items()):
            if key in _OF_ALL:
                continue
            own.append((key, type(value), value if _is_plain(value) else id(value)))
        tensors = [
            (key, None if tensor is None else (type(tensor), tensor.shape, tensor.dtype, tensor.device))
            for key, tensor in [*part._parameters.items(), *part._buffers.items()]
        ]
        found.append((name, type(part), part.training, tuple(own), tuple(tensors)))
    return tuple(found)


def _is_plain(value) -> bool:
    """Whether equal values behave alike: numbers, texts, tuples of such, functions without a closure."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    if isinstance(value, (FunctionType, BuiltinFunctionType)):
        return getattr(value, "__closure__", None) is None
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype, type))


class _Unusable:
    """In the place of a number: it may be handed on, but not be asked for anything. Comparisons would answer for any
    object, arithmetic does not."""

    def _refuse(self, *others):
        raise TypeError("patch: this number was left out of a proof")

    __bool__ = __eq__ = __ne__ = __hash__ = __str__ = __repr__ = __format__ = _refuse

    def __deepcopy__(self, memo):
        return self


_UNUSABLE = _Unusable()


def differing_numbers(module: nn.Module, other: nn.Module) -> list[str]:
    """Names of the module's own attributes that are whole numbers, and others in the other module."""
    own, others = vars(module), vars(other)
    return [
        name
        for name, value in own.items()
        if type(value) is int and type(others.get(name)) is int and value != others[name]
    ]


def without_numbers(module: nn.Module, names: list[str]) -> nn.Module:
    """The same parameters, inner modules and attributes, in a module that raises where it uses one of these."""
    unnumbered = object.__new__(type(module))
    vars(unnumbered).update(vars(module))
    vars(unnumbered).update(dict.fromkeys(names, _UNUSABLE))
    return unnumbered
