"""Packed samples in native order: whole documents fitted into rows, so that almost nothing is cut or padded.

Documents are assigned to rows by best-fit packing, in windows, as arrays that are built once and cached
(mdata/array_cache/cache.py). A row is one or more pieces; a piece is a run of tokens of one document. A document longer
than a row is left out, or cut into rows that share one token (the label of one row's last token is the first token of
the next), so that no label is lost. A piece of one token has nothing to predict and is left out. Windows are fixed
ranges of the corpus' document numbers, so changing the split changes rows only at its edges. The rows depend only on
the lengths: not on seed or epoch. Algorithm: mdata_cpp/packing.hpp; slow twin: tests/reference/packing.py.

Rows are permuted in each epoch by the native order's permutation, or come in the order of the windows for validation
and test. The last token of a piece is followed by another document, unless the piece ends its row, so it has no loss;
padding is known by position. With document masks positions restart with each piece, and padding belongs to the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mdata import _core
from mdata.array_cache.cache import Cache, in_memory
from mdata.array_cache.store import Arrays
from mdata.corpus.corpus import Corpus
from mdata.errors import UsageError, counted
from mdata.order.native_order import OrderKey, StreamOrder
from mdata.progress import SILENT, Progress
from mdata.samples.base import NativelyOrdered, SamplePiece, pieces_of_runs, samples_at
from mdata.samples.rows import Gathered, RowOptions
from mdata.samples.sample_options import LEAST, PACKING_VERSION, Longer
from mdata.util.arrays import Int64s, ranges
from mdata.util.pickling import PickledByArguments

WINDOW = 1 << 18
_MOST_TOKENS = 1 << 26


@dataclass(frozen=True, kw_only=True)
class PackingRule:
    """How documents are packed.

    Args:
        sequence_length: inputs of a row, S.
        extra_token: a row has one more token, the label of its last input.
        longer: documents longer than a row are "cut" into rows, or left out ("drop").
        window: number of documents that are fitted together.
    """

    sequence_length: int
    extra_token: bool = True
    longer: Longer = "cut"
    window: int = WINDOW

    def __post_init__(self) -> None:
        if not 1 <= self.sequence_length < _MOST_TOKENS:
            raise UsageError(
                "rows of this length cannot be packed",
                found=f"sequence length {self.sequence_length}",
                expected=f"1 to {_MOST_TOKENS - 1}",
            )

    @property
    def row_length(self) -> int:
        """Tokens of a row."""
        return self.sequence_length + int(self.extra_token)


def key_of(corpus: Corpus, documents: tuple[int, int], *, rule: PackingRule, name: str = "packed") -> dict[str, Any]:
    """Everything that decides the arrays; `name` is that of what is packed."""
    return {
        "name": name,
        "version": PACKING_VERSION,
        "corpus": corpus.id,
        "documents": list(documents),
        **asdict(rule),
    }


def packed(
    corpus: Corpus,
    documents: tuple[int, int],
    *,
    rule: PackingRule,
    progress: Progress,
    window: Callable[[Corpus, int, int, PackingRule], Arrays] | None = None,
) -> Iterator[Arrays]:
    """Rows of documents [first, last), window after window.

    Args:
        window: packs documents [begin, stop); None: each into pieces of its own.

    Yields:
        ends int64[r]: running count of pieces after each row, over all windows; first int64[p], count int32[p]: the
        tokens of each piece, by their numbers in the corpus.
    """
    first, last = documents
    progress.begin("packing", last - first, unit="documents")
    pieces = rows = 0
    for start in range(first - first % rule.window, max(last, first + 1), rule.window):
        begin, stop = max(start, first), min(start + rule.window, last)
        part = (window or _window)(corpus, begin, stop, rule)
        part["ends"] += pieces
        pieces += len(part["first"])
        rows += len(part["ends"])
        yield part
        progress.advance(stop - begin, rows=rows)
    progress.end()


def _window(corpus: Corpus, begin: int, stop: int, rule: PackingRule) -> Arrays:
    starts, lengths = corpus.gatherer.documents(np.arange(begin, stop))
    if rule.longer == "drop":
        lengths = np.where(lengths > rule.row_length, 0, lengths)
    ends, of, offsets, counts = fitted(lengths, rule)
    return {"ends": ends, "first": starts[of] + offsets, "count": counts}


def fitted(lengths: Int64s, rule: PackingRule) -> tuple[Int64s, Int64s, Int64s, npt.NDArray[np.int32]]:
    """Documents of these lengths in rows: (running count of pieces; document, offset in it and tokens of each)."""
    length, overlap = rule.row_length, int(rule.extra_token)
    # Without the extra token a row of one token is allowed; it has no loss either.
    least = min(LEAST, length)
    return _core.pack_documents(lengths, length, max(1, len(lengths)), overlap, least)


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

    # The name of the arrays, and how they are made; kinds of samples that pack other things have their own.
    packing, unit = "packed", "document"
    window: Callable[[Corpus, int, int, PackingRule], Arrays] = staticmethod(_window)

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
            return packed(corpus, documents, rule=rule, progress=progress, window=self.window)

        key = key_of(corpus, documents, rule=rule, name=self.packing)
        entries = 3 * (documents[1] - documents[0])
        arrays = (
            in_memory(make) if cache is None else cache.arrays(corpus.path, key, make=make, entries=lambda: entries)
        )
        self._ends, self._first, self._count = (arrays[name] for name in ("ends", "first", "count"))
        if not len(self._ends):
            raise UsageError(
                f"no {self.unit} can be packed",
                found=f"{counted(documents[1] - documents[0], self.unit)} for sequence length {rule.sequence_length}",
                expected="one of two tokens or more" + (", not longer than a row" if rule.longer == "drop" else ""),
                fix="more text"
                if rule.longer == "cut"
                else "a longer sequence length" + (', or longer="cut"' if self.unit == "document" else ""),
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
        row_starts = np.concatenate((np.zeros(min(1, len(ends)), np.int64), row_ends[:-1]))
        numbers = np.diff(ends, prepend=0)
        begins = after - count - np.repeat(row_starts, numbers)
        cuts = ends - np.arange(1, len(ends) + 1), begins[begins > 0].astype(np.int32)
        return Gathered(row_ends - row_starts, cuts)

    def pieces(self, sample: int) -> list[SamplePiece]:
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
