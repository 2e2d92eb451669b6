"""Texts by domain as words of one vocabulary."""

import re
from collections import Counter
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from ..common.documents import LARGEST_DOCUMENT, DataError, held_out_split, texts

__all__ = ["Corpus", "DataError", "build_corpus", "check_corpus", "texts"]

SPECIAL = ("<PAD>", "<UNK>", "<BOS>", "<EOS>")  # as in the public code
UNKNOWN = SPECIAL.index("<UNK>")
WORD = re.compile(r"\w+|[^\w\s]")
FEWEST_WORDS = 1000  # per domain


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


def split_words(text):
    """Lower-case words and single signs."""
    return WORD.findall(text[:LARGEST_DOCUMENT].lower())


def build_corpus(documents, vocab_size, words=None):
    """Corpus of {domain: documents}; every tenth document, or the last tenth of a single one, is held out.

    words: the vocabulary of a checkpoint; None: the vocab_size most frequent words of the training texts.
    """
    split = {}
    for domain, found in documents.items():
        training, held_out = (list(chain.from_iterable(parts)) for parts in held_out_split(map(split_words, found)))
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
