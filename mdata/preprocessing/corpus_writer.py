"""The ordered writer of one key and route: a pair in the making, its origins, and what is counted on the way.

A sink's state is what a journal needs to continue it; the tokens themselves are in the files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mdata.corpus.origins import OriginsState, OriginsWriter
from mdata.indexed.writer import IndexedWriter, WriterState
from mdata.manifest.types import Statistics
from mdata.preprocessing.encode import Encoded


def origins_path(prefix: Path) -> Path:
    """The sidecar with file and row of each document."""
    return prefix.with_name(prefix.name + ".origins")


class Sink:
    """Takes encoded documents in their order.

    Args:
        prefix: of the pair.
        dtype: numpy's name of the token type.
        step: rows between neighbouring documents, see `OriginsWriter`.
        resume: the state from which an earlier run is continued.

    Attributes:
        num_tokens: written so far.
    """

    def __init__(self, prefix: Path, dtype: str, *, step: int, resume: dict[str, Any] | None = None) -> None:
        self.prefix = prefix
        known = resume or {"writer": None, "origins": None, "document_lengths": [0] * 65, "text_bytes": 0}
        writer = WriterState(*known["writer"]) if resume else None
        origins = OriginsState(*known["origins"]) if resume else None
        self._document_lengths = np.array(known["document_lengths"], np.int64)
        self._text_bytes = int(known["text_bytes"])
        self.writer = IndexedWriter(prefix, np.dtype(dtype), resume=writer)
        try:
            self.origins = OriginsWriter(origins_path(prefix), step, resume=origins)
        except BaseException:
            if resume:
                self.writer.leave()
            else:
                self.writer.abandon()
            raise
        self.num_tokens = self.writer.state.bin_bytes // np.dtype(dtype).itemsize

    def take(self, encoded: Encoded, file: int, *, rows: npt.NDArray[np.int64]) -> None:
        """Append whole documents; `rows` (from 1) are where in the file they came from."""
        self.writer.append(encoded.tokens, encoded.lengths, document_ends=encoded.document_ends)
        self.origins.append(file, rows)
        self.num_tokens += len(encoded.tokens)
        self._document_lengths += length_histogram(encoded)
        self._text_bytes += int(encoded.text_bytes.sum())

    def checkpoint(self) -> dict[str, Any]:
        """Make everything lasting; the state from which `resume` continues, as JSON types."""
        return {
            "writer": self.writer.checkpoint(),
            "origins": self.origins.checkpoint(),
            "document_lengths": self._document_lengths.tolist(),
            "text_bytes": self._text_bytes,
        }

    def statistics(self) -> Statistics:
        """What was counted."""
        bins = np.trim_zeros(self._document_lengths, "b").tolist()
        return Statistics(document_lengths=bins, text_bytes=self._text_bytes)

    def close(self, *, keep: bool) -> None:
        """Stop writing; what has no final name is kept for a run that continues, or removed."""
        for part in (self.writer, self.origins):
            if keep:
                part.leave()
            else:
                part.abandon()


def length_histogram(encoded: Encoded) -> npt.NDArray[np.int64]:
    """Documents by length: int64[65], [0] without tokens, [k] with 2^(k-1) to 2^k - 1 tokens."""
    token_ends = np.concatenate(([0], np.cumsum(encoded.lengths)))
    lengths = np.diff(token_ends[encoded.document_ends], prepend=0)
    # frexp's exponent is the number of binary digits, exact below 2^53.
    return np.bincount(np.frexp(lengths.astype(np.float64))[1], minlength=65).astype(np.int64)
