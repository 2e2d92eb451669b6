"""python -m camox_ops run: as python would run the script, with models patched at their first call."""

import contextlib
import copy
import json
import os
import re
import signal
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
from helpers import run_python_with_torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils import flop_counter

import camox_ops as cx
from camox_ops import __main__ as command
from camox_ops import _run
from camox_ops.train import tune

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
REPORT = "camox_ops run: "

# Runs each case in a fork of a process that has imported torch already: a case costs no import. After the script's own
# exit handlers a fork leaves with the status of what main raised: to take torch apart copies 130 MB of shared memory.
DRIVER = """
import atexit, os, sys
from camox_ops import _run
def leave():
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
os.chdir({folder!r})
sys.path[0] = os.getcwd()  # as `python -m camox_ops` has it
children = []
for number, case in enumerate({cases}):
    children.append(os.fork())
    if not children[-1]:
        for fd, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{{number}}.{{name}}", os.O_WRONLY | os.O_CREAT), fd)
        atexit.register(leave)
        try:
            status = _run.main(["--no-tune", *case])
        except KeyboardInterrupt:
            atexit.unregister(leave)  # its status is a signal
            raise
        except BaseException as error:
            code = error.code if isinstance(error, SystemExit) else 1
            status = code if isinstance(code, int) else int(code is not None)
            raise
        sys.exit(status)
for number, child in enumerate(children):
    with open(f"{{number}}.status", "w") as file:
        file.write(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
os._exit(0)
"""

FACTS = """
import sys, pickle
class Local: pass
main = sys.modules["__main__"]
print(sys.argv, sys.path[0], __name__, __file__, __spec__ and __spec__.name, __package__, type(__loader__))
print(sorted(globals()))
print(main.__dict__ is globals(), type(pickle.loads(pickle.dumps(Local()))) is Local, sys.stdout.line_buffering)
import multiprocessing  # a spawned worker pickles what it sends back by this name
print(sys.modules["__mp_main__"] is main)
"""

# A shell starts what it puts in the background with SIGINT ignored.
INTERRUPTED = """
import os, signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)
os.kill(os.getpid(), signal.SIGINT)
time.sleep(60)
"""
CASES = {
    "facts.py": FACTS,
    "exits.py": "import sys; print('out'); sys.exit(3)",
    "says.py": "import sys; sys.exit('said')",
    "exits_without.py": "raise SystemExit",
    "raises.py": """
def inner(n):
    try:
        return 1 / n
    except ZeroDivisionError:
        raise ValueError("two\\nlines")
inner(0)
""",
    "wrong.py": "print('never')\nx = = 1\n",
    "interrupted.py": INTERRUPTED,
    "terminated.py": "import os, signal, time\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(60)",
    "hooked.py": """
import sys, traceback
sys.excepthook = lambda kind, error, tb: print(kind, error, traceback.format_tb(tb), error.__traceback__ is tb)
raise KeyError("k")
""",
    "late.py": """
import atexit, threading, time
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
print("main")
""",
    "forks.py": """
import os
import re
if os.fork(): os.wait()
print("both")
""",
    "package/__init__.py": "",
    "package/part.py": FACTS + "raise OSError('of a module')",
    "package/__main__.py": FACTS,
    "encoded.py": b"# -*- coding: latin-1 -*-\nprint(ascii('\xe9'))",
}
# Modules that take no hook, and a plain one after them. By name, as a script that is compiled has to be in a file.
SCRIPTED = """
import torch
from torch import nn
class Refuses(nn.Sequential):
    def register_forward_hook(self, *args, **kwargs):
        raise TypeError("no hooks")
x = torch.ones(64, 64)
scripted = torch.jit.script(nn.Sequential(nn.Linear(64, 64), nn.ReLU()))
for net in (scripted, Refuses(nn.ReLU(), nn.Linear(64, 1)), nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1))):
    for _ in range(2):
        print(net(x).shape)
print(scripted(x).grad_fn is not None, type(net[1]) is nn.Dropout, [len(m._forward_hooks) for m in net.modules()])
"""
ARGUMENTS = [
    ["facts.py", "a", "--report", "b", "-m"],
    ["package/../facts.py"],
    ["./facts.py"],
    ["link.py"],
    ["exits.py"],
    ["says.py"],
    ["exits_without.py"],
    ["raises.py"],
    ["wrong.py"],
    ["interrupted.py"],
    ["terminated.py"],
    ["hooked.py"],
    ["late.py"],
    ["forks.py"],
    ["-m", "package.part", "x"],
    ["-mpackage", "--no-tune"],
    ["-m", "missing.module"],
    ["package", "y"],
    ["zipped.zip"],
    ["encoded.py"],
]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The folder of the cases, which have all been run: {number}.out, .err, .status."""
    folder = tmp_path_factory.mktemp("cases")
    (folder / "package").mkdir()
    for name, text in CASES.items():
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    (folder / "link.py").symlink_to(folder / "package/part.py")
    with zipfile.ZipFile(folder / "zipped.zip", "w") as archive:
        archive.writestr("__main__.py", "import sys; print(sys.argv, __name__, sys.path[0]); 1 / 0")
    (folder / "scripted.py").write_text(SCRIPTED)
    cases = [*ARGUMENTS, ["--report", "scripted.json", "scripted.py"]]
    run_python_with_torch(DRIVER.format(folder=str(folder), cases=cases), PYTHONPATH=str(ROOT))
    return folder


@pytest.mark.parametrize("number", range(len(ARGUMENTS)), ids=lambda number: " ".join(ARGUMENTS[number]))
def test_as_python_runs_it(ran, number):
    """Output, exit status or signal, and tracebacks; the report comes behind them."""
    out, err, status = (ran / f"{number}.{name}" for name in ("out", "err", "status"))
    python = subprocess.run(
        [sys.executable, *ARGUMENTS[number]], cwd=ran, env=ENVIRONMENT, capture_output=True, text=True, timeout=60
    )
    assert out.read_text() == python.stdout
    assert int(status.read_text()) == python.returncode
    said, report, rest = err.read_text().partition(REPORT)
    assert said == python.stderr
    assert bool(report) == (python.returncode != -signal.SIGTERM)
    assert REPORT not in rest  # a fork has none of its own


def test_modules_that_take_no_hook(ran):
    """Scripted ones, and those of a class that refuses hooks, run as they would; models after them are patched."""
    out, err, status = ((ran / f"{len(ARGUMENTS)}.{name}").read_text() for name in ("out", "err", "status"))
    assert status == "0", err
    shapes = [f"torch.Size([64, {width}])" for width in (64, 64, 1, 1, 64, 64)]
    assert out.splitlines() == [*shapes, "True False [0, 0, 0]"]
    scripted, refuses, plain = json.loads((ran / "scripted.json").read_text())["models"]
    assert "torch.jit" in scripted["patch"]["skipped"][0]["reason"]
    assert refuses["class"] == "__main__.Refuses"
    assert [entry["name"] for entry in plain["patch"]["patched"]] == ["1"]


def run(*arguments, cwd, **environment):
    return subprocess.run(
        [sys.executable, "-m", "camox_ops", "run", *arguments],
        cwd=cwd,
        env={**ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


# Trains the net of examples/plain. By hand, as an optimizer imports torch._dynamo, which takes seconds.
TRAINING = """
import multiprocessing, os, sys
print("top level of", __name__, flush=True)

def compute():
    import torch
    torch.ones(512, 512).mm(torch.ones(512, 512)).exp_()

def say(): print("spawned", flush=True)

if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    from torch.utils.data import DataLoader, Dataset
    from examples.plain import train

    class Numbers(Dataset):
        def __len__(self): return 14
        def __getitem__(self, i): return torch.full((1, 32, 32), float(i % 7))

    class Net(train.Net): pass

    for context, target in (("fork", compute), ("spawn", say)):
        child = multiprocessing.get_context(context).Process(target=target)
        child.start()
        child.join(60)
        print("child", child.exitcode)
    net = Net()
    for x in DataLoader(Numbers(), num_workers=1):
        net.zero_grad()
        net(x).square().mean().backward()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= 1e-3 * parameter.grad
    print("trained with", torch.get_num_threads())
    sys.stderr = None
    sys.exit(5)
"""


def test_training_with_workers(tmp_path):
    """Workers, forked and spawned, neither train nor report; threads are those that the script asks for, and are none
    that the measurements of tune_cpu left behind, which a forked process would wait for. The net's norms and dropouts
    are patched, and its steps timed."""
    (tmp_path / "train.py").write_text(TRAINING)
    done = run("--report", "r.json", "train.py", "--epochs", "3", cwd=tmp_path)
    assert done.returncode == 5
    lines = ["top level of __main__", "child 0", "top level of __mp_main__", "spawned", "child 0", "trained with 1"]
    assert sorted(done.stdout.splitlines()) == sorted(lines)
    assert done.stderr.startswith(f"{REPORT}train.py --epochs 3: sys.exit(5), ")
    assert done.stderr.count(REPORT) == 1
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["script"] == ["train.py", "--epochs", "3"]
    assert report["ended"] == "sys.exit(5)"
    assert [kernel["name"] for kernel in report["tune"]["kernels"]] == [kernel.name for kernel in tune.KERNELS]
    assert report["tune"]["why_not"] == ""
    check_models_and_steps(report)


@pytest.mark.slow
def test_the_example(tmp_path):
    """As CI runs it, with an optimizer."""
    done = run("--report", "r.json", str(ROOT / "examples/plain/train.py"), "--steps", "14", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "right; " in done.stdout
    check_models_and_steps(json.loads((tmp_path / "r.json").read_text()))


@pytest.mark.slow
def test_a_spawned_loader(tmp_path):
    """Its process imports torch as well, and the script as __mp_main__; it neither trains nor reports."""
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "if __name__ == '__main__':\n"
        "    net = torch.nn.Linear(8, 1)\n"
        "    optimizer = torch.optim.SGD(net.parameters(), 1e-3)\n"
        "    data = TensorDataset(torch.ones(16, 8))\n"
        "    for (x,) in DataLoader(data, 1, num_workers=1, multiprocessing_context='spawn'):\n"
        "        net(x).sum().backward()\n"
        "        optimizer.step()\n"
        "print('end of', __name__)\n"
    )
    done = run("train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["end of __main__", "end of __mp_main__"]
    assert done.stderr.count(REPORT) == 1


def check_models_and_steps(report):
    """Of a run that trained the net of examples/plain, in a class Net of its own."""
    (model,) = report["models"]
    assert (model["class"], model["parameters"]) == ("__main__.Net", 19112)
    assert not report["further_models"]
    names = {entry["name"] for entry in model["patch"]["patched"]}
    assert {"blocks.0.norm", "blocks.3.mix.2"} <= names
    assert len(report["step"]["times_before"]) == 4


@pytest.mark.slow
def test_process_is_replaced_once_where_torch_was_there_before(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'camox_ops' in sys.orig_argv:\n"
        "    import torch\n"
        "    if os.environ.get('FORGET'): os.environ.pop('THP_MEM_ALLOC_ENABLE', None)\n"
        "    torch.empty(4 << 20, dtype=torch.uint8)\n"
        "    print('started')\n"
    )
    (tmp_path / "script.py").write_text("import sys; print(sys.argv)")
    path = os.pathsep.join((str(tmp_path), str(ROOT)))
    for forget in ("", "1"):
        done = run("script.py", "x y", cwd=tmp_path, PYTHONPATH=path, FORGET=forget)
        assert done.stdout.splitlines() == ["started", "started", "['script.py', 'x y']"]
        assert done.returncode == 0
        assert ("large tensors begin on pages" in done.stderr) == (not forget)


@pytest.mark.slow
def test_torchrun(tmp_path):
    """Every rank trains the same, wrapped in DDP; rank 0 reports."""
    (tmp_path / "train.py").write_text(
        "import torch, torch.distributed as dist\n"
        "from torch import nn\n"
        "dist.init_process_group('gloo')\n"
        "net = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 1)))\n"
        "for _ in range(20):\n"
        "    net(torch.ones(16, 32) * dist.get_rank()).sum().backward()\n"
        "print(f'rank {dist.get_rank()}')\n"
        "dist.barrier()\n"  # without it torch alone may abort, as helpers.leave_process_group says
        "dist.destroy_process_group()\n"
    )
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launch, "-m", "camox_ops", "run", "--report", "r.json", "train.py"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"rank \d", done.stdout)) == ["rank 0", "rank 1"]  # their lines may run together
    assert done.stderr.count(REPORT) == 1
    (model,) = json.loads((tmp_path / "r.json").read_text())["models"]
    assert model["class"] == "torch.nn.modules.container.Sequential"
    assert model["wrapped_in"] == ["DistributedDataParallel"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no script was given"),
        (["--no-tune"], "no script was given"),
        (["-m"], "no script was given"),
        (["--"], "no script was given"),
        (["missing.py"], "can't open file 'missing.py': No such file or directory"),
        (["--nonsense", "x.py"], "unrecognized arguments: --nonsense"),
        (["--report"], "expected one argument"),
        (["--report", "no/such/folder.json", __file__], "can't write --report"),
        (["--report", "/", __file__], "Is a directory"),
    ],
)
def test_errors(capsys, arguments, said):
    with pytest.raises(SystemExit) as stopped:
        command.main(["run", *arguments])
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "usage: python -m camox_ops run" in printed.err
    assert said in printed.err


@pytest.mark.parametrize("script", [[__file__, "--", "a"], ["-m", "json.tool", "--"]])
@pytest.mark.parametrize("ours", [[], ["--no-tune"]])
def test_two_dashes_end_our_options(ours, script):
    options, given = _run._parse([*ours, "--", *script])
    assert given == script and options.no_tune == bool(ours)


def test_report_file_is_not_made_before_its_time(tmp_path, capsys):
    """What is there stays until there is a report; what is not there is not left empty."""
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("kept")
    for path in (old, new):
        options, script = _run._parse(["--report", str(path), __file__, "--report", "its own"])
        assert options.report == str(path)
        assert script == [__file__, "--report", "its own"]
    assert old.read_text() == "kept"
    assert not new.exists()


# models, in this process ----------------------------------------------------------------------------------------------


class Report:
    """Of the fake patcher: a PatchReport's interface."""

    def __init__(self, patched):
        self.patched = patched
        self.skipped = []

    def to_dict(self):
        return {"patched": self.patched, "skipped": self.skipped}

    def __str__(self):
        return f"{len(self.patched)} patched"


class Patcher:
    """As cx.patch: gives the first inner module, or the model, a class made for it; runs it, which is no call of the
    script's."""

    def __init__(self, patched=("first",), error=None):
        self.models = []
        self.patched = list(patched)
        self.error = error

    def __call__(self, model):
        self.models.append(model)
        if self.error is not None:
            raise self.error
        if self.patched:
            module = next(model.children(), model)
            kind = type(module)
            patch = type("Patch", (), {"original": kind})
            copy.deepcopy(model).float()
            Net()(torch.ones(1, 8))
            module.__class__ = type(kind.__name__, (kind,), {"_camox_patch": patch})
        return Report(self.patched)


@contextlib.contextmanager
def watching(patcher, why_not="", switches=()):
    asked, compile_module = torch_module._has_any_global_hook, nn.Module.compile
    _run._watch = _run._Watch(patcher, why_not, list(switches))
    _run._see_compiled_modules()
    _run._watch.arm()
    try:
        yield _run._watch
    finally:
        _run._watch.disarm()
        _run._watch = None
        torch_module._has_any_global_hook = asked
        nn.Module.compile = compile_module
    assert not asked()


class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Sequential(nn.ReLU(), nn.Linear(width, 1))

    def forward(self, x):
        assert not torch_module._has_any_global_hook()
        return self.second(self.first(x))


def test_each_root_is_patched_once_at_its_first_call():
    patcher = Patcher()
    net, late, x = Net(), Net(), torch.ones(2, 8)
    with watching(patcher) as watch:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            net(x)
        for _ in range(3):
            nn.functional.mse_loss(net(x), torch.zeros(2, 1))
            nn.MSELoss()(net(x), torch.zeros(2, 1))
            net.second(net.first(x))  # inner modules, as a checkpoint calls them again
        late(x)
        with torch.inference_mode():
            late(x)
    assert patcher.models == [net, late]
    assert [root.name for root in watch.roots] == [f"{__name__}.Net"] * 2
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in (*net.modules(),))


def test_what_patch_calls_for_the_script_is_no_root():
    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.ones(16)), nn.Parameter(torch.zeros(16))

        def forward(self, x):
            y = nn.functional.layer_norm(x.permute(0, 2, 3, 1), (16,), self.weight, self.bias)
            return y.permute(0, 3, 1, 2)

    model = nn.Sequential(Norm(), nn.GELU())
    with watching(Patcher(patched=())) as watch:
        report = cx.patch(model)
        model(torch.ones(1, 16, 16, 16))
    assert [entry.name for entry in report.patched] == ["", "0"]
    assert [root.module() for root in watch.roots] == [model]


def test_wrapped_and_compiled_models_are_patched_within():
    patcher = Patcher()
    torch._dynamo.reset()
    one, other, x = Net(), Net(), torch.ones(2, 8)
    compiled = torch.compile(one, backend="eager", fullgraph=True)
    parallel = nn.DataParallel(torch.compile(other, backend="eager"))
    with watching(patcher) as watch, warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for _ in range(2):
            compiled(x).sum().backward()
            parallel(x)
        assert watch.steps.why_not.startswith("the model is compiled")
    assert patcher.models == [one, other]
    assert [root.wrappers for root in watch.roots] == [["torch.compile"], ["torch.compile", "DataParallel"]]


def test_compiled_functions_stay_whole():
    """A model that is called within one is not seen, and breaks no graph."""
    patcher = Patcher()
    net, x = Net(), torch.ones(2, 8)
    step = torch.compile(lambda x: net(x).sum(), backend="eager", fullgraph=True)
    with watching(patcher):
        expected = net.second(net.first(x)).sum()
        patcher.models.clear()
        assert torch.equal(step(x), expected)
    assert patcher.models == []


def test_models_that_are_compiled_in_place():
    """They are patched before that; a part that is compiled keeps steps from being timed, not models from patches."""
    patcher = Patcher()
    torch._dynamo.reset()
    net, other, x = Net(), Net(), torch.ones(2, 8)
    with watching(patcher) as watch:
        net.compile(backend="eager", fullgraph=True)
        assert patcher.models == [net]
        assert type(net.first) is not nn.Linear
        other.second = torch.compile(other.second, backend="eager", fullgraph=True)
        for _ in range(3):
            net(x).sum().backward()
            other(x).sum().backward()
        assert watch.steps.why_not.startswith("the model is compiled, or a part of it")
    assert patcher.models == [net, other]


def test_calls_that_are_recorded_are_left_for_later():
    patcher = Patcher()
    net, x = nn.Linear(8, 8), torch.ones(2, 8)
    lazy = nn.LazyLinear(3)
    with watching(patcher) as watch:
        torch.jit.trace(net, x, check_trace=False)
        torch.func.grad(lambda x: net(x).sum())(x)
        with flop_counter.FlopCounterMode(display=False):
            net(x)
        lazy(x)
        assert patcher.models == []
        net(x)
        lazy(x)
    assert patcher.models == [net, lazy]
    assert len(watch.roots) == 2


@pytest.mark.parametrize(("asked", "threads"), [("1", 1), ("", 2), ("many", 2), ("0", 2)])
def test_threads_that_a_script_asks_for(monkeypatch, asked, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with watching(Patcher()):
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
        Net()(torch.ones(1, 8))
        assert torch.get_num_threads() == threads
        torch.set_num_threads(2)
        Net()(torch.ones(1, 8))
        assert torch.get_num_threads() == 2


def test_an_exception_in_a_model_leaves_no_hook():
    class Failing(Net):
        def forward(self, x):
            super().forward(x)
            raise KeyError("its own")

    patcher = Patcher()
    net, after, x = Failing(), Net(), torch.ones(2, 8)
    with watching(patcher), warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(KeyError, match="its own"):
                net(x)
            assert not net._forward_hooks
        after(x)
    assert patcher.models == [net, after]


def test_an_interrupt_in_a_model_is_recovered_from():
    class Interrupted(Net):
        def forward(self, x):
            if x.shape[0] == 1:
                raise KeyboardInterrupt
            return super().forward(x)

    patcher = Patcher()
    net, after, x = Interrupted(), Net(), torch.ones(2, 8)
    with watching(patcher):
        with pytest.raises(KeyboardInterrupt):
            net(x[:1])
        net(x)
        assert not net._forward_hooks
        after(x)
    assert patcher.models == [net, after]


def test_what_patch_raises_is_reported():
    with watching(Patcher(error=RuntimeError("half-way"))) as watch:
        assert Net()(torch.ones(2, 8)).shape == (2, 1)
    (root,) = watch.roots
    assert root.why_not == "patch raised RuntimeError: half-way"
    assert "half-way" in str(root)
    assert root.to_dict()["patch"] is None


@pytest.mark.parametrize(("patched", "most"), [(("first",), _run.MOST_ROOTS), ((), _run.MOST_PLAIN_ROOTS)])
def test_models_beyond_number_are_left_alone(patched, most):
    patcher = Patcher(patched)
    with watching(patcher) as watch:
        for _ in range(most + 9):
            Net()(torch.ones(1, 8))
        assert not torch_module._global_forward_pre_hooks
    assert len(watch.roots) == len(patcher.models) == most
    assert watch.is_full


class CallsItsLayers(Net):
    """As ultralytics' detectors do, whose constructor asks its layers for their strides."""

    def __init__(self):
        super().__init__(16)
        self.second(self.first(torch.ones(2, 16)))


def test_layers_that_constructors_call():
    def patcher(model):
        return Patcher(("first",) if isinstance(model, CallsItsLayers) else ())(model)

    with watching(patcher) as watch:
        for _ in range(_run.MOST_ROOTS):
            CallsItsLayers()
        net = CallsItsLayers()
        for _ in range(_run.STEPS + 1):
            net(torch.ones(2, 16)).sum().backward()
    assert [root.called() for root in watch.roots if root.is_patched] == [net]
    assert watch.steps.to_dict()["model"] == f"{__name__}.CallsItsLayers"
    assert watch.steps.to_dict()["why_not"] == ""


def test_report_of_models_with_nothing_in_them():
    session = _run._Session(None, ["script.py"])
    with watching(Patcher(patched=())) as session.watch:
        kept = [Net(width) for width in (4, 16, 8)]
        for net in kept:
            net(torch.ones(2, net.first.in_features))
    text = str(session)
    assert text.count("Net, ") == 1 and "Net, 289 parameters" in text
    assert "patch: 2 others were called, with nothing in them" in text


def train(net, steps, accumulate=1, validate_at=()):
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    x = torch.ones(2, 8)
    for step in range(steps):
        net(x).sum().backward()
        if step % accumulate == accumulate - 1:
            optimizer.step()
            optimizer.zero_grad()
        if step in validate_at:
            with torch.no_grad():
                net.eval()(x)
            net.train()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_steps_are_timed_both_ways(monkeypatch, accumulate):
    """Runs of three steps, the first of each not counted; tuned and patched in the end."""
    patcher, net, switched, patched = Patcher(), Net(), [], []
    plain = type(net.first)
    clock = iter(range(10_000))
    monkeypatch.setattr(_run, "_now", lambda module: float(next(clock)) * (1 if not switched or switched[-1] else 3))
    net.second.register_forward_hook(lambda *_: patched.append(type(net.first) is not plain))
    with watching(patcher, switches=[switched.append]) as watch:
        train(net, 40, accumulate)
    assert switched == [False, True, False, True]
    assert patched == [True] * 3 + [False] * 3 + [True] * 3 + [False] * 3 + [True] * 28
    assert patcher.models == [net]
    report = watch.steps.to_dict()
    assert report["why_not"] == ""
    assert len(report["times_before"]) == len(report["times_after"]) == 4
    assert report["speed_up"] == pytest.approx(3)
    assert "3.00x (medians of 4 and 4 steps of" in str(watch.steps)


def test_steps_with_validation_within_are_not_counted():
    with watching(Patcher()) as watch:
        train(Net(), 20, validate_at=(2, 7))
    report = watch.steps.to_dict()
    assert report["why_not"] == ""
    assert (len(report["times_before"]), len(report["times_after"])) == (4, 2)


def test_the_mode_is_that_of_the_model_within_its_wrapper():
    """Lightning leaves DistributedDataParallel itself in evaluation mode after a validation."""
    net = Net()
    wrapped = nn.DataParallel(net)
    wrapped.eval()
    net.train()
    with watching(Patcher()) as watch:
        for _ in range(_run.STEPS + 1):
            wrapped(torch.ones(2, 8)).sum().backward()
    assert watch.steps.to_dict()["why_not"] == ""


def test_several_calls_of_a_model_make_one_step():
    with watching(Patcher()) as watch:
        net, x = Net(), torch.ones(2, 8)
        for _ in range(_run.STEPS + 1):
            (net(x) + net(x) + net(x)).sum().backward()
        assert watch.steps.to_dict()["why_not"] == ""


@pytest.mark.parametrize(
    ("steps", "why_not"),
    [
        (lambda net: train(net, 5), "fewer than 12 steps"),
        (lambda net: net.eval()(torch.ones(2, 8)), "no model was called in training"),
        (lambda net: [net(torch.ones(2, 8)) for _ in range(200)], "no backward was seen"),
        (lambda net: train(net, 40, validate_at=range(40)), "too few steps"),
    ],
)
def test_why_steps_were_not_timed(steps, why_not):
    with watching(Patcher()) as watch:
        steps(Net())
    assert watch.steps.to_dict()["why_not"].startswith(why_not)
    assert why_not in str(watch.steps)


def test_nothing_to_time():
    with watching(Patcher(patched=())) as watch:
        train(Net(), 20)
    assert watch.steps.to_dict()["why_not"] == "nothing was tuned or patched"


def test_an_error_while_switching_ends_the_timing():
    def stubborn(ours):
        raise RuntimeError("stays")

    with watching(Patcher(), switches=[stubborn]) as watch:
        train(Net(), 20)
    assert watch.steps.to_dict()["why_not"] == "RuntimeError: stays"


def test_a_module_that_fails_its_first_input_is_not_patched_again():
    """It gets its own class back while steps are timed, as cx.patch does that."""
    net = Net()
    plain = type(net.first)
    net.register_forward_pre_hook(lambda *_: setattr(net.first, "__class__", plain))
    with watching(Patcher()):
        train(net, 20)
    assert type(net.first) is plain


def test_kernels_are_switched_only_while_they_are_tuned(monkeypatch):
    """Not those that a script has restored, and none at the dispatcher while other threads live."""
    library = type("Library", (), {"calls": []})()
    library.put = lambda kernel: library.calls.append(("put", kernel.name))
    library.take = lambda kernel: library.calls.append(("take", kernel.name))
    kernels = tuple(
        cx.train.tune.KernelReport(name, "", "", name != "bmm", 2.0, "") for name in ("mm", "bmm", "bernoulli_")
    )
    monkeypatch.setattr(_run.tune, "_library", library)
    monkeypatch.setattr(_run.tune, "_active", kernels)
    monkeypatch.setattr(_run.threading, "active_count", lambda: 1)
    (switch,) = _run._kernel_switches(cx.train.TuneReport(kernels, None, ""))
    switch(False)
    switch(True)
    assert library.calls == [("take", "mm"), ("take", "bernoulli_"), ("put", "mm"), ("put", "bernoulli_")]
    library.calls.clear()
    monkeypatch.setattr(_run.threading, "active_count", lambda: 2)
    switch(False)
    assert library.calls == [("take", "mm")]
    library.calls.clear()
    monkeypatch.setattr(_run.tune, "_active", None)
    switch(False)
    assert library.calls == []
