"""Texts as bytes, and the windows of a step."""

from dataclasses import dataclass

import numpy as np
import torch

from ..common.documents import LARGEST_DOCUMENT, DataError, held_out_split, texts
from ..common.text import windows

__all__ = ["KINDS", "Corpus", "DataError", "build_corpus", "draw_batch", "kind_of_bytes", "texts"]

HELD_OUT_SEED = 1
KINDS = ("lower case", "upper case", "digit", "space", "line break", "quote, bracket", "other sign", "not ASCII")
QUOTES_AND_BRACKETS = b"\"'`()[]{}<>"


@dataclass
class Corpus:
    """training (bytes,) uint8, all domains after one another; held_out: {domain: (bytes,) uint8}."""

    training: torch.Tensor
    held_out: dict

    def to(self, device):
        return Corpus(self.training.to(device), {name: text.to(device) for name, text in self.held_out.items()})


def as_bytes(documents):
    joined = b"\n".join(documents)
    return torch.from_numpy(np.frombuffer(joined, np.uint8).copy())


def build_corpus(documents, length):
    """Corpus of {domain: documents}; every tenth document, or the last tenth of a single one, is held out.

    DataError where a domain has too little text for windows of `length` bytes.
    """
    training, held_out = [], {}
    for domain, found in documents.items():
        parts = held_out_split(text[:LARGEST_DOCUMENT].encode() for text in found)
        first, last = map(as_bytes, parts)
        for part in (first, last):
            if len(part) <= length:
                raise DataError(
                    f"domain {domain!r} has a part of {len(part)} bytes, too few for a text of {length} and a target"
                )
        training.append(first)
        held_out[domain] = last
    return Corpus(torch.cat(training), held_out)


def draw_batch(corpus, config, step):
    """(inputs, targets), each (batch_size, length), drawn from seed and step alone: every rank draws the same."""
    seed = int(np.random.SeedSequence([config.seed, step]).generate_state(1, np.uint64)[0]) >> 1
    return windows(corpus.training, config.length, config.batch_size, torch.Generator().manual_seed(seed))


def held_out_batch(text, length, count):
    """(inputs, targets) of a held-out text, the same at every call."""
    return windows(text, length, count, torch.Generator().manual_seed(HELD_OUT_SEED))


def kind_of_bytes():
    """(256,) int64: for each byte its index in KINDS."""
    kinds = torch.full((256,), KINDS.index("other sign"))
    kinds[128:] = KINDS.index("not ASCII")
    for kind, members in (
        ("lower case", range(ord("a"), ord("z") + 1)),
        ("upper case", range(ord("A"), ord("Z") + 1)),
        ("digit", range(ord("0"), ord("9") + 1)),
        ("space", b" \t"),
        ("line break", b"\r\n"),
        ("quote, bracket", QUOTES_AND_BRACKETS),
    ):
        kinds[list(members)] = KINDS.index(kind)
    return kinds
