"""A module gets a fast forward by its class: `module.__class__` becomes a subclass made here.

So parameters, buffers, children, hooks, names and the module object itself stay what they are, isinstance holds, and
nothing is written into the module. A subclass is made once per original class, recogniser and settings: torch.compile,
which guards classes, compiles alike modules once. It lives as long as a module has it.

    Original ------> checking: its forward compares both on the first input that the fast forward serves; where rounding
       ^                |      could be why they differ, on the next
       |                |  alike                  | not alike
       |                v                         v
       |             final: nothing but the     Original, and the report says why
       |             fast forward or, for calls
       +------------ that it does not serve, the original one     (unpatch)
"""

from __future__ import annotations

import copy
import copyreg
import dis
import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils import parametrize

from .._torch_private import in_dispatch_mode, in_transform
from . import _proof
from ._call import PLAIN
from ._report import PatchEntry


class Patch(NamedTuple):
    """What a class made here was made of. recogniser: see Recogniser; settings: hashable, all that it has to know."""

    original: type
    recogniser: Any
    settings: Any
    checking: bool


# Modules that wait for their first input -> their entries in the report.
_waiting: weakref.WeakKeyDictionary[nn.Module, PatchEntry] = weakref.WeakKeyDictionary()
# Modules whose numbers differed by little more than allowed -> on how many inputs. A pixel where a norm divides by next
# to nothing has the error of its luck, so the next input decides, of INPUTS at most; until then the original runs.
_doubted: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
INPUTS = 3
# Modules that a thread compares just now; to other threads their originals answer meanwhile.
_comparing: weakref.WeakKeyDictionary[nn.Module, object] = weakref.WeakKeyDictionary()
# Modules found to differ whose class could not be set back, as it is wrapped (fully_shard and parametrize do that).
_refused: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def patch_of(kind: type) -> Patch | None:
    """Of a class made here, or one that wraps it."""
    return getattr(kind, "_camox_patch", None)


def apply(module: nn.Module, patch: Patch, entry: PatchEntry | None = None) -> None:
    """entry: of a module that is to be compared on its first input."""
    module.__class__ = _subclass(patch)
    if patch.checking:
        _waiting[module] = entry


def swap_back(module: nn.Module) -> bool:
    """Whether there was something to set back."""
    kind = type(module)
    patch = patch_of(kind)
    if patch is None:
        return False
    _waiting.pop(module, None)
    _doubted.pop(module, None)
    _refused.discard(module)
    module.__class__ = _without_patch(kind, patch)
    return True


def _without_patch(kind: type, patch: Patch) -> type:
    if "_camox_patch" in kind.__dict__:
        return patch.original
    # fully_shard and parametrize derive a class from the one they find; derive it from the original instead
    bases = tuple(_without_patch(base, patch) if patch_of(base) is not None else base for base in kind.__bases__)
    members = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
    return type(kind)(kind.__name__, bases, members)


def why_no_subclass(kind: type) -> str | None:
    """Why a class does not get a subclass: making one would do more than make one."""
    if type(kind) is not type and type(kind).__module__ != "abc":
        return f"its class has the metaclass {type(kind).__name__}"
    function = getattr(kind.__init_subclass__, "__func__", None)
    if function is not None and function.__module__ != "typing":
        return "a subclass of its class would run code of the class (__init_subclass__)"
    if kind.__hash__ is None:
        return "its class is not hashable"
    if any(_passes_own_class_to_super(base.__dict__.get("forward")) for base in kind.__mro__):
        return "its forward calls super(type(self), self), which in a subclass calls itself"
    return None


def _passes_own_class_to_super(forward) -> bool:
    """Whether it has super(type(self), self) or super(self.__class__, self)."""
    code = getattr(forward, "__code__", None)
    if code is None or "super" not in code.co_names:
        return False
    loads = [(step.opname, step.argval) for step in dis.get_instructions(code) if step.opname.startswith("LOAD_")]
    arguments = [loads[place + 1 : place + 3] for place, load in enumerate(loads) if load[1] == "super"]
    return any(found[:1] == [("LOAD_GLOBAL", "type")] or ("LOAD_ATTR", "__class__") in found for found in arguments)


def _subclass(patch: Patch) -> type:
    """The one that lives, or a new one."""
    original = patch.original
    for kind in original.__subclasses__():
        if kind.__dict__.get("_camox_patch") == patch:
            return kind
    fast = _checking_forward(patch) if patch.checking else _final_forward(patch)
    members = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_camox_patch": patch,
        "__init__": _init(original),
        "forward": functools.wraps(original.forward)(fast),
        "__reduce_ex__": _reduce_ex(original),
        "__deepcopy__": _deepcopy(original),
        "__prepare_scriptable__": _prepare_scriptable,
    }
    made = type(original)(original.__name__, (original,), members)
    for name in ("__reduce_ex__", "__deepcopy__"):  # they have to leave the class itself out
        members[name].__defaults__ = (made,)
    return made


def _final_forward(patch: Patch) -> Callable:
    original, settings = patch.original.forward, patch.settings
    serves, compute = patch.recogniser.serves, patch.recogniser.compute

    def forward(self, *args, **kwargs):
        # After unpatch whoever took the bound forward before still calls this one: accelerate's hooks and autocast do.
        if hasattr(type(self), "_camox_patch") and serves(self, settings, args, kwargs):
            return compute(self, settings, *args, **kwargs)
        return original(self, *args, **kwargs)

    return forward


def _checking_forward(patch: Patch) -> Callable:
    final = _final_forward(patch)
    original, settings = patch.original.forward, patch.settings
    serves, compute = patch.recogniser.serves, patch.recogniser.compute

    def forward(self, *args, **kwargs):
        if torch.compiler.is_compiling():
            return final(self, *args, **kwargs)
        # asked once: a module whose calls are never served waits for as long as it lives
        if not serves(self, settings, args, kwargs):
            _note_passed_on(_waiting.get(self), args, kwargs)
            return original(self, *args, **kwargs)
        if not is_settled(self, patch, args, kwargs):
            return original(self, *args, **kwargs)
        if self in _refused or patch_of(type(self)) is None:
            return original(self, *args, **kwargs)
        return compute(self, settings, *args, **kwargs)

    return forward


def _note_passed_on(entry: PatchEntry | None, args: tuple, kwargs: dict) -> None:
    if entry is None or torch.jit.is_tracing():  # a trace names its values by the variables that hold them
        return
    entry.passed_on += 1
    if entry.passed_on == 1:
        given = [_brief(value) for value in args]
        given += [f"{name}={_brief(value)}" for name, value in kwargs.items() if value is not None]
        entry.first_passed_on = f"({', '.join(given)})"


def _brief(value) -> str:
    if type(value) in PLAIN and not value.is_nested:  # nothing else has to answer for a shape
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return repr(value) if isinstance(value, (bool, int, float, type(None))) else type(value).__name__


def is_settled(module: nn.Module, patch: Patch, args: tuple, kwargs: dict) -> bool:
    """Compares a module that waits for its first input on these arguments, which are served. False: this call runs the
    original."""
    if module not in _waiting:
        return True
    if in_transform() or in_dispatch_mode():
        return True
    mine = object()
    if _comparing.setdefault(module, mine) is not mine:
        return False
    try:
        return _settle(module, patch, args, kwargs)
    finally:
        del _comparing[module]


def _settle(module: nn.Module, patch: Patch, args: tuple, kwargs: dict) -> bool:
    """Compares on these arguments, and gives the module its final class or its original one. False: the next decide."""
    entry = _waiting.get(module)
    if entry is None:  # another thread has compared since the caller asked
        return True
    try:
        found = _proof.compare_on_input(module, patch, args, kwargs)
    except _proof.OriginalFailed:
        return False  # it will fail for the caller as it would have
    except Exception as error:  # memory, or something of the user's; the original forward is there
        found = _proof.Comparison(f"the comparison raised {_proof.brief(error)}")
    entry.first_error, entry.first_torch_error = found.error, found.torch_error
    if found.in_doubt:
        _doubted[module] = _doubted.get(module, 0) + 1
        if _doubted[module] < INPUTS:
            return False
    _doubted.pop(module, None)
    del _waiting[module]
    if found.reason is None:
        if type(module).__dict__.get("_camox_patch") == patch:
            module.__class__ = _subclass(patch._replace(checking=False))
        return True
    entry.give_back(f"on its first {f'{INPUTS} inputs' if found.in_doubt else 'input'} {found.reason}")
    if type(module).__dict__.get("_camox_patch") == patch:
        module.__class__ = patch.original
    else:
        _refused.add(module)
    return True


def _init(original: type) -> Callable:
    @functools.wraps(original.__init__)
    def __init__(self, *args, **kwargs):
        if "_camox_patch" in type(self).__dict__:  # type(module)(...) makes another module, of which nothing is proved
            self.__class__ = original
        original.__init__(self, *args, **kwargs)

    return __init__


def _reduce_ex(original: type) -> Callable:
    def __reduce_ex__(self, protocol, made=None):
        """Pickles name the original class: who loads one needs no camox_ops."""
        reduced = super(made, self).__reduce_ex__(protocol)
        if not isinstance(reduced, tuple):
            return reduced
        make, args, *others = reduced
        if make is copyreg.__newobj__ and args[0] is made:
            return (original.__new__, (original, *args[1:]), *others)  # pickle refuses __newobj__ of another class
        args = tuple(original if argument is made else argument for argument in args)
        return (original if make is made else make, args, *others)

    return __reduce_ex__


def _deepcopy(original: type) -> Callable:
    def __deepcopy__(self, memo, made=None):
        """Copies stay patched."""
        inherited = getattr(super(made, self), "__deepcopy__", None)
        if inherited is not None:
            duplicate = inherited(memo)
        elif parametrize.is_parametrized(self):
            # Its class, derived from the patched one, has a __getstate__ that raises; to a class without a __deepcopy__
            # torch gives this one.
            duplicate = type(self).__new__(type(self))
            memo[id(self)] = duplicate
            duplicate.__dict__ = copy.deepcopy(self.__dict__, memo)
        else:
            make, args, state, *_ = super(made, self).__reduce_ex__(4)
            duplicate = make(*copy.deepcopy(args, memo))
            memo[id(self)] = duplicate
            duplicate.__setstate__(copy.deepcopy(state, memo))
        if self in _waiting and type(duplicate) is type(self):
            _waiting[duplicate] = _waiting[self]
        return duplicate

    return __deepcopy__


def _prepare_scriptable(self):
    """torch.jit.script asks for what it should compile: the module itself, given back to its class."""
    if self in _waiting:
        _waiting[self].give_back("torch.jit.script compiled it")
    swap_back(self)
    return self
