"""Counts over the files for a report: documents by length, and how often each id occurs.

Lengths are counted from the whole .idx. Ids are counted in the whole .bin, or in blocks drawn without replacement from
a generator seeded with the corpus' id, so that a corpus' numbers do not depend on the other corpora of its blend. What
is unusual: ids below 2^22, far beyond any vocabulary, are counted one by one in one array; ids outside it are counted
together. Slow twin: tests/reference/report_counts.py. Nothing is drawn or written here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mdata.corpus.adopt import document_lengths
from mdata.corpus.corpus import Corpus
from mdata.indexed.reader import IndexedReader
from mdata.util.arrays import Int64s, locate, offsets_of

BLOCK = 1 << 14  # tokens that are read in one place
LARGEST = 1 << 22  # ids below it are counted one by one
_AT_ONCE = 64  # blocks that are counted together
_CLASSES = 65


@dataclass(frozen=True, eq=False)
class Lengths:
    """Documents by length, and their tokens: [0] without tokens, [k] of 2^(k-1) to 2^k - 1 tokens."""

    documents: list[int]
    tokens: list[int]


@dataclass(frozen=True, eq=False)
class Counts:
    """How often each id occurs in the counted tokens.

    Args:
        ids: int64[largest id + 1]. counted: number of tokens. outside: how many of them have an id that `ids` cannot
            hold.
    """

    ids: Int64s
    counted: int
    outside: int


def count_lengths(corpus: Corpus) -> Lengths:
    """Documents and tokens by length, over all shards.

    Raises:
        DamageError: a table of an .idx is inconsistent.
    """
    documents, tokens = np.zeros(_CLASSES, np.int64), np.zeros(_CLASSES, np.int64)
    for reader in corpus.readers:
        for lengths in document_lengths(reader.lengths, reader.boundaries):
            classes = np.frexp(lengths.astype(np.float64))[1]
            documents += np.bincount(classes, minlength=_CLASSES)
            # Sums of integers below 2^53 are exact in floating point too.
            tokens += np.bincount(classes, weights=lengths, minlength=_CLASSES).astype(np.int64)
    last = int(np.flatnonzero(documents).max(initial=-1)) + 1
    return Lengths(documents[:last].tolist(), tokens[:last].tolist())


def count_ids(corpus: Corpus, budget: int | None) -> Counts:
    """Count the ids of a corpus.

    Args:
        corpus: opened with maps.
        budget: about how many tokens to count; None: all.
    """
    offsets = offsets_of(-(-reader.num_tokens // BLOCK) for reader in corpus.readers)
    ids, counted, outside = np.zeros(0, np.int64), 0, 0
    chosen = _chosen(offsets[-1], budget, corpus.id)
    for at in range(0, len(chosen), _AT_ONCE):
        tokens = np.concatenate(list(_blocks(corpus.readers, offsets, chosen[at : at + _AT_ONCE])))
        inside = tokens[(tokens >= 0) & (tokens < LARGEST)]
        counts = np.bincount(inside, minlength=len(ids))
        counts[: len(ids)] += ids
        ids, counted, outside = counts, counted + len(tokens), outside + len(tokens) - len(inside)
    return Counts(ids, counted, outside)


def _chosen(num_blocks: int, budget: int | None, corpus_id: str) -> Int64s:
    """The numbers of the blocks that are read, in order."""
    most = num_blocks if budget is None else -(-budget // BLOCK)
    if most >= num_blocks:
        return np.arange(num_blocks)
    generator = np.random.Generator(np.random.PCG64(int(corpus_id[:16], 16)))
    return np.sort(generator.choice(num_blocks, most, replace=False))


def _blocks(readers: tuple[IndexedReader, ...], offsets: list[int], chosen: Int64s) -> Iterator[NDArray[np.integer]]:
    """The tokens of the blocks, numbered over all shards; also works for shards whose sequences are in any order."""
    for number in chosen.tolist():
        shard, inside = locate(offsets, number)
        reader = readers[shard]
        assert reader.data is not None, f"{reader.bin_path} was opened without a map"
        yield reader.data.view(reader.dtype)[inside * BLOCK : (inside + 1) * BLOCK]
