"""PyTorch's own CPU kernels, replaced where they are slow on this machine, for unchanged scripts."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .. import _C
from .allocator import AllocatorReport, tune_cpu_allocator
from .machine import usable_cpus

LIBRARY = Path(__file__).parent.with_name("libcamox_ops_tune.so")
# A replacement must be so many times as fast in the mean over its probes, and so many in each, where noise is larger.
LEAST_GAIN = 1.05
LEAST_OF_EACH = 0.95
ROUNDS = 9
# Other processes disturb a measurement on all threads where they use more than this share of as many cores.
BUSY = 0.25
STAT = Path("/proc/stat")


class KernelReport(NamedTuple):
    """One of PyTorch's kernels: its name in the table, the operators that run on it, whether it was replaced and in
    which calls (`domain`), how many times as fast the replacement was here (None: not measured), and why it was left
    alone (empty where it was not)."""

    name: str
    operators: str
    domain: str
    replaced: bool
    gain: float | None
    reason: str


class TuneReport(NamedTuple):
    """What tune_cpu did: a KernelReport for each kernel, the allocator's report (None where it was not asked for), and
    one line to print; str() is a table."""

    kernels: tuple[KernelReport, ...]
    allocator: AllocatorReport | None
    text: str

    def __str__(self) -> str:
        rows = [("kernel", "gain", "what runs on it")]
        for kernel in self.kernels:
            gain = "-" if kernel.gain is None else f"{kernel.gain:.1f}x"
            state = kernel.domain if kernel.replaced else f"left alone: {kernel.reason}"
            rows.append((kernel.name, gain, f"{kernel.operators}; {state}"))
        widths = [max(len(row[column]) for row in rows) for column in range(2)]
        lines = [self.text]
        if self.kernels:
            lines += [f"  {name:{widths[0]}}  {gain:>{widths[1]}}  {text}" for name, gain, text in rows]
        if self.allocator is not None:
            lines.append(f"  allocator: {self.allocator}")
        return "\n".join(lines)


class _Kernel(NamedTuple):
    """A replacement of csrc/tune/tune.cpp: what is said of it, what is timed, and whether it stands at the dispatcher.

    probes: () -> functions without arguments, which return a tensor that must be the same with and without where
    `exact`."""

    name: str
    operators: str
    domain: str
    probes: Callable[[], list[Callable[[], torch.Tensor]]]
    exact: bool
    at_dispatcher: bool


def _small_integers(*shape: int) -> torch.Tensor:
    """Sums of their products are exact in float32, in any order."""
    return torch.arange(math.prod(shape), dtype=torch.float32, device="cpu").remainder_(7).sub_(3).view(shape)


def _product_probes() -> list[Callable[[], torch.Tensor]]:
    x, weight, grad = _small_integers(2048, 128), _small_integers(512, 128), _small_integers(2048, 512)
    bias = _small_integers(512)
    return [lambda: torch.addmm(bias, x, weight.t()), lambda: grad @ weight, lambda: grad.t() @ x]


def _batch_probes() -> list[Callable[[], torch.Tensor]]:
    """Those of attention and of its gradients."""
    q, k = _small_integers(48, 256, 64), _small_integers(48, 256, 64)
    scores = _small_integers(48, 256, 256)
    return [
        lambda: torch.bmm(q, k.transpose(1, 2)),
        lambda: torch.bmm(scores, k),
        lambda: torch.bmm(scores.transpose(1, 2), q),
    ]


def _bernoulli_probes() -> list[Callable[[], torch.Tensor]]:
    mask = torch.empty(1 << 18, device="cpu")
    return [lambda: mask.bernoulli_(0.9)]


def _pool_probes() -> list[Callable[[], torch.Tensor]]:
    x, window = _small_integers(2, 4, 64, 64), (5, 1, 2)
    y = x.mul(25)  # PyTorch's backward adds up 25th parts, which are whole numbers here
    return [
        lambda: F.avg_pool2d(x, *window),
        lambda: torch.ops.aten.avg_pool2d_backward(y, x, [5, 5], [1, 1], [2, 2], False, True, None),
    ]


def _max_pool_probes() -> list[Callable[[], torch.Tensor]]:
    """After a network's first convolution, between stages, and at stride 1."""
    x = _small_integers(2, 8, 56, 56)
    return [functools.partial(F.max_pool2d, x, *window) for window in ((3, 2, 1), (2,), (5, 1, 2))]


def _convolution_probes() -> list[Callable[[], torch.Tensor]]:
    x, weight, channels = _small_integers(2, 32, 28, 28), _small_integers(32, 1, 7, 7), 32
    backward = torch.ops.aten.convolution_backward
    rest = ([channels], [1, 1], [3, 3], [1, 1], False, [0, 0], channels)
    return [
        lambda: F.conv2d(x, weight, padding=3, groups=channels),
        lambda: backward(x, x, weight, *rest, [True, False, False])[0],
        lambda: backward(x, x, weight, *rest, [False, True, True])[1],
    ]


def _pointwise_probes() -> list[Callable[[], torch.Tensor]]:
    probes = []
    for x, weight in (
        (_small_integers(2, 32, 64, 64), _small_integers(64, 32, 1, 1)),
        (_small_integers(4, 128, 14, 14), _small_integers(256, 128, 1, 1)),
    ):
        bias, y = _small_integers(len(weight)), F.conv2d(x, weight)
        probes.append(functools.partial(F.conv2d, x, weight, bias))
        probes.append(functools.partial(_pointwise_gradients, y.remainder_(5), x, weight))
    return probes


def _pointwise_gradients(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Of x, the weight and the bias at once, as training wants them."""
    gradients = torch.ops.aten.convolution_backward(
        grad, x, weight, [len(weight)], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, True]
    )
    return torch.cat([gradient.flatten() for gradient in gradients])


def _bilinear_probes() -> list[Callable[[], torch.Tensor]]:
    x, size = _small_integers(2, 4, 48, 48), [96, 96]
    y = F.interpolate(x, scale_factor=2, mode="bilinear")
    return [
        lambda: F.interpolate(x, scale_factor=2, mode="bilinear"),
        lambda: torch.ops.aten.upsample_bilinear2d_backward(y, size, list(x.shape), False, 2.0, 2.0),
    ]


def _softmax_probes() -> list[Callable[[], torch.Tensor]]:
    """Of rows of equal elements: their exponentials are 1, and 4 of them add up to a power of two."""
    rows, columns = torch.ones(4096, 4, device="cpu", requires_grad=True), torch.ones(2, 16, 48, 48, device="cpu")
    long_rows = torch.ones(64, 1024, device="cpu")
    with torch.enable_grad():
        y = torch.softmax(rows, 1)
    grad = _small_integers(4096, 4)
    return [
        lambda: torch.softmax(rows, 1),
        lambda: torch.autograd.grad(y, rows, grad, retain_graph=True)[0],
        lambda: torch.softmax(columns, 1),
        lambda: torch.softmax(long_rows, 1),
    ]


def _batch_norm_probes() -> list[Callable[[], torch.Tensor]]:
    probes = []
    for shape in ((8, 32, 32, 32), (4, 128, 14, 14)):
        # Every channel has as many ones as minus ones: its mean is 0, its variance with eps 4, and all is exact.
        x = torch.arange(math.prod(shape), device="cpu").bitwise_and_(1).mul_(2).sub_(1).float().view(shape)
        weight = _small_integers(shape[1])
        probes.append(functools.partial(F.batch_norm, x, None, None, weight, weight, True, 0.1, 3.0))
    return probes


def _nearest_probes() -> list[Callable[[], torch.Tensor]]:
    x, size = _small_integers(2, 16, 48, 48), [96, 96]
    y = F.interpolate(x, scale_factor=2)
    return [
        lambda: F.interpolate(x, scale_factor=2),
        lambda: torch.ops.aten.upsample_nearest2d_backward(y, size, list(x.shape), 2.0, 2.0),
    ]


KERNELS = (
    _Kernel(
        "mm",
        "mm, addmm, their .out variants and gradients, nn.Linear, attention",
        "float32, sizes of 8 and more, 32^3 multiply-adds and more",
        _product_probes,
        exact=True,
        at_dispatcher=False,
    ),
    _Kernel(
        "bmm",
        "bmm, baddbmm, their .out variants and gradients",
        "float32, sizes of 8 and more, 48^3 multiply-adds and more in each matrix",
        _batch_probes,
        exact=True,
        at_dispatcher=False,
    ),
    _Kernel(
        "bernoulli_",
        "bernoulli_(p), every dropout",
        "floating-point tensors without gaps in memory, no generator given; a random stream of its own",
        _bernoulli_probes,
        exact=False,
        at_dispatcher=True,
    ),
    _Kernel(
        "avg_pool2d",
        "avg_pool2d, avg_pool1d and their gradients",
        "float32, bfloat16 and float16 images, stride 1, odd windows of 7 pixels and more, no ceil_mode, no "
        "divisor_override",
        _pool_probes,
        exact=True,
        at_dispatcher=True,
    ),
    _Kernel(
        "max_pool2d",
        "max_pool2d, and max_pool1d with gradients; the gradients themselves are PyTorch's",
        "float32, bfloat16 and float16 images with dense rows, not channels_last, no dilation, outputs of 4 columns "
        "and more",
        _max_pool_probes,
        exact=True,
        at_dispatcher=True,
    ),
    _Kernel(
        "convolution",
        "depthwise conv2d (a group for each channel) and its gradients",
        "contiguous float32 images, stride 1, dilation 1, square windows of 3, 5, 7, 9 and 11",
        _convolution_probes,
        exact=True,
        at_dispatcher=True,
    ),
    _Kernel(
        "pointwise",
        "conv1d, conv2d and conv3d with windows of one pixel and their gradients",
        "contiguous float32 images, stride 1, no padding, one group, 8 channels and more, 1 position or 16 and more",
        _pointwise_probes,
        exact=True,
        at_dispatcher=True,
    ),
    _Kernel(
        "softmax",
        "softmax, log_softmax, cross_entropy, attention with dropout and their gradients",
        "float32, bfloat16 and float16, rows of at most 15 elements (gradients with AVX2: 7); without their gradients "
        "also at most 64 channels or other elements that are not adjacent, and float32 rows of 128 elements and more "
        "(gradients of log_softmax too from 32 MiB on)",
        _softmax_probes,
        exact=True,
        at_dispatcher=True,
    ),
    _Kernel(
        "upsample_bilinear2d",
        "bilinear F.interpolate, nn.Upsample and their gradients",
        "float32, bfloat16 and float16 images with dense rows, not channels_last, to more rows and columns",
        _bilinear_probes,
        exact=True,
        at_dispatcher=True,
    ),
    _Kernel(
        "upsample_nearest2d",
        "F.interpolate and nn.Upsample of images, nearest and nearest-exact, and their gradients",
        "float32, bfloat16 and float16 images with dense rows, not channels_last, by whole factors up to 8",
        _nearest_probes,
        exact=True,
        at_dispatcher=True,
    ),
    _Kernel(
        "batch_norm",
        "F.batch_norm, nn.BatchNorm1d to 3d and F.instance_norm, in training",
        "contiguous float32 images, 16 positions and more; gradients are PyTorch's",
        _batch_norm_probes,
        exact=True,
        at_dispatcher=True,
    ),
)


@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)
def _address_in_torch(symbol: bytes) -> int | None:
    """Where PyTorch's C++ library for the CPU has a function, or None."""
    try:
        library = ctypes.CDLL("libtorch_cpu.so", os.RTLD_NOLOAD)
    except OSError:
        return None
    function = getattr(library, symbol.decode(), None)
    return ctypes.cast(function, ctypes.c_void_p).value if function else None


class _Library:
    """libcamox_ops_tune.so, opened at the first use."""

    def __init__(self):
        self._library = None

    def open(self) -> str:
        """Why it cannot be used, or an empty string."""
        if self._library is not None:
            return ""
        try:
            library = ctypes.CDLL(str(LIBRARY))
        except OSError as error:
            return f"{LIBRARY.name} cannot be opened: {error}"
        for name, result in (("open", None), ("put", ctypes.c_char_p), ("calls", ctypes.c_int64)):
            getattr(library, f"camox_tune_{name}").restype = result
        library.camox_tune_set_least.argtypes = [ctypes.c_int64] * 3
        library.camox_tune_open(_address_in_torch)
        self._library = library
        return ""

    def put(self, kernel: _Kernel) -> str:
        """Why it could not be put in place, or an empty string."""
        if not kernel.at_dispatcher:
            return (self._library.camox_tune_put(kernel.name.encode()) or b"").decode()
        errors = []

        def register(_: float) -> float:
            errors.append((self._library.camox_tune_put(kernel.name.encode()) or b"").decode())
            return 0.0

        # The dispatcher warns once per process that a kernel is overridden, which is the purpose. A warning that C++
        # makes within a method of Tensor is a Python warning, which can be ignored; elsewhere it is text on stderr.
        # apply_ is a method that calls what it is given.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*previously registered kernel")
            torch.zeros(1, device="cpu").apply_(register)
        return errors[0]

    def take(self, kernel: _Kernel) -> None:
        if self._library is not None:
            self._library.camox_tune_take(kernel.name.encode())

    def calls(self, kernel: _Kernel) -> int:
        return self._library.camox_tune_calls(kernel.name.encode()) if self._library is not None else 0


_library = _Library()


@contextmanager
def replaced(*names: str):
    """With these kernels replaced (none: all), faster here or not: for tests and benchmarks.

    Raises RuntimeError where one cannot be."""
    chosen = [kernel for kernel in KERNELS if not names or kernel.name in names]
    try:
        error = _library.open() or "; ".join(filter(None, map(_library.put, chosen)))
        if error:
            raise RuntimeError(f"tune_cpu: {error}")
        yield
    finally:
        for kernel in chosen:
            _library.take(kernel)


_active: tuple[tuple[KernelReport, ...], str] | None = None
"""What tune_cpu did, and what it says of the threads, until restore_cpu."""


def _seconds(probe: Callable[[], torch.Tensor]) -> float:
    start = time.perf_counter()
    probe()
    return time.perf_counter() - start


def _measure(kernel: _Kernel) -> tuple[float | None, str]:
    """(gain, why it is not to be replaced): PyTorch's kernel and ours in turn. Neither stays in place."""
    gains = []
    for probe in kernel.probes():
        expected = probe().clone()
        stock, ours = [], []
        for turn in range(ROUNDS):
            stock.append(_seconds(probe))
            error = _library.put(kernel)
            if error:
                return None, error
            try:
                if turn == 0 and kernel.exact and not torch.equal(probe(), expected):
                    return None, "the replacement gave another result"
                ours.append(_seconds(probe))
            finally:
                _library.take(kernel)
        # Other processes only ever add time, and the first call of each touches its memory.
        gains.append(min(stock) / min(ours))
    gain = math.exp(math.fsum(map(math.log, gains)) / len(gains))
    if min(gains) < LEAST_OF_EACH:
        reason = "ours is slower in a probe"
    elif gain < LEAST_GAIN:
        reason = f"ours is not {LEAST_GAIN:g}x as fast in the mean"
    else:
        return gain, ""
    return gain, f"{reason} on this machine ({', '.join(f'{g:.2f}x' for g in gains)})"


def _replace(kernel: _Kernel) -> KernelReport:
    gain, reason = _measure(kernel)
    reason = reason or _library.put(kernel)
    return KernelReport(kernel.name, kernel.operators, kernel.domain, not reason, gain, reason)


def _left_alone(reason: str) -> tuple[KernelReport, ...]:
    return tuple(KernelReport(k.name, k.operators, k.domain, False, None, reason) for k in KERNELS)


def _cores_of_others(seconds: float = 0.05) -> float:
    """Cores that other processes use meanwhile; 0 where the system does not say."""

    def used() -> float:
        user, nice, system, _idle, _iowait, irq, softirq = map(int, STAT.read_text().split("\n", 1)[0].split()[1:8])
        return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")

    start, own = time.perf_counter(), time.process_time()
    try:
        before = used()
        time.sleep(seconds)
        others = used() - before - (time.process_time() - own)
    except (OSError, ValueError):
        return 0.0
    return max(0.0, others / (time.perf_counter() - start))


def _why_one_thread(threads: int) -> str:
    """Why a measurement on all threads would say nothing, or an empty string.

    Threads that do not all have a CPU wait for each other by whole time slices: whatever runs on several of them then
    takes milliseconds, this or that way. One thread is slower for both and compares as on a quiet machine."""
    cpus = usable_cpus()
    if threads > cpus:
        return f"as this process may use {cpus} CPU{'s' * (cpus > 1)}: try OMP_NUM_THREADS={cpus}"
    others = _cores_of_others() if threads > 1 else 0
    return f"as other processes used {others:.1f} cores" if others > BUSY * threads else ""


def _measure_all() -> tuple[tuple[KernelReport, ...], str]:
    """Reports, and what they say of the threads."""
    threads = torch.get_num_threads()
    reason = _why_one_thread(threads)
    torch.set_num_threads(1 if reason else threads)
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            reports = tuple(_replace(kernel) for kernel in KERNELS)
    finally:
        torch.set_num_threads(threads)
    return reports, f"; measured on one, {reason}" if reason else ""


def _replace_all() -> tuple[tuple[KernelReport, ...], str]:
    global _active
    if _active is None:
        error = _library.open()
        if error:
            return _left_alone(error), ""
        state = torch.get_rng_state()
        try:
            # OpenMP's threads belong to the thread that computes: measured in this one, a child that is forked later
            # would wait for threads that it does not have.
            with ThreadPoolExecutor(1) as thread:
                _active = thread.submit(_measure_all).result()
        finally:
            torch.set_rng_state(state)
    return _active


def tune_cpu(*, allocator: bool = True, kernels: bool = True) -> TuneReport:
    """Makes unchanged PyTorch code faster on the CPU, for the whole process: tunes the allocator and replaces those of
    PyTorch's own kernels that are slow on this machine.

        import camox_ops as cx

        print(cx.train.tune_cpu())  # once, before the first tensors
        ...                         # any training script

    Every replacement has a domain, outside of which PyTorch's kernel runs as before, and is put in place only where a
    measurement, made in this call (some tenths of a second for all), shows that it is faster here; the report has the
    gains. It is made on one thread where other processes use the cores, or a container has fewer CPUs than PyTorch has
    threads; the report says so.
    Results change by rounding alone; the masks of dropout are drawn from a random stream of its own, which
    torch.manual_seed, get_rng_state and checkpointing reproduce as they do PyTorch's. See docs/cpu.md for the kernels,
    and for when not to use it.

    Args:
        allocator: as tune_cpu_allocator, which must come before the first tensors; the report says when that was too
            late.
        kernels: replace kernels. Call while no other thread computes. A second call changes nothing and gives the
            same report, until restore_cpu.

    Returns:
        A TuneReport: a KernelReport for each kernel (replaced or not, gain, why not), the allocator's report, and
        `text`; str() is a table. With CAMOX_TUNE_CPU=0 in the environment nothing is done, and it says so.

    Raises:
        TypeError: allocator or kernels is not a bool."""
    for name, value in (("allocator", allocator), ("kernels", kernels)):
        if not isinstance(value, bool):
            raise TypeError(f"tune_cpu: {name} must be a bool, got {value!r}")
    if os.environ.get("CAMOX_TUNE_CPU") == "0":
        refused = "refused by CAMOX_TUNE_CPU=0 in the environment"
        return TuneReport(_left_alone(refused) if kernels else (), None, f"tune_cpu: {refused}, nothing was changed")
    memory = tune_cpu_allocator() if allocator else None  # first: measuring makes tensors
    reports, measured = _replace_all() if kernels else ((), "")
    replaced = sum(kernel.replaced for kernel in reports)
    if not kernels:
        text = "tune_cpu: PyTorch's kernels were not asked for"
    elif replaced:
        text = f"tune_cpu: {replaced} of {len(reports)} kernels replaced"
    else:
        text = "tune_cpu: no replacement helps on this machine, PyTorch's own kernels stay"
    return TuneReport(reports, memory, f"{text} ({_C.isa()}, {torch.get_num_threads()} threads{measured})")


def restore_cpu() -> None:
    """Gives PyTorch its own kernels back, after which it computes the same bits as before tune_cpu.

    Call while no other thread computes. Without tune_cpu before, or twice, it does nothing. The allocator keeps its
    settings, which glibc cannot take back."""
    global _active
    for kernel in KERNELS:
        _library.take(kernel)
    _active = None
