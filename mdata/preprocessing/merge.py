"""Parts of one corpus, put together in their order: lengths, offsets, boundaries, origins and counts.

The tokens are copied through the same writer as ever, so hashes and checks are taken on the way; a merge that
was cut off begins again.
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
from mdata.preprocessing.corpus_writer import Sink, origins_path

_DOCUMENTS_AT_ONCE = 1 << 16
_TOKENS_AT_ONCE = 1 << 22


def merge_parts(parts: Sequence[Path], sink: Sink) -> None:
    """Append the pairs with these prefixes, and their origins, to a fresh sink.

    Raises:
        DamageError: a part is not what was written. ResourceError: the disk is full.
    """
    for prefix in parts:
        (reader,) = open_corpus(prefix).readers
        for tokens, lengths, document_ends in document_runs(prefix, reader):
            sink.writer.append(tokens, lengths, document_ends=document_ends)
        sink.origins.append_runs(open_origins(origins_path(prefix)).runs, reader.num_documents)


def document_runs(
    prefix: Path, reader: IndexedReader
) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[np.int32], npt.NDArray[np.int64]]]:
    """The documents of a pair in bounded runs: tokens, lengths of sequences, running count of sequences.

    The .bin is read, not mapped: pages of a map that was passed over would count as our memory.
    """
    first = 0
    while first < reader.num_documents:
        window = np.array(reader.boundaries[first : first + _DOCUMENTS_AT_ONCE + 1])
        starts = _token_starts(reader, window)
        stop = max(1, int(np.searchsorted(starts - starts[0], _TOKENS_AT_ONCE, side="right")) - 1)
        begin, end = int(window[0]), int(window[stop])
        with os_errors_named(f"reading {prefix}"):
            tokens = np.fromfile(
                bin_path(prefix),
                reader.dtype,
                count=int(starts[stop] - starts[0]),
                offset=int(starts[0]) * reader.dtype.itemsize,
            )
        yield tokens, reader.lengths[begin:end], window[1 : stop + 1] - begin
        first += stop


def _token_starts(reader: IndexedReader, sequences: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Tokens before each of these sequences, the one past the last included."""
    starts = np.full(len(sequences), reader.num_tokens, np.int64)
    inside = sequences < reader.num_sequences
    starts[inside] = reader.pointers[sequences[inside]] // reader.dtype.itemsize
    return starts


def added(statistics: Sequence[Statistics]) -> Statistics:
    """The counts of all parts together."""
    width = max(len(part.document_lengths) for part in statistics)
    lengths = np.zeros(width, np.int64)
    for part in statistics:
        # Of an empty part the list is empty, which numpy would take for floats.
        lengths[: len(part.document_lengths)] += np.array(part.document_lengths, np.int64)
    return Statistics(document_lengths=lengths.tolist(), text_bytes=sum(part.text_bytes or 0 for part in statistics))
