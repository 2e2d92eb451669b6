"""cx.train: LossMeter, loader_options, gradient_checkpointing_policy, ProgressBar."""

import io
import math
import os
import sys
import weakref

import numpy as np
import pytest
import torch
from helpers import DEVICE
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import camox_ops as cx
from camox_ops.train import checkpointing, loader, machine, progress

MIB = 1 << 20


@pytest.fixture
def no_reading(monkeypatch):
    """Reading a tensor's value fails until undone."""
    for name in ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_: pytest.fail("a tensor's value was read"))
    return monkeypatch


def test_smoke_meter_reads_nothing_until_asked(no_reading):
    meter = cx.train.LossMeter()
    loss = torch.tensor(2.0, device=DEVICE, requires_grad=True)
    for factor in (1.0, 2.0, 3.0):
        meter.update(loss * factor)
    read = []
    no_reading.undo()
    no_reading.setattr(torch.Tensor, "item", lambda tensor: read.append(tensor) or tensor.tolist())
    assert meter.mean() == 4.0
    assert len(read) == 1
    assert not read[0].requires_grad
    assert meter.take() == 4.0
    assert math.isnan(meter.mean())


def test_known_values_of_the_meter():
    meter = cx.train.LossMeter()
    meter.update(torch.tensor([[1.0]], dtype=torch.bfloat16, device=DEVICE), weight=3)
    meter.update(5.0)
    assert meter.mean() == 2.0
    meter.reset()
    for _ in range(1000):
        meter.update(torch.tensor(0.1, device=DEVICE))
    assert meter.take() == pytest.approx(float(torch.tensor(0.1)), abs=1e-12)
    meter.update(torch.tensor(torch.nan, device=DEVICE))
    assert math.isnan(meter.take())
    meter.update(torch.tensor(1.5, device=DEVICE))
    assert meter.take() == 1.5


def test_meter_that_begins_in_inference_mode():
    meter = cx.train.LossMeter()
    with torch.inference_mode():
        meter.update(torch.tensor(1.0, device=DEVICE))
    meter.update(torch.tensor(2.0, device=DEVICE))
    with torch.inference_mode():
        inside = torch.tensor(6.0, device=DEVICE)
    meter.update(inside, weight=2)
    assert meter.take() == 3.75
    meter.update(torch.tensor(2.0, device=DEVICE))
    assert meter.take() == 2.0


def test_errors_of_the_meter():
    meter = cx.train.LossMeter()
    with pytest.raises(TypeError, match="weight must be a number, got Tensor"):
        meter.update(torch.tensor(1.0), torch.tensor(2.0))
    meter.update(1.0, weight=np.float32(2.0))
    assert type(meter.take()) is float
    with pytest.raises(ValueError, match=r"loss must have one element, got shape \(2,\)"):
        meter.update(torch.zeros(2))
    with pytest.raises(ValueError, match="weight must be >= 0 and finite, got -1"):
        meter.update(1.0, weight=-1)
    meter.update(torch.zeros((), device="cpu"))
    with pytest.raises(ValueError, match="loss must be on cpu as before, got meta"):
        meter.update(torch.zeros((), device="meta"))


@pytest.mark.parametrize(
    ("cpus", "processes", "device", "workers"),
    [
        (2, 1, "cpu", 0),
        (2, 1, "cuda", 1),
        (1, 1, "cuda", 1),
        (16, 1, "cpu", 4),
        (16, 1, "cuda", 8),
        (16, 4, "cuda", 3),
        (3, 4, "cpu", 0),
    ],
)
def test_loader_options_follow_the_machine(monkeypatch, cpus, processes, device, workers):
    monkeypatch.setattr(loader, "usable_cpus", lambda: cpus)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    options = cx.train.loader_options(device=device)
    assert options["num_workers"] == workers
    assert options["persistent_workers"] is (workers > 0)
    assert options["pin_memory"] is (device == "cuda")
    assert options.get("prefetch_factor") == (2 if workers else None)
    assert options.reasons.keys() == options.keys()
    assert f"num_workers={workers} (" in str(options) and "CPU" in str(options)


def test_loader_options_keep_what_is_asked(monkeypatch):
    monkeypatch.setattr(loader, "usable_cpus", lambda: 2)
    options = cx.train.loader_options(5, device="cpu", prefetch_factor=3)
    assert dict(options) == {"num_workers": 5, "persistent_workers": True, "prefetch_factor": 3, "pin_memory": False}
    assert options.reasons["num_workers"] == "as asked, though only 2 CPUs are there"
    assert cx.train.loader_options()["pin_memory"] is torch.cuda.is_available()
    data = TensorDataset(torch.arange(8.0))
    for asked in (0, 1):
        batches = DataLoader(data, 4, **cx.train.loader_options(asked, device="cpu"))
        assert torch.cat([batch for (batch,) in batches]).tolist() == list(range(8))


def test_loader_options_with_settings_of_the_users():
    options = cx.train.loader_options(0, device="cpu")
    options["batch_size"] = 32
    assert "batch_size=32 (as set)" in str(options) and "num_workers=0 (as asked)" in str(options)


def test_loader_options_and_local_world_size(monkeypatch):
    monkeypatch.setattr(loader, "usable_cpus", lambda: 16)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "")
    assert cx.train.loader_options(device="cpu")["num_workers"] == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "two")
    with pytest.raises(ValueError, match="LOCAL_WORLD_SIZE must be a number, got 'two'"):
        cx.train.loader_options(device="cpu")


def test_errors_of_loader_options():
    for wrong in (True, 2.0, "2"):
        with pytest.raises(TypeError, match=f"num_workers must be an int or None, got {wrong!r}"):
            cx.train.loader_options(wrong)
    with pytest.raises(TypeError, match=r"prefetch_factor must be an int or None, got 2\.0"):
        cx.train.loader_options(prefetch_factor=2.0)
    with pytest.raises(ValueError, match="num_workers must be >= 0, got -1"):
        cx.train.loader_options(-1)
    with pytest.raises(ValueError, match="prefetch_factor must be >= 1, got 0"):
        cx.train.loader_options(prefetch_factor=0)


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_containers_limits_count(monkeypatch, tmp_path):
    written = {"cpu.max": "150000 100000\n", "memory.max": f"{64 * MIB}\n", "memory.current": f"{24 * MIB}\n"}
    for name, text in written.items():
        write(tmp_path / name, text)
    monkeypatch.setattr(machine, "_cgroup", lambda controller="": tmp_path)
    assert machine.usable_cpus() == 1
    assert machine.free_memory(torch.device("cpu")) == 40 * MIB
    # files that were read are in memory.current, and make room when it is asked for
    write(tmp_path / "memory.stat", f"anon {12 * MIB}\ninactive_file {3 * MIB}\nactive_file {4 * MIB}\nshmem 4096\n")
    assert machine.free_memory(torch.device("cpu")) == 47 * MIB
    for name in ("cpu.max", "memory.max"):
        write(tmp_path / name, "max\n")
    assert machine.usable_cpus() >= 1
    assert machine.free_memory(torch.device("cpu")) > 40 * MIB


def test_quota_of_the_first_version_of_cgroups(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "_cgroup", lambda controller="": tmp_path / (controller or "nothing"))
    assert machine._quota() is None
    write(tmp_path / "cpu/cpu.cfs_quota_us", "-1\n")
    write(tmp_path / "cpu/cpu.cfs_period_us", "100000\n")
    assert machine._quota() is None
    write(tmp_path / "cpu/cpu.cfs_quota_us", "120000\n")
    assert machine._quota() == 1.2 and machine.usable_cpus() == 1


def test_folders_of_cgroups(monkeypatch, tmp_path):
    (tmp_path / "cpu/a/b").mkdir(parents=True)
    (tmp_path / "c").mkdir()
    text = "3:cpuset:/c\n2:cpu,cpuacct:/a/b\n1:memory:/not/shown\n0::/c\n"
    monkeypatch.setattr(machine, "CGROUPS", tmp_path)
    monkeypatch.setattr(machine, "_read", lambda path: text)
    assert machine._cgroup() == tmp_path / "c"
    assert machine._cgroup("cpu") == tmp_path / "cpu/a/b"
    assert machine._cgroup("memory") == tmp_path / "memory"


class Squares(nn.Module):
    """Keeps its input and one more tensor like it for the backward pass; draws numbers and moves a buffer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1000))
        self.register_buffer("calls", torch.zeros(()))
        self.frozen = nn.Dropout(0.5).eval()

    def forward(self, x):
        self.calls += 1
        torch.rand(3)
        return (x * self.weight).square()


def test_known_values_of_the_checkpointing_estimate():
    model = Squares().to(DEVICE)
    model.eval()
    sample = torch.randn(2, 1000, device=DEVICE, requires_grad=True)
    policy = cx.train.gradient_checkpointing_policy(8, model, sample, available_bytes=100 * MIB)
    gradient_and_adam = 3 * 4000
    # x for the product's gradient to weight, the product for the square's; weight itself is a parameter
    assert policy.needed_bytes == gradient_and_adam + 8 * 2 * 4000
    assert policy.available_bytes == 100 * MIB
    assert not policy and policy.enabled is False
    assert str(policy).startswith("gradient checkpointing off: batch 8 fits: about 0.00 GiB needed of 0.10 GiB free")
    assert not model.training and not model.frozen.training and model.calls == 0
    assert sample.grad is None and model.weight.grad is None
    torch.manual_seed(0)
    drawn = torch.rand(1)
    torch.manual_seed(0)
    cx.train.gradient_checkpointing_policy(8, model, sample)
    assert torch.equal(torch.rand(1), drawn)


def test_checkpointing_is_on_for_small_batches_and_for_short_memory():
    model, sample = Squares(), torch.randn(2, 1000)
    small = cx.train.gradient_checkpointing_policy(4, model, sample, available_bytes=100 * MIB)
    fits = int((0.8 * 100 * MIB - 12000) / 8000)
    assert small.enabled and f"batch 4 is below 8; {fits} would fit without checkpointing" in small.reason
    short = cx.train.gradient_checkpointing_policy(16, model, sample, available_bytes=100_000)
    assert short.enabled and "batch 16 does not fit without" in short.reason and "; 8 would" in short.reason
    assert not cx.train.gradient_checkpointing_policy(8, model, (sample,), available_bytes=100_000)
    assert cx.train.gradient_checkpointing_policy(8, model, (sample,), available_bytes=90_000)
    assert not cx.train.gradient_checkpointing_policy(4, model, sample, min_batch=4)
    assert cx.train.gradient_checkpointing_policy(7)
    unknown = cx.train.gradient_checkpointing_policy(8)
    assert not unknown and "memory was not estimated" in unknown.reason


def test_checkpointing_says_when_free_memory_is_unknown(monkeypatch):
    monkeypatch.setattr(checkpointing, "free_memory", lambda _: None)
    policy = cx.train.gradient_checkpointing_policy(8, Squares(), torch.randn(2, 1000))
    assert not policy and "free memory unknown" in policy.reason and policy.available_bytes is None


def test_errors_of_the_checkpointing_policy():
    with pytest.raises(ValueError, match="batch_size must be >= 1, got 0"):
        cx.train.gradient_checkpointing_policy(0)
    with pytest.raises(ValueError, match="model and sample together"):
        cx.train.gradient_checkpointing_policy(8, Squares())
    with pytest.raises(ValueError, match=r"sample must hold an image, got \(0, 1000\)"):
        cx.train.gradient_checkpointing_policy(8, Squares(), torch.randn(0, 1000))


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("batch_size", "8", TypeError),
        ("batch_size", True, TypeError),
        ("batch_size", 8.0, TypeError),
        ("min_batch", None, TypeError),
        ("min_batch", -1, ValueError),
        ("optimizer_states", math.nan, ValueError),
        ("available_bytes", "x", TypeError),
        ("available_bytes", math.inf, ValueError),
        ("model", 5, TypeError),
    ],
)
def test_errors_of_the_checkpointing_policy_name_the_argument(name, value, kind):
    arguments = {"batch_size": 8, "model": Squares(), "sample": torch.randn(2, 1000), name: value}
    with pytest.raises(kind, match=f"gradient_checkpointing_policy: {name} must be .*, got "):
        cx.train.gradient_checkpointing_policy(**arguments)


class Masked(nn.Module):
    """Multiplies by a buffer, which autograd keeps beside what belongs to the images."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.rand(500, 500))

    def forward(self, x):
        return x @ self.mask


@pytest.mark.parametrize("half", [False, True])
def test_checkpointing_estimate_grows_with_what_belongs_to_images(half):
    """Buffers are there already, and autocast makes one copy of a parameter for all images of a batch."""
    model = nn.Sequential(nn.Linear(40, 500), nn.Conv1d(1, 1, 1), Masked(), nn.MultiheadAttention(500, 5)).to(DEVICE)
    model.forward = lambda x: model[3](*[model[2](model[1](model[0](x)[:, None]))] * 3, need_weights=False)[0]
    needed = []
    with torch.autocast(torch.device(DEVICE).type, torch.bfloat16, enabled=half):
        for images in (2, 4):
            sample = torch.randn(images, 40, device=DEVICE)
            needed.append(cx.train.gradient_checkpointing_policy(1000, model, sample).needed_bytes)
    # of attention's small tensors some are as large for any batch
    assert needed[0] == pytest.approx(needed[1], rel=1e-2)


class Moving(nn.Module):
    """A mean that forward assigns again, a buffer that it fills at the first call, and one in a child."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("later", None)
        self.layer, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)

    def forward(self, x):
        self.mean = 0.9 * self.mean + x.mean(0)
        self.later = x.sum(0)
        return self.norm(self.layer(x))


def test_checkpointing_estimate_restores_buffers_that_forward_assigns():
    model = Moving()
    before = dict(model.named_buffers())
    values = {name: buffer.clone() for name, buffer in before.items()}
    cx.train.gradient_checkpointing_policy(8, model, torch.ones(2, 3))
    after = dict(model.named_buffers())
    assert after.keys() == before.keys() and model.later is None
    assert all(after[name] is before[name] and torch.equal(after[name], values[name]) for name in before)


def test_checkpointing_estimate_in_inference_mode():
    net = nn.Sequential(nn.Linear(3, 300), nn.ReLU(), nn.Linear(300, 3))
    expected = cx.train.gradient_checkpointing_policy(800, net, torch.randn(2, 3)).needed_bytes
    with torch.inference_mode():
        assert cx.train.gradient_checkpointing_policy(800, net, torch.randn(2, 3)).needed_bytes == expected


def test_checkpointing_estimate_frees_what_it_counted():
    """Also outputs that their own node keeps, as ReLU's does."""
    made = []
    net = nn.Sequential(nn.Linear(3, 300), nn.ReLU())
    net.register_forward_hook(lambda module, args, output: made.append(weakref.ref(output)))
    cx.train.gradient_checkpointing_policy(8, net, torch.randn(2, 3))
    assert [reference() for reference in made] == [None]


@pytest.mark.parametrize("sample", [[torch.ones(2, 1000)], (), (3.0,), torch.ones(())])
def test_errors_of_samples(sample):
    with pytest.raises(TypeError, match="sample must be a tensor with a batch dimension, or a tuple"):
        cx.train.gradient_checkpointing_policy(8, Squares(), sample)


def test_a_failed_estimate_leaves_the_model_as_it_was():
    model = Squares().eval()
    with pytest.raises(RuntimeError):
        cx.train.gradient_checkpointing_policy(8, model, torch.randn(2, 7))
    assert not model.training and model.calls == 0


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_in_a_log_is_one_line_an_update(monkeypatch, capsys):
    monkeypatch.setattr(progress, "gpu_utilisation", lambda: None)
    with cx.train.ProgressBar(10, "epoch 1/2") as bar:
        bar.update(5, 40, loss=1.25)
    first = capsys.readouterr().err
    assert first.startswith("epoch 1/2 5/10  loss=1.2500  ") and first.endswith(" images/s\n")
    monkeypatch.setattr(progress, "gpu_utilisation", lambda: 87)
    bar.update(6, loss=torch.tensor(1.0))
    assert capsys.readouterr().err == "epoch 1/2 6/10  loss=1.0000  gpu=87%\n"


def test_progress_on_a_terminal_redraws_one_line(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "gpu_utilisation", lambda: None)
    stream = Terminal()
    with cx.train.ProgressBar(4, "t", stream=stream, interval=1000) as bar:
        for step in range(1, 5):
            bar.update(step)
    assert stream.getvalue() == "\r\033[Kt [#####...............] 1/4\r\033[Kt [####################] 4/4\n"
    with pytest.raises(ValueError, match="total must be >= 0, got -1"):
        cx.train.ProgressBar(-1)


def test_progress_on_a_narrow_terminal(monkeypatch):
    """A line that is longer than a row would be continued in the next, and stay there when the next one is drawn."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "gpu_utilisation", lambda: None)
    monkeypatch.setattr(progress.os, "get_terminal_size", lambda _: os.terminal_size((30, 24)))
    stream = Terminal()
    monkeypatch.setattr(stream, "fileno", lambda: 2)
    cx.train.ProgressBar(4, "t", stream=stream).update(2, loss=1.0)
    assert stream.getvalue() == "\r\033[Kt [##########..........] 2/4 "
    monkeypatch.setattr(progress.os, "get_terminal_size", lambda _: os.terminal_size((0, 0)))
    cx.train.ProgressBar(4, "t", stream=stream).update(2, loss=1.0)
    assert stream.getvalue().endswith("loss=1.0000")


def test_progress_on_a_dumb_terminal_and_without_one(monkeypatch):
    monkeypatch.setattr(progress, "gpu_utilisation", lambda: None)
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    with cx.train.ProgressBar(4, "t", stream=stream) as bar:
        bar.update(1)
    assert stream.getvalue() == "t 1/4\n"
    monkeypatch.setattr(sys, "stderr", None)  # as in `python train.py 2>&-`
    with cx.train.ProgressBar(4) as bar:
        bar.update(1, 3, loss=1.0)


@pytest.mark.parametrize("total", [None, "5", 2.5, True])
def test_errors_of_the_progress_bar(total):
    with pytest.raises(TypeError, match="ProgressBar: total must be an int, got "):
        cx.train.ProgressBar(total)


class Driver:
    """Takes the place of the NVIDIA driver's library."""

    def __init__(self, status=0):
        self.status, self.asked = status, None

    def nvmlDeviceGetHandleByUUID(self, name, _):
        self.asked = name
        return self.status

    def nvmlDeviceGetUtilizationRates(self, _, rates):
        rates._obj.gpu = 87
        return 0


@pytest.mark.parametrize(("status", "expected"), [(0, 87), (6, None)])
def test_gpu_utilisation_without_bindings(monkeypatch, status, expected):
    driver = Driver(status)
    properties = type("Properties", (), {"uuid": "1234-5678"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "utilization", lambda: (_ for _ in ()).throw(ModuleNotFoundError("pynvml")))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(progress, "_nvml", lambda: driver)
    assert progress.gpu_utilisation() == expected
    assert driver.asked == b"GPU-1234-5678"
    monkeypatch.setattr(progress, "_nvml", lambda: None)
    assert progress.gpu_utilisation() is None


def test_gpu_utilisation_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert progress.gpu_utilisation() is None
