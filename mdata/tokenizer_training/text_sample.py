"""A seeded sample of an input's text: chunks from the whole input, chosen only by their position.

Text is read in small chunks; each has a priority f(seed, file, chunk), and those of smallest priority that fit the
requested size are the sample. So the choice is spread over the whole input and is always the same, also for compressed
and plain files. Only the chosen chunks of plain files are read; compressed ones, parquet and standard input are read
through once, and chosen chunks are held in memory. Unusual: the size counts decompressed bytes of the input, not of the
texts in it. Not done: weighting files or documents. It knows nothing of tokenizers.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from typing import Literal, NamedTuple

from mdata.errors import BadInputError, counted
from mdata.progress import SILENT, Progress
from mdata.sources.chunk import Chunk, chunks, read_chunk
from mdata.sources.input_files import STDIN, SourceFile, check_unchanged
from mdata.sources.parse import parse
from mdata.sources.record_batch import BadRow, ReadSpec, in_members
from mdata.util.random_keys import derive_key

CHUNK_BYTES = 1 << 16
# A larger input has larger chunks, so that there are about a million of them.
_MOST_CHUNKS = 1 << 20


@dataclass(frozen=True)
class Sample:
    """Chunks of an input, in its order.

    Attributes:
        chunks: each with the rows before it in its file, if they were counted.
        sampled_bytes: of unpacked input.
        input_bytes: all of it.
    """

    chunks: tuple[tuple[Chunk, int | None], ...]
    sampled_bytes: int
    input_bytes: int
    chunk_bytes: int
    spec: ReadSpec

    def texts(
        self, on_error: Literal["stop", "skip"] = "stop", progress: Progress = SILENT, *, doing: str = "reading text"
    ) -> Iterator[str]:
        """Every sentence of every key, one after another; always the same.

        Raises:
            BadInputError: a bad row, with its file and row, unless bad rows are skipped.
            UsageError: a file cannot be read, or has changed.
        """
        bad = 0
        first: BadInputError | None = None
        progress.begin(doing, self.sampled_bytes, unit="B")
        for chunk, rows_before in self.chunks:
            batch = parse(chunk.source.format, read_chunk(chunk, self.spec), spec=self.spec)
            if batch.bad_rows and (on_error == "stop" or first is None):
                first = self._error(chunk, rows_before, in_members(batch.bad_rows, chunk.members)[0])
                if on_error == "stop":
                    raise first
            bad += len(batch.bad_rows)
            for column in batch.columns:
                yield from column.sentences
            progress.advance(_size(chunk))
        progress.end()
        for file in {chunk.source.path: chunk.source for chunk, _ in self.chunks}.values():
            check_unchanged(file)
        if first is not None:
            progress.note(f"skipped {counted(bad, 'row')} that cannot be used; the first: {str(first).splitlines()[0]}")

    def _error(self, chunk: Chunk, rows_before: int | None, bad_row: BadRow) -> BadInputError:
        if rows_before is None:
            rows_before = _rows_before(chunk, self.chunk_bytes, spec=self.spec)
        return bad_row.as_error(chunk.source.path, rows_before)


def take_sample(
    files: Sequence[SourceFile], spec: ReadSpec, *, sample_bytes: int, seed: int, progress: Progress = SILENT
) -> Sample:
    """Choose about this many bytes of the input, or all of a smaller one.

    Raises:
        BadInputError: compressed data or parquet is damaged.
        UsageError: a file cannot be read, or lacks columns that the spec names.
    """
    chunk_bytes = CHUNK_BYTES
    while sum(file.size_bytes for file in files) > chunk_bytes * _MOST_CHUNKS:
        chunk_bytes *= 2
    chosen = _Chosen(sample_bytes)
    input_bytes = rows = 0
    read = sum(file.size_bytes for file in files if file.streamed)
    if read:
        progress.begin("sampling packed input", read, unit="B")
    with closing(chunks(files, chunk_bytes, spec=spec)) as chunks_read:
        for chunk in chunks_read:
            input_bytes += _size(chunk)
            is_stdin = chunk.source.path == STDIN
            priority = derive_key("tokenizer sample", seed, chunk.file_number, chunk.number).draw
            chosen.offer(priority, chunk, rows if is_stdin else None)
            if is_stdin:  # it cannot be read a second time
                rows += parse(chunk.source.format, read_chunk(chunk, spec), spec=spec).rows
            if chunk.source.streamed:
                progress.advance(chunk.file_bytes)
    if read:
        progress.end()
    return Sample(chosen.in_order(), chosen.bytes, input_bytes, chunk_bytes, spec)


class _Candidate(NamedTuple):
    """A chunk in a heap that gives the largest priority first, and of equal ones the earliest."""

    minus_priority: int
    number: int
    chunk: Chunk
    rows_before: int | None


class _Chosen:
    """The chunks of smallest priority that fit together, of those offered so far; at least one."""

    def __init__(self, most_bytes: int) -> None:
        self.bytes = 0
        self._most_bytes = most_bytes
        self._limit: int | None = None
        self._heap: list[_Candidate] = []
        self._numbers = count()

    def offer(self, priority: int, chunk: Chunk, rows_before: int | None) -> None:
        """Add a chunk, and drop others to make room."""
        if self._limit is not None and priority >= self._limit:
            return  # an earlier chunk did not fit any more
        heapq.heappush(self._heap, _Candidate(-priority, next(self._numbers), chunk, rows_before))
        self.bytes += _size(chunk)
        while self.bytes > self._most_bytes and len(self._heap) > 1:
            dropped = heapq.heappop(self._heap)
            self._limit = -dropped.minus_priority
            self.bytes -= _size(dropped.chunk)

    def in_order(self) -> tuple[tuple[Chunk, int | None], ...]:
        """The chunks in the order of the input."""
        chosen = [(candidate.chunk, candidate.rows_before) for candidate in self._heap]
        return tuple(sorted(chosen, key=lambda item: (item[0].file_number, item[0].number)))


def _size(chunk: Chunk) -> int:
    """Bytes of unpacked input; of parquet and Arrow, whose places are rows, of the columns that are read."""
    return len(chunk.data or b"") if chunk.source.format in ("parquet", "arrow") else chunk.stop - chunk.start


def _rows_before(chunk: Chunk, chunk_bytes: int, *, spec: ReadSpec) -> int:
    """The rows of a file before a chunk, by reading it from its start."""
    rows = 0
    with closing(chunks([chunk.source], chunk_bytes, spec=spec)) as chunks_read:
        for earlier in chunks_read:
            if earlier.number == chunk.number:
                break
            rows += parse(chunk.source.format, read_chunk(earlier, spec), spec=spec).rows
    return rows
