"""Texts by domain: what every machine with Python has, or a folder; as words of one vocabulary."""

import importlib.metadata
import re
import sysconfig
from collections import Counter
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import torch

SPECIAL = ("<PAD>", "<UNK>", "<BOS>", "<EOS>")  # as in the public code
UNKNOWN = SPECIAL.index("<UNK>")
WORD = re.compile(r"\w+|[^\w\s]")
HELD_OUT_EVERY = 10
LARGEST_DOCUMENT = 200_000  # characters; of longer ones the beginning
LICENCE = re.compile(r"(licen[cs]e|copying|notice)", re.IGNORECASE)
FEWEST_WORDS = 1000  # per domain


class DataError(ValueError):
    """Text that cannot be trained on; the message names folder or domain."""


@dataclass
class Corpus:
    """words: the vocabulary, by index; training, held_out: {domain: indices, int64}."""

    words: list
    training: dict
    held_out: dict

    @property
    def domains(self):
        return list(self.training)

    def to(self, device):
        training, held_out = (
            {name: text.to(device) for name, text in part.items()} for part in (self.training, self.held_out)
        )
        return Corpus(self.words, training, held_out)


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
            path = file.locate()
            if LICENCE.match(file.name) and path.suffix in ("", ".txt", ".md", ".rst") and path.is_file():
                text = read(path)
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


def split_words(text):
    """Lower-case words and single signs."""
    return WORD.findall(text[:LARGEST_DOCUMENT].lower())


def build_corpus(documents, vocab_size, words=None):
    """Corpus of {domain: documents}; every tenth document, or the last tenth of a single one, is held out.

    words: the vocabulary of a checkpoint; None: the vocab_size most frequent words of the training texts.
    """
    split = {}
    for domain, found in documents.items():
        parts = [split_words(text) for text in found]
        if len(parts) == 1:
            cut = len(parts[0]) - len(parts[0]) // HELD_OUT_EVERY
            parts = [parts[0][cut:], parts[0][:cut]]
        held_out = list(chain.from_iterable(parts[::HELD_OUT_EVERY]))
        training = list(chain.from_iterable(part for number, part in enumerate(parts) if number % HELD_OUT_EVERY))
        count = len(training) + len(held_out)
        if count < FEWEST_WORDS:
            raise DataError(f"domain {domain!r} has {count} words, fewer than {FEWEST_WORDS}")
        split[domain] = training, held_out
    if words is None:
        counts = Counter(chain.from_iterable(training for training, _ in split.values()))
        ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        words = [*SPECIAL, *(word for word, _ in ordered[: vocab_size - len(SPECIAL)])]
    index = {word: number for number, word in enumerate(words)}

    def encode(part):
        return torch.from_numpy(np.fromiter((index.get(word, UNKNOWN) for word in part), np.int64, len(part)))

    training, held_out = ({domain: encode(parts[side]) for domain, parts in split.items()} for side in (0, 1))
    return Corpus(words, training, held_out)


def check_corpus(corpus, vocab_size, length):
    """DataError where a domain is too short for one window, or a word is no target of the head."""
    for part in (corpus.training, corpus.held_out):
        for domain, text in part.items():
            if len(text) <= length:
                raise DataError(
                    f"domain {domain!r} has a part of {len(text)} words, too few for a text of {length} and a target"
                )
            outside = ((text < 0) | (text >= vocab_size)).nonzero()
            if len(outside):
                place = int(outside[0])
                raise DataError(
                    f"domain {domain!r}: target {int(text[place])} at word {place} "
                    f"is outside the vocabulary of {vocab_size}"
                )
