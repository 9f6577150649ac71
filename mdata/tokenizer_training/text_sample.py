"""A seeded sample of an input's text: pieces from all over it, chosen by their place, never by what was read before.

Text is taken in small pieces; each has a priority f(seed, file, piece), and those of smallest priority that fit the
wished size are the sample. So the choice is spread over the whole input and is the same every time, and for packed
files the same as for plain ones. Of plain files only the chosen pieces are read; packed ones, parquet and standard
input are read through once, chosen pieces being held. Unusual: the size counts bytes of the input, unpacked, not of
the texts in it. Not done: weighing files or documents.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from typing import Literal

from mdata.errors import BadInputError
from mdata.progress import SILENT, Progress
from mdata.sources.chunk import Piece, pieces, read_piece
from mdata.sources.input_files import STDIN, SourceFile, check_unchanged
from mdata.sources.parse import parse
from mdata.sources.record_batch import Problem, ReadSpec
from mdata.util.random_keys import derive_key

PIECE_BYTES = 1 << 16
# Of a larger input the pieces are larger, so that there are about a million of them.
_MOST_PIECES = 1 << 20


@dataclass(frozen=True)
class Sample:
    """Pieces of an input, in its order.

    Attributes:
        pieces: each with the rows before it in its file, where somebody counted them.
        sampled_bytes: of unpacked input.
        input_bytes: all of it.
    """

    pieces: tuple[tuple[Piece, int | None], ...]
    sampled_bytes: int
    input_bytes: int
    piece_bytes: int
    spec: ReadSpec

    def texts(
        self, on_error: Literal["stop", "skip"] = "stop", progress: Progress = SILENT, *, doing: str = "reading text"
    ) -> Iterator[str]:
        """Every sentence of every key, one after another; the same each time.

        Raises:
            BadInputError: a record that cannot be taken, with its file and row, unless they are passed over.
            UsageError: a file cannot be read, or was changed meanwhile.
        """
        bad = 0
        first: BadInputError | None = None
        progress.begin(doing, self.sampled_bytes, unit="B")
        for piece, rows_before in self.pieces:
            batch = parse(piece.source.format, read_piece(piece, self.spec), spec=self.spec)
            if batch.problems and (on_error == "stop" or first is None):
                first = self._error(piece, rows_before, batch.problems[0])
                if on_error == "stop":
                    raise first
            bad += len(batch.problems)
            for column in batch.columns:
                yield from column.sentences
            progress.advance(_size(piece))
        progress.end()
        for file in {piece.source.path: piece.source for piece, _ in self.pieces}.values():
            check_unchanged(file)
        if first is not None:
            progress.note(f"passed over {bad:,} rows that cannot be taken; the first: {str(first).splitlines()[0]}")

    def _error(self, piece: Piece, rows_before: int | None, problem: Problem) -> BadInputError:
        if rows_before is None:
            rows_before = _rows_before(piece, self.piece_bytes, spec=self.spec)
        return problem.as_error(piece.source.path, rows_before)


def take_sample(
    files: Sequence[SourceFile], spec: ReadSpec, *, sample_bytes: int, seed: int, progress: Progress = SILENT
) -> Sample:
    """Choose about so many bytes of the input, or all of a smaller one.

    Raises:
        BadInputError: packed data or parquet is damaged.
        UsageError: a file cannot be read, or does not hold what the spec asks for.
    """
    piece_bytes = PIECE_BYTES
    while sum(file.size_bytes for file in files) > piece_bytes * _MOST_PIECES:
        piece_bytes *= 2
    chosen = _Chosen(sample_bytes)
    input_bytes = rows = 0
    read = sum(file.size_bytes for file in files if file.streamed)
    if read:
        progress.begin("sampling packed input", read, unit="B")
    with closing(pieces(files, piece_bytes, spec=spec)) as found:
        for piece in found:
            input_bytes += _size(piece)
            is_stdin = piece.source.path == STDIN
            priority = derive_key("tokenizer sample", seed, piece.file_number, piece.number).draw
            chosen.offer(priority, piece, rows if is_stdin else None)
            if is_stdin:  # nobody can count them again
                rows += parse(piece.source.format, read_piece(piece, spec), spec=spec).rows
            if piece.source.streamed:
                progress.advance(piece.file_bytes)
    if read:
        progress.end()
    return Sample(chosen.in_order(), chosen.bytes, input_bytes, piece_bytes, spec)


class _Chosen:
    """The pieces of smallest priority that fit together, of those offered so far; the smallest one always."""

    def __init__(self, most_bytes: int) -> None:
        self.bytes = 0
        self._most_bytes = most_bytes
        self._limit: int | None = None
        self._heap: list[tuple[int, int, Piece, int | None]] = []
        self._tie = count()

    def offer(self, priority: int, piece: Piece, rows_before: int | None) -> None:
        """Take a piece, and let others go for it."""
        if self._limit is not None and priority >= self._limit:
            return  # a piece before it did not fit any more
        heapq.heappush(self._heap, (-priority, next(self._tie), piece, rows_before))
        self.bytes += _size(piece)
        while self.bytes > self._most_bytes and len(self._heap) > 1:
            largest, _, gone, _ = heapq.heappop(self._heap)
            self._limit = -largest
            self.bytes -= _size(gone)

    def in_order(self) -> tuple[tuple[Piece, int | None], ...]:
        """The pieces in the order of the input."""
        found = [(piece, rows) for _, _, piece, rows in self._heap]
        return tuple(sorted(found, key=lambda one: (one[0].file_number, one[0].number)))


def _size(piece: Piece) -> int:
    """Bytes of unpacked input; of parquet, whose places are rows, of the columns that are read."""
    return len(piece.data or b"") if piece.source.format == "parquet" else piece.stop - piece.start


def _rows_before(piece: Piece, piece_bytes: int, *, spec: ReadSpec) -> int:
    """The rows of a file before a piece, by reading it from its start."""
    rows = 0
    with closing(pieces([piece.source], piece_bytes, spec=spec)) as found:
        for earlier in found:
            if earlier.number == piece.number:
                break
            rows += parse(piece.source.format, read_piece(earlier, spec), spec=spec).rows
    return rows
