"""Every name of torch that is not public and that this package uses, and what takes its place where a torch has none of
that name: camox_ops is imported all the same and computes the same, with more time for each call. `python -m camox_ops
info` says which names are missing.

CAMOX_HIDE_TORCH=all, or some names of NAMES with commas between them, treats them as missing."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch.autograd import Function, forward_ad, profiler

from . import _C, _cuda

NAMES = (
    # the call path past the Python of OpOverload and Function, all of it or nothing
    "torch._C._AutoDispatchBelowAutograd",
    "torch._C._FunctionBase.apply",
    "torch._C._are_functorch_transforms_active",
    "torch._C._functorch.unwrap_if_dead",
    "torch._ops.OpOverload._op",
    "torch.autograd.Function._backward_cls",
    "torch.autograd.forward_ad._current_level",
    # views and memory of tensors that are written in place
    "torch.Tensor._base",
    "torch.Tensor._is_view",
    "torch._C._autograd._get_creation_meta",
    "torch._C._autograd.CreationMeta",
    "torch._C._is_alias_of",
    "torch._debug_has_internal_overlap",
    # whether what a module keeps may serve
    "torch.nn.modules.module._has_any_global_hook",
    "torch.utils._python_dispatch.is_in_torch_dispatch_mode",
    # whether somebody watches operators
    "torch._C._is_torch_function_mode_enabled",
    "torch._C._is_tracing",
    "torch.autograd.profiler._is_profiler_enabled",
)


def _names_to_hide() -> tuple[str, ...]:
    asked = os.environ.get("CAMOX_HIDE_TORCH", "")
    names = NAMES if asked == "all" else tuple(asked.split(",")) if asked else ()
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise ImportError(f"CAMOX_HIDE_TORCH must be 'all' or some of {', '.join(NAMES)}, got {unknown[0]!r}")
    return names


_hidden = _names_to_hide()
missing: list[str] = []
"""Those of NAMES that this torch does not have."""


def _find(name: str, owner=None):
    """What torch has by one of NAMES, or None. owner: what has the last part of it, where that is no module."""
    assert name in NAMES
    try:
        if name in _hidden:
            raise AttributeError(name)
        if owner is not None:
            return getattr(owner, name.rpartition(".")[2])
        value = torch
        for part in name.split(".")[1:]:
            value = getattr(value, part)
        return value
    except AttributeError:
        missing.append(name)
        return None


class _Example(Function):
    """An autograd.Function like all others."""


_guard = _find("torch._C._AutoDispatchBelowAutograd")
_base_apply = _find("torch._C._FunctionBase.apply", super(Function, _Example))
_transforms_active = _find("torch._C._are_functorch_transforms_active")
_unwrap = _find("torch._C._functorch.unwrap_if_dead")
_kernel = _find("torch._ops.OpOverload._op", torch.ops.aten.add.Tensor)
_backward_class = _find("torch.autograd.Function._backward_cls", _Example)
_level = _find("torch.autograd.forward_ad._current_level")
_base = _find("torch.Tensor._base", torch.Tensor)
_is_view = _find("torch.Tensor._is_view", torch.Tensor)
_creation_meta = _find("torch._C._autograd._get_creation_meta")
_creation_metas = _find("torch._C._autograd.CreationMeta")
_is_alias = _find("torch._C._is_alias_of")
_overlap = _find("torch._debug_has_internal_overlap")
_any_global_hook = _find("torch.nn.modules.module._has_any_global_hook")
_dispatch_mode = _find("torch.utils._python_dispatch.is_in_torch_dispatch_mode")
_function_mode = _find("torch._C._is_torch_function_mode_enabled")
_tracing = _find("torch._C._is_tracing") or torch.jit.is_tracing
_profiled = _find("torch.autograd.profiler._is_profiler_enabled")

# Without the level of forward-mode AD every tensor is asked for its tangent, which is public.
forward_levels = SimpleNamespace(_current_level=0) if _level is None else forward_ad
"""Has a `_current_level`, < 0 where no tensor carries a tangent: an attribute, as a function would cost a call more."""

CALLS_ARE_FAST = all(
    part is not None for part in (_guard, _base_apply, _transforms_active, _unwrap, _kernel, _backward_class, _level)
)


def state() -> str:
    """One line for people on which way calls take."""
    if not missing:
        return "short, past the Python of torch's operators"
    way = "short" if CALLS_ARE_FAST else "long, through public torch alone (more time for each call)"
    why = "CAMOX_HIDE_TORCH hides" if _hidden else "this torch does not have"
    return f"{way}; {why} {', '.join(missing)}"


WITHOUT_GRADIENT = (
    "bdh_attention_step",
    "gemm",
    "gemm_sums",
    "grad_group_norms",
    "linear_attention_step",
    "linear_cross_entropy_rows_",
    "moe_activation",
    "moe_activation_backward",
    "moe_experts_mm",
    "moe_experts_mm_tn",
    "rope_",
    "scale_grads_",
)
"""Operators that the package calls without differentiable_call."""

_observe: dict[str, Callable] = {}
_is_observed = False


class _Observed:
    """Takes the place of a function of torch's that has this hash, of which torch makes that of an operator."""

    def __init__(self, observer: Callable, name: str, function: Callable):
        self.function = function
        self._call = observer(name, function)

    def __call__(self, *args, **kwargs):
        return self._call(*args, **kwargs)

    def __hash__(self):
        return hash(self.function)


def observe_calls(observer: Callable | None) -> None:
    """Puts observer(name, function) in the place of the function of torch's that calls an operator of this package, for
    each of them and each way that it is called; None: gives torch's own back. Costs calls nothing without an observer:
    what is replaced are variables that every call reads."""
    global _is_observed
    _is_observed = observer is not None
    for observe in _observe.values():
        observe(observer)
    for name in (*_observe, *WITHOUT_GRADIENT):
        packet = getattr(torch.ops.camox_ops, name)
        for called in (packet, packet.default):
            own = vars(called).get("_op")
            if isinstance(own, _Observed):
                called._op = own = own.function
            if observer is not None and own is not None:
                called._op = _Observed(observer, name, own)


def differentiable_call(
    name: str, overload, transformable: type[Function], make_outputs: Callable, saves_if_asked: bool
) -> Callable:
    """What an op calls in place of its operator `overload`, so that gradients and torch.func transforms follow.

    transformable: the op as a Function with setup_context, which transforms need. make_outputs(*args): uninitialised
    outputs for plain CPU tensors. saves_if_asked: as for camox_ops.ops._register.register.

    The callable has an `attempt`, for arguments that nobody has checked yet: outputs where the operator itself refuses
    whatever is wrong with these tensors, before it writes anything (on the CPU, in plain eager mode), and None where it
    refused or where that is not certain. The caller then makes its checks, whose messages name arguments as users know
    them, and calls again. With cold caches those
    checks take as long as an operator on a small image.
    """
    saving, forgetting = ((True,), (False,)) if saves_if_asked else ((), ())
    make = _short_call if CALLS_ARE_FAST else _long_call
    call = make(name, overload, transformable, saving, forgetting)
    if CALLS_ARE_FAST and READS_BY_DLPACK and hasattr(_C, f"{name}_into"):
        return _direct_call(name, call, transformable, make_outputs, saving, forgetting)
    return call


def _read_by_dlpack() -> bool:
    """Whether functions of _C that operators have past torch's dispatcher may serve: csrc/common/direct.h."""
    table = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    watchers_are_known = None not in (_dispatch_mode, _function_mode, _profiled)
    return watchers_are_known and table is not None and _C.use_dlpack(table, torch.Tensor, torch.nn.Parameter)


READS_BY_DLPACK = _read_by_dlpack()

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


def _short_call(name: str, overload, transformable: type[Function], saving: tuple, forgetting: tuple) -> Callable:
    """In plain eager mode goes around the dispatcher's autograd, whose registered formulas cost more than a Function
    without setup_context, and more than nothing where no gradient is needed."""
    # Not through OpOverload.__call__ nor, below, Function.apply: they are Python, and most of a small op's time.
    # A large op's data has driven this code out of the caches: there too every function less on the way counts.
    kernel, guard, unwrap, in_transform = overload._op, _guard, _unwrap, _transforms_active
    unobserved = kernel
    setup_context, backward = transformable.setup_context, transformable.backward
    is_compiling, is_grad_enabled, Tensor = torch.compiler.is_compiling, torch.is_grad_enabled, torch.Tensor
    is_traced = torch.compiler.is_dynamo_compiling  # one Python function less: export's tensors are no plain ones

    def forward(ctx, *args):
        try:
            with guard():
                output = kernel(*args)
        except RuntimeError as error:
            raise_as_torch_does(error)
            raise
        setup_context(ctx, args, output)
        return output

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    eager = type(transformable.__name__, (Function,), methods)
    eager._backward_cls.apply = backward  # what torch puts here looks for a vjp first
    apply = super(Function, eager).apply

    def call(*args):
        if is_compiling():
            return overload(*args, *saving)
        if in_transform():
            return transformable.apply(*args, *saving)
        if forward_ad._current_level >= 0:
            refuse_tangents(name, args)
        if is_grad_enabled():
            for arg in args:
                if isinstance(arg, Tensor) and arg.requires_grad:
                    return apply(*[unwrap(arg) if isinstance(arg, Tensor) else arg for arg in args], *saving)
        try:
            with guard():
                return kernel(*args, *forgetting)
        except RuntimeError as error:
            raise_as_torch_does(error)
            raise

    def attempt(*args):
        if is_traced() or in_transform() or forward_ad._current_level >= 0:
            return None
        differentiated = False
        for arg in args:
            if isinstance(arg, Tensor):
                if type(arg) not in _PLAIN or not arg.is_cpu:
                    return None
                differentiated = differentiated or arg.requires_grad
        try:
            if differentiated and is_grad_enabled():
                return apply(*[unwrap(arg) if isinstance(arg, Tensor) else arg for arg in args], *saving)
            with guard():
                return kernel(*args, *forgetting)
        except (RuntimeError, TypeError, ValueError):
            return None

    def observe(observer):
        nonlocal kernel
        kernel = unobserved if observer is None else observer(name, unobserved)

    _observe[name] = observe
    call.attempt = attempt
    return call


class _Refused(Exception):
    """A function of _C wrote nothing: the operator has to look at these arguments."""


def _direct_call(
    name: str, call: Callable, transformable: type[Function], make_outputs: Callable, saving: tuple, forgetting: tuple
) -> Callable:
    """`call`, which is _short_call's, after a shorter way for plain CPU tensors while nobody watches operators: past
    torch's dispatcher, by the operator's function in _C (csrc/common/direct.h).

    Where code is cold, as in a training step, every Python function on the way counts: hence the flat code."""
    into, look_at = getattr(_C, f"{name}_into"), _C.look_at
    is_grad_enabled, is_traced, in_transform = (
        torch.is_grad_enabled,
        torch.compiler.is_dynamo_compiling,
        _transforms_active,
    )
    setup_context, backward, saves = transformable.setup_context, transformable.backward, bool(saving)

    def compute(*args):
        outputs = make_outputs(*args)
        if not (into(*args, *outputs) if type(outputs) is tuple else into(*args, outputs)):
            raise _Refused
        return outputs

    def forward(ctx, *args):  # not through compute, which would be one more function
        outputs = make_outputs(*args)
        if not (into(*args, *outputs) if type(outputs) is tuple else into(*args, outputs)):
            raise _Refused
        setup_context(ctx, args, outputs)
        return outputs[0] if saves else outputs

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    eager = type(transformable.__name__, (Function,), methods)
    eager._backward_cls.apply = backward
    apply = super(Function, eager).apply

    def attempt(*args):
        if is_traced() or in_transform() or forward_ad._current_level >= 0 or is_watched():
            return None
        look = look_at(*args)
        if look == 0:
            return None
        try:
            if look == 2 and is_grad_enabled():
                outputs = apply(*args, *saving)
                return (outputs,) if saves else outputs
            return compute(*args, *forgetting)
        except (_Refused, AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            return None

    def direct(*args):
        outputs = attempt(*args)
        return call(*args) if outputs is None else outputs

    direct.attempt = attempt
    return direct


def _long_call(name: str, overload, transformable: type[Function], saving: tuple, forgetting: tuple) -> Callable:
    """The same by public means."""
    unobserved = overload

    def call(*args):
        if torch.compiler.is_compiling():
            return overload(*args, *saving)
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        transformed = any(is_wrapped(tensor) for tensor in tensors)
        if not transformed:
            refuse_tangents(name, args)
        try:
            if transformed or (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
                return transformable.apply(*args, *saving)
            return overload(*args, *forgetting)
        except RuntimeError as error:
            raise_as_torch_does(error)
            raise

    def observe(observer):
        nonlocal overload
        overload = unobserved if observer is None else observer(name, unobserved)

    _observe[name] = observe
    call.attempt = lambda *args: None
    return call


def attempt_in_place(name: str, make_output: Callable) -> Callable:
    """The `attempt` of differentiable_call for an operator without derivatives that writes to its arguments: its
    output; None where it refused, before it wrote anything, or where one of the tensors may need a gradient or is
    negated lazily, of which the dispatcher would write a copy. The caller moves version counters."""
    if not (CALLS_ARE_FAST and READS_BY_DLPACK):
        return lambda *args: None
    into, look_at = getattr(_C, f"{name}_into"), _C.look_at
    in_transform, is_traced = _transforms_active, torch.compiler.is_dynamo_compiling

    def attempt(*args):
        if is_traced() or in_transform() or forward_ad._current_level >= 0 or is_watched() or look_at(*args) != 1:
            return None
        try:
            output = make_output(*args)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            return None
        return output if into(*args, output) else None

    return attempt


def call_operator(operator: Callable, *args):
    """For operators that the package calls without differentiable_call, of arguments that only they check."""
    try:
        return operator(*args)
    except RuntimeError as error:
        raise_as_torch_does(error)
        raise


def raise_as_torch_does(error: RuntimeError) -> None:
    """What torch's C interface makes a plain RuntimeError of is again what callers look for: an OutOfMemoryError, and
    from torch 2.15 on, where C++'s invalid_argument is none any longer, a ValueError."""
    if type(error) is not RuntimeError:
        return
    if str(error).startswith("CUDA out of memory"):
        raise torch.OutOfMemoryError(*error.args) from None
    if str(error) in (_C.last_refusal(), _cuda.part.last_refusal()):
        raise ValueError(*error.args) from None


def refuse_tangents(name: str, args) -> None:
    """The kernels would drop a tangent. An op's own arguments were looked at before; what autograd hands to a backward
    operator comes here first."""
    for arg in args:
        if isinstance(arg, torch.Tensor) and forward_ad.unpack_dual(arg).tangent is not None:
            raise NotImplementedError(f"{name}: forward-mode AD is not implemented, and an argument carries a tangent")


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Whether a torch.func transform follows this tensor."""
    return torch.func.debug_unwrap(tensor, recurse=False) is not tensor


def in_transform(*tensors: torch.Tensor) -> bool:
    """Whether a torch.func transform is active; or, where torch does not say, whether one follows these tensors."""
    if _transforms_active is not None:
        return _transforms_active()
    return torch.compiler.is_compiling() or any(is_wrapped(tensor) for tensor in tensors)


def in_eager_transform(*tensors: torch.Tensor) -> bool:
    """The same, but not while torch.compile traces, which has rules of its own for what is in a transform."""
    return not torch.compiler.is_compiling() and in_transform(*tensors)


def in_dispatch_mode() -> bool:
    """Whether Python sees every operator that is called: then what a module keeps must not serve. True where torch does
    not say."""
    return _dispatch_mode is None or _dispatch_mode()


def is_followed() -> bool:
    """Whether anything but this process's results depends on which operators are called: torch.compile, a torch.func
    transform, forward-mode AD, a mode, a trace, the profiler or an observer of this package. True where torch does not
    say."""
    return (
        torch.compiler.is_compiling()
        or None in (_transforms_active, _dispatch_mode, _function_mode, _profiled)
        or _transforms_active()
        or forward_levels._current_level >= 0
        or is_watched()
    )


def is_watched() -> bool:
    """Whether a mode, a trace, the profiler or an observer of this package sees which operators are called. Only where
    torch says so of each of them."""
    return _is_observed or _dispatch_mode() or _function_mode() or profiler._is_profiler_enabled or _tracing()


def any_global_hook() -> bool:
    """Whether hooks for all modules are registered. True where torch does not say."""
    return _any_global_hook is None or _any_global_hook()


def shares_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    if _is_alias is not None:
        return _is_alias(a, b)
    try:
        return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() != 0
    except RuntimeError:  # fake tensors have none
        return False


def internal_overlap(x: torch.Tensor) -> int:
    """0: no two elements of x lie at the same address, 1: some do, 2: torch does not say."""
    if _overlap is not None:
        return _overlap(x)
    return 1 if any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True)) else 2


def why_not_overwritten(x: torch.Tensor) -> str:
    """Why autograd would refuse an in-place operation on x, which requires a gradient, before anything is written:
    "leaf", for a leaf or a view of one, "view" for one of several views that a function made, or an empty string."""
    if x.is_leaf:
        return "leaf"
    if None not in (_base, _is_view, _creation_meta, _creation_metas):
        if not x._is_view():
            return ""
        return "leaf" if x._base.is_leaf else "view" if _creation_meta(x) != _creation_metas.DEFAULT else ""
    try:
        x[..., :0].zero_()  # writes nothing, but autograd checks the view and moves the version counter all the same
    except RuntimeError as error:
        return "leaf" if "leaf" in str(error) else "view"
    return ""
