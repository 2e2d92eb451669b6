"""python -m camox_ops run: an unedited script, with PyTorch's CPU kernels tuned before its imports and each model
patched at its first call.

docs/run.md says what is promised. This file has, in this order: the command line, the script in a `__main__` of its
own, the models, the times of steps, the report."""

from __future__ import annotations

import argparse
import atexit
import functools
import importlib.machinery
import io
import json
import os
import runpy
import statistics
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.modules import module as torch_module

from . import _C, _torch_private, train
from ._patch._proof import proving
from .train import tune
from .train.allocator import ON_PAGES

RESTARTED = "CAMOX_RUN_RESTARTED"
"""In the environment of a process that replaced itself, so that it never does so twice."""

# Not the docstring, of which `python -OO` leaves nothing.
DESCRIPTION = (
    "An unedited script, with PyTorch's CPU kernels tuned before its imports and each model patched at its first call."
)
USAGE = "python -m camox_ops run [--no-tune] [--no-patch] [--report FILE] (script.py | -m module) [its arguments]"


# the command line -----------------------------------------------------------------------------------------------------


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """(our options, the script and what belongs to it): the first word that is no option of ours begins the latter,
    behind a `--` if there is one, which ends the options as it does for python and torchrun."""
    at = 0
    while at < len(arguments) and arguments[at].startswith("-") and not arguments[at].startswith("-m"):
        if arguments[at] == "--":
            return arguments[:at], arguments[at + 1 :]
        at += 2 if arguments[at] == "--report" else 1
    return arguments[:at], arguments[at:]


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m camox_ops run", usage=USAGE, description=DESCRIPTION, allow_abbrev=False
    )
    parser.add_argument("--no-tune", action="store_true", help="leave PyTorch's CPU kernels and allocator alone")
    parser.add_argument("--no-patch", action="store_true", help="leave the models alone")
    parser.add_argument("--report", metavar="FILE", help="write the report there too, as JSON")
    ours, script = _split(arguments)
    options = parser.parse_args(ours)
    if script and script[0].startswith("-m") and len(script[0]) > 2:
        script[:1] = ["-m", script[0][2:]]
    if not script or script == ["-m"]:
        parser.error("no script was given")
    if script[0] != "-m":
        try:
            if not os.path.isdir(script[0]):
                open(script[0], "rb").close()
        except OSError as error:
            parser.error(f"can't open file {script[0]!r}: {error.strerror}")
    if options.report is not None:
        options.report = os.path.abspath(options.report)  # the script may go to another folder
        try:
            existed = os.path.exists(options.report)
            open(options.report, "a").close()
            if not existed:
                os.unlink(options.report)
        except OSError as error:
            parser.error(f"can't write --report {options.report!r}: {error.strerror}")
    return options, script


def main(arguments: list[str], patch: Callable | None = None) -> int:
    """Runs the script and returns 0 where it ran to its end; its exceptions and exits leave as they are.

    patch: a function as camox_ops.patch, which None stands for."""
    options, script = _parse(arguments)
    session = _Session(options, script)
    if not options.no_tune:
        session.tune()
    session.begin(patch)
    try:
        _execute(script)
    except BaseException as error:
        session.ended = _said_of(error)
        _hide_frames()
        raise
    session.ended = "ran to its end"
    return 0


# the script in a __main__ of its own ----------------------------------------------------------------------------------


def _execute(script: list[str]) -> None:
    """What `python` does with these arguments. Frames above this function's are hidden in tracebacks."""
    main_module = types.ModuleType("__main__")
    names = vars(main_module)
    names["__builtins__"] = sys.modules["builtins"]
    if "__annotations__" in vars(sys.modules["__main__"]):  # not from Python 3.14 on
        names["__annotations__"] = {}
    sys.modules["__main__"] = main_module
    if "__mp_main__" in sys.modules:
        # multiprocessing's name for the main module as it was when torch imported multiprocessing; what a spawned
        # worker sends back is pickled by it.
        sys.modules["__mp_main__"] = main_module
    if script[0] == "-m":
        sys.argv[:] = ["-m", *script[2:]]
        runpy._run_module_as_main(script[1])
        return
    sys.argv[:] = script
    path = os.path.join(os.getcwd(), script[0])
    is_package = os.path.isdir(path) or _is_zip(path)
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):
        # In place of the folder that `python -m camox_ops` was called in.
        sys.path[0] = path if is_package else os.path.dirname(os.path.realpath(path))
    if is_package:
        runpy._run_module_as_main("__main__", alter_argv=False)
        return
    compiled = path.endswith(".pyc")
    kind = importlib.machinery.SourcelessFileLoader if compiled else importlib.machinery.SourceFileLoader
    loader = kind("__main__", path)
    if compiled:
        code = loader.get_code("__main__")
    else:
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
    names.update(__file__=path, __cached__=None, __loader__=loader)
    exec(code, names)


def _is_zip(path: str) -> bool:
    import zipimport

    try:
        zipimport.zipimporter(path)
    except zipimport.ZipImportError:
        return False
    return True


def _said_of(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"sys.exit({'' if error.code is None else repr(error.code)})"
    text = str(error)
    return type(error).__name__ + (f": {text.splitlines()[0]}" if text else "")


def _hide_frames() -> None:
    """The traceback that the interpreter shows next begins with the script's own frames."""
    show = sys.excepthook

    def show_script(kind, error, traceback):
        sys.excepthook = show
        below = traceback
        while below is not None and below.tb_frame.f_code is not _execute.__code__:
            below = below.tb_next
        below = None if below is None else below.tb_next
        show(kind, error.with_traceback(below), below)

    sys.excepthook = show_script


# the models -----------------------------------------------------------------------------------------------------------

MOST_ROOTS = 64
"""Root modules with something that patch reports; a script that makes new ones in every step is left alone then."""
MOST_PLAIN_ROOTS = 1024
"""Of the others: constructors that call their layers one by one make many."""


class _Open(threading.local):
    """Of each thread: the handle of the hook on the root module whose call is open, or None."""

    handle = None


_open = _Open()
_watch: _Watch | None = None


def _enter(module: torch.nn.Module, args) -> None:
    """A hook on the calls of all modules, which is taken away while the call of a root module is open, so that inner
    modules pay nothing, and those of camox_ops, which compute apart where such hooks are registered, do not either."""
    if torch.compiler.is_compiling() or _open.handle is not None or proving.now:  # a script may call patch itself
        return
    _watch.entered(module)


def _leave(module: torch.nn.Module, args, output) -> None:
    """A hook on the open root module, for this one call."""
    handle, _open.handle = _open.handle, None
    if handle is not None:
        handle.remove()
        _watch.arm()


class _Root:
    """What was done to one root module at its first call."""

    def __init__(self, module: torch.nn.Module):
        self.called = weakref.ref(module)
        self.wrappers, inner = _unwrapped(module)
        self.module = weakref.ref(inner)
        self.name = _class_name(inner)
        self.parameters = sum(parameter.numel() for parameter in inner.parameters())
        self.report = None
        self.seconds = 0.0
        self.why_not = ""

    @property
    def is_patched(self) -> bool:
        return self.report is not None and bool(self.report.patched)

    @property
    def is_plain(self) -> bool:
        """Whether patch found nothing in it to say something of."""
        return self.report is not None and not self.report.patched and not self.report.skipped

    def is_compiled(self) -> bool:
        """Whether it is compiled, or a part of it."""
        model = self.called()
        return any("_orig_mod" in m._modules or m._compiled_call_impl is not None for m in model.modules())

    def patch(self, patch: Callable) -> None:
        start = time.perf_counter()
        try:
            self.report = patch(self.module())
        except Exception as error:
            self.why_not = f"patch raised {type(error).__name__}: {error}"
        self.seconds = time.perf_counter() - start

    def to_dict(self) -> dict:
        return {
            "class": self.name,
            "wrapped_in": self.wrappers,
            "parameters": self.parameters,
            "patch": None if self.report is None else self.report.to_dict(),
            "patch_seconds": self.seconds,
            "why_not": self.why_not,
        }

    def __str__(self) -> str:
        title = f"{self.name}{''.join(f' in {wrapper}' for wrapper in self.wrappers)}, {self.parameters} parameters"
        if self.report is None:
            return f"{title}: {self.why_not}"
        text = "\n".join(f"  {line}" for line in str(self.report).splitlines())
        return f"{title}, looked at for {self.seconds:.2f} s\n{text}"


def _class_name(module: torch.nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _is_lazy(parameter) -> bool:
    return isinstance(parameter, torch.nn.parameter.UninitializedTensorMixin)


def _unwrapped(module: torch.nn.Module) -> tuple[list[str], torch.nn.Module]:
    """(wrappers, outermost last; the module within): patch looks into the other wrappers itself."""
    wrappers = []
    while True:
        if "_orig_mod" in module._modules:
            wrappers.insert(0, "torch.compile")
            module = module._modules["_orig_mod"]
        elif isinstance(module, (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)):
            wrappers.insert(0, type(module).__name__)
            module = module.module
        else:
            return wrappers, module


def _is_inopportune() -> bool:
    """Whether the call of a module is recorded or transformed rather than computed: patch would be so too."""
    return (
        torch.jit.is_tracing()
        or _torch_private.in_transform()
        or _torch_private.in_dispatch_mode()
        or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
    )


class _Watch:
    """Sees the calls of modules, patches root modules at their first call, and times the steps of one of them."""

    def __init__(self, patch: Callable | None, why_not: str, switches: list[Callable[[bool], None]]):
        self.patch = patch
        self.why_not = why_not
        self.roots: list[_Root] = []
        self._plain = 0  # roots that are plain
        self.steps = _Steps(self, switches)
        self._threads = os.environ.get("OMP_NUM_THREADS", ""), torch.get_num_threads()
        self._known: dict[int, tuple[weakref.ref, _Root | None]] = {}
        self._lock = threading.Lock()
        self._handle = None

    @property
    def is_full(self) -> bool:
        return len(self.roots) - self._plain >= MOST_ROOTS or self._plain >= MOST_PLAIN_ROOTS

    def arm(self) -> None:
        with self._lock:
            if self._handle is None and not self.is_full:
                self._handle = torch_module.register_module_forward_pre_hook(_enter)

    def disarm(self) -> None:
        with self._lock:
            if self._handle is not None:
                self._handle.remove()
                self._handle = None

    def entered(self, module: torch.nn.Module) -> None:
        known = self._known.get(id(module))
        # A ScriptModule takes no hook; none of its inner modules calls Python's hooks while it runs.
        has_modules = bool(module._modules) and not isinstance(module, torch.jit.ScriptModule)
        if known is not None and not has_modules and (known[1] is None or self.steps.done):
            return
        self.disarm()  # what patch runs to prove its forward is not the script's either
        try:
            root = known[1] if known is not None else self._first_call(module)
            if root is not None and not self.steps.done:
                self.steps.called(root, module)
        except Exception as error:
            self.steps.fail(error)
        try:
            if has_modules:
                _open.handle = module.register_forward_hook(_leave, always_call=True)
        except Exception:  # a class may refuse hooks; the script is none the worse for it
            pass
        if _open.handle is None:
            self.arm()

    def _first_call(self, module: torch.nn.Module) -> _Root | None:
        if _is_inopportune() or any(map(_is_lazy, module.parameters())):
            return None  # at a later call
        if not module._modules and next(module.parameters(), None) is None:
            self._know(module, None)  # a loss, an activation
            return None
        self._limit_threads()
        root = _Root(module)
        root.why_not = self.why_not
        if self.patch is not None:
            root.patch(self.patch)
            self.steps.disturb()
        self.roots.append(root)
        self._plain += root.is_plain
        # Its inner modules are no roots when a script or a checkpoint's backward calls them on their own.
        for inner in list(module.modules())[1:]:
            self._know(inner, None)
        self._know(module, root)
        return root

    def compiled(self, module: torch.nn.Module) -> None:
        """module.compile() was called, behind which no hook sees calls: this is its first call."""
        if id(module) not in self._known and not self.is_full:
            self.disarm()
            self._first_call(module)
            self.arm()

    def _limit_threads(self) -> None:
        """A script that sets OMP_NUM_THREADS before its `import torch` means that one, which came before the script."""
        asked = os.environ.get("OMP_NUM_THREADS", "")
        before, threads = self._threads
        if asked != before and asked.isdecimal() and int(asked) > 0 and torch.get_num_threads() == threads:
            torch.set_num_threads(int(asked))
        self._threads = asked, torch.get_num_threads()

    def _know(self, module: torch.nn.Module, root: _Root | None) -> None:
        key = id(module)
        if key not in self._known:
            forget = weakref.ref(module, lambda _, known=self._known: known.pop(key, None))
            self._known[key] = (forget, root)


# the times of steps ---------------------------------------------------------------------------------------------------

RUN_OF_STEPS = 3
STEPS = 4 * RUN_OF_STEPS
MOST_CALLS_WITHOUT_STEP = 100


class _Steps:
    """Times the first steps of training both ways: as the script alone would run, and tuned and patched.

    A step lasts from a call of one root module in training to its first later call before which parameters or gradients
    were changed, so that a backward, the optimizer and the data of the next step belong to it. Ways alternate in runs
    of RUN_OF_STEPS steps, the first of which is not counted: it has the switch and the first calls after it."""

    def __init__(self, watch: _Watch, switches: list[Callable[[bool], None]]):
        self.watch = watch
        self.switches = switches
        self.done = False
        self.why_not = "no model was called in training"
        self.times: dict[bool, list[float]] = {True: [], False: []}
        self.root: _Root | None = None
        self._left_out: set[_Root] = set()
        self._exchanged: list[tuple[torch.nn.Module, type]] = []
        self._index = 0
        self._since: float | None = None
        self._mark = ()
        self._calls = 0

    def called(self, root: _Root, module: torch.nn.Module) -> None:
        # Of the model within: a wrapper's own flag stays where it was while a framework sets the model's.
        inner = root.module()
        training = (module if inner is None else inner).training and torch.is_grad_enabled()
        # A constructor may have called a layer of its own: the larger one of those called before a step is the model.
        is_larger = self.root is not None and not self._index and root.parameters > self.root.parameters
        if self.root is None or is_larger:
            if training and root not in self._left_out:
                if any(parameter.requires_grad for parameter in module.parameters()):
                    self._begin(root, module)
                else:
                    self._left_out.add(root)
        elif root is self.root:
            self._step(module) if training else self.disturb()

    def disturb(self) -> None:
        """Something else took time within this step."""
        self._since = None

    def _begin(self, root: _Root, module: torch.nn.Module) -> None:
        if root.is_compiled():
            return self._stop("the model is compiled, or a part of it, and switching would compile it again")
        if not self.switches and not any(root.is_patched for root in self.watch.roots):
            self.why_not = "nothing was tuned or patched"  # a larger model may come
            self._left_out.add(root)
            return
        self.root = root
        self.why_not = f"fewer than {STEPS} steps"
        self._start_step(module)

    def _start_step(self, module: torch.nn.Module) -> None:
        self._mark = _progress(module)
        self._calls = 0
        self._since = _now(module)

    def _step(self, module: torch.nn.Module) -> None:
        if _progress(module) == self._mark:
            self._calls += 1
            if self._calls > MOST_CALLS_WITHOUT_STEP:
                self._stop("no backward was seen")
            return
        ours = self._ours()
        if self._index % RUN_OF_STEPS and self._since is not None:
            self.times[ours].append(_now(module) - self._since)
        self._index += 1
        if self._ours() != ours:
            self._switch(self._ours())
        if self._index == STEPS:
            few = min(map(len, self.times.values())) < RUN_OF_STEPS - 1
            return self._stop("too few steps were without validation or other models' first calls" if few else "")
        self._start_step(module)

    def _ours(self) -> bool:
        return self._index // RUN_OF_STEPS % 2 == 0

    def fail(self, error: Exception) -> None:
        """The script goes on in any case, with each model in the last state that it had."""
        self.why_not = f"{type(error).__name__}: {error}"
        self.done = True

    def _stop(self, why_not: str) -> None:
        self.why_not = why_not
        self.done = True
        if not self._ours():
            self._switch(True)

    def _switch(self, ours: bool) -> None:
        for switch in self.switches:
            switch(ours)
        if ours:
            for module, kind in self._exchanged:
                module.__class__ = kind
            self._exchanged = []
            return
        for root in self.watch.roots:
            module = root.module() if root.is_patched else None
            for inner in () if module is None else module.modules():
                # patch gives a module a class of its own; one that was wrapped since (fully_shard does) stays
                patch = vars(type(inner)).get("_camox_patch")
                if patch is not None:
                    self._exchanged.append((inner, type(inner)))
                    inner.__class__ = patch.original

    def to_dict(self) -> dict:
        report = {"model": None if self.root is None else self.root.name, "why_not": self.why_not}
        if not self.why_not:
            before, after = (statistics.median(self.times[ours]) for ours in (False, True))
            report |= {"seconds_before": before, "seconds_after": after, "speed_up": before / after}
            report |= {"times_before": self.times[False], "times_after": self.times[True]}
        return report

    def __str__(self) -> str:
        report = self.to_dict()
        if self.why_not:
            return f"step: not timed, {self.why_not}"
        return (
            f"step: {report['seconds_before'] * 1e3:.2f} ms before, {report['seconds_after'] * 1e3:.2f} ms after, "
            f"{report['speed_up']:.2f}x (medians of {len(self.times[False])} and {len(self.times[True])} steps of "
            f"{self.root.name}, from call to call)"
        )


def _progress(module: torch.nn.Module) -> tuple[int, int]:
    """Changes when a parameter or a gradient is written."""
    versions = gradients = 0
    for parameter in module.parameters():
        versions += parameter._version
        if parameter.grad is not None:
            gradients += 1 + parameter.grad._version
    return versions, gradients


def _now(module: torch.nn.Module) -> float:
    if torch.cuda.is_initialized() and any(parameter.is_cuda for parameter in module.parameters()):
        torch.cuda.synchronize()
    return time.perf_counter()


# the report -----------------------------------------------------------------------------------------------------------


class _Session:
    """One run: what was asked for, what was done, and the report at its end."""

    def __init__(self, options: argparse.Namespace, script: list[str]):
        self.options = options
        self.script = script
        self.tuned: train.TuneReport | None = None
        self.why_not_tuned = "--no-tune"
        self.watch: _Watch | None = None
        self.ended = ""
        self._start = time.perf_counter()
        self._process = os.getpid()

    def tune(self) -> None:
        had = ON_PAGES in os.environ
        try:
            self.tuned = train.tune_cpu()
        except Exception as error:
            self.why_not_tuned = f"tune_cpu raised {type(error).__name__}: {error}"
            return
        memory = self.tuned.allocator
        if memory is not None and memory.supported and ON_PAGES not in memory.settings and not had:
            _restart()

    def begin(self, patch: Callable | None) -> None:
        global _watch
        why_not = ""
        if self.options.no_patch:
            patch, why_not = None, "--no-patch"
        elif patch is None:
            import camox_ops  # which imports this file

            patch = camox_ops.patch
        switches = [] if self.tuned is None else _kernel_switches(self.tuned)
        self.watch = _watch = _Watch(patch, why_not, switches)
        _see_compiled_modules()
        _watch.arm()
        atexit.register(self.end)

    def end(self) -> None:
        if os.getpid() != self._process or os.environ.get("RANK", "0") != "0":
            return
        _say(str(self))
        if self.options.report is not None:
            try:
                Path(self.options.report).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")
            except OSError as error:
                _say(f"camox_ops run: can't write --report {self.options.report!r}: {error.strerror}")

    def to_dict(self) -> dict:
        return {
            "camox_ops": _C.build_info()["version"],
            "torch": torch.__version__,
            "isa": _C.isa(),
            "threads": torch.get_num_threads(),
            "script": self.script,
            "ended": self.ended,
            "seconds": time.perf_counter() - self._start,
            "tune": _tune_dict(self.tuned, self.why_not_tuned),
            "models": [root.to_dict() for root in self.watch.roots],
            "further_models": self.watch.is_full,
            "why_not_patched": self.watch.why_not,
            "step": self.watch.steps.to_dict(),
        }

    def __str__(self) -> str:
        lines = [f"camox_ops run: {' '.join(self.script)}: {self.ended}, {time.perf_counter() - self._start:.1f} s"]
        lines += str(self.tuned or f"tune_cpu: not done, {self.why_not_tuned}").splitlines()
        if self.watch.why_not:
            lines.append(f"patch: {self.watch.why_not}")
        else:
            plain = [root for root in self.watch.roots if root.is_plain]
            largest = max(plain, key=lambda root: root.parameters, default=None)
            listed = [root for root in self.watch.roots if not root.is_plain or root is largest]
            lines += "\n".join(f"patch: {root}" for root in listed).splitlines()
            if len(plain) > 1:
                lines.append(
                    f"patch: {len(plain) - 1} others were called, with nothing in them that a recogniser looks for"
                )
            if not self.watch.roots:
                lines.append("patch: no model was called")
            if self.watch.is_full:
                lines.append(f"patch: these are the first {len(self.watch.roots)}; models after them were left alone")
        lines.append(str(self.watch.steps))
        return "\n".join([lines[0], *(f"  {line}" for line in lines[1:])])


def _say(text: str) -> None:
    """On the stderr that the process began with: a script may have put something else in its place, or closed it."""
    if sys.__stderr__ is not None and not sys.__stderr__.closed:
        print(text, file=sys.__stderr__, flush=True)


def _tune_dict(report: train.TuneReport | None, why_not: str) -> dict:
    if report is None:
        return {"text": "", "kernels": [], "allocator": None, "why_not": why_not}
    return {
        "text": report.text,
        "kernels": [kernel._asdict() for kernel in report.kernels],
        "allocator": None if report.allocator is None else report.allocator._asdict(),
        "why_not": "",
    }


def _restart() -> None:
    """PyTorch had asked for ON_PAGES before it was set: once more, with it set from the beginning."""
    if RESTARTED in os.environ or sys.modules["__main__"].__spec__ is None:
        return
    if sys.modules["__main__"].__spec__.name != f"{__package__}.__main__":
        return
    sys.stdout.flush(), sys.stderr.flush()
    os.execve(sys.executable, sys.orig_argv, {**os.environ, ON_PAGES: "1", RESTARTED: "1"})


def _kernel_switches(report: train.TuneReport) -> list[Callable[[bool], None]]:
    """Functions that put what tune_cpu replaced in its place (True) or take it out (False)."""
    replaced = {kernel.name for kernel in report.kernels if kernel.replaced}

    def switch(ours: bool) -> None:
        if tune._active is not report.kernels:
            return  # the script tuned or restored by itself
        for kernel in tune.KERNELS:
            # The dispatcher's table may not be written while another thread calls an operator.
            if kernel.name in replaced and not (kernel.at_dispatcher and threading.active_count() > 1):
                tune._library.put(kernel) if ours else tune._library.take(kernel)

    return [switch] if replaced else []


def _see_compiled_modules() -> None:
    """A compiled module warns at its call where hooks on all modules are registered; ours is made for that. One that is
    compiled in place runs no hooks outside the compiled code."""
    asked, compile_module = torch_module._has_any_global_hook, torch.nn.Module.compile

    def has_any_global_hook() -> bool:
        hooks = torch_module._global_forward_pre_hooks
        if len(hooks) == 1 and next(iter(hooks.values())) is _enter:
            return bool(
                torch_module._global_backward_pre_hooks
                or torch_module._global_backward_hooks
                or torch_module._global_forward_hooks
            )
        return asked()

    @functools.wraps(compile_module)
    def compile(self, *args, **kwargs):
        _watch.compiled(self)
        return compile_module(self, *args, **kwargs)

    torch_module._has_any_global_hook = has_any_global_hook
    torch.nn.Module.compile = compile
