"""LayerNorm over the channels of (B, C, H, W), in whatever spelling, -> camox_ops.layer_norm2d."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from ..ops.norm2d import layer_norm2d
from . import _call, _proof
from ._recogniser import Planned, Recogniser

HALVES = (torch.bfloat16, torch.float16)
# A module without parameters is run only where its code, or that of a module in it, calls one of these.
NAMES_IN_NORMS = {"mean", "var", "var_mean", "std", "layer_norm", "native_layer_norm", "apply", "rsqrt", "sqrt"}
# Modules of torch.nn that may be inside one; all others are something else, whatever their parameters allow.
CONTAINERS = (nn.Sequential, nn.LayerNorm, nn.Identity)


class Settings(NamedTuple):
    """weight, bias: where they are, a path in parts, or None. eps: a path as well, or the number that the code has.
    from_contiguous, from_channels_last: memory format of the output. outputs: ((dtype of x, of the parameters, what
    autocast casts to), dtype of the output) wherever these are not one dtype without autocast. inner: paths and classes
    of the modules that are read and not called. short: whether the original is torch's layer_norm between two views."""

    weight: tuple[str, ...] | None
    bias: tuple[str, ...] | None
    eps: tuple[str, ...] | float
    from_contiguous: torch.memory_format
    from_channels_last: torch.memory_format
    outputs: tuple
    device: str
    inner: tuple[tuple[tuple[str, ...], type], ...]
    short: bool


class Norm2d(Recogniser):
    """At most two parameters, vectors of one length; what it computes for a vector with mean 0 and variance a^2 tells
    eps, and all else is the proof's."""

    name = "layer_norm2d"
    slower_in_few_rows = "in channels_last"

    def is_candidate(self, module: nn.Module, planned: Planned) -> bool:
        kind = type(module)
        if kind.__module__.startswith("torch.nn.modules.") and kind is not nn.Sequential:
            return False
        if any(True for _ in module.buffers()):
            return False
        vectors = list(module.parameters())
        if len(vectors) > 2 or any(_length(vector) is None for vector in vectors):
            return False
        if len({vector.numel() for vector in vectors}) > 1 or any(vector.numel() < 2 for vector in vectors):
            return False
        inner = [part for _, part in self.inner(module)]
        if len(inner) > 4 or (kind is nn.Sequential and not any(type(part) is nn.LayerNorm for part in inner)):
            return False
        if any(type(part).__module__.startswith("torch.nn.") and type(part) not in CONTAINERS for part in inner):
            return False
        return bool(vectors) or _names_in(module) & NAMES_IN_NORMS != set()

    def inner(self, module: nn.Module) -> list[tuple[str, nn.Module]]:
        return [(name, part) for name, part in module.named_modules() if name and "parametrizations" not in name]

    def recognise(self, module: nn.Module, thorough: bool, planned: Planned) -> tuple[Settings, float]:
        wide = _proof.copied(module, torch.float64, "cpu")
        original = self.exact(type(module).forward)
        inner = tuple((tuple(name.split(".")), _call.kind_of(part)) for name, part in self.inner(module))
        channels = _channels(wide, original)
        for weight, bias in _roles([name for name, _ in wide.named_parameters()]):
            eps = _eps(wide, original, channels, weight, bias)
            if eps is None:
                continue
            settings = Settings(
                weight and tuple(weight.split(".")),
                bias and tuple(bias.split(".")),
                _path_of(wide, original, channels, weight, bias, eps),
                *_formats(wide, original, channels),
                _outputs(module, type(module).forward, channels),
                _device(module),
                inner,
                _is_short(module),
            )
            return settings, self._proved(module, settings, original, channels, thorough)
        raise _proof.OtherKind

    def _proved(self, module, settings, original, channels, thorough) -> float:
        def fast(copy_of_module, x):
            return self.compute(copy_of_module, settings, x)

        def cases() -> Iterator:
            yield (_proof.values((2, channels, 5, 7)),), {}
            if not thorough:
                return
            yield (_proof.values((1, channels, 1, 1)) * 1e-3,), {}
            yield (_proof.values((2, channels, 3, 4)) * 1e-6,), {}
            yield (_proof.values((1, channels, 9, 11)) + 1e4,), {}
            yield (torch.full((1, channels, 2, 3), 3.0, dtype=torch.float64, device="cpu", requires_grad=True),), {}
            yield (_proof.values((2, channels, 4, 6)).contiguous(memory_format=torch.channels_last),), {}

        return _proof.compare64(module, original, fast, cases, ("own", 1) if thorough else (1,))

    def few_operators(self, module: nn.Module, settings: Settings) -> bool:
        return settings.short

    def serves(self, module: nn.Module, settings: Settings, args: tuple, kwargs: dict, activated: bool = False) -> bool:
        """activated: with an activation in the same op."""
        if len(args) != 1 or kwargs:
            return False
        x = args[0]
        if not _call.is_served(x) or x.dim() != 4 or (settings.short and not _is_faster(settings, x, activated)):
            return False
        if settings.inner:
            modules = [_call.at(module, path) for path, _ in settings.inner]
            if not _call.are_bypassed(modules, [kind for _, kind in settings.inner]):
                return False
        vector = settings.weight or settings.bias
        if vector is not None:
            vector = _call.at(module, vector)
            if type(vector) not in (torch.Tensor, nn.Parameter) or vector.numel() != x.shape[1]:
                return False
        return _dtype_of_output(settings, x, vector) is not None

    def compute(self, module: nn.Module, settings: Settings, x: torch.Tensor, activation: str = "none") -> torch.Tensor:
        weight = None if settings.weight is None else _call.at(module, settings.weight)
        bias = None if settings.bias is None else _call.at(module, settings.bias)
        dtype = _dtype_of_output(settings, x, weight if weight is not None else bias)
        channels = x.shape[1]
        # A view costs as much as all checks here, and once more in the backward.
        if weight is None:
            weight = x.new_ones(channels)
        elif weight.dim() != 1:
            weight = weight.view(channels)
        if bias is None:
            bias = x.new_zeros(channels)
        elif bias.dim() != 1:
            bias = bias.view(channels)
        if dtype is not x.dtype:
            x = x.to(dtype)
        if weight.dtype is not dtype and weight.dtype is not torch.float32:
            weight = weight.to(dtype)
        if bias.dtype is not dtype and bias.dtype is not torch.float32:
            bias = bias.to(dtype)
        eps = settings.eps if isinstance(settings.eps, float) else _call.at(module, settings.eps)
        last = torch.channels_last
        if x.is_contiguous(memory_format=last):
            if x.shape[0] == 1 and x.stride(0) != x.numel():
                x = _as_channels_last(x)
            y = layer_norm2d(x, weight, bias, eps, activation=activation)
            return y if settings.from_channels_last is last or x.is_contiguous() else y.contiguous()
        if settings.from_contiguous is last:
            x = x.contiguous(memory_format=last)
        return layer_norm2d(x, weight, bias, eps, activation=activation)


def _is_faster(settings: Settings, x: torch.Tensor, activated: bool) -> bool:
    """Than torch's layer_norm between two views."""
    if not _call.outlasts_host(x):
        return False
    if activated or not _call.is_small_in_rows(x):
        return True
    last = torch.channels_last
    return settings.from_contiguous is not last and not x.is_contiguous(memory_format=last)


def _as_channels_last(x: torch.Tensor) -> torch.Tensor:
    """One image whose memory is in channels_last, with the strides of that format: convolutions give the first
    dimension, of size 1, the stride of a pixel, by which nothing tells the formats apart."""
    pixels = x.permute(0, 2, 3, 1)
    return pixels.view(pixels.shape).permute(0, 3, 1, 2)


def _dtype_of_output(settings: Settings, x: torch.Tensor, vector: torch.Tensor | None) -> torch.dtype | None:
    """What the original would give; None: not known."""
    cast = _call.autocast_dtype(x)
    own = x.dtype if vector is None else vector.dtype
    if own is x.dtype and cast is None:
        return x.dtype
    if x.device.type != settings.device:
        return None
    for key, dtype in settings.outputs:
        if key == (x.dtype, own, cast):
            return dtype
    return None


def _length(vector: torch.Tensor) -> int | None:
    """Of a vector, whichever dimensions of size 1 it has besides."""
    longer = [size for size in vector.shape if size != 1]
    return longer[0] if len(longer) == 1 else None


def _names_in(module: nn.Module) -> set[str]:
    names: set[str] = set()
    for inner in module.modules():
        forward = getattr(type(inner), "forward", None)  # which the class of a ScriptModule raises for
        code = getattr(forward, "__code__", None)
        names |= set(() if code is None else code.co_names)
    return names


def _is_short(module: nn.Module) -> bool:
    inherited = isinstance(module, nn.LayerNorm) and "super" in _names_in(module)
    inside = any(_call.kind_of(part) is nn.LayerNorm for part in module.modules())
    return inherited or inside or bool(_names_in(module) & {"layer_norm", "native_layer_norm"})


def _device(module: nn.Module) -> str:
    return next((parameter.device.type for parameter in module.parameters()), "cpu")


def _channels(wide: nn.Module, original) -> int:
    """That the module takes: as many as a parameter has; without parameters, a number among its attributes, or any."""
    vector = next(wide.parameters(), None)
    if vector is not None:
        return vector.numel()
    numbers = [value for inner in wide.modules() for value in vars(inner).values()]
    numbers = [part for value in numbers for part in (value if isinstance(value, (tuple, list)) else (value,))]
    tried = [n for n in numbers if isinstance(n, int) and not isinstance(n, bool) and 1 < n <= 1 << 16] + [6]
    for channels in dict.fromkeys(tried):
        if _ratio(wide, original, channels, None, None, 1.0) is not None:
            return channels
    raise _proof.OtherKind


def _roles(names: list[str]) -> list[tuple[str | None, str | None]]:
    """Which parameter may be the weight and which the bias."""
    if len(names) == 2:
        return [(names[0], names[1]), (names[1], names[0])]
    return [(names[0], None), (None, names[0])] if names else [(None, None)]


def _ratio(wide, original, channels, weight, bias, a) -> float | None:
    """What a vector over channels, of mean 0 and variance a^2, is multiplied by, times a; None where it is not."""
    parameters = dict(wide.named_parameters())
    v = torch.arange(channels, dtype=torch.float64, device="cpu") - (channels - 1) / 2
    v = (v / v.square().mean().sqrt()).view(1, channels, 1, 1).expand(1, channels, 2, 3).clone()
    with torch.no_grad():
        for name, value in ((weight, 1.0), (bias, 0.0)):
            if name is not None:
                parameters[name].fill_(value)
        try:
            y = original(wide, a * v)
        except Exception:
            return None
    if not isinstance(y, torch.Tensor) or y.shape != v.shape or not y.isfinite().all():
        return None
    ratio = (y.to(v.dtype) * v).mean().item()
    return ratio if torch.allclose(y.to(v.dtype), ratio * v, rtol=0, atol=1e-5) else None


def _eps(wide, original, channels, weight, bias) -> float | None:
    """y = v a / sqrt(a^2 + eps), so eps = a^2 (1 / ratio^2 - 1), which has most digits where a^2 is about eps."""
    for exponent in range(0, 9):
        a = 10.0**-exponent
        ratio = _ratio(wide, original, channels, weight, bias, a)
        if ratio is None or not 0 < ratio <= 1 + 1e-6:
            return None
        if ratio < 0.99:
            eps = a * a * (1 / ratio**2 - 1)
            ratio = _ratio(wide, original, channels, weight, bias, a / 3)
            expected = a / 3 / math.sqrt(a * a / 9 + eps)
            return float(f"{eps:.6g}") if ratio is not None and math.isclose(ratio, expected, rel_tol=1e-5) else None
    return None


def _path_of(wide, original, channels, weight, bias, eps: float) -> tuple[str, ...] | float:
    """Where the module keeps its eps; the number itself where no attribute moves it."""
    for prefix, inner in wide.named_modules():
        for name, value in list(vars(inner).items()):
            if type(value) is float and math.isclose(value, eps, rel_tol=1e-4):
                inner.__dict__[name] = 4 * value
                moved = _eps(wide, original, channels, weight, bias)
                inner.__dict__[name] = value
                if moved is not None and math.isclose(moved, 4 * eps, rel_tol=1e-3):
                    return (*filter(None, prefix.split(".")), name)
    return eps


def _formats(wide, original, channels) -> tuple[torch.memory_format, torch.memory_format]:
    found = []
    for given in (torch.contiguous_format, torch.channels_last):
        x = _proof.values((2, channels, 3, 4)).contiguous(memory_format=given)
        with torch.no_grad():
            y = original(wide, x)
        for known in (torch.contiguous_format, torch.channels_last):
            if y.is_contiguous(memory_format=known):
                found.append(known)
                break
        else:
            raise _proof.NotAlike(f"its output has strides {y.stride()}")
    return tuple(found)


def _outputs(module, original, channels) -> tuple:
    """What comes out where x and parameters differ in dtype, or under autocast."""
    device, found = _device(module), []
    for x_dtype in (torch.float32, *HALVES):
        for own in dict.fromkeys((torch.float32, x_dtype)):
            for cast in (None, *HALVES):
                if cast is None and own is x_dtype:
                    continue
                try:
                    side = _proof.copied(module, own)
                    x = _proof.values((1, channels, 2, 3)).to(device, x_dtype)
                    with torch.no_grad(), torch.autocast(device, cast or torch.bfloat16, enabled=cast is not None):
                        y = original(side, x)
                except Exception:
                    continue  # such calls go to the original, which fails as before
                if isinstance(y, torch.Tensor):
                    key = (x_dtype, x_dtype if next(side.parameters(), None) is None else own, cast)
                    found.append((key, y.dtype))
    return tuple(dict(found).items())
