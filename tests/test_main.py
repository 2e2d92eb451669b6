"""python -m camox_ops info | check | bench."""

import os
import sys

import pytest
import torch

import camox_ops as cx
from camox_ops import __main__ as command
from camox_ops import _cuda, _run, _selftest


def test_info_names_what_runs_here(capsys):
    assert command.main(["info"]) == 0
    rows = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert rows["camox_ops"] == cx.__version__
    assert rows["kernels"].startswith(cx.isa())
    assert torch.__version__ in rows["runs"]
    assert rows["CUDA"] == _cuda.status()
    assert {"file", "built", "CPU", "threads", "allocator"} <= rows.keys()


def test_check_passes_on_this_machine(capsys):
    assert command.main(["check"]) == 0
    lines = capsys.readouterr().out.splitlines()
    dtypes = len(_selftest.DTYPES) * len(_selftest.devices()) - ("cuda" in _selftest.devices())
    expected = len(_selftest.OPS) * dtypes * len(_selftest.LAYOUTS) * 2
    assert lines[-1] == f"{expected} passed, 0 failed on {cx.isa()}"
    assert len(lines) == expected + 2


@pytest.mark.parametrize("wrong", [1e-3, float("nan")])
def test_check_fails_on_a_wrong_op(monkeypatch, capsys, wrong):
    op = _selftest.OPS[0]

    def broken(x):
        first, *others = op.ours(x)
        return first + wrong, *others

    monkeypatch.setattr(_selftest, "OPS", (op._replace(ours=broken),))
    assert command.main(["check"]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if "float32" in line and "forward" in line]
    assert lines
    assert all(line.endswith("WRONG") for line in lines)


def test_bench_lists_every_op(monkeypatch, capsys):
    monkeypatch.setattr(_selftest, "BENCH_SHAPE", (1, 3, 9, 9))
    settings = cx.train.AllocatorReport(False, {}, "left alone by this test")
    monkeypatch.setattr(command.train, "tune_cpu_allocator", lambda: settings)
    assert command.main(["bench"]) == 0
    text = capsys.readouterr().out
    for op in _selftest.OPS:
        assert f"{op.name} " in text
    assert text.count("forward+backward") == len(_selftest.OPS)


def test_help_without_docstrings(monkeypatch, capsys):
    """As under `python -OO`."""
    for module in (command, _run):
        monkeypatch.setattr(module, "__doc__", None)
    for arguments, line in ((["--help"], "patch-report  what"), (["run", "--help"], "An unedited script")):
        with pytest.raises(SystemExit) as stopped:
            command.main(arguments)
        assert stopped.value.code == 0
        assert line in capsys.readouterr().out


def test_errors_of_an_unknown_command(capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(["nonsense"])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert "nonsense" in said and "patch-report" in said


def test_a_reader_that_has_ended(monkeypatch):
    """As in `python -m camox_ops info | head -1`."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert command.main(["info"]) == 1
        print("what is left goes nowhere", flush=True)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_full_disk(monkeypatch, capsys):
    """As in `python -m camox_ops info >/dev/full`."""
    for arguments in (["info"], ["patch-report", "torch.nn:ReLU"]):
        with open("/dev/full", "w") as out:
            monkeypatch.setattr(sys, "stdout", out)
            assert command.main(arguments) == 1
        message = "python -m camox_ops: can't write the output: No space left on device"
        assert capsys.readouterr().err.strip() == message


def test_errors_of_a_model_are_its_own(tmp_path, monkeypatch):
    (tmp_path / "model_of_a_file.py").write_text("def model(): return open('nothing')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(FileNotFoundError):
        command.main(["patch-report", "model_of_a_file:model"])


def test_closed_output(monkeypatch):
    """As in `python -m camox_ops info >&-`."""
    monkeypatch.setattr(sys, "stdout", None)
    assert command.main(["info"]) == 0
