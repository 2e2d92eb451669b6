"""The forward of a module as a torch.fx graph, to replace some of its operations, and back to a function.

    copy of the module --trace--> graph --rules of a recogniser--> graph --print--> text of a function --> settings

Inner modules are called in the graph as in the forward, so that their patches, hooks and adapters work; plain
nn.Sequentials are opened. A graph has the branches that the forward took when it was traced. What decides them has to
be the arguments that are given or attributes of the module, which a module that is recognised keeps: a forward that
asks for the values or sizes of its tensors cannot be traced, one that draws random numbers for its branches is
refused, and one that depends on the mode differs in the proof. The text of the function is the value that two
patches are compared by."""

from __future__ import annotations

import inspect
import itertools
import math
import random
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from . import _call, _proof

_ALLOWED = ("torch", "_operator", "math", "camox_ops")
# Texts of functions -> the functions.
_functions: dict[str, Callable] = {}


class Variant(NamedTuple):
    """A forward for calls that give these arguments. Other ones have their defaults; source: of a function of the
    module and those arguments."""

    given: tuple[str, ...]
    source: str

    @property
    def function(self) -> Callable:
        return _functions[self.source]


class Signature(NamedTuple):
    """What a forward takes besides the module: names in order, how many must be given, defaults of the others."""

    names: tuple[str, ...]
    required: int
    defaults: tuple

    def bound(self, args: tuple, kwargs: dict) -> dict | None:
        """The arguments that differ from their defaults, by name; None for a call that is not one of this forward."""
        if len(args) > len(self.names) or not set(kwargs) <= set(self.names[len(args) :]):
            return None
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        if not set(self.names[: self.required]) <= set(given):
            return None
        for name, default in zip(self.names[self.required :], self.defaults, strict=True):
            if name in given and (given[name] is default or _is_equal(given[name], default)):
                del given[name]
        return given


def _is_equal(value, default) -> bool:
    return isinstance(default, (bool, int, float, str)) and type(value) is type(default) and value == default


def signature_of(module: nn.Module) -> Signature | None:
    """Of the class's forward; None where it takes *args or **kwargs, or has defaults that are objects."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    if not parameters or any(p.kind is not p.POSITIONAL_OR_KEYWORD for p in parameters):
        return None
    required = [p for p in parameters if p.default is p.empty]
    defaults = tuple(p.default for p in parameters if p.default is not p.empty)
    if any(default is not None and not isinstance(default, (bool, int, float, str)) for default in defaults):
        return None
    return Signature(tuple(p.name for p in parameters), len(required), defaults)


class _Tracer(fx.Tracer):
    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return type(module) is not nn.Sequential

    def call_module(self, module: nn.Module, forward: Callable, args: tuple, kwargs: dict):
        # While fx traces it sees the calls of every module of the process: those of other threads go on.
        if not any(isinstance(value, fx.Proxy) for value in itertools.chain(args, kwargs.values())):
            return forward(*args, **kwargs)
        return super().call_module(module, forward, args, kwargs)


class _WithoutDefaults(TorchFunctionMode):
    """Keeps what is in force at the time, as a default device, out of the graph: nodes are made as the forward has
    them."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, fx.Proxy) for kind in types):
            return fx.Proxy.__torch_function__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


def traced(module: nn.Module, given: tuple[str, ...]) -> fx.Graph:
    """The graph of module(*given). Raises OtherKind."""
    side = _proof.copied(module)
    original = type(side).forward
    names = ", ".join(given)
    by_name = ", ".join(f"{name}={name}" for name in given)
    forward = eval(f"lambda self, {names}: original(self, {by_name})", {"original": original})
    side.__class__ = type(type(side).__name__, (type(side),), {"forward": forward})
    before = _random_states()
    try:
        with _WithoutDefaults():
            graph = _Tracer().trace(side)
    except Exception:  # whatever a forward does with what is not a tensor
        raise _proof.OtherKind from None
    if _random_states() != before or not all(_is_known(node, module) for node in graph.nodes):
        raise _proof.OtherKind
    return graph


def _random_states() -> tuple:
    numpy_random = sys.modules.get("numpy.random")
    return (
        random.getstate(),
        None if numpy_random is None else str(numpy_random.get_state()),
        torch.default_generator.get_state().tolist(),
    )


def _is_known(node: fx.Node, module: nn.Module) -> bool:
    """Whether the module has what the node names, and its function is one of torch's or ours."""
    if node.op == "get_attr":
        path = node.target.split(".")
        try:
            owner = module.get_submodule(".".join(path[:-1]))
        except AttributeError:
            return False
        return path[-1] in owner._parameters or path[-1] in owner._buffers
    if node.op == "call_function":
        return node.target is getattr or (getattr(node.target, "__module__", None) or "").split(".")[0] in _ALLOWED
    return True


def unused(graph: fx.Graph) -> set[fx.Node]:
    return {node for node in graph.nodes if not node.users}


def variant(graph: fx.Graph, given: tuple[str, ...], kept: set[fx.Node]) -> Variant:
    """kept: what was unused before operations were replaced, and is called for what else it does."""
    for node in reversed(list(graph.nodes)):
        if not node.users and node not in kept:
            graph.erase_node(node)
    printed = graph.python_code("self")
    if printed.src not in _functions:
        members = dict(printed.globals)
        exec(compile(printed.src, "<camox_ops.patch>", "exec"), members)
        _functions[printed.src] = members["forward"]
    return Variant(given, printed.src)


def opened(module: nn.Module, graph: fx.Graph) -> dict[tuple[str, ...], tuple[str, ...]]:
    """Paths of the nn.Sequentials whose modules the graph calls itself -> names of what is in them."""
    found = {}
    for node in graph.nodes:
        path = node.target.split(".")[:-1] if node.op == "call_module" else []
        for depth in range(1, len(path) + 1):
            part = _call.at(module, tuple(path[:depth]))
            if _call.kind_of(part) is nn.Sequential:
                found[tuple(path[:depth])] = tuple(part._modules)
    return found


def is_call_of(node, *functions: Callable | str) -> bool:
    """Whether a node calls one of the functions, or the method of a tensor that has this name."""
    if not isinstance(node, fx.Node) or node.op not in ("call_function", "call_method"):
        return False
    return node.target in functions


def called(node, graph_of: nn.Module, kind: type) -> nn.Module | None:
    """The inner module of this very class that a node calls with one tensor."""
    if not isinstance(node, fx.Node) or node.op != "call_module" or len(node.args) != 1 or node.kwargs:
        return None
    part = graph_of.get_submodule(node.target)
    return part if _call.kind_of(part) is kind and isinstance(node.args[0], fx.Node) else None


def is_used_once(node) -> bool:
    return isinstance(node, fx.Node) and len(node.users) == 1


def path_of(node: fx.Node, part: str) -> fx.Node:
    """A node that reads an inner module, before the given one."""
    with node.graph.inserting_before(node):
        return node.graph.create_node("get_attr", part, (), {}, name=part.replace(".", "_"))


def replace(node: fx.Node, function: Callable, *args, **kwargs) -> None:
    with node.graph.inserting_before(node):
        node.replace_all_uses_with(node.graph.call_function(function, args, kwargs))


def examples(module: nn.Module, graph: fx.Graph) -> Iterator[torch.Tensor]:
    """Inputs that the first operation of a graph may take, in float64, or tokens for an embedding."""
    placeholder = next(node for node in graph.nodes if node.op == "placeholder")
    takers = [module.get_submodule(node.target) for node in placeholder.users if node.op == "call_module"]
    for part in takers:
        kind = _call.kind_of(part)
        if kind is nn.Embedding:
            for shape in ((2, 5), (1, 7)):
                yield torch.arange(shape[0] * shape[1]).view(shape) * 5 % part.num_embeddings
        elif kind is nn.Conv2d:
            for rows, columns in _grids(module):
                for batch in (2, 1):
                    height, width = rows * part.stride[0], columns * part.stride[1]
                    yield _proof.values((batch, part.in_channels, height, width))
        elif kind in (nn.Linear, nn.LayerNorm, nn.MultiheadAttention):
            names = {nn.Linear: "in_features", nn.MultiheadAttention: "embed_dim"}
            width = getattr(part, names[kind]) if kind in names else part.normalized_shape[-1]
            for length in (5, 7):  # large enough for the ops
                yield _proof.values((math.ceil(_call.SMALLEST / length / width), length, width))


def _grids(module: nn.Module) -> Iterator[tuple[int, int]]:
    """Squares of as many places as a parameter (1, T, D) has, or T - 1 (a token of its own), or of any size."""
    counts = [p.shape[1] for p in module.parameters() if p.dim() == 3 and p.shape[0] == 1]
    sides = [round(count**0.5) for length in counts for count in (length, length - 1)]
    squares = [side for side in sides if side and {side * side, side * side + 1} & set(counts)]
    for side in dict.fromkeys([*squares, 4]):
        yield side, side
