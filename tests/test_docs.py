"""The checks of the documentation and of the layout find what they are for."""

import re
import sys
from pathlib import Path

import pytest

import camox_ops as cx

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
    blocks = f"{FENCE}python\nx = 1\n{FENCE}\n\n{FENCE}python\nassert x == 1\n{FENCE}\n"
    text = f"`make test`\n\n{blocks}## A `page`'s part\n[self](page.md) [part](#a-pages-part)\n"
    assert document(text) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("run `make nonsense` now", "there is no `make nonsense`"),
        (f"{FENCE}sh\ncd x && make demos\n{FENCE}", "there is no `make demos`"),
        ("see [that](missing.md#part)", "link to missing.md"),
        ("see [that](page.md#part)", "link to page.md#part: no such heading"),
        ('<img src="missing.svg">', "link to missing.svg"),
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


@pytest.mark.parametrize(
    "line",
    [
        "int wa" + "lk = 0;",
        "x_ahe" + "ad = 1",
        "/* two pict" + "ures */",
        "def of_str" + "ips(x):",
        "# built ane" + "w",
    ],
)
def test_layout_finds_replaced_words(tmp_path, monkeypatch, line):
    """In the folders that PLAIN_WORDS names, and in no other."""
    monkeypatch.setattr(check_layout, "ROOT", tmp_path)
    monkeypatch.setattr(check_layout, "PLAIN_WORDS", ("clean/*.py",))
    (tmp_path / "clean").mkdir()
    for name in ("clean/file.py", "file.py"):
        (tmp_path / name).write_text(f"import os\n{line}\n")
    (found,) = check_layout.faults_of(tmp_path / "clean/file.py")
    assert found.startswith("clean/file.py:2: ") and found.endswith("see Vocabulary in CONTRIBUTING.md")
    assert check_layout.faults_of(tmp_path / "file.py") == []


def test_layout_allows_words_that_only_look_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(check_layout, "ROOT", tmp_path)
    monkeypatch.setattr(check_layout, "PLAIN_WORDS", ("*.py",))
    path = tmp_path / "file.py"
    path.write_text(
        "for x in os.walk(text.strip()): x.rstrip(), map(str.strip, x)  # right, compiled ahead, <picture>\n"
    )
    assert check_layout.faults_of(path) == []


def test_the_status_line_of_the_readme_is_true():
    """What it says of version, Python, PyTorch and GPU architectures is what the build files say."""
    readme = (ROOT / "README.md").read_text()
    status = " ".join(line[1:] for line in readme.splitlines() if line.startswith(">"))
    project = (ROOT / "pyproject.toml").read_text()
    setup = (ROOT / "setup.py").read_text()
    architectures = re.search(r"ALL_CUDA_ARCHS = \((.*?)\)", setup, re.DOTALL).group(1)
    wanted = [
        f"**Version** {re.search('^version = .(.*).$', project, re.MULTILINE).group(1)}",
        f"PyTorch {re.search('torch>=([0-9.]+)', project).group(1)} and newer",
        f"Python {re.search('requires-python = .>=([0-9.]+)', project).group(1)} and newer",
        f"compiled for {', '.join(re.findall('sm_[0-9a-z]+', architectures))} and PTX",
    ]
    for words in wanted:
        assert words in " ".join(status.split()), words


def test_every_public_function_and_module_is_on_a_page():
    pages = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    names = [name for name in cx.__all__ if name not in ("nn", "train", "reference")]
    missing = [name for name in names + cx.nn.__all__ + cx.train.__all__ if not re.search(rf"`[^`]*\b{name}\b", pages)]
    assert not missing
