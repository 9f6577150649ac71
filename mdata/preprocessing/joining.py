"""Joins corpora into one: whole documents are copied in bounded runs, with their origins, and the counts are added.

A merge copies the tokens through the usual writer, which hashes and checks them; an interrupted merge starts over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mdata.corpus.corpus import open_corpus
from mdata.corpus.origins import open_origins
from mdata.errors import os_errors_named
from mdata.indexed.pair_format import bin_path
from mdata.indexed.reader import IndexedReader
from mdata.manifest.types import Statistics
from mdata.preprocessing.corpus_writer import CorpusWriter, origins_path

_DOCUMENTS_AT_ONCE = 1 << 16
_TOKENS_AT_ONCE = 1 << 22


def merge_partitions(prefixes: Sequence[Path], writer: CorpusWriter) -> None:
    """Append the pairs with these prefixes, and their origins, to a new corpus.

    Raises:
        DamageError: a pair differs from what was written. ResourceError: the disk is full.
    """
    for prefix in prefixes:
        (reader,) = open_corpus(prefix).readers
        for tokens, lengths, document_ends in document_runs(prefix, reader):
            writer.pair.append(tokens, lengths, document_ends=document_ends)
        writer.origins.append_runs(open_origins(origins_path(prefix)).runs, reader.num_documents)


def document_runs(
    prefix: Path, reader: IndexedReader
) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[np.int32], npt.NDArray[np.int64]]]:
    """The documents of a pair in bounded runs: tokens, lengths of sequences, running count of sequences.

    The .bin is read, not mapped: pages of a map would count as memory of this process after they were copied.
    """
    first = 0
    while first < reader.num_documents:
        boundaries = np.array(reader.boundaries[first : first + _DOCUMENTS_AT_ONCE + 1])
        # Tokens before each of these sequences, including the one past the last.
        starts = np.full(len(boundaries), reader.num_tokens, np.int64)
        inside = boundaries < reader.num_sequences
        starts[inside] = reader.pointers[boundaries[inside]] // reader.dtype.itemsize
        stop = max(1, int(np.searchsorted(starts - starts[0], _TOKENS_AT_ONCE, side="right")) - 1)
        begin, end = int(boundaries[0]), int(boundaries[stop])
        count, offset = int(starts[stop] - starts[0]), int(starts[0]) * reader.dtype.itemsize
        with os_errors_named(f"reading {prefix}"):
            tokens = np.fromfile(bin_path(prefix), reader.dtype, count=count, offset=offset)
        yield tokens, reader.lengths[begin:end], boundaries[1 : stop + 1] - begin
        first += stop


def add_statistics(statistics: Sequence[Statistics]) -> Statistics:
    """The counts of all partitions together."""
    width = max(len(part.document_lengths) for part in statistics)
    lengths = np.zeros(width, np.int64)
    for part in statistics:
        # The list of an empty partition is empty; numpy would make it an array of floats.
        lengths[: len(part.document_lengths)] += np.array(part.document_lengths, np.int64)
    return Statistics(document_lengths=lengths.tolist(), text_bytes=sum(part.text_bytes or 0 for part in statistics))
