"""The checks of the documentation and of the layout find what they are for."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "scripts"))

import check_docs  # noqa: E402
import check_layout  # noqa: E402

FENCE = "```"


@pytest.fixture
def document(tmp_path, monkeypatch):
    monkeypatch.setattr(check_docs, "ROOT", tmp_path)

    def faults(text):
        path = tmp_path / "page.md"
        path.write_text(text)
        return check_docs.faults_of(path, {"test", "demo"})

    return faults


def test_docs_that_are_right(document):
    text = f"`make test`\n\n{FENCE}python\nx = 1\n{FENCE}\n\n{FENCE}python\nassert x == 1\n{FENCE}\n[self](page.md)\n"
    assert document(text) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("run `make nonsense` now", "there is no `make nonsense`"),
        (f"{FENCE}sh\ncd x && make demos\n{FENCE}", "there is no `make demos`"),
        ("see [that](missing.md#part)", "link to missing.md"),
        (f"one\n{FENCE}python\n1 / 0\n{FENCE}", 'File "page.md", line 3'),
    ],
)
def test_docs_that_are_wrong(document, text, fault):
    (found,) = document(text)
    assert fault in found


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("see https:/" + "/example.org/x", "host example.org"),
        ("path = '/ho" + "me/someone/x'", "path of one machine"),
        ("# TO" + "DO later", "left open"),
    ],
)
def test_layout_finds(tmp_path, monkeypatch, line, fault):
    monkeypatch.setattr(check_layout, "ROOT", tmp_path)
    path = tmp_path / "file.py"
    path.write_text(f"import os\n{line}\n")
    (found,) = check_layout.faults_of(path)
    assert found.startswith("file.py:2: ")
    assert fault in found


def test_layout_allows_what_is_used(tmp_path, monkeypatch):
    monkeypatch.setattr(check_layout, "ROOT", tmp_path)
    path = tmp_path / "file.py"
    path.write_text("# https://github.com/a/b, $HOME/work/x, build/work/y, https://semver.org/home/x\n")
    assert check_layout.faults_of(path) == []
