"""Packed samples in native order: whole documents fitted into rows, so that almost nothing is cut or padded.

The assignment of documents to rows is built once (packing.py) and cached (mdata/array_cache/cache.py); rows are
permuted in each epoch by the native order's permutation, or come in the order of the windows for validation and test.
The last token of a piece is followed by another document, unless the piece ends its row, so it has no loss; padding is
known by position. With document masks positions restart with each piece, and padding belongs to the last one.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mdata.array_cache.cache import Cache, in_memory
from mdata.array_cache.store import Arrays
from mdata.corpus.corpus import Corpus
from mdata.errors import UsageError
from mdata.order.native_order import OrderKey, StreamOrder
from mdata.progress import SILENT
from mdata.samples.base import NativelyOrdered, Piece, pieces_of_runs, samples_at
from mdata.samples.packing import PackingRule, key_of, packed
from mdata.samples.rows import Gathered, RowOptions
from mdata.util.arrays import Int64s, ranges
from mdata.util.pickling import PickledByArguments


class PackedSamples(PickledByArguments, NativelyOrdered):
    """The documents of one range of a corpus, packed into rows.

    Args:
        corpus: its sequences must be contiguous on disk.
        documents: the range [first, last).
        options: which masks and positions rows have; `mask_document_ends` is set: no document predicts another's
            tokens.
        rule: how documents are packed.
        seed: the run's seed.
        shuffle: false for validation and test: one pass, in the order of the windows.
        cache: keeps the rows; None: they are built in memory.

    Raises:
        UsageError: no document can be placed in a row.
    """

    def __init__(
        self,
        corpus: Corpus,
        documents: tuple[int, int],
        *,
        options: RowOptions,
        rule: PackingRule,
        seed: int,
        shuffle: bool = True,
        cache: Cache | None = None,
    ) -> None:
        assert options.mask_document_ends and options.sequence_length == rule.sequence_length, "rows of the same kind"
        self.corpus, self.documents, self.options, self.rule = corpus, documents, options, rule
        progress = SILENT if cache is None else cache.progress

        def make() -> Iterator[Arrays]:
            return packed(corpus, documents, rule=rule, progress=progress)

        key = key_of(corpus, documents, rule=rule)
        entries = 3 * (documents[1] - documents[0])
        arrays = (
            in_memory(make) if cache is None else cache.arrays(corpus.path, key, make=make, entries=lambda: entries)
        )
        self._ends, self._first, self._count = (arrays[name] for name in ("ends", "first", "count"))
        if not len(self._ends):
            raise UsageError(
                "no document can be packed",
                found=f"{documents[1] - documents[0]} documents for sequence length {rule.sequence_length}",
                expected="one of two tokens or more" + (", not longer than a row" if rule.longer == "drop" else ""),
                fix='a longer sequence length, or longer="cut"' if rule.longer == "drop" else "more text",
            )
        # One "token" per row: a stream order whose samples are single entries.
        self.order = StreamOrder(len(self._ends), 1, key=OrderKey(seed, corpus.id), extra_token=False, shuffle=shuffle)

    def gather(self, samples: Int64s, text: Int64s, *, out_rows: Int64s | None = None, threads: int = 1) -> Gathered:
        """Fill rows with samples; see `RowSamples`."""
        ends, pieces = self._pieces(self.order.starts(samples))
        first, count = self._first[pieces], self._count[pieces].astype(np.int64)
        self.corpus.gatherer.gather(first, count, ends=ends, out=text, out_rows=out_rows, threads=threads)
        # Where pieces begin, relative to their row; the first piece of a row is not a cut.
        after = np.cumsum(count)
        row_ends = after[ends - 1]
        row_starts = np.concatenate((np.zeros(1, np.int64), row_ends[:-1]))
        numbers = np.diff(ends, prepend=0)
        begins = after - count - np.repeat(row_starts, numbers)
        cuts = ends - np.arange(1, len(ends) + 1), begins[begins > 0].astype(np.int32)
        return Gathered(row_ends - row_starts, cuts)

    def pieces(self, sample: int) -> list[Piece]:
        """The sequences that a sample reads; see `Samples`."""
        _, pieces = self._pieces(self.order.starts([sample]))
        runs = zip(self._first[pieces].tolist(), self._count[pieces].tolist(), strict=True)
        return pieces_of_runs(self.corpus, runs, sequences=range(self.corpus.num_sequences))

    def samples_of(self, sequence: int, *, first: int, stop: int) -> list[int]:
        """Samples that read a token of a sequence; see `Samples`. Searches all pieces."""
        document = self.corpus.document_of(sequence)
        if not self.documents[0] <= document < self.documents[1]:
            raise IndexError(f"document {document} outside of {self.documents[0]} to {self.documents[1]}")
        start, end = self.corpus.token_bounds(sequence, sequence + 1)
        if start == end:
            return []
        pieces = np.flatnonzero((self._first < end) & (self._first + self._count > start))
        rows = np.unique(np.searchsorted(self._ends, pieces, side="right")).tolist()
        return sorted(sample for row in rows for sample in samples_at(self.order, row, first=first, stop=stop))

    def _pieces(self, rows: Int64s) -> tuple[Int64s, Int64s]:
        """The pieces of rows: (running count after each row, their numbers)."""
        stops = self._ends[rows]
        starts = np.where(rows > 0, self._ends[rows - 1], 0)
        return np.cumsum(stops - starts), ranges(starts, stops - starts)
