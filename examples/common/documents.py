"""Texts by domain: what every machine with Python has, or a folder."""

import importlib.metadata
import re
import sysconfig
from pathlib import Path

HELD_OUT_EVERY = 10
LARGEST_DOCUMENT = 200_000  # characters; of longer ones the beginning
LICENCE = re.compile(r"(licen[cs]e|copying|notice)", re.IGNORECASE)


class DataError(ValueError):
    """Text that cannot be trained on; the message names folder or domain."""


def read(path):
    """A file's text, "" where it is none."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error}") from error
    return "" if b"\0" in content else content.decode(errors="replace")


def python_sources(limit):
    """Modules of Python's library."""
    return [read(path) for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:limit]]


def documentation(limit):
    """Python's language reference, as help() shows it."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise DataError("this Python has no pydoc_data, its documentation; give a folder with --data") from None
    return [topics[name] for name in sorted(topics)]


def licences(limit):
    """Licences of the installed distributions, each text once."""
    found = {}
    for distribution in importlib.metadata.distributions():
        for file in distribution.files or ():
            if LICENCE.match(file.name) and file.suffix in ("", ".txt", ".md", ".rst") and file.locate().is_file():
                text = read(file.locate())
                found.setdefault(text[:300], (str(file), text))
    return [text for _, text in sorted(found.values())]


FOUND = {"python": python_sources, "documentation": documentation, "licences": licences}


def folder_texts(folder):
    """{domain: documents} of a folder: every subfolder is a domain, and every file directly in it."""
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"folder {folder} does not exist")
    found = {}
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
        texts = [text for text in map(read, files) if text.strip()]
        if texts:
            found[path.name if path.is_dir() else path.stem] = texts
    if not found:
        raise DataError(f"folder {folder} has no text")
    return found


def texts(folder=None, limit=80):
    """{domain: documents}; None: those of FOUND, `limit` modules of Python's at most."""
    if folder is not None:
        return folder_texts(folder)
    return {name: find(limit) for name, find in FOUND.items()}


def held_out_split(documents):
    """(training documents, held-out ones) of a domain: every tenth, or the last tenth of a single one, is held out.

    documents: anything that can be sliced, such as lists of words.
    """
    parts = list(documents)
    if len(parts) == 1:
        cut = len(parts[0]) - len(parts[0]) // HELD_OUT_EVERY
        parts = [parts[0][cut:], parts[0][:cut]]
    training = [part for number, part in enumerate(parts) if number % HELD_OUT_EVERY]
    return training, parts[::HELD_OUT_EVERY]
