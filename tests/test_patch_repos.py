"""benchmarks/patch_repos.py on a made-up clone: from a folder to the JSON and the table."""

import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from benchmarks import patch_models, patch_repos  # noqa: E402

MODEL = """
import torch
from torch import nn
import not_installed_anywhere


class Norm(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x):
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        return (x - u) / torch.sqrt(s + 1e-6) * self.weight[:, None, None] + self.bias[:, None, None]


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 16, 3), Norm(16), nn.Dropout(0.2), nn.Conv2d(16, 3, 3))
"""


def made_up(root):
    model = patch_models.load(root, "net.py").Net()
    batch = (patch_models._noise(2, 3, 24, 24), patch_models._noise(2, 3, 20, 20))
    return patch_models.Trial(model, batch, patch_models._to_target)


@pytest.fixture
def entry(tmp_path, monkeypatch):
    folder = tmp_path / "clones" / "made-up"
    folder.mkdir(parents=True)
    (folder / "net.py").write_text(MODEL)
    monkeypatch.setattr(sys, "path", list(sys.path))
    names = ("not_installed_anywhere", "the_model")
    yield patch_models.Entry("made up", "nobody/made-up", "0" * 40, made_up, stubs=names[:1])
    for name in names:
        sys.modules.pop(name, None)


def test_an_entry_from_clone_to_table(entry, tmp_path):
    threads = torch.get_num_threads()
    try:
        row = patch_repos.measure(entry, tmp_path / "clones", 0.05, threads, steps=3)
    finally:
        torch.set_num_threads(threads)
    row = json.loads(json.dumps({"name": entry.name, "repository": entry.repository, "commit": entry.commit, **row}))
    assert row["patched"] == {"dropout": 1, "layer_norm2d": 1}
    assert row["left_alone"] == {}
    assert sum(row["calls"].values()) >= 4  # two ops, forward and backward
    assert row["numbers"]["steps"] == 3
    assert row["numbers"]["gradient"]["between"] < 1e-5
    assert row["step"]["pairs"] >= 3 and row["step"]["tuned_ratio"] > 0
    assert 0 < row["peak"]["camox"] <= row["peak"]["torch"]
    assert patch_repos.wrong(row) == ""
    assert "| 1 dropout, 1 layer_norm2d | - |" in patch_repos.table([row])
    row["asked"], row["step"]["tuned_ratio"] = 2.0, 1.5
    assert patch_repos.shortfalls(row) == ["a step with tune_cpu 1.50x as fast, asked 2.00x"]
    row["numbers"]["gradient"]["camox"] = 1e-3
    assert patch_repos.wrong(row).startswith("gradients differ by 1.0e-03")


def test_the_page_gets_the_table_of_the_record(tmp_path, monkeypatch):
    page, record = tmp_path / "patch.md", tmp_path / "machine.json"
    page.write_text(f"before\n{patch_repos.BEGIN}old\n{patch_repos.END}after\n")
    failed = {"name": "made up", "repository": "nobody/made-up", "commit": "0" * 40, "error": "no clone in made-up"}
    record.write_text(json.dumps({"entries": [failed]}))
    monkeypatch.setattr(patch_repos, "PAGE", page)
    assert patch_repos.main(["--docs", "--out", str(record)]) == 0
    text = page.read_text()
    assert "| made up | nobody/made-up @ 0000000 |  | not run: no clone in made-up |" in text
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert patch_repos.wrong(failed) == "no clone in made-up"


def test_a_folder_without_the_clone_is_reported(tmp_path, capsys):
    out = tmp_path / "machine.json"
    assert patch_repos.main([str(tmp_path), "--only", "nanoGPT", "--seconds", "0", "--out", str(out)]) == 1
    assert "not run: no clone in nanoGPT" in capsys.readouterr().out
    assert json.loads(out.read_text())["entries"][0]["error"] == "no clone in nanoGPT"


def test_names_of_entries_are_their_own():
    names = [entry.name for entry in patch_models.ENTRIES]
    assert len(names) == len(set(names)) >= 20
