"""Corpora whose tokens encode their position: token value = global position in the corpus.

A wrong token therefore shows where it was read. The files are real, written with struct only, so that they do not
depend on the writer under test.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mdata.indexed.gather import Gatherer
from mdata.indexed.reader import IndexedReader


def write_pair(
    prefix: Path,
    documents: Sequence[Sequence[int]],
    *,
    tokens: NDArray[np.integer] | None = None,
    code: int = 4,
) -> NDArray[np.integer]:
    """Write <prefix>.bin/.idx; `documents` are the lengths of the sequences of each document.

    Args:
        prefix: the two names without their endings.
        documents: [[3, 2], [], [4]] is two sequences, then an empty document, then one sequence.
        tokens: the ids; default their positions 0, 1, 2 ...
        code: the dtype code, 4 (int32) or 8 (uint16).

    Returns:
        The tokens.
    """
    lengths = [length for document in documents for length in document]
    boundaries = np.cumsum([0, *(len(document) for document in documents)])
    dtype = np.dtype({4: "<i4", 8: "<u2"}[code])
    tokens = np.arange(sum(lengths)) if tokens is None else tokens
    pointers = (np.cumsum([0, *lengths])[:-1] if lengths else np.empty(0, np.int64)) * dtype.itemsize
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(lengths), len(boundaries))
    body = [np.array(lengths, "<i4"), pointers.astype("<i8"), boundaries.astype("<i8")]
    Path(f"{prefix}.idx").write_bytes(header + b"".join(part.tobytes() for part in body))
    Path(f"{prefix}.bin").write_bytes(tokens.astype(dtype).tobytes())
    return tokens


class FileStream:
    """The least that samples need of a corpus (mdata.corpus.corpus.Corpus), over one pair; notes what is read."""

    def __init__(self, prefix: Path, *, id: str = "test corpus") -> None:
        self.id = id
        self.reader = IndexedReader(prefix)
        self.gatherer = Gatherer([self.reader])
        self.lengths = self.reader.lengths
        self.reads: list[tuple[int, int]] = []
        gather = self.gatherer.gather

        def noted(first: NDArray[np.int64], count: NDArray[np.int64], **options: object) -> None:
            self.reads += zip(first.tolist(), count.tolist(), strict=True)
            gather(first, count, **options)

        self.gatherer.gather = noted

    def token_bounds(self, first_sequence: int, last_sequence: int) -> tuple[int, int]:
        ends = np.concatenate(([0], np.cumsum(self.reader.lengths)))
        return int(ends[first_sequence]), int(ends[last_sequence])
