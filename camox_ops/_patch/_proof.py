"""Whether a fast forward does what a module does: both are run and everything that a caller could see is compared.

    copies of the module ----> original forward ----> outputs, gradients, what it left on the module
              same weights, inputs, seeds                            | compared: values, dtypes, strides, None or not
                      ----> fast forward -------> the same ------+

Copies are compared, never the user's module, and the user's random generators are left where they were."""

from __future__ import annotations

import copy
import functools
import math
import random
import statistics
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..ops.dropout import dropout

_STOCK_DROPOUT, _STOCK_ATTENTION = F.dropout, F.scaled_dot_product_attention
_HOOKS = [
    f"_{kind}_hooks{rest}"
    for kind in ("forward", "forward_pre", "backward", "backward_pre")
    for rest in ("", "_with_kwargs", "_always_called")
    if f"_{kind}_hooks{rest}" in vars(nn.Module())
]
# Two float64 computations of one formula differ by less; another formula by more.
ALLOWED64 = 1e-9


class NotAlike(Exception):
    """The module is not what it was taken for; the message is the reason in the report."""


class OtherKind(NotAlike):
    """The module is something else altogether, of which the report says nothing."""


class OriginalFailed(Exception):
    """The original forward raised."""


class Numbers(NamedTuple):
    """What one run gave: output tensors, their arrangement, gradients by name, attributes that the run changed."""

    outputs: list[torch.Tensor]
    arrangement: object
    gradients: dict[str, torch.Tensor | None]
    left_behind: list[str]


class Comparison(NamedTuple):
    """reason: None where both agree. The errors are relative to the largest value. in_doubt: rounding could be why."""

    reason: str | None
    error: float | None = None
    torch_error: float | None = None
    in_doubt: bool = False


@contextmanager
def same_random_state() -> Iterator[None]:
    """Whatever is drawn inside, the generators go on from where they were."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    state = random.getstate()
    numpy_random = sys.modules.get("numpy.random")
    numpy_state = None if numpy_random is None else numpy_random.get_state()
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(state)
            if numpy_random is not None:
                numpy_random.set_state(numpy_state)


class _Proving(threading.local):
    """Of each thread: whether the modules that are called are copies of a proof."""

    now = False


proving = _Proving()


@contextmanager
def _while_proving() -> Iterator[None]:
    before, proving.now = proving.now, True
    try:
        yield
    finally:
        proving.now = before


@contextmanager
def own_ground() -> Iterator[None]:
    """Runs that do not depend on where patch is called, and change nothing there."""
    with (
        _while_proving(),
        same_random_state(),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False) if torch.cuda.is_available() else nullcontext(),
        # Where the copies are. Not always, as each call inside costs more under it.
        torch.device("cpu") if torch.get_default_device().type != "cpu" else nullcontext(),
    ):
        yield


def _seed(number: int) -> None:
    """As torch.manual_seed, which would also leave a seed for a CUDA that is not yet initialised."""
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        for generator in torch.cuda.default_generators:
            generator.manual_seed(number)


class RoutedDropout(TorchFunctionMode):
    """Dropout as camox_ops.dropout, also that of attention, so that equal seeds give equal masks.

    channels: None, or how many channels a (B, C, T) has whose mask is drawn as that of (B, T, C), the arrangement in
    which the fast forward drops the same elements."""

    def __init__(self, channels: int | None = None):
        super().__init__()
        self.channels = channels

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.dropout or func is torch.dropout:
            return self._dropped(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return _routed_attention(*args, **kwargs)
        if func is torch.conv2d:
            return _convolved(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            with _routed_functions():
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _dropped(self, input, *args, **kwargs):
        if self.channels is not None and input.dim() == 3 and input.shape[1] == self.channels != input.shape[2]:
            return _routed(input.transpose(1, 2), *args, **kwargs).transpose(1, 2)
        return _routed(input, *args, **kwargs)


def _convolved(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    """conv2d. PyTorch's takes milliseconds for each float64 convolution of single channels, however small."""
    ones, sides = ((1, 1), 1), tuple(padding) if isinstance(padding, (tuple, list)) else (padding, padding)
    plain = stride in ones and dilation in ones and all(isinstance(side, int) for side in sides)
    if input.dtype is not torch.float64 or input.dim() != 4 or not plain or not 8 <= groups == len(weight):
        return torch.conv2d(input, weight, bias, stride, padding, dilation, groups)
    if input.shape[1] != groups:
        return torch.conv2d(input, weight, bias, stride, padding, dilation, groups)
    padded = F.pad(input, (sides[1], sides[1], sides[0], sides[0]))
    height, width = (padded.shape[d] - weight.shape[d] + 1 for d in (2, 3))
    result = 0 if bias is None else bias.view(1, -1, 1, 1)
    for i in range(weight.shape[2]):
        for j in range(weight.shape[3]):
            result = result + padded[:, :, i : i + height, j : j + width] * weight[:, 0, i, j].view(1, -1, 1, 1)
    return result


@contextmanager
def _routed_functions() -> Iterator[None]:
    """For what a function of torch.nn.functional calls itself, where no mode sees it, on this thread."""
    thread, stock = threading.get_ident(), (F.dropout, F.scaled_dot_product_attention)

    def routed(*args, **kwargs):
        return (_routed if threading.get_ident() == thread else stock[0])(*args, **kwargs)

    def routed_attention(*args, **kwargs):
        return (_routed_attention if threading.get_ident() == thread else stock[1])(*args, **kwargs)

    F.dropout, F.scaled_dot_product_attention = routed, routed_attention
    try:
        yield
    finally:
        F.dropout, F.scaled_dot_product_attention = stock


def _routed_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """torch's formula; a query without any key gives zeros, as there."""
    if enable_gqa or not 0 < dropout_p < 1:
        options = {"scale": scale, "enable_gqa": enable_gqa}
        return _STOCK_ATTENTION(query, key, value, attn_mask, dropout_p, is_causal, **options)
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    nothing = (scores == -math.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)
    return _routed(weights, dropout_p) @ value


def _routed(input, p=0.5, training=True, inplace=False, train=None):
    training = training if train is None else train
    if not 0 <= p < 1:
        return _STOCK_DROPOUT(input, p, training, inplace)
    result = dropout(input, float(p), training=bool(training))
    return input.copy_(result) if inplace else result


def copied(module: nn.Module, dtype: torch.dtype | None = None, device: str | None = None) -> nn.Module:
    """A copy in which nothing is patched and nothing hooked: what hooks do, and hold, is the user's."""
    from ._swap import swap_back

    if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        raise NotAlike("its parameters or buffers are on the meta device")
    memo = {id(vars(part)[name]): OrderedDict() for part in module.modules() for name in _HOOKS}
    try:
        duplicate = copy.deepcopy(module, memo)
    except Exception as error:
        raise NotAlike(f"it cannot be copied ({brief(error)})") from None
    for inner in duplicate.modules():
        swap_back(inner)
    return duplicate.to(device=device, dtype=dtype)


def randomised(module: nn.Module, seed: int) -> nn.Module:
    """The module itself, its parameters (not its buffers) drawn from a normal distribution."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64, device="cpu")
            parameter.copy_(values)
    return module


def values(shape: tuple[int, ...]) -> torch.Tensor:
    """An input in float64: normally distributed, the same for one shape; its gradient is compared."""
    generator = torch.Generator().manual_seed(math.prod(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu", requires_grad=True)


def normal(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")


def drawn_once() -> Callable:
    """`normal` that keeps what it drew: a draw takes the time of many passes over a tensor."""
    return functools.cache(normal)


def run(
    forward: Callable,
    module: nn.Module,
    args: tuple,
    kwargs: dict,
    *,
    seed: int = 0,
    channels: int | None = None,
    gradients: bool = True,
    draw: Callable = normal,
) -> Numbers:
    """forward(module, *args) and the gradients of what it gives, for cotangents that depend on shapes alone.

    Differentiated are the parameters and the inputs that require a gradient; nothing where `gradients` is False.
    channels: as for RoutedDropout. draw: what cotangents are drawn by, `drawn_once()` for runs that are compared."""
    args, kwargs, leaves = _detached(args, kwargs)
    before = _attributes(module)
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            leaves[name] = parameter
    _seed(seed)
    with RoutedDropout(channels):
        result = forward(module, *args, **kwargs)
    outputs: list[torch.Tensor] = []
    arrangement = _flatten(result, outputs)
    left_behind = _changed(before, _attributes(module))
    differentiable = [output for output in outputs if gradients and output.requires_grad]
    found: dict[str, torch.Tensor | None] = dict.fromkeys(leaves)
    if differentiable and leaves:
        # Copies, as a backward may write into what it is given.
        cotangents = [
            draw(output.shape, number).to(output.device, output.dtype, copy=True)
            for number, output in enumerate(differentiable)
        ]
        taken = torch.autograd.grad(differentiable, list(leaves.values()), cotangents, allow_unused=True)
        found = dict(zip(leaves, taken, strict=True))
    return Numbers([output.detach() for output in outputs], arrangement, found, left_behind)


def _detached(args: tuple, kwargs: dict) -> tuple[tuple, dict, dict[str, torch.Tensor]]:
    """Arguments that are one tensor stay one."""
    leaves: dict[str, torch.Tensor] = {}
    made: dict[int, torch.Tensor] = {}

    def leaf(name, value):
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in made:
            made[id(value)] = fresh_leaf(name, value)
        return made[id(value)]

    def fresh_leaf(name, value):
        fresh = value.detach().clone()
        if value.requires_grad:
            leaves[name] = fresh.requires_grad_()
            # A view of the leaf: a forward that works in place may, as it may on what another layer gave.
            return fresh.view_as(fresh)
        return fresh

    plain = tuple(leaf(f"input {number}", value) for number, value in enumerate(args))
    return plain, {name: leaf(f"input {name}", value) for name, value in kwargs.items()}, leaves


def _flatten(value, tensors: list[torch.Tensor]):
    """Appends the tensors in value and gives all else that it consists of."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return "tensor"
    if isinstance(value, (tuple, list)):
        return type(value).__name__, [_flatten(part, tensors) for part in value]
    if isinstance(value, dict):
        return type(value).__name__, {key: _flatten(part, tensors) for key, part in value.items()}
    return value


def _attributes(module: nn.Module) -> dict:
    """Everything that hangs on the module and its inner modules: by identity, tensors with their version."""
    found = {}
    for prefix, inner in module.named_modules():
        for name, value in vars(inner).items():
            if name in ("_parameters", "_buffers", "_modules"):
                for key, entry in value.items():
                    found[prefix, name, key] = _identity(entry)
            else:
                found[prefix, name] = _identity(value)
    return found


def _identity(value):
    if isinstance(value, torch.Tensor):
        return value, None if value.is_inference() else value._version
    if isinstance(value, (bool, int, float, str, type(None))):
        return value, None
    if isinstance(value, (list, dict, set)):
        return value, len(value)
    return value, None


def _changed(before: dict, after: dict) -> list[str]:
    def same(key):
        if key not in before or key not in after:
            return False
        (old, old_mark), (new, new_mark) = before[key], after[key]
        if isinstance(new, (bool, int, float, str)):
            return type(old) is type(new) and (old == new or old != old)
        return old is new and old_mark == new_mark

    return [".".join(part for part in key if part) for key in {**before, **after} if not same(key)]


def difference(ours: Numbers, theirs: Numbers, allowed: float = ALLOWED64) -> Comparison:
    """Of two runs in float64."""
    reason = _other_form(ours, theirs)
    if reason is not None:
        return Comparison(reason)
    worst, least = 0.0, 1e-5 * _largest_gradient(theirs)
    for name, mine, original in _pairs(ours, theirs):
        error = _relative(mine, original, least if name.startswith("the gradient") else 0.0)
        if not error <= allowed:
            return Comparison(f"{name} differs by {error:.0e} of its largest value", error)
        worst = max(worst, error)
    return Comparison(None, worst)


def has_outputs_of(ours: Numbers, theirs: Numbers) -> bool:
    """Whether the outputs of two runs in float64 are alike, whatever else is."""
    mine, others = (numbers._replace(gradients={}, left_behind=[]) for numbers in (ours, theirs))
    return difference(mine, others).reason is None


def _other_form(ours: Numbers, theirs: Numbers) -> str | None:
    """What differs besides values."""
    if theirs.left_behind != ours.left_behind:
        return f"its forward leaves something on the module ({', '.join(theirs.left_behind)})"
    if ours.arrangement != theirs.arrangement or len(ours.outputs) != len(theirs.outputs):
        return "it returns something else"
    for mine, original in zip(ours.outputs, theirs.outputs, strict=True):
        if mine.shape != original.shape:
            return f"its output has shape {tuple(original.shape)}, not {tuple(mine.shape)}"
        if mine.dtype != original.dtype:
            return f"its output is {original.dtype}, not {mine.dtype}".replace("torch.", "")
        if _strides(mine) != _strides(original):
            return f"its output has strides {original.stride()}, not {mine.stride()}"
    for name, original in theirs.gradients.items():
        mine = ours.gradients[name]
        if (mine is None) != (original is None):
            return f"the gradient of {name} is {'None' if original is None else 'a tensor'} there"
    return None


def _strides(x: torch.Tensor) -> list[int]:
    """Those that mean something."""
    if x.numel() == 0:
        return []
    return [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]


def _pairs(ours: Numbers, theirs: Numbers) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    for mine, original in zip(ours.outputs, theirs.outputs, strict=True):
        yield "its output", mine, original
    for name, original in theirs.gradients.items():
        if original is not None:
            yield f"the gradient of {name}", ours.gradients[name], original


def _largest_gradient(numbers: Numbers) -> float:
    """A gradient that is 0 but for rounding, as that of a bias of keys under softmax, is held against it."""
    sizes = (_largest(gradient) for gradient in numbers.gradients.values() if gradient is not None)
    return max((size for size in sizes if math.isfinite(size)), default=0.0)


def _largest(x: torch.Tensor) -> float:
    if x.is_complex() or not x.numel():
        return x.detach().abs().max().item() if x.numel() else 0.0
    least, most = x.detach().aminmax()  # in one pass, without a copy
    return max(-least.item(), most.item()) if not most.isnan() else math.nan


def _relative(mine: torch.Tensor, original: torch.Tensor, least: float = 0.0) -> float:
    """max|mine - original| / max(max|original|, least); where the original is not finite, ours has to be the same."""
    if original.numel() == 0:
        return 0.0
    original = original.double()
    apart = mine.to(torch.float64, copy=True).sub_(original)  # not mine.double() - original: that allocates twice
    size, error = _largest(original), _largest(apart)
    if not math.isfinite(size):
        finite = original.isfinite()
        if not torch.equal(finite, mine.isfinite()):
            return float("inf")
        size, error = _largest(original[finite]), _largest(apart[finite])
    size = max(size, least)
    return error / size if size else error


def compare64(
    module: nn.Module,
    original: Callable,
    fast: Callable,
    cases,
    parameters=("own", 1, 2),
    channels: int | None = None,
    allowed: float = ALLOWED64,
    modes=(True, False),
    dtype: torch.dtype | None = torch.float64,
) -> float:
    """Runs both on copies of the module in float64 (dtype None: in its own), on each of cases() (args, kwargs), with
    its own and with random parameters, in training and eval mode (`modes`: training or not) -> the largest relative
    difference. Raises NotAlike."""
    worst, draw = 0.0, drawn_once()
    for choice in parameters:
        base = copied(module, dtype, "cpu")
        if choice != "own":
            randomised(base, choice)
        unchanged: dict[Callable, nn.Module] = {}
        for training in modes:
            for number, (args, kwargs) in enumerate(cases()):
                numbers = []
                for forward in (original, fast):
                    side = (unchanged.pop(forward, None) or copy.deepcopy(base)).train(training)
                    try:
                        numbers.append(run(forward, side, args, kwargs, seed=number, channels=channels, draw=draw))
                    except Exception as error:
                        who = "its forward" if forward is original else "ours"
                        raise NotAlike(f"{who} raised {brief(error)} for {_shapes(args)}") from None
                    if not numbers[-1].left_behind:  # a copy of large experts takes longer than their products
                        unchanged[forward] = side
                found = difference(numbers[1], numbers[0], allowed)
                if found.reason is not None:
                    raise NotAlike(f"{found.reason} for {_shapes(args)}")
                worst = max(worst, found.error)
    return worst


def brief(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:120]}" if text else type(error).__name__


def _shapes(args: tuple) -> str:
    shapes = [str(tuple(value.shape)) for value in args if isinstance(value, torch.Tensor)]
    return f"an input of shape {', '.join(shapes)}"


def compare_on_input(module: nn.Module, patch, args: tuple, kwargs: dict) -> Comparison:
    """On arguments that a user's call brought, in their dtype and under its autocast, against the original in float64.

    Raises OriginalFailed."""
    settings, recogniser = patch.settings, patch.recogniser
    original = patch.original.forward

    def fast(copy_of_module, *arguments, **keywords):
        return recogniser.compute(copy_of_module, settings, *arguments, **keywords)

    # Normal tensors with gradients wherever the call stands; checkpointing must not count what is saved in here.
    with (
        same_random_state(),
        torch.inference_mode(False),
        torch.enable_grad(),
        saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
    ):
        args, kwargs = recogniser.shortened(args, kwargs)
        first = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        args, kwargs = _with_gradient(first, args, kwargs)  # also where the first layer's input needs none
        try:
            base = recogniser.prepared(copied(module))
        except NotAlike:  # fully_shard forbids copies; the proof stands
            return Comparison(None)
        try:
            channels, draw = recogniser.channels(module, settings), drawn_once()
            theirs = run(original, copy.deepcopy(base), args, kwargs, channels=channels, draw=draw)
        except Exception as error:
            raise OriginalFailed from error
        try:
            ours = run(fast, copy.deepcopy(base), args, kwargs, draw=draw)
        except Exception as error:
            return Comparison(f"ours raised {brief(error)}")
        reason = _other_form(ours, theirs)
        if reason is not None:
            return Comparison(reason)
        exact = recogniser.exact(original)
        return _judged(ours, theirs, _truth(exact, recogniser.widened, base, args, kwargs, channels, draw))


def _with_gradient(x: torch.Tensor, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    if not x.is_floating_point():  # tokens
        return args, kwargs
    fresh = (x.clone() if x.is_inference() else x.detach()).requires_grad_()
    args = tuple(fresh if value is x else value for value in args)
    return args, {name: fresh if value is x else value for name, value in kwargs.items()}


def _truth(
    original: Callable,
    widened: Callable,
    base: nn.Module,
    args: tuple,
    kwargs: dict,
    channels: int | None,
    draw: Callable,
) -> Numbers | None:
    """The original in float64, or None where it cannot be run so."""

    made = {}

    def wide(value):
        if id(value) not in made:
            made[id(value)] = converted(value)
        return made[id(value)]

    def converted(value):
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        return value.detach().double().requires_grad_(value.requires_grad)

    args, kwargs = tuple(map(wide, args)), {name: wide(value) for name, value in kwargs.items()}
    device = next(value.device.type for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
    try:
        with torch.autocast(device, enabled=False):
            return run(original, widened(base), args, kwargs, channels=channels, draw=draw)
    except Exception:
        return None


def _judged(ours: Numbers, theirs: Numbers, truth: Numbers | None) -> Comparison:
    """max|ours - truth| <= 4 max|theirs - truth| + 8 eps max|truth|, tensor by tensor.

    PyTorch's error of a gradient counts as at least the median over all gradients: the largest of a few roundings that
    happen to cancel says little of a small tensor."""
    exact = theirs if truth is None or _other_shapes(theirs, truth) else truth
    least, slack = _largest_gradient(exact) / 8, 8 if exact is truth else 64
    errors = []
    for (name, mine, original), (_, _, true) in zip(_pairs(ours, theirs), _pairs(ours, exact), strict=True):
        is_gradient = name.startswith("the gradient")
        floor = least if is_gradient else 0.0
        found = _relative(mine, true, floor), _relative(original, true, floor)
        errors.append((name, is_gradient, *found, _eps(original.dtype)))
    usual = statistics.median([own for _, is_gradient, _, own, _ in errors if is_gradient] or [0.0])
    limits = [4 * (max(own, usual) if is_gradient else own) + slack * eps for _, is_gradient, _, own, eps in errors]
    for (name, _, error, own, _), limit in zip(errors, limits, strict=True):
        if not error <= limit:
            reason = f"{name} differs by {error:.0e} of its largest value, PyTorch's own by {own:.0e}"
            in_doubt = all(row[2] <= 10 * other for row, other in zip(errors, limits, strict=True))
            return Comparison(reason, error, own, in_doubt)
    return Comparison(None, max(row[2] for row in errors), max(row[3] for row in errors))


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def _other_shapes(theirs: Numbers, truth: Numbers) -> bool:
    shapes = [[output.shape for output in numbers.outputs] for numbers in (theirs, truth)]
    present = [[gradient is None for gradient in numbers.gradients.values()] for numbers in (theirs, truth)]
    return shapes[0] != shapes[1] or present[0] != present[1]
