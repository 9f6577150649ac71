"""Lengths of BERT's and T5's rows on real text: documents and sentences are as long as those of a corpus.

    python benchmarks/text_lengths.py CORPUS.idx        # the lengths of a corpus of sentences, as they stand below

Those of `MANUALS` are of 3,394 English manual pages: all of a Debian 12 (sections 1 to 8, without the 16,631 pages of
gcloud, which repeat each other), written by `groff -mandoc -Tutf8 -rLL=400n -rHY=0` without empty lines, and
`mdata preprocess --split-sentences` with the vocabulary of bert-base-uncased: 7,044,431 tokens in 211,902 sentences.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mdata.indexed.index_tables import read_tables

PARTS = 40
SHORT_ROWS = 0.1  # the share of rows with a shorter target, as in Megatron


class TextLengths(NamedTuple):
    """Tokens of documents and of sentences: the mean of each fortieth of them, the shortest first."""

    documents: tuple[int, ...]
    sentences: tuple[int, ...]


MANUALS = TextLengths(
    documents=(
        135, 191, 229, 258, 281, 306, 329, 354, 380, 407, 433, 464, 499, 528, 559, 589, 628, 680, 723, 770, 825,
        886, 942, 1010, 1088, 1182, 1286, 1386, 1498, 1620, 1777, 1981, 2248, 2684, 3076, 3632, 4414, 5794,
        8513, 28932,
    ),
    sentences=(
        4, 7, 9, 10, 11, 12, 12, 13, 14, 15, 15, 16, 17, 18, 18, 19, 20, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29,
        30, 32, 33, 35, 37, 40, 42, 46, 50, 57, 69, 95, 288,
    ),
)  # fmt: skip


def corpus_lengths(index: Path) -> TextLengths:
    """The lengths of the .idx of a corpus of sentences; documents and sentences without tokens do not count."""
    tables = read_tables(index)
    before = np.concatenate([[0], np.cumsum(tables.lengths, dtype=np.int64)])
    return TextLengths(_means(np.diff(before[tables.boundaries])), _means(tables.lengths))


def _means(lengths: npt.NDArray[np.integer]) -> tuple[int, ...]:
    lengths = np.sort(lengths[lengths > 0])
    return tuple(round(float(part.mean())) for part in np.array_split(lengths, min(PARTS, len(lengths))))


def row_lengths(generator: np.random.Generator, length: int, text: TextLengths = MANUALS) -> Iterator[int]:
    """Tokens of the rows that documents give, without end: whole sentences up to a target, at most `length`."""
    while True:
        left = int(generator.choice(text.documents))
        row, target = 0, _target(generator, length)
        while left > 0:
            sentence = min(left, int(generator.choice(text.sentences)))
            row, left = row + sentence, left - sentence
            if row >= target or left == 0:
                yield min(row, length)
                row, target = 0, _target(generator, length)


def _target(generator: np.random.Generator, length: int) -> int:
    return length if generator.random() > SHORT_ROWS else int(generator.integers(8, length + 1))


if __name__ == "__main__":
    print(corpus_lengths(Path(sys.argv[1])))
