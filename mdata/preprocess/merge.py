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

from mdata.indexed import IndexedReader
from mdata.manifest import Statistics
from mdata.origins import open_origins
from mdata.preprocess.sinks import Sink, origins_path

_DOCUMENTS_AT_ONCE = 1 << 16
_TOKENS_AT_ONCE = 1 << 22


def merge_parts(parts: Sequence[Path], sink: Sink) -> None:
    """Append the pairs with these prefixes, and their origins, to a fresh sink.

    Raises:
        DamageError: a part is not what was written. ResourceError: the disk is full.
    """
    for prefix in parts:
        reader = IndexedReader(prefix)
        for tokens, lengths, document_ends in document_runs(reader):
            sink.writer.append(tokens, lengths, document_ends=document_ends)
        sink.origins.append_runs(open_origins(origins_path(prefix)).runs, reader.num_documents)


def document_runs(
    reader: IndexedReader,
) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[np.int32], npt.NDArray[np.int64]]]:
    """The documents of a pair in bounded runs: tokens, lengths of sequences, running count of sequences."""
    first = 0
    token_starts = np.concatenate((reader.pointers // reader.dtype.itemsize, [reader.num_tokens]))
    while first < reader.num_documents:
        window = reader.boundaries[first : first + _DOCUMENTS_AT_ONCE + 1]
        tokens_before = token_starts[window] - token_starts[window[0]]
        stop = max(1, int(np.searchsorted(tokens_before, _TOKENS_AT_ONCE, side="right")) - 1)
        begin, end = int(window[0]), int(window[stop])
        tokens = reader.tokens(int(token_starts[begin]), int(token_starts[end] - token_starts[begin]))
        yield tokens, reader.lengths[begin:end], window[1 : stop + 1] - begin
        first += stop


def added(statistics: Sequence[Statistics]) -> Statistics:
    """The counts of all parts together."""
    width = max(len(part.document_lengths) for part in statistics)
    lengths = np.zeros(width, np.int64)
    for part in statistics:
        lengths[: len(part.document_lengths)] += part.document_lengths
    return Statistics(document_lengths=lengths.tolist(), text_bytes=sum(part.text_bytes or 0 for part in statistics))
