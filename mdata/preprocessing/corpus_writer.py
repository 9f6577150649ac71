"""The writer of one result: a pair, its origins, and counts.

The tokens are in files; the rest is a small state that a journal can record.
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


class CorpusWriter:
    """Appends encoded documents in the order of the input.

    Args:
        prefix: of the pair.
        dtype: numpy's name of the token type.
        step: rows between neighbouring documents, see `OriginsWriter`.
        resume: a state of `checkpoint` from which to continue.

    Attributes:
        pair: the writer of .bin and .idx.
        num_tokens: written so far.
    """

    def __init__(self, prefix: Path, dtype: str, *, step: int, resume: dict[str, Any] | None = None) -> None:
        self.prefix = prefix
        state = resume or {"writer": None, "origins": None, "document_lengths": [0] * 65, "text_bytes": 0}
        self._document_lengths = np.array(state["document_lengths"], np.int64)
        self._text_bytes = int(state["text_bytes"])
        self.pair = IndexedWriter(prefix, np.dtype(dtype), resume=WriterState(*state["writer"]) if resume else None)
        try:
            origins = OriginsState(*state["origins"]) if resume else None
            self.origins = OriginsWriter(origins_path(prefix), step, resume=origins)
        except BaseException:
            if resume:
                self.pair.close()
            else:
                self.pair.discard()
            raise
        self.num_tokens = self.pair.state.bin_bytes // np.dtype(dtype).itemsize

    def append(self, encoded: Encoded, file: int, *, rows: npt.NDArray[np.int64]) -> None:
        """Append whole documents; `rows` (from 1) are their rows in the file."""
        self.pair.append(encoded.tokens, encoded.lengths, document_ends=encoded.document_ends)
        self.origins.append(file, rows)
        self.num_tokens += len(encoded.tokens)
        self._document_lengths += length_histogram(encoded)
        self._text_bytes += int(encoded.text_bytes.sum())

    def checkpoint(self) -> dict[str, Any]:
        """Sync everything; returns the state from which `resume` continues, as JSON types."""
        return {
            "writer": self.pair.checkpoint(),
            "origins": self.origins.checkpoint(),
            "document_lengths": self._document_lengths.tolist(),
            "text_bytes": self._text_bytes,
        }

    def statistics(self) -> Statistics:
        """The counts for the manifest."""
        bins = np.trim_zeros(self._document_lengths, "b").tolist()
        return Statistics(document_lengths=bins, text_bytes=self._text_bytes)

    def close(self, *, keep: bool) -> None:
        """Stop writing; uncommitted files are kept for a run that continues, or removed."""
        for writer in (self.pair, self.origins):
            if keep:
                writer.close()
            else:
                writer.discard()


def length_histogram(encoded: Encoded) -> npt.NDArray[np.int64]:
    """Documents by length: int64[65], [0] without tokens, [k] with 2^(k-1) to 2^k - 1 tokens."""
    token_ends = np.concatenate(([0], np.cumsum(encoded.lengths)))
    lengths = np.diff(token_ends[encoded.document_ends], prepend=0)
    # frexp's exponent is the number of binary digits, exact below 2^53.
    return np.bincount(np.frexp(lengths.astype(np.float64))[1], minlength=65).astype(np.int64)
