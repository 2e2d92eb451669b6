"""The tolerance rule of the project and the inputs that find mistakes, shared by every op's tests."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed
import torch.multiprocessing
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import camox_ops.reference
from camox_ops._selftest import FLOAT32_SLACK, remainder_of
from camox_ops.train import allocator

# A machine with a GPU runs the same tests there: CAMOX_TEST_DEVICE=cuda.
DEVICE = torch.device(os.environ.get("CAMOX_TEST_DEVICE", "cpu"))
FLOATS = (torch.float32, torch.bfloat16, torch.float16, *([torch.float64] if DEVICE.type == "cpu" else []))
# On a machine without its cache inductor's first graph takes 20 seconds.
each_backend = pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
# The same for modules: the graph is captured either way, AOTAutograd then takes seconds for its backward.
each_capture = pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
# Where every dtype takes seconds and the same way through the code.
TWO_OF_FLOATS = [pytest.param(dtype, marks=() if i < 2 else pytest.mark.slow) for i, dtype in enumerate(FLOATS)]
# What torch makes of C++'s invalid_argument, which operators throw. The package's own functions raise ValueError.
REFUSAL = ValueError if torch.__version__ < (2, 15) else RuntimeError
LAYOUTS = ("contiguous", "channels_last", "strided", "expanded")

float64_on_cpu = pytest.mark.skipif(DEVICE.type != "cpu", reason="float64 runs on the CPU only")
on_device = pytest.mark.usefixtures("on_device")  # of conftest.py: what a test makes lies on DEVICE


def on_device_of_test(values):
    """Values of a parametrize mark, which is read before any fixture: their tensors of the CPU on DEVICE."""
    return tree_map_only(torch.Tensor, lambda x: x.to(DEVICE) if x.device.type == "cpu" else x, values)


def every_pair(**values):
    """A parametrize mark of three parameters: every value of each meets every value of each other one. The whole
    product is slow tests."""
    *ranges, last = (range(len(of_one)) for of_one in values.values())
    params = []
    for i, j, k in itertools.product(*ranges, last):
        chosen = [of_one[n] for of_one, n in zip(values.values(), (i, j, k), strict=True)]
        marks = () if k == (i + j) % len(last) else pytest.mark.slow
        params.append(pytest.param(*chosen, marks=marks, id="-".join(map(str, chosen))))
    return pytest.mark.parametrize(tuple(values), params)


def every_second(**values):
    """A parametrize mark of two parameters: a value of one meets every second value of the other. The other pairs are
    slow tests. Where one is a layout, test_contract.py holds each op's bits to those of dense tensors."""
    params = []
    for (i, one), (k, other) in itertools.product(*(enumerate(of_one) for of_one in values.values())):
        params.append(pytest.param(one, other, marks=pytest.mark.slow if (i + k) % 2 else ()))
    return pytest.mark.parametrize(tuple(values), params)


def seed(value: int) -> None:
    """torch.manual_seed. On the CPU of its generator alone: torch.manual_seed also formats the stack of its caller for
    each kind of accelerator that may be initialised later, 1 ms per call."""
    if DEVICE.type == "cpu":
        torch.default_generator.manual_seed(value)
    else:
        torch.manual_seed(value)


class _OnOneThread:
    """camox_ops.reference, its functions on one of torch's threads: their tensors are small, and where tests run side
    by side a second thread waits for a core longer than it works."""

    def __getattr__(self, name):
        function = getattr(camox_ops.reference, name)

        @functools.wraps(function)
        def run(*args, **options):
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            try:
                return function(*args, **options)
            finally:
                torch.set_num_threads(threads)

        setattr(self, name, run)
        return run


reference = _OnOneThread()


def each(tensors):
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def assert_close_to_reference(
    ours,
    same_dtype,
    reference64,
    scale64: float = 0.0,
    terms: float = 0.0,
    roundings: float = 4.0,
    intermediate: float = 0.0,
) -> None:
    """max|ours - ref64| <= 2 max|torch in the same dtype - ref64| + 4 eps(dtype) max|ref64|, tensor by tensor.

    For float64 results the reference is no better than they are: scale64, the size of the terms that it adds up, takes
    the place of max|ref64| where that is smaller. terms: their size where nothing but rounding may be left of them (see
    remainder_of). roundings: in place of the 4. intermediate: what the rounding of values that the op
    computes on its way adds, where the result says nothing of their size."""
    for mine, theirs, truth in zip(each(ours), each(same_dtype), each(reference64), strict=True):
        assert mine.shape == truth.shape
        assert mine.dtype == theirs.dtype
        if truth.numel() == 0:
            continue
        assert truth.dtype == torch.float64
        truth = truth.cpu()
        error = (mine.cpu().double() - truth).abs().max().item()
        allowed = 2 * (theirs.cpu().double() - truth).abs().max().item()
        size = truth.abs().max().item()
        if mine.dtype == torch.float64:
            size = max(size, scale64)
        allowed += roundings * torch.finfo(mine.dtype).eps * size + remainder_of(mine.dtype, truth, terms)
        allowed += intermediate
        assert error <= allowed, f"error {error:.3e} > allowed {allowed:.3e} ({mine.dtype}, {tuple(mine.shape)})"


def assert_one_rounding(half, float32) -> None:
    """A half-precision result lies within one rounding of our own float32 result of the same inputs.

    On CUDA a thread's vectors hold more halves than float32, so that sums are in another order: 4 eps of float32 of the
    largest element."""
    for low, high in zip(each(half), each(float32), strict=True):
        info = torch.finfo(low.dtype)
        difference = (low.double() - high.double().clamp(-info.max, info.max)).abs()
        allowed = info.eps * high.double().abs() + info.smallest_normal * info.eps
        if low.is_cuda and high.numel():
            allowed += FLOAT32_SLACK * high.double().abs().max()
        assert torch.all(difference <= allowed), f"max excess {(difference - allowed).max().item():.3e}"


def assert_same_sums(ours, others) -> None:
    """The same bits of the same sums; on CUDA, where a layout or dtype has vectors of its own and so an order of its
    sums, 8 eps of the largest element."""
    for mine, other in zip(each(ours), each(others), strict=True):
        rounding = 8 * torch.finfo(other.dtype).eps * other.abs().max().item() if other.is_cuda else 0.0
        torch.testing.assert_close(mine, other, rtol=0.0, atol=rounding)


def assert_close_around(ours, same_dtype, reference64, around, terms64=None, factor: float = 8.0) -> None:
    """The tolerance rule element by element, with the maxima of the element's neighbourhood:

        |ours - ref64| <= 2 max|torch in the same dtype - ref64| + factor eps(dtype) max|terms64|

    A maximum over the whole tensor would hide what a bright object does to a dim background. around(values): at each
    element the largest value of its neighbourhood. terms64: what is added up, a tensor for each of ref64; by default
    ref64. Elements that the dtype cannot hold are left out, and all others must be finite."""
    references = each(reference64)
    for mine, theirs, truth, terms in zip(
        each(ours), each(same_dtype), references, references if terms64 is None else each(terms64), strict=True
    ):
        assert mine.shape == truth.shape
        assert mine.dtype == theirs.dtype
        mine, theirs, truth, terms = (y.detach().cpu() for y in (mine, theirs, truth, terms))
        representable = truth.to(mine.dtype).isfinite()
        assert mine[representable].isfinite().all(), (
            f"{int((~mine[representable].isfinite()).sum())} elements are not finite ({mine.dtype})"
        )
        error = torch.where(representable, mine.double() - truth, 0.0).abs()
        torch_error = torch.where(representable, theirs.double() - truth, 0.0).abs()
        info = torch.finfo(mine.dtype)
        size = around(torch.where(terms.isnan(), 0.0, terms).abs())
        allowed = 2 * around(torch_error) + factor * info.eps * size + info.smallest_normal * info.eps
        worst = (error / allowed.nan_to_num(nan=torch.inf)).nan_to_num(nan=0.0).max().item()
        assert worst <= 1, (
            f"an error is {worst:.3g} times what its neighbourhood allows ({mine.dtype}, {tuple(mine.shape)})"
        )


def outputs_and_gradients(op, inputs, grads):
    """op(*inputs) as a list, and the gradients of the inputs."""
    leaves = [x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in inputs]
    outputs = each(op(*leaves))
    return [y.detach() for y in outputs], list(torch.autograd.grad(outputs, leaves, grads))


class CastsByTorch(TorchDispatchMode):
    """Counts the conversions to another dtype that PyTorch makes."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        self.count += function is torch.ops.aten._to_copy.default
        return function(*arguments, **(named or {}))


def assert_reads_half_weights(op, inputs, weights, grad) -> None:
    """op(*inputs, *weights), all of one half-precision dtype, has the bits of float32 weights of the same values, their
    gradients those of float32 ones rounded once, and PyTorch converts none of them."""
    with CastsByTorch() as casts:
        outputs, grads = outputs_and_gradients(op, [*inputs, *weights], grad)
    assert casts.count == 0
    of_floats = outputs_and_gradients(op, [*inputs, *(weight.float() for weight in weights)], grad)
    for ours, other in zip([*outputs, *grads], [*of_floats[0], *of_floats[1]], strict=True):
        assert ours.dtype == grad.dtype
        assert torch.equal(ours, other.to(grad.dtype))


def module_numbers(module, forward, x, grad) -> list[torch.Tensor]:
    """forward(x) and the gradients of x and of the module's parameters."""
    x = x.clone().requires_grad_()
    y = forward(x)
    return [y, *torch.autograd.grad(y, [x, *module.parameters()], grad)]


@functools.lru_cache(maxsize=64)
def _noise(shape, seed) -> torch.Tensor:
    """Read by many tests: whoever writes takes a copy."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, device="cpu")


def random_image(shape, dtype=torch.float32, layout="contiguous", kind="normal", seed=0) -> torch.Tensor:
    """A (B, C, H, W) input on DEVICE; layout "strided" is a slice of a larger buffer, "expanded" has stride 0 over
    the batch; kind "offset" has mean 1e4 and standard deviation 1, "constant" one value a channel."""
    x = _noise(tuple(shape), seed)
    if kind == "offset":
        x = x + 1e4
    elif kind == "constant":
        x = x[:, :, :1, :1].expand(shape).clone()
    x = x.to(DEVICE, dtype, copy=True)
    if layout == "channels_last":
        return x.to(memory_format=torch.channels_last)
    if layout == "strided":
        b, c, h, w = shape
        larger = torch.full((b, c + 1, h + 2, 2 * w + 3), float("nan"), dtype=dtype, device=DEVICE)
        view = larger[:, 1:, 1 : h + 1, 1 : 2 * w + 1 : 2]
        view.copy_(x)
        return view
    if layout == "expanded":
        return x[:1].expand(shape)
    return x


@contextlib.contextmanager
def default_device(device: str):
    """torch.set_default_device, and back."""
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


def untuned(more=()) -> dict[str, str]:
    """This process's environment and more, without what tells torch that the allocator was tuned."""
    return {name: value for name, value in os.environ.items() if name != allocator.ON_PAGES} | dict(more)


def run_python(code: str, **environment) -> str:
    """Runs code in a fresh interpreter -> its standard output; a failure raises with its standard error.

    An allocator that this process tuned is not handed on."""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=untuned(environment), check=False
    )
    if result.returncode != 0:
        raise RuntimeError(result.stderr)
    return result.stdout


# A fork leaves after its exit handlers: to take torch apart copies 130 MB of shared memory.
FORK_SERVER = """
import atexit, json, os, sys, torch
for request in sys.stdin:
    code, environment, *files = json.loads(request)
    child = os.fork()
    if not child:
        os.environ.clear()
        os.environ.update(environment)
        for stream, file in zip((1, 2), files):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), stream)
        exec(code, {"__name__": "__main__"})
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@functools.cache
def fork_server() -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", FORK_SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=untuned()
    )


def run_python_with_torch(code: str, **environment) -> str:
    """As run_python, in a fork of one process that has imported torch, which takes seconds; camox_ops is not imported.

    What torch reads of the environment when it is imported is that of the first call."""
    server = fork_server()
    with tempfile.TemporaryDirectory() as folder:
        files = [os.path.join(folder, name) for name in ("stdout", "stderr")]
        print(json.dumps([code, untuned(environment), *files]), file=server.stdin, flush=True)
        status = int(server.stdout.readline())
        output, errors = (Path(file).read_text() for file in files)
    if status:
        raise RuntimeError(errors)
    return output


def run_ranks(worker, arguments, count: int) -> None:
    """worker(rank, *arguments) in `count` processes: forks of one process that has imported what they need."""
    of_torch = ("_dynamo", "distributed.checkpoint", "distributed.fsdp", "distributed.tensor")
    multiprocessing.set_forkserver_preload(["torch", "camox_ops", *(f"torch.{name}" for name in of_torch)])
    torch.multiprocessing.start_processes(worker, arguments, count, start_method="forkserver")


_kept = []


def keep(*models) -> None:
    """Models in DistributedDataParallel live as long as the process.

    Where such a model is the last owner of a destroyed process group, PyTorch joins gloo's thread without giving up the
    interpreter's lock, for which that thread may wait with the last of its work: a deadlock now and then."""
    _kept.extend(models)


def leave_process_group() -> None:
    """The end of a process of a group: nobody leaves while another is at work, and no interpreter is torn down.

    Gloo's thread takes the interpreter's lock to let go of its last work. Where Python is finishing it ends such a
    thread instead, inside C++ code that no exception may leave: "terminate called without an active exception"."""
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
