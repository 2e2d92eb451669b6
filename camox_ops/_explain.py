"""cx.explain: which kernel each call of an op ran, why not another, bytes and time."""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

import torch

from . import _C, _torch_private, nn

_DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.float64: "f64"}


class TensorFacts(NamedTuple):
    """One tensor of a call: its name in the operator's schema (outputs: "-> 0", "-> 1", ...), shape, dtype and layout:
    "contiguous", "channels_last", "strided" or, where elements share memory, "expanded"."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    layout: str

    def __str__(self) -> str:
        layout = "" if self.layout == "contiguous" else f" {self.layout}"
        return f"{self.name} {self.dtype}[{','.join(map(str, self.shape))}]{layout}"


class Call(NamedTuple):
    """One call of an operator.

    op: its name; backward: whether it computes gradients. inputs, outputs: its tensors; options: its other arguments.
    kernels: the C functions that ran, on CUDA the launcher. isa: the instruction set or "cuda". threads: those that it
    might use. reasons: what the C code said of its choice. bytes: of all its tensors, each element once: what must be
    read and written at least. seconds: on CUDA until the device was done; None where that could not be waited for.
    thread: the name of the Python thread."""

    op: str
    backward: bool
    inputs: tuple[TensorFacts, ...]
    outputs: tuple[TensorFacts, ...]
    options: dict
    device: str
    kernels: tuple[str, ...]
    isa: str
    threads: int
    reasons: tuple[str, ...]
    bytes: int
    seconds: float | None
    thread: str


class explain:
    """Records, while it is open, which kernel each call of an op runs, why not another, bytes moved and time.

        with cx.explain() as calls:
            loss(model(x)).backward()
        print(calls)

    It sees every call of this package's operators, forward and backward, in all threads of the process, also from
    modules of cx.nn and from compiled code that calls the operators by name. Other operators of PyTorch are not
    listed. The kernels and the reasons are those that the C code notes while it chooses, nothing is worked out a
    second time.

    Args:
        model: with it the table ends with those modules of camox_ops in it that call their inner modules one by one,
            and why (cx.nn.why_not_fused).

    Attributes:
        calls: a list of Call, in the order in which they ended. A call that raised is not listed, nor is one on fake
            tensors, which runs no kernel.

    str() is a table, summed by op and case: time, the rate at which at least `bytes` were moved, and the reasons.
    to_dict() is all of it for JSON. It may be entered again, and then goes on where it was; within itself it counts
    each call once; several that are open at once each see every call.

    A call costs some ten microseconds more while one is open, and on CUDA waits for the device. One that is not open
    costs nothing. Enter and leave it while no other thread is in an op.

    Raises:
        TypeError: model is neither None nor an nn.Module.
        RuntimeError: it is left without having been entered."""

    def __init__(self, model: torch.nn.Module | None = None):
        if model is not None and not isinstance(model, torch.nn.Module):
            raise TypeError(f"explain: model must be an nn.Module or None, got {model!r}")
        self.model = model
        self.calls: list[Call] = []
        self._depth = 0

    def __enter__(self) -> explain:
        with _lock:
            self._depth += 1
            if self._depth == 1:
                _open.append(self)
                if len(_open) == 1:
                    _C.keep_notes(True)
                    _torch_private.observe_calls(_observer)
        return self

    def __exit__(self, *exception) -> None:
        with _lock:
            if self._depth == 0:
                raise RuntimeError("explain: it is left more often than it was entered")
            self._depth -= 1
            if self._depth == 0:
                _open.remove(self)
                if not _open:
                    _torch_private.observe_calls(None)
                    _C.keep_notes(False)

    def to_dict(self) -> dict:
        """{"isa", "supported_isas", "calls": [one dict for each], "not_fused": {module: reasons}}"""
        calls = [
            {
                **call._asdict(),
                "inputs": [facts._asdict() for facts in call.inputs],
                "outputs": [facts._asdict() for facts in call.outputs],
            }
            for call in self.calls
        ]
        return {
            "isa": _C.isa(),
            "supported_isas": _C.supported_isas(),
            "calls": calls,
            "not_fused": self._not_fused(),
        }

    def _not_fused(self) -> dict[str, list[str]]:
        return {} if self.model is None else nn.why_not_fused(self.model)

    def __repr__(self) -> str:
        return f"<explain: {len(self.calls)} calls>"

    def __str__(self) -> str:
        cases: dict[tuple, list[Call]] = {}
        for call in self.calls:
            cases.setdefault((call.op, call.inputs, call.device, call.kernels, call.reasons), []).append(call)
        rows = [("op", "calls", "ms", "GB/s")]
        details: list[list[str]] = [[]]
        for (op, inputs, device, kernels, reasons), calls in cases.items():
            seconds = sum(call.seconds or 0.0 for call in calls)
            rate = f"{sum(call.bytes for call in calls) / seconds / 1e9:.1f}" if seconds else "-"
            rows.append((op, str(len(calls)), f"{seconds * 1e3:.3f}", rate))
            lines = [", ".join(map(str, inputs))]
            if device != "cpu":
                lines.append(device)
            details.append([*lines, *_shortened(kernels), *reasons])
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = []
        for row, detail in zip(rows, details, strict=True):
            lines.append(f"{row[0]:{widths[0]}}" + "".join(f"  {row[i]:>{widths[i]}}" for i in range(1, 4)))
            lines += [f"    {line}" for line in detail]
        if not self.calls:
            lines.append("no op of camox_ops was called")
        for name, reasons in self._not_fused().items():
            lines += [f"not fused: {name or 'the model'}", *(f"    {reason}" for reason in reasons)]
        lines.append(
            f"kernels: {_C.isa()}, threads: up to {max((call.threads for call in self.calls), default=0)}; "
            "GB/s: of the least bytes that the calls must move"
        )
        return "\n".join(lines)


# Garbage collected while it is held may be a generator inside a `with explain()`, which ends there in the same thread.
_lock = threading.RLock()
_open: list[explain] = []


class _Seen(threading.local):
    """Of each thread: how many calls were recorded, so that an operator that only called others is not one more."""

    count = 0


_seen = _Seen()


def _observer(name: str, function):
    """function, recorded."""

    def call(*args, **kwargs):
        tensors = [tensor for value in args for tensor in _tensors_of("", value).values()]
        device = next((tensor.device for tensor in tensors), None)
        if torch.compiler.is_compiling() or device is None or not _computes(tensors):
            return function(*args, **kwargs)
        waits = device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
        before = _seen.count
        if waits:
            torch.cuda.synchronize(device)
        _C.take_notes()
        start = time.perf_counter()
        output = function(*args, **kwargs)
        if waits:
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - start if waits or device.type == "cpu" else None
        if _seen.count == before:
            _record(name, args, kwargs, output, device, seconds)
        return output

    return call


def _tensors_of(name: str, value) -> dict[str, torch.Tensor]:
    """The tensors of an argument by name: itself, or each of a list."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    if isinstance(value, (list, tuple)):
        return {f"{name}[{i}]": item for i, item in enumerate(value) if isinstance(item, torch.Tensor)}
    return {}


def _computes(tensors) -> bool:
    """Whether a kernel runs on them: not on fake tensors, nor those that a transform follows."""
    plain = (torch.Tensor, torch.nn.Parameter)
    return all(type(t) in plain and not t.is_meta and not _torch_private.is_wrapped(t) for t in tensors)


def _record(name: str, args, kwargs, output, device: torch.device, seconds: float | None) -> None:
    kernels, reasons = [], []
    for note in _C.take_notes().splitlines():
        kind, _, text = note.partition(" ")
        found = kernels if kind == "kernel" else reasons
        if text not in found:
            found.append(text)
    on_cpu = device.type == "cpu"
    ran = kernels if on_cpu else [f"camox_{name}_cuda"]
    names = [argument.name for argument in getattr(torch.ops.camox_ops, name).default._schema.arguments]
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    inputs, options = {}, {}
    for key, value in arguments.items():
        found = _tensors_of(key, value)
        inputs.update(found)
        if not found:
            options[key] = value
    outputs = output if isinstance(output, tuple) else () if output is None else (output,)
    call = Call(
        op=name,
        backward=name.endswith("_backward"),
        inputs=tuple(_facts(key, value) for key, value in inputs.items()),
        outputs=tuple(_facts(f"-> {i}", value) for i, value in enumerate(outputs)),
        options=options,
        device=str(device),
        kernels=tuple(ran),
        isa=_C.isa() if on_cpu else "cuda",
        threads=torch.get_num_threads() if on_cpu else 0,
        reasons=tuple(reasons),
        bytes=sum(map(_bytes, (*inputs.values(), *outputs))),
        seconds=seconds,
        thread=threading.current_thread().name,
    )
    _seen.count += 1
    for recorder in tuple(_open):
        recorder.calls.append(call)


def _facts(name: str, tensor: torch.Tensor) -> TensorFacts:
    dtype = _DTYPES.get(tensor.dtype) or str(tensor.dtype).removeprefix("torch.")
    return TensorFacts(name, tuple(tensor.shape), dtype, _layout(tensor))


def _layout(tensor: torch.Tensor) -> str:
    if tensor.is_contiguous():
        return "contiguous"
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return "channels_last"
    return (
        "expanded" if any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True)) else "strided"
    )


def _bytes(tensor: torch.Tensor) -> int:
    elements = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride or size == 0 else 1
    return elements


def _shortened(kernels: tuple[str, ...]) -> list[str]:
    return [kernel.removeprefix("camox_") for kernel in kernels]
